//! Chaos with RabbitMQ; see `testbed/src/chaos`. `scripts/chaos rabbitmq` starts the servers and runs it.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties};
use onlyonce::async_trait;
use onlyonce_rabbitmq::RabbitMq;
use onlyonce_testbed::chaos::{self, Broker, Entrance, Event, Seat, variable};
use tokio::process::Command;

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    chaos::run::<Rabbit>().await
}

struct Rabbit {
    url: String,
    rabbitmqctl: String,
    /// A classic queue; else a quorum queue.
    classic: bool,
}

/// A connection and its channel, which does not keep it open by itself.
struct Producer {
    _connection: Connection,
    channel: Channel,
}

#[async_trait]
impl Broker for Rabbit {
    const SERVICE: &'static str = "rabbitmq";
    const USAGE: &'static str = "--classic";

    type Producer = Producer;
    type Source = RabbitMq;

    fn from_env() -> anyhow::Result<Self> {
        Ok(Self {
            url: variable("ONLYONCE_RABBITMQ_URL")?,
            rabbitmqctl: variable("ONLYONCE_RABBITMQCTL")?,
            classic: false,
        })
    }

    fn option(&mut self, argument: &str) -> bool {
        self.classic |= argument == "--classic";
        argument == "--classic"
    }

    fn entrance(&self, _place: usize) -> anyhow::Result<Entrance> {
        Ok(Entrance {
            url: self.url.clone(),
            port: 0,
        })
    }

    async fn declare(&self, name: &str) -> anyhow::Result<()> {
        let mut arguments = FieldTable::default();
        if !self.classic {
            arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
        }
        let Producer { channel, _connection } = self.producer().await?;
        channel
            .queue_declare(name.into(), QueueDeclareOptions::durable(), arguments)
            .await?;
        Ok(())
    }

    async fn delete(&self, name: &str) -> anyhow::Result<()> {
        let Producer { channel, _connection } = self.producer().await?;
        channel
            .queue_delete(name.into(), QueueDeleteOptions::default())
            .await?;
        Ok(())
    }

    async fn producer(&self) -> anyhow::Result<Producer> {
        let connection = Connection::connect(&self.url, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok(Producer {
            _connection: connection,
            channel,
        })
    }

    async fn publish(&self, producer: &Producer, name: &str, batch: &[&Event]) -> anyhow::Result<()> {
        let mut confirms = Vec::new();
        for event in batch {
            let properties = BasicProperties::default()
                .with_message_id(event.id.as_str().into())
                .with_delivery_mode(2);
            let options = BasicPublishOptions {
                mandatory: true,
                ..Default::default()
            };
            let body = serde_json::to_vec(event)?;
            confirms.push(
                producer
                    .channel
                    .basic_publish("".into(), name.into(), options, &body, properties)
                    .await?,
            );
        }
        for confirm in confirms {
            if !matches!(confirm.await?, Confirmation::Ack(None)) {
                bail!("refused or returned");
            }
        }
        Ok(())
    }

    async fn left(&self, name: &str) -> anyhow::Result<u64> {
        let arguments = [
            "--quiet",
            "list_queues",
            "--no-table-headers",
            "name",
            "messages_ready",
            "messages_unacknowledged",
        ];
        let output = Command::new(&self.rabbitmqctl).args(arguments).output().await?;
        let list = String::from_utf8_lossy(&output.stdout);
        let mut line = list
            .lines()
            .map(|line| line.split('\t'))
            .find_map(|mut fields| (fields.next() == Some(name)).then_some(fields))
            .with_context(|| format!("rabbitmqctl does not list the queue {name}: {list}"))?;
        let mut number =
            || -> anyhow::Result<u64> { Ok(line.next().context("a column is missing")?.trim().parse()?) };
        Ok(number()? + number()?)
    }

    fn source(&self, seat: &Seat) -> anyhow::Result<RabbitMq> {
        Ok(RabbitMq::queue(&seat.url, &seat.name)
            .heartbeat(Duration::from_secs(2))
            .connect_timeout(Duration::from_secs(3))
            .build()?)
    }
}
