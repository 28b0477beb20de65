//! What is published and cannot be marked: it is not published again, and nothing else is.

use std::collections::HashMap;
use std::time::Duration;

use onlyonce::store::postgres::PostgresOptions;
use onlyonce::store::{PostgresStore, Relaying, Waking};
use onlyonce::testing::MemoryPublisher;

use super::{quick, row, start};
use crate::running::{Process, until};
use crate::stage::{Stage, TestStore, soon};

on_each_store!(sent_rows_are_kept_for_a_while_by_choice);

const REVOKE: &str = "REVOKE UPDATE, DELETE ON {s}.outbox FROM {s}_role";
const GRANT: &str = "GRANT UPDATE, DELETE ON {s}.outbox TO {s}_role";

fn copies(publisher: &MemoryPublisher) -> HashMap<String, usize> {
    let mut copies = HashMap::new();
    for id in publisher.ids() {
        *copies.entry(id).or_default() += 1;
    }
    copies
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_marked_is_published_once_and_nothing_after_it() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let (_, url) = stage.role().await;
    let store = PostgresOptions::new(url).schema(&stage.schema).connect().unwrap();
    let publisher = MemoryPublisher::new();
    let relay = start(quick(store, &publisher).in_flight(20));
    until("health", async || relay.health.ready().ok).await;
    stage.execute(REVOKE, "").await;
    stage
        .write_rows((0..100).map(|n| row(format!("n{n}"), None)))
        .await;
    until("the reason", async || {
        let ready = relay.health.ready().to_string();
        ready.contains("published events could not be marked; nothing is published")
    })
    .await;
    let published = publisher.calls();
    assert!(
        (1..=20).contains(&published),
        "{published} of which the table knows nothing"
    );
    stage
        .write_rows((100..110).map(|n| row(format!("n{n}"), None)))
        .await;
    stage.store.tell("default").await.unwrap();
    // More than one try to mark them, each with a pause before it.
    tokio::time::sleep(Duration::from_millis(700)).await;
    assert_eq!(
        publisher.calls(),
        published,
        "nothing new while marks are failing"
    );
    stage.execute(GRANT, "").await;
    stage.all_sent().await;
    assert_eq!(publisher.arrived().len(), 110, "each of them once");
    until("health", async || relay.health.ready().ok).await;
    relay.stop().await;
    stage.drop_role().await;
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_death_with_unmarked_rows_sends_them_once_more_and_not_oftener() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let (_, url) = stage.role().await;
    let publisher = MemoryPublisher::new();
    let life = {
        let (url, schema, publisher) = (url.clone(), stage.schema.clone(), publisher.clone());
        async move {
            let store = PostgresOptions::new(url).schema(schema).connect().unwrap();
            let relay = quick(store, &publisher).in_flight(30).build().unwrap();
            let _ = relay.run_until(std::future::pending()).await;
        }
    };
    let process = Process::of(life);
    until("its lanes", async || {
        let held = "SELECT count(*) FROM {s}.outbox_lanes WHERE owner IS NOT NULL";
        stage.number(held, "").await == 64
    })
    .await;
    stage.execute(REVOKE, "").await;
    stage
        .write_rows((0..100).map(|n| row(format!("n{n}"), None)))
        .await;
    soon(
        "the first ones",
        publisher.until(|publisher| publisher.arrived().len() >= 10),
    )
    .await;
    process.die();
    stage.execute(GRANT, "").await;
    let store = PostgresOptions::new(url).schema(&stage.schema).connect().unwrap();
    let relay = start(quick(store, &publisher));
    stage.all_sent().await;
    let copies = copies(&publisher);
    assert_eq!(copies.len(), 100);
    assert!(copies.values().all(|copies| *copies <= 2), "{copies:?}");
    let twice = copies.values().filter(|copies| **copies == 2).count();
    assert!(twice <= 30, "{twice}: no more than were on their way");
    relay.stop().await;
    stage.drop_role().await;
    stage.end().await;
}

async fn sent_rows_are_kept_for_a_while_by_choice<S: TestStore + Relaying>(stage: Stage<S>) {
    let publisher = MemoryPublisher::new();
    stage
        .write_rows((0..10).map(|n| row(format!("n{n}"), None)))
        .await;
    let kept = quick(stage.store.clone(), &publisher).keep_sent(Duration::from_secs(3600));
    let supervisor = onlyonce::Supervisor::builder()
        .relay(kept.build().unwrap())
        .purge_every(Duration::from_millis(100))
        .build()
        .unwrap();
    let relay = crate::running::Running::of(supervisor);
    stage.all_sent().await;
    assert_eq!(
        (stage.rows("sent_at IS NOT NULL").await, publisher.arrived().len()),
        (10, 10)
    );
    stage
        .execute(
            "UPDATE {s}.outbox SET sent_at = sent_at - interval '2 hours'",
            "UPDATE onlyonce_outbox SET sent_at = sent_at - 7200000000",
        )
        .await;
    until("the purge", async || stage.rows("true").await == 0).await;
    relay.stop().await;
    stage.end().await;
}

/// A table that cannot be read is a reason not to be ready, and is asked for no oftener than it would be anyway.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_read_is_said_and_goes_out_later() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let (_, url) = stage.role().await;
    let store = PostgresOptions::new(url).schema(&stage.schema).connect().unwrap();
    let publisher = MemoryPublisher::new();
    let relay = start(quick(store, &publisher));
    until("health", async || relay.health.ready().ok).await;
    stage
        .execute("REVOKE SELECT ON {s}.outbox FROM {s}_role", "")
        .await;
    stage
        .write_rows((0..10).map(|n| row(format!("n{n}"), None)))
        .await;
    until("the reason", async || {
        let ready = relay.health.ready().to_string();
        ready.contains("outgoing events cannot be read") && ready.contains("permission denied")
    })
    .await;
    assert_eq!(publisher.calls(), 0);
    stage.execute("GRANT SELECT ON {s}.outbox TO {s}_role", "").await;
    stage.all_sent().await;
    until("health", async || relay.health.ready().ok).await;
    relay.stop().await;
    stage.drop_role().await;
    stage.end().await;
}
