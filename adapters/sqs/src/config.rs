//! The settings of an SQS source, and the checks they pass before anything is called.

use std::fmt;
use std::time::Duration;

use aws_sdk_sqs::Client;
use aws_sdk_sqs::config::StalledStreamProtectionConfig;
use aws_smithy_types::retry::RetryConfig;
use aws_smithy_types::timeout::TimeoutConfig;

const VISIBILITY: Duration = Duration::from_secs(30);
const VISIBILITY_BOUNDS: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(12 * 3600));
/// Short enough that a stop can wait for the calls that are under way.
const WAIT: Duration = Duration::from_secs(5);
const WAIT_BOUNDS: (Duration, Duration) = (Duration::ZERO, Duration::from_secs(20));
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
const CALL_TIMEOUT_BOUNDS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(60));
/// Enough to keep a wide window filled by calls that take their time; no more go out than there is room for.
const POLLS: usize = 16;
const POLLS_BOUNDS: (usize, usize) = (1, 64);
/// SQS allows no longer name of an attribute.
const LONGEST_NAME: usize = 256;

/// Where the ordering key of a message comes from.
///
/// Of a FIFO queue it is always the `MessageGroupId`, because that is what SQS keeps in order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OrderingKey {
    /// The message attribute `onlyonce-ordering-key`; without it a message is ordered with nothing.
    #[default]
    OwnHeader,
    /// This message attribute; without it a message is ordered with nothing.
    Header(String),
    /// The `MessageGroupId`, which a standard queue has, too (for fair queues).
    GroupId,
}

/// Settings that cannot work, all of them at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    what: &'static str,
    problems: Vec<String>,
}

impl ConfigError {
    /// These are wrong with this: `client`, `source`, `publisher`.
    pub(crate) fn of(what: &'static str, problems: Vec<String>) -> Self {
        Self { what, problems }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let problems = self.problems.join("; ");
        write!(f, "the SQS {} cannot be built: {problems}", self.what)
    }
}

impl std::error::Error for ConfigError {}

/// Settings of a source; [`build`](Self::build) checks them together.
#[derive(Clone)]
#[must_use = "nothing is built before `build`"]
pub struct SqsBuilder {
    client: Client,
    url: String,
    name: Option<String>,
    visibility_timeout: Duration,
    wait_time: Duration,
    call_timeout: Duration,
    polls: usize,
    ordering_key: OrderingKey,
    unwrapping: Unwrapping,
    strict_checks: bool,
}

impl SqsBuilder {
    pub(crate) fn new(client: Client, url: impl Into<String>) -> Self {
        Self {
            client,
            url: url.into(),
            name: None,
            visibility_timeout: VISIBILITY,
            wait_time: WAIT,
            call_timeout: CALL_TIMEOUT,
            polls: POLLS,
            ordering_key: OrderingKey::default(),
            unwrapping: Unwrapping::default(),
            strict_checks: false,
        }
    }

    /// What the queue is called here: the source of identities that name none, and the destination in
    /// dead letters. Default: the last part of the queue's URL.
    ///
    /// Set it to the old name when a queue is renamed or moves: under another name its messages are
    /// other events.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// How long SQS keeps a message from others after the last sign of life. Default 30 s; whole
    /// seconds from 2 s to 12 h.
    ///
    /// It is renewed every third, for as long as a message is in hand, so handlers may take longer.
    /// Shorter means that messages of a dead process come again sooner, and more calls. Less than three
    /// [call timeouts](Self::call_timeout) is warned of at start, where an event may take longer than it:
    /// one renewal without an answer would lose what runs.
    pub fn visibility_timeout(mut self, timeout: Duration) -> Self {
        self.visibility_timeout = timeout;
        self
    }

    /// How long a call waits for messages. Default 5 s; whole seconds from 0 to 20 s, and less than the
    /// visibility timeout.
    ///
    /// Longer means fewer calls on an empty queue. A stop waits for the calls under way, 8 s at most;
    /// what a call that was abandoned then would have brought comes again after the visibility timeout.
    pub fn wait_time(mut self, wait: Duration) -> Self {
        self.wait_time = wait;
        self
    }

