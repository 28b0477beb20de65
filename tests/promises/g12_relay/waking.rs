//! A relay learns of new rows by a signal; looking by itself is underneath. In these tests it would look once a day.

use std::time::Duration;

use onlyonce::store::{PostgresStore, Relaying, Waking};
use onlyonce::testing::MemoryPublisher;

use super::{quick, row, start};
use crate::running::until;
use crate::stage::{Stage, TestStore, soon};

on_each_store!(
    within_a_process_a_signal_is_enough,
    without_any_signal_it_looks_by_itself
);

const DAY: Duration = Duration::from_secs(86_400);

/// A relay that has nothing to do and will not look again by itself.
async fn idle<S: TestStore + Relaying>(
    stage: &Stage<S>,
    store: S,
    publisher: &MemoryPublisher,
) -> crate::running::Running {
    let relay = start(quick(store, publisher).poll(DAY));
    stage.write_rows([row("first", None)]).await;
    // What it finds when it gets its lanes, or by the signal.
    until("the first row", async || {
        stage.store.signal("default").raise();
        let _ = stage.store.tell("default").await;
        stage.rows("true").await == 0
    })
    .await;
    relay
}

async fn within_a_process_a_signal_is_enough<S: TestStore + Relaying>(stage: Stage<S>) {
    let publisher = MemoryPublisher::new();
    let relay = idle(&stage, stage.store.clone(), &publisher).await;
    for n in 0..20 {
        stage.write_rows([row(format!("n{n}"), None)]).await;
        stage.store.signal("default").raise();
        let arrives = publisher.until(|publisher| publisher.arrived().len() == n + 2);
        soon("the row", arrives).await;
    }
    relay.stop().await;
    stage.end().await;
}

async fn without_any_signal_it_looks_by_itself<S: TestStore + Relaying>(stage: Stage<S>) {
    let publisher = MemoryPublisher::new();
    let relay = start(quick(S::another(&stage).await, &publisher));
    for n in 0..5 {
        stage.write_rows([row(format!("n{n}"), None)]).await;
        let arrives = publisher.until(|publisher| publisher.arrived().len() == n + 1);
        soon("the row", arrives).await;
    }
    relay.stop().await;
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_process_is_told_by_the_database() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let publisher = MemoryPublisher::new();
    let relay = idle(&stage, PostgresStore::another(&stage).await, &publisher).await;
    for n in 0..20 {
        stage.write_rows([row(format!("n{n}"), None)]).await;
        stage.store.tell("default").await.unwrap();
        let arrives = publisher.until(|publisher| publisher.arrived().len() == n + 2);
        soon("the row", arrives).await;
    }
    relay.stop().await;
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_told_while_nobody_could_listen_is_found_afterwards() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let publisher = MemoryPublisher::new();
    let relay = idle(&stage, PostgresStore::another(&stage).await, &publisher).await;
    stage.write_rows([row("missed", None)]).await;
    let cut = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                WHERE query LIKE 'LISTEN%onlyonce_outbox%'";
    stage.number(cut, "").await;
    let arrives = publisher.until(|publisher| publisher.arrived().len() == 2);
    soon("the row", arrives).await;
    relay.stop().await;
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_a_pooler_nobody_listens_and_everything_goes_out() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let publisher = MemoryPublisher::new();
    let store = stage.options().behind_pooler().connect().unwrap();
    assert!(store.listen("default").await.is_err());
    let relay = start(quick(store, &publisher));
    stage
        .write_rows((0..10).map(|n| row(format!("n{n}"), None)))
        .await;
    stage.all_sent().await;
    relay.stop().await;
    stage.end().await;
}
