//! A message as AMQP carries it, checked against what AMQP cannot carry.

use std::time::UNIX_EPOCH;

use bytes::Bytes;
use lapin::BasicProperties;
use lapin::types::{AMQPValue, ByteArray, FieldTable, ShortString};
use onlyonce::event::Headers;
use onlyonce::publisher::{Message, PublishError, PublishErrorKind};

/// How the bindings of CloudEvents for AMQP 0-9-1 write their attributes.
const CLOUD_EVENTS_PREFIX: &str = "ce-";
const OWN_KEY_HEADER: &str = "onlyonce-ordering-key";
/// RabbitMQ takes these for more routing keys, and wants arrays: a text closes the channel.
const ROUTING_HEADERS: [&str; 2] = ["CC", "BCC"];
/// The delivery mode of a message that survives the broker's restart, in a queue that does.
const PERSISTENT: u8 = 2;
/// What a header frame has around its properties: type, channel, size and end of the frame; class, weight,
/// body size and flags of the header.
const AROUND_PROPERTIES: usize = 8 + 14;

/// What is published, where to.
#[derive(Debug)]
pub(crate) struct Parcel {
    pub(crate) exchange: ShortString,
    pub(crate) routing_key: ShortString,
    pub(crate) properties: BasicProperties,
    pub(crate) body: Bytes,
    /// The bytes of the frame with the properties.
    header_frame: usize,
}

impl Parcel {
    /// # Errors
    ///
    /// What no broker could ever take: [`PublishErrorKind::Invalid`].
    pub(crate) fn of(message: &Message) -> Result<Self, PublishError> {
        let (exchange, routing_key) = address(&message.address)?;
        let mut encoded = message.encode(CLOUD_EVENTS_PREFIX);
        if let Some(key) = &message.key {
            encoded.headers.push(OWN_KEY_HEADER, key.clone());
        }
        let content_type = encoded.content_type.as_deref();
        let texts = [
            content_type,
            Some(&message.event_id),
            message.event_type.as_deref(),
            Some(&message.source),
        ];
        let table = table(&encoded.headers)?;
        let header_frame = AROUND_PROPERTIES
            + size(&table)
            // Delivery mode and timestamp, and each text behind its length.
            + 1
            + 8
            + texts.iter().flatten().map(|text| 1 + text.len()).sum::<usize>();

        let seconds = message.time.duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut properties = BasicProperties::default()
            .with_headers(table)
            .with_delivery_mode(PERSISTENT)
            .with_message_id(short("the event id (message_id)", &message.event_id)?)
            .with_app_id(short("the event's source (app_id)", &message.source)?)
            .with_timestamp(seconds.as_secs());
        if let Some(kind) = &message.event_type {
            properties = properties.with_type(short("the event type (type)", kind)?);
        }
        if let Some(media_type) = content_type {
            properties = properties.with_content_type(short("the content type", media_type)?);
        }
        Ok(Self {
            exchange,
            routing_key,
            properties,
            // AMQP has no null payload: a tombstone is an empty body.
            body: encoded.body.unwrap_or_default(),
            header_frame,
        })
    }

    /// All properties have to fit into one frame of the connection; a larger one ends the connection, and with
    /// it everything else that is under way there. 0 is no limit.
    pub(crate) fn fits(&self, frame_max: u32) -> Result<(), PublishError> {
        match frame_max as usize {
            most @ 1.. if self.header_frame > most => Err(invalid(format!(
                "headers and properties take {} bytes, and the connection carries at most {most} of them (raise the broker's frame_max)",
                self.header_frame
            ))),
            _ => Ok(()),
        }
    }
}

/// Exchange and routing key.
pub(super) fn address(address: &str) -> Result<(ShortString, ShortString), PublishError> {
    let (exchange, routing_key) = address.split_once('/').ok_or_else(|| {
        invalid(format!(
            "{address:?} is no address of RabbitMQ (write exchange/routing.key, or /queue)"
        ))
    })?;
    if exchange.is_empty() && routing_key.is_empty() {
        return Err(invalid("the address names neither an exchange nor a queue"));
    }
    Ok((
        short("the exchange", exchange)?,
        short("the routing key", routing_key)?,
    ))
}

fn short(what: &str, text: &str) -> Result<ShortString, PublishError> {
    ShortString::try_new(text).map_err(|_| {
        invalid(format!(
            "{what} has {} bytes, and AMQP carries at most 255",
            text.len()
        ))
    })
}

fn invalid(text: impl std::fmt::Display) -> PublishError {
    PublishError::new(PublishErrorKind::Invalid, text)
}

/// A table has each name once: of several, the last is the one that readers of ours take.
fn table(headers: &Headers) -> Result<FieldTable, PublishError> {
    let mut table = FieldTable::default();
    for (name, value) in headers.iter() {
        if ROUTING_HEADERS.contains(&name) {
            return Err(invalid(format!(
                "a header is named {name}, which RabbitMQ takes for more routing keys (give it another name)"
            )));
        }
        let value = match value {
            None => AMQPValue::Void,
            Some(bytes) => match std::str::from_utf8(bytes) {
                Ok(text) => AMQPValue::LongString(text.into()),
                Err(_) => AMQPValue::ByteArray(ByteArray::from(bytes)),
            },
        };
        table.insert(short("the name of a header", name)?, value);
    }
    Ok(table)
}

