//! The publisher: one connection of its own, one channel for each message that is under way.
//!
//! lapin hands a returned message to whichever confirm comes next on its channel. With several messages under
//! way that may be another's, and the returned one would look confirmed. So a channel has one message at a
//! time; what comes on it, a return, a nack, its end, is about that message and nobody else's.

mod config;
mod link;
mod parcel;
mod verdict;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use lapin::options::BasicPublishOptions;
use onlyonce::publisher::{Message, PublishError, PublishErrorKind, Publisher, PublisherHealth};
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

pub use self::config::RabbitMqPublisherBuilder;
use self::config::Settings;
use self::link::Links;
use self::parcel::Parcel;
use crate::config::ConfigError;
use crate::identity::SYSTEM;

/// The largest message to be counted on, in bytes: body, key, headers and what is stamped on them
/// ([`Message::size`]).
///
/// RabbitMQ limits the body alone (`max_message_size`): 16 MiB since 4.0, 128 MiB before. Headers and properties have a limit of
/// their own, one frame of the connection (`frame_max`, by default 128 KiB).
pub const MAX_MESSAGE_BYTES: usize = 16 << 20;

const BLOCKED: &str =
    "RabbitMQ takes no messages for now: it is short of memory or disk space (connection.blocked)";

/// Publishes to the exchanges and queues of one RabbitMQ.
///
/// Made by [`RabbitMqPublisher::to`]. It owns one connection, opened when it is needed; see the
/// [crate's documentation](crate#publishing) for what it promises.
pub struct RabbitMqPublisher {
    settings: Settings,
    links: Links,
    /// One for each message that may be under way.
    places: Semaphore,
    /// Messages under way, which a stop waits for.
    sending: TaskTracker,
    confirmed: AtomicU64,
    problem: Mutex<Option<String>>,
}

impl RabbitMqPublisherBuilder {
    /// Checks the settings together and makes the publisher. Nothing is connected yet.
    ///
    /// # Errors
    ///
    /// All settings that cannot work, in one error.
    pub fn build(self) -> Result<RabbitMqPublisher, ConfigError> {
        let settings = self.settings()?;
        Ok(RabbitMqPublisher {
            links: Links::new(),
            places: Semaphore::new(settings.channels),
            sending: TaskTracker::new(),
            confirmed: AtomicU64::new(0),
            problem: Mutex::new(None),
            settings,
        })
    }
}

impl RabbitMqPublisher {
    /// Publishes to the broker at `url`, such as `amqp://user:password@host:5672/%2f`.
    ///
    /// Exchanges, queues and bindings have to exist. An address is `exchange/routing.key`, or `/queue` by way of
    /// the default exchange; the first slash ends the exchange's name.
    pub fn to(url: impl Into<String>) -> RabbitMqPublisherBuilder {
        RabbitMqPublisherBuilder::new(url)
    }

    async fn send(&self, message: &Message) -> Result<(), PublishError> {
        let parcel = Parcel::of(message)?;
        let unavailable = |why: String| PublishError::new(PublishErrorKind::Unavailable, why);
        let access = &self.settings.access;
        let _place = self
            .places
            .acquire()
            .await
            .map_err(|e| unavailable(e.to_string()))?;
        let link = self.links.link(access).await.map_err(unavailable)?;
        parcel.fits(link.frame_max())?;
        if link.is_blocked() {
            return Err(unavailable(BLOCKED.to_owned()));
        }
        let channel = link.channel(access).await.map_err(unavailable)?;
        let options = BasicPublishOptions {
            mandatory: !self.settings.accepts_unroutable(&message.address),
            immediate: false,
        };
        // From here on the broker may have it. A channel whose answer did not come is never used again: it is
        // dropped, also with the future that waits here.
        let answer = async {
            let (exchange, routing_key) = (parcel.exchange.clone(), parcel.routing_key.clone());
            let properties = parcel.properties.clone();
            let publishing = channel.basic_publish(exchange, routing_key, options, &parcel.body, properties);
            publishing.await?.await
        };
        match answer.await {
            Ok(confirmation) => {
                self.confirmed.fetch_add(1, Ordering::Relaxed);
                link.give_back(channel);
                verdict::of_confirmation(confirmation, &parcel)
            }
            Err(error) => Err(verdict::of_error(&error, &parcel)),
        }
    }

    /// No answer came in time. If others were answered meanwhile, it is this destination that hangs (a quorum
    /// queue without its majority), and not the broker.
    fn silence(&self, confirmed_before: u64) -> PublishError {
        let (host, patience) = (self.settings.access.broker.host(), self.settings.patience);
        if self.links.is_blocked() {
            return PublishError::new(PublishErrorKind::Unavailable, BLOCKED);
        }
        if self.confirmed.load(Ordering::Relaxed) > confirmed_before {
            let text =
                format!("RabbitMQ at {host} confirmed other messages, but not this one within {patience:?}");
            return PublishError::new(PublishErrorKind::Destination, text);
        }
        let text = format!("RabbitMQ at {host} confirmed nothing within {patience:?}");
        PublishError::new(PublishErrorKind::Unavailable, text)
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
impl Publisher for RabbitMqPublisher {
    fn system(&self) -> &'static str {
        SYSTEM
    }

    async fn publish(&self, message: &Message) -> Result<(), PublishError> {
        let _sending = self.sending.token();
        let before = self.confirmed.load(Ordering::Relaxed);
        let told = tokio::time::timeout(self.settings.patience, self.send(message))
            .await
            .unwrap_or_else(|_| Err(self.silence(before)));
        self.note(&told);
        told
    }

    fn patience(&self) -> Duration {
        self.settings.patience
    }

    fn health(&self) -> PublisherHealth {
        if self.links.is_blocked() {
            return PublisherHealth::down(BLOCKED);
        }
        match &*self.problem() {
            Some(problem) => PublisherHealth::down(problem.clone()),
            None => PublisherHealth::up(),
        }
    }

    async fn stop(&self) {
        self.sending.close();
        // Each of them answers within the patience.
        self.sending.wait().await;
        self.links.stop(&self.settings.access).await;
    }
}

impl fmt::Debug for RabbitMqPublisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitMqPublisher")
            .field("broker", &self.settings.access.broker)
            .field("under_way", &self.sending.len())
            .field("health", &self.health())
            .finish_non_exhaustive()
    }
}
