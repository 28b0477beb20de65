//! The publisher: messages of one queue that are published at once go in one call.

mod config;
mod parcel;
mod queue;
mod urls;
mod verdict;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use aws_sdk_sqs::Client;
use onlyonce::publisher::{Message, PublishError, PublishErrorKind, Publisher, PublisherHealth};
use tokio_util::task::TaskTracker;

use self::config::Settings;
pub use self::config::SqsPublisherBuilder;
use self::parcel::Parcel;
use self::queue::Queue;
use self::urls::Urls;
use crate::config::ConfigError;
use crate::identity::SYSTEM;

/// The largest message to be counted on, in bytes: body, key, headers and what is stamped on them
/// ([`Message::size`]).
///
/// SQS takes 256 KiB, and 1 MiB at queues whose `MaximumMessageSize` says so, of text: what is no text becomes a third
/// longer (base64).
pub const MAX_MESSAGE_BYTES: usize = 180 << 10;

/// Publishes to the queues that one client can reach.
///
/// Made by [`SqsPublisher::to`]; see the [crate's documentation](crate#publishing) for what it promises.
pub struct SqsPublisher {
    settings: Arc<Settings>,
    urls: Urls,
    /// By URL.
    queues: Mutex<HashMap<String, Arc<Queue>>>,
    /// Messages under way, which a stop waits for.
    sending: TaskTracker,
    /// Calls under way, likewise.
    calls: TaskTracker,
    problem: Mutex<Option<String>>,
}

impl SqsPublisherBuilder {
    /// Checks the settings together and makes the publisher. Nothing is called yet.
    ///
    /// # Errors
    ///
    /// All settings that cannot work, in one error.
    pub fn build(self) -> Result<SqsPublisher, ConfigError> {
        Ok(SqsPublisher {
            settings: Arc::new(self.settings()?),
            urls: Urls::default(),
            queues: Mutex::default(),
            sending: TaskTracker::new(),
            calls: TaskTracker::new(),
            problem: Mutex::new(None),
        })
    }
}

impl SqsPublisher {
    /// Publishes by this client, made by `aws-config` or by [`Connection`](crate::Connection) from plain keys.
    ///
    /// An address is a queue's URL, or its name in the account and region of the client. The queue has to exist.
    pub fn to(client: Client) -> SqsPublisherBuilder {
        SqsPublisherBuilder::new(client)
    }

    async fn send(&self, message: &Message) -> Result<(), PublishError> {
        parcel::check(&message.address)?;
        let parcel = Parcel::of(message)?;
        let url = self.urls.of(&message.address, &self.settings).await?;
        let queue = self.queue(url);
        let (told, wanted) = queue.push(parcel, self.settings.calls);
        if wanted {
            // A task, so that a caller who goes does not take the messages of others with it.
            self.calls.spawn(queue.send_all(self.settings.clone()));
        }
        let told = told.await.unwrap_or_else(|_| {
            let why = "the call that this message was in came to no end";
            Err(PublishError::new(PublishErrorKind::Interrupted, why))
        });
        if told
            .as_ref()
            .is_err_and(|e| e.kind() == PublishErrorKind::Destination)
        {
            self.urls.forget(&message.address);
        }
        told
    }

    fn queue(&self, url: String) -> Arc<Queue> {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        let queue = queues
            .entry(url.clone())
            .or_insert_with(|| Arc::new(Queue::at(url)));
        queue.clone()
    }

    fn note(&self, told: &Result<(), PublishError>) {
        use PublishErrorKind::{Destination, Interrupted, Refused, Unavailable};
        match told.as_ref().map_err(PublishError::kind) {
            Ok(()) | Err(Refused | Destination) => *self.problem() = None,
            Err(Unavailable | Interrupted) => {
                *self.problem() = told.as_ref().err().map(PublishError::to_string)
            }
            Err(_) => {}
        }
    }

    fn problem(&self) -> MutexGuard<'_, Option<String>> {
        self.problem.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Publisher for SqsPublisher {
    fn system(&self) -> &'static str {
        SYSTEM
    }

    async fn publish(&self, message: &Message) -> Result<(), PublishError> {
        let unavailable = |why: &dyn fmt::Display| Err(PublishError::new(PublishErrorKind::Unavailable, why));
        if self.sending.is_closed() {
            return unavailable(&"the publisher is stopped");
        }
        let _sending = self.sending.token();
        let patience = self.settings.patience;
        let told = tokio::time::timeout(patience, self.send(message)).await;
        let told =
            told.unwrap_or_else(|_| unavailable(&format_args!("SQS took nothing within {patience:?}")));
        self.note(&told);
        told
    }

    fn patience(&self) -> Duration {
        self.settings.patience
    }

    fn health(&self) -> PublisherHealth {
        match &*self.problem() {
            Some(problem) => PublisherHealth::down(problem.clone()),
            None => PublisherHealth::up(),
        }
    }

    async fn stop(&self) {
        self.sending.close();
        // Each of them answers within the patience, and each call within its limit.
        self.sending.wait().await;
        self.calls.close();
        self.calls.wait().await;
    }
}

impl fmt::Debug for SqsPublisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqsPublisher")
            .field("under_way", &self.sending.len())
            .field("health", &self.health())
            .finish_non_exhaustive()
    }
}