    /// How long SQS may take to answer, beyond the wait time. Default 5 s; from 0.1 s to 60 s.
    ///
    /// It holds for every call and also for an endpoint that accepts and never answers. Retries and
    /// time limits of the client are switched off, as the source has its own.
    pub fn call_timeout(mut self, timeout: Duration) -> Self {
        self.call_timeout = timeout;
        self
    }

    /// How many calls for messages may be under way at once. Default 16; from 1 to 64.
    ///
    /// One call brings at most ten messages. There are only as many as there is room for, one more with
    /// each that brings at least half of what it asked for, and one alone after one that brings nothing.
    pub fn polls(mut self, most: usize) -> Self {
        self.polls = most;
        self
    }

    /// Where the ordering key of a message comes from. FIFO queues have their `MessageGroupId`.
    pub fn ordering_key(mut self, key: OrderingKey) -> Self {
        self.ordering_key = key;
        self
    }

    /// Bodies are events as they are, also those that look like an envelope of SNS or EventBridge.
    ///
    /// For queues that others can write to, and for subscriptions with raw message delivery. Default:
    /// the two envelopes are recognised by their shape and unwrapped.
    pub fn plain_bodies(mut self) -> Self {
        self.unwrapping = Unwrapping::Nothing;
        self
    }

    /// The queue has S3 event notifications: every record is an event of its own, and the message is
    /// deleted when all of them are done.
    ///
    /// S3 gives its records no ids. One is put together from bucket, key, version, sequencer and event
    /// name; it is weak.
    pub fn s3_records(mut self) -> Self {
        self.unwrapping = Unwrapping::WithS3;
        self
    }

    /// What the start-up checks would only warn of ends the consumer.
    pub fn strict_checks(mut self) -> Self {
        self.strict_checks = true;
        self
    }

    pub(crate) fn settings(self) -> Result<Settings, ConfigError> {
        let mut problems = Vec::new();
        let last_part = self.url.rsplit('/').next().unwrap_or_default();
        if !(self.url.starts_with("https://") || self.url.starts_with("http://")) || last_part.is_empty() {
            problems.push(format!(
                "queue is {:?}, which is not the URL of a queue (such as https://sqs.eu-central-1.amazonaws.com/123456789012/orders)",
                self.url
            ));
        }
        let name = self.name.unwrap_or_else(|| last_part.to_owned());
        if name.is_empty() || name.len() > LONGEST_NAME {
            problems.push(format!(
                "name is {} bytes long; 1 to {LONGEST_NAME} are possible",
                name.len()
            ));
        }
        if let OrderingKey::Header(name) = &self.ordering_key
            && (name.is_empty() || name.len() > LONGEST_NAME)
        {
            problems.push(format!(
                "ordering_key names an attribute of {} bytes; 1 to {LONGEST_NAME} are possible",
                name.len()
            ));
        }
        let fifo = last_part.ends_with(".fifo");
        if fifo && !matches!(self.ordering_key, OrderingKey::OwnHeader | OrderingKey::GroupId) {
            problems.push(
                "ordering_key names an attribute, and the queue is a FIFO queue, which orders by MessageGroupId (leave it out)"
                    .to_owned(),
            );
        }
        seconds(
            "visibility_timeout",
            self.visibility_timeout,
            VISIBILITY_BOUNDS,
            &mut problems,
        );
        seconds("wait_time", self.wait_time, WAIT_BOUNDS, &mut problems);
        bounded(
            "call_timeout",
            self.call_timeout,
            CALL_TIMEOUT_BOUNDS,
            &mut problems,
        );
        bounded("polls", self.polls, POLLS_BOUNDS, &mut problems);
        if self.wait_time >= self.visibility_timeout {
            problems.push(format!(
                "wait_time is {:?} and visibility_timeout {:?}; a message could be visible again before it is here (wait for less)",
                self.wait_time, self.visibility_timeout
            ));
        }
        if !problems.is_empty() {
            return Err(ConfigError::of("source", problems));
        }
        Ok(Settings {
            client: bare(&self.client),
            url: self.url,
            name,
            visibility_timeout: self.visibility_timeout,
            wait_time: self.wait_time,
            call_timeout: self.call_timeout,
            polls: self.polls,
            ordering_key: if fifo {
                OrderingKey::GroupId
            } else {
                self.ordering_key
            },
            fifo,
            unwrapping: self.unwrapping,
            strict_checks: self.strict_checks,
        })
    }
}

