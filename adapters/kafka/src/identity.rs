//! From Kafka's record to an event: bytes, headers and coordinates, nothing judged.

use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

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

/// The event that a record of this topic is. `weak_source` says whose coordinates these are.
pub(crate) fn raw_event(
    record: &BorrowedMessage<'_>,
    topic: &Arc<str>,
    weak_source: &Arc<str>,
    key: &OrderingKey,
) -> RawEvent {
    let Copied {
        headers,
        key: record_key,
        payload,
        coordinates,
    } = Copied::of(record);
    let (partition, offset) = (record.partition(), record.offset());
    RawEvent {
        event_type: header(&headers, OWN_TYPE_HEADER).or_else(|| header(&headers, CLOUD_EVENTS_TYPE)),
        key: match key {
            OrderingKey::RecordKey => record_key,
            OrderingKey::Partition => Some(format!("partition {partition}").into()),
            OrderingKey::Header(name) => header(&headers, name),
        },
        payload,
        time_ms: record.timestamp().to_millis(),
        property: None,
        native: Some(PropertyId {
            source: weak_source.clone(),
            id: coordinates,
        }),
        origin: Origin {
            system: SYSTEM,
            destination: topic.clone(),
            detail: format!("partition={partition} offset={offset}").into(),
        },
        headers,
    }
}

/// All that is kept of a record in one allocation, of which the parts are slices.
struct Copied {
    headers: Headers,
    key: Option<Bytes>,
    payload: Option<Bytes>,
    coordinates: Bytes,
}

impl Copied {
    fn of(record: &BorrowedMessage<'_>) -> Self {
        let (key, payload) = (record.key(), record.payload());
        let mut all = Vec::with_capacity(
            fields(record)
                .map(|(name, value)| name.len() + value.map_or(0, <[u8]>::len) + FIELD)
                .sum::<usize>()
                + key.map_or(0, <[u8]>::len)
                + payload.map_or(0, <[u8]>::len)
                + record.topic().len()
                + COORDINATES,
        );
        fields(record).for_each(|(name, value)| Headers::write(&mut all, name, value));
        let headers = all.len();
        all.extend_from_slice(key.unwrap_or_default());
        all.extend_from_slice(payload.unwrap_or_default());
        write_coordinates(
            &mut all,
            record.topic(),
            record.partition(),
            record.offset(),
            record.timestamp().to_millis(),
        );
        let mut all = Bytes::from(all);
        Self {
            // It cannot fail on what was written just now.
            headers: Headers::read(all.split_to(headers)).unwrap_or_default(),
            key: key.map(|key| all.split_to(key.len())),
            payload: payload.map(|payload| all.split_to(payload.len())),
            coordinates: all,
        }
    }
}

/// What a header takes at most, beside its name and its value.
const FIELD: usize = 9;

/// How long a record's coordinates are at most, beside the topic: three numbers and what is between them.
const COORDINATES: usize = 54;

/// A topic that was deleted and created anew counts its offsets from 0 again; the timestamp tells the
/// records apart.
fn write_coordinates(out: &mut Vec<u8>, topic: &str, partition: i32, offset: i64, time_ms: Option<i64>) {
    let time = time_ms.unwrap_or(-1);
    // Into memory: it cannot fail.
    let _ = write!(out, "{topic}/{partition}/{offset}@{time}");
}

fn header(headers: &Headers, name: &str) -> Option<Bytes> {
    headers.get(name).map(Bytes::copy_from_slice)
}

/// A record's headers in order, also those that repeat a name or have no value.
fn fields<'a>(record: &'a BorrowedMessage<'_>) -> impl Iterator<Item = (&'a str, Option<&'a [u8]>)> {
    let headers = record.headers();
    let count = headers.map_or(0, |headers| headers.count());
    (0..count).map(move |at| {
        // The library panics on a name that is not UTF-8. That record is a trouble of its own, not of
        // the partition: it goes on, and shows that a header is missing.
        let header = catch_unwind(AssertUnwindSafe(|| headers?.try_get(at))).unwrap_or_default();
        header.map_or((UNREADABLE_NAME, None), |header| (header.key, header.value))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn coordinates(time_ms: Option<i64>) -> String {
        let mut out = Vec::new();
        write_coordinates(&mut out, "orders", 3, 77, time_ms);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn coordinates_name_a_record() {
        assert_eq!(coordinates(Some(1_700_000_000_123)), "orders/3/77@1700000000123");
        assert_eq!(coordinates(None), "orders/3/77@-1");
    }

    #[test]
    fn the_longest_coordinates_find_room() {
        let mut out = Vec::new();
        write_coordinates(&mut out, "", i32::MIN, i64::MIN, Some(i64::MIN));
        assert_eq!(out.len(), COORDINATES);
    }
}
