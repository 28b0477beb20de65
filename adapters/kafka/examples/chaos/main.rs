//! Chaos with Kafka; see `testbed/src/chaos`. `scripts/chaos kafka` starts the servers and runs it.
//!
//! Clients of Kafka go where the broker tells them to, so each link stands before a listener of its own
//! that advertises the link's port. Meanwhile the group's committed offsets are watched: none may go back.
#![allow(clippy::print_stdout)]

mod offsets;

use std::process::ExitCode;
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use onlyonce::async_trait;
use onlyonce_kafka::{Kafka, StartAt};
use onlyonce_testbed::chaos::{self, Broker, Entrance, Event, Keys, Seat, variable};
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};

use offsets::Watch;

const PARTITIONS: i32 = 6;
/// A member that dies is missed after so long, unless it comes back under its own name.
const SESSION: &str = "6000";

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    chaos::run::<Cluster>().await
}

struct Cluster {
    brokers: String,
    /// The assignment moves everything at every rebalance; else only what has to move.
    eager: bool,
    /// No worker comes back under its own name: the group waits until it has missed each that died.
    dynamic: bool,
    /// Settings of librdkafka beside ours, such as `debug`.
    set: Vec<(String, String)>,
    watch: Mutex<Option<Watch>>,
}

#[async_trait]
impl Broker for Cluster {
    const SERVICE: &'static str = "kafka";
    const USAGE: &'static str = "--eager --dynamic --set=NAME=VALUE";

    type Producer = FutureProducer;
    type Source = Kafka;

    fn from_env() -> anyhow::Result<Self> {
        Ok(Self {
            brokers: variable("ONLYONCE_KAFKA_BROKERS")?,
            eager: false,
            dynamic: false,
            set: Vec::new(),
            watch: Mutex::default(),
        })
    }

    fn option(&mut self, argument: &str) -> bool {
        let setting = argument
            .strip_prefix("--set=")
            .and_then(|set| set.split_once('='));
        match (argument, setting) {
            ("--eager", _) => self.eager = true,
            ("--dynamic", _) => self.dynamic = true,
            (_, Some((name, value))) => self.set.push((name.to_owned(), value.to_owned())),
            _ => return false,
        }
        true
    }

    fn keys(&self) -> Keys {
        Keys::Most
    }

    fn entrance(&self, place: usize) -> anyhow::Result<Entrance> {
        let links = variable("ONLYONCE_KAFKA_LINKS")?;
        let (listener, link) = links
            .split(',')
            .nth(place)
            .with_context(|| format!("there are no more places than ONLYONCE_KAFKA_LINKS has: {links}"))?
            .split_once('=')
            .with_context(|| format!("ONLYONCE_KAFKA_LINKS is {links:?} (host:port=port,..)"))?;
        Ok(Entrance {
            url: listener.to_owned(),
            port: link.parse()?,
        })
    }

    async fn declare(&self, name: &str) -> anyhow::Result<()> {
        let topic = NewTopic::new(name, PARTITIONS, TopicReplication::Fixed(1));
        for created in self
            .admin()?
            .create_topics([&topic], &AdminOptions::new())
            .await?
        {
            created.map_err(|(topic, code)| anyhow!("{topic}: {code}"))?;
        }
        *self.watch.lock().unwrap_or_else(|e| e.into_inner()) = Some(Watch::begin(&self.brokers, name)?);
        Ok(())
    }

    async fn delete(&self, name: &str) -> anyhow::Result<()> {
        self.admin()?.delete_topics(&[name], &AdminOptions::new()).await?;
        Ok(())
    }

    /// Idempotent and without a time limit: what it sends arrives in order, or the rest does not.
    async fn producer(&self) -> anyhow::Result<FutureProducer> {
        Ok(ClientConfig::new()
            .set("bootstrap.servers", &self.brokers)
            .set("enable.idempotence", "true")
            .set("message.timeout.ms", "0")
            .set("linger.ms", "1")
            .create()?)
    }

    async fn publish(&self, producer: &FutureProducer, name: &str, batch: &[&Event]) -> anyhow::Result<()> {
        let mut deliveries = Vec::new();
        for event in batch {
            let headers = OwnedHeaders::new()
                .insert(header("onlyonce-event-id", &event.id))
                .insert(header("onlyonce-event-source", "chaos"));
            let body = serde_json::to_vec(event)?;
            let mut record = FutureRecord::<str, _>::to(name).payload(&body).headers(headers);
            record.key = event.key.as_deref();
            deliveries.push(producer.send_result(record).map_err(|(error, _)| error)?);
        }
        for delivery in deliveries {
            delivery.await?.map_err(|(error, _)| error)?;
        }
        Ok(())
    }

    /// The records behind the committed offsets.
    async fn left(&self, name: &str) -> anyhow::Result<u64> {
        let (brokers, name) = (self.brokers.clone(), name.to_owned());
        tokio::task::spawn_blocking(move || offsets::lag(&brokers, &name)).await?
    }

    async fn problems(&self, _name: &str) -> Vec<String> {
        let watch = self.watch.lock().unwrap_or_else(|e| e.into_inner()).take();
        watch.map_or_else(Vec::new, Watch::end)
    }

    fn source(&self, seat: &Seat) -> anyhow::Result<Kafka> {
        let strategy = if self.eager { "range" } else { "cooperative-sticky" };
        let mut source = Kafka::group(&seat.url, &seat.name)
            .topic(&seat.name)
            .start_at(StartAt::Earliest)
            .connect_timeout(Duration::from_secs(3))
            .drain_limit(Duration::from_secs(5))
            .set("session.timeout.ms", SESSION)
            .set("heartbeat.interval.ms", "500")
            .set("socket.timeout.ms", "4000")
            // And so long librdkafka waits for the answer to a join, whatever becomes of its connection.
            .set("max.poll.interval.ms", "10000")
            .set("reconnect.backoff.max.ms", "1000")
            .set("partition.assignment.strategy", strategy);
        for (name, value) in &self.set {
            source = source.set(name, value);
        }
        if let Some(member) = seat.member.as_ref().filter(|_| !self.dynamic) {
            source = source.static_member(member);
        }
        Ok(source.build()?)
    }
}

impl Cluster {
    fn admin(&self) -> anyhow::Result<AdminClient<DefaultClientContext>> {
        Ok(ClientConfig::new()
            .set("bootstrap.servers", &self.brokers)
            .create()?)
    }
}

fn header<'a>(key: &'a str, value: &'a str) -> Header<'a, &'a str> {
    Header {
        key,
        value: Some(value),
    }
}
