//! Which topics are there: asked before anything is published to one for the first time.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use onlyonce::publisher::{PublishError, PublishErrorKind};
use rdkafka::client::ClientContext;
use rdkafka::config::{FromClientConfigAndContext, RDKafkaLogLevel};
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::KafkaError;
use rdkafka::types::RDKafkaErrorCode;

use super::config::Settings;
use super::producer::Producer;
use super::verdict;
use crate::explain;

/// How long a question may take.
const LONGEST_QUESTION: Duration = Duration::from_secs(10);
/// How long a client is listened to for what it has to say of its troubles.
const LISTENING: Duration = Duration::from_millis(50);
/// Kafka's limit for a topic's name.
const LONGEST_NAME: usize = 249;

#[derive(Debug, Default)]
pub(super) struct Topics {
    known: Mutex<HashSet<String>>,
    /// Whoever asks holds it; with what came of the last question for each topic that failed.
    asking: tokio::sync::Mutex<HashMap<String, (Instant, PublishError)>>,
}

impl Topics {
    /// Makes sure that the topic is there. Those who come while somebody asks wait, and share the answer.
    pub(super) async fn look_for(
        &self,
        topic: &str,
        settings: &Settings,
        producer: &Arc<Producer>,
    ) -> Result<(), PublishError> {
        if self.known().contains(topic) {
            return Ok(());
        }
        let since = Instant::now();
        let mut failed = self.asking.lock().await;
        if self.known().contains(topic) {
            return Ok(());
        }
        if let Some((at, error)) = failed.get(topic)
            && *at >= since
        {
            return Err(error.clone());
        }
        // Old answers are of no use to those who come from now on.
        failed.clear();
        let (asked, name, producer) = (settings.clone(), topic.to_owned(), producer.clone());
        let answer = tokio::task::spawn_blocking(move || ask(&name, &asked, &producer))
            .await
            .unwrap_or_else(|e| Err(PublishError::new(PublishErrorKind::Unavailable, e)));
        match answer {
            Ok(()) => {
                self.known().insert(topic.to_owned());
                Ok(())
            }
            Err(error) => {
                failed.insert(topic.to_owned(), (Instant::now(), error.clone()));
                Err(error)
            }
        }
    }

    /// It is gone: the next one who wants it asks.
    pub(super) fn forget(&self, topic: &str) {
        self.known().remove(topic);
    }

    fn known(&self) -> MutexGuard<'_, HashSet<String>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Names that no broker would take.
pub(super) fn check(topic: &str) -> Result<(), PublishError> {
    let legal = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    if (1..=LONGEST_NAME).contains(&topic.len()) && topic.bytes().all(legal) && !matches!(topic, "." | "..") {
        return Ok(());
    }
    Err(PublishError::new(
        PublishErrorKind::Invalid,
        format_args!("{topic:?} cannot be a topic (1 to {LONGEST_NAME} of a-z, A-Z, 0-9, `.`, `_` and `-`)"),
    ))
}

/// A client that asks, and keeps its first complaint: an answer that does not come says nothing of why.
struct Asking {
    settings: Settings,
    complaint: Mutex<Option<String>>,
}

impl ClientContext for Asking {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        explain::log(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        if !explain::all_away(&error) {
            let mut complaint = self.complaint.lock().unwrap_or_else(PoisonError::into_inner);
            complaint.get_or_insert_with(|| self.settings.without_values(reason));
        }
    }
}

impl ConsumerContext for Asking {}

/// Blocks.
fn ask(topic: &str, settings: &Settings, producer: &Producer) -> Result<(), PublishError> {
    let unavailable = |why: String| PublishError::new(PublishErrorKind::Unavailable, why);
    let context = Asking {
        settings: settings.clone(),
        complaint: Mutex::default(),
    };
    let client: BaseConsumer<Asking> = BaseConsumer::from_config_and_context(&settings.asking(), context)
        .map_err(|e| unavailable(verdict::creation(settings, &e)))?;
    let limit = (settings.patience / 2).min(LONGEST_QUESTION);
    let metadata = client.fetch_metadata(Some(topic), limit).map_err(|error| {
        // What a client has to say comes with a poll.
        drop(client.poll(LISTENING));
        let complaint = client.context().complaint.lock();
        let complaint = complaint.unwrap_or_else(PoisonError::into_inner).take();
        let why = complaint.map_or_else(|| error.to_string(), |why| format!("{error} ({why})"));
        unavailable(format!("no Kafka broker at {} answers: {why}", settings.brokers))
    })?;
    let found = metadata.topics().iter().find(|found| found.name() == topic);
    let code = match found.map(|found| found.error()) {
        Some(None) => {
            // A producer that once found it missing goes on to think so for minutes.
            producer.hear_of(topic, limit);
            return Ok(());
        }
        Some(Some(error)) => RDKafkaErrorCode::from(error),
        None => RDKafkaErrorCode::UnknownTopicOrPartition,
    };
    let remedy = match code {
        RDKafkaErrorCode::UnknownTopicOrPartition => " (create it)",
        RDKafkaErrorCode::TopicAuthorizationFailed => " (the user needs WRITE and DESCRIBE on it)",
        _ => "",
    };
    Err(PublishError::new(
        verdict::of(code, true),
        format_args!("cannot publish to the topic {topic:?}: {code}{remedy}"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_topic_has_a_legal_name() {
        for good in ["orders", "a.b_c-D9", &"x".repeat(249)] {
            assert!(check(good).is_ok(), "{good}");
        }
        for bad in ["", ".", "..", "a b", "a/b", "ü", "a\0", &"x".repeat(250)] {
            assert_eq!(
                check(bad).unwrap_err().kind(),
                PublishErrorKind::Invalid,
                "{bad:?}"
            );
        }
    }
}
