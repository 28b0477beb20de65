//! How fast a relay publishes to Kafka, beside the same events published by hand with rdkafka and without a database;
//! and how long an event takes from its commit to a consumer.
//!
//! ```sh
//! scripts/services up && eval "$(scripts/services env)"
//! cargo run --release -p onlyonce-kafka --example relay_throughput -- --events 50000 --rounds 3
//! ```
//!
//! `--only NAME` measures the variants with NAME in their name, or `latency`.

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use onlyonce::async_trait;
use onlyonce_kafka::{Kafka, KafkaPublisher, StartAt};
use onlyonce_testbed::throughput::relay::{self, Broker, EVENT_TYPE, SOURCE, TIME, key};
use onlyonce_testbed::throughput::{BODY, BoxError, Done, environment, event_id};
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let brokers = environment("ONLYONCE_KAFKA_BROKERS")?;
    let admin = ClientConfig::new().set("bootstrap.servers", &brokers).create()?;
    relay::run(Cluster { brokers, admin }).await
}

struct Cluster {
    brokers: String,
    admin: AdminClient<DefaultClientContext>,
}

#[async_trait]
impl Broker for Cluster {
    type Publisher = KafkaPublisher;
    type Source = Kafka;

    /// The relay's default.
    const IN_FLIGHT: usize = 1000;

    async fn fresh(&self) -> Result<String, BoxError> {
        let topic = format!("bench-{}", std::time::UNIX_EPOCH.elapsed()?.as_micros());
        let new = NewTopic::new(&topic, 4, TopicReplication::Fixed(1));
        for created in self.admin.create_topics([&new], &AdminOptions::new()).await? {
            created.map_err(|(topic, code)| format!("{topic}: {code}"))?;
        }
        Ok(topic)
    }

    fn publisher(&self) -> Result<KafkaPublisher, BoxError> {
        Ok(KafkaPublisher::to(&self.brokers).build()?)
    }

    fn source(&self, topic: &str) -> Result<Kafka, BoxError> {
        Ok(Kafka::group(&self.brokers, topic)
            .topic(topic)
            .start_at(StartAt::Earliest)
            .build()?)
    }

    async fn by_hand(&self, topic: &str, events: u64, done: &Done) -> Result<(), BoxError> {
        let producer: FutureProducer = ClientConfig::new()
            .set("bootstrap.servers", &self.brokers)
            .set("enable.idempotence", "true")
            .set("acks", "all")
            .set("partitioner", "murmur2_random")
            .create()?;
        let mut unconfirmed = FuturesUnordered::new();
        for n in 0..events {
            let (id, key) = (event_id(n), key(n));
            let stamped = [
                ("onlyonce-event-id", id.as_str()),
                ("onlyonce-event-source", SOURCE),
                ("ce_specversion", "1.0"),
                ("ce_id", &id),
                ("ce_source", SOURCE),
                ("ce_type", EVENT_TYPE),
                ("ce_time", TIME),
            ];
            let mut headers = OwnedHeaders::new_with_capacity(stamped.len());
            for (key, value) in stamped {
                headers = headers.insert(Header {
                    key,
                    value: Some(value),
                });
            }
            let record = FutureRecord::to(topic).key(&key).payload(BODY).headers(headers);
            unconfirmed.push(producer.send_result(record).map_err(|(error, _)| error)?);
            if unconfirmed.len() == Self::IN_FLIGHT || n == events - 1 {
                while let Some(report) = unconfirmed.next().await {
                    report?.map_err(|(error, _)| error)?;
                    done.add(1);
                    if n < events - 1 {
                        break;
                    }
                }
            }
        }
        tokio::task::spawn_blocking(move || drop(producer)).await?;
        Ok(())
    }

    async fn delete(&self, topic: &str) -> Result<(), BoxError> {
        self.admin.delete_topics(&[topic], &AdminOptions::new()).await?;
        Ok(())
    }
}
