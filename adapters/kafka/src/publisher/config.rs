//! The settings of a publisher, and the checks they pass before anything is connected.

use std::fmt;
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::config::RDKafkaLogLevel;

use super::refused::refuse;
use crate::config::{ConfigError, bounded, names, try_with_librdkafka, without_values};

const PATIENCE: Duration = Duration::from_secs(30);
const PATIENCE_BOUNDS: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(600));
/// How much earlier than its caller's patience a message ends inside of librdkafka, which looks once a second.
const AHEAD: Duration = Duration::from_millis(1500);
/// How long brokers may disagree about whether a topic is there. It was asked for before; this is for one that goes.
const GONE_AFTER: Duration = Duration::from_secs(1);
/// What applies unless [`KafkaPublisherBuilder::set`] says otherwise.
const DEFAULTS: [(&str, &str); 3] = [
    // As the Java client places them, so that producers of both kinds agree on the partition of a key.
    ("partitioner", "murmur2_random"),
    ("socket.keepalive.enable", "true"),
    ("reconnect.backoff.max.ms", "2000"),
];

/// The settings of a [`KafkaPublisher`](crate::KafkaPublisher); see [`KafkaPublisher::to`](crate::KafkaPublisher::to).
#[derive(Clone)]
#[must_use = "nothing is built before `build`"]
pub struct KafkaPublisherBuilder {
    brokers: String,
    patience: Duration,
    set: Vec<(String, String)>,
}

impl KafkaPublisherBuilder {
    pub(crate) fn new(brokers: impl Into<String>) -> Self {
        Self {
            brokers: brokers.into(),
            patience: PATIENCE,
            set: Vec::new(),
        }
    }

    /// How long a message may wait for its delivery report, connecting included.
    ///
    /// Default: 30 s. From 2 s to 10 minutes. After that it counts as not published; the broker may have it all
    /// the same. Raise it where a partition may lack in-sync replicas for longer.
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// A setting of librdkafka, such as `compression.type`, `sasl.password` or `ssl.ca.location`.
    ///
    /// What would break a promise of this crate is refused when the publisher is built, with the reason.
    /// Values are shown in no log and no error.
    pub fn set(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.set.push((name.into(), value.into()));
        self
    }

    /// Checks the settings together; all that cannot work are in one error.
    pub(super) fn settings(self) -> Result<Settings, ConfigError> {
        let mut problems = Vec::new();
        if self.brokers.trim().is_empty() {
            problems.push("brokers is empty (give `host:port`, several with commas)".to_owned());
        }
        bounded("patience", self.patience, PATIENCE_BOUNDS, &mut problems);
        refuse(&self.set, &mut problems);
        try_with_librdkafka(&self.set, &mut problems);
        if problems.is_empty() {
            Ok(Settings {
                brokers: self.brokers,
                patience: self.patience,
                set: self.set,
            })
        } else {
            Err(ConfigError::of("publisher", problems))
        }
    }
}

impl fmt::Debug for KafkaPublisherBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaPublisherBuilder")
            .field("brokers", &self.brokers)
            .field("patience", &self.patience)
            .field("set", &names(&self.set))
            .finish()
    }
}

/// Settings that passed [`KafkaPublisherBuilder::build`].
#[derive(Clone)]
pub(super) struct Settings {
    pub(super) brokers: String,
    pub(super) patience: Duration,
    set: Vec<(String, String)>,
}

impl Settings {
    /// What a client that only asks questions is told. A consumer's, though it consumes nothing: what a producer asks
    /// for is created where the broker allows it, and a misspelt topic would take events that nobody reads.
    pub(super) fn asking(&self) -> ClientConfig {
        let mut config = self.connection();
        config.set("allow.auto.create.topics", "false");
        config
    }

    /// What the producing client is told.
    pub(super) fn producer(&self) -> ClientConfig {
        let mut config = self.connection();
        let timeout = self
            .patience
            .saturating_sub(AHEAD)
            .max(Duration::from_millis(500));
        config
            .set("enable.idempotence", "true")
            .set("acks", "all")
            .set("message.timeout.ms", timeout.as_millis().to_string())
            .set(
                "topic.metadata.propagation.max.ms",
                GONE_AFTER.as_millis().to_string(),
            );
        config
    }

    fn connection(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        // Who asks librdkafka for its contexts wants to read them; otherwise it has little to say.
        let debugged = self.set.iter().any(|(name, _)| name == "debug");
        config.set_log_level(if debugged {
            RDKafkaLogLevel::Debug
        } else {
            RDKafkaLogLevel::Warning
        });
        config.set("client.id", "onlyonce.publisher");
        for (name, value) in DEFAULTS {
            config.set(name, value);
        }
        for (name, value) in &self.set {
            config.set(name, value);
        }
        config.set("bootstrap.servers", &self.brokers);
        config
    }

    /// A text of librdkafka, without the values that were set.
    pub(super) fn without_values(&self, text: &str) -> String {
        without_values(&self.set, text)
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("brokers", &self.brokers)
            .field("set", &names(&self.set))
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(builder: KafkaPublisherBuilder) -> String {
        builder.settings().unwrap_err().to_string()
    }

    #[test]
    fn all_bad_settings_are_named_at_once() {
        let text = problems(
            KafkaPublisherBuilder::new(" ")
                .patience(Duration::from_secs(1))
                .set("acks", "1")
                .set("no.such.setting", "s3cr3t-marker")
                .set("transactional.id", "t"),
        );
        for part in [
            "publisher cannot be built",
            "brokers is empty",
            "patience is 1s",
            "acks cannot be set",
            "no.such.setting is not a setting",
            "transactional.id cannot be set",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(!text.contains("marker"), "{text}");
    }

    #[test]
    fn what_would_break_a_promise_is_refused_and_says_why() {
        for (name, value, why) in [
            ("enable.idempotence", "false", "again"),
            ("request.required.acks", "0", "replicas"),
            ("message.timeout.ms", "0", "`patience`"),
            ("delivery.timeout.ms", "0", "`patience`"),
            ("delivery.report.only.error", "true", "wait for"),
            ("partitioner", "random", "order"),
            ("partitioner", "consistent_random", ""),
            ("sasl.mechanism", "OAUTHBEARER", "no tokens"),
            ("group.id", "g", "consumer"),
        ] {
            let settings = KafkaPublisherBuilder::new("h:1").set(name, value).settings();
            match settings {
                Ok(_) => assert_eq!(why, "", "{name}"),
                Err(error) => assert!(!why.is_empty() && error.to_string().contains(why), "{error}"),
            }
        }
    }

    #[test]
    fn no_way_of_printing_settings_shows_a_value() {
        let builder = KafkaPublisherBuilder::new("h:1").set("sasl.password", "s3cr3t-marker");
        let shown = format!("{builder:?} {:?}", builder.clone().settings().unwrap());
        assert!(
            !shown.contains("marker") && shown.contains("sasl.password"),
            "{shown}"
        );
    }
}
