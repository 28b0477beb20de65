//! librdkafka's producer: made when it is needed, replaced when it broke for good.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use onlyonce::publisher::Message;
use rdkafka::client::ClientContext;
use rdkafka::config::{FromClientConfigAndContext, RDKafkaLogLevel};
use rdkafka::error::KafkaError;
use rdkafka::message::{DeliveryResult, Header, OwnedHeaders};
use rdkafka::producer::{BaseRecord, NoCustomPartitioner, Producer as _, ProducerContext, ThreadedProducer};
use rdkafka::types::RDKafkaErrorCode as Code;
use tokio::sync::oneshot;

use super::config::Settings;
use super::traffic::UnderWay;
use super::verdict;
use crate::explain;

/// How Kafka's binding of CloudEvents writes their attributes.
const CLOUD_EVENTS_PREFIX: &str = "ce_";
/// What the end of a producer takes that has nothing to send.
const GRACE: Duration = Duration::from_secs(5);

/// What became of a message.
pub(super) type Report = Result<(), Failure>;

/// Why it was not delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) code: Code,
    /// No other message of the topic was under way with it.
    pub(super) alone: bool,
}

/// What librdkafka keeps with a message, and gives back with the report.
pub(super) struct Waiting {
    answer: oneshot::Sender<Report>,
    under_way: UnderWay,
}

/// Hears what librdkafka has to say.
struct Ear {
    news: Arc<News>,
}

/// What is known of the brokers.
#[derive(Debug, Default)]
pub(super) struct News {
    /// How many messages were delivered.
    delivered: AtomicU64,
    /// What librdkafka complained of since the last delivery.
    trouble: Mutex<Option<String>>,
}

impl News {
    pub(super) fn delivered(&self) -> u64 {
        self.delivered.load(Ordering::Relaxed)
    }

    pub(super) fn trouble(&self) -> Option<String> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Option<String>> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ClientContext for Ear {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        explain::log(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(%error, reason, "Kafka client, publishing");
        let mut trouble = self.news.lock();
        // That all brokers are away follows from what was said before.
        if trouble.is_none() || !explain::all_away(&error) {
            *trouble = Some(reason.to_owned());
        }
    }
}

impl ProducerContext for Ear {
    type DeliveryOpaque = Box<Waiting>;

    fn delivery(&self, result: &DeliveryResult<'_>, waiting: Box<Waiting>) {
        let Waiting { answer, under_way } = *waiting;
        let report = match result {
            Ok(_) => {
                self.news.delivered.fetch_add(1, Ordering::Relaxed);
                *self.news.lock() = None;
                Ok(())
            }
            Err((error, _)) => Err(Failure {
                code: error.rdkafka_error_code().unwrap_or(Code::Fail),
                alone: under_way.is_alone(),
            }),
        };
        // Whoever hears the answer may publish the next one, which has no company then.
        drop(under_way);
        // Whoever published may have gone.
        let _ = answer.send(report);
    }
}

/// One life of librdkafka's producer, with a thread that polls it.
pub(super) struct Producer {
    /// `None` only while it is dropped.
    inner: Option<ThreadedProducer<Ear, NoCustomPartitioner>>,
}

impl Producer {
    /// Starts it; it connects by itself.
    pub(super) fn start(settings: &Settings, news: Arc<News>) -> Result<Self, String> {
        ThreadedProducer::from_config_and_context(&settings.producer(), Ear { news })
            .map(|inner| Self { inner: Some(inner) })
            .map_err(|e| verdict::creation(settings, &e))
    }

    /// Hands a message to librdkafka, which has it from then on.
    pub(super) fn send(
        &self,
        message: &Message,
        under_way: UnderWay,
    ) -> Result<oneshot::Receiver<Report>, Failure> {
        let (answer, report) = oneshot::channel();
        let encoded = message.encode(CLOUD_EVENTS_PREFIX);
        let mut headers = OwnedHeaders::new_with_capacity(encoded.headers.len() + 1);
        for (key, value) in encoded.headers.iter() {
            headers = headers.insert(Header { key, value });
        }
        if let Some(media_type) = &encoded.content_type {
            headers = headers.insert(Header {
                key: "content-type",
                value: Some(media_type.as_bytes()),
            });
        }
        let waiting = Box::new(Waiting { answer, under_way });
        let mut record =
            BaseRecord::<[u8], [u8], _>::with_opaque_to(&message.address, waiting).headers(headers);
        record.key = message.key.as_deref();
        record.payload = encoded.body.as_deref();
        let Some(inner) = &self.inner else {
            return Err(Failure {
                code: Code::BrokerDestroy,
                alone: true,
            });
        };
        inner.send(record).map(|()| report).map_err(|(error, _)| Failure {
            code: error.rdkafka_error_code().unwrap_or(Code::InvalidArgument),
            // Judged before it was with others.
            alone: true,
        })
    }

    /// Makes it ask for a topic that is there. Blocks.
    pub(super) fn hear_of(&self, topic: &str, limit: Duration) {
        if let Some(inner) = &self.inner {
            // If no answer comes, the message has to wait for one, and says so.
            drop(inner.client().fetch_metadata(Some(topic), limit));
        }
    }

    /// Sends what it still has, for up to this long, and ends.
    pub(super) async fn finish(mut self, limit: Duration) {
        let Some(inner) = self.inner.take() else { return };
        let finishing = tokio::task::spawn_blocking(move || {
            if let Err(error) = inner.flush(limit) {
                tracing::debug!(%error, "messages that nobody waits for were not sent");
            }
            drop(inner);
        });
        // Nobody waits longer for a thread that librdkafka holds up.
        let _ = tokio::time::timeout(limit + GRACE, finishing).await;
    }

    /// Why it cannot produce any more.
    pub(super) fn broken(&self) -> Option<(Code, String)> {
        self.inner.as_ref()?.client().fatal_error()
    }
}

/// Dropping it waits for its thread, and for the brokers' connections to end.
impl Drop for Producer {
    fn drop(&mut self) {
        let inner = self.inner.take();
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(move || drop(inner))),
            Err(_) => drop(inner),
        }
    }
}
