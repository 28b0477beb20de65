//! Lanes go from one instance to another, and whoever had them before writes nothing any more.

use std::sync::Arc;
use std::time::Duration;

use onlyonce::publisher::PublishErrorKind;
use onlyonce::store::{PostgresStore, Relaying};
use onlyonce::testing::{MemoryPublisher, Reply};
use tokio::sync::Notify;

use super::{quick, row, start};
use crate::proxy::Proxy;
use crate::running::{Process, until};
use crate::stage::{Stage, TestStore, soon};

on_each_store!(
    lanes_are_shared_and_handed_over_at_a_stop,
    the_lanes_of_a_dead_instance_are_taken_when_their_lease_is_over,
);

async fn owners<S: TestStore + Relaying>(stage: &Stage<S>) -> i64 {
    let of = |table: &str| format!("SELECT count(DISTINCT owner) FROM {table} WHERE owner IS NOT NULL");
    stage
        .number(&of("{s}.outbox_lanes"), &of("onlyonce_outbox_lanes"))
        .await
}

/// How many lanes the owners of lanes have, the one with the fewest.
async fn fewest<S: TestStore + Relaying>(stage: &Stage<S>) -> i64 {
    let of = |table: &str| {
        format!(
            "SELECT COALESCE(min(n), 0) FROM (SELECT count(*) AS n FROM {table} WHERE owner IS NOT NULL GROUP BY owner) x"
        )
    };
    stage
        .number(&of("{s}.outbox_lanes"), &of("onlyonce_outbox_lanes"))
        .await
}

async fn lanes_are_shared_and_handed_over_at_a_stop<S: TestStore + Relaying>(stage: Stage<S>) {
    let publisher = MemoryPublisher::new();
    let mut relays = Vec::new();
    for (instances, share) in [(1, 64), (2, 32), (3, 20)] {
        relays.push(start(quick(S::another(&stage).await, &publisher)));
        until("equal shares", async || {
            owners(&stage).await == instances && fewest(&stage).await == share
        })
        .await;
    }
    for left in [2, 1] {
        relays.remove(0).stop().await;
        assert!(
            owners(&stage).await <= left,
            "who stops gives up its lanes before it ends"
        );
        until("equal shares", async || fewest(&stage).await == 64 / left).await;
    }
    stage
        .write_rows((0..100).map(|n| row(format!("n{n}"), None)))
        .await;
    stage.all_sent().await;
    relays.remove(0).stop().await;
    assert_eq!(owners(&stage).await, 0);
    stage.end().await;
}

async fn the_lanes_of_a_dead_instance_are_taken_when_their_lease_is_over<S: TestStore + Relaying>(
    stage: Stage<S>,
) {
    let publisher = MemoryPublisher::new();
    let (opens, to) = (S::another(&stage), publisher.clone());
    let process = Process::of(async move {
        let relay = quick(opens.await, &to).build().unwrap();
        let _ = relay.run_until(std::future::pending()).await;
    });
    until("its lanes", async || owners(&stage).await == 1).await;
    process.die();
    stage
        .write_rows((0..100).map(|n| row(format!("n{n}"), None)))
        .await;
    let relay = start(quick(stage.store.clone(), &publisher));
    stage.all_sent().await;
    let fences = |table: &str| format!("SELECT min(fence) FROM {table}");
    let fence = stage
        .number(&fences("{s}.outbox_lanes"), &fences("onlyonce_outbox_lanes"))
        .await;
    assert!(fence >= 2, "{fence}");
    relay.stop().await;
    stage.end().await;
}

/// One instance loses its database while a row is on its way; another takes over; then the first learns that the
/// row was refused. That is not for it to write down.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_refusal_by_the_old_owner_is_not_written() {
    let Some(proxy) = Proxy::start().await else { return };
    let stage = PostgresStore::fresh().await.unwrap();
    let (slow, other) = (MemoryPublisher::new(), MemoryPublisher::new());
    let answer = Arc::new(Notify::new());
    let held = answer.clone();
    slow.replies(move |_, _| Reply::fail(PublishErrorKind::Invalid).once(held.clone()));
    stage.write_rows([row("a-0", Some("a"))]).await;
    let old = start(quick(proxy.store(&stage.schema), &slow));
    soon(
        "the row on its way",
        slow.until(|publisher| publisher.in_flight() == 1),
    )
    .await;
    proxy.freeze();

    other.go_down();
    let new = start(quick(stage.store.clone(), &other));
    soon(
        "the other instance's try",
        other.until(|publisher| publisher.calls() > 0),
    )
    .await;
    answer.notify_one();
    soon(
        "the late answer",
        slow.until(|publisher| publisher.in_flight() == 0),
    )
    .await;
    proxy.thaw();
    // Its stop writes down what there is to write.
    old.stop().await;
    assert_eq!(slow.copies("a-0"), 1);
    assert_eq!(stage.rows("attempts = 0 AND parked_at IS NULL").await, 1);
    other.recover();
    stage.all_sent().await;
    assert_eq!(other.ids(), ["a-0"]);
    new.stop().await;
    stage.end().await;
}

/// With its database gone, an instance stops publishing before its lanes can be another's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_cannot_renew_its_lanes_stops_publishing_in_time() {
    let Some(proxy) = Proxy::start().await else { return };
    let stage = PostgresStore::fresh().await.unwrap();
    let publisher = MemoryPublisher::new();
    publisher.replies(|_, _| Reply::confirm().after(Duration::from_millis(20)));
    // One long chain: there is always something in hand that could go.
    stage
        .write_rows((0..2000).map(|n| row(format!("a-{n}"), Some("a"))))
        .await;
    let relay = start(quick(proxy.store(&stage.schema), &publisher).in_flight(4000));
    soon(
        "the first rows",
        publisher.until(|publisher| publisher.arrived().len() >= 10),
    )
    .await;
    assert!(relay.health.ready().ok);
    proxy.freeze();
    until("the reason", async || {
        relay
            .health
            .ready()
            .to_string()
            .contains("its lanes could not be renewed in time")
    })
    .await;
    let calls = publisher.calls();
    let free = "SELECT count(*) FROM {s}.outbox_lanes WHERE leased_until < now()";
    until("the end of the lease", async || {
        stage.number(free, "").await == 64
    })
    .await;
    assert_eq!(publisher.calls(), calls);
    proxy.thaw();
    soon("progress", publisher.until(|publisher| publisher.calls() > calls)).await;
    relay.stop().await;
    stage.end().await;
}
