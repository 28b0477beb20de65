//! Publishers: how outgoing events reach a broker, and what an adapter implements for it.
//!
//! A relay reads rows of the outbox and calls [`Publisher::publish`] for each, many at once but never two
//! of one key. `Ok` means that the broker has the message for good and has routed it; only then is the
//! row deleted. An adapter never retries a message and never decides its end: it says by a
//! [`PublishError`] what happened, and the relay decides.
//!
//! [`Message::encode`] says what goes on the wire; an adapter carries it, and adds nothing by which the event
//! could be taken for another.

mod encode;
mod message;
mod structured;
mod time;

use std::fmt;

use async_trait::async_trait;

pub use encode::Encoded;
pub use message::Message;

/// A way to one broker.
///
/// The methods are called from many tasks at once. One publisher serves every destination behind its name.
#[async_trait]
pub trait Publisher: Send + Sync + 'static {
    /// The messaging system's name as OpenTelemetry writes it: `kafka`, `rabbitmq`, `aws_sqs`.
    fn system(&self) -> &'static str;

    /// Sends one message and waits until the broker has confirmed it: stored as durably as the broker can,
    /// and routed to somewhere.
    ///
    /// Called for many messages at once; an adapter whose broker takes batches collects them by itself. It
    /// connects when it has to, keeps its connection apart from any that consumes, and bounds every wait, also
    /// for a broker that accepts and never answers: it answers within [`patience`](Self::patience).
    ///
    /// Not cancel-safe: a call that is dropped may or may not have sent its message. The relay drops it
    /// only when it stops for good; the row then goes out again with the same event id.
    async fn publish(&self, message: &Message) -> Result<(), PublishError>;

    /// The longest that [`publish`](Self::publish) takes to answer. Default 30 s.
    fn patience(&self) -> std::time::Duration {
        std::time::Duration::from_secs(30)
    }

    /// How it is doing right now; cheap, called about once a second.
    fn health(&self) -> PublisherHealth;

    /// Sends what it has collected, waits for it, and closes its connection. Called once, after the last
    /// `publish` has answered or was dropped.
    async fn stop(&self);
}

/// How an event travels as a CloudEvent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CloudEventsMode {
    /// The attributes are headers, the body is the payload as it is.
    #[default]
    Binary,
    /// Attributes and payload are one JSON document, of type `application/cloudevents+json`.
    Structured,
}

/// A message was not published, or nobody knows. The text says why and holds no secret.
#[derive(Debug, Clone)]
pub struct PublishError {
    kind: PublishErrorKind,
    message: String,
}

/// What a failed publish says about the message, the destination and the broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PublishErrorKind {
    /// The broker refuses this message, and would refuse it again: too large, not well-formed. The row
    /// is parked at once.
    Invalid,
    /// The broker refuses this message as things are: unroutable, a full queue. An attempt of the row, which
    /// backs off and is parked after the last.
    Refused,
    /// The connection or channel died while this message was on its way, and this message may be why. Nobody
    /// knows whether it arrived.
    Interrupted,
    /// The destination as a whole takes nothing: it is not there, or we may not write to it. Counts for no
    /// row; the destination pauses.
    Destination,
    /// The broker does not answer, is throttling, or refuses everything. Counts for no row; the publisher pauses. It may
    /// have arrived all the same.
    Unavailable,
}

impl PublishError {
    /// An error of this kind.
    pub fn new(kind: PublishErrorKind, message: impl fmt::Display) -> Self {
        Self {
            kind,
            message: message.to_string(),
        }
    }

    /// What it says about message, destination and broker.
    pub fn kind(&self) -> PublishErrorKind {
        self.kind
    }
}

impl fmt::Display for PublishError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for PublishError {}

/// How a publisher is doing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PublisherHealth {
    /// What is wrong, in words for an operator; `None` while it works or was not needed yet.
    pub problem: Option<String>,
}

impl PublisherHealth {
    /// It works, or nothing was asked of it yet.
    pub fn up() -> Self {
        Self::default()
    }

    /// It cannot publish, for this reason.
    pub fn down(problem: impl Into<String>) -> Self {
        Self {
            problem: Some(problem.into()),
        }
    }
}
