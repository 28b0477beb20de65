//! Publishes the events, each until the broker has confirmed it.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::broker::Broker;
use super::events::{self, Event};
use super::options::Options;

/// How many publishes wait for their confirms at once.
const BATCH: usize = 50;
const PATIENCE: Duration = Duration::from_secs(10);

pub(super) struct Producer<B: Broker> {
    broker: Arc<B>,
    name: String,
    seed: u64,
    link: Option<B::Producer>,
}

impl<B: Broker> Producer<B> {
    pub(super) fn new(broker: Arc<B>, options: &Options) -> Self {
        Self {
            broker,
            name: options.name.clone(),
            seed: options.seed,
            link: None,
        }
    }

    /// Publishes as many as are released, until it was all. A batch that was not confirmed as a
    /// whole is published again, as any producer would: more duplicates.
    pub(super) async fn publish_all(
        mut self,
        events: Arc<Vec<Event>>,
        mut released: watch::Receiver<usize>,
    ) -> anyhow::Result<()> {
        let publications = events::publications(self.seed, &events);
        let mut done = 0;
        while done < publications.len() {
            let released_events = *released.wait_for(|&released| released > 0).await?;
            // Of the publications, as large a part as of the events.
            let until = publications.len() * released_events / events.len();
            if done >= until {
                released.changed().await?;
                continue;
            }
            let batch: Vec<_> = publications[done..until.min(done + BATCH)]
                .iter()
                .map(|&n| &events[n])
                .collect();
            match timeout(PATIENCE, self.publish(&batch)).await {
                Ok(Ok(())) => done += batch.len(),
                Ok(Err(_)) | Err(_) => {
                    self.link = None;
                    sleep(Duration::from_millis(200)).await;
                }
            }
        }
        Ok(())
    }

    async fn publish(&mut self, batch: &[&Event]) -> anyhow::Result<()> {
        let link = match &self.link {
            Some(link) => link,
            None => self.link.insert(self.broker.producer().await?),
        };
        self.broker.publish(link, &self.name, batch).await
    }
}
