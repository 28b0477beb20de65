//! The queue that payments come from, and the topic between the two consumers.

use std::time::Duration;

use anyhow::{Context as _, anyhow};
use futures_util::future::join_all;
use lapin::options::{QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, Connection, ConnectionProperties};
use onlyonce::publisher::{Message, Publisher};
use onlyonce_rabbitmq::RabbitMqPublisher;
use onlyonce_testbed::chaos::variable;
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;

use crate::payment::Payment;

const PARTITIONS: i32 = 6;
/// Every so many-th payment comes twice.
const TWICE: usize = 10;

pub(crate) struct Brokers {
    rabbitmq: String,
    kafka: String,
    publisher: RabbitMqPublisher,
}

impl Brokers {
    /// From the variables that `scripts/services env` prints.
    pub(crate) fn from_env() -> anyhow::Result<Self> {
        let rabbitmq = variable("ONLYONCE_RABBITMQ_URL")?;
        Ok(Self {
            publisher: RabbitMqPublisher::to(&rabbitmq).build()?,
            rabbitmq,
            kafka: variable("ONLYONCE_KAFKA_BROKERS")?,
        })
    }

    /// Creates queue and topic.
    pub(crate) async fn declare(&self, name: &str) -> anyhow::Result<()> {
        let (_connection, channel) = self.channel().await?;
        let mut arguments = FieldTable::default();
        arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
        channel
            .queue_declare(name.into(), QueueDeclareOptions::durable(), arguments)
            .await?;
        let topic = NewTopic::new(name, PARTITIONS, TopicReplication::Fixed(1));
        for created in self
            .admin()?
            .create_topics([&topic], &AdminOptions::new())
            .await?
        {
            created.map_err(|(topic, code)| anyhow!("{topic}: {code}"))?;
        }
        Ok(())
    }

    /// Deletes them.
    pub(crate) async fn delete(&self, name: &str) -> anyhow::Result<()> {
        let (_connection, channel) = self.channel().await?;
        channel
            .queue_delete(name.into(), QueueDeleteOptions::default())
            .await?;
        self.admin()?.delete_topics(&[name], &AdminOptions::new()).await?;
        Ok(())
    }

    /// Publishes payments, some of them twice.
    pub(crate) async fn publish(&self, name: &str, payments: &[Payment]) -> anyhow::Result<()> {
        let copies = payments.iter().step_by(TWICE);
        let publish = payments.iter().chain(copies).map(|payment| async {
            let body = serde_json::to_vec(payment)?;
            let message = Message::new(format!("/{name}"), "e2e", payment.id.as_str(), body);
            self.publisher.publish(&message).await.context("the producer")
        });
        join_all(publish).await.into_iter().collect()
    }

    /// No payment waits.
    pub(crate) async fn are_empty(&self, name: &str) -> anyhow::Result<bool> {
        let (_connection, channel) = self.channel().await?;
        let passive = QueueDeclareOptions {
            passive: true,
            ..QueueDeclareOptions::durable()
        };
        let queue = channel
            .queue_declare(name.into(), passive, FieldTable::default())
            .await?;
        Ok(queue.message_count() == 0)
    }

    /// The connection, which the channel does not keep open by itself.
    async fn channel(&self) -> anyhow::Result<(Connection, Channel)> {
        let connection = Connection::connect(&self.rabbitmq, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        Ok((connection, channel))
    }

    fn admin(&self) -> anyhow::Result<AdminClient<DefaultClientContext>> {
        Ok(ClientConfig::new()
            .set("bootstrap.servers", &self.kafka)
            .set(
                "socket.timeout.ms",
                Duration::from_secs(10).as_millis().to_string(),
            )
            .create()?)
    }
}
