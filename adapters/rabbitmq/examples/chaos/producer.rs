//! Publishes the events, each until the broker has confirmed it.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::events::{self, Event};
use crate::options::Options;
use crate::servers::Servers;

/// How many publishes wait for their confirms at once.
const BATCH: usize = 50;
const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) struct Producer {
    url: String,
    queue: String,
    seed: u64,
}

impl Producer {
    pub(crate) fn new(servers: &Servers, options: &Options) -> Self {
        Self {
            url: servers.rabbitmq.clone(),
            queue: options.name.clone(),
            seed: options.seed,
        }
    }

    /// Publishes as many as are released, until it was all. A batch that was not confirmed as a
    /// whole is published again, as any producer would: more duplicates.
    pub(crate) async fn publish_all(
        self,
        events: Arc<Vec<Event>>,
        mut released: watch::Receiver<usize>,
    ) -> anyhow::Result<()> {
        let publications = events::publications(self.seed, events.len());
        let (mut done, mut link) = (0, None);
        while done < publications.len() {
            let released_events = *released.wait_for(|&released| released > 0).await?;
            // Of the publications, as large a part as of the events.
            let until = publications.len() * released_events / events.len();
            if done >= until {
                released.changed().await?;
                continue;
            }
            let batch = &publications[done..until.min(done + BATCH)];
            match timeout(
                PATIENCE,
                self.publish(&mut link, batch.iter().map(|&n| &events[n])),
            )
            .await
            {
                Ok(Ok(())) => done += batch.len(),
                Ok(Err(_)) | Err(_) => {
                    link = None;
                    sleep(Duration::from_millis(200)).await;
                }
            }
        }
        Ok(())
    }

    async fn publish<'a>(
        &self,
        link: &mut Option<(Connection, Channel)>,
        batch: impl Iterator<Item = &'a Event>,
    ) -> anyhow::Result<()> {
        let (_, channel) = match link {
            Some(link) => link,
            None => {
                let (connection, channel) = connect(&self.url).await?;
                channel.confirm_select(ConfirmSelectOptions::default()).await?;
                link.insert((connection, channel))
            }
        };
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
                channel
                    .basic_publish("".into(), self.queue.as_str().into(), options, &body, properties)
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
}

pub(crate) async fn declare(url: &str, options: &Options) -> anyhow::Result<()> {
    let (_connection, channel) = connect(url).await.context("the broker")?;
    let mut arguments = FieldTable::default();
    if !options.classic {
        arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    }
    channel
        .queue_declare(
            options.name.as_str().into(),
            QueueDeclareOptions::durable(),
            arguments,
        )
        .await?;
    Ok(())
}

pub(crate) async fn delete(url: &str, queue: &str) -> anyhow::Result<()> {
    let (_connection, channel) = connect(url).await?;
    channel
        .queue_delete(queue.into(), QueueDeleteOptions::default())
        .await?;
    Ok(())
}

async fn connect(url: &str) -> anyhow::Result<(Connection, Channel)> {
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    Ok((connection, channel))
}
