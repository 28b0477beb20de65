//! A password in no log, at any level, and in no error.
//!
//! In a binary of its own, because the observer has to be the whole process's: librdkafka writes from
//! threads of its own.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use onlyonce::publisher::{Message, Publisher};
use onlyonce::source::{Incoming, Plan, Source};
use onlyonce_kafka::{Kafka, KafkaPublisher, StartAt};
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use tracing_subscriber::fmt::MakeWriter;

const MARKER: &str = "s3cr3t-m4rk3r";
/// The middle of the base64 of `\0marker\0s3cr3t-m4rk3r`, as SASL PLAIN sends it.
const BASE64: &str = "czNjcjN0LW00cmszcg";

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

fn assert_clean(what: &str, text: &str) {
    for shape in [MARKER, BASE64] {
        if let Some(at) = text.find(shape) {
            let from = text[..at].rfind('\n').map_or(0, |n| n + 1);
            let to = text[at..].find('\n').map_or(text.len(), |n| at + n);
            panic!("{what} shows the password: {}", &text[from..to]);
        }
    }
}

fn variable(name: &str) -> Option<String> {
    let value = std::env::var(name).ok().filter(|value| !value.is_empty());
    if value.is_none() {
        let required = std::env::var("ONLYONCE_REQUIRE_SERVICES").is_ok_and(|v| v == "1");
        assert!(!required, "{name} is not set");
        println!("skipped: no {name}");
    }
    value
}

#[tokio::test(flavor = "multi_thread")]
async fn a_password_is_in_no_log_and_in_no_error() {
    let (Some(brokers), Some(guarded)) = (
        variable("ONLYONCE_KAFKA_BROKERS"),
        variable("ONLYONCE_KAFKA_SASL_BROKERS"),
    ) else {
        return;
    };
    let log = Log::default();
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_ansi(false)
        .with_writer(log.clone())
        .init();

    let admin: AdminClient<DefaultClientContext> = ClientConfig::new()
        .set("bootstrap.servers", &brokers)
        .create()
        .unwrap();
    let topic = format!("onlyonce-test-secrets-{}", std::process::id());
    let new = NewTopic::new(&topic, 1, TopicReplication::Fixed(1));
    admin.create_topics([&new], &AdminOptions::new()).await.unwrap();
    let mut shown = Vec::new();
    // One that works, with everything in its log.
    let mut source = Kafka::group(&brokers, &topic)
        .topic(&topic)
        .start_at(StartAt::Earliest)
        .set("sasl.username", "marker")
        .set("sasl.password", MARKER)
        .set("debug", "all")
        .build()
        .unwrap();
    source.start(&Plan::for_window("secrets", 4)).await.unwrap();
    tokio::time::timeout(Duration::from_secs(1), source.receive(1))
        .await
        .unwrap_err();
    shown.push(format!("{source:?} {source:#?} {:?}", source.health()));
    source.stop().await.unwrap();
    assert!(matches!(source.receive(0).await.unwrap(), Incoming::Closed));
    admin
        .delete_topics(&[&topic], &AdminOptions::new())
        .await
        .unwrap();
    // A broker that knows another password, one that wants no login, one that does not answer, and none at all.
    for address in [
        guarded.as_str(),
        brokers.as_str(),
        "127.0.0.1:1",
        "no-such-host.invalid:9092",
    ] {
        let builder = Kafka::group(address, "secrets")
            .topic("secrets")
            .start_at(StartAt::Earliest)
            .connect_timeout(Duration::from_secs(2))
            .set("security.protocol", "sasl_plaintext")
            .set("sasl.mechanism", "PLAIN")
            .set("sasl.username", "marker")
            .set("sasl.password", MARKER)
            .set("debug", "all");
        shown.push(format!("{builder:?} {builder:#?}"));
        let mut source = builder.build().unwrap();
        let error = source.start(&Plan::for_window("secrets", 4)).await.unwrap_err();
        let answers = [&guarded, &brokers].contains(&&address.to_owned());
        assert_eq!(error.is_fatal(), answers, "{address}: {error}");
        shown.push(format!("{error} {error:?}"));
        shown.push(format!("{source:?} {source:#?} {:?}", source.health()));

        let builder = KafkaPublisher::to(address)
            .patience(Duration::from_secs(2))
            .set("security.protocol", "sasl_plaintext")
            .set("sasl.mechanism", "PLAIN")
            .set("sasl.username", "marker")
            .set("sasl.password", MARKER)
            .set("debug", "all");
        shown.push(format!("{builder:?}"));
        let publisher = builder.build().unwrap();
        let error = publisher
            .publish(&Message::new("secrets", "s", "1", "x"))
            .await
            .unwrap_err();
        shown.push(format!(
            "{error} {error:?} {publisher:?} {:?}",
            publisher.health()
        ));
        publisher.stop().await;
    }
    // Only a whole client shows that this is not possible.
    let mut source = Kafka::group(&brokers, "secrets")
        .topic("secrets")
        .set("security.protocol", "sasl_plaintext")
        .set("sasl.mechanism", MARKER)
        .build()
        .unwrap();
    let error = source.start(&Plan::for_window("secrets", 4)).await.unwrap_err();
    assert!(error.is_fatal(), "{error}");
    shown.push(format!("{error} {error:?}"));
    for (name, value) in [
        ("sasl.pasword", MARKER),
        ("session.timeout.ms", MARKER),
        ("enable.auto.commit", MARKER),
    ] {
        let error = Kafka::group(&brokers, "secrets")
            .topic("secrets")
            .set(name, value)
            .build()
            .unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
        shown.push(format!("{error} {error:?} {error:#?}"));
    }

    let log = String::from_utf8_lossy(&log.0.lock().unwrap()).into_owned();
    assert!(log.contains("librdkafka"), "librdkafka's lines are captured");
    assert_clean("the log", &log);
    shown.iter().for_each(|text| assert_clean("a text", text));
}
