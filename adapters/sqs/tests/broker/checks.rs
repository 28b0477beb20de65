//! What is found out before consuming.

use aws_sdk_sqs::types::QueueAttributeName;
use onlyonce::source::{Plan, Source};

use super::harness::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_is_not_there_is_fatal() {
    let Some(queue) = Queue::standard().await else {
        return;
    };
    let url = format!("{}-nope", queue.url);
    let mut source = onlyonce_sqs::Sqs::queue(queue.client.clone(), &url)
        .build()
        .unwrap();
    let error = soon(source.start(&Plan::for_window("tests", 4)))
        .await
        .unwrap_err();
    assert!(error.is_fatal(), "{error}");
    let text = error.to_string();
    assert!(text.contains(&url) && text.contains(GONE), "{text}");
    assert_eq!(source.health().problem, Some(text));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retention_longer_than_the_memory_of_identities_is_refused() {
    if variable("ONLYONCE_SQS_EMULATOR").as_deref() == Some("elasticmq") {
        println!("skipped: ElasticMQ has no MessageRetentionPeriod");
        return;
    }
    let retention = (QueueAttributeName::MessageRetentionPeriod, "1209600".to_owned());
    let Some(queue) = Queue::create("", &[retention]).await else {
        return;
    };
    let mut plan = Plan::for_window("tests", 4);
    plan.dedup_window = Some(std::time::Duration::from_secs(7 * 24 * 3600));
    let mut source = queue.source().build().unwrap();
    let error = soon(source.start(&plan)).await.unwrap_err();
    assert!(error.is_fatal(), "{error}");
    assert!(error.to_string().contains("14 days"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_queue_is_seen_and_a_missing_one_refused_when_strict() {
    let (Some(queue), Some(dead)) = (Queue::standard().await, Queue::standard().await) else {
        return;
    };
    let strict = |queue: &Queue| queue.source().strict_checks().build().unwrap();
    let plan = Plan::for_window("tests", 4);
    let error = soon(strict(&queue).start(&plan)).await.unwrap_err();
    assert!(
        error.is_fatal() && error.to_string().contains("RedrivePolicy"),
        "{error}"
    );

    queue.redrives_to(&dead, 10).await;
    let mut source = strict(&queue);
    assert!(!source.capabilities().native_dead_letters);
    soon(source.start(&plan)).await.unwrap();
    assert!(source.capabilities().native_dead_letters);
    assert_eq!(source.health().backlog, Some(0));
}
