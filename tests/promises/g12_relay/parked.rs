//! What a person does about parked events, while the relay runs.

use std::time::Duration;

use onlyonce::Outbox;
use onlyonce::publisher::PublishErrorKind;
use onlyonce::store::Relaying;
use onlyonce::testing::{MemoryPublisher, Reply};

use super::{firsts, quick, row, start};
use crate::running::{Running, until};
use crate::stage::{Stage, TestStore};

on_each_store!(
    a_replayed_event_keeps_its_id_and_lets_its_key_go_on,
    a_discarded_event_is_never_sent_and_its_key_goes_on,
    a_replay_that_is_refused_is_parked_again_and_counted,
    what_is_not_parked_is_left_alone,
    of_a_replay_and_a_discard_at_once_each_event_gets_one,
);

/// A relay that parks what is refused at once, and that finds out what it is not told of only after the test.
fn start_to_park<S: TestStore + Relaying>(stage: &Stage<S>, publisher: &MemoryPublisher) -> Running {
    let relay = quick(stage.store.clone(), publisher).attempts(1);
    start(relay.poll(Duration::from_secs(600)))
}

/// Refuses the events of these ids.
fn refuses(publisher: &MemoryPublisher, refused: &'static [&'static str]) {
    publisher.replies(move |message, _| {
        if refused.contains(&message.event_id.as_str()) {
            Reply::fail(PublishErrorKind::Refused)
        } else {
            Reply::confirm()
        }
    });
}

/// The numbers of the rows that are parked, once there are so many.
async fn parked<S: TestStore + Relaying>(stage: &Stage<S>, count: usize) -> Vec<i64> {
    let outbox = Outbox::new(stage.store.clone());
    let mut rows = Vec::new();
    until("the rows to be parked", async || {
        rows = outbox.parked(0, 100).await.unwrap();
        rows.len() == count
    })
    .await;
    rows.iter().map(|row| row.id).collect()
}

async fn a_replayed_event_keeps_its_id_and_lets_its_key_go_on<S: TestStore + Relaying>(stage: Stage<S>) {
    let publisher = MemoryPublisher::new();
    refuses(&publisher, &["a-1"]);
    let ids = ["a-0", "a-1", "a-2", "a-3", "b-0"];
    stage.write_rows(ids.map(|id| row(id, Some(&id[..1])))).await;
    let relay = start_to_park(&stage, &publisher);
    let outbox = Outbox::new(stage.store.clone());
    let rows = parked(&stage, 1).await;
    until("the marks", async || stage.rows("true").await == 3).await;
    assert_eq!(firsts(&publisher, "a"), [0]);
    let listed = &outbox.parked(0, 100).await.unwrap()[0];
    assert_eq!(
        (listed.event_id.as_str(), listed.key.as_deref(), listed.attempts),
        ("a-1", Some(&b"a"[..]), 1)
    );
    assert!(listed.error.contains("Refused"), "{}", listed.error);

    refuses(&publisher, &[]);
    assert_eq!(outbox.replay(&rows).await.unwrap(), rows);
    stage.all_sent().await;
    assert_eq!(firsts(&publisher, "a"), [0, 1, 2, 3]);
    let arrived = publisher.arrived();
    let replays = |id: &str| arrived.iter().find(|m| m.event_id == id).unwrap().replays;
    assert_eq!(["a-0", "a-1", "a-2"].map(replays), [0, 1, 0]);
    assert_eq!(publisher.copies("a-1"), 2, "refused once, sent once");
    assert_eq!(outbox.replay(&rows).await.unwrap(), [] as [i64; 0]);
    relay.stop().await;
    stage.end().await;
}

async fn a_discarded_event_is_never_sent_and_its_key_goes_on<S: TestStore + Relaying>(stage: Stage<S>) {
    let publisher = MemoryPublisher::new();
    refuses(&publisher, &["a-0"]);
    stage
        .write_rows(["a-0", "a-1", "a-2"].map(|id| row(id, Some("a"))))
        .await;
    let relay = start_to_park(&stage, &publisher);
    let outbox = Outbox::new(stage.store.clone());
    let rows = parked(&stage, 1).await;
    refuses(&publisher, &[]);
    assert_eq!(outbox.discard(&rows).await.unwrap(), rows);
    stage.all_sent().await;
    assert_eq!(publisher.ids(), ["a-1", "a-2"]);
    assert_eq!(outbox.replay(&rows).await.unwrap(), [] as [i64; 0], "it is gone");
    relay.stop().await;
    // A relay that starts afterwards does not find it either.
    let relay = start_to_park(&stage, &publisher);
    stage.write_rows([row("a-3", Some("a"))]).await;
    outbox.wake();
    stage.all_sent().await;
    assert_eq!(publisher.ids(), ["a-1", "a-2", "a-3"]);
    relay.stop().await;
    stage.end().await;
}

