use std::time::{Duration, SystemTime};

use bytes::Bytes;
use serde::Serialize;

use crate::event::Headers;
use crate::publisher::CloudEventsMode;

/// An event to be published if and only if the transaction it is written in commits.
///
/// ```
/// use onlyonce::outbox::OutgoingEvent;
///
/// # fn main() -> Result<(), serde_json::Error> {
/// let captured = serde_json::json!({"payment": "pay-1", "cents": 500});
/// let event = OutgoingEvent::json("kafka:payments", "payment.captured", &captured)?.key("account-7");
/// # Ok(()) }
/// ```
///
/// Nothing is checked before it is sent to an outbox, which names what is wrong with it.
#[derive(Debug, Clone)]
pub struct OutgoingEvent {
    pub(crate) destination: String,
    pub(crate) id: Option<String>,
    pub(crate) event_type: Option<String>,
    pub(crate) key: Option<Bytes>,
    pub(crate) payload: Option<Bytes>,
    pub(crate) content_type: Option<String>,
    pub(crate) headers: Headers,
    pub(crate) attributes: Vec<(String, String)>,
    pub(crate) mode: CloudEventsMode,
    pub(crate) delay: Option<Duration>,
    pub(crate) send_at: Option<SystemTime>,
}

impl OutgoingEvent {
    /// An event of this type with this body; see [`Destination`](super::Destination) for where it can go.
    pub fn new(
        destination: impl Into<String>,
        event_type: impl Into<String>,
        payload: impl Into<Bytes>,
    ) -> Self {
        Self {
            destination: destination.into(),
            id: None,
            event_type: Some(event_type.into()),
            key: None,
            payload: Some(payload.into()),
            content_type: None,
            headers: Headers::new(),
            attributes: Vec::new(),
            mode: CloudEventsMode::Binary,
            delay: None,
            send_at: None,
        }
    }

    /// An event whose body is this value as JSON, of media type `application/json`.
    pub fn json(
        destination: impl Into<String>,
        event_type: impl Into<String>,
        payload: &impl Serialize,
    ) -> Result<Self, serde_json::Error> {
        let body = serde_json::to_vec(payload)?;
        Ok(Self::new(destination, event_type, body).content_type("application/json"))
    }

    /// A null payload for this key: on a compacted Kafka topic, the key's deletion.
    pub fn tombstone(destination: impl Into<String>, key: impl Into<Bytes>) -> Self {
        Self {
            event_type: None,
            payload: None,
            ..Self::new(destination, "", Bytes::new())
        }
        .key(key)
    }

    /// Events of one key and one destination go out in the order in which they were written. Kafka's
    /// record key, SQS's `MessageGroupId`. Without one, the event is ordered with nothing.
    pub fn key(mut self, key: impl Into<Bytes>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// The event's id. Default: in a handler, derived from the event that is handled, so that a handler that
    /// runs again sends the same id; elsewhere a random UUID.
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// Adds a header; an earlier one of the same name stays.
    pub fn header(mut self, name: impl AsRef<str>, value: impl AsRef<[u8]>) -> Self {
        self.headers.push(name, value);
        self
    }

    /// The body's media type.
    pub fn content_type(mut self, media_type: impl Into<String>) -> Self {
        self.content_type = Some(media_type.into());
        self
    }

    /// A CloudEvents attribute beside those that every event has: `subject`, `dataschema`, an extension.
    /// Names have 1 to 20 of the characters `a-z` and `0-9`.
    pub fn attribute(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.attributes.push((name.into(), value.into()));
        self
    }

    /// How it travels as a CloudEvent. Default: binary, the body as it is.
    pub fn mode(mut self, mode: CloudEventsMode) -> Self {
        self.mode = mode;
        self
    }

    /// Publish it not before this time.
    pub fn send_at(mut self, time: SystemTime) -> Self {
        self.send_at = Some(time);
        self
    }

    /// Publish it not before this much later, by the database's clock.
    pub fn delay(mut self, delay: Duration) -> Self {
        self.delay = Some(delay);
        self
    }
}
