//! With a password, and over TLS with a certificate that the system does not trust.

use onlyonce_kafka::KafkaBuilder;

use super::harness::{Topic, ack, bodies, closes, some, start_fails, started, variable};

/// A topic, and as whom and where its broker wants a login.
async fn guarded() -> Option<(Topic, String, String)> {
    let topic = Topic::of(1).await?;
    let brokers = variable("ONLYONCE_KAFKA_SASL_BROKERS")?;
    Some((topic, brokers, variable("ONLYONCE_KAFKA_SASL_LOGIN")?))
}

fn logs_in(builder: KafkaBuilder, user: &str, password: &str) -> KafkaBuilder {
    builder
        .set("security.protocol", "sasl_plaintext")
        .set("sasl.mechanism", "PLAIN")
        .set("sasl.username", user)
        .set("sasl.password", password)
}

async fn delivers_and_commits(topic: &Topic, builder: KafkaBuilder) {
    topic.fill(0, 2, &[]).await;
    let mut source = started(builder, 4).await;
    let taken = some(&mut source, 2).await;
    assert_eq!(bodies(&taken), ["1", "2"]);
    ack(&mut source, taken).await;
    closes(source).await;
    assert_eq!(topic.committed(0).await, Some(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn who_logs_in_is_served() {
    let Some((topic, brokers, login)) = guarded().await else {
        return;
    };
    let (user, password) = login.split_once(':').unwrap();
    delivers_and_commits(&topic, logs_in(topic.source_at(&brokers), user, password)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_cannot_log_in_is_told_so_at_the_start() {
    let Some((topic, brokers, login)) = guarded().await else {
        return;
    };
    let (user, _) = login.split_once(':').unwrap();
    let error = start_fails(logs_in(topic.source_at(&brokers), user, "s3cr3t-m4rk3r")).await;
    assert!(error.is_fatal(), "{error}");
    let error = error.to_string();
    assert!(error.contains("check user, password"), "{error}");
    assert!(!error.contains("s3cr3t-m4rk3r"), "{error}");
}

#[cfg(feature = "tls")]
mod tls {
    use super::*;

    async fn encrypted() -> Option<(Topic, String, String)> {
        let topic = Topic::of(1).await?;
        let brokers = variable("ONLYONCE_KAFKA_TLS_BROKERS")?;
        Some((topic, brokers, variable("ONLYONCE_KAFKA_TLS_CA")?))
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_trusted_broker_delivers_and_commits() {
        let Some((topic, brokers, authority)) = encrypted().await else {
            return;
        };
        let builder = topic
            .source_at(&brokers)
            .set("security.protocol", "ssl")
            .set("ssl.ca.location", authority);
        delivers_and_commits(&topic, builder).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_broker_that_nobody_vouches_for_is_refused() {
        let Some((topic, brokers, authority)) = encrypted().await else {
            return;
        };
        let builder = || {
            topic
                .source_at(&brokers)
                .connect_timeout(std::time::Duration::from_secs(3))
                .set("security.protocol", "ssl")
        };
        let error = start_fails(builder()).await.to_string();
        assert!(error.contains("certificate"), "{error}");

        // Vouched for, but under another name.
        let elsewhere = brokers.replace("localhost", "127.0.0.1");
        let error = start_fails(
            topic
                .source_at(&elsewhere)
                .connect_timeout(std::time::Duration::from_secs(3))
                .set("security.protocol", "ssl")
                .set("ssl.ca.location", authority),
        )
        .await
        .to_string();
        assert!(error.contains("certificate"), "{error}");
    }
}
