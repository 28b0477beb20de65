//! What an outbox chaos run has to know of a broker.

use std::time::Duration;

use onlyonce::async_trait;
use onlyonce::outbox::OutgoingEvent;
use onlyonce::publisher::Publisher;

use super::route::Route;

/// A broker, as an outbox chaos run sees it. An adapter's example implements it and calls [`run`](super::run).
///
/// The runner and its relays are one program: both make this value from the same environment.
#[async_trait]
pub trait Broker: Send + Sync + Sized + 'static {
    /// Its name in `scripts/services`.
    const SERVICE: &'static str;

    /// What the relays publish with.
    type Publisher: Publisher;

    /// From the variables that `scripts/services env` prints.
    fn from_env() -> anyhow::Result<Self>;

    /// A relay's publisher. Its times should be short: a run is full of silence that has to be noticed.
    fn publisher(&self) -> anyhow::Result<Self::Publisher>;

    /// Where the events of this route go, of [`Route::Rough`] and [`Route::Calm`].
    fn address(&self, name: &str, route: Route) -> String;

    /// Creates what a run publishes to.
    async fn declare(&self, name: &str) -> anyhow::Result<()>;

    /// Deletes it.
    async fn delete(&self, name: &str) -> anyhow::Result<()>;

    /// Makes of an event for [`Route::Rough`] one that the broker refuses for good.
    fn poisoned(&self, event: OutgoingEvent) -> OutgoingEvent;

    /// Makes the broker refuse what goes to [`Route::Rough`] for this time, and puts it right again. Says what it did,
    /// if it can do such a thing.
    async fn disturb(&self, _name: &str, _time: Duration) -> anyhow::Result<Option<&'static str>> {
        Ok(None)
    }

    /// All that has arrived, events of one key in the order of their arrival. Called once, in the end.
    async fn read_all(&self, name: &str, route: Route) -> anyhow::Result<Vec<Arrival>>;
}

/// A message as the broker has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arrival {
    /// The header `onlyonce-event-id`.
    pub event_id: String,
    /// The key that it is ordered by.
    pub key: String,
    /// Its body.
    pub body: String,
}
