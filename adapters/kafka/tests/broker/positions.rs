//! Where a partition begins.

use std::time::Duration;

use onlyonce::source::{Incoming, Source, SourceError};
use onlyonce_kafka::{Kafka, KafkaBuilder, OutOfRange, StartAt};

use super::harness::{Topic, ack, bodies, closes, nothing, some, soon, start_fails, started};

async fn breaks(source: &mut Kafka) -> SourceError {
    soon(async {
        loop {
            match source.receive(4).await {
                Err(error) => return error,
                Ok(Incoming::Lost(_)) => {}
                Ok(other) => panic!("{other:?} instead of an error"),
            }
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_without_an_offset_has_to_be_told_where_to_begin() {
    let Some(topic) = Topic::of(1).await else { return };
    topic.fill(0, 1, &[]).await;
    let error = start_fails(topic.source().start_at(StartAt::Fail)).await;
    assert!(error.is_fatal(), "{error}");
    for what in [&*topic.group, "has no offset", "StartAt::Earliest"] {
        assert!(error.to_string().contains(what), "{error}");
    }
    assert_eq!(topic.committed(0).await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_comes_later_is_not_begun_anywhere_either() {
    let Some(topic) = Topic::of(1).await else { return };
    topic.fill(0, 1, &[]).await;
    let mut source = started(topic.source(), 4).await;
    let taken = some(&mut source, 1).await;
    ack(&mut source, taken).await;
    closes(source).await;
    let mut source = started(topic.source().start_at(StartAt::Fail), 4).await;
    topic.grow(2).await;
    let error = breaks(&mut source).await;
    assert!(error.is_fatal(), "{error}");
    assert!(
        error.to_string().contains(&format!("{}/1", topic.name)),
        "{error}"
    );
    assert_eq!(source.health().problem, Some(error.to_string()));
}

#[tokio::test(flavor = "multi_thread")]
async fn latest_jumps_once_and_never_again() {
    let Some(topic) = Topic::of(1).await else { return };
    topic.fill(0, 3, &[]).await;
    let latest = || topic.source().start_at(StartAt::Latest);
    let mut source = started(latest(), 4).await;
    nothing(&mut source, Duration::from_secs(2)).await;
    drop(source);
    // Nothing was ever processed; still, what comes now is not jumped over.
    topic.fill(0, 2, &[]).await;
    let mut source = started(latest(), 4).await;
    let taken = some(&mut source, 2).await;
    assert_eq!(bodies(&taken), ["1", "2"]);
    assert!(taken[0].event.origin.detail.contains("offset=3"));
    ack(&mut source, taken).await;
    closes(source).await;
}

/// A group that has done 2 of 10, of which 5 are deleted.
async fn overtaken(topic: &Topic, builder: KafkaBuilder) -> Kafka {
    topic.fill(0, 10, &[]).await;
    let mut source = started(topic.source(), 4).await;
    let taken = some(&mut source, 2).await;
    ack(&mut source, taken).await;
    closes(source).await;
    topic.delete_before(0, 5).await;
    started(builder, 4).await
}

#[tokio::test(flavor = "multi_thread")]
async fn records_that_were_deleted_unread_stop_the_source_with_an_explanation() {
    let Some(topic) = Topic::of(1).await else { return };
    let mut source = overtaken(&topic, topic.source()).await;
    let error = breaks(&mut source).await;
    assert!(error.is_fatal(), "{error}");
    assert!(error.to_string().contains("3 offsets were deleted"), "{error}");
    assert_eq!(topic.committed(0).await, Some(2), "nothing was skipped");
}

#[tokio::test(flavor = "multi_thread")]
async fn by_a_policy_it_goes_on_without_them() {
    let Some(topic) = Topic::of(1).await else { return };
    let builder = topic.source().out_of_range(OutOfRange::Earliest);
    let mut source = overtaken(&topic, builder).await;
    let taken = some(&mut source, 5).await;
    assert_eq!(bodies(&taken), ["6", "7", "8", "9", "10"]);
    ack(&mut source, taken).await;
    closes(source).await;
    assert_eq!(topic.committed(0).await, Some(10));
}
