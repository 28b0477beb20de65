//! The settings of a RabbitMQ source, and the checks they pass before anything is connected.

use std::fmt;
use std::time::Duration;

use lapin::uri::{AMQPScheme, AMQPUri};
use url::{Host, Url};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const CONNECT_TIMEOUT_BOUNDS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(120));
const HEARTBEAT: Duration = Duration::from_secs(10);
const HEARTBEAT_BOUNDS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(300));
/// AMQP's short string.
const LONGEST_NAME: usize = 255;
const URL_PARAMETERS: [&str; 5] = [
    "heartbeat",
    "connection_timeout",
    "frame_max",
    "channel_max",
    "auth_mechanism",
];

/// Where an event's ordering key is found.
///
/// The key matters to a consumer that runs events of one key one after another; RabbitMQ itself
/// knows no keys.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OrderingKey {
    /// In the header `onlyonce-ordering-key`, if the message has one; the default.
    #[default]
    OwnHeader,
    /// It is the routing key. Choose it if producers put an entity's id there.
    RoutingKey,
    /// In this header, if the message has it.
    Header(String),
}

/// Settings that cannot work, all of them at once: each names the setting, its value and its bound.
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
        write!(f, "the RabbitMQ {} cannot be built: {problems}", self.what)
    }
}

impl std::error::Error for ConfigError {}

/// The settings of a [`RabbitMq`](crate::RabbitMq) source; see [`RabbitMq::queue`](crate::RabbitMq::queue).
#[derive(Clone)]
#[must_use = "nothing is built before `build`"]
pub struct RabbitMqBuilder {
    url: String,
    queue: String,
    connect_timeout: Option<Duration>,
    heartbeat: Option<Duration>,
    prefetch: Option<u16>,
    consumer_priority: i32,
    single_active_consumer: bool,
    ordering_key: OrderingKey,
    management_url: Option<String>,
    strict_checks: bool,
    tls_ca: Option<String>,
}

