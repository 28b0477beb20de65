use std::time::{Duration, SystemTime};

use bytes::Bytes;
use uuid::Uuid;

use crate::outbox::Destination;
use crate::publisher::Message;

/// How many lanes a relay's rows are spread over: a constant of the tables, never to be changed.
pub const LANES: u8 = 64;

/// An outgoing event as it is written into the outbox.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct OutgoingRow {
    /// The relay that will publish it.
    pub relay: String,
    /// Where to.
    pub destination: Destination,
    /// The event, as it will be published. Its address is the destination's.
    pub message: Message,
    /// Publish it not before this much later, by the database's clock.
    pub delay: Option<Duration>,
    /// Publish it not before this time.
    pub send_at: Option<SystemTime>,
}

/// A row that may be published now.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DueRow {
    /// The row; rows of one key are published in the order of this number.
    pub id: i64,
    /// The lane it belongs to.
    pub lane: u8,
    /// What it is ordered by: a digest of destination and key. `None`: with nothing.
    pub order: Option<[u8; 16]>,
    /// Where to.
    pub destination: Destination,
    /// How often the broker has refused it so far.
    pub attempts: u32,
    /// The event.
    pub message: Message,
    /// The trace in which it was written, as W3C `traceparent`.
    pub traceparent: Option<String>,
}

/// The right to publish the rows of one lane, until its lease is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeldLane {
    /// 0 to 63.
    pub lane: u8,
    /// Raised with every change of owner; it fences the marking of refusals.
    pub fence: i64,
}

/// Which due rows are asked for.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DueRequest<'a> {
    /// The relay's name.
    pub relay: &'a str,
    /// The lanes whose rows are asked for.
    pub lanes: &'a [u8],
    /// Rows that are in hand already.
    pub except: &'a [i64],
    /// Destinations that are paused.
    pub paused: &'a [&'a str],
    /// Whether rows behind an earlier one of their key that is parked or waits may go on.
    pub overtake: bool,
    /// The most rows.
    pub limit: usize,
}

/// A refused row, and what becomes of it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Refusal<'a> {
    /// The row.
    pub id: i64,
    /// The lane under which it was published.
    pub lane: HeldLane,
    /// The broker's words.
    pub error: &'a str,
    /// Try it again after this long; `None`: park it.
    pub again: Option<Duration>,
}

/// What waits for a relay.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutgoingBacklog {
    /// Rows that are not sent and not parked.
    pub pending: u64,
    /// The age of the oldest of them that is due.
    pub oldest: Option<Duration>,
    /// Rows that need a person.
    pub parked: u64,
}

/// A row that needs a person.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ParkedRow {
    /// The row.
    pub id: i64,
    /// The event's id.
    pub event_id: String,
    /// The kind of event.
    pub event_type: Option<String>,
    /// Where it should have gone.
    pub destination: String,
    /// Its key.
    pub key: Option<Bytes>,
    /// How often it was refused.
    pub attempts: u32,
    /// The broker's last words.
    pub error: String,
    /// Since when it is parked, by the database's clock.
    pub parked_at: SystemTime,
}

/// Who a relay instance is: a number of its own for each start.
pub type Owner = Uuid;
