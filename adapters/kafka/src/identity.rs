//! From Kafka's record to an event: bytes, headers and coordinates, nothing judged.

use std::panic::{AssertUnwindSafe, catch_unwind};

use bytes::Bytes;
use onlyonce::event::{Headers, Origin, PropertyId, RawEvent};
use rdkafka::Message;
use rdkafka::message::{BorrowedMessage, Headers as _};

use crate::config::OrderingKey;

pub(crate) const SYSTEM: &str = "kafka";

/// What a consumer says at its start if it may come to the ids that Kafka gives.
pub(crate) const WEAK_IDS: &str = "events without an id are identified by topic, partition, offset and timestamp: an event that its producer sends twice counts as two";

const OWN_TYPE_HEADER: &str = "onlyonce-event-type";
const CLOUD_EVENTS_TYPE: &str = "ce_type";
/// In place of a header whose name is not UTF-8, which the client library cannot tell.
const UNREADABLE_NAME: &str = "onlyonce-unreadable-header-name";

/// The event that a record is. `cluster` says whose coordinates these are.
pub(crate) fn raw_event(record: &BorrowedMessage<'_>, cluster: &str, key: &OrderingKey) -> RawEvent {
    let headers = headers(record);
    let (topic, partition, offset) = (record.topic(), record.partition(), record.offset());
    let time_ms = record.timestamp().to_millis();
    RawEvent {
        event_type: header(&headers, OWN_TYPE_HEADER).or_else(|| header(&headers, CLOUD_EVENTS_TYPE)),
        key: match key {
            OrderingKey::RecordKey => record.key().map(Bytes::copy_from_slice),
            OrderingKey::Partition => Some(format!("partition {partition}").into()),
            OrderingKey::Header(name) => header(&headers, name),
        },
        payload: record.payload().map(Bytes::copy_from_slice),
        time_ms,
        property: None,
        native: Some(native(cluster, topic, partition, offset, time_ms)),
        origin: Origin {
            system: SYSTEM,
            destination: topic.to_owned(),
            detail: format!("partition={partition} offset={offset}"),
        },
        headers,
    }
}

/// A topic that was deleted and created anew counts its offsets from 0 again; the timestamp tells the
/// records apart.
fn native(cluster: &str, topic: &str, partition: i32, offset: i64, time_ms: Option<i64>) -> PropertyId {
    let time = time_ms.unwrap_or(-1);
    PropertyId {
        source: format!("{SYSTEM}:{cluster}"),
        id: format!("{topic}/{partition}/{offset}@{time}").into(),
    }
}

fn header(headers: &Headers, name: &str) -> Option<Bytes> {
    headers.get(name).map(Bytes::copy_from_slice)
}

/// All of them, in order, also those that repeat a name or have no value.
fn headers(record: &BorrowedMessage<'_>) -> Headers {
    let mut out = Headers::new();
    let Some(headers) = record.headers() else {
        return out;
    };
    for at in 0..headers.count() {
        // The library panics on a name that is not UTF-8. That record is a trouble of its own, not of
        // the partition: it goes on, and shows that a header is missing.
        match catch_unwind(AssertUnwindSafe(|| headers.try_get(at))) {
            Ok(Some(header)) => match header.value {
                Some(value) => out.push(header.key, Bytes::copy_from_slice(value)),
                None => out.push_null(header.key),
            },
            Ok(None) => {}
            Err(_) => out.push_null(UNREADABLE_NAME),
        }
    }
    out
}

/// How much memory an event holds, for byte budgets.
pub(crate) fn weight(event: &RawEvent) -> usize {
    let headers: usize = event
        .headers
        .iter()
        .map(|(name, value)| name.len() + value.map_or(0, <[u8]>::len))
        .sum();
    event.payload.as_ref().map_or(0, Bytes::len) + event.key.as_ref().map_or(0, Bytes::len) + headers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coordinates_name_a_record_of_one_cluster() {
        let id = native("prod-eu", "orders", 3, 77, Some(1_700_000_000_123));
        assert_eq!(id.source, "kafka:prod-eu");
        assert_eq!(id.id, "orders/3/77@1700000000123");
        assert_eq!(native("c", "orders", 3, 77, None).id, "orders/3/77@-1");
    }
}
