//! From an SQS message to events: bytes, headers and coordinates, nothing judged.

use std::fmt::Write;
use std::sync::Arc;

use aws_sdk_sqs::types::{Message, MessageSystemAttributeName};
use bytes::Bytes;
use onlyonce::event::{Headers, Origin, PropertyId, RawEvent};
use onlyonce::source::Redelivery;

use crate::config::{OrderingKey, Settings};
use crate::envelope::{Content, open};
use crate::packing::{self, Unpacked};
use crate::settle::Arrival;

pub(crate) const SYSTEM: &str = "aws_sqs";
/// What breaks an identity that is only a `MessageId`.
pub(crate) const WEAK_IDS: &str = "an SQS MessageId is new whenever a producer sends again and whenever a message \
    is moved out of a dead-letter queue";

pub(crate) const OWN_KEY_HEADER: &str = "onlyonce-ordering-key";
const OWN_TYPE_HEADER: &str = "onlyonce-event-type";
const CLOUD_EVENTS_TYPE: &str = "ce-type";

/// What is asked for with each message. Every attribute costs SQS and us something, so not all of them.
pub(crate) fn wanted(fifo: bool) -> Vec<MessageSystemAttributeName> {
    let mut wanted = vec![
        MessageSystemAttributeName::ApproximateReceiveCount,
        MessageSystemAttributeName::SentTimestamp,
        MessageSystemAttributeName::MessageGroupId,
        MessageSystemAttributeName::DeadLetterQueueSourceArn,
    ];
    if fifo {
        wanted.push(MessageSystemAttributeName::SequenceNumber);
    }
    wanted
}

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
    let packed = packing::unpack(&message);
    let arrived = Arrived {
        headers: match &packed {
            Some(packed) => packed.headers.clone(),
            None => packing::headers(&message),
        },
        id: message.message_id.clone(),
        sent: system(&message, MessageSystemAttributeName::SentTimestamp).and_then(|ms| ms.parse().ok()),
        group: system(&message, MessageSystemAttributeName::MessageGroupId)
            .map(|group| Bytes::copy_from_slice(group.as_bytes())),
        detail: detail(&message),
    };
    if let Some(packed) = packed {
        // Published by us: whatever its body looks like, it is no envelope.
        return vec![of_ours(packed, &arrived, settings)];
    }
    open(message.body.unwrap_or_default(), settings.unwrapping)
        .into_iter()
        .map(|content| event(content, &arrived, settings))
        .collect()
}

/// What our publisher sent. Its key may be one that no group can be called, and is beside the group then.
fn of_ours(packed: Unpacked, message: &Arrived, settings: &Settings) -> RawEvent {
    let mut event = event(Content::default(), message, settings);
    event.payload = packed.payload;
    if settings.ordering_key == OrderingKey::GroupId {
        event.key = header(&event.headers, OWN_KEY_HEADER).or(event.key);
    }
    event
}

/// What a message says of all that is in it.
struct Arrived {
    headers: Headers,
    id: Option<String>,
    sent: Option<i64>,
    group: Option<Bytes>,
    detail: Arc<str>,
}

fn event(content: Content, message: &Arrived, settings: &Settings) -> RawEvent {
    let mut headers = match content.part {
        // An id among them would make all the parts one event, of which one would be applied.
        Some(_) => Headers::new(),
        None => message.headers.clone(),
    };
    for (name, value) in content.headers.iter() {
        headers.push(name, Bytes::copy_from_slice(value.unwrap_or_default()));
    }
    let native = content.native.or_else(|| {
        let id = message.id.as_deref()?;
        let id = match content.part {
            Some(part) => format!("{id}/{part}"),
            None => id.to_owned(),
        };
        Some(PropertyId {
            source: settings.name.as_str().into(),
            id: id.into(),
        })
    });
    RawEvent {
        event_type: content
            .event_type
            .or_else(|| header(&headers, OWN_TYPE_HEADER))
            .or_else(|| header(&headers, CLOUD_EVENTS_TYPE)),
        key: match &settings.ordering_key {
            OrderingKey::OwnHeader => header(&headers, OWN_KEY_HEADER),
            OrderingKey::Header(name) => header(&headers, name),
            OrderingKey::GroupId => message.group.clone(),
        },
        payload: Some(content.body),
        headers,
        time_ms: message.sent,
        property: content.property,
        native,
        origin: Origin {
            system: SYSTEM,
            destination: settings.name.as_str().into(),
            detail: message.detail.clone(),
        },
    }
}

fn header(headers: &Headers, name: &str) -> Option<Bytes> {
    headers.get(name).map(Bytes::copy_from_slice)
}

fn detail(message: &Message) -> Arc<str> {
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
    detail.into()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use aws_sdk_sqs::types::MessageAttributeValue;
    use onlyonce::event::IdentityRules;

    use super::*;
    use crate::{Connection, Sqs};

    fn text(value: &str) -> MessageAttributeValue {
        MessageAttributeValue::builder()
            .data_type("String")
            .string_value(value)
            .build()
            .unwrap()
    }

    #[test]
    fn records_of_one_message_are_never_one_event() {
        let client = Connection::new("r", "k", "s")
            .endpoint("http://h")
            .client()
            .unwrap();
        let settings = Sqs::queue(client, "http://h/1/files")
            .s3_records()
            .settings()
            .unwrap();
        // Without sequencers, and with an id for the message: nothing tells them apart but their place.
        let record = r#"{"eventSource":"aws:s3","eventName":"e","awsRegion":"r","s3":{"bucket":{"name":"b"},"object":{"key":"k"}}}"#;
        let message = Message::builder()
            .message_id("m")
            .receipt_handle("h")
            .message_attributes("onlyonce-event-id", text("e1"))
            .message_attributes("onlyonce-event-source", text("s"))
            .body(format!(r#"{{"Records":[{record},{record},{record}]}}"#))
            .build();
        let ids = |message: Message| -> Vec<String> {
            let events = arrival(message, &settings).unwrap().events;
            events
                .iter()
                .map(|event| IdentityRules::auto().identify(event).unwrap().id)
                .collect()
        };
        let first = ids(message.clone());
        assert_eq!(first.iter().collect::<HashSet<_>>().len(), 3, "{first:?}");
        assert_eq!(first, ids(message), "the same at the next delivery");
    }

    #[test]
    fn the_receive_count_includes_this_delivery() {
        for (count, redelivery) in [
            ("1", Redelivery::No),
            ("2", Redelivery::Times(1)),
            ("7", Redelivery::Times(6)),
            ("many", Redelivery::No),
        ] {
            let message = Message::builder()
                .attributes(MessageSystemAttributeName::ApproximateReceiveCount, count)
                .build();
            assert_eq!(super::redelivery(&message), redelivery);
        }
    }
}
