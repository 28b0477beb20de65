//! Whole consumers, as the database sees them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use onlyonce::event::Headers;
use onlyonce::{Bytes, Consumer, Context, Event, Handler, HandlerError, RetryPolicy, async_trait};
use sqlx::Postgres;

use super::database::*;
use super::harness::*;
use super::proxy::Proxy;

type Runs = Arc<Mutex<BTreeMap<String, u32>>>;

/// Writes the end of each body, and fails the first runs of some.
#[derive(Clone)]
struct Apply {
    database: Database,
    runs: Runs,
    /// How often the event with this name in its body fails.
    fails: &'static [(&'static str, u32)],
    takes: Duration,
}

impl Apply {
    fn new(database: &Database) -> Self {
        Self {
            database: database.clone(),
            runs: Runs::default(),
            fails: &[],
            takes: Duration::ZERO,
        }
    }

    fn runs(&self) -> BTreeMap<String, u32> {
        self.runs.lock().unwrap().clone()
    }
}

#[async_trait]
impl Handler<Postgres> for Apply {
    type Payload = Bytes;

    async fn handle(&self, cx: &mut Context<'_, Postgres>, event: Event<Bytes>) -> Result<(), HandlerError> {
        let runs = {
            let mut runs = self.runs.lock().unwrap();
            let runs = runs.entry(event.identity.id.clone()).or_default();
            *runs += 1;
            *runs
        };
        tokio::time::sleep(self.takes).await;
        let body = String::from_utf8_lossy(&event.payload);
        if self
            .fails
            .iter()
            .any(|(name, times)| body.contains(name) && runs <= *times)
        {
            return Err("not now".into());
        }
        self.database.insert(cx.tx(), &event.identity.id).await?;
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_record_of_a_message_pays_for_itself() {
    let (Some(queue), Some(dead), Some(database)) = (
        Queue::standard().await,
        Queue::standard().await,
        Database::fresh().await,
    ) else {
        return;
    };
    queue.redrives_to(&dead, 10).await;
    let records: Vec<String> = (1..=5)
        .map(|n| {
            format!(
                r#"{{"eventSource":"aws:s3","eventName":"e","awsRegion":"r","s3":{{"bucket":{{"name":"b"}},"object":{{"key":"r{n}","sequencer":"0"}}}}}}"#
            )
        })
        .collect();
    let calls = Proxy::before(&queue.endpoint).await;
    let handler = Apply {
        fails: &[(r#""r3""#, 2), (r#""r5""#, u32::MAX)],
        ..Apply::new(&database)
    };
    let consumer = Consumer::builder("tests", database.store())
        .source(queue.source_at(&calls.url).s3_records().build().unwrap())
        .handler(handler.clone())
        // Twice in place, then from the inbox.
        .retry(
            RetryPolicy::none()
                .immediate(1)
                .delays([Duration::from_millis(100)]),
        );
    let running = Running::start(consumer);
    let message = format!(r#"{{"Records":[{}]}}"#, records.join(","));
    queue.send(&message, &Headers::new(), None).await;
    database.has_dead(1).await;
    database.has_effects(4).await;
    queue.becomes(0, 0).await;
    running.stop().await;

    let id = |n: u32| format!("b/r{n}@#0:e");
    let expected: Vec<String> = (1..=4).map(id).collect();
    assert_eq!(database.effects().await, expected, "each once");
    assert_eq!(database.dead().await, [(id(5), 3)], "it alone");
    let runs: Vec<u32> = (1..=5).map(|n| handler.runs()[&id(n)]).collect();
    assert_eq!(runs, [1, 1, 3, 1, 3]);
    assert_eq!(calls.calls("DeleteMessageBatch"), 1, "the message, once");
    let depth = dead.depth().await;
    assert_eq!((depth.waiting, depth.unacked), (0, 0), "SQS moved nothing away");
    database.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_that_comes_by_itself_and_twice_by_sns_runs_once() {
    let (Some(queue), Some(database)) = (Queue::standard().await, Database::fresh().await) else {
        return;
    };
    let wrapped = r#"{"Type":"Notification","MessageId":"m","TopicArn":"arn:aws:sns:r:1:orders","Message":"{}","Timestamp":"t","MessageAttributes":{"onlyonce-event-id":{"Type":"String","Value":"e1"},"onlyonce-event-source":{"Type":"String","Value":"shop"}}}"#;
    let own: Headers = [("onlyonce-event-id", "e1"), ("onlyonce-event-source", "shop")]
        .into_iter()
        .collect();
    queue.send("{}", &own, None).await;
    queue.send(wrapped, &Headers::new(), None).await;
    queue.send(wrapped, &Headers::new(), None).await;
    let handler = Apply::new(&database);
    let consumer = Consumer::builder("tests", database.store())
        .source(queue.source().build().unwrap())
        .handler(handler.clone());
    let running = Running::start(consumer);
    queue.becomes(0, 0).await;
    running.stop().await;
    assert_eq!(database.effects().await, ["e1"]);
    assert_eq!(handler.runs(), BTreeMap::from([("e1".to_owned(), 1)]));
    database.end().await;
}

/// What waits behind slow ones is kept for longer than its visibility, so that a second process with
/// nothing to do never gets it.
#[tokio::test(flavor = "multi_thread")]
async fn what_waits_for_a_lane_runs_once_with_a_second_consumer_beside() {
    let (Some(queue), Some(database)) = (Queue::standard().await, Database::fresh().await) else {
        return;
    };
    queue.fill("", 10).await;
    let consumer = |handler: &Apply| {
        Consumer::builder("tests", database.store())
            .source(queue.source().build().unwrap())
            .handler(handler.clone())
            .lanes(1)
            .window(10)
    };
    let slow = Apply {
        takes: Duration::from_secs(1),
        ..Apply::new(&database)
    };
    let idle = Apply::new(&database);
    let first = Running::start(consumer(&slow));
    queue.becomes(0, 10).await;
    let began = Instant::now();
    let second = Running::start(consumer(&idle));
    queue.becomes(0, 0).await;
    assert!(began.elapsed() > VISIBILITY * 2, "{:?}", began.elapsed());
    first.stop().await;
    second.stop().await;
    assert_eq!(database.effects().await.len(), 10);
    assert!(slow.runs().len() == 10 && slow.runs().values().all(|runs| *runs == 1));
    assert!(idle.runs().is_empty(), "{:?}", idle.runs());
    database.end().await;
}
