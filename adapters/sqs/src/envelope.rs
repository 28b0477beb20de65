//! Envelopes that AWS puts around a body: SNS, EventBridge and S3 event notifications.
//!
//! An envelope is known by its whole shape. A body that lacks a part of it is an event as it is: when
//! unsure, nothing is taken away from it. What is unwrapped is cut out of the body byte for byte, so
//! that numbers stay what they were.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use onlyonce::event::{Headers, PropertyId};
use serde::Deserialize;
use serde_json::value::RawValue;
use std::collections::BTreeMap;

use crate::config::Unwrapping;

/// What is in a body: an event's own part of it.
#[derive(Debug, Default)]
pub(crate) struct Content {
    pub(crate) body: Bytes,
    pub(crate) headers: Headers,
    pub(crate) property: Option<PropertyId>,
    /// Put together from what identifies it, where the sender gives no id.
    pub(crate) native: Option<PropertyId>,
    pub(crate) event_type: Option<Bytes>,
    /// It is this one of several in its message. What names the message does not name it.
    pub(crate) part: Option<usize>,
}

/// Everything in this body; more or less than one thing only where S3 notifications are expected.
pub(crate) fn open(body: String, unwrapping: Unwrapping) -> Vec<Content> {
    // Everything that is an envelope is an object.
    if unwrapping == Unwrapping::Nothing || !body.trim_start().starts_with('{') {
        return vec![plain(body)];
    }
    let Some(notification) = Notification::read(&body) else {
        return open_inner(body, unwrapping, Content::default());
    };
    let mut outer = Content {
        property: Some(PropertyId {
            source: notification.topic_arn.into(),
            id: notification.message_id.into(),
        }),
        ..Content::default()
    };
    for (name, attribute) in notification.message_attributes.unwrap_or_default() {
        outer.headers.push(name, attribute.bytes());
    }
    open_inner(notification.message, unwrapping, outer)
}

fn plain(body: String) -> Content {
    Content {
        body: body.into(),
        ..Content::default()
    }
}

/// What SNS wrapped, or what came by itself.
fn open_inner(body: String, unwrapping: Unwrapping, outer: Content) -> Vec<Content> {
    if let Some(event) = BusEvent::read(&body) {
        return vec![Content {
            property: Some(PropertyId {
                source: format!("aws:eventbridge:{}:{}", event.account, event.source).into(),
                id: event.id.into(),
            }),
            event_type: Some(event.detail_type.into()),
            body: Bytes::copy_from_slice(event.detail.get().as_bytes()),
            ..outer
        }];
    }
    if unwrapping == Unwrapping::WithS3
        && let Some(records) = s3_records(&body)
    {
        return records;
    }
    vec![Content {
        body: body.into(),
        ..outer
    }]
}

/// What SNS delivers without raw message delivery.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Notification {
    #[serde(rename = "Type")]
    kind: String,
    message_id: String,
    topic_arn: String,
    message: String,
    /// Its presence is part of the shape.
    #[serde(rename = "Timestamp")]
    _timestamp: String,
    message_attributes: Option<BTreeMap<String, Attribute>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Attribute {
    #[serde(rename = "Type")]
    kind: String,
    value: String,
}

impl Notification {
    fn read(body: &str) -> Option<Self> {
        // Most bodies are no envelope, and to find a name is much cheaper than to parse them.
        if !body.contains(r#""TopicArn""#) {
            return None;
        }
        let read: Self = serde_json::from_str(body).ok()?;
        (read.kind == "Notification" && read.topic_arn.starts_with("arn:")).then_some(read)
    }
}

impl Attribute {
    fn bytes(self) -> Bytes {
        let binary = self.kind.starts_with("Binary");
        match binary.then(|| STANDARD.decode(&self.value)) {
            Some(Ok(bytes)) => bytes.into(),
            _ => self.value.into(),
        }
    }
}

/// What EventBridge delivers without a transformation.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct BusEvent<'a> {
    id: String,
    source: String,
    account: String,
    detail_type: String,
    #[serde(borrow)]
    detail: &'a RawValue,
    // The rest is there for the shape.
    version: String,
    #[serde(rename = "time")]
    _time: String,
    #[serde(rename = "region")]
    _region: String,
    #[serde(rename = "resources")]
    _resources: Vec<String>,
}

impl<'a> BusEvent<'a> {
    fn read(body: &'a str) -> Option<Self> {
        if !body.contains(r#""detail-type""#) {
            return None;
        }
        let read: Self = serde_json::from_str(body).ok()?;
        (read.version == "0").then_some(read)
    }
}

#[derive(Deserialize)]
struct S3Notification<'a> {
    #[serde(borrow, rename = "Records")]
    records: Vec<&'a RawValue>,
}

/// What S3 sends when notifications are switched on.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct S3Test {
    service: String,
    event: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct S3Record {
    event_source: String,
    event_name: String,
    aws_region: String,
    s3: S3,
}

#[derive(Deserialize)]
struct S3 {
    bucket: Bucket,
    object: Object,
}

