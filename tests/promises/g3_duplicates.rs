//! G3: a duplicate never runs the handler.

use std::sync::Arc;
use std::time::Duration;

use onlyonce::inbox::{InboxSource, Queue};
use onlyonce::store::{Isolation, PostgresStore};
use onlyonce::testing::{Broker, deliver, event};
use onlyonce::{OnMismatch, Ordering, RetryPolicy, Supervisor};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};
use tokio::sync::Notify;

use crate::running::{Running, until};
use crate::stage::{Act, Eyes, Runs, Scripted, Stage, TestStore, events, postgres_url, soon};

on_each_store!(
    copies_run_once,
    copies_over_many_lanes_and_instances_run_once,
    each_consumer_has_its_own_claims,
    three_consumers_in_one_process_each_apply_every_event,
    a_batch_blames_the_right_one,
    an_identity_that_stands_twice_in_a_batch_runs_once,
    a_copy_waits_for_the_first_and_is_a_duplicate_when_it_commits,
    a_copy_waits_for_the_first_and_runs_when_it_rolls_back,
    a_copy_that_waited_too_long_is_given_back_and_comes_again,
    another_payload_under_a_processed_identity_is_what_the_rule_says,
    every_payload_of_a_batch_is_compared_with_what_was_processed,
    another_identity_with_the_same_digest_is_a_dead_letter_and_no_duplicate,
    a_row_of_the_queue_that_must_not_run_becomes_one_letter,
    a_good_copy_of_a_dead_event_runs_and_finishes_its_letter,
    a_good_copy_of_a_waiting_event_runs_and_removes_its_row,
    a_good_copy_is_not_swallowed_by_the_bad_one_beside_it,
    a_copy_that_fails_is_kept_with_the_letter_and_does_not_run_again,
);

async fn copies_run_once<S: TestStore>(stage: Stage<S>) {
    let (handler, runs) = Scripted::applies(&stage);
    let copies: Vec<_> = (0..4).flat_map(|_| events(10)).collect();
    let report = deliver(stage.consumer("c").handler(handler), copies)
        .await
        .unwrap();
    assert_eq!((report.acked, runs.total()), (40, 10));
    assert!(stage.effects().await.values().all(|n| *n == 1));
    stage.end().await;
}

async fn copies_over_many_lanes_and_instances_run_once<S: TestStore>(stage: Stage<S>) {
    let levels: &[Isolation] = if stage.has_one_writer() {
        &[Isolation::Serializable]
    } else {
        &[
            Isolation::ReadCommitted,
            Isolation::RepeatableRead,
            Isolation::Serializable,
        ]
    };
    for level in levels {
        let name = format!("{level:?}");
        let (handler, runs) = Scripted::applies(&stage);
        let handler = Arc::new(handler);
        let broker = Broker::seeded(7).redeliver_running(0.5).reorder(8);
        for event in events(60) {
            broker.publish(event.clone());
            broker.publish(event);
        }
        let instances: Vec<_> = (0..2)
            .map(|_| {
                let consumer = stage.consumer(&name).handler(handler.clone()).isolation(*level);
                let consumer = if stage.has_one_writer() {
                    consumer
                } else {
                    consumer.lanes(4)
                };
                Running::start(consumer.source(broker.source()))
            })
            .collect();
        soon("every ack", broker.drained()).await;
        for instance in instances {
            instance.stop().await;
        }
        assert_eq!(stage.processed(&name).await.len(), 60, "{name}");
        assert_eq!(runs.by_id().values().max(), Some(&1), "{name}: nothing failed");
        let copies = levels.iter().position(|l| l == level).unwrap() + 1;
        assert!(stage.effects().await.values().all(|n| *n == copies), "{name}");
    }
    assert_eq!(stage.held().await, []);
    stage.end().await;
}

async fn each_consumer_has_its_own_claims<S: TestStore>(stage: Stage<S>) {
    for consumer in ["a", "b"] {
        let (handler, runs) = Scripted::applies(&stage);
        deliver(stage.consumer(consumer).handler(handler), events(5))
            .await
            .unwrap();
        assert_eq!(runs.total(), 5, "{consumer}");
    }
    assert!(stage.effects().await.values().all(|n| *n == 2));
    stage.end().await;
}