async fn a_replay_that_is_refused_is_parked_again_and_counted<S: TestStore + Relaying>(stage: Stage<S>) {
    let publisher = MemoryPublisher::new();
    refuses(&publisher, &["a-0"]);
    stage
        .write_rows(["a-0", "a-1"].map(|id| row(id, Some("a"))))
        .await;
    let relay = start_to_park(&stage, &publisher);
    let outbox = Outbox::new(stage.store.clone());
    let rows = parked(&stage, 1).await;
    for copy in 2..4 {
        assert_eq!(outbox.replay(&rows).await.unwrap(), rows);
        until("the next refusal", async || publisher.copies("a-0") == copy).await;
        assert_eq!(parked(&stage, 1).await, rows);
        assert_eq!(
            stage.rows("event_id = 'a-0' AND attempts = 1").await,
            1,
            "counted anew"
        );
        assert_eq!(publisher.arrived().len(), 0, "its key still waits");
    }
    refuses(&publisher, &[]);
    outbox.replay(&rows).await.unwrap();
    stage.all_sent().await;
    let arrived = publisher.arrived();
    let arrived: Vec<_> = arrived.iter().map(|m| (m.event_id.as_str(), m.replays)).collect();
    assert_eq!(arrived, [("a-0", 3), ("a-1", 0)]);
    relay.stop().await;
    stage.end().await;
}

async fn what_is_not_parked_is_left_alone<S: TestStore + Relaying>(stage: Stage<S>) {
    let publisher = MemoryPublisher::new();
    let answer = std::sync::Arc::new(tokio::sync::Notify::new());
    let held = answer.clone();
    publisher.replies(move |_, _| Reply::confirm().once(held.clone()));
    stage
        .write_rows(["a-0", "a-1"].map(|id| row(id, Some("a"))))
        .await;
    let relay = start_to_park(&stage, &publisher);
    until("the first on its way", async || publisher.in_flight() == 1).await;
    let outbox = Outbox::new(stage.store.clone());
    let all: Vec<i64> = stage.outgoing().await.iter().map(|row| row.id).collect();
    assert_eq!(outbox.replay(&all).await.unwrap(), [] as [i64; 0]);
    assert_eq!(outbox.discard(&all).await.unwrap(), [] as [i64; 0]);
    publisher.replies(|_, _| Reply::confirm());
    answer.notify_waiters();
    stage.all_sent().await;
    let arrived = publisher.arrived();
    let arrived: Vec<_> = arrived.iter().map(|m| (m.event_id.as_str(), m.replays)).collect();
    assert_eq!(arrived, [("a-0", 0), ("a-1", 0)]);
    relay.stop().await;
    stage.end().await;
}

async fn of_a_replay_and_a_discard_at_once_each_event_gets_one<S: TestStore + Relaying>(stage: Stage<S>) {
    let publisher = MemoryPublisher::new();
    publisher.replies(|_, _| Reply::fail(PublishErrorKind::Invalid));
    stage
        .write_rows((0..40).map(|n| row(format!("n{n}"), None)))
        .await;
    let relay = start_to_park(&stage, &publisher);
    let rows = parked(&stage, 40).await;
    publisher.replies(|_, _| Reply::confirm());
    let outbox = Outbox::new(stage.store.clone());
    let (mut sent, mut gone) = (Vec::new(), Vec::new());
    // In halves, so that they meet in the middle.
    for half in rows.chunks(20) {
        let (replayed, discarded) = tokio::join!(outbox.replay(half), outbox.discard(half));
        sent.extend(replayed.unwrap());
        gone.extend(discarded.unwrap());
    }
    stage.all_sent().await;
    assert_eq!(
        publisher.arrived().len(),
        sent.len(),
        "and none that was discarded"
    );
    let mut each = [sent, gone].concat();
    each.sort_unstable();
    assert_eq!(each, rows, "each of them once");
    relay.stop().await;
    stage.end().await;
}
