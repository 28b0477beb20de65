//! From an SQS message to events: bytes, headers and coordinates, nothing judged.

use std::fmt::Write;

use aws_sdk_sqs::types::{Message, MessageAttributeValue, MessageSystemAttributeName};
use bytes::Bytes;
use onlyonce::event::{Headers, Origin, PropertyId, RawEvent};
use onlyonce::source::Redelivery;

use crate::config::{OrderingKey, Settings};
use crate::envelope::{Content, open};
use crate::settle::Arrival;

pub(crate) const SYSTEM: &str = "aws_sqs";
/// What breaks an identity that is only a `MessageId`.
pub(crate) const WEAK_IDS: &str = "an SQS MessageId is new whenever a producer sends again and whenever a message \
    is moved out of a dead-letter queue";

const OWN_KEY_HEADER: &str = "onlyonce-ordering-key";
const OWN_TYPE_HEADER: &str = "onlyonce-event-type";
const CLOUD_EVENTS_TYPE: &str = "ce-type";

/// A message without a handle, which SQS never sends, could not be settled, and is left to run out.
pub(crate) fn arrival(message: Message, settings: &Settings) -> Option<Arrival> {
    let handle = message.receipt_handle.clone()?;
    let group = settings
        .fifo
        .then(|| system(&message, MessageSystemAttributeName::MessageGroupId))
        .flatten()
        .map(str::to_owned);
    Some(Arrival {
        handle,
        group,
        redelivery: redelivery(&message),
        events: events(message, settings),
    })
}

fn system(message: &Message, name: MessageSystemAttributeName) -> Option<&str> {
    message.attributes.as_ref()?.get(&name).map(String::as_str)
}

/// The count includes this delivery. SQS calls it approximate, and it starts again in another queue.
fn redelivery(message: &Message) -> Redelivery {
    let count = system(message, MessageSystemAttributeName::ApproximateReceiveCount)
        .and_then(|count| count.parse::<u32>().ok())
        .unwrap_or(1);
    match count {
        0 | 1 => Redelivery::No,
        count => Redelivery::Times(count - 1),
    }
}

fn events(message: Message, settings: &Settings) -> Vec<RawEvent> {
    let own = headers(&message);
    let native = message.message_id.as_ref().map(|id| PropertyId {
        source: settings.name.clone(),
        id: Bytes::copy_from_slice(id.as_bytes()),
    });
    let origin = Origin {
        system: SYSTEM,
        destination: settings.name.clone(),
        detail: detail(&message),
    };
    let sent = system(&message, MessageSystemAttributeName::SentTimestamp).and_then(|ms| ms.parse().ok());
    let group = system(&message, MessageSystemAttributeName::MessageGroupId)
        .map(|group| Bytes::copy_from_slice(group.as_bytes()));
    open(message.body.unwrap_or_default(), settings.unwrapping)
        .into_iter()
        .map(|content| {
            let Content {
                body,
                headers: inner,
                property,
                native: weak,
                event_type,
                time_ms,
            } = content;
            let mut headers = own.clone();
            for (name, value) in inner.iter() {
                headers.push(name, Bytes::copy_from_slice(value.unwrap_or_default()));
            }
            RawEvent {
                event_type: event_type
                    .or_else(|| header(&headers, OWN_TYPE_HEADER))
                    .or_else(|| header(&headers, CLOUD_EVENTS_TYPE)),
                key: match &settings.ordering_key {
                    OrderingKey::OwnHeader => header(&headers, OWN_KEY_HEADER),
                    OrderingKey::Header(name) => header(&headers, name),
                    OrderingKey::GroupId => group.clone(),
                },
                payload: Some(body),
                headers,
                time_ms: time_ms.or(sent),
                property,
                native: weak.or_else(|| native.clone()),
                origin: origin.clone(),
            }
        })
        .collect()
}

fn header(headers: &Headers, name: &str) -> Option<Bytes> {
    headers.get(name).map(Bytes::copy_from_slice)
}

/// The message attributes, in the order of their names, as SQS has none of its own.
fn headers(message: &Message) -> Headers {
    let Some(attributes) = &message.message_attributes else {
        return Headers::new();
    };
    let mut sorted: Vec<_> = attributes.iter().collect();
    sorted.sort_by_key(|(name, _)| *name);
    sorted
        .into_iter()
        .map(|(name, value)| (name.as_str(), attribute(value)))
        .collect()
}

/// A text, also of a number, or bytes; SQS has no attributes without a value.
fn attribute(value: &MessageAttributeValue) -> Bytes {
    match (&value.binary_value, &value.string_value) {
        (Some(bytes), _) => Bytes::copy_from_slice(bytes.as_ref()),
        (None, Some(text)) => Bytes::copy_from_slice(text.as_bytes()),
        (None, None) => Bytes::new(),
    }
}

fn detail(message: &Message) -> String {
    let mut detail = format!("message-id={}", message.message_id.as_deref().unwrap_or("?"));
    for (what, name) in [
        ("group", MessageSystemAttributeName::MessageGroupId),
        ("sequence", MessageSystemAttributeName::SequenceNumber),
        (
            "dead-letters-of",
            MessageSystemAttributeName::DeadLetterQueueSourceArn,
        ),
    ] {
        if let Some(value) = system(message, name) {
            // Writing to a string does not fail.
            let _ = write!(detail, " {what}={value}");
        }
    }
    detail
}
