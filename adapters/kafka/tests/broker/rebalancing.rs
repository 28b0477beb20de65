//! Partitions that leave, and come back.

use std::collections::HashSet;
use std::time::Duration;

use onlyonce::source::{Delivery, Incoming, Source};
use onlyonce_kafka::Kafka;
use tokio::time::{Instant, timeout};

use super::harness::{SOON, Topic, ack, bodies, closes, lost, receipts, some, soon, started};

const EAGER: &str = "range";
const COOPERATIVE: &str = "cooperative-sticky";

async fn member(topic: &Topic, strategy: &str, drain: Duration) -> Kafka {
    let builder = topic
        .source()
        .set("partition.assignment.strategy", strategy)
        .drain_limit(drain);
    started(builder, 16).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_waits_for_what_runs_before_it_leaves() {
    let Some(topic) = Topic::of(1).await else { return };
    topic.fill(0, 6, &[]).await;
    let mut source = member(&topic, EAGER, SOON).await;
    let mut taken = some(&mut source, 4).await;
    let rival = async { topic.rival(EAGER).await };
    let drained = async {
        assert_eq!(lost(&mut source).await, receipts(&taken));
        // What a consumer does: the unstarted are dropped at once, the running are let finish.
        let unstarted: Vec<_> = taken.split_off(2).into_iter().map(|d| d.release(None)).collect();
        source.settle(unstarted).await.unwrap();
        for delivery in taken {
            // The rival has come, and the whole group waits for us.
            assert_eq!(topic.group_state().await, "PreparingRebalance");
            assert_eq!(topic.committed(0).await.unwrap_or(0), 0);
            ack(&mut source, [delivery]).await;
        }
    };
    let (rival, ()) = tokio::join!(rival, drained);
    // The rival has joined, so the partition has left, and before that what ran was committed.
    assert_eq!(topic.committed(0).await, Some(2));
    rival.leave().await;
    let rest = some_in_the_end(&mut source, 4).await;
    assert_eq!(bodies(&rest), ["3", "4", "5", "6"]);
    ack(&mut source, rest).await;
    closes(source).await;
    assert_eq!(topic.committed(0).await, Some(6));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_done_after_the_partition_left_changes_nothing() {
    let Some(topic) = Topic::of(1).await else { return };
    topic.fill(0, 4, &[]).await;
    let mut source = member(&topic, EAGER, Duration::from_millis(200)).await;
    let held = some(&mut source, 4).await;
    let rival = topic.rival(EAGER).await;
    ack(&mut source, held).await;
    rival.leave().await;
    let again = some_in_the_end(&mut source, 4).await;
    assert_eq!(
        bodies(&again),
        ["1", "2", "3", "4"],
        "they come to the next owner"
    );
    // What was acked late would be committed with the first of these.
    let mut first = again;
    let rest = first.split_off(1);
    ack(&mut source, first).await;
    topic.becomes_committed(0, 1).await;
    ack(&mut source, rest).await;
    closes(source).await;
    assert_eq!(topic.committed(0).await, Some(4));
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_that_stay_are_not_disturbed_by_one_that_leaves() {
    let Some(topic) = Topic::of(2).await else { return };
    for partition in 0..2 {
        topic.fill(partition, 3, &[]).await;
    }
    let mut source = member(&topic, COOPERATIVE, Duration::from_millis(200)).await;
    let held = some(&mut source, 6).await;
    let rival = topic.rival(COOPERATIVE).await;
    let gone: HashSet<_> = soon(async {
        loop {
            if let Incoming::Lost(gone) = source.receive(0).await.unwrap() {
                return gone;
            }
        }
    })
    .await
    .into_iter()
    .collect();
    assert_eq!(gone.len(), 3, "one of two partitions left");
    let (left, kept): (Vec<_>, Vec<_>) = held.into_iter().partition(|d| gone.contains(&d.receipt));
    let of = |deliveries: &[Delivery]| deliveries[0].event.origin.detail.clone();
    let number = |detail: &str| i32::from(detail.starts_with("partition=1"));
    let (left_number, kept_number) = (number(&of(&left)), number(&of(&kept)));
    ack(&mut source, kept).await;
    topic.becomes_committed(kept_number, 3).await;
    ack(&mut source, left).await;
    // It would be committed with what the partition that stayed brings next.
    topic.fill(kept_number, 1, &[]).await;
    let next = some(&mut source, 1).await;
    ack(&mut source, next).await;
    topic.becomes_committed(kept_number, 4).await;
    assert_eq!(topic.committed(left_number).await.unwrap_or(0), 0);
    rival.leave().await;
    let again = some_in_the_end(&mut source, 3).await;
    ack(&mut source, again).await;
    closes(source).await;
    assert_eq!(topic.committed(left_number).await, Some(3));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_leaves_and_returns_keeps_flowing() {
    for strategy in [EAGER, COOPERATIVE] {
        let Some(topic) = Topic::of(3).await else { return };
        let mut source = member(&topic, strategy, Duration::from_millis(100)).await;
        let total = 300;
        let feeding = async {
            for round in 0..5 {
                for partition in 0..3 {
                    topic.fill(partition, total / 15, &["a", "b"]).await;
                }
                topic.rival(strategy).await.leave().await;
                println!("{strategy}: round {round}");
            }
        };
        let mut done = HashSet::new();
        let working = async {
            while done.len() < total {
                match soon(source.receive(7)).await.unwrap() {
                    Incoming::Deliveries(deliveries) => {
                        done.extend(deliveries.iter().map(|d| d.event.origin.detail.to_string()));
                        ack(&mut source, deliveries).await;
                    }
                    Incoming::Lost(_) => {}
                    other => panic!("{other:?}"),
                }
            }
        };
        tokio::join!(feeding, working);
        closes(source).await;
        for partition in 0..3 {
            assert_eq!(
                topic.committed(partition).await,
                Some(100),
                "{strategy}, partition {partition}"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_left_while_all_was_paused_flows_when_it_returns() {
    for strategy in [EAGER, COOPERATIVE] {
        let Some(topic) = Topic::of(2).await else { return };
        let mut source = member(&topic, strategy, Duration::from_millis(100)).await;
        let mut done = HashSet::new();
        for partition in [0, 1] {
            topic.fill(partition, 1, &[]).await;
        }
        until_done(&mut source, &mut done, 2).await;
        source.pause().await.unwrap();
        let rival = topic.rival(strategy).await;
        // The next one asks for records again, and what stayed flows.
        for partition in [0, 1] {
            topic.fill(partition, 5, &[]).await;
        }
        until_done(&mut source, &mut done, 7).await;
        rival.leave().await;
        until_done(&mut source, &mut done, 12).await;
        closes(source).await;
        for partition in [0, 1] {
            assert_eq!(
                topic.committed(partition).await,
                Some(6),
                "{strategy}, {partition}"
            );
        }
    }
}

/// Takes and acks until so many different events are done, whatever leaves meanwhile.
async fn until_done(source: &mut Kafka, done: &mut HashSet<String>, count: usize) {
    while done.len() < count {
        match soon(source.receive(1)).await.unwrap() {
            Incoming::Deliveries(deliveries) => {
                done.extend(deliveries.iter().map(|d| d.event.origin.detail.to_string()));
                ack(source, deliveries).await;
            }
            Incoming::Lost(_) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_static_member_comes_back_to_its_partitions() {
    let Some(topic) = Topic::of(1).await else { return };
    topic.fill(0, 2, &[]).await;
    let builder = || {
        topic
            .source()
            .static_member("worker-1")
            .set("session.timeout.ms", "30000")
    };
    let mut source = started(builder(), 4).await;
    let first = some(&mut source, 1).await;
    ack(&mut source, first).await;
    closes(source).await;
    // Its place is kept for 30 s, and it need not wait for that.
    let since = Instant::now();
    let mut source = started(builder(), 4).await;
    let second = some(&mut source, 1).await;
    assert_eq!(bodies(&second), ["2"]);
    assert!(since.elapsed() < Duration::from_secs(15), "{:?}", since.elapsed());

    let mut other = started(builder(), 4).await;
    let error = timeout(SOON, async {
        loop {
            match source.receive(1).await {
                Err(error) => return error,
                Ok(Incoming::Lost(_)) => {}
                Ok(other) => panic!("{other:?}"),
            }
        }
    })
    .await
    .unwrap();
    assert!(
        error.is_fatal() && error.to_string().contains("static_member"),
        "{error}"
    );
    let again = some(&mut other, 1).await;
    ack(&mut other, again).await;
    closes(other).await;
}

/// How long a group takes at most to notice that somebody left.
const CALM: Duration = Duration::from_secs(1);

/// As `some`, of a source whose group has not come to rest: what it loses meanwhile comes again.
async fn some_in_the_end(source: &mut Kafka, count: usize) -> Vec<Delivery> {
    let mut all: Vec<Delivery> = Vec::new();
    loop {
        let incoming = match count - all.len() {
            0 => match timeout(CALM, source.receive(0)).await {
                Err(_) => return all,
                Ok(incoming) => incoming,
            },
            missing => soon(source.receive(missing)).await,
        };
        match incoming.unwrap() {
            Incoming::Deliveries(deliveries) => all.extend(deliveries),
            Incoming::Lost(lost) => {
                let (gone, kept): (Vec<_>, Vec<_>) = all
                    .into_iter()
                    .partition(|delivery: &Delivery| lost.contains(&delivery.receipt));
                all = kept;
                // As a consumer does with what it has not started: nobody has to wait for it.
                let gone = gone.into_iter().map(|delivery| delivery.release(None)).collect();
                source.settle(gone).await.unwrap();
            }
            other => panic!("{other:?} instead of deliveries"),
        }
    }
}
