//! A queue of its own per test, and what the broker says about it.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use lapin::message::Delivery;
use lapin::options::{
    BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions, ExchangeDeclareOptions, QueueBindOptions,
    QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties, ExchangeKind};
use onlyonce::source::{Plan, Source, SourceError};
use onlyonce_rabbitmq::{RabbitMq, RabbitMqBuilder};
pub(crate) use onlyonce_testbed::drive::{
    SOON, ack, bodies, body, closes, lost, nothing, one, receipts, release, some, soon, unique,
};
use tokio::sync::RwLock;

/// Held for writing by the one test that changes a setting of the whole broker.
pub(crate) static SETTINGS: RwLock<()> = RwLock::const_new(());

/// The broker's URL, or `None` and a line that says so.
pub(crate) fn url() -> Option<String> {
    variable("ONLYONCE_RABBITMQ_URL")
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

/// A queue that exists until this is dropped, and a connection to fill and watch it.
pub(crate) struct Queue {
    pub(crate) url: String,
    pub(crate) name: String,
    channel: Channel,
    _connection: Connection,
}

impl Queue {
    /// `None` if there is no broker to test against.
    pub(crate) async fn classic() -> Option<Self> {
        Self::declare(&[]).await
    }

    pub(crate) async fn quorum() -> Option<Self> {
        Self::declare(&[("x-queue-type", AMQPValue::LongString("quorum".into()))]).await
    }

    /// The broker elects who coordinates streams when the first one is declared; until then it refuses.
    pub(crate) async fn stream() -> Option<Self> {
        let kind = ("x-queue-type", AMQPValue::LongString("stream".into()));
        soon(async {
            loop {
                let queue = Self::open().await?;
                match queue
                    .try_create(QueueDeclareOptions::durable(), std::slice::from_ref(&kind))
                    .await
                {
                    Ok(()) => return Some(queue),
                    Err(error) if error.to_string().contains("coordinator_unavailable") => {}
                    Err(error) => panic!("{error}"),
                }
            }
        })
        .await
    }

    pub(crate) async fn declare(arguments: &[(&str, AMQPValue)]) -> Option<Self> {
        Self::declare_with(QueueDeclareOptions::durable(), arguments).await
    }

    pub(crate) async fn declare_with(
        options: QueueDeclareOptions,
        arguments: &[(&str, AMQPValue)],
    ) -> Option<Self> {
        let queue = Self::open().await?;
        queue.create(options, arguments).await;
        Some(queue)
    }

    /// A name and a connection; the queue is not there yet.
    async fn open() -> Option<Self> {
        let url = url()?;
        let _unchanged = SETTINGS.read().await;
        let connection = Connection::connect(&url, ConnectionProperties::default())
            .await
            .unwrap();
        let channel = connection.create_channel().await.unwrap();
        channel
            .confirm_select(ConfirmSelectOptions::default())
            .await
            .unwrap();
        Some(Self {
            url,
            name: unique("queue"),
            channel,
            _connection: connection,
        })
    }

    pub(crate) async fn create(&self, options: QueueDeclareOptions, arguments: &[(&str, AMQPValue)]) {
        self.try_create(options, arguments).await.unwrap();
    }

    async fn try_create(
        &self,
        options: QueueDeclareOptions,
        arguments: &[(&str, AMQPValue)],
    ) -> lapin::Result<()> {
        let mut table = FieldTable::default();
        for (name, value) in arguments {
            table.insert((*name).into(), value.clone());
        }
        self.channel
            .queue_declare(self.name.as_str().into(), options, table)
            .await?;
        Ok(())
    }

    pub(crate) async fn delete(&self) {
        self.channel
            .queue_delete(self.name.as_str().into(), QueueDeleteOptions::default())
            .await
            .unwrap();
    }

    /// An exchange of this kind, with the queue bound to it by this key, if any.
    pub(crate) async fn exchange(&self, kind: ExchangeKind, bound: Option<&str>) -> String {
        let name = unique("exchange");
        self.exchange_named(&name, kind).await;
        if let Some(key) = bound {
            self.bind(&name, key).await;
        }
        name
    }

    /// It goes with the last queue that was bound to it.
    pub(crate) async fn exchange_named(&self, name: &str, kind: ExchangeKind) {
        let options = ExchangeDeclareOptions {
            auto_delete: true,
            ..Default::default()
        };
        self.channel
            .exchange_declare(name.into(), kind, options, FieldTable::default())
            .await
            .unwrap();
    }

    pub(crate) async fn bind(&self, exchange: &str, key: &str) {
        let options = QueueBindOptions::default();
        self.channel
            .queue_bind(
                self.name.as_str().into(),
                exchange.into(),
                key.into(),
                options,
                FieldTable::default(),
            )
            .await
            .unwrap();
    }

    /// Publishes bodies `1..=count`, confirmed.
    pub(crate) async fn fill(&self, count: u32) {
        for n in 1..=count {
            self.publish(n.to_string().as_bytes(), BasicProperties::default())
                .await;
        }
    }

    pub(crate) async fn publish(&self, body: &[u8], properties: BasicProperties) {
        self.try_publish(body, properties).await.unwrap();
    }

    pub(crate) async fn try_publish(&self, body: &[u8], properties: BasicProperties) -> lapin::Result<()> {
        let options = BasicPublishOptions::default();
        let publishing =
            self.channel
                .basic_publish("".into(), self.name.as_str().into(), options, body, properties);
        publishing.await?.await?;
        Ok(())
    }

    /// Takes the next message away, as the broker has it.
    pub(crate) async fn get(&self) -> Option<Delivery> {
        let options = BasicGetOptions { no_ack: true };
        let got = self.channel.basic_get(self.name.as_str().into(), options);
        got.await.unwrap().map(|message| message.delivery)
    }

    /// How many messages are ready, which leaves out what a consumer holds.
    pub(crate) async fn ready(&self) -> u32 {
        let passive = QueueDeclareOptions {
            passive: true,
            ..Default::default()
        };
        let queue = self
            .channel
            .queue_declare(self.name.as_str().into(), passive, FieldTable::default());
        queue.await.unwrap().message_count()
    }

    pub(crate) async fn consumers(&self) -> u32 {
        let passive = QueueDeclareOptions {
            passive: true,
            ..Default::default()
        };
        let queue = self
            .channel
            .queue_declare(self.name.as_str().into(), passive, FieldTable::default());
        queue.await.unwrap().consumer_count()
    }

    pub(crate) async fn becomes_ready(&self, count: u32) {
        let until = Instant::now() + SOON;
        loop {
            let ready = self.ready().await;
            if ready == count {
                return;
            }
            assert!(Instant::now() < until, "{ready} messages are ready, not {count}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub(crate) fn source(&self) -> RabbitMqBuilder {
        RabbitMq::queue(&self.url, &self.name)
    }

    /// Started, with room for `window` deliveries.
    pub(crate) async fn started(&self, window: usize) -> RabbitMq {
        started(self.source(), window).await
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let deleting = self
            .channel
            .queue_delete(self.name.as_str().into(), QueueDeleteOptions::default());
        tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(deleting)).ok();
    }
}

pub(crate) async fn started(builder: RabbitMqBuilder, window: usize) -> RabbitMq {
    let _unchanged = SETTINGS.read().await;
    let mut source = builder.build().unwrap();
    source.start(&Plan::for_window("tests", window)).await.unwrap();
    source
}

/// The error of a start that has to fail.
pub(crate) async fn start_fails(builder: RabbitMqBuilder) -> SourceError {
    let mut source = builder.build().unwrap();
    let error = soon(source.start(&Plan::for_window("tests", 4)))
        .await
        .unwrap_err();
    assert!(!source.health().connected);
    assert_eq!(source.health().problem, Some(error.to_string()));
    error
}

/// Runs rabbitmqctl; `None` if there is none.
pub(crate) async fn ctl(arguments: &[&str]) -> Option<String> {
    let program = variable("ONLYONCE_RABBITMQCTL")?;
    let output = tokio::process::Command::new(program)
        .args(arguments)
        .output()
        .await
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "rabbitmqctl {arguments:?}: {text} {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Some(text)
}

/// The pids of the broker's ends of all connections of this name.
pub(crate) async fn connections(name: &str) -> Option<Vec<String>> {
    let list = ctl(&[
        "list_connections",
        "--silent",
        "--no-table-headers",
        "pid",
        "client_properties",
    ])
    .await?;
    let wanted = format!("\"{name}\"");
    Some(
        list.lines()
            .filter(|l| l.contains(&wanted))
            .map(|l| l.split('\t').next().unwrap().to_owned())
            .collect(),
    )
}

/// How many threads of lapin this process has, by the thread's name.
pub(crate) fn io_threads() -> usize {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else {
        return 0;
    };
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    let mut count: HashMap<String, usize> = HashMap::new();
    names.for_each(|name| *count.entry(name.trim().to_owned()).or_default() += 1);
    count.remove("lapin-io-loop").unwrap_or_default()
}
