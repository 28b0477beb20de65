//! The settings of a Kafka source, and the checks they pass before anything is connected.

mod refused;
mod settings;

use std::fmt;
use std::time::Duration;

pub(crate) use self::refused::logs_in_by_tokens;
use self::refused::refuse;
pub(crate) use self::settings::{Settings, names, try_with_librdkafka, without_values};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const CONNECT_TIMEOUT_BOUNDS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(120));
const DRAIN_LIMIT: Duration = Duration::from_secs(10);
const LONGEST_DRAIN: Duration = Duration::from_secs(600);
const STALL_AFTER: Duration = Duration::from_secs(60);
const STALL_BOUNDS: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(3600));
const PARTITION_RECORDS: usize = 10_000;
const PARTITION_BYTES: usize = 64 << 20;
/// Kafka's limit for a topic's name.
const LONGEST_NAME: usize = 249;
const POLL_INTERVAL: &str = "max.poll.interval.ms";
/// Shorter than librdkafka's five minutes. The thread that polls does nothing else, so that a handler has
/// no need of them; but a member whose request to join is lost stays out for so long.
const POLL_INTERVAL_DEFAULT: Duration = Duration::from_secs(60);
const SESSION_TIMEOUT: &str = "session.timeout.ms";

/// Where a partition begins for which the group has no offset: a new group, a new partition, or
/// offsets that the broker forgot after the group was empty for a week.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum StartAt {
    /// Nowhere: the consumer ends at its start and says so; the default, because either choice may be
    /// wrong. A partition that comes later stops receiving until a person has decided.
    #[default]
    Fail,
    /// At the oldest record there is. Nothing is missed; what the database remembers is not repeated.
    Earliest,
    /// Behind the newest record there is. What was published before is not seen, also of a partition that
    /// is added later, up to the moment in which the group hears of it. The place is committed at once,
    /// so that a restart does not jump again.
    Latest,
}

/// What becomes of a partition whose next record is not there any more: retention has deleted it
/// before it was read, or the log was cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OutOfRange {
    /// Receiving ends with an explanation, until a person has decided; the default.
    #[default]
    Fail,
    /// Goes on with the oldest record there is, and a warning says how many are missing.
    Earliest,
    /// Goes on behind the newest record there is, and a warning says how many are passed over.
    Latest,
}

/// Where an event's ordering key is found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OrderingKey {
    /// It is the record's key; a record without one is ordered with nothing. The default.
    #[default]
    RecordKey,
    /// All records of a partition are one after another, whatever their keys.
    Partition,
    /// In this header, if the record has it. Order holds as far as records of one value are in one partition.
    Header(String),
}

/// Settings that cannot work, all of them at once: each names the setting and its bound.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    what: &'static str,
    problems: Vec<String>,
}

impl ConfigError {
    /// These are wrong with this: `source`, `publisher`.
    pub(crate) fn of(what: &'static str, problems: Vec<String>) -> Self {
        Self { what, problems }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let problems = self.problems.join("; ");
        write!(f, "the Kafka {} cannot be built: {problems}", self.what)
    }
}

impl std::error::Error for ConfigError {}

/// The settings of a [`Kafka`](crate::Kafka) source; see [`Kafka::group`](crate::Kafka::group).
#[derive(Clone)]
#[must_use = "nothing is built before `build`"]
pub struct KafkaBuilder {
    brokers: String,
    group: String,
    topics: Vec<String>,
    cluster: String,
    start_at: StartAt,
    out_of_range: OutOfRange,
    ordering_key: OrderingKey,
    static_member: Option<String>,
    connect_timeout: Duration,
    drain_limit: Duration,
    stall_after: Duration,
    partition_records: usize,
    partition_bytes: usize,
    strict_checks: bool,
    set: Vec<(String, String)>,
}

impl KafkaBuilder {
    pub(crate) fn new(brokers: impl Into<String>, group: impl Into<String>) -> Self {
        Self {
            brokers: brokers.into(),
            group: group.into(),
            topics: Vec::new(),
            cluster: "default".to_owned(),
            start_at: StartAt::default(),
            out_of_range: OutOfRange::default(),
            ordering_key: OrderingKey::default(),
            static_member: None,
            connect_timeout: CONNECT_TIMEOUT,
            drain_limit: DRAIN_LIMIT,
            stall_after: STALL_AFTER,
            partition_records: PARTITION_RECORDS,
            partition_bytes: PARTITION_BYTES,
            strict_checks: false,
            set: Vec::new(),
        }
    }

