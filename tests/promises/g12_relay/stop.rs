//! A stop publishes nothing more, waits for what is on its way, writes it down and leaves the lanes to others.

use std::sync::Arc;
use std::time::Duration;

use onlyonce::store::Relaying;
use onlyonce::testing::{MemoryPublisher, Reply};
use tokio::sync::Notify;

use super::{quick, row, start};
use crate::running::until;
use crate::stage::{Stage, TestStore, soon};

on_each_store!(
    what_is_on_its_way_is_waited_for_and_marked,
    what_does_not_end_in_time_goes_out_again,
    a_dropped_run_stops_in_the_background,
);

async fn lanes_held<S: TestStore + Relaying>(stage: &Stage<S>) -> i64 {
    let of = |table: &str| format!("SELECT count(*) FROM {table} WHERE owner IS NOT NULL");
    stage
        .number(&of("{s}.outbox_lanes"), &of("onlyonce_outbox_lanes"))
        .await
}

/// A publisher that answers at the signal.
fn waiting() -> (MemoryPublisher, Arc<Notify>) {
    let (publisher, answer) = (MemoryPublisher::new(), Arc::new(Notify::new()));
    let held = answer.clone();
    publisher.replies(move |_, _| Reply::confirm().once(held.clone()));
    (publisher, answer)
}

async fn what_is_on_its_way_is_waited_for_and_marked<S: TestStore + Relaying>(stage: Stage<S>) {
    let (publisher, answer) = waiting();
    let rows = (0..3).flat_map(|n| ["a", "b"].map(|key| row(format!("{key}-{n}"), Some(key))));
    stage.write_rows(rows).await;
    let relay = start(quick(stage.store.clone(), &publisher));
    soon(
        "both keys",
        publisher.until(|publisher| publisher.in_flight() == 2),
    )
    .await;
    relay.tell();
    let stopping = tokio::spawn(relay.stop());
    // Still its own while it waits, longer than a lease.
    tokio::time::sleep(Duration::from_millis(1200)).await;
    assert_eq!((lanes_held(&stage).await, publisher.is_stopped()), (64, false));
    answer.notify_waiters();
    soon("the end", stopping).await.unwrap();
    assert_eq!(publisher.ids().len(), 2, "nothing more goes, though it could");
    assert_eq!(stage.rows("true").await, 4);
    assert_eq!((lanes_held(&stage).await, publisher.is_stopped()), (0, true));
    stage.end().await;
}

async fn what_does_not_end_in_time_goes_out_again<S: TestStore + Relaying>(stage: Stage<S>) {
    let (publisher, _) = waiting();
    stage.write_rows([row("a-0", Some("a"))]).await;
    let relay = start(quick(stage.store.clone(), &publisher).stop_timeout(Duration::from_millis(100)));
    soon(
        "the row on its way",
        publisher.until(|publisher| publisher.in_flight() == 1),
    )
    .await;
    relay.stop().await;
    assert_eq!((publisher.in_flight(), stage.rows("attempts = 0").await), (0, 1));
    publisher.replies(|_, _| Reply::confirm());
    let relay = start(quick(stage.store.clone(), &publisher));
    stage.all_sent().await;
    assert_eq!(publisher.copies("a-0"), 2);
    relay.stop().await;
    stage.end().await;
}

async fn a_dropped_run_stops_in_the_background<S: TestStore + Relaying>(stage: Stage<S>) {
    let publisher = MemoryPublisher::new();
    let relay = start(quick(stage.store.clone(), &publisher));
    until("its lanes", async || lanes_held(&stage).await == 64).await;
    relay.drop_it().await;
    until("the lanes to be free", async || lanes_held(&stage).await == 0).await;
    stage.end().await;
}
