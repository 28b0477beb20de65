//! What arrives, and how it says where it has been.

use lapin::BasicProperties;
use lapin::types::{AMQPValue, DecimalValue, FieldArray, FieldTable};
use onlyonce::event::IdentityRules;
use onlyonce::source::{Redelivery, Source};
use onlyonce_rabbitmq::OrderingKey;

use super::harness::*;

fn table(entries: Vec<(&str, AMQPValue)>) -> FieldTable {
    let mut table = FieldTable::default();
    entries.into_iter().for_each(|(name, value)| {
        table.insert(name.into(), value);
    });
    table
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_of_every_kind_and_all_properties_arrive() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let nested = table(vec![
        ("n", AMQPValue::LongLongInt(-1)),
        ("t", AMQPValue::LongString("x".into())),
    ]);
    let headers = table(vec![
        (
            "array",
            AMQPValue::FieldArray(FieldArray::from(vec![
                AMQPValue::FieldTable(nested),
                AMQPValue::Void,
            ])),
        ),
        ("bool", AMQPValue::Boolean(false)),
        ("bytes", AMQPValue::ByteArray(vec![0, 255].into())),
        (
            "decimal",
            AMQPValue::DecimalValue(DecimalValue { scale: 1, value: 123 }),
        ),
        ("double", AMQPValue::Double(-0.5)),
        ("long", AMQPValue::LongLongInt(i64::MIN)),
        ("raw", AMQPValue::LongString(vec![0xff, 0xfe].into())),
        ("small", AMQPValue::ShortShortInt(-8)),
        ("text", AMQPValue::LongString("grüße".into())),
        ("time", AMQPValue::Timestamp(1_700_000_000)),
        ("void", AMQPValue::Void),
    ]);
    let properties = BasicProperties::default()
        .with_headers(headers)
        .with_message_id("evt-1".into())
        .with_app_id("shop".into())
        .with_type("order.paid".into())
        .with_content_type("application/json".into())
        .with_timestamp(1_700_000_001);
    queue.publish(b"{}", properties).await;

    let mut source = queue.started(1).await;
    let delivery = one(&mut source).await;
    let event = &delivery.event;
    for (name, value) in [
        ("array", &br#"[{"n":-1,"t":"x"},null]"#[..]),
        ("bool", b"false"),
        ("bytes", b"\x00\xff"),
        ("decimal", b"12.3"),
        ("double", b"-0.5"),
        ("long", b"-9223372036854775808"),
        ("raw", b"\xff\xfe"),
        ("small", b"-8"),
        ("text", "grüße".as_bytes()),
        ("time", b"1700000000"),
        ("content-type", b"application/json"),
    ] {
        assert_eq!(event.headers.get(name), Some(value), "{name}");
    }
    assert_eq!(event.headers.all("void").collect::<Vec<_>>(), [None]);
    assert_eq!(event.event_type.as_deref(), Some(&b"order.paid"[..]));
    assert_eq!(event.time_ms, Some(1_700_000_001_000));
    assert_eq!(event.payload.as_deref(), Some(&b"{}"[..]));
    assert_eq!(event.origin.system, "rabbitmq");
    assert_eq!(*event.origin.destination, *queue.name);
    assert_eq!(
        *event.origin.detail,
        *format!("exchange=\"\" routing-key={} message-id=evt-1", queue.name)
    );
    let identity = IdentityRules::auto().identify(event).unwrap();
    assert_eq!(
        (identity.source.as_str(), identity.id.as_str()),
        ("shop", "evt-1")
    );
    assert_eq!(delivery.redelivery, Redelivery::No);
    ack(&mut source, [delivery]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_without_id_has_no_identity() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    queue.publish(b"", BasicProperties::default()).await;
    let mut source = started(queue.source().ordering_key(OrderingKey::RoutingKey), 1).await;
    let delivery = one(&mut source).await;
    assert!(IdentityRules::auto().identify(&delivery.event).is_err());
    assert_eq!(
        delivery.event.payload.as_deref(),
        Some(&b""[..]),
        "an empty body is not a null one"
    );
    assert_eq!(delivery.event.key.as_deref(), Some(queue.name.as_bytes()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_delivery_says_so() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    queue.fill(1).await;
    let mut source = queue.started(1).await;
    let first = one(&mut source).await;
    assert_eq!(first.redelivery, Redelivery::No);
    release(&mut source, first, None).await;
    let second = one(&mut source).await;
    assert_eq!(second.redelivery, Redelivery::Yes);
    assert_eq!(body(&second), "1");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quorum_queue_says_how_often() {
    let Some(queue) = Queue::quorum().await else {
        return;
    };
    queue.fill(1).await;
    let mut source = queue.started(1).await;
    assert_eq!(one(&mut source).await.redelivery, Redelivery::No);
    // A consumer that dies counts in every version of the broker.
    for times in 1..=3 {
        drop(source);
        source = queue.started(1).await;
        assert_eq!(one(&mut source).await.redelivery, Redelivery::Times(times));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_is_what_waits_and_never_more_than_asked_for() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    queue.fill(10).await;
    let mut source = queue.started(10).await;
    let first = some(&mut source, 4).await;
    assert_eq!(bodies(&first), ["1", "2", "3", "4"]);
    let rest = some(&mut source, 6).await;
    assert_eq!(bodies(&rest), ["5", "6", "7", "8", "9", "10"]);
    ack(&mut source, first.into_iter().chain(rest)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_prefetch_bounds_what_leaves_the_queue() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    queue.fill(20).await;
    let mut source = queue.started(3).await;
    queue.becomes_ready(17).await;
    let three = some(&mut source, 3).await;
    nothing(&mut source, std::time::Duration::from_millis(200)).await;
    assert_eq!(queue.ready().await, 17);
    ack(&mut source, three).await;
    assert_eq!(some(&mut source, 3).await.len(), 3);
    assert_eq!(source.health().backlog, Some(20), "as it was at the start");
}

#[tokio::test(flavor = "multi_thread")]
async fn dropping_a_receive_loses_nothing() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let mut source = queue.started(50).await;
    let publishing = async {
        queue.fill(200).await;
    };
    let receiving = async {
        let mut seen = Vec::new();
        while seen.len() < 200 {
            let mut got = Vec::new();
            // Dropped at any point, mostly while it waits.
            tokio::select! {
                biased;
                incoming = source.receive(7) => match incoming.unwrap() {
                    onlyonce::source::Incoming::Deliveries(deliveries) => got = deliveries,
                    other => panic!("{other:?}"),
                },
                () = tokio::task::yield_now() => {}
            }
            seen.extend(bodies(&got));
            ack(&mut source, got).await;
        }
        seen
    };
    let ((), seen) = soon(async { tokio::join!(publishing, receiving) }).await;
    assert_eq!(seen, (1..=200).map(|n| n.to_string()).collect::<Vec<_>>());
}
