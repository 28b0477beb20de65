//! Limits and locks: what a handler may take, for how long, and that nothing hangs when it takes more.

use std::sync::Arc;
use std::time::Duration;

use onlyonce::store::PostgresStore;
use onlyonce::store::postgres::PostgresOptions;
use onlyonce::testing::{Broker, deliver, event};
use onlyonce::{Bytes, Consumer, RetryPolicy, Supervisor, handler_fn};
use sqlx::{AssertSqlSafe, Connection as _, Postgres};
use tokio::sync::Notify;

use crate::running::{Running, built, until};
use crate::stage::{Act, Scripted, Stage, TestStore, events, postgres_connection, soon};

/// The server would go on for ten minutes with a row locked; the next event needs that row.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_times_out_in_a_statement_leaves_no_lock() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    stage
        .execute(
            "CREATE TABLE {s}.rows (n bigint); INSERT INTO {s}.rows VALUES (0)",
            "",
        )
        .await;
    let (_, url) = stage.role().await;
    stage.execute("GRANT ALL ON {s}.rows TO {s}_role", "").await;
    let schema = stage.schema.clone();
    let (handler, runs) = Scripted::new(&stage, move |_, event| {
        let sleep = if event.identity.id == "slow" { 600 } else { 0 };
        Act::Run(format!(
            "UPDATE {schema}.rows SET n = n + 1; SELECT pg_sleep({sleep})"
        ))
    });
    let store = PostgresOptions::new(url).schema(&stage.schema).connect().unwrap();
    let consumer = Consumer::builder("c", store)
        .retry(RetryPolicy::none())
        .handler(handler)
        .lanes(1)
        .handler_timeout(Duration::from_millis(500));
    let report = soon(
        "delivery",
        deliver(consumer, [event("slow", "1"), event("fast", "1")]),
    )
    .await
    .unwrap();
    assert_eq!((report.acked, report.released), (2, 0));
    assert_eq!(
        (runs.total(), stage.number("SELECT n FROM {s}.rows", "").await),
        (2, 1)
    );
    let held = stage.held().await;
    assert_eq!((held.len(), held[0].attempts), (1, 1));
    assert!(held[0].failures.contains("timeout"), "{}", held[0].failures);
    until("the end of the session", async || {
        let busy = "SELECT count(*) FROM pg_stat_activity WHERE usename = '{s}_role' AND query LIKE '%pg_sleep(600)%'
                       AND state = 'active'";
        stage.number(busy, "").await == 0
    })
    .await;
    stage.drop_role().await;
    stage.end().await;
}

/// Nobody can cut off a thread that does not come back; the server ends its session.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_handler_that_blocks_its_thread_past_every_limit_has_timed_out() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let schema = stage.schema.clone();
    // The idle limit is the handler's and 5 s more.
    let handler = handler_fn::<Postgres, Bytes, _>(move |cx, event| {
        let schema = schema.clone();
        Box::pin(async move {
            PostgresStore::write(cx.tx(), &schema, &event.identity.id).await?;
            std::thread::sleep(Duration::from_millis(5400));
            if event.identity.id == "writes" {
                PostgresStore::write(cx.tx(), &schema, &event.identity.id).await?;
            }
            Ok(())
        })
    });
    let consumer = stage
        .consumer("c")
        .handler(handler)
        .lanes(2)
        .handler_timeout(Duration::from_millis(100));
    let report = soon(
        "delivery",
        deliver(consumer, [event("returns", "1"), event("writes", "1")]),
    )
    .await
    .unwrap();
    assert_eq!(report.acked, 2);
    let held = stage.held().await;
    assert_eq!(held.len(), 2, "none of them was applied");
    for row in held {
        assert_eq!(row.attempts, 1);
        assert!(row.failures.contains("the handler blocked for"), "{row:?}");
    }
    assert_eq!(stage.effects().await.len(), 0);
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_statement_ends_at_its_own_limit() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let (handler, _) = Scripted::new(&stage, |_, _| Act::Run("SELECT pg_sleep(600)".into()));
    let consumer = stage
        .consumer("c")
        .handler(handler)
        .statement_timeout(Duration::from_millis(200));
    soon("delivery", deliver(consumer, [event("x", "1")]))
        .await
        .unwrap();
    let held = stage.held().await;
    assert!(
        held[0].failures.contains("statement timeout"),
        "{}",
        held[0].failures
    );
    stage.end().await;
}