/// One of them fails twice; the others' claims say nothing to it.
async fn three_consumers_in_one_process_each_apply_every_event<S: TestStore>(stage: Stage<S>) {
    let mut supervisor = Supervisor::builder();
    let mut brokers = Vec::new();
    for name in ["a", "b", "c"] {
        let broker = Broker::new();
        broker.publish(event("x", "x"));
        let (handler, _) = Scripted::new(&stage, move |run, _| {
            if name == "b" && run <= 2 {
                Act::Fail("no".into())
            } else {
                Act::Apply
            }
        });
        let consumer = stage
            .consumer(name)
            .handler(handler)
            .source(broker.source())
            .lanes(1)
            .retry(RetryPolicy::none().immediate(2))
            .build()
            .unwrap();
        supervisor = supervisor.consumer(consumer);
        brokers.push(broker);
    }
    let drained =
        async move { drop(futures_util::future::join_all(brokers.iter().map(Broker::drained)).await) };
    soon("every ack", supervisor.build().unwrap().run_until(drained))
        .await
        .unwrap();
    assert_eq!(stage.effects().await["x"], 3);
    for name in ["a", "b", "c"] {
        assert_eq!(stage.processed(name).await.len(), 1, "{name}");
    }
    stage.end().await;
}

async fn a_batch_blames_the_right_one<S: TestStore>(stage: Stage<S>) {
    for seen_at in 0..3 {
        let consumer = format!("c{seen_at}");
        let (handler, _) = Scripted::applies(&stage);
        deliver(stage.consumer(&consumer).handler(handler), [event("seen", "x")])
            .await
            .unwrap();

        let mut ids = vec!["new1", "new2"];
        ids.insert(seen_at, "seen");
        let (handler, runs) = Scripted::applies(&stage);
        let batch = stage.consumer(&consumer).handler(handler).lanes(1).batch(3);
        let report = deliver(batch, ids.into_iter().map(|id| event(id, "x")))
            .await
            .unwrap();
        assert_eq!(
            (runs.of("new1"), runs.of("seen"), runs.of("new2"), report.acked),
            (1, 0, 1, 3)
        );
        assert_eq!(stage.processed(&consumer).await.len(), 3);
    }
    stage.end().await;
}

async fn an_identity_that_stands_twice_in_a_batch_runs_once<S: TestStore>(stage: Stage<S>) {
    let (handler, runs) = Scripted::applies(&stage);
    let batch = stage.consumer("c").handler(handler).lanes(1).batch(10);
    let copies = ["a", "b", "a", "c", "a", "b"].map(|id| event(id, "x"));
    let report = deliver(batch, copies).await.unwrap();
    assert_eq!((report.acked, runs.total()), (6, 3));
    assert!(stage.effects().await.values().all(|n| *n == 1));
    assert_eq!(stage.processed("c").await.len(), 3);
    stage.end().await;
}

/// Two instances of one consumer have the same event, and the handler of the first holds on to it.
struct Pair<S: TestStore> {
    stage: Stage<S>,
    runs: Arc<Runs>,
    go: Arc<Notify>,
    broker: Broker,
    instances: Vec<Running>,
}

impl<S: TestStore> Pair<S> {
    async fn new(stage: Stage<S>, lock_timeout: Duration, first_fails: bool) -> Self {
        let go = Arc::new(Notify::new());
        let (signal, schema) = (go.clone(), stage.schema.clone());
        let (handler, runs) = Scripted::new(&stage, move |run, _| {
            let (signal, schema) = (signal.clone(), schema.clone());
            if run > 1 {
                return Act::Apply;
            }
            Act::by(move |cx| {
                Box::pin(async move {
                    S::write(cx.tx(), &schema, "x").await?;
                    signal.notified().await;
                    if first_fails { Err("no".into()) } else { Ok(()) }
                })
            })
        });
        let (handler, broker) = (Arc::new(handler), Broker::new());
        broker.publish(event("x", "x"));
        let consumer = || {
            stage
                .consumer("c")
                .handler(handler.clone())
                .lanes(1)
                // The first has its hands full, so that the second delivery goes to the second.
                .window(1)
                .ordering(Ordering::Unordered)
                .retry(RetryPolicy::none().immediate(1))
                .lock_timeout(lock_timeout)
        };
        let mut instances = vec![Running::start(consumer().source(broker.source()))];
        runs.until(1).await;
        broker.publish(event("x", "x"));
        instances.push(Running::start(consumer().source(broker.source())));
        soon("the second delivery", broker.until(|stats| stats.delivered >= 2)).await;
        Self {
            stage,
            runs,
            go,
            broker,
            instances,
        }
    }

