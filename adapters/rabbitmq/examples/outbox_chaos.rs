//! Outbox chaos with RabbitMQ; see `testbed/src/outbox_chaos`. `scripts/chaos outbox-rabbitmq` starts the servers and
//! runs it.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use futures_util::StreamExt as _;
use lapin::options::{
    BasicConsumeOptions, ExchangeDeclareOptions, ExchangeDeleteOptions, QueueBindOptions,
    QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties, ExchangeKind};
use onlyonce::async_trait;
use onlyonce::outbox::OutgoingEvent;
use onlyonce_rabbitmq::RabbitMqPublisher;
use onlyonce_testbed::chaos::variable;
use onlyonce_testbed::outbox_chaos::{self, Arrival, Broker, Route};

/// More than the properties of a message may have: one frame of the connection, by default 128 KiB.
const TOO_LARGE: usize = 200_000;
/// What the queues are bound by.
const ROUTING_KEY: &str = "happened";

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    outbox_chaos::run::<Rabbit>().await
}

struct Rabbit {
    url: String,
}

#[async_trait]
impl Broker for Rabbit {
    const SERVICE: &'static str = "rabbitmq";

    type Publisher = RabbitMqPublisher;

    fn from_env() -> anyhow::Result<Self> {
        Ok(Self {
            url: variable("ONLYONCE_RABBITMQ_URL")?,
        })
    }

    fn publisher(&self) -> anyhow::Result<RabbitMqPublisher> {
        Ok(RabbitMqPublisher::to(&self.url)
            .heartbeat(Duration::from_secs(2))
            .connect_timeout(Duration::from_secs(3))
            .patience(Duration::from_secs(8))
            .build()?)
    }

    fn address(&self, name: &str, route: Route) -> String {
        format!("{}/{ROUTING_KEY}", place(name, route))
    }

    async fn declare(&self, name: &str) -> anyhow::Result<()> {
        let (_connection, channel) = self.channel().await?;
        let mut arguments = FieldTable::default();
        arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
        for route in [Route::Rough, Route::Calm] {
            let place = place(name, route);
            channel
                .queue_declare(
                    place.as_str().into(),
                    QueueDeclareOptions::durable(),
                    arguments.clone(),
                )
                .await?;
            declare_exchange(&channel, &place).await?;
        }
        Ok(())
    }

    async fn delete(&self, name: &str) -> anyhow::Result<()> {
        let (_connection, channel) = self.channel().await?;
        for route in [Route::Rough, Route::Calm] {
            let place = place(name, route);
            delete_exchange(&channel, &place).await?;
            channel
                .queue_delete(place.as_str().into(), QueueDeleteOptions::default())
                .await?;
        }
        Ok(())
    }

    fn poisoned(&self, event: OutgoingEvent) -> OutgoingEvent {
        event.header("large", "x".repeat(TOO_LARGE))
    }

    /// The exchange is deleted, and with it its binding, and declared again.
    async fn disturb(&self, name: &str, time: Duration) -> anyhow::Result<Option<&'static str>> {
        let (_connection, channel) = self.channel().await?;
        let place = place(name, Route::Rough);
        delete_exchange(&channel, &place).await?;
        tokio::time::sleep(time).await;
        declare_exchange(&channel, &place).await?;
        Ok(Some("DeleteExchange"))
    }

    async fn read_all(&self, name: &str, route: Route) -> anyhow::Result<Vec<Arrival>> {
        let (_connection, channel) = self.channel().await?;
        let place = place(name, route);
        let passive = QueueDeclareOptions {
            passive: true,
            ..QueueDeclareOptions::durable()
        };
        let queue = channel
            .queue_declare(place.as_str().into(), passive, FieldTable::default())
            .await?;
        let options = BasicConsumeOptions {
            no_ack: true,
            ..Default::default()
        };
        let mut consumer = channel
            .basic_consume(place.as_str().into(), "".into(), options, FieldTable::default())
            .await?;
        let mut arrivals = Vec::new();
        while arrivals.len() < queue.message_count() as usize {
            let delivery = tokio::time::timeout(Duration::from_secs(10), consumer.next())
                .await
                .with_context(|| format!("{place} says nothing more after {}", arrivals.len()))?
                .context("the consumer was cancelled")??;
            arrivals.push(Arrival {
                event_id: header(&delivery.properties, "onlyonce-event-id")?,
                key: header(&delivery.properties, "onlyonce-ordering-key")?,
                body: String::from_utf8_lossy(&delivery.data).into_owned(),
            });
        }
        Ok(arrivals)
    }
}

impl Rabbit {
    /// The connection, which the channel does not keep open by itself.
    async fn channel(&self) -> anyhow::Result<(Connection, Channel)> {
        let connection = Connection::connect(&self.url, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        Ok((connection, channel))
    }
}

/// The exchange of a route, and the queue that is bound to it.
fn place(name: &str, route: Route) -> String {
    match route {
        Route::Rough => format!("{name}.rough"),
        _ => format!("{name}.calm"),
    }
}

/// With its queue bound to it.
async fn declare_exchange(channel: &Channel, place: &str) -> anyhow::Result<()> {
    let durable = ExchangeDeclareOptions {
        durable: true,
        ..Default::default()
    };
    channel
        .exchange_declare(place.into(), ExchangeKind::Direct, durable, FieldTable::default())
        .await?;
    channel
        .queue_bind(
            place.into(),
            place.into(),
            ROUTING_KEY.into(),
            QueueBindOptions::default(),
            FieldTable::default(),
        )
        .await?;
    Ok(())
}

async fn delete_exchange(channel: &Channel, place: &str) -> anyhow::Result<()> {
    channel
        .exchange_delete(place.into(), ExchangeDeleteOptions::default())
        .await?;
    Ok(())
}

fn header(properties: &BasicProperties, name: &str) -> anyhow::Result<String> {
    let value = properties
        .headers()
        .as_ref()
        .and_then(|table| table.inner().get(name));
    match value {
        Some(AMQPValue::LongString(text)) => Ok(text.to_string()),
        other => Err(anyhow!("the header {name} is {other:?}")),
    }
}
