use std::time::SystemTime;

use bytes::Bytes;

use super::CloudEventsMode;
use crate::event::Headers;

/// An outgoing event on its way to a broker.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Message {
    /// The event's id, the same on every copy of it.
    pub event_id: String,
    /// Whose ids these are: the identity source that consumers of the event will see.
    pub source: String,
    /// The kind of event, such as `payment.captured`.
    pub event_type: Option<String>,
    /// Where it goes, in the words of this publisher's broker.
    pub address: String,
    /// Events of one key belong together and go out in order.
    pub key: Option<Bytes>,
    /// The body. `None` is a null payload (a tombstone), which brokers other than Kafka carry as an empty body.
    pub payload: Option<Bytes>,
    /// The body's media type.
    pub content_type: Option<String>,
    /// Headers of the user's own, and the trace context.
    pub headers: Headers,
    /// CloudEvents attributes beside id, source, type, time and content type: `subject`, `dataschema`, extensions.
    pub attributes: Vec<(String, String)>,
    /// Whether the body carries the attributes as well.
    pub mode: CloudEventsMode,
    /// When the event was written to the outbox.
    pub time: SystemTime,
    /// How often a person has sent the event anew: a broker that drops repeats of its own accord must not
    /// drop these.
    pub replays: u32,
}

impl Message {
    /// A message with nothing but its identity, an address and a body, made now; the rest is set field by field.
    pub fn new(
        address: impl Into<String>,
        source: impl Into<String>,
        event_id: impl Into<String>,
        payload: impl Into<Bytes>,
    ) -> Self {
        Self {
            event_id: event_id.into(),
            source: source.into(),
            event_type: None,
            address: address.into(),
            key: None,
            payload: Some(payload.into()),
            content_type: None,
            headers: Headers::new(),
            attributes: Vec::new(),
            mode: CloudEventsMode::Binary,
            time: SystemTime::now(),
            replays: 0,
        }
    }
}
