//! G13: a stop takes no more, finishes or rolls back what runs, gives back the rest at once, and is
//! never a failed attempt.

use std::sync::Arc;
use std::time::Duration;

use onlyonce::store::PostgresStore;
use onlyonce::store::postgres::PostgresOptions;
use onlyonce::testing::{Broker, event};
use onlyonce::{Consumer, RetryPolicy};
use tokio::sync::Notify;

use crate::proxy::Proxy;
use crate::running::{Running, until};
use crate::stage::{Act, Scripted, Stage, TestStore, events, soon};

on_each_store!(
    what_was_not_started_is_given_back_at_once,
    a_batch_is_given_back_whole,
    a_source_that_does_not_start_is_no_obstacle,
    a_dropped_run_ends_in_the_background,
    a_second_stop_changes_nothing,
    runs_dropped_at_any_moment_leave_nothing_behind,
);

/// Twenty handlers: those that end within the deadline count, the others never were.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn short_handlers_commit_and_long_ones_are_cut_off() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let (_, url) = stage.role().await;
    let store = PostgresOptions::new(url)
        .schema(&stage.schema)
        .max_connections(30)
        .connect()
        .unwrap();
    let end = Arc::new(Notify::new());
    let (handler, runs) = Scripted::new(&stage, {
        let end = end.clone();
        move |_, event| match event.identity.id[1..].parse::<u32>().unwrap() {
            0..10 => Act::Wait(end.clone()),
            10..15 => Act::Hang,
            _ => Act::Run("SELECT pg_sleep(600)".into()),
        }
    });
    let broker = Broker::new();
    let consumer = Consumer::builder("c", store)
        .retry(RetryPolicy::none())
        .source(broker.source())
        .handler(handler)
        .lanes(20)
        .stop_timeout(Duration::from_secs(2));
    let running = Running::start(consumer);
    for event in events(20) {
        broker.publish(event);
    }
    runs.until(20).await;
    runs.until_waiting(10).await;
    running.tell();
    end.notify_waiters();
    running.stop().await;

    let stats = broker.stats();
    assert_eq!((stats.acked, stats.released), (10, 10));
    assert_eq!((broker.waiting(), broker.unacked()), (10, 0));
    assert_eq!(stage.effects().await.len(), 10);
    assert_eq!(stage.held().await, [], "a stop is not an attempt");
    until("the end of every session's work", async || {
        let open = "SELECT count(*) FROM pg_stat_activity WHERE usename = '{s}_role' AND state <> 'idle'";
        stage.number(open, "").await == 0
    })
    .await;

    let (handler, runs) = Scripted::applies(&stage);
    let next = stage.consumer("c").source(broker.source()).handler(handler);
    let next = Running::start(next);
    soon("the rest", broker.drained()).await;
    for n in 10..20 {
        assert_eq!(runs.attempts_of(&format!("e{n}")), [1]);
    }
    assert!(stage.effects().await.values().all(|n| *n == 1));
    assert_eq!(stage.effects().await.len(), 20);
    next.stop().await;
    stage.drop_role().await;
    stage.end().await;
}

