//! The suite that every publisher passes.

use std::time::Duration;

use onlyonce::async_trait;
use onlyonce::publisher::Message;
use onlyonce_conformance::{PublisherCapabilities, PublisherHarness, Result};
use onlyonce_kafka::{Kafka, KafkaPublisher, KafkaPublisherBuilder};

use super::harness::{Topic, unique, variable};
use super::proxy::Proxy;

mod one_partition {
    onlyonce_conformance::publisher_suite!(super::One);
}

mod partitions {
    onlyonce_conformance::publisher_suite!(super::Several);
}

/// A topic, and the publisher behind a proxy that can be cut.
struct Behind {
    topic: Topic,
    proxy: Proxy,
}

struct One(Behind);
struct Several(Behind);

impl Behind {
    async fn of(partitions: i32) -> Option<Self> {
        let topic = Topic::of(partitions).await?;
        let proxy = Proxy::free().await?;
        Some(Self { topic, proxy })
    }

    fn publisher(&self) -> KafkaPublisherBuilder {
        KafkaPublisher::to(&self.proxy.brokers)
            .patience(Duration::from_secs(5))
            // For the broker to forget; nobody asks for it.
            .set("sasl.password", "s3cr3t-m4rk3r")
    }

    fn invalid(&self) -> Vec<Message> {
        let to = |address: &str, body: Vec<u8>| Message::new(address, "conformance", "invalid", body);
        vec![
            to("no/topic", b"x".to_vec()),
            to("", b"x".to_vec()),
            to(&self.topic.name, vec![b'x'; 1_100_000]),
        ]
    }
}

macro_rules! harness {
    ($name:ident, $partitions:expr) => {
        #[async_trait]
        impl PublisherHarness for $name {
            type Publisher = KafkaPublisher;
            type Source = Kafka;

            async fn empty() -> Result<Option<Self>> {
                Ok(Behind::of($partitions).await.map(Self))
            }

            fn system(&self) -> &'static str {
                "kafka"
            }

            fn capabilities(&self) -> PublisherCapabilities {
                let mut can = PublisherCapabilities::default();
                can.outages = true;
                can
            }

            fn publisher(&self) -> KafkaPublisher {
                self.0.publisher().build().unwrap()
            }

            fn source(&self) -> Kafka {
                self.0.topic.source().build().unwrap()
            }

            fn address(&self) -> String {
                self.0.topic.name.clone()
            }

            fn missing(&self) -> String {
                unique("no-topic")
            }

            fn invalid(&self) -> Vec<Message> {
                self.0.invalid()
            }

            async fn cut(&self) -> Result {
                self.0.proxy.cut();
                Ok(())
            }

            async fn freeze(&self) -> Result {
                self.0.proxy.freeze();
                Ok(())
            }

            async fn mend(&self) -> Result {
                self.0.proxy.mend();
                Ok(())
            }

            fn secrets(&self) -> Vec<String> {
                vec!["s3cr3t-m4rk3r".to_owned()]
            }
        }
    };
}

harness!(One, 1);
harness!(Several, 3);

/// A login that is refused is told without the password.
struct Login(Topic);

#[async_trait]
impl PublisherHarness for Login {
    type Publisher = KafkaPublisher;
    type Source = Kafka;

    async fn empty() -> Result<Option<Self>> {
        Ok(Topic::of(1).await.map(Self))
    }

    fn system(&self) -> &'static str {
        "kafka"
    }

    fn publisher(&self) -> KafkaPublisher {
        let brokers = variable("ONLYONCE_KAFKA_SASL_BROKERS").unwrap();
        KafkaPublisher::to(brokers)
            .patience(Duration::from_secs(3))
            .set("security.protocol", "sasl_plaintext")
            .set("sasl.mechanism", "PLAIN")
            .set("sasl.username", "onlyonce")
            .set("sasl.password", "s3cr3t-m4rk3r")
            .build()
            .unwrap()
    }

    fn source(&self) -> Kafka {
        self.0.source().build().unwrap()
    }

    fn address(&self) -> String {
        self.0.name.clone()
    }

    fn missing(&self) -> String {
        unique("no-topic")
    }

    fn secrets(&self) -> Vec<String> {
        vec!["s3cr3t-m4rk3r".to_owned()]
    }
}

#[test]
fn a_wrong_password_stays_secret() {
    onlyonce_conformance::publisher_test::<Login>(onlyonce_conformance::publisher::secrets_stay_secret);
}
