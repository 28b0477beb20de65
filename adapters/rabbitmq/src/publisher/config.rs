//! The settings of a publisher, and the checks they pass before anything is connected.

use std::collections::HashSet;
use std::fmt;
use std::time::Duration;

use super::parcel;
use crate::config::{Access, ConfigError, bounded};

const PATIENCE: Duration = Duration::from_secs(30);
const PATIENCE_BOUNDS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(600));
const CHANNELS: usize = 64;
const MOST_CHANNELS: usize = 1000;

/// The settings of a [`RabbitMqPublisher`](crate::RabbitMqPublisher); see
/// [`RabbitMqPublisher::to`](crate::RabbitMqPublisher::to).
#[derive(Clone)]
#[must_use = "nothing is built before `build`"]
pub struct RabbitMqPublisherBuilder {
    url: String,
    connect_timeout: Option<Duration>,
    heartbeat: Option<Duration>,
    patience: Duration,
    channels: usize,
    unroutable_accepted: HashSet<String>,
    tls_ca: Option<String>,
}

impl RabbitMqPublisherBuilder {
    pub(crate) fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            connect_timeout: None,
            heartbeat: None,
            patience: PATIENCE,
            channels: CHANNELS,
            unroutable_accepted: HashSet::new(),
            tls_ca: None,
        }
    }

    /// How long connecting may take, and opening a channel after that.
    ///
    /// Default: 5 s, or the URL's `connection_timeout` (milliseconds). From 100 ms to 120 s, and no longer than
    /// the [patience](Self::patience).
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = Some(timeout);
        self
    }

    /// How often both sides show that they are alive; a peer that is silent for twice as long is given up.
    ///
    /// Default: 10 s, or the URL's `heartbeat` (seconds). Whole seconds from 1 to 300.
    pub fn heartbeat(mut self, interval: Duration) -> Self {
        self.heartbeat = Some(interval);
        self
    }

    /// How long a message may wait for its confirm, connecting included.
    ///
    /// Default: 30 s. From 1 s to 10 minutes. After that it counts as not published; the broker may have it
    /// all the same. Raise it for queues that confirm slowly (a quorum over a wide network).
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// How many messages may be under way at once, each on a channel of its own.
    ///
    /// Default: 64. From 1 to 1000, and no more than the broker's `channel_max`. Raise it where the broker is far away.
    pub fn channels(mut self, most: usize) -> Self {
        self.channels = most;
        self
    }

    /// Messages to this address are published also where no queue is bound to take them: they are lost then.
    ///
    /// Default: none; an unroutable message is refused. An exchange's name without a slash means all its routing
    /// keys. For events that nobody has to hear.
    pub fn accept_unroutable(mut self, address: impl Into<String>) -> Self {
        self.unroutable_accepted.insert(address.into());
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
    pub(super) fn settings(self) -> Result<Settings, ConfigError> {
        let mut problems = Vec::new();
        bounded("patience", self.patience, PATIENCE_BOUNDS, &mut problems);
        if !(1..=MOST_CHANNELS).contains(&self.channels) {
            problems.push(format!(
                "channels is {}; it can be from 1 to {MOST_CHANNELS}",
                self.channels
            ));
        }
        for address in &self.unroutable_accepted {
            if address.contains('/') && parcel::address(address).is_err() {
                problems.push(format!(
                    "accept_unroutable names {address:?}, which is no address"
                ));
            }
        }
        let access = Access::checked(
            &self.url,
            self.connect_timeout,
            self.heartbeat,
            self.tls_ca,
            &mut problems,
        );
        if let Some(access) = &access
            && access.connect_timeout > self.patience
        {
            problems.push(format!(
                "connect_timeout is {:?} and patience {:?}; no message would wait for a connection (lower it)",
                access.connect_timeout, self.patience
            ));
        }
        match access {
            Some(access) if problems.is_empty() => Ok(Settings {
                access,
                patience: self.patience,
                channels: self.channels,
                unroutable_accepted: self.unroutable_accepted,
            }),
            _ => Err(ConfigError::of("publisher", problems)),
        }
    }
}

impl fmt::Debug for RabbitMqPublisherBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URL is not parsed yet, so nobody knows which part of it is a secret.
        f.debug_struct("RabbitMqPublisherBuilder")
            .field("connect_timeout", &self.connect_timeout)
            .field("heartbeat", &self.heartbeat)
            .field("patience", &self.patience)
            .field("channels", &self.channels)
            .field("unroutable_accepted", &self.unroutable_accepted)
            .finish_non_exhaustive()
    }
}

/// Settings that passed [`RabbitMqPublisherBuilder::build`].
#[derive(Debug)]
pub(super) struct Settings {
    pub(super) access: Access,
    pub(super) patience: Duration,
    pub(super) channels: usize,
    unroutable_accepted: HashSet<String>,
}

impl Settings {
    pub(super) fn accepts_unroutable(&self, address: &str) -> bool {
        let exchange = address.split_once('/').map_or(address, |(exchange, _)| exchange);
        !self.unroutable_accepted.is_empty()
            && (self.unroutable_accepted.contains(address) || self.unroutable_accepted.contains(exchange))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_bad_settings_are_named_at_once() {
        let text = RabbitMqPublisherBuilder::new("ftp://u:s3cr3t-marker@h")
            .patience(Duration::from_millis(1))
            .channels(0)
            .accept_unroutable("/")
            .settings()
            .unwrap_err()
            .to_string();
        for part in [
            "publisher cannot be built",
            "scheme \"ftp\"",
            "patience is 1ms",
            "channels is 0",
            "accept_unroutable",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(!text.contains("marker"), "{text}");
        let hasty = RabbitMqPublisherBuilder::new("amqp://h").patience(Duration::from_secs(2));
        assert!(
            hasty
                .settings()
                .unwrap_err()
                .to_string()
                .contains("connect_timeout is 5s")
        );
    }

    #[test]
    fn unroutable_is_accepted_for_an_address_or_a_whole_exchange() {
        let settings = RabbitMqPublisherBuilder::new("amqp://h")
            .accept_unroutable("audit")
            .accept_unroutable("orders/note")
            .settings()
            .unwrap();
        let accepted = [
            "audit/a",
            "audit/",
            "orders/note",
            "orders/paid",
            "/audit",
            "/note",
        ]
        .map(|address| settings.accepts_unroutable(address));
        assert_eq!(accepted, [true, true, true, false, false, false]);
    }
}
