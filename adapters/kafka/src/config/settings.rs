//! Settings that were checked, and what librdkafka is told of them.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use onlyonce::source::Plan;
use rdkafka::ClientConfig;
use rdkafka::config::RDKafkaLogLevel;

use super::{OrderingKey, OutOfRange, POLL_INTERVAL, StartAt};

/// How often the client tells how far it is behind.
const STATISTICS: Duration = Duration::from_secs(5);
/// What applies unless [`KafkaBuilder::set`] says otherwise.
const DEFAULTS: [(&str, &str); 6] = [
    ("partition.assignment.strategy", "cooperative-sticky"),
    // A death repeats about so much of what was done; repeats meet their claims.
    ("auto.commit.interval.ms", "1000"),
    ("socket.keepalive.enable", "true"),
    ("reconnect.backoff.max.ms", "5000"),
    // Of one partition the client fetches ahead; what is paused for long is fetched again.
    ("queued.min.messages", "10000"),
    // So long it rests when it has fetched that; a whole second by default, in which lanes would run dry.
    ("fetch.queue.backoff.ms", "10"),
];

/// Settings that passed [`KafkaBuilder::build`].
pub(crate) struct Settings {
    pub(crate) brokers: String,
    pub(crate) group: String,
    pub(crate) topics: Vec<String>,
    pub(crate) weak_source: Arc<str>,
    pub(crate) start_at: StartAt,
    pub(crate) out_of_range: OutOfRange,
    pub(crate) ordering_key: OrderingKey,
    pub(crate) static_member: Option<String>,
    pub(crate) connect_timeout: Duration,
    pub(crate) drain_limit: Duration,
    pub(crate) poll_interval: Duration,
    pub(crate) stall_after: Duration,
    pub(crate) partition_records: usize,
    pub(crate) partition_bytes: usize,
    pub(crate) strict_checks: bool,
    pub(super) set: Vec<(String, String)>,
}

impl Settings {
    /// The topics that are named, without the patterns.
    pub(crate) fn named_topics(&self) -> impl Iterator<Item = &str> {
        self.topics
            .iter()
            .map(String::as_str)
            .filter(|topic| !topic.starts_with('^'))
    }

    /// What every client of ours is told: how to reach the brokers, and no more.
    pub(crate) fn connection(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        // Who asks librdkafka for its contexts wants to read them; otherwise it has little to say.
        let debugged = self.set.iter().any(|(name, _)| name == "debug");
        config.set_log_level(if debugged {
            RDKafkaLogLevel::Debug
        } else {
            RDKafkaLogLevel::Warning
        });
        for (name, value) in DEFAULTS {
            config.set(name, value);
        }
        for (name, value) in &self.set {
            config.set(name, value);
        }
        config.set("bootstrap.servers", &self.brokers);
        config
    }

    /// What the consuming client of this plan is told.
    pub(crate) fn consumer(&self, plan: &Plan) -> ClientConfig {
        let mut config = self.connection();
        let given = |name: &str| self.set.iter().any(|(set, _)| set == name);
        if !given("client.id") {
            config.set("client.id", format!("onlyonce.{}", plan.consumer));
        }
        if !given("queued.max.messages.kbytes") {
            // It is another buffer in front of ours; both together hold a multiple of the window.
            let kbytes = (plan.window_bytes / 1024).clamp(1024, 2_097_151);
            config.set("queued.max.messages.kbytes", kbytes.to_string());
        }
        if let Some(id) = &self.static_member {
            config.set("group.instance.id", id);
        }
        config
            .set("group.id", &self.group)
            .set(POLL_INTERVAL, self.poll_interval.as_millis().to_string())
            .set("enable.auto.commit", "true")
            .set("enable.auto.offset.store", "false")
            .set("auto.offset.reset", "error")
            .set("isolation.level", "read_committed")
            .set("allow.auto.create.topics", "false")
            .set("statistics.interval.ms", STATISTICS.as_millis().to_string());
        config
    }

    /// A text of librdkafka, without the values that were set.
    pub(crate) fn without_values(&self, text: &str) -> String {
        without_values(&self.set, text)
    }
}

/// A text of librdkafka, without these values.
pub(crate) fn without_values(set: &[(String, String)], text: &str) -> String {
    set.iter()
        // A number that is no secret may stand for many things in a text.
        .filter(|(name, value)| {
            !value.is_empty()
                && name != "security.protocol"
                && (is_secret(name) || value.parse::<f64>().is_err())
        })
        .fold(text.to_owned(), |text, (_, value)| text.replace(value, "***"))
}

/// librdkafka judges names and values by itself, without a connection; its own words may hold a value.
pub(crate) fn try_with_librdkafka(set: &[(String, String)], problems: &mut Vec<String>) {
    for (name, value) in set {
        let mut one = ClientConfig::new();
        one.set(name, value);
        if one.create_native_config().is_err() {
            problems.push(format!(
                "{name} is not a setting of this librdkafka, or its value is not possible (a build without the \
                 feature `tls` does not know all of them)"
            ));
        }
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("brokers", &self.brokers)
            .field("group", &self.group)
            .field("topics", &self.topics)
            .field("set", &names(&self.set))
            .finish_non_exhaustive()
    }
}

fn is_secret(name: &str) -> bool {
    ["password", "secret", "passphrase"]
        .iter()
        .any(|what| name.contains(what))
}

/// Any value may be a secret, or the path to one.
pub(crate) fn names(set: &[(String, String)]) -> Vec<&str> {
    set.iter().map(|(name, _)| name.as_str()).collect()
}
