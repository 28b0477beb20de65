//! How a message of ours is an SQS message, which knows only texts and ten attributes: what the publisher packs,
//! and the source unpacks.
//!
//! The attributes `onlyonce-event-id`, `onlyonce-event-source` and `content-type` are as they are. All other headers,
//! and how the body is to be read, are one JSON document in the attribute `onlyonce`:
//!
//! ```json
//! {"headers":[["tenant","eu"],["raw",{"base64":"/wA="}],["none",null]],"body":"base64"}
//! ```
//!
//! | `body` | the SQS body | the event's body |
//! |---|---|---|
//! | not there | a text | this text |
//! | `base64` | base64 | the bytes: no UTF-8, or characters that SQS does not take |
//! | `empty` | `""` | empty, which SQS does not take |
//! | `null` | `null` | none (a tombstone) |

use aws_sdk_sqs::types::{Message, MessageAttributeValue};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use onlyonce::event::Headers;
use onlyonce::publisher::Encoded;
use serde::{Deserialize, Serialize};

/// The attribute with all that has no attribute of its own.
const ATTRIBUTE: &str = "onlyonce";
/// Headers that are attributes of their own, for readers that know nothing of the rest.
const PLAIN: [&str; 3] = ["onlyonce-event-id", "onlyonce-event-source", "content-type"];
/// A body for readers that know nothing of ours; an empty JSON text.
const EMPTY: &str = "\"\"";