/// It waits, on another connection, for the row that its own transaction holds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_locks_itself_out_uses_up_the_contention_budget() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    stage
        .execute(
            "CREATE TABLE {s}.rows (n bigint); INSERT INTO {s}.rows VALUES (0)",
            "",
        )
        .await;
    let schema = stage.schema.clone();
    let runs = Arc::new(std::sync::Mutex::new(Vec::new()));
    let handler = handler_fn::<Postgres, Bytes, _>({
        let runs = runs.clone();
        move |cx, _| {
            let (schema, runs) = (schema.clone(), runs.clone());
            Box::pin(async move {
                runs.lock().unwrap().push(cx.attempt());
                let update = format!("UPDATE {schema}.rows SET n = n + 1");
                sqlx::raw_sql(AssertSqlSafe(update.clone()))
                    .execute(cx.tx())
                    .await?;
                let mut other = postgres_connection().await.unwrap();
                sqlx::raw_sql("SET lock_timeout = '50ms'")
                    .execute(&mut other)
                    .await?;
                sqlx::raw_sql(AssertSqlSafe(update)).execute(&mut other).await?;
                other.close().await?;
                Ok(())
            })
        }
    });
    let consumer = stage
        .consumer("c")
        .handler(handler)
        .retry(RetryPolicy::none().immediate(1).contention(3));
    soon("delivery", deliver(consumer, [event("x", "1")]))
        .await
        .unwrap();
    assert_eq!(*runs.lock().unwrap(), [1, 1, 1, 2, 2, 2]);
    let held = stage.held().await;
    assert_eq!((held[0].state.as_str(), held[0].attempts), ("dead", 2));
    assert!(held[0].failures.contains("contention"), "{}", held[0].failures);
    assert_eq!(stage.number("SELECT n FROM {s}.rows", "").await, 0);
    stage.end().await;
}

/// Two handlers lock two rows in opposite order until the server breaks the circle.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadlock_between_handlers_is_nobodys_attempt() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    stage
        .execute(
            "CREATE TABLE {s}.rows (id int PRIMARY KEY, n int); INSERT INTO {s}.rows VALUES (0, 0), (1, 0);
             CREATE SEQUENCE {s}.there",
            "",
        )
        .await;
    let schema = stage.schema.clone();
    let (handler, runs) = Scripted::new(&stage, move |_, event| {
        let first = i32::from(event.identity.id == "e1");
        Act::Run(format!(
            "UPDATE {schema}.rows SET n = n + 1 WHERE id = {first};
             DO $$ BEGIN
                 PERFORM nextval('{schema}.there');
                 WHILE (SELECT last_value < 2 FROM {schema}.there) LOOP
                     PERFORM pg_sleep(0.01);
                 END LOOP;
             END $$;
             UPDATE {schema}.rows SET n = n + 1 WHERE id = 1 - {first}"
        ))
    });
    let consumer = stage
        .consumer("c")
        .handler(handler)
        .lanes(2)
        .lock_timeout(Duration::from_secs(10));
    let report = soon("delivery", deliver(consumer, events(2))).await.unwrap();
    assert_eq!((report.acked, report.released), (2, 0));
    assert!(runs.total() > 2, "nobody lost: this proves nothing");
    for id in ["e0", "e1"] {
        assert!(runs.attempts_of(id).iter().all(|n| *n == 1));
    }
    assert_eq!(stage.number("SELECT sum(n) FROM {s}.rows", "").await, 4);
    assert_eq!(stage.held().await, []);
    stage.end().await;
}

