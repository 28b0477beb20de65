//! What is in a delivery, and what an envelope becomes.

use onlyonce::event::{Headers, IdentityRules};
use onlyonce::source::{Delivery, Source};

use super::harness::*;

fn identity(delivery: &Delivery) -> (String, String) {
    let identity = IdentityRules::auto().identify(&delivery.event).unwrap();
    (identity.source, identity.id)
}

fn is(source: &str, id: &str) -> (String, String) {
    (source.to_owned(), id.to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_without_an_id_has_the_one_of_sqs_under_the_queue_s_name() {
    let Some(queue) = Queue::fifo().await else {
        return;
    };
    queue.send("{}", &Headers::new(), Some("account-7")).await;
    let mut source = started(queue.source().name("orders"), 4).await;
    let delivery = some(&mut source, 1).await.remove(0);
    let (origin, id) = (&delivery.event.origin, identity(&delivery));
    assert_eq!(id.0, "orders");
    assert_eq!((origin.system, &*origin.destination), ("aws_sqs", "orders"));
    assert!(
        origin
            .detail
            .contains(&format!("message-id={} group=account-7", id.1)),
        "{origin:?}"
    );
    assert_eq!(delivery.event.key.as_deref(), Some(&b"account-7"[..]));
    assert!(
        delivery.event.time_ms.is_some_and(|ms| ms > 1_700_000_000_000),
        "{:?}",
        delivery.event.time_ms
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_is_the_same_whether_sns_wraps_it_or_not() {
    let Some(queue) = Queue::standard().await else {
        return;
    };
    let envelope = |message_id: &str, attributes: &str| {
        format!(
            r#"{{"Type":"Notification","MessageId":"{message_id}","TopicArn":"arn:aws:sns:r:1:orders","Message":"{{\"cents\": 1.50}}","Timestamp":"2026-01-01T00:00:00.000Z"{attributes}}}"#
        )
    };
    let ids = r#","MessageAttributes":{"onlyonce-event-id":{"Type":"String","Value":"e1"},"onlyonce-event-source":{"Type":"Binary","Value":"c2hvcA=="}}"#;
    let own: Headers = [("onlyonce-event-id", "e1"), ("onlyonce-event-source", "shop")]
        .into_iter()
        .collect();
    queue.send(r#"{"cents": 1.50}"#, &own, None).await;
    queue.send(&envelope("m1", ids), &Headers::new(), None).await;
    queue.send(&envelope("m2", ids), &Headers::new(), None).await;
    let mut source = queue.started(4).await;
    let three = some(&mut source, 3).await;
    for delivery in &three {
        assert_eq!(identity(delivery), is("shop", "e1"));
        assert_eq!(body(delivery), r#"{"cents": 1.50}"#);
    }
    ack(&mut source, three).await;

    queue.send(&envelope("m3", ""), &Headers::new(), None).await;
    let delivery = some(&mut source, 1).await.remove(0);
    assert_eq!(identity(&delivery), is("arn:aws:sns:r:1:orders", "m3"));
    ack(&mut source, [delivery]).await;
    queue.becomes(0, 0).await;
    drop(source);

    queue.send(&envelope("m4", ids), &own, None).await;
    let mut plain = started(queue.source().plain_bodies(), 4).await;
    let delivery = some(&mut plain, 1).await.remove(0);
    assert_eq!(body(&delivery), envelope("m4", ids), "as it is, when told so");
    assert_eq!(identity(&delivery), is("shop", "e1"));
    ack(&mut plain, [delivery]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_record_is_an_event_and_the_message_is_deleted_with_the_last() {
    let Some(queue) = Queue::standard().await else {
        return;
    };
    let records: Vec<String> = (1..=5)
        .map(|n| {
            format!(
                r#"{{"eventSource":"aws:s3","eventName":"ObjectCreated:Put","awsRegion":"r","s3":{{"bucket":{{"name":"b"}},"object":{{"key":"k{n}","sequencer":"0{n}"}}}}}}"#
            )
        })
        .collect();
    let message = format!(r#"{{"Records":[{}]}}"#, records.join(","));
    queue.send(&message, &Headers::new(), None).await;
    let mut source = started(queue.source().s3_records(), 8).await;
    let mut five = some(&mut source, 5).await;
    assert_eq!(bodies(&five), records);
    assert_eq!(identity(&five[4]), is("aws:s3:r:b", "b/k5@#05:ObjectCreated:Put"));
    assert_eq!(
        five[0].event.event_type.as_deref(),
        Some(&b"ObjectCreated:Put"[..])
    );
    let third = five.remove(2);
    ack(&mut source, five).await;
    nothing(&mut source, VISIBILITY + VISIBILITY / 3).await;
    queue.becomes(0, 1).await;

    // One is to come again: then all do, and four of them meet their claims.
    release(&mut source, third, None).await;
    let again = some(&mut source, 5).await;
    assert_eq!(bodies(&again), records);
    ack(&mut source, again).await;
    queue.becomes(0, 0).await;

    let test = r#"{"Service":"Amazon S3","Event":"s3:TestEvent","Time":"t","Bucket":"b","RequestId":"r","HostId":"h"}"#;
    queue.send(test, &Headers::new(), None).await;
    queue.send(r#"{"Records":[]}"#, &Headers::new(), None).await;
    let delivery = some(&mut source, 1).await.remove(0);
    assert_eq!(
        body(&delivery),
        r#"{"Records":[]}"#,
        "what is not S3's is nobody's to swallow"
    );
    ack(&mut source, [delivery]).await;
    queue.becomes(0, 0).await;
    source.stop().await.unwrap();
    closes(source).await;
}