#[derive(Deserialize)]
struct Bucket {
    name: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Object {
    key: String,
    version_id: Option<String>,
    sequencer: Option<String>,
}

/// The records, if this is a notification and all of its records are S3's. A test has none.
fn s3_records(body: &str) -> Option<Vec<Content>> {
    if let Ok(test) = serde_json::from_str::<S3Test>(body)
        && test.service == "Amazon S3"
        && test.event == "s3:TestEvent"
    {
        return Some(Vec::new());
    }
    let notification: S3Notification<'_> = serde_json::from_str(body).ok()?;
    if notification.records.is_empty() {
        return None;
    }
    let records = notification.records.into_iter().enumerate();
    records.map(|(at, raw)| s3_record(at, raw)).collect()
}

fn s3_record(at: usize, raw: &RawValue) -> Option<Content> {
    let record: S3Record = serde_json::from_str(raw.get()).ok()?;
    if record.event_source != "aws:s3" {
        return None;
    }
    let S3Record {
        event_name,
        aws_region,
        s3: S3 { bucket, object },
        ..
    } = record;
    // Without a sequencer two changes of one object look alike: they are not told apart by this.
    let native = object.sequencer.map(|sequencer| {
        let version = object.version_id.unwrap_or_default();
        PropertyId {
            source: format!("aws:s3:{aws_region}:{}", bucket.name).into(),
            id: format!(
                "{}/{}@{version}#{sequencer}:{event_name}",
                bucket.name, object.key
            )
            .into(),
        }
    });
    Some(Content {
        body: Bytes::copy_from_slice(raw.get().as_bytes()),
        native,
        event_type: Some(event_name.into()),
        part: Some(at),
        ..Content::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVENT: &str = r#"{"version":"0","id":"ev-1","detail-type":"Order Paid","source":"shop","account":"42","time":"2026-01-01T00:00:00Z","region":"r","resources":[],"detail":{"cents": 1.50, "n":9007199254740993}}"#;

    fn one(body: &str, unwrapping: Unwrapping) -> Content {
        let mut contents = open(body.to_owned(), unwrapping);
        assert_eq!(contents.len(), 1);
        contents.remove(0)
    }

    fn source_and_id(content: &Content) -> Option<(String, String)> {
        let property = content.property.as_ref()?;
        let id = String::from_utf8(property.id.to_vec()).unwrap();
        Some((property.source.to_string(), id))
    }

    fn notification(message: &str) -> String {
        let message = serde_json::to_string(message).unwrap();
        format!(
            r#"{{"Type":"Notification","MessageId":"m","TopicArn":"arn:aws:sns:r:1:t","Message":{message},"Timestamp":"t"}}"#
        )
    }

    #[test]
    fn eventbridge_s_detail_is_cut_out_byte_for_byte() {
        let content = one(EVENT, Unwrapping::Known);
        assert_eq!(
            source_and_id(&content),
            Some(("aws:eventbridge:42:shop".into(), "ev-1".into()))
        );
        assert_eq!(content.event_type.as_deref(), Some(&b"Order Paid"[..]));
        assert_eq!(content.body, r#"{"cents": 1.50, "n":9007199254740993}"#);
    }

    #[test]
    fn envelopes_in_envelopes_are_opened_and_the_inner_identity_holds() {
        let content = one(&notification(EVENT), Unwrapping::Known);
        assert_eq!(
            source_and_id(&content),
            Some(("aws:eventbridge:42:shop".into(), "ev-1".into()))
        );
        let s3 = r#"{"Records":[{"eventSource":"aws:s3","eventName":"e","awsRegion":"r","s3":{"bucket":{"name":"b"},"object":{"key":"k","versionId":"v","sequencer":"0A"}}}]}"#;
        let content = one(&notification(s3), Unwrapping::WithS3);
        assert_eq!(content.native.unwrap().id, "b/k@v#0A:e");
        assert_eq!(
            one(&notification(s3), Unwrapping::Known).body,
            s3,
            "S3 is a choice"
        );
    }

    #[test]
    fn a_body_that_only_resembles_an_envelope_is_an_event_as_it_is() {
        let bodies = [
            EVENT.replace(r#""version":"0""#, r#""version":"1""#),
            EVENT.replace(r#""account":"42","#, ""),
            EVENT.replace(r#""resources":[]"#, r#""resources":"none""#),
            notification("x").replace("arn:", "urn:"),
            notification("x").replace("Notification", "Notice"),
            notification("x").replace(r#""MessageId":"m","#, ""),
            r#"{"Records":[{"eventSource":"aws:ses"}]}"#.to_owned(),
            r#"{"Service":"Amazon S3","Event":"s3:Other"}"#.to_owned(),
            "[1]".to_owned(),
            "{".to_owned(),
            String::new(),
        ];
        for body in bodies {
            for unwrapping in [Unwrapping::Known, Unwrapping::WithS3] {
                let content = one(&body, unwrapping);
                assert_eq!(content.body, body);
                assert!(content.property.is_none() && content.native.is_none(), "{body}");
            }
        }
    }

    #[test]
    fn records_of_one_foreign_source_leave_the_whole_message_as_it_is() {
        let s3 = r#"{"eventSource":"aws:s3","eventName":"e","awsRegion":"r","s3":{"bucket":{"name":"b"},"object":{"key":"k"}}}"#;
        let mixed = format!(r#"{{"Records":[{s3},{{"eventSource":"aws:ses"}}]}}"#);
        assert_eq!(one(&mixed, Unwrapping::WithS3).body, mixed);
        let alone = format!(r#"{{"Records":[{s3}]}}"#);
        let content = one(&alone, Unwrapping::WithS3);
        assert!(
            content.native.is_none(),
            "without a sequencer there is no identity"
        );
    }
}
