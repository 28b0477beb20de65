//! How fast events go from Kafka to PostgreSQL, beside the same loop written by hand with rdkafka and sqlx.
//!
//! ```sh
//! scripts/services up && eval "$(scripts/services env)"
//! cargo run --release -p onlyonce-kafka --example throughput -- --events 40000 --rounds 3
//! ```
//!
//! `--only NAME` measures the variants with NAME in their name. `--keys` instead shows what lanes are
//! worth in one partition: a handler of 5 ms, one lane against 64, the keys' order looked at.
#![allow(clippy::print_stdout)]

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use onlyonce::{Bytes, Context, Event, Handler, HandlerError, async_trait};
use onlyonce_kafka::{Kafka, StartAt};
use onlyonce_testbed::throughput::{self, BODY, Bench, BoxError, Broker, Done, Twin, environment, event_id};
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{Consumer as _, StreamConsumer};
use rdkafka::message::{Header, Headers as _, OwnedHeaders, OwnedMessage};
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::{ClientConfig, Message};
use sqlx::Postgres;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    if std::env::args().any(|arg| arg == "--keys") {
        return keys().await;
    }
    throughput::run(Cluster::new(4, 1000)?).await
}

struct Cluster {
    brokers: String,
    admin: AdminClient<DefaultClientContext>,
    partitions: i32,
    keys: u64,
}

impl Cluster {
    fn new(partitions: i32, keys: u64) -> Result<Self, BoxError> {
        let brokers = environment("ONLYONCE_KAFKA_BROKERS")?;
        let admin = ClientConfig::new().set("bootstrap.servers", &brokers).create()?;
        Ok(Self {
            brokers,
            admin,
            partitions,
            keys,
        })
    }
}

#[async_trait]
impl Broker for Cluster {
    type Source = Kafka;

    const BATCH: usize = 100;

    async fn filled(&self, events: u64) -> Result<String, BoxError> {
        let topic = format!("bench-{}", std::time::UNIX_EPOCH.elapsed()?.as_micros());
        let new = NewTopic::new(&topic, self.partitions, TopicReplication::Fixed(1));
        for created in self.admin.create_topics([&new], &AdminOptions::new()).await? {
            created.map_err(|(topic, code)| format!("{topic}: {code}"))?;
        }
        let producer: FutureProducer = ClientConfig::new()
            .set("bootstrap.servers", &self.brokers)
            .set("linger.ms", "5")
            .create()?;
        let mut sent = Vec::new();
        for n in 0..events {
            let (id, key) = (event_id(n), format!("acc-{}", n % self.keys));
            let headers = OwnedHeaders::new()
                .insert(Header {
                    key: "onlyonce-event-id",
                    value: Some(&id),
                })
                .insert(Header {
                    key: "onlyonce-event-source",
                    value: Some("bench"),
                });
            let record = FutureRecord::to(&topic).key(&key).payload(BODY).headers(headers);
            sent.push(producer.send_result(record).map_err(|(error, _)| error)?);
            if sent.len() == 5000 || n == events - 1 {
                for delivery in sent.drain(..) {
                    delivery.await?.map_err(|(error, _)| error)?;
                }
            }
        }
        Ok(topic)
    }

    fn source(&self, topic: &str) -> Result<Kafka, BoxError> {
        Ok(Kafka::group(&self.brokers, topic)
            .topic(topic)
            .start_at(StartAt::Earliest)
            .build()?)
    }