async fn what_was_not_started_is_given_back_at_once<S: TestStore>(stage: Stage<S>) {
    let end = Arc::new(Notify::new());
    let (handler, runs) = Scripted::new(&stage, {
        let end = end.clone();
        move |_, _| Act::Wait(end.clone())
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
        .window(100);
    let running = Running::start(consumer);
    runs.until(1).await;
    soon("the prefetch", broker.until(|s| s.delivered == 100)).await;
    running.tell();
    // While the handler still runs.
    soon("the release", broker.until(|s| s.released == 99)).await;
    assert_eq!((broker.unacked(), runs.running()), (1, 1));
    end.notify_one();
    running.stop().await;
    assert_eq!((broker.waiting(), broker.stats().acked), (99, 1));
    assert_eq!(runs.total(), 1);
    assert_eq!(stage.held().await, []);
    stage.end().await;
}

/// The events of a batch share a transaction; cut off, all of them go back, none as an attempt.
async fn a_batch_is_given_back_whole<S: TestStore>(stage: Stage<S>) {
    let (handler, runs) = Scripted::new(&stage, |_, event| match event.identity.id.as_str() {
        "e3" => Act::Hang,
        _ => Act::Apply,
    });
    let broker = Broker::new();
    for event in events(6) {
        broker.publish(event);
    }
    let consumer = stage
        .consumer("c")
        .source(broker.source())
        .handler(handler)
        .lanes(1)
        .batch(6)
        .stop_timeout(Duration::from_millis(200));
    let running = Running::start(consumer);
    until("the hanging event", async || runs.of("e3") == 1).await;
    running.stop().await;
    let stats = broker.stats();
    assert_eq!(stats.acked + stats.released, 6);
    assert_eq!(stage.effects().await.len(), stats.acked as usize);
    assert_eq!(broker.waiting(), 6 - stats.acked as usize);
    assert_eq!(stage.held().await, []);
    assert_eq!(runs.of("e3"), 1, "it was not run again after the deadline");
    stage.end().await;
}

/// The database refuses or freezes while a consumer starts; a stop does not wait for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_during_start_up_does_not_wait_for_the_database() {
    for frozen in [false, true] {
        let (Some(stage), Some(proxy)) = (PostgresStore::fresh().await, Proxy::start().await) else {
            return;
        };
        if frozen {
            proxy.freeze();
        } else {
            proxy.refuse().await;
        }
        let broker = Broker::new();
        broker.publish(event("x", "1"));
        let (handler, _) = Scripted::applies(&stage);
        let consumer = Consumer::builder("c", PostgresOptions::new(proxy.url()).connect().unwrap())
            .source(broker.source())
            .handler(handler);
        let running = Running::start(consumer);
        until("the wait", async || !running.health.ready().ok).await;
        running.tell();
        let ended = tokio::time::timeout(Duration::from_secs(5), running.stop()).await;
        assert!(
            ended.is_ok(),
            "the stop waited for the database, frozen: {frozen}"
        );
        assert_eq!(broker.stats().delivered, 0);
        stage.end().await;
    }
}

async fn a_source_that_does_not_start_is_no_obstacle<S: TestStore>(stage: Stage<S>) {
    let broker = Broker::new();
    broker.go_down();
    let (handler, _) = Scripted::applies(&stage);
    let consumer = stage.consumer("c").source(broker.source()).handler(handler);
    let running = Running::start(consumer);
    until("the reason", async || {
        running
            .health
            .ready()
            .to_string()
            .contains("the in-memory broker is down")
    })
    .await;
    running.stop().await;
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_while_paused_gives_everything_back() {
    let (Some(stage), Some(proxy)) = (PostgresStore::fresh().await, Proxy::start().await) else {
        return;
    };
    let (handler, _) = Scripted::applies(&stage);
    let broker = Broker::new();
    let consumer = Consumer::builder("c", proxy.store(&stage.schema))
        .retry(RetryPolicy::none())
        .source(broker.source())
        .handler(handler)
        .lanes(2)
        .window(10);
    let running = Running::start(consumer);
    until("readiness", async || running.health.ready().ok).await;
    proxy.hang_up();
    for event in events(10) {
        broker.publish(event);
    }
    until("the pause", async || {
        running.health.ready().to_string().contains("paused")
    })
    .await;
    running.stop().await;
    assert_eq!(broker.stats().released, broker.stats().delivered);
    assert_eq!((broker.waiting(), broker.unacked()), (10, 0));
    assert_eq!(stage.held().await, []);
    stage.end().await;
}

async fn a_dropped_run_ends_in_the_background<S: TestStore>(stage: Stage<S>) {
    let end = Arc::new(Notify::new());
    let (handler, runs) = Scripted::new(&stage, {
        let end = end.clone();
        move |_, event| match event.identity.id.as_str() {
            "short" => Act::Wait(end.clone()),
            _ => Act::Hang,
        }
    });
    let handler = Arc::new(handler);
    for (id, acked) in [("short", 1), ("long", 0)] {
        let broker = Broker::new();
        broker.publish(event(id, "1"));
        let consumer = stage
            .consumer("c")
            .source(broker.source())
            .handler(handler.clone())
            .stop_timeout(Duration::from_millis(500));
        let running = Running::start(consumer);
        if id == "short" {
            runs.until_waiting(1).await;
        } else {
            runs.until(2).await;
        }
        running.drop_it().await;
        end.notify_one();
        soon("the settlement", broker.until(|s| s.acked + s.released == 1)).await;
        assert_eq!(broker.stats().acked, acked, "{id}");
    }
    assert_eq!(stage.effects().await.len(), 1);
    assert_eq!(stage.held().await, []);
    stage.end().await;
}

async fn a_second_stop_changes_nothing<S: TestStore>(stage: Stage<S>) {
    let end = Arc::new(Notify::new());
    let (handler, runs) = Scripted::new(&stage, {
        let end = end.clone();
        move |_, _| Act::Wait(end.clone())
    });
    let broker = Broker::new();
    broker.publish(event("x", "1"));
    let consumer = stage.consumer("c").source(broker.source()).handler(handler);
    let running = Running::start(consumer);
    runs.until(1).await;
    running.tell();
    running.tell();
    // An impatient caller lets go of the run as well; what runs still has its time.
    running.drop_it().await;
    until("the wait for the signal", async || runs.running() == 1).await;
    end.notify_one();
    soon("the ack", broker.drained()).await;
    assert_eq!(stage.effects().await.get("x"), Some(&1));
    assert_eq!(broker.stats().released, 0);
    stage.end().await;
}

/// Consumers whose run is dropped after 0 to 5 ms, on one small pool. A begin or a commit that was
/// dropped half-way would leave an open transaction for the next, or lose a write.
async fn runs_dropped_at_any_moment_leave_nothing_behind<S: TestStore>(stage: Stage<S>) {
    let broker = Broker::new();
    let (handler, _) = Scripted::applies(&stage);
    let handler = Arc::new(handler);
    for n in 0..100 {
        broker.publish(event(format!("e{n}"), "1"));
        let consumer = stage
            .consumer("c")
            .source(broker.source())
            .handler(handler.clone())
            .lanes(1)
            .stop_timeout(Duration::from_millis(n % 3));
        let running = Running::start(consumer);
        tokio::time::sleep(Duration::from_micros(fastrand::u64(..5000))).await;
        running.drop_it().await;
    }
    let next = stage.consumer("c").source(broker.source()).handler(handler);
    let next = Running::start(next);
    soon("the rest", broker.drained()).await;
    let effects = stage.effects().await;
    assert_eq!(effects.len(), 100);
    assert!(effects.values().all(|n| *n == 1));
    assert_eq!(stage.held().await, []);
    next.stop().await;
    until("the end of every transaction", async || {
        let open = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%' AND query LIKE '%{s}%'";
        stage.number(open, "SELECT 0").await == 0
    })
    .await;
    stage.end().await;
}

/// What is cut off at the deadline asks a server that gives no answer; the stop does not wait for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_on_a_frozen_server_does_not_wait_for_its_limits() {
    let (Some(stage), Some(proxy)) = (PostgresStore::fresh().await, Proxy::start().await) else {
        return;
    };
    let (handler, runs) = Scripted::new(&stage, |_, _| Act::Wait(Arc::default()));
    let broker = Broker::new();
    broker.publish(event("x", "1"));
    let consumer = Consumer::builder("c", proxy.store(&stage.schema))
        .source(broker.source())
        .handler(handler)
        .stop_timeout(Duration::from_millis(200));
    let running = Running::start(consumer);
    runs.until_waiting(1).await;
    proxy.freeze();
    let stop = tokio::time::timeout(Duration::from_secs(25), running.stop());
    assert!(
        stop.await.is_ok(),
        "a statement's own limit is 30 s: the stop waited for it"
    );
    assert_eq!((broker.stats().released, broker.waiting()), (1, 1));
    proxy.cut();
    stage.end().await;
}
