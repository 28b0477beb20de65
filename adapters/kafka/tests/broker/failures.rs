//! Topics that are not there, brokers that do not answer.

use std::time::Duration;

use onlyonce::source::{Incoming, Plan, Source};
use onlyonce_kafka::{Kafka, OrderingKey};

use super::harness::{Topic, ack, bodies, brokers, closes, some, soon, start_fails, started, unique};

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_topic_is_named() {
    let Some(brokers) = brokers() else { return };
    let name = unique("nowhere");
    let error = start_fails(Kafka::group(&brokers, "g").topic(&name)).await;
    assert!(error.is_fatal(), "{error}");
    assert!(error.to_string().contains(&name), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_is_away_is_no_reason_to_give_up() {
    let builder = Kafka::group("127.0.0.1:1", "g")
        .topic("t")
        .connect_timeout(Duration::from_millis(500));
    let error = start_fails(builder).await;
    assert!(!error.is_fatal(), "{error}");
    assert!(error.to_string().contains("127.0.0.1:1"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_is_deleted_is_told_and_comes_back() {
    let Some(topic) = Topic::of(1).await else { return };
    topic.fill(0, 2, &[]).await;
    let mut source = started(topic.source(), 4).await;
    let mut taken = some(&mut source, 2).await;
    topic.delete().await;
    let error = soon(async {
        loop {
            match source.receive(4).await {
                Err(error) => return error,
                Ok(Incoming::Lost(_)) => {
                    let taken = taken.drain(..).map(|delivery| delivery.release(None));
                    source.settle(taken.collect()).await.unwrap();
                }
                Ok(other) => panic!("{other:?}"),
            }
        }
    })
    .await;
    assert!(
        error.is_fatal() && error.to_string().contains(&topic.name),
        "{error}"
    );
    topic.create(1, &[]).await;
    topic.fill(0, 1, &[]).await;
    let again = soon(async {
        loop {
            match source.receive(4).await {
                Ok(Incoming::Deliveries(deliveries)) => return deliveries,
                Ok(Incoming::Lost(_)) | Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
                Ok(other) => panic!("{other:?}"),
            }
        }
    })
    .await;
    assert_eq!(bodies(&again), ["1"]);
    ack(&mut source, again).await;
    closes(source).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pattern_finds_topics_that_come_later() {
    let Some(first) = Topic::of(1).await else { return };
    let pattern = format!("^{}.*", first.name);
    let builder = harness_pattern(&first, &pattern);
    let mut source = started(builder, 8).await;
    first.fill(0, 1, &[]).await;
    let taken = some(&mut source, 1).await;
    ack(&mut source, taken).await;
    let second = first.sibling("later").await;
    second.fill(0, 2, &[]).await;
    let taken = some(&mut source, 2).await;
    assert!(taken.iter().all(|d| *d.event.origin.destination == *second.name));
    ack(&mut source, taken).await;
    closes(source).await;
}

fn harness_pattern(topic: &Topic, pattern: &str) -> onlyonce_kafka::KafkaBuilder {
    let builder = Kafka::group(&topic.brokers, &topic.group)
        .topic_pattern(pattern)
        .start_at(onlyonce_kafka::StartAt::Earliest);
    super::harness::QUICK
        .into_iter()
        .fold(builder, |builder, (name, value)| builder.set(name, value))
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_kept_longer_than_remembered_is_refused_by_strict_checks() {
    let Some(topic) = Topic::with(1, &[("retention.ms", "172800000")]).await else {
        return;
    };
    let mut plan = Plan::for_window("tests", 4);
    plan.dedup_window = Some(Duration::from_secs(24 * 60 * 60));
    let mut strict = topic.source().strict_checks().build().unwrap();
    let error = soon(strict.start(&plan)).await.unwrap_err();
    assert!(
        error.is_fatal() && error.to_string().contains("retention.ms"),
        "{error}"
    );
    plan.dedup_window = Some(Duration::from_secs(3 * 24 * 60 * 60));
    let mut strict = topic.source().strict_checks().build().unwrap();
    soon(strict.start(&plan)).await.unwrap();
    closes(strict).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lanes_that_never_work_are_refused_by_strict_checks() {
    let Some(topic) = Topic::of(2).await else { return };
    let ordered = || {
        topic
            .source()
            .ordering_key(OrderingKey::Partition)
            .strict_checks()
    };
    let error = start_fails(ordered()).await;
    assert!(
        error.is_fatal() && error.to_string().contains("there are 4 lanes"),
        "{error}"
    );
    closes(started(ordered(), 2).await).await;
}
