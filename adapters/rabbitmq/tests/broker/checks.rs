//! The checks at the start, by AMQP and by the management API.

use std::time::Duration;

use lapin::options::QueueDeclareOptions;
use lapin::types::AMQPValue;
use onlyonce::source::Source;

use super::harness::*;

fn management() -> Option<String> {
    variable("ONLYONCE_RABBITMQ_MANAGEMENT_URL")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quorum_queue_is_recognised() {
    let (Some(queue), Some(url)) = (Queue::quorum().await, management()) else {
        return;
    };
    let source = started(queue.source().management_url(&url), 1).await;
    assert!(source.capabilities().counts_deliveries);
    assert!(source.capabilities().marks_redelivery);
    assert!(!source.capabilities().ordered);
    assert!(!source.capabilities().native_dead_letters);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_single_active_consumer_is_refused() {
    let (Some(queue), Some(url)) = (Queue::classic().await, management()) else {
        return;
    };
    let error = start_fails(
        queue
            .source()
            .require_single_active_consumer()
            .management_url(&url),
    )
    .await;
    assert!(error.is_fatal());
    assert!(
        error
            .to_string()
            .contains("declare it with x-single-active-consumer = true"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_on_a_single_active_consumer_queue_one_receives() {
    let argument = ("x-single-active-consumer", AMQPValue::Boolean(true));
    let (Some(queue), Some(url)) = (Queue::declare(&[argument]).await, management()) else {
        return;
    };
    let builder = || {
        queue
            .source()
            .require_single_active_consumer()
            .management_url(&url)
    };
    let mut active = started(builder(), 2).await;
    let mut standby = started(builder(), 2).await;
    assert!(active.capabilities().ordered);
    queue.fill(4).await;
    let two = some(&mut active, 2).await;
    nothing(&mut standby, Duration::from_millis(200)).await;
    active.stop().await.unwrap();
    ack(&mut active, two).await;
    closes(active).await;
    assert_eq!(bodies(&some(&mut standby, 2).await), ["3", "4"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_auto_delete_queue_is_refused() {
    let auto_delete = QueueDeclareOptions {
        auto_delete: true,
        ..Default::default()
    };
    let (Some(queue), Some(url)) = (Queue::declare_with(auto_delete, &[]).await, management()) else {
        return;
    };
    let error = start_fails(queue.source().management_url(&url)).await;
    assert!(error.is_fatal());
    assert!(error.to_string().contains("it is auto-delete"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_warning_is_an_error_with_strict_checks() {
    let limited = [
        ("x-queue-type", AMQPValue::LongString("quorum".into())),
        ("x-delivery-limit", AMQPValue::LongInt(3)),
    ];
    let (Some(queue), Some(url)) = (Queue::declare(&limited).await, management()) else {
        return;
    };
    let source = started(queue.source().management_url(&url), 1).await;
    assert!(source.health().connected);
    let error = start_fails(queue.source().management_url(&url).strict_checks()).await;
    assert!(error.is_fatal());
    assert!(
        error
            .to_string()
            .contains("after 3 returns the broker drops a message for good"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_management_api_that_is_away_or_refuses_keeps_nobody_from_consuming() {
    let (Some(queue), Some(url)) = (Queue::classic().await, management()) else {
        return;
    };
    queue.fill(2).await;
    for url in [
        "http://u:p@127.0.0.1:9",
        &url.replacen(":onlyonce@", ":wrong@", 1),
    ] {
        let mut source = started(queue.source().management_url(url), 1).await;
        let delivery = one(&mut source).await;
        ack(&mut source, [delivery]).await;
        source.stop().await.unwrap();
        closes(source).await;
    }
}
