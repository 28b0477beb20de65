//! While the database is away: nothing is taken, and what was not started is given back.

use std::time::Duration;

use onlyonce::source::Source;
use onlyonce_rabbitmq::RabbitMq;

use super::harness::*;
use super::proxy::{Frame, Proxy};

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_gives_back_what_was_not_handed_out_once() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let proxy = Proxy::before(&queue.url).await;
    queue.fill(50).await;
    let mut source = started(RabbitMq::queue(&proxy.url, &queue.name), 20).await;
    queue.becomes_ready(30).await;
    let three = some(&mut source, 3).await;
    source.pause().await.unwrap();
    queue.becomes_ready(47).await;
    assert_eq!(queue.consumers().await, 0);
    let frames = proxy.frames();
    assert_eq!(frames.len(), 17, "each once: {frames:?}");
    assert!(
        frames.iter().all(|f| matches!(
            f,
            Frame::Nack {
                requeue: true,
                multiple: false,
                ..
            }
        )),
        "{frames:?}"
    );

    ack(&mut source, three).await;
    proxy.frames_until(|frames| frames.len() == 18).await;

    let rest = some(&mut source, 20).await;
    assert_eq!(queue.consumers().await, 1);
    ack(&mut source, rest).await;
    for _ in 0..27 {
        let delivery = one(&mut source).await;
        ack(&mut source, [delivery]).await;
    }
    source.stop().await.unwrap();
    closes(source).await;
    assert_eq!(queue.ready().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn pausing_twice_and_pausing_while_the_broker_is_away_is_fine() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let proxy = Proxy::before(&queue.url).await;
    queue.fill(5).await;
    let mut source = started(RabbitMq::queue(&proxy.url, &queue.name), 5).await;
    source.pause().await.unwrap();
    source.pause().await.unwrap();
    queue.becomes_ready(5).await;
    let two = some(&mut source, 2).await;
    proxy.cut();
    soon(source.pause()).await.unwrap();
    assert_eq!(lost(&mut source).await, receipts(&two));
    soon(source.pause()).await.unwrap();
    proxy.mend();
    let mut all = bodies(&some(&mut source, 5).await);
    all.sort();
    assert_eq!(all, ["1", "2", "3", "4", "5"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_source_takes_nothing_that_is_published() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let mut source = queue.started(5).await;
    source.pause().await.unwrap();
    queue.fill(5).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(queue.ready().await, 5);
    assert_eq!(some(&mut source, 5).await.len(), 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_room_only_what_was_lost_is_reported() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let proxy = Proxy::before(&queue.url).await;
    queue.fill(5).await;
    let mut source = started(RabbitMq::queue(&proxy.url, &queue.name), 5).await;
    let two = some(&mut source, 2).await;
    let nothing = tokio::time::timeout(Duration::from_millis(200), source.receive(0)).await;
    assert!(
        nothing.is_err(),
        "three deliveries wait in the buffer: {nothing:?}"
    );
    proxy.cut();
    match soon(source.receive(0)).await.unwrap() {
        onlyonce::source::Incoming::Lost(lost) => assert_eq!(lost, receipts(&two)),
        other => panic!("{other:?}"),
    }
    proxy.mend();
    let mut all = bodies(&some(&mut source, 5).await);
    all.sort();
    assert_eq!(all, ["1", "2", "3", "4", "5"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_that_dies_during_a_pause_is_not_subscribed_again_before_there_is_room() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let proxy = Proxy::before(&queue.url).await;
    queue.fill(3).await;
    let mut source = started(RabbitMq::queue(&proxy.url, &queue.name), 5).await;
    source.pause().await.unwrap();
    proxy.cut();
    let dies = async {
        while source.health().connected {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    soon(dies).await;
    proxy.mend();
    let nothing = tokio::time::timeout(Duration::from_secs(1), source.receive(0)).await;
    assert!(nothing.is_err(), "{nothing:?}");
    assert_eq!(queue.consumers().await, 0);
    assert_eq!(some(&mut source, 3).await.len(), 3);
}
