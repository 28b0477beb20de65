//! The order of a stop: take no more, give back, let finish, make sure that the broker heard, close.

use std::time::Duration;

use onlyonce::source::{Incoming, Redelivery, Source};
use onlyonce_rabbitmq::RabbitMq;

use super::harness::*;
use super::proxy::Proxy;

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_gives_back_at_once_and_then_lets_the_running_finish() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    queue.fill(100).await;
    let mut source = queue.started(100).await;
    queue.becomes_ready(0).await;
    let running = some(&mut source, 3).await;
    source.stop().await.unwrap();
    queue.becomes_ready(97).await;
    assert_eq!(queue.consumers().await, 0);
    nothing(&mut source, Duration::from_millis(200)).await;
    ack(&mut source, running).await;
    closes(source).await;
    assert_eq!(queue.ready().await, 97);

    let mut next = queue.started(100).await;
    let rest = some(&mut next, 97).await;
    assert!(
        rest.iter().all(|d| d.redelivery == Redelivery::Yes),
        "they had been out"
    );
    let mut numbers: Vec<u32> = rest.iter().map(|d| body(d).parse().unwrap()).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, (4..=100).collect::<Vec<_>>(), "1 to 3 are done");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_arrives_while_the_consumer_is_cancelled_is_given_back() {
    let Some(queue) = Queue::quorum().await else {
        return;
    };
    let queue = &queue;
    let mut source = queue.started(500).await;
    let total = 1000;
    let (enough, is_enough) = tokio::sync::oneshot::channel();
    let publishing = async move {
        let mut enough = Some(enough);
        for n in 0..total {
            queue.publish(n.to_string().as_bytes(), Default::default()).await;
            if n == 200 {
                enough.take().unwrap().send(()).unwrap();
            }
        }
    };
    let stopping = async move {
        is_enough.await.unwrap();
        let some = some(&mut source, 10).await;
        source.stop().await.unwrap();
        ack(&mut source, some).await;
        closes(source).await;
    };
    soon(async { tokio::join!(publishing, stopping) }).await;
    queue.becomes_ready(total - 10).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_released_one_that_waits_goes_back_at_the_stop() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    queue.fill(1).await;
    let mut source = queue.started(1).await;
    let delivery = one(&mut source).await;
    release(&mut source, delivery, Some(Duration::from_secs(600))).await;
    source.stop().await.unwrap();
    closes(source).await;
    queue.becomes_ready(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_acks_are_with_the_broker_when_the_source_is_closed() {
    let Some(queue) = Queue::quorum().await else {
        return;
    };
    for _ in 0..5 {
        queue.fill(100).await;
        let mut source = queue.started(100).await;
        let all = some(&mut source, 100).await;
        source.stop().await.unwrap();
        ack(&mut source, all).await;
        closes(source).await;
        queue.becomes_ready(0).await;
        let mut next = queue.started(1).await;
        nothing(&mut next, Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_without_a_broker_ends() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let proxy = Proxy::before(&queue.url).await;
    queue.fill(2).await;
    let mut source = started(RabbitMq::queue(&proxy.url, &queue.name), 2).await;
    let running = some(&mut source, 2).await;
    proxy.cut();
    soon(source.stop()).await.unwrap();
    assert_eq!(lost(&mut source).await, receipts(&running));
    ack(&mut source, running).await;
    closes(source).await;
    queue.becomes_ready(2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_while_connecting_ends() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let proxy = Proxy::before(&queue.url).await;
    let mut source = started(RabbitMq::queue(&proxy.url, &queue.name), 2).await;
    proxy.cut();
    nothing(&mut source, Duration::from_millis(500)).await;
    soon(source.stop()).await.unwrap();
    closes(source).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_falls_silent_during_the_stop_does_not_hold_it_for_ever() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let proxy = Proxy::before(&queue.url).await;
    queue.fill(1).await;
    let builder = RabbitMq::queue(&proxy.url, &queue.name).connect_timeout(Duration::from_secs(1));
    let mut source = started(builder, 1).await;
    let running = one(&mut source).await;
    proxy.freeze();
    soon(source.stop()).await.unwrap();
    let incoming = soon(source.receive(1)).await.unwrap();
    assert!(matches!(incoming, Incoming::Lost(_)), "{incoming:?}");
    ack(&mut source, [running]).await;
    closes(source).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_is_dropped_gives_everything_back() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    queue.fill(10).await;
    let mut source = queue.started(5).await;
    let _running = some(&mut source, 2).await;
    drop(source);
    queue.becomes_ready(10).await;
}