impl RabbitMqBuilder {
    pub(crate) fn new(url: impl Into<String>, queue: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            queue: queue.into(),
            connect_timeout: None,
            heartbeat: None,
            prefetch: None,
            consumer_priority: 0,
            single_active_consumer: false,
            ordering_key: OrderingKey::default(),
            management_url: None,
            strict_checks: false,
            tls_ca: None,
        }
    }

    /// How long connecting may take, and every answer of the broker after that.
    ///
    /// Default: 5 s, or the URL's `connection_timeout` (milliseconds). From 100 ms to 120 s. Raise
    /// it for brokers far away; a broker that does not answer in time counts as down and is tried again.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = Some(timeout);
        self
    }

    /// How often both sides show that they are alive; a peer that is silent for twice as long is given up.
    ///
    /// Default: 10 s, or the URL's `heartbeat` (seconds). Whole seconds from 1 to 300. A broker that
    /// asks for a shorter one gets it. Lower it to notice a cut network sooner, at the price of more
    /// false alarms when this process or the broker stalls.
    pub fn heartbeat(mut self, interval: Duration) -> Self {
        self.heartbeat = Some(interval);
        self
    }

    /// How many messages the broker may hand to this process before it hears of any: the prefetch count.
    ///
    /// Default: what the consumer can have outstanding at once (its lanes times its batch), which
    /// keeps all lanes busy. From 1 to 65535; 0 is refused, since RabbitMQ takes it for "no limit".
    /// Lower it so that several instances share a short queue evenly, or where messages are so large
    /// that this many of them do not fit into memory; raise it where the broker is far away and
    /// handlers are fast.
    pub fn prefetch(mut self, count: u16) -> Self {
        self.prefetch = Some(count);
        self
    }

    /// The consumer's priority: while a higher one has room, lower ones get nothing.
    ///
    /// Default: 0, RabbitMQ's own. Give a standby a negative one.
    pub fn consumer_priority(mut self, priority: i32) -> Self {
        self.consumer_priority = priority;
        self
    }

    /// Start only on a queue that was declared with `x-single-active-consumer`.
    ///
    /// Default: off. With it, one instance at a time receives, and messages of one key arrive in the
    /// order in which they were published (see the crate's documentation for what a release does to
    /// it). The argument is checked where a [`management_url`](Self::management_url) is given;
    /// without one the declaration is taken on trust, and a line at start-up says so.
    pub fn require_single_active_consumer(mut self) -> Self {
        self.single_active_consumer = true;
        self
    }

    /// Where an event's ordering key is found. Default: [`OrderingKey::OwnHeader`].
    pub fn ordering_key(mut self, key: OrderingKey) -> Self {
        self.ordering_key = key;
        self
    }

    /// The management API, such as `http://user:password@broker:15672`, to check at start-up what AMQP cannot tell.
    ///
    /// Default: none. With it the queue's type, delivery limit, dead-letter exchange, consumer
    /// timeout, expiry and single active consumer are held against what this consumer needs; the
    /// user needs the tag `monitoring` or `management`. An API that does not answer is a warning and
    /// nothing more. Without it one line says what was not checked.
    pub fn management_url(mut self, url: impl Into<String>) -> Self {
        self.management_url = Some(url.into());
        self
    }

    /// Refuse to start where the start-up checks would only warn.
    ///
    /// Default: off.
    pub fn strict_checks(mut self) -> Self {
        self.strict_checks = true;
        self
    }

    /// The certificates (PEM) to trust in addition to the system's, for `amqps://`.
    ///
    /// Default: only the system's.
    #[cfg(feature = "tls")]
    pub fn tls_ca(mut self, pem: impl Into<String>) -> Self {
        self.tls_ca = Some(pem.into());
        self
    }

    /// Checks the settings together; all that cannot work are in one error.
    pub(crate) fn settings(self) -> Result<Settings, ConfigError> {
        let mut problems = Vec::new();
        if self.queue.is_empty() {
            problems.push("queue is empty (give the name of a queue that exists)".to_owned());
        }
        if self.queue.len() > LONGEST_NAME {
            problems.push(format!(
                "queue is {} bytes long, the most is {LONGEST_NAME}",
                self.queue.len()
            ));
        }
        if self.prefetch == Some(0) {
            problems
                .push("prefetch is 0, which RabbitMQ takes for no limit at all; the least is 1".to_owned());
        }
        if let OrderingKey::Header(name) = &self.ordering_key
            && (name.is_empty() || name.len() > LONGEST_NAME)
        {
            problems.push(format!(
                "ordering_key names a header of {} bytes; 1 to {LONGEST_NAME} are possible",
                name.len()
            ));
        }
        let access = Access::checked(
            &self.url,
            self.connect_timeout,
            self.heartbeat,
            self.tls_ca,
            &mut problems,
        );
        let management = self.management_url.as_deref().and_then(|url| {
            ManagementUrl::parse(url)
                .inspect_err(|e| problems.push(format!("management_url {e}")))
                .ok()
        });
        match access {
            Some(access) if problems.is_empty() => Ok(Settings {
                access,
                queue: self.queue,
                prefetch: self.prefetch,
                consumer_priority: self.consumer_priority,
                single_active_consumer: self.single_active_consumer,
                ordering_key: self.ordering_key,
                management,
                strict_checks: self.strict_checks,
            }),
            _ => Err(ConfigError::of("source", problems)),
        }
    }
}

