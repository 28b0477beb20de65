//! The settings of a publisher, and the checks they pass before anything is called.

use std::fmt;
use std::time::Duration;

use aws_sdk_sqs::Client;

use crate::config::{ConfigError, bare, bounded};

const PATIENCE: Duration = Duration::from_secs(30);
const PATIENCE_BOUNDS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(600));
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
const CALL_TIMEOUT_BOUNDS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(60));
const CALLS: usize = 8;
const CALLS_BOUNDS: (usize, usize) = (1, 64);

/// The settings of a [`SqsPublisher`](crate::SqsPublisher); see [`SqsPublisher::to`](crate::SqsPublisher::to).
#[derive(Clone)]
#[must_use = "nothing is built before `build`"]
pub struct SqsPublisherBuilder {
    client: Client,
    patience: Duration,
    call_timeout: Duration,
    calls: usize,
}

impl SqsPublisherBuilder {
    pub(crate) fn new(client: Client) -> Self {
        Self {
            client,
            patience: PATIENCE,
            call_timeout: CALL_TIMEOUT,
            calls: CALLS,
        }
    }

    /// How long a message may take, waiting for its call included.
    ///
    /// Default: 30 s. From 1 s to 10 minutes. After that it counts as not published; SQS may have it all the same.
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// How long SQS may take to answer a call. Default 5 s; from 0.1 s to 60 s, and no longer than the patience.
    ///
    /// Retries and time limits of the client are switched off, as the publisher has its own limits and the relay retries.
    pub fn call_timeout(mut self, timeout: Duration) -> Self {
        self.call_timeout = timeout;
        self
    }

    /// How many calls for one queue may be under way at once. Default 8; from 1 to 64.
    ///
    /// What waits while they are is the next call, up to ten messages. Fewer calls cost less; more are faster.
    pub fn calls(mut self, most: usize) -> Self {
        self.calls = most;
        self
    }

    /// Checks the settings together; all that cannot work are in one error.
    pub(super) fn settings(self) -> Result<Settings, ConfigError> {
        let mut problems = Vec::new();
        bounded("patience", self.patience, PATIENCE_BOUNDS, &mut problems);
        bounded(
            "call_timeout",
            self.call_timeout,
            CALL_TIMEOUT_BOUNDS,
            &mut problems,
        );
        bounded("calls", self.calls, CALLS_BOUNDS, &mut problems);
        if self.call_timeout > self.patience {
            problems.push(format!(
                "call_timeout is {:?} and patience {:?}; no message would wait for a call's end (lower it)",
                self.call_timeout, self.patience
            ));
        }
        if problems.is_empty() {
            Ok(Settings {
                client: bare(&self.client),
                patience: self.patience,
                call_timeout: self.call_timeout,
                calls: self.calls,
            })
        } else {
            Err(ConfigError::of("publisher", problems))
        }
    }
}

impl fmt::Debug for SqsPublisherBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqsPublisherBuilder")
            .field("patience", &self.patience)
            .field("call_timeout", &self.call_timeout)
            .field("calls", &self.calls)
            .finish_non_exhaustive()
    }
}

/// Checked settings. No `Debug`: nothing prints a client.
pub(super) struct Settings {
    pub(super) client: Client,
    pub(super) patience: Duration,
    pub(super) call_timeout: Duration,
    pub(super) calls: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Connection;

    #[test]
    fn all_bad_settings_are_named_at_once() {
        let client = Connection::new("r", "k", "s3cr3t-marker")
            .endpoint("http://h")
            .client()
            .unwrap();
        let builder = SqsPublisherBuilder::new(client)
            .patience(Duration::from_millis(10))
            .call_timeout(Duration::from_millis(20))
            .calls(0);
        assert!(!format!("{builder:?}").contains("marker"));
        let text = builder.settings().err().unwrap().to_string();
        for part in [
            "publisher cannot be built",
            "patience is 10ms",
            "call_timeout is 20ms",
            "calls is 0",
            "lower it",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
