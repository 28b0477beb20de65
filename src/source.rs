//! Sources: where deliveries come from, and what an adapter implements.
//!
//! An adapter is one [`Source`]. It owns the broker's client, keeps it alive, and turns what arrives
//! into [`Delivery`] values; the consumer's loop decides what becomes of each and says so by a
//! [`Settlement`]. An adapter never retries a handler, never counts attempts and never dead-letters
//! on its own: it only carries.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::event::RawEvent;

/// A stream of deliveries from a broker, a queue table, a test.
///
/// One task owns it and calls its methods one at a time, in this order: `start` once, then any
/// sequence of `receive`, `settle` and `pause`, then `stop`, after which `receive` is still called
/// until nothing is outstanding (it then yields only `Lost` and `Closed`) and `settle` still works.
#[async_trait]
pub trait Source: Send + 'static {
    /// Connects, checks what can be checked against `plan`, and subscribes.
    ///
    /// Called before anything else, again after it failed with a [`SourceError`] that is not fatal.
    /// A fatal error (a missing queue, a refused password, settings that break a guarantee) ends the
    /// consumer with that message.
    async fn start(&mut self, plan: &Plan) -> Result<(), SourceError>;

    /// Waits for deliveries and returns at least one and at most `max` of them, or says what was lost.
    ///
    /// With `max` 0 it waits for `Lost` and `Closed` alone and subscribes to nothing: the loop calls it
    /// so while it has no room, while it is paused, and after `stop`.
    ///
    /// Must be cancel-safe: the loop drops this future whenever something else is to be done, and
    /// nothing may be lost by that. An error means the source broke: every receipt it gave out is
    /// void, and the next call rebuilds it (the loop waits with backoff between).
    async fn receive(&mut self, max: usize) -> Result<Incoming, SourceError>;

    /// Tells the broker what became of deliveries.
    ///
    /// Queues the work and returns soon; single failures are retried and counted inside, and are
    /// harmless, since a redelivery meets its claim. Settling a receipt that is lost is not an error.
    /// An error means the source is broken as after a failed `receive`.
    async fn settle(&mut self, settlements: Vec<Settlement>) -> Result<(), SourceError>;

    /// Cancels the subscription and gives back, once, what was received but not handed out.
    ///
    /// Called while the database cannot be reached, so that deliveries neither pile up here nor use
    /// up the broker's own delivery limit. The next `receive` with room subscribes again.
    async fn pause(&mut self) -> Result<(), SourceError>;

    /// Takes no more, for good, and gives back what was not handed out. What was handed out can still
    /// be settled; the adapter flushes those settlements before `receive` answers `Closed`.
    async fn stop(&mut self) -> Result<(), SourceError>;

    /// What this source promises; the loop and the conformance suite rely on it.
    fn capabilities(&self) -> Capabilities;

    /// How the source is doing right now; cheap, called about once a second.
    fn health(&self) -> SourceHealth;
}

/// What a consumer asks of its source, known at build time.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Plan {
    /// The consumer's name.
    pub consumer: String,
    /// How many deliveries, or batches of them, are worked on at once.
    pub lanes: usize,
    /// The most deliveries that will be outstanding at once: a prefetch of this size keeps all lanes busy.
    pub window: usize,
    /// The most bytes of payloads, keys and headers that should be outstanding at once.
    pub window_bytes: usize,
    /// How long one delivery may stay unsettled on the ordinary path: all its attempts in place and their delays.
    pub longest_unsettled: Duration,
    /// How many attempts an event has in one delivery. The process can end in each of them, and every
    /// next one is a delivery of its own then: a broker that puts up with fewer ends the event first.
    pub attempts: u32,
    /// How long an identity is remembered; a source that can redeliver later than this breaks deduplication.
    pub dedup_window: Option<Duration>,
}

impl Plan {
    /// A plan with this window, a lane for each delivery in it, and no further demands, for tests of a
    /// source on its own.
    pub fn for_window(consumer: impl Into<String>, window: usize) -> Self {
        Self {
            consumer: consumer.into(),
            lanes: window,
            window,
            window_bytes: 64 << 20,
            longest_unsettled: Duration::from_secs(60),
            attempts: 1,
            dedup_window: None,
        }
    }
}

/// What [`Source::receive`] yields.
#[derive(Debug)]
#[non_exhaustive]
pub enum Incoming {
    /// New deliveries, at least one.
    Deliveries(Vec<Delivery>),
    /// These receipts are void (a channel closed, a lease ran out): what was not started is dropped
    /// and settled as released at once, what runs finishes. No settlement of a lost receipt has to
    /// change anything; a source that may still use it for a while knows by them when nothing runs.
    Lost(Vec<Receipt>),
    /// After `stop`: everything handed out was settled or lost, the settlements are flushed, nothing more will come.
    Closed,
}

/// A number by which a source knows one of its deliveries; the native handle stays in the adapter.
///
/// Unique over the life of the source, also across reconnects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Receipt(pub u64);