impl Access {
    /// Reads a URL, which may carry heartbeat and connect timeout, and checks all of it.
    pub(crate) fn checked(
        url: &str,
        connect_timeout: Option<Duration>,
        heartbeat: Option<Duration>,
        tls_ca: Option<String>,
        problems: &mut Vec<String>,
    ) -> Option<Self> {
        let mut broker = BrokerUrl::parse(url)
            .inspect_err(|e| problems.push(format!("the broker's url {e}")))
            .ok()?;
        let heartbeat = heartbeat
            .or(broker
                .uri
                .query
                .heartbeat
                .map(|seconds| Duration::from_secs(seconds.into())))
            .unwrap_or(HEARTBEAT);
        let connect_timeout = connect_timeout
            .or(broker.uri.query.connection_timeout.map(Duration::from_millis))
            .unwrap_or(CONNECT_TIMEOUT);
        bounded("heartbeat", heartbeat, HEARTBEAT_BOUNDS, problems);
        bounded(
            "connect_timeout",
            connect_timeout,
            CONNECT_TIMEOUT_BOUNDS,
            problems,
        );
        // Without one in the URL lapin takes the server's, by default a minute: two minutes to notice a dead peer.
        broker.uri.query.heartbeat = u16::try_from(heartbeat.as_secs()).ok();
        Some(Self {
            broker,
            connect_timeout,
            tls_ca,
        })
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

impl fmt::Debug for RabbitMqBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URLs are not parsed yet, so nobody knows which part of them is a secret.
        f.debug_struct("RabbitMqBuilder")
            .field("queue", &self.queue)
            .field("connect_timeout", &self.connect_timeout)
            .field("heartbeat", &self.heartbeat)
            .field("prefetch", &self.prefetch)
            .field("consumer_priority", &self.consumer_priority)
            .field("single_active_consumer", &self.single_active_consumer)
            .field("ordering_key", &self.ordering_key)
            .field("management_url", &self.management_url.is_some())
            .field("strict_checks", &self.strict_checks)
            .finish_non_exhaustive()
    }
}

/// How to reach the broker.
#[derive(Debug, Clone)]
pub(crate) struct Access {
    /// With the heartbeat in it.
    pub(crate) broker: BrokerUrl,
    pub(crate) connect_timeout: Duration,
    pub(crate) tls_ca: Option<String>,
}

/// Settings that passed [`RabbitMqBuilder::build`].
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) access: Access,
    pub(crate) queue: String,
    pub(crate) prefetch: Option<u16>,
    pub(crate) consumer_priority: i32,
    pub(crate) single_active_consumer: bool,
    pub(crate) ordering_key: OrderingKey,
    pub(crate) management: Option<ManagementUrl>,
    pub(crate) strict_checks: bool,
}

impl Settings {
    /// The prefetch count of a consumer that can have `window` deliveries outstanding.
    pub(crate) fn prefetch(&self, window: usize) -> u16 {
        // Zero would mean "no limit".
        self.prefetch
            .unwrap_or_else(|| u16::try_from(window).unwrap_or(u16::MAX))
            .max(1)
    }
}

/// An AMQP URL. Its `Debug` and `Display` show user, host and vhost, never the password.
#[derive(Clone)]
pub(crate) struct BrokerUrl {
    pub(crate) uri: AMQPUri,
}

impl BrokerUrl {
    /// The error completes "the broker's url ..", and quotes nothing that may be a secret.
    fn parse(text: &str) -> Result<Self, String> {
        let url = Url::parse(text)
            .map_err(|e| format!("is not a URL: {e} (expected amqp://user:password@host:5672/vhost)"))?;
        match url.scheme() {
            "amqp" => {}
            // lapin without its TLS features speaks plain text to an amqps:// address and says nothing.
            "amqps" if cfg!(feature = "tls") => {}
            "amqps" => return Err("has the scheme amqps (switch on the feature `tls`)".to_owned()),
            other => return Err(format!("has the scheme {other:?}; amqp and amqps are possible")),
        }
        if url.host_str().is_none_or(str::is_empty) {
            return Err("names no host".to_owned());
        }
        if let Some((unknown, _)) = url
            .query_pairs()
            .find(|(name, _)| !URL_PARAMETERS.contains(&&**name))
        {
            return Err(format!(
                "has the parameter {unknown:?}, which is not known here (known: {})",
                URL_PARAMETERS.join(", ")
            ));
        }
        // lapin's own text would quote the whole URL.
        let mut uri: AMQPUri = text.parse().map_err(|_: String| {
            "cannot be read (numbers in its parameters, percent-encoding in its user, password and vhost?)".to_owned()
        })?;
        // lapin connects to localhost for an IPv6 address.
        let literal = url
            .host_str()
            .unwrap_or_default()
            .trim_start_matches('[')
            .trim_end_matches(']');
        if matches!(url.host(), Some(Host::Ipv6(_))) || literal.parse::<std::net::Ipv6Addr>().is_ok() {
            uri.authority.host = literal.to_owned();
        }
        Ok(Self { uri })
    }

