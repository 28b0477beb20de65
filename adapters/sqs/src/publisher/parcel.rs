//! A message as SQS carries it, checked against what SQS cannot carry.

use std::fmt::Write;

use aws_sdk_sqs::error::BuildError;
use aws_sdk_sqs::types::SendMessageBatchRequestEntry;
use onlyonce::event::{EventKey, PayloadHash};
use onlyonce::publisher::{Message, PublishError, PublishErrorKind};

use crate::identity::OWN_KEY_HEADER;
use crate::packing::{Packed, attribute, pack};

/// There is no binding of CloudEvents for SQS; readers take the names of the HTTP one.
const CLOUD_EVENTS_PREFIX: &str = "ce-";
/// The longest name of a queue.
const LONGEST_NAME: usize = 80;
/// The longest group.
const LONGEST_GROUP: usize = 128;

/// What is sent.
#[derive(Debug)]
pub(super) struct Parcel {
    packed: Packed,
    fifo: Option<Fifo>,
}

/// What a FIFO queue orders and deduplicates by.
#[derive(Debug, PartialEq, Eq)]
struct Fifo {
    group: String,
    deduplication: String,
}

impl Parcel {
    /// # Errors
    ///
    /// What SQS could never take: [`PublishErrorKind::Invalid`].
    pub(super) fn of(message: &Message) -> Result<Self, PublishError> {
        let fifo = match (is_fifo(&message.address), &message.key) {
            (false, _) => None,
            (true, Some(key)) => Some(Fifo {
                group: group(key),
                deduplication: deduplication(message),
            }),
            (true, None) => {
                return Err(invalid(
                    "a FIFO queue orders by the event's key, and this event has none (give it one)",
                ));
            }
        };
        let mut encoded = message.encode(CLOUD_EVENTS_PREFIX);
        if let Some(key) = &message.key {
            encoded.headers.push(OWN_KEY_HEADER, key.clone());
        }
        Ok(Self {
            packed: pack(&encoded),
            fifo,
        })
    }

    /// What SQS counts towards its limits.
    pub(super) fn size(&self) -> usize {
        self.packed.size()
    }

    /// As an entry of a call, under this number.
    pub(super) fn entry(&self, number: usize) -> Result<SendMessageBatchRequestEntry, BuildError> {
        let mut entry = SendMessageBatchRequestEntry::builder()
            .id(number.to_string())
            .message_body(&self.packed.body);
        for (name, value) in &self.packed.attributes {
            entry = entry.message_attributes(*name, attribute(value.clone())?);
        }
        if let Some(fifo) = &self.fifo {
            entry = entry
                .message_group_id(&fifo.group)
                .message_deduplication_id(&fifo.deduplication);
        }
        entry.build()
    }
}

fn is_fifo(address: &str) -> bool {
    address.ends_with(".fifo")
}

/// A URL, which is taken as it is.
pub(super) fn is_url(address: &str) -> bool {
    address.starts_with("https://") || address.starts_with("http://")
}

/// Names that no queue could have.
pub(super) fn check(address: &str) -> Result<(), PublishError> {
    let name = address.strip_suffix(".fifo").unwrap_or(address);
    let legal = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_');
    if is_url(address) || (!name.is_empty() && address.len() <= LONGEST_NAME && name.bytes().all(legal)) {
        return Ok(());
    }
    Err(invalid(format_args!(
        "{address:?} is neither the URL nor the name of a queue (1 to {LONGEST_NAME} of a-z, A-Z, 0-9, `-` and `_`, and `.fifo`)"
    )))
}

/// The key as it is if a group can be called so, else a digest of it: equal for equal keys.
fn group(key: &[u8]) -> String {
    let legal = (1..=LONGEST_GROUP).contains(&key.len()) && key.iter().all(u8::is_ascii_graphic);
    match std::str::from_utf8(key) {
        Ok(text) if legal => text.to_owned(),
        _ => {
            let mut digest = String::from("sha256:");
            for byte in PayloadHash::of(Some(key)).as_bytes() {
                // Writing to a string does not fail.
                let _ = write!(digest, "{byte:02x}");
            }
            digest
        }
    }
}

/// Copies of one event are dropped by SQS for five minutes. One that a person sends anew is no copy, and events of
/// two sources may have the same id.
fn deduplication(message: &Message) -> String {
    let replay = format!("replay {}", message.replays);
    EventKey::of_event(&replay, &message.source, &message.event_id)
        .as_uuid()
        .to_string()
}

fn invalid(text: impl std::fmt::Display) -> PublishError {
    PublishError::new(PublishErrorKind::Invalid, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fifo(change: impl FnOnce(&mut Message)) -> Fifo {
        let mut message = Message::new("orders.fifo", "shop", "evt-1", "x");
        message.key = Some("k".into());
        change(&mut message);
        Parcel::of(&message).unwrap().fifo.unwrap()
    }

    #[test]
    fn a_key_is_the_group_if_a_group_can_be_called_so() {
        for legal in ["account-7", "a/b:c!~", &"x".repeat(128)] {
            assert_eq!(fifo(|m| m.key = Some(legal.to_owned().into())).group, legal);
        }
        for key in [&b""[..], b"a b", "ü".as_bytes(), &[0xff], &[b'x'; 129], b"a\n"] {
            let group = fifo(|m| m.key = Some(key.to_vec().into())).group;
            assert!(group.starts_with("sha256:") && group.len() == 39, "{group}");
            assert_eq!(group, fifo(|m| m.key = Some(key.to_vec().into())).group);
        }
    }

    #[test]
    fn a_replay_and_another_source_are_no_copies() {
        let original = fifo(|_| {}).deduplication;
        assert_eq!(fifo(|m| m.payload = None).deduplication, original, "of one event");
        assert_ne!(fifo(|m| m.replays = 1).deduplication, original);
        assert_ne!(fifo(|m| m.source = "other".to_owned()).deduplication, original);
        assert_ne!(fifo(|m| m.event_id = "evt-2".to_owned()).deduplication, original);
    }

    #[test]
    fn a_fifo_queue_wants_a_key_and_a_standard_one_none() {
        let mut message = Message::new("orders.fifo", "shop", "1", "x");
        let error = Parcel::of(&message).unwrap_err();
        assert_eq!(error.kind(), PublishErrorKind::Invalid);
        message.address = "orders".to_owned();
        assert!(Parcel::of(&message).unwrap().fifo.is_none());
    }

    #[test]
    fn an_address_is_a_url_or_a_name() {
        for good in [
            "orders",
            "a-B_9.fifo",
            "http://localhost:9324/0/q",
            &"x".repeat(80),
        ] {
            assert!(check(good).is_ok(), "{good}");
        }
        for bad in ["", ".fifo", "a b", "a/b", "ü", "a.b", &"x".repeat(81)] {
            assert_eq!(check(bad).unwrap_err().kind(), PublishErrorKind::Invalid, "{bad}");
        }
    }
}
