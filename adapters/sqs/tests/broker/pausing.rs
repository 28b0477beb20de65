//! While the database is away: nothing is taken, and what is held is given back once.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::{Duration, Instant};

use onlyonce::source::Source;
use onlyonce::{Bytes, Consumer, Context, Event, Handler, HandlerError, async_trait};
use sqlx::Postgres;
use tokio::sync::Notify;

use super::database::*;
use super::harness::*;
use super::proxy::Proxy;

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_gives_back_what_was_not_handed_out_once_and_takes_nothing() {
    let Some(queue) = Queue::standard().await else {
        return;
    };
    let proxy = Proxy::before(&queue.endpoint).await;
    queue.fill("", 10).await;
    let mut source = started(queue.source_at(&proxy.url), 10).await;
    let mut three = some(&mut source, 3).await;
    three.extend(some(&mut source, 1).await);
    source.pause().await.unwrap();
    queue.becomes(6, 4).await;
    source.pause().await.unwrap();
    nothing_without_room(&mut source, VISIBILITY).await;
    let calls = proxy.calls("ReceiveMessage");
    nothing_without_room(&mut source, Duration::from_secs(2)).await;
    assert_eq!(proxy.calls("ReceiveMessage"), calls, "nothing is asked for");
    queue.becomes(6, 4).await;
    ack(&mut source, three).await;
    let rest = some(&mut source, 6).await;
    ack(&mut source, rest).await;
    queue.becomes(0, 0).await;
}

/// As the loop listens while it is paused.
async fn nothing_without_room(source: &mut onlyonce_sqs::Sqs, during: Duration) {
    if let Ok(incoming) = tokio::time::timeout(during, source.receive(0)).await {
        panic!("{incoming:?} instead of nothing");
    }
}

/// One row for each run; says when the third one is under way.
struct Insert {
    database: Database,
    third: Arc<Notify>,
    runs: AtomicU32,
}

#[async_trait]
impl Handler<Postgres> for Insert {
    type Payload = Bytes;

    async fn handle(&self, cx: &mut Context<'_, Postgres>, event: Event<Bytes>) -> Result<(), HandlerError> {
        if self.runs.fetch_add(1, SeqCst) == 2 {
            self.third.notify_one();
        }
        self.database.insert(cx.tx(), &event.identity.id).await?;
        Ok(())
    }
}

/// SQS moves a message away after the third receive. An outage of the database, however long, uses up
/// one: `ONLYONCE_OUTAGE_SECONDS` (default 8) is how long this one is.
#[tokio::test(flavor = "multi_thread")]
async fn an_outage_of_the_database_sends_nothing_to_the_dead_letter_queue() {
    let (Some(queue), Some(dead), Some(database)) = (
        Queue::standard().await,
        Queue::standard().await,
        Database::fresh().await,
    ) else {
        return;
    };
    let outage = std::env::var("ONLYONCE_OUTAGE_SECONDS").map_or(8, |seconds| seconds.parse().unwrap());
    let outage = Duration::from_secs(outage);
    queue.redrives_to(&dead, 3).await;
    let count = 40;
    queue.fill("", count).await;

    let (head, rest) = database.url.split_once('@').unwrap();
    let (address, name) = rest.split_once('/').unwrap();
    let cable = Proxy::before(&format!("http://{address}")).await;
    let through = format!("{head}@{}/{name}", cable.url.trim_start_matches("http://"));

    let calls = Proxy::before(&queue.endpoint).await;
    let third = Arc::new(Notify::new());
    let consumer = Consumer::builder("tests", database.store_at(&through))
        .source(queue.source_at(&calls.url).build().unwrap())
        .handler(Insert {
            database: database.clone(),
            third: third.clone(),
            runs: AtomicU32::new(0),
        })
        .lanes(2)
        .window(20)
        .keep_while_paused(outage / 4);
    let running = Running::start(consumer);

    third.notified().await;
    cable.cut();
    let began = Instant::now();
    // First all is kept, and nothing more is taken; then all is given back.
    while queue.depth().await.unacked > 0 {
        assert!(
            began.elapsed() < outage / 2 + SOON,
            "what is held is not given back"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let kept = began.elapsed();
    assert!(kept >= outage / 8, "given back after {kept:?}");
    let received = calls.calls("ReceiveMessage");
    tokio::time::sleep(outage.saturating_sub(kept)).await;
    assert_eq!(
        calls.calls("ReceiveMessage"),
        received,
        "while it was away nothing was asked for"
    );
    cable.mend();

    queue.becomes(0, 0).await;
    running.stop().await;
    let effects = database.effects().await;
    let ids: HashSet<&String> = effects.iter().collect();
    assert_eq!((effects.len(), ids.len()), (count as usize, count as usize));
    let dead = dead.depth().await;
    assert_eq!((dead.waiting, dead.unacked), (0, 0), "SQS gave up on a message");
    database.end().await;
}