    /// Lets the first handler go on and waits until both deliveries are settled.
    async fn finish(self) -> (Stage<S>, Arc<Runs>, Broker) {
        self.go.notify_one();
        soon("both acks", self.broker.drained()).await;
        for instance in self.instances {
            instance.stop().await;
        }
        assert_eq!(self.runs.most_at_once(), 1, "never two at once");
        assert_eq!(self.stage.effects().await["x"], 1);
        assert_eq!(self.stage.processed("c").await.len(), 1);
        (self.stage, self.runs, self.broker)
    }
}

async fn a_copy_waits_for_the_first_and_is_a_duplicate_when_it_commits<S: TestStore>(stage: Stage<S>) {
    let pair = Pair::new(stage, Duration::from_secs(10), false).await;
    pair.stage.somebody_waits_for_a_lock().await;
    let (stage, runs, broker) = pair.finish().await;
    assert_eq!(
        (runs.total(), broker.stats().acked, broker.stats().released),
        (1, 2, 0)
    );
    stage.end().await;
}

async fn a_copy_waits_for_the_first_and_runs_when_it_rolls_back<S: TestStore>(stage: Stage<S>) {
    let pair = Pair::new(stage, Duration::from_secs(10), true).await;
    pair.stage.somebody_waits_for_a_lock().await;
    let (stage, runs, _) = pair.finish().await;
    assert_eq!(runs.total(), 2);
    assert_eq!(stage.held().await, []);
    stage.end().await;
}

async fn a_copy_that_waited_too_long_is_given_back_and_comes_again<S: TestStore>(stage: Stage<S>) {
    let pair = Pair::new(stage, Duration::from_millis(50), false).await;
    soon("a release", pair.broker.until(|stats| stats.released >= 1)).await;
    assert_eq!(pair.runs.total(), 1);
    assert_eq!(pair.stage.held().await, [], "waiting is not an attempt");
    let (stage, runs, _) = pair.finish().await;
    assert_eq!(runs.total(), 1);
    stage.end().await;
}

async fn another_payload_under_a_processed_identity_is_what_the_rule_says<S: TestStore>(stage: Stage<S>) {
    for rule in [OnMismatch::Warn, OnMismatch::Ignore, OnMismatch::DeadLetter] {
        let name = format!("{rule:?}");
        let (handler, runs) = Scripted::applies(&stage);
        let handler = Arc::new(handler);
        let consumer = || stage.consumer(&name).handler(handler.clone()).on_mismatch(rule);
        deliver(consumer(), [event(&name, "first")]).await.unwrap();
        let report = deliver(consumer(), [event(&name, "first"), event(&name, "other")])
            .await
            .unwrap();
        assert_eq!((runs.total(), report.acked), (1, 2), "{name}");
    }
    let letters = stage.held().await;
    assert_eq!(letters.len(), 1, "only the rule that asks for it");
    assert_eq!(letters[0].event_id, None, "it holds nothing");
    assert_eq!(letters[0].state, "dead");
    assert_eq!(letters[0].reason.as_deref(), Some("identity_mismatch"));
    assert_eq!(letters[0].payload.as_deref(), Some(&b"other"[..]));
    assert!(
        letters[0].failures.contains("DeadLetter"),
        "the identity is named"
    );
    stage.end().await;
}

async fn every_payload_of_a_batch_is_compared_with_what_was_processed<S: TestStore>(stage: Stage<S>) {
    let (handler, runs) = Scripted::applies(&stage);
    let handler = Arc::new(handler);
    let consumer = || {
        stage
            .consumer("c")
            .handler(handler.clone())
            .on_mismatch(OnMismatch::DeadLetter)
            .lanes(1)
            .batch(10)
    };
    deliver(consumer(), [event("x", "first")]).await.unwrap();
    let copies = ["first", "other", "first"].map(|body| event("x", body));
    deliver(consumer(), copies).await.unwrap();
    let fresh = ["first", "first", "other"].map(|body| event("y", body));
    deliver(consumer(), fresh).await.unwrap();
    assert_eq!(runs.total(), 2);
    let bodies: Vec<_> = stage.held().await.into_iter().map(|row| row.payload).collect();
    assert_eq!(bodies, [Some(b"other".to_vec()), Some(b"other".to_vec())]);
    stage.end().await;
}