#[derive(Debug, Default, Serialize, Deserialize)]
struct Document {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    headers: Vec<(String, Option<Value>)>,
    #[serde(default, skip_serializing_if = "Form::is_text")]
    body: Form,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Value {
    Text(String),
    Binary { base64: String },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Form {
    #[default]
    Text,
    Base64,
    Empty,
    Null,
}

impl Form {
    fn is_text(&self) -> bool {
        *self == Self::Text
    }
}

/// A body and attributes that SQS takes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Packed {
    pub(crate) body: String,
    pub(crate) attributes: Vec<(&'static str, String)>,
}

impl Packed {
    /// What SQS counts.
    pub(crate) fn size(&self) -> usize {
        let attribute = |(name, value): &(&str, String)| name.len() + "String".len() + value.len();
        self.body.len() + self.attributes.iter().map(attribute).sum::<usize>()
    }
}

/// What was packed.
#[derive(Debug)]
pub(crate) struct Unpacked {
    pub(crate) headers: Headers,
    pub(crate) payload: Option<Bytes>,
}

pub(crate) fn pack(encoded: &Encoded) -> Packed {
    let (body, form) = match encoded.body.as_deref() {
        None => ("null".to_owned(), Form::Null),
        Some([]) => (EMPTY.to_owned(), Form::Empty),
        Some(bytes) => match text(bytes) {
            Some(text) => (text.to_owned(), Form::Text),
            None => (STANDARD.encode(bytes), Form::Base64),
        },
    };
    let mut document = Document {
        headers: Vec::new(),
        body: form,
    };
    let mut attributes = Vec::new();
    let content_type = encoded.content_type.as_ref();
    let all = encoded
        .headers
        .iter()
        .chain(content_type.map(|of| ("content-type", Some(of.as_bytes()))));
    for (name, value) in all {
        let plain = PLAIN.into_iter().find(|plain| *plain == name);
        let there = |name| attributes.iter().any(|(there, _)| *there == name);
        match (plain, value.and_then(text)) {
            (Some(name), Some(text)) if !there(name) => attributes.push((name, text.to_owned())),
            _ => document.headers.push((name.to_owned(), value.map(Value::of))),
        }
    }
    // Strings and pairs of them have a JSON form.
    let json = serde_json::to_string(&document).unwrap_or_default();
    attributes.push((ATTRIBUTE, without_illegal(json)));
    Packed { body, attributes }
}

/// `None`: it is not of ours, or somebody has changed it.
pub(crate) fn unpack(message: &Message) -> Option<Unpacked> {
    let attributes = message.message_attributes.as_ref()?;
    let document: Document = serde_json::from_str(attributes.get(ATTRIBUTE)?.string_value()?).ok()?;
    let body = message.body.as_deref().unwrap_or_default();
    let payload = match document.body {
        Form::Text => Some(Bytes::copy_from_slice(body.as_bytes())),
        Form::Base64 => Some(STANDARD.decode(body).ok()?.into()),
        Form::Empty => Some(Bytes::new()),
        Form::Null => None,
    };
    let mut all = Headers::new();
    for (name, value) in document.headers {
        match value {
            None => all.push_null(name),
            Some(Value::Text(text)) => all.push(name, text),
            Some(Value::Binary { base64 }) => all.push(name, STANDARD.decode(base64).ok()?),
        }
    }
    for (name, value) in headers(message).iter().filter(|(name, _)| *name != ATTRIBUTE) {
        all.push(name, Bytes::copy_from_slice(value.unwrap_or_default()));
    }
    Some(Unpacked {
        headers: all,
        payload,
    })
}

impl Value {
    fn of(bytes: &[u8]) -> Self {
        match std::str::from_utf8(bytes) {
            Ok(text) => Self::Text(text.to_owned()),
            Err(_) => Self::Binary {
                base64: STANDARD.encode(bytes),
            },
        }
    }
}

/// Bytes that are a text as SQS takes it: not empty, and of characters that XML has.
fn text(bytes: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(bytes).ok()?;
    (!text.is_empty() && text.chars().all(is_legal)).then_some(text)
}

fn is_legal(c: char) -> bool {
    matches!(c, '\t' | '\n' | '\r' | ' '..='\u{fffd}' | '\u{10000}'..)
}

/// JSON escapes control characters by itself; what else SQS does not take can only be in its strings.
fn without_illegal(json: String) -> String {
    if json.chars().all(is_legal) {
        return json;
    }
    json.replace('\u{fffe}', "\\ufffe").replace('\u{ffff}', "\\uffff")
}

/// An attribute that is a text.
pub(crate) fn attribute(value: String) -> Result<MessageAttributeValue, aws_sdk_sqs::error::BuildError> {
    MessageAttributeValue::builder()
        .data_type("String")
        .string_value(value)
        .build()
}

/// The message attributes, in the order of their names, as SQS has none of its own.
pub(crate) fn headers(message: &Message) -> Headers {
    let Some(attributes) = &message.message_attributes else {
        return Headers::new();
    };
    let mut sorted: Vec<_> = attributes.iter().collect();
    sorted.sort_by_key(|(name, _)| *name);
    sorted
        .into_iter()
        .map(|(name, value)| (name.as_str(), value_of(value)))
        .collect()
}

/// A text, also of a number, or bytes; SQS has no attributes without a value.
fn value_of(value: &MessageAttributeValue) -> Bytes {
    match (&value.binary_value, &value.string_value) {
        (Some(bytes), _) => Bytes::copy_from_slice(bytes.as_ref()),
        (None, Some(text)) => Bytes::copy_from_slice(text.as_bytes()),
        (None, None) => Bytes::new(),
    }
}

#[cfg(test)]
mod tests {
    use onlyonce::publisher::Message as Outgoing;

    use super::*;

    fn message() -> Outgoing {
        Outgoing::new("q", "shop", "evt-1", "body")
    }

    fn arrives(packed: &Packed) -> Message {
        let mut message = Message::builder().body(&packed.body);
        for (name, value) in &packed.attributes {
            message = message.message_attributes(*name, attribute(value.clone()).unwrap());
        }
        message.build()
    }

    #[test]
    fn what_is_packed_is_unpacked_to_the_same() {
        let every_byte: Vec<u8> = (0..=255).collect();
        let mut headers = message();
        headers.headers.push("twice", "1");
        headers.headers.push("other", every_byte.clone());
        headers.headers.push("twice", "2");
        headers.headers.push_null("null");
        headers.headers.push("odd", "a\u{1}\u{fffe}\u{ffff}\"b");
        headers.headers.push("onlyonce", "{}");
        headers.headers.push("", "");
        let bodies = [
            None,
            Some(Bytes::new()),
            Some(Bytes::from("text ✓\r\n\t")),
            Some(Bytes::from("a\u{0}b")),
            Some(Bytes::from("a\u{fffe}b")),
            Some(every_byte.into()),
            Some(Bytes::from("null")),
            Some(Bytes::from("\"\"")),
        ];
        for body in bodies {
            let sent = headers.clone();
            let mut encoded = sent.encode("ce-");
            encoded.body = body.clone();
            let packed = pack(&encoded);
            assert!(packed.attributes.len() <= 10);
            assert!(!packed.body.is_empty() && packed.body.chars().all(is_legal));
            assert!(
                packed
                    .attributes
                    .iter()
                    .all(|(_, v)| !v.is_empty() && v.chars().all(is_legal))
            );
            let came = unpack(&arrives(&packed)).unwrap();
            assert_eq!(came.payload, body);
            let sorted = |headers: &Headers| {
                let mut all: Vec<_> = headers
                    .iter()
                    .filter(|(name, _)| name.starts_with("onlyonce-"))
                    .map(|(name, value)| (name.to_owned(), value.map(<[u8]>::to_vec)))
                    .collect();
                all.sort();
                all
            };
            assert_eq!(sorted(&came.headers), sorted(&encoded.headers));
            let rest = |headers: &Headers| {
                let rest = headers.iter().filter(|(name, _)| !name.starts_with("onlyonce-"));
                rest.map(|(name, value)| (name.to_owned(), value.map(<[u8]>::to_vec)))
                    .collect::<Vec<_>>()
            };
            assert_eq!(rest(&came.headers), rest(&encoded.headers));
        }
    }

    #[test]
    fn identity_and_media_type_are_attributes_of_their_own() {
        let mut sent = message();
        sent.content_type = Some("application/json".to_owned());
        sent.event_type = Some("paid".to_owned());
        let packed = pack(&sent.encode("ce-"));
        let names: Vec<_> = packed.attributes.iter().map(|(name, _)| *name).collect();
        assert_eq!(
            names,
            [
                "onlyonce-event-id",
                "onlyonce-event-source",
                "content-type",
                "onlyonce"
            ]
        );
        let came = unpack(&arrives(&packed)).unwrap();
        assert_eq!(came.headers.get("content-type"), Some(&b"application/json"[..]));
        assert_eq!(came.headers.get("ce-type"), Some(&b"paid"[..]));
    }

    #[test]
    fn what_somebody_else_calls_onlyonce_is_left_as_it_is() {
        for (document, body) in [
            ("not json", "b"),
            (r#"{"headers":{}}"#, "b"),
            (r#"{"body":"zip"}"#, "b"),
            (r#"{"body":"base64"}"#, "no base64!"),
            (r#"{"headers":[["a",{"base64":"?"}]]}"#, "b"),
        ] {
            let packed = Packed {
                body: body.to_owned(),
                attributes: vec![(ATTRIBUTE, document.to_owned())],
            };
            assert!(unpack(&arrives(&packed)).is_none(), "{document}");
        }
    }
}
