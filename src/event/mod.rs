//! Events: what a producer meant, apart from how often it arrived.
//!
//! A source hands over a [`RawEvent`]: bytes, headers and coordinates, nothing decoded. The consumer
//! finds its [`Identity`] by the [`IdentityRules`], decodes the payload through [`FromEvent`], and
//! gives the handler an [`Event`].

mod headers;
mod identity;
mod key;
mod payload;

pub use headers::Headers;
pub use identity::{Identity, IdentityError, IdentityRules, Strength};
pub use key::{EventKey, PayloadHash};
pub use payload::{DecodeError, FromEvent, Json};

use std::sync::Arc;

use bytes::Bytes;

/// One event with its payload decoded, as a handler receives it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Event<P = Bytes> {
    /// Who this event is: the pair that deduplication compares.
    pub identity: Identity,
    /// The producer's name for this kind of event, such as `payment.captured`.
    pub event_type: Option<String>,
    /// The ordering key: events of one key belong together (an account, an order).
    pub key: Option<Bytes>,
    /// The decoded payload.
    pub payload: P,
    /// All headers, as bytes and in the order of arrival.
    pub headers: Headers,
    /// When the event happened or was published, as the producer said, in milliseconds since 1970.
    pub time_ms: Option<i64>,
    /// Where this delivery came from, in the broker's own coordinates.
    pub origin: Origin,
}

/// An event as a source delivers it: raw bytes, not yet identified and not yet decoded.
#[derive(Debug, Clone, Default)]
pub struct RawEvent {
    /// The producer's name for this kind of event.
    pub event_type: Option<Bytes>,
    /// The ordering key, any bytes. `None`: ordered with nothing.
    pub key: Option<Bytes>,
    /// The body. `None` is a null payload (a tombstone), which is not the same as an empty body.
    pub payload: Option<Bytes>,
    /// All headers, in the order of arrival.
    pub headers: Headers,
    /// When the event was published, in milliseconds since 1970, if the broker or producer says so.
    pub time_ms: Option<i64>,
    /// The identity that the broker's message properties carry, if the protocol has such a property.
    pub property: Option<PropertyId>,
    /// What the broker itself calls this message, if it names messages: weak, because the same event
    /// published again has another.
    pub native: Option<PropertyId>,
    /// Where this delivery came from.
    pub origin: Origin,
}

/// An identity that is beside headers and body: from a message property, such as AMQP's `message_id`,
/// or from the broker.
#[derive(Debug, Clone)]
pub struct PropertyId {
    /// Whose ids these are: AMQP `app_id`, else the exchange; a queue, a configured name.
    pub source: Arc<str>,
    /// The value, not yet checked.
    pub id: Bytes,
}

/// The broker's coordinates of a delivery, for people and for dead letters; never an identity.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Origin {
    /// The messaging system's name as OpenTelemetry writes it: `rabbitmq`, `kafka`, `aws_sqs`, `onlyonce`.
    pub system: &'static str,
    /// What was consumed from: a queue, a topic. Also the identity source of events that name none.
    pub destination: Arc<str>,
    /// The rest: `exchange=orders routing-key=paid`, `partition=3 offset=77`.
    pub detail: Arc<str>,
}

impl RawEvent {
    /// An event with this identity and this body, for [`Queue::enqueue`](crate::inbox::Queue::enqueue).
    /// Whether the identity can be used is checked there.
    pub fn new(source: impl Into<String>, id: impl Into<String>, body: impl Into<Bytes>) -> Self {
        Self {
            payload: Some(body.into()),
            property: Some(PropertyId {
                source: source.into().into(),
                id: Bytes::from(id.into()),
            }),
            origin: Origin {
                system: "onlyonce",
                destination: "queue".into(),
                detail: "".into(),
            },
            ..Self::default()
        }
    }

    /// The bytes that the payload hash covers; a null payload has a hash of its own.
    pub(crate) fn payload_hash(&self) -> PayloadHash {
        PayloadHash::of(self.payload.as_deref())
    }

    /// The body's media type: the header `content-type`, in any case. An adapter whose broker has a
    /// property of that meaning adds it as this header.
    pub fn content_type(&self) -> Option<&[u8]> {
        self.headers
            .iter()
            .filter(|(name, _)| name.eq_ignore_ascii_case("content-type"))
            .last()
            .and_then(|(_, value)| value)
            .map(<[u8]>::trim_ascii)
    }

    /// How much memory this event holds, for byte budgets.
    pub fn size(&self) -> usize {
        self.payload.as_ref().map_or(0, Bytes::len)
            + self.key.as_ref().map_or(0, Bytes::len)
            + self.headers.size()
    }

    /// The event as a handler receives it.
    pub(crate) fn decode<P: FromEvent>(&self, identity: &Identity) -> Result<Event<P>, DecodeError> {
        Ok(Event {
            identity: identity.clone(),
            event_type: match &self.event_type {
                None => None,
                Some(raw) => Some(
                    std::str::from_utf8(raw)
                        .map_err(|_| DecodeError::new("the event type is not valid UTF-8"))?
                        .to_owned(),
                ),
            },
            key: self.key.clone(),
            payload: P::from_event(self)?,
            headers: self.headers.clone(),
            time_ms: self.time_ms,
            origin: self.origin.clone(),
        })
    }
}
