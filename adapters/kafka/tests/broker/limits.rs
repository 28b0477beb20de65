//! Slow handlers, full buffers and events that hang.

use std::time::Duration;

use onlyonce::source::{Incoming, Source};

use super::harness::{Topic, ack, bodies, closes, nothing, some, soon, started};

#[tokio::test(flavor = "multi_thread")]
async fn an_event_that_hangs_lets_others_go_on_up_to_the_window() {
    let Some(topic) = Topic::of(2).await else { return };
    topic.fill(0, 60, &[]).await;
    let mut source = started(topic.source().partition_window(20, 1 << 20), 8).await;
    let mut hangs = some(&mut source, 1).await;
    for _ in 0..19 {
        let taken = some(&mut source, 1).await;
        ack(&mut source, taken).await;
    }
    nothing(&mut source, Duration::from_millis(500)).await;
    assert_eq!(source.health().stuck, 1);
    // The other partition has a window of its own.
    topic.fill(1, 1, &[]).await;
    let other = some(&mut source, 1).await;
    assert!(other[0].event.origin.detail.starts_with("partition=1"));
    ack(&mut source, other).await;
    assert_eq!(topic.committed(0).await.unwrap_or(0), 0);
    ack(&mut source, hangs.pop()).await;
    let mut rest = Vec::new();
    while rest.len() < 40 {
        let taken = some(&mut source, 1).await;
        rest.extend(bodies(&taken));
        ack(&mut source, taken).await;
    }
    assert_eq!(rest, (21..=60).map(|n| n.to_string()).collect::<Vec<_>>());
    // The thread that polls hears of the last ones a moment later.
    soon(async {
        while source.health().stuck > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    closes(source).await;
    assert_eq!(topic.committed(0).await, Some(60));
}

#[tokio::test(flavor = "multi_thread")]
async fn large_events_count_by_their_bytes() {
    let Some(topic) = Topic::of(1).await else { return };
    topic.fill(0, 30, &[]).await;
    let mut source = started(topic.source().partition_window(1000, 15), 8).await;
    // Nine bodies of one byte and three of two.
    let hangs = some(&mut source, 12).await;
    nothing(&mut source, Duration::from_millis(500)).await;
    ack(&mut source, hangs).await;
    let taken = some(&mut source, 7).await;
    assert_eq!(bodies(&taken)[0], "13");
    drop(source);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_may_take_longer_than_the_poll_interval() {
    let Some(topic) = Topic::of(1).await else { return };
    topic.fill(0, 700, &[]).await;
    let builder = topic
        .source()
        .set("max.poll.interval.ms", "6000")
        .drain_limit(Duration::from_secs(1));
    // More than fits into the buffer waits, so that everything is paused meanwhile.
    let mut source = started(builder, 2).await;
    let slow = some(&mut source, 2).await;
    if let Ok(incoming) = tokio::time::timeout(Duration::from_secs(9), source.receive(0)).await {
        panic!("{incoming:?}, though only a handler was slow");
    }
    ack(&mut source, slow).await;
    topic.becomes_committed(0, 2).await;
    source.pause().await.unwrap();
    if let Ok(incoming) = tokio::time::timeout(Duration::from_secs(8), source.receive(0)).await {
        panic!("{incoming:?}, though the source was only paused");
    }
    let mut rest = Vec::new();
    while rest.len() < 698 {
        match soon(source.receive(100)).await.unwrap() {
            Incoming::Deliveries(taken) => {
                rest.extend(bodies(&taken));
                ack(&mut source, taken).await;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(rest, (3..=700).map(|n| n.to_string()).collect::<Vec<_>>());
    closes(source).await;
    assert_eq!(topic.committed(0).await, Some(700));
}