/// The client without retries and time limits of its own. A call to receive that it repeats in secret
/// may have taken messages the first time, and its limits know nothing of long polls.
pub(crate) fn bare(client: &Client) -> Client {
    let config = client
        .config()
        .to_builder()
        .retry_config(RetryConfig::disabled())
        .timeout_config(TimeoutConfig::disabled())
        .stalled_stream_protection(StalledStreamProtectionConfig::disabled())
        .build();
    Client::from_conf(config)
}

pub(crate) fn bounded<T: PartialOrd + fmt::Debug>(
    what: &str,
    value: T,
    (least, most): (T, T),
    problems: &mut Vec<String>,
) {
    if value < least || value > most {
        problems.push(format!(
            "{what} is {value:?}; it can be from {least:?} to {most:?}"
        ));
    }
}

fn seconds(what: &str, value: Duration, bounds: (Duration, Duration), problems: &mut Vec<String>) {
    bounded(what, value, bounds, problems);
    if value.subsec_nanos() != 0 {
        problems.push(format!("{what} is {value:?}, and SQS counts in whole seconds"));
    }
}

impl fmt::Debug for SqsBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqsBuilder")
            .field("queue", &self.url)
            .field("name", &self.name)
            .field("visibility_timeout", &self.visibility_timeout)
            .field("wait_time", &self.wait_time)
            .field("call_timeout", &self.call_timeout)
            .field("polls", &self.polls)
            .field("ordering_key", &self.ordering_key)
            .field("unwrapping", &self.unwrapping)
            .field("strict_checks", &self.strict_checks)
            .finish_non_exhaustive()
    }
}

/// Which bodies are taken for envelopes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Unwrapping {
    Nothing,
    /// SNS and EventBridge, by their shape.
    #[default]
    Known,
    /// And notifications of S3.
    WithS3,
}

/// Checked settings. No `Debug`: nothing prints a client.
pub(crate) struct Settings {
    pub(crate) client: Client,
    pub(crate) url: String,
    pub(crate) name: String,
    pub(crate) visibility_timeout: Duration,
    pub(crate) wait_time: Duration,
    pub(crate) call_timeout: Duration,
    pub(crate) polls: usize,
    pub(crate) ordering_key: OrderingKey,
    pub(crate) fifo: bool,
    pub(crate) unwrapping: Unwrapping,
    pub(crate) strict_checks: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Connection;

    fn builder(url: &str) -> SqsBuilder {
        let connection = Connection::new("us-east-1", "key", "secret").endpoint("http://127.0.0.1:1");
        SqsBuilder::new(connection.client().unwrap(), url)
    }

    #[test]
    fn all_bad_settings_are_named_at_once() {
        let text = builder("orders")
            .name("")
            .visibility_timeout(Duration::from_secs(1))
            .wait_time(Duration::from_millis(1500))
            .call_timeout(Duration::ZERO)
            .polls(0)
            .ordering_key(OrderingKey::Header(String::new()))
            .build()
            .unwrap_err()
            .to_string();
        for part in [
            "queue is \"orders\"",
            "name is 0 bytes",
            "visibility_timeout is 1s",
            "from 2s to 43200s",
            "whole seconds",
            "call_timeout is 0ns",
            "polls is 0",
            "ordering_key names",
            "wait for less",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }

    #[test]
    fn a_fifo_queue_is_known_by_its_name_and_orders_by_group() {
        let settings = builder("http://h/1/orders.fifo").settings().unwrap();
        assert!(settings.fifo);
        assert_eq!(settings.ordering_key, OrderingKey::GroupId);
        assert_eq!(settings.name, "orders.fifo");
        let key = OrderingKey::Header("account".into());
        assert!(
            builder("http://h/1/orders.fifo")
                .ordering_key(key)
                .build()
                .is_err()
        );
    }
}
