//! What a chaos run has to know of a broker.

use onlyonce::async_trait;
use onlyonce::source::Source;

use super::events::{Event, Keys};

/// A broker, as a chaos run sees it. An adapter's example implements it and calls [`run`](super::run).
///
/// The runner and its workers are one program: both make this value from the same environment and
/// the same arguments.
#[async_trait]
pub trait Broker: Send + Sync + Sized + 'static {
    /// Its name in `scripts/services`.
    const SERVICE: &'static str;
    /// The options that [`option`](Self::option) takes, for the usage line.
    const USAGE: &'static str = "";
    /// Why it is not restarted: it would lose messages by itself. Its links fail instead.
    const NEVER_RESTARTED: Option<&'static str> = None;

    /// A connection that publishes.
    type Producer: Send + Sync;
    /// What the workers consume from.
    type Source: Source;

    /// From the variables that `scripts/services env` prints.
    fn from_env() -> anyhow::Result<Self>;

    /// Takes an argument of its own; false if it is none.
    fn option(&mut self, _argument: &str) -> bool {
        false
    }

    /// Which events have a key, by which it brings them in order: those of a key have to take effect in
    /// the order in which they were sent.
    fn keys(&self) -> Keys {
        Keys::None
    }

    /// Where the link of this place begins and ends. Places are counted from 0, those of guests last.
    fn entrance(&self, place: usize) -> anyhow::Result<Entrance>;

    /// Creates the queue or topic of a run.
    async fn declare(&self, name: &str) -> anyhow::Result<()>;

    /// Deletes it.
    async fn delete(&self, name: &str) -> anyhow::Result<()>;

    /// Connects, past all links. A producer that failed is not used again.
    async fn producer(&self) -> anyhow::Result<Self::Producer>;

    /// Publishes and returns when the broker has all of them for certain. What failed is published
    /// again as a whole, so of the events of one key a later one must never be in without the earlier.
    async fn publish(&self, producer: &Self::Producer, name: &str, batch: &[&Event]) -> anyhow::Result<()>;

    /// How many messages are not done: waiting ones and those that somebody has.
    async fn left(&self, name: &str) -> anyhow::Result<u64>;

    /// What it saw beside the ledger that must not be. Asked once, in the end.
    async fn problems(&self, _name: &str) -> Vec<String> {
        Vec::new()
    }

    /// A worker's source. Its times should be short: a run is full of silence that has to be noticed.
    fn source(&self, seat: &Seat) -> anyhow::Result<Self::Source>;
}

/// Where a link begins and ends.
#[derive(Debug, Clone)]
pub struct Entrance {
    /// The broker's URL, or its host and port.
    pub url: String,
    /// The port at which a worker finds the link; 0 for any.
    pub port: u16,
}

/// What tells one worker from another.
#[derive(Debug, Clone)]
pub struct Seat {
    /// The name of the run's queue or topic, and of its schema.
    pub name: String,
    /// The entrance's URL with the link's address in it.
    pub url: String,
    /// The worker's name, which its successor in the same place will have, too; none for a guest.
    pub member: Option<String>,
}
