//! What is found out before consuming.

use std::time::Duration;

use aws_sdk_sqs::types::QueueAttributeName;
use onlyonce::source::{Plan, Source};
use onlyonce::{Bytes, Consumer, Context, Event, Handler, HandlerError, RetryPolicy, async_trait};
use sqlx::Postgres;

use super::database::*;
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
    plan.dedup_window = Some(Duration::from_secs(7 * 24 * 3600));
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
    let strict = |queue: &Queue| {
        let unhurried = queue.source().visibility_timeout(Duration::from_secs(30));
        unhurried.strict_checks().build().unwrap()
    };
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

struct Nothing;

#[async_trait]
impl Handler<Postgres> for Nothing {
    type Payload = Bytes;

    async fn handle(&self, _: &mut Context<'_, Postgres>, _: Event<Bytes>) -> Result<(), HandlerError> {
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_with_more_attempts_than_the_queue_has_receives_is_told() {
    let (Some(queue), Some(dead), Some(database)) = (
        Queue::standard().await,
        Queue::standard().await,
        Database::fresh().await,
    ) else {
        return;
    };
    queue.redrives_to(&dead, 6).await;
    let unhurried = || queue.source().visibility_timeout(Duration::from_secs(30));
    let consumer = |retries| {
        Consumer::builder("tests", database.store())
            .source(unhurried().strict_checks().build().unwrap())
            .handler(Nothing)
            .retry(RetryPolicy::new().immediate(retries))
    };
    queue.fill("", 1).await;
    let suits = Running::start(consumer(3));
    queue.becomes(0, 0).await;
    suits.stop().await;
    let refused = consumer(4).build().unwrap();
    let error = soon(refused.run_until(std::future::pending())).await.unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("after 6 receives") && text.contains("to 7 or more"),
        "{text}"
    );
    database.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_visibility_that_one_silent_call_uses_up_is_refused_when_strict() {
    let (Some(queue), Some(dead)) = (Queue::standard().await, Queue::standard().await) else {
        return;
    };
    queue.redrives_to(&dead, 10).await;
    let visible = |seconds| {
        let source = queue.source().visibility_timeout(Duration::from_secs(seconds));
        source
            .call_timeout(Duration::from_secs(2))
            .strict_checks()
            .build()
            .unwrap()
    };
    let plan = Plan::for_window("tests", 4);
    let error = soon(visible(5).start(&plan)).await.unwrap_err();
    assert!(
        error.is_fatal() && error.to_string().contains("to 6s or more"),
        "{error}"
    );
    soon(visible(6).start(&plan)).await.unwrap();
}