async fn another_identity_with_the_same_digest_is_a_dead_letter_and_no_duplicate<S: TestStore>(
    stage: Stage<S>,
) {
    let (handler, runs) = Scripted::applies(&stage);
    let handler = Arc::new(handler);
    deliver(stage.consumer("c").handler(handler.clone()), [event("x", "body")])
        .await
        .unwrap();
    stage
        .execute(
            "UPDATE {s}.processed_events SET event_id = 'another'",
            "UPDATE onlyonce_processed_events SET event_id = 'another'",
        )
        .await;
    let report = deliver(stage.consumer("c").handler(handler), [event("x", "body")])
        .await
        .unwrap();
    assert_eq!((runs.total(), report.acked), (1, 1));
    let letters = stage.held().await;
    assert_eq!(letters.len(), 1);
    assert_eq!(letters[0].reason.as_deref(), Some("digest_collision"));
    assert_eq!(letters[0].payload.as_deref(), Some(&b"body"[..]));
    stage.end().await;
}

async fn a_row_of_the_queue_that_must_not_run_becomes_one_letter<S: TestStore>(stage: Stage<S>) {
    let (handler, runs) = Scripted::applies(&stage);
    let handler = Arc::new(handler);
    deliver(
        stage.consumer("c").handler(handler.clone()),
        [event("x", "first")],
    )
    .await
    .unwrap();
    let queue = Queue::new(stage.store.clone(), "c");
    queue.enqueue(event("x", "other")).await.unwrap();
    let consumer = Running::start(
        stage
            .consumer("c")
            .handler(handler)
            .source(InboxSource::new(stage.store.clone(), "c").lease(Duration::from_secs(1)))
            .on_mismatch(OnMismatch::DeadLetter)
            .lanes(1),
    );
    let letters = async || {
        let mut rows = stage.held().await;
        rows.retain(|row| row.reason.as_deref() == Some("identity_mismatch"));
        rows.len()
    };
    until("the letter", async || letters().await == 1).await;
    until("the end of the row", async || stage.held_of("x").await.is_empty()).await;
    // Runs after everything that is due before it.
    queue.enqueue(event("y", "x")).await.unwrap();
    runs.until(2).await;
    consumer.stop().await;
    assert_eq!(letters().await, 1);
    stage.end().await;
}

/// A handler that refuses the payload `bad` for good and applies every other.
fn picky<S: TestStore>(stage: &Stage<S>) -> (Arc<Scripted<S>>, Arc<Runs>) {
    let (handler, runs) = Scripted::new(stage, |_, event| {
        if event.payload.starts_with(b"bad") {
            Act::Fail("bad".into())
        } else {
            Act::Apply
        }
    });
    (Arc::new(handler), runs)
}

async fn a_good_copy_of_a_dead_event_runs_and_finishes_its_letter<S: TestStore>(stage: Stage<S>) {
    let (handler, runs) = picky(&stage);
    for body in ["bad", "good", "good", "bad"] {
        deliver(stage.consumer("c").handler(handler.clone()), [event("x", body)])
            .await
            .unwrap();
    }
    assert_eq!(runs.total(), 2, "once each; the rest are duplicates");
    assert_eq!(stage.effects().await["x"], 1);
    let rows = stage.held().await;
    assert_eq!(rows.len(), 1);
    assert_eq!(
        (rows[0].state.as_str(), rows[0].payload.as_deref()),
        ("replayed", Some(&b"bad"[..]))
    );
    stage.end().await;
}

