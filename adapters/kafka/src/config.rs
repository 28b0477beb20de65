//! The settings of a Kafka source, and the checks they pass before anything is connected.

use std::fmt;
use std::time::Duration;

use onlyonce::source::Plan;
use rdkafka::ClientConfig;
use rdkafka::config::RDKafkaLogLevel;

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
/// How often the client tells how far it is behind.
const STATISTICS: Duration = Duration::from_secs(5);

const POLL_INTERVAL: &str = "max.poll.interval.ms";
const POLL_INTERVAL_DEFAULT: Duration = Duration::from_secs(300);

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

/// Settings that would break a promise, or are said elsewhere, and why.
const REFUSED: [(&str, &str); 17] = [
    ("bootstrap.servers", "is the first argument of `Kafka::group`"),
    ("metadata.broker.list", "is the first argument of `Kafka::group`"),
    ("group.id", "is the second argument of `Kafka::group`"),
    ("group.instance.id", "is said by `static_member`"),
    (
        "auto.offset.reset",
        "is said by `start_at` and `out_of_range`: it would jump over records in silence",
    ),
    (
        "enable.auto.offset.store",
        "would store offsets of events that are not done: they would be lost by a death",
    ),
    (
        "enable.auto.commit",
        "is what commits the stored offsets; without it everything comes again",
    ),
    (
        "auto.commit.enable",
        "is what commits the stored offsets; without it everything comes again",
    ),
    (
        "offset.store.method",
        "would keep offsets where other members do not find them",
    ),
    (
        "offset.store.path",
        "would keep offsets where other members do not find them",
    ),
    (
        "enable.partition.eof",
        "reports the end of a partition as an error, which nobody waits for",
    ),
    (
        "group.protocol",
        "is the classic one: the callbacks of the new one are not what this source relies on",
    ),
    (
        "allow.auto.create.topics",
        "would create a misspelt topic, and wait for its events for ever",
    ),
    (
        "statistics.interval.ms",
        "is what health and backlog are read from",
    ),
    (
        "consume.callback.max.messages",
        "concerns an interface that this source does not use",
    ),
    (
        "topic.metadata.refresh.sparse",
        "would hide new topics from a pattern",
    ),
    (
        "plugin.library.paths",
        "loads foreign code that may take part in everything",
    ),
];

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
pub struct ConfigError(Vec<String>);

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the Kafka source cannot be built: {}", self.0.join("; "))
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
    /// Default: 10 s. At most 10 minutes, and less than `max.poll.interval.ms`. While it waits the
    /// whole group waits; what is not done by then is delivered again, to the other member, which
    /// meets the claim. Raise it to the usual length of a handler; it costs only where handlers run
    /// that long. 0 waits for nothing.
    pub fn drain_limit(mut self, limit: Duration) -> Self {
        self.drain_limit = limit;
        self
    }

    /// How long nothing may come while records wait before the source counts as stuck.
    ///
    /// Default: 60 s. From 10 s to an hour. The client is rebuilt once then; if still nothing comes
    /// the consumer is not ready, until something does.
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
        self.check_poll_interval(&mut problems);
        if !problems.is_empty() {
            return Err(ConfigError(problems));
        }
        let settings = Settings {
            brokers: self.brokers,
            group: self.group,
            topics: self.topics,
            cluster: self.cluster,
            start_at: self.start_at,
            out_of_range: self.out_of_range,
            ordering_key: self.ordering_key,
            static_member: self.static_member,
            connect_timeout: self.connect_timeout,
            drain_limit: self.drain_limit,
            stall_after: self.stall_after,
            partition_records: self.partition_records,
            partition_bytes: self.partition_bytes,
            strict_checks: self.strict_checks,
            set: self.set,
        };
        settings.try_with_librdkafka()?;
        Ok(settings)
    }

    /// A drain that outlasts the poll interval would lose the partitions that it wants to leave in good order.
    fn check_poll_interval(&self, problems: &mut Vec<String>) {
        let given = self.set.iter().rfind(|(name, _)| name == POLL_INTERVAL);
        let interval = given
            .and_then(|(_, value)| value.parse().ok())
            .map_or(POLL_INTERVAL_DEFAULT, Duration::from_millis);
        if self.drain_limit >= interval {
            problems.push(format!(
                "drain_limit is {:?} and has to be less than {POLL_INTERVAL}, which is {interval:?}",
                self.drain_limit
            ));
        }
    }
}

fn refuse(set: &[(String, String)], problems: &mut Vec<String>) {
    for (name, value) in set {
        if let Some((_, why)) = REFUSED.iter().find(|(refused, _)| refused == name) {
            problems.push(format!("{name} cannot be set: it {why}"));
        }
        if name == "isolation.level" && value != "read_committed" {
            problems.push(format!(
                "{name} can only be read_committed: events of aborted transactions would have effects"
            ));
        }
    }
}

