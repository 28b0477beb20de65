//! The order of a stop: take no more, give back, let finish, make sure that SQS heard, close.

use std::time::{Duration, Instant};

use onlyonce::source::Source;

use super::harness::*;
use super::proxy::Proxy;

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_gives_back_at_once_and_then_lets_the_running_finish() {
    let Some(queue) = Queue::standard().await else {
        return;
    };
    queue.fill("", 30).await;
    let mut source = queue.started(30).await;
    let mut running = some(&mut source, 3).await;
    // What waits here was asked for with the room of that call.
    running.extend(some(&mut source, 3).await);
    source.stop().await.unwrap();
    queue.becomes(24, 6).await;
    nothing(&mut source, Duration::from_millis(200)).await;
    ack(&mut source, running).await;
    closes(source).await;
    queue.becomes(24, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_call_brings_after_the_stop_is_given_back() {
    let Some(queue) = Queue::standard().await else {
        return;
    };
    let proxy = Proxy::before(&queue.endpoint).await;
    let mut source = started(queue.source_at(&proxy.url), 10).await;
    nothing(&mut source, Duration::from_millis(200)).await;
    assert_eq!(proxy.calls("ReceiveMessage"), 1, "one call waits");
    let began = Instant::now();
    source.stop().await.unwrap();
    queue.fill("", 3).await;
    closes(source).await;
    assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
    assert_eq!(proxy.calls("ReceiveMessage"), 1, "and no other after it");
    queue.becomes(3, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_does_not_wait_for_ever_for_an_endpoint_that_is_silent() {
    let Some(queue) = Queue::standard().await else {
        return;
    };
    let proxy = Proxy::before(&queue.endpoint).await;
    let builder = queue.source_at(&proxy.url).call_timeout(Duration::from_secs(60));
    let mut source = started(builder, 10).await;
    nothing(&mut source, Duration::from_millis(200)).await;
    proxy.freeze();
    let began = Instant::now();
    source.stop().await.unwrap();
    closes(source).await;
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}
