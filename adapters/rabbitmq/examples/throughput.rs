//! How fast events go from RabbitMQ to PostgreSQL, beside the same loop written by hand with lapin and sqlx.
//!
//! ```sh
//! scripts/services up && eval "$(scripts/services env)"
//! cargo run --release -p onlyonce-rabbitmq --example throughput -- --events 40000 --rounds 3
//! ```
//!
//! `--only NAME` measures the variants with NAME in their name; `--memory` instead fills a queue and shows
//! how much memory a consumer takes while it works on it.

use std::sync::Arc;

use futures_util::{FutureExt as _, StreamExt as _};
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions, ConfirmSelectOptions,
    QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Connection, ConnectionProperties, message::Delivery};
use onlyonce::async_trait;
use onlyonce_rabbitmq::RabbitMq;
use onlyonce_testbed::throughput::{self, BODY, BoxError, Broker, Twin, environment, event_id};
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    throughput::run(Rabbit {
        url: environment("ONLYONCE_RABBITMQ_URL")?,
    })
    .await
}

struct Rabbit {
    url: String,
}

#[async_trait]
impl Broker for Rabbit {
    type Source = RabbitMq;

    const BATCH: usize = 100;

    /// One: only then may an ack cover all before it.
    const BARE_LANES: usize = 1;

    async fn filled(&self, events: u64) -> Result<String, BoxError> {
        let queue = format!("bench-{:08x}", std::process::id());
        let connection = self.connect().await?;
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        let options = QueueDeclareOptions::durable();
        channel
            .queue_declare(queue.as_str().into(), options, FieldTable::default())
            .await?;
        for n in 0..events {
            let properties = BasicProperties::default()
                .with_message_id(event_id(n).into())
                .with_delivery_mode(2);
            let options = BasicPublishOptions::default();
            channel
                .basic_publish(
                    "".into(),
                    queue.as_str().into(),
                    options,
                    BODY.as_bytes(),
                    properties,
                )
                .await?;
            if n % 5000 == 4999 {
                // What is unconfirmed is kept in memory, and memory is measured here.
                channel.wait_for_confirms().await?;
            }
        }
        channel.wait_for_confirms().await?;
        connection.close(200, "filled".into()).await?;
        Ok(queue)
    }

    fn source(&self, queue: &str) -> Result<RabbitMq, BoxError> {
        Ok(RabbitMq::queue(&self.url, queue).build()?)
    }

    async fn by_hand(&self, queue: &str, twin: Twin, stop: CancellationToken) -> Result<(), BoxError> {
        let connection = self.connect().await?;
        let channel = connection.create_channel().await?;
        // As many as the consumer asks for.
        let prefetch = twin.lanes * (twin.batch + twin.batch.max(3));
        channel
            .basic_qos(prefetch.try_into()?, BasicQosOptions::default())
            .await?;
        let consumer = channel
            .basic_consume(
                queue.into(),
                "bench".into(),
                BasicConsumeOptions::default(),
                FieldTable::default(),
            )
            .await?;
        let consumer = Arc::new(Mutex::new(consumer));
        let mut lanes = JoinSet::new();
        for _ in 0..twin.lanes {
            let (consumer, stop, batch) = (consumer.clone(), stop.clone(), twin.batch);
            let (alone, mut lane) = (twin.lanes == 1, twin.lane().await?);
            lanes.spawn(async move {
                loop {
                    let deliveries = tokio::select! {
                        () = stop.cancelled() => return Ok::<_, BoxError>(()),
                        deliveries = next(&consumer, batch) => deliveries?,
                    };
                    let events: Vec<_> = deliveries
                        .iter()
                        .map(|delivery| (id(delivery), delivery.data.as_slice()))
                        .collect();
                    lane.apply(&events).await?;
                    let told = if alone { deliveries.len() - 1 } else { 0 };
                    for delivery in &deliveries[told..] {
                        delivery.ack(BasicAckOptions { multiple: alone }).await?;
                    }
                }
            });
        }
        while let Some(ended) = lanes.join_next().await {
            ended??;
        }
        connection.close(200, "done".into()).await?;
        Ok(())
    }

    async fn delete(&self, queue: &str) -> Result<(), BoxError> {
        let channel = self.connect().await?.create_channel().await?;
        channel
            .queue_delete(queue.into(), QueueDeleteOptions::default())
            .await?;
        Ok(())
    }
}

impl Rabbit {
    async fn connect(&self) -> Result<Connection, BoxError> {
        Ok(Connection::connect(&self.url, ConnectionProperties::default()).await?)
    }
}

/// The next delivery, and those that are here already.
async fn next(consumer: &Mutex<lapin::Consumer>, batch: usize) -> Result<Vec<Delivery>, BoxError> {
    let mut consumer = consumer.lock().await;
    let first = consumer.next().await.ok_or("the consumer was cancelled")??;
    let mut deliveries = vec![first];
    while deliveries.len() < batch
        && let Some(Some(more)) = consumer.next().now_or_never()
    {
        deliveries.push(more?);
    }
    Ok(deliveries)
}

fn id(delivery: &Delivery) -> &str {
    delivery
        .properties
        .message_id()
        .as_ref()
        .map_or("", |id| id.as_str())
}