fn bounded(what: &str, value: Duration, (least, most): (Duration, Duration), problems: &mut Vec<String>) {
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

fn is_secret(name: &str) -> bool {
    ["password", "secret", "passphrase"]
        .iter()
        .any(|what| name.contains(what))
}

/// Any value may be a secret, or the path to one.
fn names(set: &[(String, String)]) -> Vec<&str> {
    set.iter().map(|(name, _)| name.as_str()).collect()
}

/// Settings that passed [`KafkaBuilder::build`].
pub(crate) struct Settings {
    pub(crate) brokers: String,
    pub(crate) group: String,
    pub(crate) topics: Vec<String>,
    pub(crate) cluster: String,
    pub(crate) start_at: StartAt,
    pub(crate) out_of_range: OutOfRange,
    pub(crate) ordering_key: OrderingKey,
    pub(crate) static_member: Option<String>,
    pub(crate) connect_timeout: Duration,
    pub(crate) drain_limit: Duration,
    pub(crate) stall_after: Duration,
    pub(crate) partition_records: usize,
    pub(crate) partition_bytes: usize,
    pub(crate) strict_checks: bool,
    set: Vec<(String, String)>,
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
        self.set
            .iter()
            // A number that is no secret may stand for many things in a text.
            .filter(|(name, value)| {
                !value.is_empty()
                    && name != "security.protocol"
                    && (is_secret(name) || value.parse::<f64>().is_err())
            })
            .fold(text.to_owned(), |text, (_, value)| text.replace(value, "***"))
    }

    /// librdkafka judges names and values by itself, without a connection; its own words may hold a value.
    fn try_with_librdkafka(&self) -> Result<(), ConfigError> {
        let mut problems = Vec::new();
        for (name, value) in &self.set {
            let mut one = ClientConfig::new();
            one.set(name, value);
            if one.create_native_config().is_err() {
                problems.push(format!(
                    "{name} is not a setting of this librdkafka, or its value is not possible (a build without the \
                     feature `tls` does not know all of them)"
                ));
            }
        }
        if problems.is_empty() {
            Ok(())
        } else {
            Err(ConfigError(problems))
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

#[cfg(test)]
mod tests {
    use super::*;

    const MARKER: &str = "s3cr3t-m4rk3r";

    fn builder() -> KafkaBuilder {
        KafkaBuilder::new("localhost:9092", "g").topic("t")
    }

    fn problems(builder: KafkaBuilder) -> String {
        builder.settings().unwrap_err().to_string()
    }

    #[test]
    fn every_problem_is_told_at_once() {
        let text = problems(
            KafkaBuilder::new(" ", "")
                .connect_timeout(Duration::ZERO)
                .partition_window(0, 1)
                .ordering_key(OrderingKey::Header(String::new())),
        );
        for what in [
            "brokers is empty",
            "group is empty",
            "no topic",
            "connect_timeout is 0ns",
            "partition_window",
            "ordering_key",
        ] {
            assert!(text.contains(what), "{what}: {text}");
        }
    }

    #[test]
    fn what_would_break_a_promise_is_refused_with_its_reason() {
        for (name, why) in REFUSED {
            let text = problems(builder().set(name, "true"));
            assert!(text.contains(name) && text.contains(why), "{text}");
        }
        let text = problems(builder().set("isolation.level", "read_uncommitted"));
        assert!(text.contains("aborted transactions"), "{text}");
        builder()
            .set("isolation.level", "read_committed")
            .settings()
            .unwrap();
    }

    #[test]
    fn a_drain_ends_before_the_poll_interval_does() {
        let text = problems(builder().set(POLL_INTERVAL, "10000"));
        assert!(text.contains("drain_limit is 10s"), "{text}");
        builder()
            .set(POLL_INTERVAL, "10000")
            .drain_limit(Duration::from_secs(5))
            .settings()
            .unwrap();
    }

    #[test]
    fn no_value_is_shown() {
        let secret = builder()
            .set("client.id", MARKER)
            .set("no.such.setting", MARKER)
            .set("session.timeout.ms", MARKER);
        assert!(!format!("{secret:?} {secret:#?}").contains(MARKER));
        let text = problems(secret);
        assert!(
            text.contains("no.such.setting") && text.contains("session.timeout.ms"),
            "{text}"
        );
        assert!(!text.contains(MARKER), "{text}");
        let settings = builder().set("client.id", MARKER).settings().unwrap();
        assert!(!format!("{settings:?} {settings:#?}").contains(MARKER));
    }

    #[test]
    fn a_password_of_digits_is_struck_out_and_other_numbers_are_not() {
        let settings = builder()
            .set("sasl.password", "271828")
            .set("session.timeout.ms", "6000")
            .settings()
            .unwrap();
        assert_eq!(
            settings.without_values("271828 refused after 6000 ms"),
            "*** refused after 6000 ms"
        );
    }

    #[test]
    fn a_pattern_is_marked_as_one() {
        let settings = builder()
            .topic_pattern("orders-.*")
            .topic_pattern("^x")
            .settings()
            .unwrap();
        assert_eq!(settings.topics, ["t", "^orders-.*", "^x"]);
        assert_eq!(settings.named_topics().collect::<Vec<_>>(), ["t"]);
    }

    #[test]
    fn what_is_set_wins_over_defaults_and_never_over_the_rules() {
        let settings = builder()
            .set("auto.commit.interval.ms", "250")
            .set("partition.assignment.strategy", "range")
            .settings()
            .unwrap();
        let config = settings.consumer(&Plan::for_window("c", 8));
        for (name, value) in [
            ("auto.commit.interval.ms", "250"),
            ("partition.assignment.strategy", "range"),
            ("enable.auto.offset.store", "false"),
            ("auto.offset.reset", "error"),
        ] {
            assert_eq!(config.get(name), Some(value), "{name}");
        }
    }
}
