//! Deletions, renewals and releases, as SQS sees them.

use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use onlyonce::source::{Redelivery, Source};

use super::harness::*;
use super::proxy::Proxy;

#[tokio::test(flavor = "multi_thread")]
async fn acks_go_out_ten_to_a_call() {
    let Some(queue) = Queue::standard().await else {
        return;
    };
    let proxy = Proxy::before(&queue.endpoint).await;
    queue.fill("", 45).await;
    let mut source = started(queue.source_at(&proxy.url), 45).await;
    let deliveries = some(&mut source, 45).await;
    ack(&mut source, deliveries).await;
    queue.becomes(0, 0).await;
    let calls = proxy.calls("DeleteMessageBatch");
    assert!((5..=6).contains(&calls), "{calls} calls for 45 messages");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_in_hand_stays_so_for_longer_than_its_visibility() {
    let Some(queue) = Queue::standard().await else {
        return;
    };
    queue.fill("", 10).await;
    let mut source = queue.started(10).await;
    // Asked for, and nobody waits for them any more.
    assert!(source.receive(10).now_or_never().is_none());
    queue.becomes(0, 10).await;
    // Four in hand, and six that wait: both are renewed.
    let mut held = some(&mut source, 4).await;
    let mut other = queue.started(10).await;
    nothing(&mut other, VISIBILITY * 5 / 2).await;
    held.extend(some(&mut source, 6).await);
    assert!(held.iter().all(|d| d.redelivery == Redelivery::No));
    ack(&mut source, held).await;
    queue.becomes(0, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_counts_as_a_delivery_and_waits_as_long_as_it_should() {
    let Some(queue) = Queue::standard().await else {
        return;
    };
    queue.fill("", 1).await;
    let mut source = queue.started(4).await;
    for (before, after) in [(Redelivery::No, 0), (Redelivery::Times(1), 2)] {
        let delivery = some(&mut source, 1).await.remove(0);
        assert_eq!(delivery.redelivery, before);
        release(&mut source, delivery, Some(Duration::from_secs(after))).await;
    }
    let released = Instant::now();
    let delivery = some(&mut source, 1).await.remove(0);
    assert_eq!(delivery.redelivery, Redelivery::Times(2));
    let waited = released.elapsed();
    assert!(
        waited + Duration::from_millis(20) >= Duration::from_secs(2),
        "{waited:?}"
    );
    ack(&mut source, [delivery]).await;
    queue.becomes(0, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_takes_back_the_rest_of_its_group_and_no_other() {
    let Some(queue) = Queue::fifo().await else {
        return;
    };
    queue.fill("a", 3).await;
    queue.fill("b", 2).await;
    let mut source = queue.started(10).await;
    let deliveries = some(&mut source, 5).await;
    let (mut a, b): (Vec<_>, Vec<_>) = deliveries
        .into_iter()
        .partition(|d| d.event.key.as_deref() == Some(b"a"));
    assert_eq!(bodies(&a), ["1", "2", "3"]);
    let behind = receipts(&a[1..]);
    release(&mut source, a.remove(0), Some(Duration::from_secs(1))).await;
    assert_eq!(lost(&mut source).await, behind);
    ack(&mut source, a).await; // Void: they come again.
    ack(&mut source, b).await;
    let again = some(&mut source, 3).await;
    assert_eq!(bodies(&again), ["1", "2", "3"], "in their order, after the delay");
    ack(&mut source, again).await;
    queue.becomes(0, 0).await;
    source.stop().await.unwrap();
    closes(source).await;
}
