use std::time::{Duration, SystemTime};

use bytes::Bytes;
use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::event::Headers;
use crate::outbox::Destination;
use crate::publisher::{CloudEventsMode, Message};

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

impl OutgoingRow {
    /// A row for this relay that may be published as soon as it is committed.
    pub fn new(relay: impl Into<String>, destination: Destination, message: Message) -> Self {
        Self {
            relay: relay.into(),
            destination,
            message,
            delay: None,
            send_at: None,
        }
    }

    /// The lane it belongs to: by its key, so that one instance publishes all rows of a key; any lane without.
    pub(crate) fn lane(&self) -> u8 {
        match &self.message.key {
            Some(key) => Sha256::digest(key)[0] % LANES,
            None => fastrand::u8(..LANES),
        }
    }

    /// What it is ordered by, if it has a key: the first 16 bytes of SHA-256 over destination and key, each
    /// behind its length.
    pub(crate) fn order(&self) -> Option<[u8; 16]> {
        let key = self.message.key.as_ref()?;
        let mut hash = Sha256::new();
        for part in [self.destination.as_str().as_bytes(), key] {
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part);
        }
        let mut order = [0; 16];
        order.copy_from_slice(&hash.finalize()[..16]);
        Some(order)
    }

    /// The stored form of the attributes is that of headers.
    pub(crate) fn attributes(&self) -> Vec<u8> {
        let attributes = self.message.attributes.iter();
        let attributes: Headers = attributes
            .map(|(name, value)| (name.as_str(), Bytes::copy_from_slice(value.as_bytes())))
            .collect();
        attributes.encode()
    }

    /// The word in the table.
    pub(crate) fn mode(&self) -> &'static str {
        match self.message.mode {
            CloudEventsMode::Binary => "binary",
            CloudEventsMode::Structured => "structured",
        }
    }

    /// The trace in which it was written; what is not text there is no trace.
    pub(crate) fn traceparent(&self) -> Option<&str> {
        let traceparent = self.message.headers.get("traceparent")?;
        std::str::from_utf8(traceparent).ok()
    }

    /// Not before this time, in microseconds since 1970.
    pub(crate) fn send_at_micros(&self) -> Option<i64> {
        let since = self.send_at?.duration_since(SystemTime::UNIX_EPOCH);
        Some(since.map_or(0, micros))
    }

    /// Not before this much later, in microseconds.
    pub(crate) fn delay_micros(&self) -> Option<i64> {
        self.delay.map(micros)
    }
}

/// Half of what fits, so that it can be added to the database's clock.
fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros())
        .unwrap_or(i64::MAX)
        .min(i64::MAX / 2)
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

/// A row that may be published now and that this version cannot read: written by a newer one, or by hand.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct UnreadableRow {
    /// The row.
    pub id: i64,
    /// The lane it belongs to.
    pub lane: u8,
    /// What it is ordered by.
    pub order: Option<[u8; 16]>,
    /// What cannot be read.
    pub why: String,
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
    /// Publishers that are paused, or that are not there: nothing of their destinations.
    pub down: &'a [&'a str],
    /// Whether rows behind an earlier one of their key that is parked or waits may go on.
    pub overtake: bool,
    /// The most rows of each lane.
    pub limit: usize,
    /// No more rows once those before them have this many bytes of payloads and headers.
    pub bytes: usize,
}

impl<'a> DueRequest<'a> {
    /// Everything that is due in these lanes.
    pub fn new(relay: &'a str, lanes: &'a [u8]) -> Self {
        Self {
            relay,
            lanes,
            except: &[],
            paused: &[],
            down: &[],
            overtake: false,
            limit: i32::MAX as usize,
            bytes: i32::MAX as usize,
        }
    }
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

impl<'a> Refusal<'a> {
    /// This row, published under this lane, was refused in these words; `again` is when to try it again, if ever.
    pub fn new(id: i64, lane: HeldLane, error: &'a str, again: Option<Duration>) -> Self {
        Self {
            id,
            lane,
            error,
            again,
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn row(destination: &str, key: Option<&str>) -> OutgoingRow {
        OutgoingRow {
            relay: "default".into(),
            destination: destination.parse().unwrap(),
            message: Message {
                event_id: "1".into(),
                source: "shop".into(),
                event_type: None,
                address: String::new(),
                key: key.map(|key| Bytes::copy_from_slice(key.as_bytes())),
                payload: None,
                content_type: None,
                headers: Headers::new(),
                attributes: Vec::new(),
                mode: CloudEventsMode::Binary,
                time: SystemTime::UNIX_EPOCH,
                replays: 0,
            },
            delay: None,
            send_at: None,
        }
    }

    #[test]
    fn lane_and_order_are_the_documented_ones() {
        // Computed apart from this code.
        let row = row("kafka:payments", Some("account-7"));
        assert_eq!(row.lane(), 27);
        let order = row
            .order()
            .unwrap()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect::<String>();
        assert_eq!(order, "2c2ea374fa60b523f5ee0a84042eaaad");
    }

    #[test]
    fn a_key_orders_within_its_destination() {
        let order = |destination, key| row(destination, Some(key)).order();
        assert_ne!(order("kafka:a", "k"), order("kafka:b", "k"));
        assert_ne!(
            order("kafka:a", "bc"),
            order("kafka:ab", "c"),
            "parts cannot run together"
        );
    }

    #[test]
    fn rows_without_a_key_are_spread_and_ordered_with_nothing() {
        let rows = (0..2000).map(|_| row("kafka:a", None));
        let lanes: std::collections::HashSet<u8> = rows.map(|row| row.lane()).collect();
        assert_eq!(lanes.len(), usize::from(LANES));
        assert_eq!(row("kafka:a", None).order(), None);
    }
}
