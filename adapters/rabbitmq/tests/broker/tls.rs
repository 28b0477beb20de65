//! Over TLS, with a certificate that the system does not trust.

use lapin::BasicProperties;
use onlyonce::source::Source as _;
use onlyonce_rabbitmq::RabbitMq;

use super::harness::*;

fn tls() -> Option<(String, String)> {
    let (url, ca) = (
        variable("ONLYONCE_RABBITMQ_TLS_URL")?,
        variable("ONLYONCE_RABBITMQ_TLS_CA")?,
    );
    Some((url, std::fs::read_to_string(ca).unwrap()))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trusted_broker_delivers_and_is_acked() {
    let (Some(queue), Some((url, ca))) = (Queue::quorum().await, tls()) else {
        return;
    };
    let id = BasicProperties::default().with_message_id("evt_1".into());
    queue.publish(b"over tls", id).await;
    let mut source = started(RabbitMq::queue(&url, &queue.name).tls_ca(ca), 4).await;
    let delivery = one(&mut source).await;
    assert_eq!(body(&delivery), "over tls");
    ack(&mut source, [delivery]).await;
    soon(source.stop()).await.unwrap();
    closes(source).await;
    assert_eq!(queue.ready().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_nobody_vouches_for_is_refused_by_name_and_without_secrets() {
    let (Some(queue), Some((url, ca))) = (Queue::classic().await, tls()) else {
        return;
    };
    let error = start_fails(RabbitMq::queue(&url, &queue.name)).await.to_string();
    assert!(error.contains("certificate"), "{error}");
    assert!(error.contains("localhost"), "{error}");
    assert!(!error.contains("onlyonce:onlyonce"), "{error}");

    // Vouched for, but under another name.
    let elsewhere = url.replace("localhost", "127.0.0.1");
    let error = start_fails(RabbitMq::queue(&elsewhere, &queue.name).tls_ca(ca))
        .await
        .to_string();
    assert!(error.contains("certificate"), "{error}");

    // Plain text to a port that speaks TLS.
    let plain = url.replace("amqps://", "amqp://");
    start_fails(RabbitMq::queue(&plain, &queue.name)).await;
}
