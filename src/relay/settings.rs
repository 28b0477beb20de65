use std::time::Duration;

use super::retry::Retries;

/// What a relay is told to do.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) lease: Duration,
    pub(crate) poll: Duration,
    pub(crate) in_flight: usize,
    pub(crate) in_flight_bytes: usize,
    pub(crate) retries: Retries,
    pub(crate) overtake: bool,
    pub(crate) keep_sent: Option<Duration>,
    pub(crate) stop_timeout: Duration,
}
