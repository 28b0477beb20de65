use std::time::Duration;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::event::{EventKey, Headers, Identity, Origin, RawEvent};
use crate::reason::Reason;

/// The right to run one held row, until the lease is over. The token fences every later write.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Lease {
    /// The row.
    pub id: i64,
    /// Whoever leases the row next gets another one.
    pub token: Uuid,
    /// How often the event has failed so far.
    pub attempts: u32,
    /// Who the event is; it was found when the row was written.
    pub identity: Identity,
}

/// A held event that was leased to be run.
#[derive(Debug)]
#[non_exhaustive]
pub struct HeldEvent {
    /// The right to run it.
    pub lease: Lease,
    /// The event as it first arrived.
    pub event: RawEvent,
    /// It was leased before and that lease ran out: whoever had it may have died.
    pub released_by_timeout: bool,
}

/// An event to be held, with why and until when.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Parked<'a> {
    /// The consumer that holds it.
    pub consumer: &'a str,
    /// Its identity and digest; `None` where none could be found, or where the letter must hold nothing.
    pub key: Option<(EventKey, &'a Identity)>,
    /// The event, raw.
    pub event: &'a RawEvent,
    /// What becomes of it.
    pub becomes: ParkedAs,
    /// The failures of this process since the event was last stored, oldest first. Each is one attempt.
    pub failures: &'a [Attempt],
    /// The event ran, so another transaction of this very event may have committed its claim: store
    /// the letter all the same.
    pub escaped: bool,
}

/// What a parked event becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ParkedAs {
    /// It runs again, not before this much later.
    Ready {
        /// How much later.
        after: Duration,
    },
    /// It needs a person.
    Dead {
        /// Why.
        reason: Reason,
    },
}

/// What parking did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Parking {
    /// The event is durably held.
    Held,
    /// A copy of it was committed meanwhile: there is nothing to hold.
    Duplicate,
}

/// One failed attempt, as it is stored with the held event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Attempt {
    /// When, in milliseconds since 1970, by this machine's clock; for people only.
    pub at_ms: i64,
    /// `error`, `panic`, `timeout` and the like.
    pub kind: String,
    /// The error and its sources, at most 1 KiB.
    pub error: String,
}

/// The most that is kept of one failure's text.
const ERROR_BYTES: usize = 1024;

impl Attempt {
    /// A failure now. The text is cut at 1 KiB on a character boundary, and NUL is replaced, because
    /// no database's text holds it.
    pub fn now(kind: &str, error: &str) -> Self {
        let at_ms = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |age| age.as_millis() as i64);
        Self {
            at_ms,
            kind: kind.to_owned(),
            error: storable(error, ERROR_BYTES),
        }
    }
}

/// `text` as any database can hold it: without NUL, at most `max` bytes, cut between characters.
pub(crate) fn storable(text: &str, max: usize) -> String {
    let mut end = text.len().min(max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].replace('\0', "\u{fffd}")
}

/// The most failures that are kept with a row.
pub(crate) const FAILURES: usize = 20;

impl<'a> Parked<'a> {
    /// An event without failures so far.
    pub fn new(
        consumer: &'a str,
        key: Option<(EventKey, &'a Identity)>,
        event: &'a RawEvent,
        becomes: ParkedAs,
    ) -> Self {
        Self {
            consumer,
            key,
            event,
            becomes,
            failures: &[],
            escaped: false,
        }
    }
}

impl Parked<'_> {
    /// The failures that are kept; attempts are counted by all of them.
    pub(crate) fn newest_failures(&self) -> &[Attempt] {
        &self.failures[self.failures.len().saturating_sub(FAILURES)..]
    }

    pub(crate) fn failures_json(&self) -> String {
        // Strings and integers only: serialisation cannot fail.
        serde_json::to_string(self.newest_failures()).unwrap_or_else(|_| "[]".to_owned())
    }

    pub(crate) fn origin_text(&self) -> String {
        let Origin {
            system,
            destination,
            detail,
        } = &self.event.origin;
        storable(&format!("{system} {destination} {detail}"), 4096)
    }
}

/// A leased row that this version can read. One that it cannot (written by a newer one, or by hand)
/// stays leased until that runs out, is said out loud each time, and keeps no other row waiting.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) fn readable(consumer: &str, row: Result<HeldEvent, sqlx::Error>) -> Option<HeldEvent> {
    row.inspect_err(
        |error| tracing::error!(consumer, %error, "a held event cannot be read and is left alone"),
    )
    .ok()
}

/// The last resort for an event that the database refuses as it is: the body and its hash stay whole,
/// everything else is reduced to text that any database holds.
pub(crate) fn reduced(event: &RawEvent) -> RawEvent {
    let escape = |raw: &bytes::Bytes| {
        let text: String = raw.escape_ascii().to_string();
        bytes::Bytes::from(storable(&text, 256).into_bytes())
    };
    let mut headers = Headers::new();
    for (name, value) in event.headers.iter().take(100) {
        let value = value.map(bytes::Bytes::copy_from_slice).unwrap_or_default();
        headers.push(storable(name, 256), escape(&value));
    }
    RawEvent {
        event_type: event.event_type.as_ref().map(escape),
        key: event.key.as_ref().map(escape),
        payload: event.payload.clone(),
        headers,
        time_ms: None,
        property: None,
        native: None,
        origin: Origin {
            system: event.origin.system,
            destination: storable(&event.origin.destination.escape_default().to_string(), 256).into(),
            detail: storable(&event.origin.detail.escape_default().to_string(), 1024).into(),
        },
    }
}

/// What waits for a consumer in `inbox`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Backlog {
    /// Events that are due or running.
    pub due: u64,
    /// Events that wait for a later retry.
    pub delayed: u64,
    /// Events that need a person.
    pub dead: u64,
    /// For how long the oldest due event has been due.
    pub oldest_due: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_errors_are_cut_between_characters_and_hold_no_nul() {
        let attempt = Attempt::now("error", &format!("\0{}", "é".repeat(2000)));
        assert!(attempt.error.len() <= ERROR_BYTES + 2, "NUL grows to three bytes");
        assert!(!attempt.error.contains('\0'));
        assert!(attempt.error.ends_with('é'));
    }

    #[test]
    fn the_newest_failures_are_kept() {
        let failures: Vec<_> = (0..30).map(|n| Attempt::now("error", &n.to_string())).collect();
        let parked = Parked {
            consumer: "c",
            key: None,
            event: &RawEvent::default(),
            becomes: ParkedAs::Ready {
                after: Duration::ZERO,
            },
            failures: &failures,
            escaped: false,
        };
        let kept: Vec<Attempt> = serde_json::from_str(&parked.failures_json()).unwrap();
        assert_eq!(kept, failures[10..]);
    }

    #[test]
    fn the_reduced_form_keeps_the_body_and_is_small() {
        let event = RawEvent {
            payload: Some("body".into()),
            key: Some(vec![0xff; 1 << 20].into()),
            headers: (0..10_000).map(|n| (format!("h{n}"), vec![0u8; 100])).collect(),
            ..Default::default()
        };
        let small = reduced(&event);
        assert_eq!(small.payload, event.payload);
        assert!(small.size() < 100 * 600);
        assert!(small.key.unwrap().is_ascii());
    }
}