async fn a_good_copy_of_a_waiting_event_runs_and_removes_its_row<S: TestStore>(stage: Stage<S>) {
    let (handler, runs) = picky(&stage);
    let consumer = || {
        stage
            .consumer("c")
            .handler(handler.clone())
            .ordering(Ordering::Unordered)
            .retry(RetryPolicy::none().delays([Duration::from_secs(3600)]))
    };
    deliver(consumer(), [event("x", "bad")]).await.unwrap();
    assert_eq!(stage.held().await[0].state, "ready");
    let report = deliver(consumer(), [event("x", "bad")]).await.unwrap();
    assert_eq!(
        (report.acked, runs.total()),
        (1, 1),
        "what is held is not run by a copy"
    );
    deliver(consumer(), [event("x", "good")]).await.unwrap();
    assert_eq!(stage.effects().await["x"], 1);
    assert_eq!(stage.held().await, []);
    stage.end().await;
}

async fn a_good_copy_is_not_swallowed_by_the_bad_one_beside_it<S: TestStore>(stage: Stage<S>) {
    let (handler, _) = picky(&stage);
    deliver(stage.consumer("c").handler(handler.clone()), [event("x", "bad")])
        .await
        .unwrap();
    let batch = stage.consumer("c").handler(handler).lanes(1).batch(10);
    let copies = ["bad", "good", "bad"].map(|body| event("x", body));
    deliver(batch, copies).await.unwrap();
    assert_eq!(stage.effects().await.get("x"), Some(&1));
    assert_eq!(stage.held().await[0].state, "replayed");
    stage.end().await;
}

async fn a_copy_that_fails_is_kept_with_the_letter_and_does_not_run_again<S: TestStore>(stage: Stage<S>) {
    let (handler, runs) = picky(&stage);
    for body in ["bad 1", "bad 2", "bad 2", "bad 1"] {
        let report = deliver(stage.consumer("c").handler(handler.clone()), [event("x", body)])
            .await
            .unwrap();
        assert_eq!(report.acked, 1);
    }
    assert_eq!(runs.total(), 2);
    let rows = stage.held().await;
    assert_eq!(rows.len(), 1, "one identity, one row");
    assert_eq!((rows[0].state.as_str(), rows[0].attempts), ("dead", 2));
    assert_eq!(rows[0].payload.as_deref(), Some(&b"bad 1"[..]));
    assert_eq!(rows[0].copy_payload.as_deref(), Some(&b"bad 2"[..]));

    // The newest copy takes the place of the one before, and a good one still finishes the row.
    deliver(
        stage.consumer("c").handler(handler.clone()),
        [event("x", "bad 3")],
    )
    .await
    .unwrap();
    assert_eq!(stage.held().await[0].copy_payload.as_deref(), Some(&b"bad 3"[..]));
    deliver(stage.consumer("c").handler(handler), [event("x", "good")])
        .await
        .unwrap();
    assert_eq!(stage.held().await[0].state, "replayed");
    assert_eq!(stage.effects().await["x"], 1);
    stage.end().await;
}

/// What a run of 10,000 duplicates and one true failure says, on a thread of its own so that it hears
/// nothing of other tests.
fn say_what_duplicates_cause<S: TestStore>(stage: impl AsyncFn() -> Option<(Stage<S>, S)>) {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter("onlyonce=trace")
        .with_writer(move || writer.clone())
        .with_ansi(false)
        .finish();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let _listening = tracing::subscriber::set_default(subscriber);
    runtime.block_on(async {
        let Some((stage, store)) = stage().await else {
            return;
        };
        let (handler, runs) = Scripted::new(&stage, |_, event| match event.identity.id.as_str() {
            "bad" => Act::Fail("no".into()),
            _ => Act::Apply,
        });
        let mut copies: Vec<_> = (0..101).flat_map(|_| events(100)).collect();
        copies.push(event("bad", "x"));
        // Lanes wait for each other's claims, and never so long that it would be an error.
        let lanes = if stage.has_one_writer() { 1 } else { 4 };
        let consumer = stage
            .consumer_of("c", store)
            .handler(handler)
            .lanes(lanes)
            .batch(100)
            .lock_timeout(Duration::from_secs(60));
        let report = deliver(consumer, copies).await.unwrap();
        assert_eq!(report.acked, 10_101);
        assert!((0..100).all(|n| runs.of(&format!("e{n}")) >= 1));
        assert!(stage.effects().await.values().all(|n| *n == 1));
        stage.end().await;

        let log = log.text();
        let lines = |level: &str| log.lines().filter(|line| line.contains(level)).count();
        assert_eq!(
            (lines(" ERROR "), lines(" WARN ")),
            (1, 0),
            "{}",
            log.replace("DEBUG", "")
        );
        assert!(
            log.lines()
                .any(|line| line.contains(" ERROR ") && line.contains("bad"))
        );
        assert_eq!(
            lines(" DEBUG "),
            lines("duplicate"),
            "nothing else was worth a line per event"
        );
        assert!(lines("duplicate") >= 10_000);
    });
}