/// The pool holds the lanes and no more. Handlers that take from it starve themselves only: they fail,
/// and letters, leases and the other events go on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_takes_all_connections_stops_nobody_else() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let store = stage
        .options()
        .max_connections(5)
        .acquire_timeout(Duration::from_millis(300))
        .connect()
        .unwrap();
    let handler = handler_fn::<Postgres, Bytes, _>({
        let (pool, schema) = (store.pool().clone(), stage.schema.clone());
        move |cx, event| {
            let (pool, schema) = (pool.clone(), schema.clone());
            Box::pin(async move {
                PostgresStore::write(cx.tx(), &schema, &event.identity.id).await?;
                let mut taken = Vec::new();
                while event.identity.id.starts_with("greedy") {
                    taken.push(pool.acquire().await?);
                }
                Ok(())
            })
        }
    });
    let broker = Broker::new();
    let consumer = Consumer::builder("c", store)
        .source(broker.source())
        .handler(handler)
        .lanes(2)
        .held_lanes(1)
        .retry(RetryPolicy::none());
    let running = Running::start(consumer);
    for id in ["greedy1", "greedy2", "modest1", "greedy3", "modest2"] {
        broker.publish(event(id, "1"));
    }
    soon("the acks", broker.drained()).await;
    assert_eq!(broker.stats().released, 0);
    let effects = stage.effects().await;
    assert_eq!(effects.len(), 2, "{effects:?}");
    assert!(effects["modest1"] == 1 && effects["modest2"] == 1);
    let held = stage.held().await;
    assert_eq!(held.len(), 3);
    for row in held {
        assert_eq!((row.state.as_str(), row.attempts), ("dead", 1));
        assert!(row.failures.contains("second connection"), "{}", row.failures);
    }
    until("readiness", async || running.health.ready().ok).await;
    running.stop().await;
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lanes_that_do_not_fit_into_the_pool_are_refused() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let consumer = |name: &str, store: &PostgresStore, lanes, held| {
        Consumer::builder(name, store.clone())
            .source(Broker::new().source())
            .handler(Scripted::applies(&stage).0)
            .lanes(lanes)
            .held_lanes(held)
    };
    let store = stage.options().max_connections(10).connect().unwrap();
    let refused = consumer("c", &store, 6, 3).build().err().unwrap().to_string();
    for part in [
        "max_connections is 10",
        "at least 11",
        "6 lanes",
        "3 held lanes",
        "2 in reserve",
    ] {
        assert!(refused.contains(part), "{refused}");
    }
    // Each fits alone.
    let (a, b) = (
        built(consumer("a", &store, 4, 1)),
        built(consumer("b", &store, 3, 1)),
    );
    let refused = Supervisor::builder()
        .consumer(a)
        .consumer(b)
        .build()
        .unwrap_err()
        .to_string();
    for part in ["at least 11", "4 lanes", "3 lanes", "1 held lanes"] {
        assert!(refused.contains(part), "{refused}");
    }
    let other = stage.options().max_connections(10).connect().unwrap();
    let (a, b) = (
        built(consumer("a", &store, 4, 1)),
        built(consumer("b", &other, 4, 1)),
    );
    assert!(
        Supervisor::builder().consumer(a).consumer(b).build().is_ok(),
        "two pools"
    );
    stage.end().await;
}

on_each_store!(
    a_window_without_room_is_refused,
    the_window_is_bounded_by_count,
    the_window_is_bounded_by_bytes,
);

async fn a_window_without_room_is_refused<S: TestStore>(stage: Stage<S>) {
    let consumer = || {
        stage
            .consumer("c")
            .source(Broker::new().source())
            .handler(Scripted::applies(&stage).0)
    };
    for (consumer, problem) in [
        (consumer().window(0), "window is 0 (at least 1)"),
        (consumer().window_bytes(0), "window_bytes is 0 (at least 1024)"),
        (consumer().batch(0), "batch is 0 (at least 1)"),
        (consumer().lanes(0), "lanes is 0 (at least 1)"),
    ] {
        let refused = consumer.build().err().unwrap().to_string();
        assert!(refused.contains(problem), "{refused}");
    }
    stage.end().await;
}