    /// Host and port, for messages.
    pub(crate) fn host(&self) -> String {
        let authority = &self.uri.authority;
        if authority.host.contains(':') {
            format!("[{}]:{}", authority.host, authority.port)
        } else {
            format!("{}:{}", authority.host, authority.port)
        }
    }

    pub(crate) fn user(&self) -> &str {
        &self.uri.authority.userinfo.username
    }

    pub(crate) fn vhost(&self) -> &str {
        &self.uri.vhost
    }
}

impl fmt::Display for BrokerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self.uri.scheme {
            AMQPScheme::AMQP => "amqp",
            AMQPScheme::AMQPS => "amqps",
        };
        write!(
            f,
            "{scheme}://{}:***@{}, vhost {:?}",
            self.user(),
            self.host(),
            self.vhost()
        )
    }
}

impl fmt::Debug for BrokerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The management API's address; user and password are kept apart from it, and are never shown.
#[derive(Clone)]
#[cfg_attr(
    not(feature = "management"),
    allow(dead_code, reason = "checked, but not called")
)]
pub(crate) struct ManagementUrl {
    pub(crate) base: Url,
    pub(crate) user: String,
    pub(crate) password: String,
}

impl ManagementUrl {
    /// The error completes "management_url ..", and quotes nothing that may be a secret.
    fn parse(text: &str) -> Result<Self, String> {
        if cfg!(not(feature = "management")) {
            return Err("is given, but the feature `management` is off".to_owned());
        }
        let mut base = Url::parse(text)
            .map_err(|e| format!("is not a URL: {e} (expected http://user:password@host:15672)"))?;
        match base.scheme() {
            "http" => {}
            "https" if cfg!(feature = "tls") => {}
            "https" => return Err("has the scheme https (switch on the feature `tls`)".to_owned()),
            other => return Err(format!("has the scheme {other:?}; http and https are possible")),
        }
        if base.query().is_some() || base.fragment().is_some() {
            return Err("has parameters, which the management API does not take".to_owned());
        }
        let decoded = |text: &str| {
            percent_decoded(text)
                .ok_or_else(|| "has a user or password that is not percent-encoded UTF-8".to_owned())
        };
        let (user, password) = (
            decoded(base.username())?,
            decoded(base.password().unwrap_or_default())?,
        );
        // These fail only for URLs without a host, which http URLs have.
        let _ = base.set_username("");
        let _ = base.set_password(None);
        Ok(Self { base, user, password })
    }
}

fn percent_decoded(text: &str) -> Option<String> {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        if bytes[at] == b'%' {
            out.push(u8::from_str_radix(text.get(at + 1..at + 3)?, 16).ok()?);
            at += 3;
        } else {
            out.push(bytes[at]);
            at += 1;
        }
    }
    String::from_utf8(out).ok()
}