    /// Consumes this topic, too. It has to exist.
    pub fn topic(mut self, name: impl Into<String>) -> Self {
        self.topics.push(name.into());
        self
    }

    /// Consumes every topic whose name matches this regular expression (POSIX extended), which begins
    /// with `^`. New topics are found within `topic.metadata.refresh.interval.ms`, by default 5 minutes.
    pub fn topic_pattern(mut self, pattern: impl Into<String>) -> Self {
        let pattern = pattern.into();
        // A pattern is what librdkafka takes for one. Without the mark it would be a strange topic's name.
        self.topics.push(match pattern.strip_prefix('^') {
            Some(_) => pattern,
            None => format!("^{pattern}"),
        });
        self
    }

    /// Where a partition begins for which the group has no offset. Default: [`StartAt::Fail`].
    pub fn start_at(mut self, place: StartAt) -> Self {
        self.start_at = place;
        self
    }

    /// What becomes of a partition whose next record is not there any more. Default: [`OutOfRange::Fail`].
    pub fn out_of_range(mut self, policy: OutOfRange) -> Self {
        self.out_of_range = policy;
        self
    }

    /// Where an event's ordering key is found. Default: [`OrderingKey::RecordKey`].
    pub fn ordering_key(mut self, key: OrderingKey) -> Self {
        self.ordering_key = key;
        self
    }

    /// The cluster's name in weak identities: events without an id are `topic/partition/offset@timestamp`
    /// of the source `kafka:<name>`.
    ///
    /// Default: `default`. Name it where one consumer reads from several clusters; a later change
    /// makes every event without an id a new one.
    pub fn cluster(mut self, name: impl Into<String>) -> Self {
        self.cluster = name.into();
        self
    }

    /// Makes this process a static member of the group (`group.instance.id`): a restart within the
    /// session timeout gets its partitions back without a rebalance.
    ///
    /// Default: none. The id has to be another one in each process. A member that stops keeps its
    /// partitions until the session timeout is over, and nobody else works on them meanwhile.
    pub fn static_member(mut self, id: impl Into<String>) -> Self {
        self.static_member = Some(id.into());
        self
    }

    /// How long a broker may take to answer at start-up, and wherever the source asks it something.
    ///
    /// Default: 10 s. From 100 ms to 120 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// How long a partition that moves to another member waits for what runs here.
    ///
    /// Default: 10 s. At most 10 minutes, and less than `max.poll.interval.ms` (60 s if not set, or the
    /// session's timeout where that is longer). While it waits the whole group waits; what is not done
    /// by then is delivered again, to the other member, which meets the claim. Raise it to the usual
    /// length of a handler; it costs only where handlers run that long. 0 waits for nothing.
    pub fn drain_limit(mut self, limit: Duration) -> Self {
        self.drain_limit = limit;
        self
    }

    /// How long nothing may come while records wait before the source counts as stuck.
    ///
    /// Default: 60 s. From 10 s to an hour. The brokers are asked whether records wait after half of that
    /// time, and again after all of it. Then the client is rebuilt, once, and the consumer is not ready
    /// until something comes or nothing waits any more.
    pub fn stall_after(mut self, time: Duration) -> Self {
        self.stall_after = time;
        self
    }

    /// How much of one partition may be delivered beyond its first unfinished record, in records and bytes.
    ///
    /// Default: 10,000 records, 64 MiB. An event that hangs or is retried for long stands still, and
    /// others of its partition go on up to here; then the partition is paused until the first is done.
    /// So much comes again after a death, and is found to be done.
    pub fn partition_window(mut self, records: usize, bytes: usize) -> Self {
        self.partition_records = records;
        self.partition_bytes = bytes;
        self
    }

    /// Refuse to start where the start-up checks would only warn. Default: off.
    pub fn strict_checks(mut self) -> Self {
        self.strict_checks = true;
        self
    }

    /// A setting of librdkafka, such as `session.timeout.ms`, `sasl.password` or `ssl.ca.location`.
    ///
    /// What would break a promise of this crate is refused when the source is built, with the reason.
    /// Values are shown in no log and no error.
    pub fn set(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.set.push((name.into(), value.into()));
        self
    }

