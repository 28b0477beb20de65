//! Retention: the dedup window is kept to the row, and the purge costs little.

use std::time::Duration;

use onlyonce::Supervisor;
use onlyonce::store::{Operations, PostgresStore, PurgeCursor};
use onlyonce::testing::{Broker, deliver, event};

use crate::running::{Running, built, until};
use crate::stage::{Scripted, Stage, TestStore, soon};

const DAY: Duration = Duration::from_secs(86_400);

on_each_store!(
    batches_are_bounded_and_go_on_where_the_last_one_ended,
    only_old_events_of_this_consumer_are_purged,
    several_purgers_share_the_work,
    a_supervisor_purges_by_itself,
    an_identity_inside_the_window_is_a_duplicate_and_past_it_is_new,
);

/// Claims of `consumer` with ids `prefix0`, `prefix1`, .., processed `days` ago.
async fn claims<S: TestStore>(
    stage: &Stage<S>,
    consumer: &str,
    kind: &str,
    prefix: &str,
    count: usize,
    days: u32,
) {
    let postgres = format!(
        "INSERT INTO {{s}}.processed_events (event_key, kind, consumer, source, event_id, payload_hash, outcome, processed_at)
         SELECT gen_random_uuid(), '{kind}', '{consumer}', 's', '{prefix}' || n, '', 'processed',
                now() - interval '{days} days' + n * interval '1 millisecond'
           FROM generate_series(1, {count}) AS n"
    );
    let sqlite = format!(
        "WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {count})
         INSERT INTO onlyonce_processed_events
                (event_key, kind, consumer, source, event_id, payload_hash, outcome, processed_at)
         SELECT randomblob(16), '{kind}', '{consumer}', 's', '{prefix}' || n, x'', 'processed',
                CAST(unixepoch('subsec') * 1000000 AS INTEGER) - {days} * 86400000000 + n * 1000
           FROM s"
    );
    stage.execute(&postgres, &sqlite).await;
}

async fn all<S: TestStore>(stage: &Stage<S>) -> i64 {
    stage
        .number(
            "SELECT count(*) FROM {s}.processed_events",
            "SELECT count(*) FROM onlyonce_processed_events",
        )
        .await
}

async fn batches_are_bounded_and_go_on_where_the_last_one_ended<S: TestStore>(stage: Stage<S>) {
    claims(&stage, "c", "event", "old", 25, 40).await;
    claims(&stage, "c", "event", "new", 5, 1).await;
    let mut cursor = PurgeCursor::default();
    let (mut rows, mut ends) = (Vec::new(), Vec::new());
    loop {
        let purged = stage.store.purge("c", 30 * DAY, 10, cursor).await.unwrap();
        rows.push(purged.rows);
        assert_ne!(purged.next, cursor, "it moves on");
        ends.push(cursor);
        cursor = purged.next;
        if rows.len() < 3 {
            let days = purged.lag.as_secs() / 86_400;
            assert!(purged.more && (9..=10).contains(&days), "{:?}", purged.lag);
        }
        if !purged.more {
            assert_eq!(purged.lag, Duration::ZERO);
            break;
        }
    }
    assert_eq!(rows, [10, 10, 5]);
    assert_eq!(all(&stage).await, 5);

    // What lies before the cursor is not looked for again in this pass, and is found in the next.
    claims(&stage, "c", "event", "older", 3, 50).await;
    let purged = stage.store.purge("c", 30 * DAY, 10, cursor).await.unwrap();
    assert_eq!((purged.rows, purged.next), (0, cursor));
    let purged = stage
        .store
        .purge("c", 30 * DAY, 10, PurgeCursor::default())
        .await
        .unwrap();
    assert_eq!(purged.rows, 3);
    stage.end().await;
}

async fn only_old_events_of_this_consumer_are_purged<S: TestStore>(stage: Stage<S>) {
    claims(&stage, "c", "event", "old", 10, 31).await;
    claims(&stage, "c", "event", "new", 10, 29).await;
    claims(&stage, "c", "once", "fact", 10, 400).await;
    claims(&stage, "other", "event", "old", 10, 31).await;
    let purged = stage
        .store
        .purge("c", 30 * DAY, 1000, PurgeCursor::default())
        .await
        .unwrap();
    assert_eq!((purged.rows, purged.more), (10, false));
    let left = stage.processed("c").await;
    assert_eq!(left.len(), 10);
    assert!(left.iter().all(|(id, _)| id.starts_with("new")));
    assert_eq!(stage.processed("other").await.len(), 10);
    assert_eq!(all(&stage).await, 30, "business claims stay");
    stage.end().await;
}