impl fmt::Debug for ManagementUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.base.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MARKER: &str = "s3cr3t-marker";

    fn problems(builder: RabbitMqBuilder) -> String {
        builder.build().unwrap_err().to_string()
    }

    fn settings(url: &str) -> Settings {
        let builder = RabbitMqBuilder::new(url, "q");
        let access = Access::checked(&builder.url, None, None, None, &mut Vec::new()).unwrap();
        Settings {
            access,
            queue: "q".into(),
            prefetch: None,
            consumer_priority: 0,
            single_active_consumer: false,
            ordering_key: OrderingKey::default(),
            management: None,
            strict_checks: false,
        }
    }

    #[test]
    fn all_bad_settings_are_named_at_once() {
        let text = problems(
            RabbitMqBuilder::new("amqp://localhost", "")
                .prefetch(0)
                .heartbeat(Duration::ZERO)
                .connect_timeout(Duration::from_secs(3600))
                .ordering_key(OrderingKey::Header(String::new()))
                .management_url("ftp://x"),
        );
        for part in [
            "queue is empty",
            "prefetch is 0",
            "heartbeat is 0ns",
            "from 1s to 300s",
            "connect_timeout is 3600s",
            "ordering_key names",
            "management_url has the scheme \"ftp\"",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }

    #[test]
    fn bad_urls_say_what_is_wrong_and_keep_the_secret() {
        for (url, part) in [
            ("not a url", "is not a URL"),
            ("http://u:s3cr3t-marker@h/", "has the scheme \"http\""),
            (
                "amqp://u:s3cr3t-marker@h/%2f?cacertfile=x",
                "has the parameter \"cacertfile\"",
            ),
            ("amqp://u:s3cr3t-marker@h/%2f?heartbeat=soon", "cannot be read"),
            ("amqp://u:s3cr3t-marker@h/%2f?heartbeat=0", "heartbeat is 0ns"),
            ("amqp:u:s3cr3t-marker@h", "names no host"),
            ("amqp://u:s3cr3t-marker@h:99999/", "is not a URL"),
        ] {
            let text = problems(RabbitMqBuilder::new(url, "q"));
            assert!(text.contains(part), "{part} in {text}");
            assert!(!text.contains(MARKER), "{text}");
        }
    }

    #[cfg(not(feature = "tls"))]
    #[test]
    fn an_encrypted_address_is_never_spoken_to_in_plain_text() {
        let text = problems(RabbitMqBuilder::new("amqps://h", "q").management_url("https://h"));
        assert!(
            text.contains("the broker's url has the scheme amqps (switch on the feature `tls`)"),
            "{text}"
        );
        assert!(text.contains("management_url has the scheme https"), "{text}");
    }

    #[test]
    fn no_way_of_printing_settings_shows_a_password() {
        let url = "amqp://user:s3cr3t-marker@host/%2f";
        let management = "http://user:s3cr3t-marker@host:15672";
        let builder = RabbitMqBuilder::new(url, "q").management_url(management);
        assert!(!format!("{builder:?}").contains(MARKER));
        let source = builder.build().unwrap();
        assert!(!format!("{source:?} {source:#?}").contains(MARKER));
        let settings = settings(url);
        let shown = format!("{settings:?} {settings:#?} {}", settings.access.broker);
        assert!(!shown.contains(MARKER), "{shown}");
        assert!(shown.contains("amqp://user:***@host:5672"), "{shown}");
    }

    #[test]
    fn the_url_may_carry_heartbeat_and_timeout() {
        let plain = settings("amqp://h");
        assert_eq!(plain.access.broker.uri.query.heartbeat, Some(10));
        assert_eq!(plain.access.connect_timeout, Duration::from_secs(5));
        let given = settings("amqp://h/v?heartbeat=33&connection_timeout=1500");
        assert_eq!(given.access.broker.uri.query.heartbeat, Some(33));
        assert_eq!(given.access.connect_timeout, Duration::from_millis(1500));
        assert_eq!(given.access.broker.vhost(), "v");
    }

    #[test]
    fn an_ipv6_address_is_not_localhost() {
        let broker = settings("amqp://u:p@[2001:db8::1]:5673/%2f").access.broker;
        assert_eq!(broker.uri.authority.host, "2001:db8::1");
        assert_eq!(broker.host(), "[2001:db8::1]:5673");
    }

    #[test]
    fn prefetch_is_never_unlimited() {
        let mut settings = settings("amqp://h");
        assert_eq!(
            [0, 1, 32, 1 << 20].map(|w| settings.prefetch(w)),
            [1, 1, 32, 65535]
        );
        settings.prefetch = Some(7);
        assert_eq!(settings.prefetch(32), 7);
    }

    #[cfg(feature = "management")]
    #[test]
    fn management_credentials_are_decoded_and_leave_the_url() {
        let url = ManagementUrl::parse("http://a%40b:p%2Fw%25@host:15672/prefix").unwrap();
        assert_eq!((url.user.as_str(), url.password.as_str()), ("a@b", "p/w%"));
        assert_eq!(format!("{url:?}"), "http://host:15672/prefix");
        assert!(ManagementUrl::parse("http://a:%zz@host").is_err());
    }
}