/// One arrival of an event. It is settled by value, so a second ack does not compile.
#[derive(Debug)]
#[must_use = "a delivery that is dropped is neither acked nor given back"]
pub struct Delivery {
    /// The source's number for it.
    pub receipt: Receipt,
    /// The event, raw. Shared, so that a source which may have to hand it out again keeps no copy of it.
    pub event: Arc<RawEvent>,
    /// Whether and how often the broker has delivered it before.
    pub redelivery: Redelivery,
    /// Set by the `inbox` source only: the held row that this delivery is. Boxed, because deliveries move
    /// from queue to queue and few have one.
    pub(crate) held: Option<Box<crate::store::Lease>>,
}

impl Delivery {
    /// A first delivery of `event`.
    pub fn new(receipt: Receipt, event: impl Into<Arc<RawEvent>>) -> Self {
        Self {
            receipt,
            event: event.into(),
            redelivery: Redelivery::No,
            held: None,
        }
    }

    /// The same delivery, with what the broker says about earlier ones.
    pub fn with_redelivery(mut self, redelivery: Redelivery) -> Self {
        self.redelivery = redelivery;
        self
    }

    /// It is done: its effects are committed, or it is held in `inbox`.
    pub fn ack(self) -> Settlement {
        Settlement {
            receipt: self.receipt,
            verdict: Settle::Ack,
        }
    }

    /// It is given back to the source, to come again at once or after a while. Not a failed attempt.
    pub fn release(self, after: Option<Duration>) -> Settlement {
        Settlement {
            receipt: self.receipt,
            verdict: Settle::Release { after },
        }
    }
}

/// What the broker says about earlier deliveries of the same message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Redelivery {
    /// It was not delivered before, or the broker does not tell.
    #[default]
    No,
    /// It was, at least once; how often is not known.
    Yes,
    /// It was, this many times.
    Times(u32),
}

/// What became of one delivery.
#[derive(Debug)]
#[must_use = "a settlement says nothing until the source has it"]
pub struct Settlement {
    /// Which delivery.
    pub receipt: Receipt,
    /// What became of it.
    pub verdict: Settle,
}

/// The two things that can be said to a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settle {
    /// Done; never deliver it again.
    Ack,
    /// Not done and not failed: deliver it again, not before `after`. A source whose broker cannot
    /// delay waits itself, so that giving back never becomes a hot loop.
    Release {
        /// How long to wait; `None` is at once.
        after: Option<Duration>,
    },
}

/// What a source promises.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// The messaging system's name as OpenTelemetry writes it.
    pub system: &'static str,
    /// Events of one key arrive in the order in which they were published.
    pub ordered: bool,
    /// A second delivery says that it is one.
    pub marks_redelivery: bool,
    /// A redelivery says how many there were before.
    pub counts_deliveries: bool,
    /// A released delivery can come again after a delay without occupying this process.
    pub delays_release: bool,
    /// The broker moves a message away by itself after too many deliveries.
    pub native_dead_letters: bool,
    /// How many messages one call to the broker brings at most; 1 if it sends them by itself. A consumer
    /// has as many in hand for each lane, unless it is told otherwise.
    pub per_call: usize,
    /// The source reads this consumer's held events from `inbox` (no second reader is needed).
    pub reads_inbox: bool,
    /// The broker names messages by itself, and an event without an id is identified by that: what
    /// follows from it, for a warning at start. `None`: it does not.
    pub weak_ids: Option<&'static str>,
}

impl Capabilities {
    /// A source of this system that promises nothing more; set the fields that hold.
    pub const fn of(system: &'static str) -> Self {
        Self {
            system,
            ordered: false,
            marks_redelivery: false,
            counts_deliveries: false,
            delays_release: false,
            native_dead_letters: false,
            per_call: 1,
            reads_inbox: false,
            weak_ids: None,
        }
    }
}

/// How a source is doing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SourceHealth {
    /// Connected and subscribed.
    pub connected: bool,
    /// What is wrong, in words for an operator; never holds a secret.
    pub problem: Option<String>,
    /// How many messages wait in the broker, if the source knows.
    pub backlog: Option<u64>,
    /// How many parts of the source (partitions) stand still, as an event of theirs is unfinished and as
    /// much as allowed was delivered behind it.
    pub stuck: usize,
}

impl SourceHealth {
    /// Connected and subscribed.
    pub fn up() -> Self {
        Self {
            connected: true,
            problem: None,
            backlog: None,
            stuck: 0,
        }
    }

    /// Not receiving, for this reason.
    pub fn down(problem: impl Into<String>) -> Self {
        Self {
            connected: false,
            problem: Some(problem.into()),
            backlog: None,
            stuck: 0,
        }
    }
}

/// A source broke or refuses to work. The text says what happened and what to do, and holds no secret.
#[derive(Debug)]
pub struct SourceError {
    message: String,
    fatal: bool,
}

impl SourceError {
    /// The source broke; it is rebuilt after a while, for as long as it takes.
    pub fn broken(message: impl fmt::Display) -> Self {
        Self {
            message: message.to_string(),
            fatal: false,
        }
    }

    /// The source cannot work until a person changes something. At start-up this ends the consumer;
    /// later (a queue was deleted, a permission revoked) it is tried again at the slowest pace.
    pub fn fatal(message: impl fmt::Display) -> Self {
        Self {
            message: message.to_string(),
            fatal: true,
        }
    }

    /// Whether a person has to change something.
    pub fn is_fatal(&self) -> bool {
        self.fatal
    }
}

impl fmt::Display for SourceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for SourceError {}
