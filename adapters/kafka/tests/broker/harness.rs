//! A topic and a group of its own per test, and what the broker says about them.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use onlyonce::event::RawEvent;
use onlyonce::source::{Plan, Source, SourceError};
use onlyonce_kafka::{Kafka, KafkaBuilder, StartAt};
pub(crate) use onlyonce_testbed::drive::{
    SOON, ack, bodies, body, lost, nothing, receipts, some, soon, unique,
};
use rdkafka::admin::{
    AdminClient, AdminOptions, AlterConfig, NewPartitions, NewTopic, ResourceSpecifier, TopicReplication,
};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::FromClientConfigAndContext;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext, Rebalance};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::{ClientConfig, ClientContext, Offset, TopicPartitionList};

/// Quick to notice, for tests.
pub(crate) const QUICK: [(&str, &str); 4] = [
    ("session.timeout.ms", "6000"),
    ("heartbeat.interval.ms", "200"),
    ("auto.commit.interval.ms", "100"),
    ("topic.metadata.refresh.interval.ms", "1000"),
];

/// The brokers, or `None` and a line that says so.
pub(crate) fn brokers() -> Option<String> {
    variable("ONLYONCE_KAFKA_BROKERS")
}

pub(crate) fn variable(name: &str) -> Option<String> {
    match std::env::var(name) {
        Ok(value) if !value.is_empty() => Some(value),
        _ if std::env::var("ONLYONCE_REQUIRE_SERVICES").is_ok_and(|v| v == "1") => {
            panic!("{name} is not set")
        }
        _ => {
            println!("skipped: no {name}");
            None
        }
    }
}

/// For people who look into a failure: RUST_LOG=onlyonce_kafka=debug,librdkafka=debug
pub(crate) fn show_logs() {
    let _ = tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_test_writer()
        .try_init();
}

/// A topic that exists until this is dropped, and a producer to fill it.
pub(crate) struct Topic {
    pub(crate) brokers: String,
    pub(crate) name: String,
    pub(crate) group: String,
    admin: AdminClient<DefaultClientContext>,
    producer: FutureProducer,
}

impl Topic {
    /// `None` if there is no broker to test against.
    pub(crate) async fn of(partitions: i32) -> Option<Self> {
        Self::with(partitions, &[]).await
    }

    pub(crate) async fn with(partitions: i32, settings: &[(&str, &str)]) -> Option<Self> {
        let topic = Self::named(brokers()?, unique("topic"));
        topic.create(partitions, settings).await;
        Some(topic)
    }

    /// Another topic, of one partition, whose name begins with that of this one.
    pub(crate) async fn sibling(&self, suffix: &str) -> Self {
        let topic = Self::named(self.brokers.clone(), format!("{}-{suffix}", self.name));
        topic.create(1, &[]).await;
        topic
    }

    fn named(brokers: String, name: String) -> Self {
        show_logs();
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", &brokers);
        let admin: AdminClient<DefaultClientContext> = config.create().unwrap();
        let producer = config.set("linger.ms", "1").set("acks", "all").create().unwrap();
        Self {
            group: format!("{name}-group"),
            brokers,
            name,
            admin,
            producer,
        }
    }