/// The table as it is on the wire: its length, then per entry a name behind its length, a type and a value.
fn size(table: &FieldTable) -> usize {
    let value = |value: &AMQPValue| match value {
        AMQPValue::LongString(text) => 4 + text.as_bytes().len(),
        AMQPValue::ByteArray(bytes) => 4 + bytes.as_slice().len(),
        _ => 0,
    };
    let entries = table.inner().iter();
    4 + entries
        .map(|(name, of)| 1 + name.as_str().len() + 1 + value(of))
        .sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message() -> Message {
        Message::new("orders/paid.eu", "shop", "evt-1", "body")
    }

    fn text(table: &FieldTable, name: &str) -> Option<Vec<u8>> {
        match table.inner().get(name)? {
            AMQPValue::LongString(text) => Some(text.as_bytes().to_vec()),
            AMQPValue::ByteArray(bytes) => Some(bytes.as_slice().to_vec()),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_message_becomes_properties_and_headers() {
        let mut message = message();
        message.event_type = Some("payment.captured".to_owned());
        message.content_type = Some("application/json".to_owned());
        message.key = Some(vec![0xff, 0].into());
        message.headers.push("own", "first");
        message.headers.push("own", "last");
        message.headers.push_null("null");
        let parcel = Parcel::of(&message).unwrap();
        assert_eq!(
            (parcel.exchange.as_str(), parcel.routing_key.as_str()),
            ("orders", "paid.eu")
        );
        let properties = &parcel.properties;
        assert_eq!(properties.message_id().as_ref().unwrap().as_str(), "evt-1");
        assert_eq!(properties.app_id().as_ref().unwrap().as_str(), "shop");
        assert_eq!(properties.kind().as_ref().unwrap().as_str(), "payment.captured");
        assert_eq!(
            properties.content_type().as_ref().unwrap().as_str(),
            "application/json"
        );
        assert_eq!(*properties.delivery_mode(), Some(2));
        let table = properties.headers().as_ref().unwrap();
        assert_eq!(text(table, "onlyonce-ordering-key"), Some(vec![0xff, 0]));
        assert_eq!(text(table, "onlyonce-event-id"), Some(b"evt-1".to_vec()));
        assert_eq!(text(table, "ce-id"), Some(b"evt-1".to_vec()));
        assert_eq!(text(table, "own"), Some(b"last".to_vec()));
        assert_eq!(table.inner().get("null"), Some(&AMQPValue::Void));
    }

    #[test]
    fn an_address_ends_its_exchange_at_the_first_slash() {
        let read = |text| address(text).map(|(e, k)| (e.to_string(), k.to_string()));
        assert_eq!(read("/q").unwrap(), (String::new(), "q".to_owned()));
        assert_eq!(read("e/").unwrap(), ("e".to_owned(), String::new()));
        assert_eq!(read("e/a/b").unwrap(), ("e".to_owned(), "a/b".to_owned()));
        for bad in ["orders", "/", ""] {
            assert_eq!(read(bad).unwrap_err().kind(), PublishErrorKind::Invalid, "{bad}");
        }
    }

    #[test]
    fn what_amqp_cannot_carry_is_invalid_and_says_so() {
        type Change = fn(&mut Message, String);
        let changes: [(Change, &str); 6] = [
            (|m, long| m.address = format!("e/{long}"), "the routing key"),
            (|m, long| m.address = format!("{long}/k"), "the exchange"),
            (|m, long| m.event_id = long, "message_id"),
            (|m, long| m.source = long, "app_id"),
            (|m, long| m.event_type = Some(long), "the event type"),
            (|m, long| m.headers.push(long, "x"), "the name of a header"),
        ];
        for (change, part) in changes {
            let mut longest = message();
            change(&mut longest, "x".repeat(255));
            assert!(Parcel::of(&longest).is_ok(), "{part}");
            let mut longer = message();
            change(&mut longer, "x".repeat(256));
            let error = Parcel::of(&longer).unwrap_err();
            assert_eq!(error.kind(), PublishErrorKind::Invalid);
            let text = error.to_string();
            assert!(text.contains(part) && text.contains("256 bytes"), "{text}");
        }
        let mut routed = message();
        routed.headers.push("CC", "elsewhere");
        assert!(
            Parcel::of(&routed)
                .unwrap_err()
                .to_string()
                .contains("routing keys")
        );
    }

    #[test]
    fn properties_have_to_fit_into_one_frame() {
        let parcel = Parcel::of(&message()).unwrap();
        let frame = parcel.header_frame as u32;
        assert!(parcel.fits(frame).is_ok() && parcel.fits(0).is_ok());
        assert_eq!(
            parcel.fits(frame - 1).unwrap_err().kind(),
            PublishErrorKind::Invalid
        );
    }
}
