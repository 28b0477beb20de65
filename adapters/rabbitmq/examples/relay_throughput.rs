//! How fast a relay publishes to RabbitMQ, beside the same events published by hand with lapin and without a database;
//! and how long an event takes from its commit to a consumer.
//!
//! ```sh
//! scripts/services up && eval "$(scripts/services env)"
//! cargo run --release -p onlyonce-rabbitmq --example relay_throughput -- --events 50000 --rounds 3
//! ```
//!
//! `--only NAME` measures the variants with NAME in their name, or `latency`.

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Confirmation, Connection, ConnectionProperties};
use onlyonce::async_trait;
use onlyonce_rabbitmq::{RabbitMq, RabbitMqPublisher};
use onlyonce_testbed::throughput::relay::{self, Broker, EVENT_TYPE, SOURCE, TIME, key};
use onlyonce_testbed::throughput::{BODY, BoxError, Done, environment, event_id};

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    relay::run(Rabbit {
        url: environment("ONLYONCE_RABBITMQ_URL")?,
    })
    .await
}

/// [`TIME`] as AMQP's property has it.
const SECONDS: u64 = 1_767_323_045;

struct Rabbit {
    url: String,
}

#[async_trait]
impl Broker for Rabbit {
    type Publisher = RabbitMqPublisher;
    type Source = RabbitMq;

    /// What the publisher's default number of channels allows.
    const IN_FLIGHT: usize = 64;

    async fn fresh(&self) -> Result<String, BoxError> {
        let queue = format!("bench-{}", std::time::UNIX_EPOCH.elapsed()?.as_micros());
        let channel = self.connect().await?.create_channel().await?;
        channel
            .queue_declare(
                queue.as_str().into(),
                QueueDeclareOptions::durable(),
                FieldTable::default(),
            )
            .await?;
        Ok(format!("/{queue}"))
    }

    fn publisher(&self) -> Result<RabbitMqPublisher, BoxError> {
        Ok(RabbitMqPublisher::to(&self.url).build()?)
    }

    fn source(&self, address: &str) -> Result<RabbitMq, BoxError> {
        Ok(RabbitMq::queue(&self.url, queue(address)).build()?)
    }

    async fn by_hand(&self, address: &str, events: u64, done: &Done) -> Result<(), BoxError> {
        let connection = self.connect().await?;
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        let options = BasicPublishOptions {
            mandatory: true,
            immediate: false,
        };
        let mut unconfirmed = FuturesUnordered::new();
        for n in 0..events {
            let (id, key) = (event_id(n), key(n));
            let mut headers = FieldTable::default();
            for (name, value) in [
                ("onlyonce-event-id", id.as_str()),
                ("onlyonce-event-source", SOURCE),
                ("ce-specversion", "1.0"),
                ("ce-id", &id),
                ("ce-source", SOURCE),
                ("ce-type", EVENT_TYPE),
                ("ce-time", TIME),
                ("onlyonce-ordering-key", &key),
            ] {
                headers.insert(name.into(), AMQPValue::LongString(value.into()));
            }
            let properties = BasicProperties::default()
                .with_message_id(id.into())
                .with_app_id(SOURCE.into())
                .with_type(EVENT_TYPE.into())
                .with_timestamp(SECONDS)
                .with_headers(headers)
                .with_delivery_mode(2);
            let confirm = channel
                .basic_publish(
                    "".into(),
                    queue(address).into(),
                    options,
                    BODY.as_bytes(),
                    properties,
                )
                .await?;
            unconfirmed.push(confirm);
            if unconfirmed.len() == Self::IN_FLIGHT || n == events - 1 {
                while let Some(confirmation) = unconfirmed.next().await {
                    if !matches!(confirmation?, Confirmation::Ack(None)) {
                        return Err("a message was refused".into());
                    }
                    done.add(1);
                    if n < events - 1 {
                        break;
                    }
                }
            }
        }
        connection.close(200, "done".into()).await?;
        Ok(())
    }

    async fn delete(&self, address: &str) -> Result<(), BoxError> {
        let channel = self.connect().await?.create_channel().await?;
        channel
            .queue_delete(queue(address).into(), QueueDeleteOptions::default())
            .await?;
        Ok(())
    }
}

impl Rabbit {
    async fn connect(&self) -> Result<Connection, BoxError> {
        Ok(Connection::connect(&self.url, ConnectionProperties::default()).await?)
    }
}

/// By way of the default exchange.
fn queue(address: &str) -> &str {
    address.trim_start_matches('/')
}
