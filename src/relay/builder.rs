use std::sync::Arc;
use std::time::Duration;

use uuid::Uuid;

use super::Relay;
use super::health::RelayHealth;
use super::outlet::Outlet;
use super::retry::Retries;
use super::settings::Settings;
use super::work::Shared;
use crate::consumer::{BuildError, Problems, check_connections};
use crate::outbox::is_publisher_name;
use crate::publisher::Publisher;
use crate::store::{Reach, Relaying};

/// Configures a [`Relay`]. Everything is checked together by [`build`](Self::build); each message names
/// the field, its value and the bound.
pub struct RelayBuilder<S> {
    store: S,
    name: String,
    publishers: Vec<(String, Arc<dyn Publisher>)>,
    settings: Settings,
}

impl<S: Relaying> RelayBuilder<S> {
    pub(super) fn new(store: S) -> Self {
        Self {
            store,
            name: "default".to_owned(),
            publishers: Vec::new(),
            settings: Settings {
                lease: Duration::from_secs(5),
                poll: Duration::from_millis(500),
                in_flight: 1000,
                in_flight_bytes: 64 << 20,
                retries: Retries::default(),
                overtake: false,
                keep_sent: None,
                stop_timeout: Duration::from_secs(10),
            },
        }
    }

    /// Which rows it publishes: those that were written for the relay of this name, 1 to 64 of `a-z`, `0-9`, `-` and
    /// `_`. Default `default`. Instances of one name share its lanes; relays of different names know nothing of
    /// each other.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Where the events go whose destination begins with this name and a colon. At least one; call it once for
    /// each. Every instance of the relay needs all of them.
    pub fn publisher(mut self, name: impl Into<String>, publisher: impl Publisher) -> Self {
        self.publishers.push((name.into(), Arc::new(publisher)));
        self
    }

    /// How long its lanes stay with an instance that has died. Default 5 s; a living one renews them every
    /// third, and publishes nothing when less than a third is left. A longer lease stands more of a slow
    /// database, a shorter one is sooner with another instance.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.settings.lease = lease;
        self
    }

    /// How often the table is looked at when nothing else tells that there is something. Default 500 ms.
    /// Delayed events and later tries may be late by as much.
    pub fn poll(mut self, every: Duration) -> Self {
        self.settings.poll = every;
        self
    }

    /// How many events are on their way at once, unconfirmed or not yet marked. Default 1000. After a crash so many
    /// may go out twice.
    pub fn in_flight(mut self, events: usize) -> Self {
        self.settings.in_flight = events;
        self
    }

    /// How many bytes of payloads and headers are in memory. Default 64 MiB; the last event may go over it.
    pub fn in_flight_bytes(mut self, bytes: usize) -> Self {
        self.settings.in_flight_bytes = bytes;
        self
    }

    /// After how many refusals of its own an event is parked. Default 10. A broker that is down, a destination that is
    /// not there and a lost connection count for nobody.
    pub fn attempts(mut self, attempts: u32) -> Self {
        self.settings.retries.attempts = attempts;
        self
    }

    /// How long a refused event waits before it is tried again: at first and at most. Doubles with each refusal, and
    /// has jitter. Default 1 s to 5 min.
    pub fn delays(mut self, first: Duration, longest: Duration) -> Self {
        self.settings.retries.min = first;
        self.settings.retries.max = longest;
        self
    }

    /// Let events go on behind an earlier one of their key that is parked or waits for another try. By default
    /// they wait for it, so that they are never out of order.
    pub fn overtake(mut self) -> Self {
        self.settings.overtake = true;
        self
    }

    /// Keep events in the table for this long after they were sent, to look at. Default: they are deleted at once.
    pub fn keep_sent(mut self, time: Duration) -> Self {
        self.settings.keep_sent = Some(time);
        self
    }

    /// How long a stop waits for what is on its way. Default 10 s. What has not been confirmed by then goes out
    /// again.
    pub fn stop_timeout(mut self, limit: Duration) -> Self {
        self.settings.stop_timeout = limit;
        self
    }

    /// Checks everything and makes the relay.
    pub fn build(self) -> Result<Relay<S>, BuildError> {
        let mut problems = Problems::default();
        let (ms, day) = (Duration::from_millis(1), Duration::from_secs(86_400));
        // As an outbox writes them: under any other name there could be no rows.
        if !is_publisher_name(&self.name) {
            problems.add(format!("name is {:?} (1 to 64 of a-z, 0-9, - and _)", self.name));
        }
        if self.publishers.is_empty() {
            problems.add("publisher is not set (where the events go)".into());
        }
        for (nth, (name, _)) in self.publishers.iter().enumerate() {
            if !is_publisher_name(name) {
                problems.add(format!("publisher is {name:?} (1 to 64 of a-z, 0-9, - and _)"));
            }
            if self.publishers[..nth].iter().any(|(other, _)| other == name) {
                problems.add(format!("publisher {name} is there twice (one for each name)"));
            }
        }
        let settings = self.settings;
        problems.time("lease", settings.lease, 300 * ms, day);
        problems.time("poll", settings.poll, 10 * ms, day);
        problems.range("in_flight", settings.in_flight, 1, 100_000);
        problems.range("in_flight_bytes", settings.in_flight_bytes, 1024, usize::MAX);
        problems.range("attempts", settings.retries.attempts as usize, 1, 1000);
        problems.time("delays.first", settings.retries.min, ms, day);
        problems.time(
            "delays.longest",
            settings.retries.max,
            settings.retries.min.max(ms),
            30 * day,
        );
        if let Some(keep) = settings.keep_sent {
            problems.time("keep_sent", keep, Duration::from_secs(1), 3660 * day);
        }
        problems.time("stop_timeout", settings.stop_timeout, Duration::ZERO, day);
        // The one that listens. Its statements are on the reserve.
        let connections = match self.store.reach() {
            Reach::Everybody => vec![("relay", 1)],
            Reach::Nobody | Reach::Blocked => Vec::new(),
        };
        check_connections(&mut problems.0, &connections, self.store.max_connections());
        if !problems.0.is_empty() {
            return Err(BuildError(problems.0));
        }
        let health = Arc::new(RelayHealth::new(&self.name));
        let outlets = self.publishers.into_iter();
        Ok(Relay {
            outlets: outlets
                .map(|(name, publisher)| Outlet::new(name, publisher))
                .collect(),
            shared: Arc::new(Shared {
                store: self.store,
                name: self.name.into(),
                // One for each start: a lane that was held before it is another instance's.
                owner: Uuid::from_u128(fastrand::u128(..)),
                settings,
                health,
            }),
            connections,
        })
    }
}