    /// Checks the settings together; all that cannot work are in one error.
    pub(crate) fn settings(self) -> Result<Settings, ConfigError> {
        let mut problems = Vec::new();
        if self.brokers.trim().is_empty() {
            problems.push("brokers is empty (give `host:port`, several with commas)".to_owned());
        }
        if self.group.is_empty() {
            problems.push("group is empty (it is the name under which Kafka keeps the offsets)".to_owned());
        }
        if self.cluster.trim().is_empty() {
            problems.push("cluster is blank (it names whose coordinates weak identities are)".to_owned());
        }
        if self.topics.is_empty() {
            problems.push("there is no topic (say `.topic(..)` or `.topic_pattern(..)`)".to_owned());
        }
        for topic in &self.topics {
            if topic.is_empty() || topic == "^" || (!topic.starts_with('^') && topic.len() > LONGEST_NAME) {
                problems.push(format!(
                    "the topic {topic:?} has to have 1 to {LONGEST_NAME} bytes"
                ));
            }
        }
        if let OrderingKey::Header(name) = &self.ordering_key
            && name.is_empty()
        {
            problems.push("ordering_key names a header without a name".to_owned());
        }
        if self.static_member.as_deref() == Some("") {
            problems.push(
                "static_member is empty (leave it out, or give each process an id of its own)".to_owned(),
            );
        }
        if self.partition_records == 0 || self.partition_bytes == 0 {
            problems.push("partition_window is 0; the least is 1 record and 1 byte".to_owned());
        }
        bounded(
            "connect_timeout",
            self.connect_timeout,
            CONNECT_TIMEOUT_BOUNDS,
            &mut problems,
        );
        bounded(
            "drain_limit",
            self.drain_limit,
            (Duration::ZERO, LONGEST_DRAIN),
            &mut problems,
        );
        bounded("stall_after", self.stall_after, STALL_BOUNDS, &mut problems);
        refuse(&self.set, &mut problems);
        let poll_interval = self.poll_interval();
        // A drain that outlasts it would lose the partitions that it wants to leave in good order.
        if self.drain_limit >= poll_interval {
            problems.push(format!(
                "drain_limit is {:?} and has to be less than {POLL_INTERVAL}, which is {poll_interval:?}",
                self.drain_limit
            ));
        }
        if !problems.is_empty() {
            return Err(ConfigError::of("source", problems));
        }
        let settings = Settings {
            brokers: self.brokers,
            group: self.group,
            topics: self.topics,
            weak_source: format!("kafka:{}", self.cluster).into(),
            start_at: self.start_at,
            out_of_range: self.out_of_range,
            ordering_key: self.ordering_key,
            static_member: self.static_member,
            connect_timeout: self.connect_timeout,
            drain_limit: self.drain_limit,
            poll_interval,
            stall_after: self.stall_after,
            partition_records: self.partition_records,
            partition_bytes: self.partition_bytes,
            strict_checks: self.strict_checks,
            set: self.set,
        };
        try_with_librdkafka(&settings.set, &mut problems);
        if problems.is_empty() {
            Ok(settings)
        } else {
            Err(ConfigError::of("source", problems))
        }
    }

    /// What was set, else our default, which librdkafka wants to be no less than the session's timeout.
    fn poll_interval(&self) -> Duration {
        let set = |name: &str| {
            let (_, value) = self.set.iter().rfind(|(set, _)| set == name)?;
            value.parse().ok().map(Duration::from_millis)
        };
        set(POLL_INTERVAL)
            .unwrap_or_else(|| POLL_INTERVAL_DEFAULT.max(set(SESSION_TIMEOUT).unwrap_or_default()))
    }
}

pub(crate) fn bounded(
    what: &str,
    value: Duration,
    (least, most): (Duration, Duration),
    problems: &mut Vec<String>,
) {
    if value < least || value > most {
        problems.push(format!(
            "{what} is {value:?}; it can be from {least:?} to {most:?}"
        ));
    }
}

impl fmt::Debug for KafkaBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaBuilder")
            .field("brokers", &self.brokers)
            .field("group", &self.group)
            .field("topics", &self.topics)
            .field("start_at", &self.start_at)
            .field("out_of_range", &self.out_of_range)
            .field("ordering_key", &self.ordering_key)
            .field("static_member", &self.static_member)
            .field("set", &names(&self.set))
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