async fn several_purgers_share_the_work<S: TestStore>(stage: Stage<S>) {
    claims(&stage, "c", "event", "old", 2000, 31).await;
    claims(&stage, "c", "event", "new", 500, 29).await;
    let mut purgers = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let open = S::another(&stage);
        purgers.spawn(async move {
            let store = open.await;
            let mut deleted = 0;
            // Until nothing is left: what another one has locked is skipped, and may come free again.
            loop {
                let purged = store
                    .purge("c", 30 * DAY, 50, PurgeCursor::default())
                    .await
                    .unwrap();
                deleted += purged.rows;
                if purged.rows == 0 {
                    return deleted;
                }
            }
        });
    }
    let mut deleted = 0;
    while let Some(purger) = soon("the purge", purgers.join_next()).await {
        deleted += purger.unwrap();
    }
    assert_eq!(deleted, 2000, "each row is one purger's");
    assert_eq!(all(&stage).await, 500);
    stage.end().await;
}

async fn a_supervisor_purges_by_itself<S: TestStore>(stage: Stage<S>) {
    claims(&stage, "c", "event", "old", 100, 31).await;
    claims(&stage, "c", "event", "new", 7, 29).await;
    let (handler, _) = Scripted::applies(&stage);
    let broker = Broker::new();
    let consumer = stage.consumer("c").source(broker.source()).handler(handler);
    let supervisor = Supervisor::builder()
        .consumer(built(consumer))
        .purge_every(Duration::from_millis(100))
        .purge_batch(30)
        .build()
        .unwrap();
    let running = Running::of(supervisor);
    for n in 0..20 {
        broker.publish(event(format!("x{n}"), "1"));
    }
    soon("the acks", broker.drained()).await;
    until("the purge", async || all(&stage).await == 27).await;
    let left = stage.processed("c").await;
    assert!(left.iter().all(|(id, _)| !id.starts_with("old")));
    running.stop().await;
    assert_eq!(all(&stage).await, 27);
    stage.end().await;
}

async fn an_identity_inside_the_window_is_a_duplicate_and_past_it_is_new<S: TestStore>(stage: Stage<S>) {
    let run = async || {
        let (handler, runs) = Scripted::applies(&stage);
        deliver(stage.consumer("c").handler(handler), [event("x", "1")])
            .await
            .unwrap();
        runs.total()
    };
    let age = async |days: u32| {
        let (postgres, sqlite) = (
            format!("UPDATE {{s}}.processed_events SET processed_at = now() - interval '{days} days'"),
            format!(
                "UPDATE onlyonce_processed_events
                    SET processed_at = CAST(unixepoch('subsec') * 1000000 AS INTEGER) - {days} * 86400000000"
            ),
        );
        stage.execute(&postgres, &sqlite).await;
        stage
            .store
            .purge("c", 30 * DAY, 10, PurgeCursor::default())
            .await
            .unwrap()
            .rows
    };
    assert_eq!(run().await, 1);
    assert_eq!((age(29).await, run().await), (0, 0));
    assert_eq!((age(31).await, run().await), (1, 1));
    stage.end().await;
}

/// Ten old rows among fifty thousand: the index finds them, the table is not read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_purge_reads_the_index_and_not_the_table() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    claims(&stage, "c", "event", "new", 50_000, 1).await;
    claims(&stage, "c", "event", "old", 10, 31).await;
    stage.execute("VACUUM ANALYZE {s}.processed_events", "").await;
    let scans =
        "SELECT seq_scan FROM pg_stat_user_tables WHERE schemaname = '{s}' AND relname = 'processed_events'";
    let searches = "SELECT idx_scan FROM pg_stat_user_indexes
                     WHERE schemaname = '{s}' AND indexrelname = 'processed_events_purge'";
    let (scanned, searched) = (stage.number(scans, "").await, stage.number(searches, "").await);
    let store = stage.options().connect().unwrap();
    let purged = store
        .purge("c", 30 * DAY, 1000, PurgeCursor::default())
        .await
        .unwrap();
    assert_eq!(purged.rows, 10);
    // A session reports its statistics when it ends.
    drop(store);
    until("the statistics", async || {
        stage.number(searches, "").await > searched
    })
    .await;
    assert_eq!(
        stage.number(scans, "").await,
        scanned,
        "the table was read from end to end"
    );
    stage.end().await;
}