    pub(crate) async fn create(&self, partitions: i32, settings: &[(&str, &str)]) {
        let mut new = NewTopic::new(&self.name, partitions, TopicReplication::Fixed(1));
        for (name, value) in settings {
            new = new.set(name, value);
        }
        let created = self.admin.create_topics([&new], &options()).await.unwrap();
        created.into_iter().for_each(|topic| {
            topic.unwrap();
        });
        // Created is not yet led: a client that asks at once is told of no leader.
        let until = Instant::now() + SOON;
        while !self.is_led(partitions) {
            assert!(Instant::now() < until, "the topic has no leaders");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    fn is_led(&self, partitions: i32) -> bool {
        let metadata = self.admin.inner().fetch_metadata(Some(&self.name), SOON).unwrap();
        metadata.topics().iter().any(|topic| {
            topic.error().is_none()
                && topic.partitions().len() == partitions as usize
                && topic
                    .partitions()
                    .iter()
                    .all(|p| p.leader() >= 0 && p.error().is_none())
        })
    }

    pub(crate) async fn grow(&self, partitions: usize) {
        self.admin
            .create_partitions([&NewPartitions::new(&self.name, partitions)], &options())
            .await
            .unwrap();
    }

    /// Changes a setting of the topic.
    pub(crate) async fn set(&self, name: &str, value: &str) {
        let change = AlterConfig::new(ResourceSpecifier::Topic(&self.name)).set(name, value);
        for changed in self.admin.alter_configs([&change], &options()).await.unwrap() {
            changed.unwrap();
        }
    }

    pub(crate) async fn delete(&self) {
        self.admin.delete_topics(&[&self.name], &options()).await.unwrap();
    }

    /// Deletes what is before this offset, as retention does.
    pub(crate) async fn delete_before(&self, partition: i32, offset: i64) {
        let mut list = TopicPartitionList::new();
        list.add_partition_offset(&self.name, partition, Offset::Offset(offset))
            .unwrap();
        self.admin.delete_records(&list, &options()).await.unwrap();
    }

    pub(crate) async fn publish(&self, events: Vec<RawEvent>) {
        self.publish_to(None, events).await;
    }

    pub(crate) async fn publish_to(&self, partition: Option<i32>, events: Vec<RawEvent>) {
        let mut sent = Vec::new();
        for event in &events {
            let mut headers = OwnedHeaders::new();
            for (key, value) in event.headers.iter() {
                headers = headers.insert(Header { key, value });
            }
            if let Some(kind) = &event.event_type {
                headers = headers.insert(Header {
                    key: "onlyonce-event-type",
                    value: Some(&kind[..]),
                });
            }
            let mut record = FutureRecord::<[u8], [u8]>::to(&self.name).headers(headers);
            record.partition = partition;
            record.key = event.key.as_deref();
            record.payload = event.payload.as_deref();
            sent.push(self.producer.send_result(record).map_err(|(e, _)| e).unwrap());
        }
        for delivery in sent {
            delivery.await.unwrap().map_err(|(e, _)| e).unwrap();
        }
    }

    /// Publishes bodies `1..=count` under these keys in turn, to one partition.
    pub(crate) async fn fill(&self, partition: i32, count: usize, keys: &[&'static str]) {
        let events = (0..count)
            .map(|n| RawEvent {
                key: (!keys.is_empty()).then(|| keys[n % keys.len()].into()),
                payload: Some((n + 1).to_string().into()),
                ..RawEvent::default()
            })
            .collect();
        self.publish_to(Some(partition), events).await;
    }

    /// What the group has committed of a partition.
    pub(crate) async fn committed(&self, partition: i32) -> Option<i64> {
        committed(&self.brokers, &self.group, &self.name, partition).await
    }

    /// What the coordinator says of the group: `PreparingRebalance` while it waits for members.
    pub(crate) async fn group_state(&self) -> String {
        let (brokers, group) = (self.brokers.clone(), self.group.clone());
        tokio::task::spawn_blocking(move || {
            let client: BaseConsumer = ClientConfig::new()
                .set("bootstrap.servers", &brokers)
                .create()
                .unwrap();
            let groups = client.fetch_group_list(Some(&group), SOON).unwrap();
            groups.groups()[0].state().to_owned()
        })
        .await
        .unwrap()
    }

    pub(crate) async fn becomes_committed(&self, partition: i32, offset: i64) {
        let until = Instant::now() + SOON;
        loop {
            let committed = self.committed(partition).await;
            if committed == Some(offset) {
                return;
            }
            assert!(Instant::now() < until, "{committed:?} is committed, not {offset}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub(crate) fn source(&self) -> KafkaBuilder {
        self.source_at(&self.brokers)
    }

    /// By another of the brokers' doors.
    pub(crate) fn source_at(&self, brokers: &str) -> KafkaBuilder {
        let builder = Kafka::group(brokers, &self.group)
            .topic(&self.name)
            .start_at(StartAt::Earliest);
        QUICK
            .into_iter()
            .fold(builder, |builder, (name, value)| builder.set(name, value))
    }

    /// Another member of the group, of this strategy, which joins and is there when this returns.
    pub(crate) async fn rival(&self, strategy: &str) -> Rival {
        let mut config = ClientConfig::new();
        config
            .set("bootstrap.servers", &self.brokers)
            .set("group.id", &self.group)
            .set("partition.assignment.strategy", strategy)
            .set("enable.auto.commit", "false");
        for (name, value) in &QUICK[..2] {
            config.set(*name, *value);
        }
        Rival::join(config, self.name.clone()).await
    }
}

impl Drop for Topic {
    fn drop(&mut self) {
        tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(self.delete()));
    }
}

fn options() -> AdminOptions {
    AdminOptions::new().operation_timeout(Some(SOON))
}

/// What a group has committed of a partition.
pub(crate) async fn committed(brokers: &str, group: &str, topic: &str, partition: i32) -> Option<i64> {
    let (brokers, group, topic) = (brokers.to_owned(), group.to_owned(), topic.to_owned());
    tokio::task::spawn_blocking(move || {
        let client: BaseConsumer = ClientConfig::new()
            .set("bootstrap.servers", &brokers)
            .set("group.id", &group)
            .create()
            .unwrap();
        let mut list = TopicPartitionList::new();
        list.add_partition(&topic, partition);
        let committed = client.committed_offsets(list, SOON).unwrap();
        committed.elements()[0]
            .offset()
            .to_raw()
            .filter(|offset| *offset >= 0)
    })
    .await
    .unwrap()
}

/// A member of the group on a thread of its own, that reads nothing and commits nothing.
pub(crate) struct Rival {
    leave: mpsc::Sender<()>,
    thread: Option<std::thread::JoinHandle<()>>,
}

struct Joined(mpsc::Sender<()>);

impl ClientContext for Joined {}

impl ConsumerContext for Joined {
    fn post_rebalance(&self, _: &BaseConsumer<Self>, rebalance: &Rebalance<'_>) {
        if let Rebalance::Assign(_) = rebalance {
            let _ = self.0.send(());
        }
    }
}

impl Rival {
    async fn join(config: ClientConfig, topic: String) -> Self {
        let (leave, leaves) = mpsc::channel();
        let (joined, joins) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let consumer: BaseConsumer<Joined> =
                BaseConsumer::from_config_and_context(&config, Joined(joined)).unwrap();
            consumer.subscribe(&[&topic]).unwrap();
            while leaves.try_recv() == Err(mpsc::TryRecvError::Empty) {
                let _ = consumer.poll(Duration::from_millis(20));
            }
        });
        tokio::task::spawn_blocking(move || joins.recv_timeout(SOON).expect("the rival does not join"))
            .await
            .unwrap();
        Self {
            leave,
            thread: Some(thread),
        }
    }

    pub(crate) async fn leave(mut self) {
        let _ = self.leave.send(());
        let thread = self.thread.take().unwrap();
        tokio::task::spawn_blocking(|| thread.join().unwrap())
            .await
            .unwrap();
    }
}

pub(crate) async fn started(builder: KafkaBuilder, window: usize) -> Kafka {
    let mut source = builder.build().unwrap();
    source.start(&Plan::for_window("tests", window)).await.unwrap();
    source
}

/// The error of a start that has to fail.
pub(crate) async fn start_fails(builder: KafkaBuilder) -> SourceError {
    let mut source = builder.build().unwrap();
    let error = soon(source.start(&Plan::for_window("tests", 4)))
        .await
        .unwrap_err();
    assert!(!source.health().connected);
    assert_eq!(source.health().problem, Some(error.to_string()));
    error
}

/// Stops in good order.
pub(crate) async fn closes(mut source: Kafka) {
    source.stop().await.unwrap();
    onlyonce_testbed::drive::closes(source).await;
}
