//! What happens when SQS does not answer, refuses, or is not there.

use std::time::{Duration, Instant};

use onlyonce::source::{Incoming, Plan, Redelivery, Source};
use onlyonce_sqs::{Connection, Sqs};

use super::harness::*;
use super::proxy::Proxy;

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_that_accepts_and_never_answers_has_its_time_limit() {
    let Some(queue) = Queue::standard().await else {
        return;
    };
    let proxy = Proxy::before(&queue.endpoint).await;
    proxy.freeze();
    let builder = queue
        .source_at(&proxy.url)
        .call_timeout(Duration::from_millis(500));
    let mut source = builder.build().unwrap();
    let began = Instant::now();
    let error = soon(source.start(&Plan::for_window("tests", 4)))
        .await
        .unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    assert!(
        !error.is_fatal() && error.to_string().contains("no answer within 500ms"),
        "{error}"
    );
    assert_eq!(source.health().problem, Some(error.to_string()));
    proxy.mend();
    soon(source.start(&Plan::for_window("tests", 4))).await.unwrap();
    assert!(source.health().connected);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_renewed_is_lost_and_comes_again() {
    let Some(queue) = Queue::standard().await else {
        return;
    };
    let proxy = Proxy::before(&queue.endpoint).await;
    queue.fill("", 3).await;
    let builder = queue
        .source_at(&proxy.url)
        .call_timeout(Duration::from_millis(500));
    let mut source = started(builder, 3).await;
    let held = some(&mut source, 2).await;
    proxy.freeze();
    assert_eq!(lost(&mut source).await, receipts(&held));
    // The source notices the outage by its own calls as soon as it wants more.
    let until = Instant::now() + SOON;
    while source.health().connected {
        assert!(Instant::now() < until, "nobody notices that SQS is away");
        nothing(&mut source, Duration::from_millis(50)).await;
    }
    proxy.mend();
    ack(&mut source, held).await; // Too late, and void.
    let again = some(&mut source, 3).await;
    assert!(
        again
            .iter()
            .all(|d| matches!(d.redelivery, Redelivery::Times(1..))),
        "{again:?}"
    );
    assert!(source.health().connected, "{:?}", source.health());
    ack(&mut source, again).await;
    queue.becomes(0, 0).await;
}

/// A call took the messages, and its answer got lost. Their group stands still for the visibility
/// timeout, unless the same call is made again.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_call_took_whose_answer_got_lost_is_here_long_before_its_visibility_ends() {
    if variable("ONLYONCE_SQS_EMULATOR").as_deref() == Some("moto") {
        println!("skipped: moto takes no notice of a ReceiveRequestAttemptId");
        return;
    }
    let Some(queue) = Queue::fifo().await else {
        return;
    };
    let proxy = Proxy::before(&queue.endpoint).await;
    let builder = queue
        .source_at(&proxy.url)
        .visibility_timeout(SOON * 3)
        .call_timeout(Duration::from_millis(500));
    let mut source = started(builder, 10).await;
    proxy.lose_answers();
    queue.fill("a", 3).await;
    let nobody = tokio::time::timeout(Duration::from_millis(200), source.receive(10));
    nobody.await.unwrap_err();
    queue.becomes(0, 3).await;
    // The first try is given up, and those after it fare no better.
    let until = Instant::now() + SOON;
    while proxy.calls("ReceiveMessage") < 3 {
        assert!(Instant::now() < until, "it is not made again");
        nothing(&mut source, Duration::from_millis(50)).await;
    }
    proxy.mend();
    let three = some(&mut source, 3).await;
    assert_eq!(bodies(&three), ["1", "2", "3"]);
    ack(&mut source, three).await;
    queue.becomes(0, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn throttling_slows_the_calls_down_and_loses_nothing() {
    let Some(queue) = Queue::standard().await else {
        return;
    };
    let proxy = Proxy::before(&queue.endpoint).await;
    queue.fill("", 2).await;
    let mut source = started(queue.source_at(&proxy.url), 2).await;
    let one = some(&mut source, 1).await;
    proxy.throttle();
    ack(&mut source, one).await;
    let before = proxy.calls("ReceiveMessage");
    // Room for one more: it is asked for again and again, slower and slower.
    let wait = Duration::from_millis(1500);
    let waiting = tokio::time::timeout(wait, async {
        loop {
            match source.receive(2).await.unwrap() {
                Incoming::Deliveries(_) | Incoming::Lost(_) => {}
                other => panic!("{other:?}"),
            }
        }
    });
    waiting.await.unwrap_err();
    let calls = proxy.calls("ReceiveMessage") - before;
    assert!((1..=8).contains(&calls), "{calls} calls in {wait:?}");
    let problem = source.health().problem.unwrap();
    assert!(problem.contains("RequestThrottled: slow down"), "{problem}");
    proxy.mend();
    let rest = some(&mut source, 1).await;
    assert!(source.health().connected, "{:?}", source.health());
    ack(&mut source, rest).await;
    queue.becomes(0, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_queue_that_answers_at_once_is_not_asked_all_the_time() {
    let Some(queue) = Queue::standard().await else {
        return;
    };
    let proxy = Proxy::before(&queue.endpoint).await;
    let builder = queue.source_at(&proxy.url).wait_time(Duration::ZERO);
    let mut source = started(builder, 40).await;
    nothing(&mut source, Duration::from_millis(1800)).await;
    let calls = proxy.calls("ReceiveMessage");
    assert!((2..=4).contains(&calls), "{calls} calls");
    queue.fill("", 1).await;
    let one = some(&mut source, 1).await;
    ack(&mut source, one).await;
    queue.becomes(0, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deletions_that_fail_are_repeated_until_they_are_confirmed() {
    let Some(queue) = Queue::standard().await else {
        return;
    };
    let proxy = Proxy::before(&queue.endpoint).await;
    queue.fill("", 4).await;
    let mut source = started(queue.source_at(&proxy.url), 4).await;
    let deliveries = some(&mut source, 4).await;
    proxy.throttle();
    ack(&mut source, deliveries).await;
    let until = Instant::now() + SOON;
    while proxy.calls("DeleteMessageBatch") < 3 {
        assert!(Instant::now() < until, "nobody tries again");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    proxy.mend();
    queue.becomes(0, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_is_gone_is_fatal_and_works_again_when_it_is_back() {
    let Some(queue) = Queue::standard().await else {
        return;
    };
    queue.fill("", 1).await;
    let mut source = queue.started(4).await;
    let held = some(&mut source, 1).await;
    queue
        .client
        .delete_queue()
        .queue_url(&queue.url)
        .send()
        .await
        .unwrap();
    let error = soon(source.receive(4)).await.unwrap_err();
    assert!(error.is_fatal() && error.to_string().contains(GONE), "{error}");
    assert!(!source.health().connected);
    ack(&mut source, held).await;

    let name = queue.url.rsplit('/').next().unwrap();
    queue.client.create_queue().queue_name(name).send().await.unwrap();
    queue.fill("", 1).await;
    let until = Instant::now() + SOON;
    let again = loop {
        match soon(source.receive(4)).await {
            Ok(Incoming::Deliveries(deliveries)) => break deliveries,
            Ok(other) => panic!("{other:?}"),
            Err(error) => assert!(error.is_fatal() && Instant::now() < until, "{error}"),
        }
    };
    assert!(source.health().connected);
    ack(&mut source, again).await;
    queue.becomes(0, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_at_the_address_is_not_for_a_person_to_change() {
    let client = Connection::new("r", "k", "s")
        .endpoint("http://127.0.0.1:1")
        .client()
        .unwrap();
    let mut source = Sqs::queue(client, "http://127.0.0.1:1/0/orders").build().unwrap();
    let error = soon(source.start(&Plan::for_window("tests", 4)))
        .await
        .unwrap_err();
    let text = error.to_string();
    assert!(
        !error.is_fatal() && text.contains("\"orders\"") && text.contains("refused"),
        "{text}"
    );
}
