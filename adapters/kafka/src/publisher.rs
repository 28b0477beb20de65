//! The publisher: librdkafka's idempotent producer, and what its reports mean.

mod config;
mod producer;
mod refused;
mod topics;
mod traffic;
mod verdict;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use onlyonce::publisher::{Message, PublishError, PublishErrorKind, Publisher, PublisherHealth};
use rdkafka::types::RDKafkaErrorCode as Code;
use tokio_util::task::TaskTracker;

pub use self::config::KafkaPublisherBuilder;
use self::config::Settings;
use self::producer::{Failure, News, Producer};
use self::topics::Topics;
use self::traffic::Traffic;
use crate::config::ConfigError;
use crate::identity::SYSTEM;

/// The largest message to be counted on, in bytes: body, key, headers and what is stamped on them
/// ([`Message::size`]).
///
/// Brokers take batches of up to 1,048,588 bytes by default (`message.max.bytes`, and `max.message.bytes` of a topic),
/// librdkafka messages of up to 1,000,000 (`message.max.bytes`, to be [set](KafkaPublisherBuilder::set) as well); the
/// rest is for what both put around a message.
pub const MAX_MESSAGE_BYTES: usize = 990_000;

/// Publishes to the topics of one Kafka cluster.
///
/// Made by [`KafkaPublisher::to`]. It owns one producer, started when it is needed; see the
/// [crate's documentation](crate#publishing) for what it promises.
pub struct KafkaPublisher {
    settings: Settings,
    state: Mutex<State>,
    topics: Topics,
    traffic: Traffic,
    news: Arc<News>,
    /// Messages under way, which a stop waits for.
    sending: TaskTracker,
    problem: Mutex<Option<String>>,
}

enum State {
    /// Not needed yet, or the last one broke.
    Down,
    Up(Arc<Producer>),
    Stopped,
}

impl KafkaPublisherBuilder {
    /// Checks the settings together and makes the publisher. Nothing is connected yet.
    ///
    /// # Errors
    ///
    /// All settings that cannot work, in one error.
    pub fn build(self) -> Result<KafkaPublisher, ConfigError> {
        Ok(KafkaPublisher {
            settings: self.settings()?,
            state: Mutex::new(State::Down),
            topics: Topics::default(),
            traffic: Traffic::default(),
            news: Arc::default(),
            sending: TaskTracker::new(),
            problem: Mutex::new(None),
        })
    }
}

impl KafkaPublisher {
    /// Publishes to the cluster behind these brokers, `host:port` with commas between.
    ///
    /// An address is a topic, which has to exist.
    pub fn to(brokers: impl Into<String>) -> KafkaPublisherBuilder {
        KafkaPublisherBuilder::new(brokers)
    }

    async fn send(&self, message: &Message) -> Result<(), PublishError> {
        check(message)?;
        let topic = &message.address;
        let producer = self.producer()?;
        self.topics.look_for(topic, &self.settings, &producer).await?;
        let delivered_before = self.news.delivered();
        // From here on the broker may have it.
        let report = match producer.send(message, self.traffic.sets_out(topic)) {
            Ok(report) => report.await.unwrap_or(Err(Failure {
                code: Code::PurgeInflight,
                alone: false,
            })),
            Err(failure) => Err(failure),
        };
        report.map_err(|failure| match producer.broken() {
            Some((code, reason)) => {
                self.replace(&producer);
                let kind = match verdict::of(code, false) {
                    PublishErrorKind::Unavailable => PublishErrorKind::Unavailable,
                    _ => PublishErrorKind::Interrupted,
                };
                let reason = self.settings.without_values(&reason);
                PublishError::new(kind, format_args!("the Kafka producer broke for good: {reason}"))
            }
            None => self.explain(topic, failure, delivered_before),
        })
    }

    /// The producer, started anew if there is none.
    fn producer(&self) -> Result<Arc<Producer>, PublishError> {
        let unavailable = |why: String| PublishError::new(PublishErrorKind::Unavailable, why);
        let mut state = self.state();
        match &*state {
            State::Up(producer) => Ok(producer.clone()),
            State::Stopped => Err(unavailable("the publisher is stopped".to_owned())),
            State::Down => {
                let started = Producer::start(&self.settings, self.news.clone()).map_err(unavailable)?;
                let producer = Arc::new(started);
                *state = State::Up(producer.clone());
                tracing::info!(brokers = %self.settings.brokers, "publishing to Kafka");
                Ok(producer)
            }
        }
    }

    /// After a fatal error an idempotent producer refuses everything for good.
    fn replace(&self, producer: &Arc<Producer>) {
        let mut state = self.state();
        if matches!(&*state, State::Up(current) if Arc::ptr_eq(current, producer)) {
            tracing::warn!(brokers = %self.settings.brokers, "the Kafka producer broke for good, starting another");
            *state = State::Down;
        }
    }

    fn explain(&self, topic: &str, failure: Failure, delivered_before: u64) -> PublishError {
        let Failure { code, alone } = failure;
        let mut kind = verdict::of(code, alone);
        if kind == PublishErrorKind::Destination {
            self.topics.forget(topic);
        }
        // Others were delivered meanwhile: it is this topic that hangs (too few replicas in sync), and not the cluster.
        if code == Code::MessageTimedOut && self.news.delivered() > delivered_before {
            kind = PublishErrorKind::Destination;
        }
        let trouble = self
            .news
            .trouble()
            .filter(|_| kind == PublishErrorKind::Unavailable);
        let why = trouble.map_or_else(String::new, |why| {
            format!(" ({})", self.settings.without_values(&why))
        });
        let company = match kind {
            PublishErrorKind::Interrupted if code == Code::MessageSizeTooLarge => " (of a batch of several)",
            _ => "",
        };
        PublishError::new(
            kind,
            format_args!("cannot publish to the topic {topic:?}: {code}{company}{why}"),
        )
    }

    fn silence(&self) -> PublishError {
        let (brokers, patience) = (&self.settings.brokers, self.settings.patience);
        PublishError::new(
            PublishErrorKind::Unavailable,
            format_args!("Kafka at {brokers} confirmed nothing within {patience:?}"),
        )
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

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What no broker could ever take.
fn check(message: &Message) -> Result<(), PublishError> {
    topics::check(&message.address)
}

#[async_trait]
impl Publisher for KafkaPublisher {
    fn system(&self) -> &'static str {
        SYSTEM
    }

    async fn publish(&self, message: &Message) -> Result<(), PublishError> {
        let _sending = self.sending.token();
        let told = tokio::time::timeout(self.settings.patience, self.send(message))
            .await
            .unwrap_or_else(|_| Err(self.silence()));
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
        // Each of them answers within the patience.
        self.sending.wait().await;
        let last = std::mem::replace(&mut *self.state(), State::Stopped);
        // What callers have left behind is still sent.
        if let State::Up(producer) = last
            && let Some(producer) = Arc::into_inner(producer)
        {
            producer.finish(self.settings.patience).await;
        }
    }
}

impl fmt::Debug for KafkaPublisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaPublisher")
            .field("settings", &self.settings)
            .field("under_way", &self.sending.len())
            .field("health", &self.health())
            .finish_non_exhaustive()
    }
}