#[test]
fn ten_thousand_duplicates_are_no_news_to_the_log_nor_an_error_to_postgresql() {
    let Some(url) = postgres_url() else { return };
    let wire = crate::wire::Wire::default();
    say_what_duplicates_cause(async || {
        let stage = PostgresStore::fresh().await?;
        let watched = wire.before(&url).await;
        let store = onlyonce::store::postgres::PostgresOptions::new(watched)
            .schema(&stage.schema)
            .connect()
            .unwrap();
        Some((stage, store))
    });
    assert_eq!(wire.errors(), Vec::<String>::new());
}

#[cfg(feature = "sqlite")]
#[test]
fn ten_thousand_duplicates_are_no_news_to_the_log_on_sqlite() {
    say_what_duplicates_cause(async || {
        let stage = onlyonce::store::SqliteStore::fresh().await?;
        let store = stage.store.clone();
        Some((stage, store))
    });
}

#[derive(Clone, Default)]
struct Log(Arc<std::sync::Mutex<Vec<u8>>>);

impl Log {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A claim that waits for a parking sees the inbox as it was before. The handler runs, the guard finds
/// the row, and run again the event is held; nothing of that run is left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_waited_behind_a_parking_is_held_and_leaves_nothing() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let mut parking = PgConnection::connect(&postgres_url().unwrap()).await.unwrap();
    let key = onlyonce::event::EventKey::of_event("c", "test", "x");
    let hash = onlyonce::event::PayloadHash::of(Some(b"body"));
    let run = async |parking: &mut PgConnection, sql: &str| {
        let sql = sql.replace("{s}", &stage.schema);
        sqlx::query(AssertSqlSafe(sql))
            .bind(key.as_uuid())
            .bind(hash.as_bytes())
            .execute(parking)
            .await
            .unwrap();
    };
    sqlx::raw_sql("BEGIN").execute(&mut parking).await.unwrap();
    run(
        &mut parking,
        "INSERT INTO {s}.processed_events (event_key, kind, consumer, source, event_id, payload_hash, outcome)
         VALUES ($1, 'event', 'c', 'test', 'x', $2, 'processed')",
    )
    .await;

    let (handler, runs) = Scripted::applies(&stage);
    let broker = Broker::new();
    broker.publish(event("x", "body"));
    let running = Running::start(stage.consumer("c").handler(handler).source(broker.source()));
    let blocked = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'transactionid' AND pid IN
                   (SELECT pid FROM pg_stat_activity WHERE query LIKE '%' || $1 || '%')";
    until("the claim to wait", async || {
        let Eyes::Postgres(eyes) = &stage.eyes else {
            return false;
        };
        let waits: i64 = sqlx::query_scalar(blocked)
            .bind(&stage.schema)
            .fetch_one(eyes)
            .await
            .unwrap();
        waits == 1
    })
    .await;
    run(
        &mut parking,
        "INSERT INTO {s}.inbox (event_key, consumer, source, event_id, payload, payload_hash, headers, origin, state,
             reason, dead_at, failures)
         VALUES ($1, 'c', 'test', 'x', 'body', $2, '', 'elsewhere', 'dead', 'permanent_error', now(), '[]')",
    )
    .await;
    run(
        &mut parking,
        "DELETE FROM {s}.processed_events WHERE event_key = $1 AND payload_hash = $2",
    )
    .await;
    sqlx::raw_sql("COMMIT").execute(&mut parking).await.unwrap();

    soon("the ack", broker.drained()).await;
    running.stop().await;
    assert_eq!(runs.attempts_of("x"), [1], "once, and that was no attempt");
    assert!(stage.effects().await.is_empty());
    assert_eq!(stage.processed("c").await, []);
    let rows = stage.held().await;
    assert_eq!(
        (rows.len(), rows[0].state.as_str()),
        (1, "dead"),
        "as it was parked"
    );
    stage.end().await;
}
