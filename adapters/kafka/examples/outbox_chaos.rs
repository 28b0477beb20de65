//! Outbox chaos with Kafka; see `testbed/src/outbox_chaos`. `scripts/chaos outbox-kafka` starts the servers and runs it.
//!
//! What the broker refuses here is the poison: records that are too large for their topic. It refuses the whole batch that
//! such a record travels in, and does not say which one it was.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use onlyonce::async_trait;
use onlyonce::outbox::OutgoingEvent;
use onlyonce_kafka::KafkaPublisher;
use onlyonce_testbed::chaos::variable;
use onlyonce_testbed::outbox_chaos::{self, Arrival, Broker, Route};
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::Headers as _;
use rdkafka::{ClientConfig, Message as _, Offset, TopicPartitionList};

const PARTITIONS: i32 = 3;
/// What the topics take of one batch, and what the poison has.
const LARGEST: &str = "100000";
const TOO_LARGE: usize = 200_000;
const PATIENCE: Duration = Duration::from_secs(10);

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    outbox_chaos::run::<Cluster>().await
}

struct Cluster {
    brokers: String,
}

#[async_trait]
impl Broker for Cluster {
    const SERVICE: &'static str = "kafka";

    type Publisher = KafkaPublisher;

    fn from_env() -> anyhow::Result<Self> {
        Ok(Self {
            brokers: variable("ONLYONCE_KAFKA_BROKERS")?,
        })
    }

    fn publisher(&self) -> anyhow::Result<KafkaPublisher> {
        Ok(KafkaPublisher::to(&self.brokers)
            .patience(Duration::from_secs(8))
            .set("reconnect.backoff.max.ms", "500")
            .build()?)
    }

    fn address(&self, name: &str, route: Route) -> String {
        match route {
            Route::Rough => format!("{name}.rough"),
            _ => format!("{name}.calm"),
        }
    }

    async fn declare(&self, name: &str) -> anyhow::Result<()> {
        let addresses = [Route::Rough, Route::Calm].map(|route| self.address(name, route));
        let topics = addresses.each_ref().map(|topic| {
            NewTopic::new(topic, PARTITIONS, TopicReplication::Fixed(1)).set("max.message.bytes", LARGEST)
        });
        for created in self.admin()?.create_topics(&topics, &AdminOptions::new()).await? {
            created.map_err(|(topic, code)| anyhow!("{topic}: {code}"))?;
        }
        Ok(())
    }

    async fn delete(&self, name: &str) -> anyhow::Result<()> {
        let addresses = [Route::Rough, Route::Calm].map(|route| self.address(name, route));
        let topics: Vec<&str> = addresses.iter().map(String::as_str).collect();
        self.admin()?.delete_topics(&topics, &AdminOptions::new()).await?;
        Ok(())
    }

    fn poisoned(&self, event: OutgoingEvent) -> OutgoingEvent {
        event.header("large", "x".repeat(TOO_LARGE))
    }

    async fn read_all(&self, name: &str, route: Route) -> anyhow::Result<Vec<Arrival>> {
        let (brokers, topic) = (self.brokers.clone(), self.address(name, route));
        tokio::task::spawn_blocking(move || read_all(&brokers, &topic)).await?
    }
}

impl Cluster {
    fn admin(&self) -> anyhow::Result<AdminClient<DefaultClientContext>> {
        Ok(ClientConfig::new()
            .set("bootstrap.servers", &self.brokers)
            .create()?)
    }
}

/// Blocks. A key has one partition, so that the order of the partitions among each other says nothing.
fn read_all(brokers: &str, topic: &str) -> anyhow::Result<Vec<Arrival>> {
    let consumer: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("group.id", topic)
        .set("enable.auto.commit", "false")
        .create()?;
    let mut arrivals = Vec::new();
    for partition in 0..PARTITIONS {
        let (first, end) = consumer.fetch_watermarks(topic, partition, PATIENCE)?;
        let mut assignment = TopicPartitionList::new();
        assignment.add_partition_offset(topic, partition, Offset::Offset(first))?;
        consumer.assign(&assignment)?;
        let mut next = first;
        while next < end {
            let record = consumer
                .poll(PATIENCE)
                .with_context(|| format!("{topic}/{partition} says nothing more at {next} of {end}"))??;
            next = record.offset() + 1;
            let headers = record.headers().context("a record without headers")?;
            let id = headers
                .iter()
                .find(|header| header.key == "onlyonce-event-id")
                .and_then(|header| header.value);
            let text = |bytes: Option<&[u8]>| String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned();
            arrivals.push(Arrival {
                event_id: text(id),
                key: text(record.key()),
                body: text(record.payload()),
            });
        }
    }
    Ok(arrivals)
}