async fn the_window_is_bounded_by_count<S: TestStore>(stage: Stage<S>) {
    let end = Arc::new(Notify::new());
    let (handler, runs) = Scripted::new(&stage, {
        let end = end.clone();
        move |run, event| match (run, event.identity.id.as_str()) {
            (1, "e0") => Act::Wait(end.clone()),
            _ => Act::Apply,
        }
    });
    let broker = Broker::new();
    for event in events(100) {
        broker.publish(event);
    }
    let consumer = stage
        .consumer("c")
        .source(broker.source())
        .handler(handler)
        .lanes(1)
        .window(10);
    let running = Running::start(consumer);
    runs.until(1).await;
    soon("the prefetch", broker.until(|s| s.delivered == 10)).await;
    // The default of a handler that blocks for ever is that nothing more comes.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!((broker.unacked(), broker.waiting()), (10, 90));
    end.notify_one();
    let rest = broker.until(|s| {
        assert!(s.delivered - s.acked - s.released <= 10, "{s:?}");
        s.acked == 100
    });
    soon("the rest", rest).await;
    running.stop().await;
    assert_eq!(stage.effects().await.len(), 100);
    stage.end().await;
}

/// Thirty times a megabyte, of which three may be in hand.
async fn the_window_is_bounded_by_bytes<S: TestStore>(stage: Stage<S>) {
    let (handler, _) = Scripted::applies(&stage);
    let broker = Broker::new();
    let body = Bytes::from(vec![b'x'; 1 << 20]);
    for n in 0..30 {
        broker.publish(event(format!("e{n}"), body.clone()));
    }
    let consumer = stage
        .consumer("c")
        .source(broker.source())
        .handler(handler)
        .lanes(1)
        .window(30)
        .window_bytes(3 << 20);
    let running = Running::start(consumer);
    let all = broker.until(|s| {
        let in_hand = s.delivered - s.acked - s.released;
        assert!(in_hand <= 4, "{in_hand} MB are in hand");
        s.acked == 30
    });
    soon("the acks", all).await;
    running.stop().await;
    assert_eq!(stage.effects().await.len(), 30);
    stage.end().await;
}

/// Eight tasks enqueue and one consumer works while another program writes to the file all the time.
/// Being busy is nobody's failure.
#[cfg(feature = "sqlite")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_writers_of_a_file_cost_no_attempts() {
    use onlyonce::inbox::Queue;
    use onlyonce::store::SqliteStore;
    use sqlx::SqliteConnection;

    let stage = SqliteStore::fresh().await.unwrap();
    stage
        .execute(
            "",
            "CREATE TABLE outside (n INTEGER); INSERT INTO outside VALUES (0)",
        )
        .await;
    let file = stage.file();
    let outside = tokio::spawn(async move {
        let mut other = SqliteConnection::connect(&file).await.unwrap();
        sqlx::raw_sql("PRAGMA busy_timeout = 10000")
            .execute(&mut other)
            .await
            .unwrap();
        loop {
            sqlx::raw_sql("BEGIN IMMEDIATE; UPDATE outside SET n = n + 1")
                .execute(&mut other)
                .await
                .unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
            sqlx::raw_sql("COMMIT").execute(&mut other).await.unwrap();
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    let (handler, runs) = Scripted::new(&stage, |run, event| match event.identity.id.as_str() {
        "t0-0" if run == 1 => Act::Fail("no".into()),
        _ => Act::Apply,
    });
    let broker = Broker::new();
    let consumer = stage
        .consumer("c")
        .source(broker.source())
        .handler(handler)
        .lock_timeout(Duration::from_millis(50))
        .retry(RetryPolicy::none().delays([Duration::ZERO]));
    let running = Running::start(consumer);
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..8 {
        let (queue, broker) = (Queue::new(stage.store.clone(), "c"), broker.clone());
        tasks.spawn(async move {
            for n in 0..5 {
                broker.publish(event(format!("b{task}-{n}"), "1"));
                queue.enqueue(event(format!("t{task}-{n}"), "1")).await.unwrap();
            }
        });
    }
    soon("the tasks", tasks.join_all()).await;
    soon("the acks", broker.drained()).await;
    until("the empty inbox", async || stage.held().await.is_empty()).await;
    let effects = stage.effects().await;
    assert_eq!(effects.len(), 80);
    assert!(effects.values().all(|n| *n == 1));
    assert_eq!(runs.attempts_of("t0-0"), [1, 2]);
    assert_eq!(
        runs.attempts_of("t1-1").last(),
        Some(&1),
        "waiting for the file is not an attempt"
    );
    assert!(!outside.is_finished(), "the other program was not disturbed");
    outside.abort();
    running.stop().await;
    stage.end().await;
}