    /// Keys stay in their lane, and no offset is stored before all before it are done.
    async fn by_hand(&self, topic: &str, twin: Twin, stop: CancellationToken) -> Result<(), BoxError> {
        let consumer: StreamConsumer = ClientConfig::new()
            .set("bootstrap.servers", &self.brokers)
            .set("group.id", topic)
            .set("auto.offset.reset", "earliest")
            .set("enable.auto.offset.store", "false")
            .set("auto.commit.interval.ms", "1000")
            .set("partition.assignment.strategy", "cooperative-sticky")
            .create()?;
        consumer.subscribe(&[topic])?;
        let progress = Arc::new(Mutex::new(Progress::default()));
        let (mut lanes, mut senders) = (JoinSet::new(), Vec::new());
        for _ in 0..twin.lanes {
            // As many as the consumer takes.
            let (sender, mut work) = mpsc::channel::<OwnedMessage>(twin.batch + twin.batch.max(3));
            senders.push(sender);
            let (progress, batch, mut lane) = (progress.clone(), twin.batch, twin.lane().await?);
            lanes.spawn(async move {
                let mut messages = Vec::new();
                while work.recv_many(&mut messages, batch).await > 0 {
                    let ids: Vec<String> = messages.iter().map(id).collect();
                    let events: Vec<_> = ids
                        .iter()
                        .zip(&messages)
                        .map(|(id, message)| (id.as_str(), message.payload().unwrap_or_default()))
                        .collect();
                    lane.apply(&events).await?;
                    let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
                    messages.drain(..).for_each(|message| progress.done(&message));
                }
                Ok::<_, BoxError>(())
            });
        }
        let receiving = async {
            loop {
                let message = consumer.recv().await?.detach();
                let advanced = {
                    let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
                    progress.came(&message);
                    progress.advanced()
                };
                for (partition, offset) in advanced {
                    consumer.store_offset(topic, partition, offset)?;
                }
                let mut hasher = DefaultHasher::new();
                message.key().hash(&mut hasher);
                senders[hasher.finish() as usize % twin.lanes]
                    .send(message)
                    .await?;
            }
        };
        tokio::select! {
            () = stop.cancelled() => {}
            ended = receiving => return ended,
        }
        drop(senders);
        while let Some(ended) = lanes.join_next().await {
            ended??;
        }
        tokio::task::spawn_blocking(move || drop(consumer)).await?;
        Ok(())
    }

    async fn delete(&self, topic: &str) -> Result<(), BoxError> {
        self.admin.delete_topics(&[topic], &AdminOptions::new()).await?;
        Ok(())
    }
}

fn id(message: &OwnedMessage) -> String {
    message
        .headers()
        .and_then(|headers| headers.iter().find(|header| header.key == "onlyonce-event-id"))
        .and_then(|header| header.value)
        .map(|value| String::from_utf8_lossy(value).into_owned())
        .unwrap_or_default()
}

/// What came of each partition and is not done, and how far each is done.
#[derive(Default)]
struct Progress(HashMap<i32, (BTreeMap<i64, bool>, Option<i64>)>);

impl Progress {
    fn came(&mut self, message: &OwnedMessage) {
        let (open, _) = self.0.entry(message.partition()).or_default();
        open.insert(message.offset(), false);
    }

    fn done(&mut self, message: &OwnedMessage) {
        let (open, advanced) = self.0.entry(message.partition()).or_default();
        open.insert(message.offset(), true);
        while let Some(first) = open.first_entry()
            && *first.get()
        {
            *advanced = Some(first.remove_entry().0);
        }
    }

    fn advanced(&mut self) -> Vec<(i32, i64)> {
        self.0
            .iter_mut()
            .filter_map(|(partition, (_, advanced))| advanced.take().map(|offset| (*partition, offset)))
            .collect()
    }
}

/// One partition, 100 keys, a handler of 5 ms: the lanes' worth, and the order within each key.
async fn keys() -> Result<(), BoxError> {
    let bench = Bench::new(Cluster::new(1, 100)?).await?;
    let mut rates = Vec::new();
    for (lanes, events) in [(1, 200), (64, 10_000)] {
        let done = Done::of(events);
        let slow = Slow {
            done: done.clone(),
            last: Arc::default(),
            out_of_order: Arc::default(),
        };
        let out_of_order = slow.out_of_order.clone();
        let topic = bench.prepare(events).await?;
        throughput::run_out(bench.consumer(&topic, lanes, 1)?.handler(slow), &done).await?;
        let rate = done.rate()?;
        println!(
            "{lanes:>2} lanes {rate:>8.0}/s, {} out of order",
            out_of_order.load(Relaxed)
        );
        bench.finish(&topic, events).await?;
        rates.push(rate);
    }
    println!("64 lanes / 1 lane {:.1}", rates[1] / rates[0]);
    Ok(())
}

/// Takes its time, and looks whether its events of a key come in the order of the log.
struct Slow {
    done: Done,
    last: Arc<Mutex<HashMap<Bytes, i64>>>,
    out_of_order: Arc<AtomicU64>,
}

#[async_trait]
impl Handler<Postgres> for Slow {
    type Payload = Bytes;

    async fn handle(&self, cx: &mut Context<'_, Postgres>, event: Event<Bytes>) -> Result<(), HandlerError> {
        let offset = event
            .origin
            .detail
            .rsplit('=')
            .next()
            .unwrap_or_default()
            .parse()?;
        let before = self
            .last
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(event.key.unwrap_or_default(), offset);
        if before.is_some_and(|before: i64| before >= offset) {
            self.out_of_order.fetch_add(1, Relaxed);
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
        throughput::insert(cx.tx(), &event.identity.id, &event.payload).await?;
        self.done.add(1);
        Ok(())
    }
}
