//! G9: a database or a broker that is down uses up no attempts and makes no dead letters.

use std::sync::Arc;
use std::time::Duration;

use onlyonce::store::PostgresStore;
use onlyonce::store::postgres::PostgresOptions;
use onlyonce::testing::{Broker, event};
use onlyonce::{Consumer, RetryPolicy};
use tokio::sync::Notify;

use crate::proxy::Proxy;
use crate::running::{Running, until};
use crate::stage::{Act, Runs, Scripted, Stage, TestStore, events, soon};

/// A stage, and a way to it that can be spoilt.
async fn spoilt_stage() -> Option<(Stage<PostgresStore>, Proxy)> {
    Some((PostgresStore::fresh().await?, Proxy::start().await?))
}

/// Waits until the consumer says that it is not ready, for a reason that holds this text, and that a
/// restart would not help.
async fn not_ready(running: &Running, because: &str) {
    until(&format!("a reason with {because:?}"), async || {
        let ready = running.health.ready();
        !ready.ok && ready.to_string().contains(because)
    })
    .await;
    assert!(running.health.live().ok, "{}", running.health.live());
}

async fn ready(running: &Running) {
    until("readiness", async || running.health.ready().ok).await;
}

/// Every event was applied once, and no run was an attempt that failed.
async fn applied_once_and_nothing_counted(stage: &Stage<PostgresStore>, runs: &Runs, ids: &[&str]) {
    let effects = stage.effects().await;
    for id in ids {
        assert_eq!(effects.get(*id), Some(&1), "{id}");
        assert!(
            runs.attempts_of(id).iter().all(|n| *n == 1),
            "{id}: {:?}",
            runs.attempts_of(id)
        );
    }
    assert_eq!(stage.held().await, []);
}

/// The session of a handler that has written its effect and waits.
const WAITING: &str =
    "FROM pg_stat_activity WHERE state = 'idle in transaction' AND query LIKE '%{s}.effects%'";

#[derive(Debug, Clone, Copy)]
enum Outage {
    Refuses,
    HangsUp,
    Freezes,
}

/// An outage in the middle of work, with a delayed retry that comes due in it.
async fn an_outage_in_the_middle_of_work(outage: Outage) {
    let Some((stage, proxy)) = spoilt_stage().await else {
        return;
    };
    let (handler, runs) = Scripted::new(&stage, |run, event| match event.identity.id.as_str() {
        "retried" if run == 1 => Act::Fail("no".into()),
        _ => Act::Apply,
    });
    let broker = Broker::new();
    let consumer = Consumer::builder("c", proxy.store(&stage.schema))
        .retry(RetryPolicy::none().delays([Duration::from_millis(100)]))
        .source(broker.source())
        .handler(handler)
        .lanes(4);
    let running = Running::start(consumer);
    broker.publish(event("before", "1"));
    broker.publish(event("retried", "1"));
    soon("the first acks", broker.drained()).await;

    let connections = proxy.accepted();
    match outage {
        Outage::Refuses => proxy.refuse().await,
        Outage::HangsUp => proxy.hang_up(),
        Outage::Freezes => proxy.freeze(),
    }
    let ids: Vec<String> = (0..20).map(|n| format!("e{n}")).collect();
    for event in events(20) {
        broker.publish(event);
    }
    match outage {
        // Nothing tells a frozen server from a slow one; what is in hand waits for it.
        Outage::Freezes => soon("the deliveries", broker.until(|s| s.delivered > 2)).await,
        _ => not_ready(&running, "paused").await,
    }
    // Long enough for a loop without backoff to show itself.
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(broker.stats().released, 0, "{outage:?}: what is in hand is kept");
    let tried = proxy.accepted() - connections;
    assert!(tried < 40, "{outage:?}: {tried} connections in 2 s");
    match outage {
        Outage::Refuses => proxy.accept().await,
        Outage::HangsUp => proxy.answer(),
        Outage::Freezes => proxy.thaw(),
    }
    soon("the acks", broker.drained()).await;
    ready(&running).await;
    until("the retry", async || stage.held().await.is_empty()).await;

    let ids: Vec<&str> = ids.iter().map(String::as_str).chain(["before"]).collect();
    applied_once_and_nothing_counted(&stage, &runs, &ids).await;
    let retried = runs.attempts_of("retried");
    assert!(
        retried[0] == 1 && retried[1..].iter().all(|n| *n == 2),
        "{outage:?}: {retried:?}"
    );
    assert_eq!(stage.effects().await.get("retried"), Some(&1));
    running.stop().await;
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_connection_pauses_and_is_not_hammered() {
    an_outage_in_the_middle_of_work(Outage::Refuses).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_hangs_up_pauses_and_is_not_hammered() {
    an_outage_in_the_middle_of_work(Outage::HangsUp).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_server_is_waited_for() {
    an_outage_in_the_middle_of_work(Outage::Freezes).await;
}

/// The handler's own statement is what hangs, until its time is over: that is the outage's time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_times_out_on_a_frozen_server_has_not_failed() {
    let Some((stage, proxy)) = spoilt_stage().await else {
        return;
    };
    let (handler, runs) = Scripted::new(&stage, |_, _| Act::Run("SELECT pg_sleep(0.2)".into()));
    let broker = Broker::new();
    let consumer = Consumer::builder("c", proxy.store(&stage.schema))
        .retry(RetryPolicy::none())
        .source(broker.source())
        .handler(handler)
        .handler_timeout(Duration::from_millis(600));
    let running = Running::start(consumer);
    broker.publish(event("x", "1"));
    let sleeping =
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%pg_sleep(0.2)%' AND state = 'active'
                       AND pid <> pg_backend_pid()";
    until("the handler's statement", async || {
        stage.number(sleeping, "").await > 0
    })
    .await;
    proxy.freeze();
    not_ready(&running, "paused").await;
    proxy.thaw();
    soon("the ack", broker.drained()).await;
    applied_once_and_nothing_counted(&stage, &runs, &["x"]).await;
    running.stop().await;
    stage.end().await;
}

/// A machine that is gone sends no answer and no refusal; no limit of the server's can help.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_link_that_died_without_a_word_is_given_up() {
    let Some((stage, proxy)) = spoilt_stage().await else {
        return;
    };
    let go_on = Arc::new(Notify::new());
    let (handler, runs) = Scripted::new(&stage, {
        let go_on = go_on.clone();
        move |run, _| match run {
            1 => Act::Wait(go_on.clone()),
            _ => Act::Apply,
        }
    });
    let broker = Broker::new();
    let consumer = Consumer::builder("c", proxy.store(&stage.schema))
        .retry(RetryPolicy::none())
        .source(broker.source())
        .handler(handler)
        .statement_timeout(Duration::from_millis(100));
    let running = Running::start(consumer);
    broker.publish(event("x", "1"));
    runs.until_waiting(1).await;
    proxy.strand();
    go_on.notify_one();
    soon("the ack", broker.drained()).await;
    assert_eq!(runs.total(), 2);
    applied_once_and_nothing_counted(&stage, &runs, &["x"]).await;
    running.stop().await;
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_in_hand_is_given_back_once_when_a_pause_is_long() {
    let Some((stage, proxy)) = spoilt_stage().await else {
        return;
    };
    let (handler, runs) = Scripted::applies(&stage);
    let broker = Broker::new();
    let consumer = Consumer::builder("c", proxy.store(&stage.schema))
        .retry(RetryPolicy::none())
        .source(broker.source())
        .handler(handler)
        .lanes(2)
        .window(6)
        .keep_while_paused(Duration::from_millis(500));
    let running = Running::start(consumer);
    ready(&running).await;
    proxy.hang_up();
    for event in events(6) {
        broker.publish(event);
    }
    soon("the release", broker.until(|s| s.released == 6)).await;
    assert_eq!(broker.unacked(), 0);
    not_ready(&running, "paused").await;
    // Several turns of the probe later nothing was received again.
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(broker.stats().delivered, 6);
    proxy.answer();
    soon("the acks", broker.drained()).await;
    assert_eq!(broker.stats().delivered, 12);
    applied_once_and_nothing_counted(&stage, &runs, &["e0", "e1", "e2", "e3", "e4", "e5"]).await;
    running.stop().await;
    stage.end().await;
}

/// Whatever refuses a statement of ours is no fault of the event's, and is over when it is repaired.
async fn broken_and_repaired(breaks: &str, repairs: &str, because: &str, fails: bool) {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let (role, url) = stage.role().await;
    let sql = |sql: &str| sql.replace("{role}", &role);
    let store = PostgresOptions::new(url).schema(&stage.schema).connect().unwrap();
    let (handler, runs) = Scripted::new(&stage, move |_, event| {
        if fails && event.identity.id == "x" {
            Act::Fail("no".into())
        } else {
            Act::Apply
        }
    });
    let broker = Broker::new();
    let consumer = Consumer::builder("c", store)
        .retry(RetryPolicy::none())
        .source(broker.source())
        .handler(handler);
    let running = Running::start(consumer);
    broker.publish(event("before", "1"));
    soon("the first ack", broker.drained()).await;

    stage.execute(&sql(breaks), "").await;
    broker.publish(event("x", "1"));
    not_ready(&running, because).await;
    // Again after the pause was over for a moment: the probe answers, and the work is still refused.
    not_ready(&running, because).await;
    assert_eq!((broker.stats().acked, broker.stats().released), (1, 0));

    stage.execute(&sql(repairs), "").await;
    soon("the ack", broker.drained()).await;
    ready(&running).await;
    if fails {
        let held = stage.held().await;
        assert_eq!((held.len(), held[0].attempts), (1, 1), "its own failure only");
        assert_eq!(runs.of("x"), 1, "it was held, not run again");
    } else {
        applied_once_and_nothing_counted(&stage, &runs, &["before", "x"]).await;
    }
    running.stop().await;
    stage.drop_role().await;
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_revoked_grant_on_the_claims_pauses() {
    broken_and_repaired(
        "REVOKE INSERT ON {s}.processed_events FROM {role}",
        "GRANT INSERT ON {s}.processed_events TO {role}",
        "permission denied",
        false,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_revoked_grant_on_the_inbox_pauses() {
    broken_and_repaired(
        "REVOKE INSERT ON {s}.inbox FROM {role}",
        "GRANT INSERT ON {s}.inbox TO {role}",
        "permission denied",
        true,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renamed_schema_pauses() {
    broken_and_repaired(
        "ALTER SCHEMA {s} RENAME TO {s}_away",
        "ALTER SCHEMA {s}_away RENAME TO {s}",
        "does not exist",
        false,
    )
    .await;
}

/// `default_transaction_read_only` is a default only; what we do says READ WRITE itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_that_is_read_only_by_default_works() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let (role, url) = stage.role().await;
    stage
        .execute(
            &format!("ALTER ROLE {role} SET default_transaction_read_only = on"),
            "",
        )
        .await;
    let store = PostgresOptions::new(url).schema(&stage.schema).connect().unwrap();
    let (handler, runs) = Scripted::new(&stage, |run, event| match (run, event.identity.id.as_str()) {
        (1, "retried") => Act::Fail("no".into()),
        _ => Act::Apply,
    });
    let broker = Broker::new();
    let consumer = Consumer::builder("c", store)
        .retry(RetryPolicy::none().delays([Duration::ZERO]))
        .source(broker.source())
        .handler(handler);
    let running = Running::start(consumer);
    broker.publish(event("x", "1"));
    broker.publish(event("retried", "1"));
    soon("the acks", broker.drained()).await;
    until("the retry", async || stage.held().await.is_empty()).await;
    assert_eq!(runs.attempts_of("retried"), [1, 2]);
    assert_eq!(stage.effects().await.len(), 2);
    running.stop().await;
    stage.drop_role().await;
    stage.end().await;
}

on_each_store!(
    a_broker_that_is_down_is_waited_for,
    an_error_that_looks_like_an_outage_counts_from_the_third_time,
    nothing_to_do_is_healthy,
    a_source_that_panics_is_not_healthy,
);

async fn a_broker_that_is_down_is_waited_for<S: TestStore>(stage: Stage<S>) {
    let go_on = Arc::new(Notify::new());
    let (handler, runs) = Scripted::new(&stage, {
        let go_on = go_on.clone();
        move |run, event| match (run, event.identity.id.as_str()) {
            (1, "running") => Act::Wait(go_on.clone()),
            _ => Act::Apply,
        }
    });
    let broker = Broker::new();
    let consumer = stage
        .consumer("c")
        .source(broker.source())
        .handler(handler)
        .lanes(1);
    let running = Running::start(consumer);
    broker.publish(event("running", "1"));
    runs.until(1).await;
    broker.go_down();
    not_ready(&running, "main source").await;
    go_on.notify_one();
    until("the commit", async || stage.processed("c").await.len() == 1).await;
    broker.publish(event("after", "1"));
    broker.recover();
    soon("the acks", broker.drained()).await;
    ready(&running).await;
    assert_eq!(
        (runs.of("running"), runs.of("after")),
        (1, 1),
        "the redelivery was a duplicate"
    );
    assert_eq!(stage.effects().await.len(), 2);
    assert_eq!(stage.held().await, []);
    running.stop().await;
    stage.end().await;
}

/// The handler's own pool has run dry while the database answers: twice that is bad luck.
async fn an_error_that_looks_like_an_outage_counts_from_the_third_time<S: TestStore>(stage: Stage<S>) {
    let (handler, runs) = Scripted::new(&stage, |_, _| Act::Fail(sqlx::Error::PoolTimedOut.into()));
    let broker = Broker::new();
    let consumer = stage
        .consumer("c")
        .source(broker.source())
        .handler(handler)
        .retry(RetryPolicy::none().immediate(2));
    let running = Running::start(consumer);
    broker.publish(event("x", "1"));
    soon("the ack", broker.drained()).await;
    assert_eq!(runs.attempts_of("x"), [1, 1, 1, 2, 3]);
    let held = stage.held().await;
    assert_eq!((held[0].state.as_str(), held[0].attempts), ("dead", 3));
    assert!(held[0].failures.contains("connection_lost"));
    assert!(
        held[0].failures.contains("second connection"),
        "the likely cause is named: {}",
        held[0].failures
    );
    running.stop().await;
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_was_ended_by_an_operator_is_not_an_attempt() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let go_on = Arc::new(Notify::new());
    let (handler, runs) = Scripted::new(&stage, {
        let go_on = go_on.clone();
        move |run, _| match run {
            1 | 2 => Act::Wait(go_on.clone()),
            _ => Act::Apply,
        }
    });
    let broker = Broker::new();
    let consumer = stage.consumer("c").source(broker.source()).handler(handler);
    let running = Running::start(consumer);
    broker.publish(event("x", "1"));
    for run in 1..=2 {
        runs.until_waiting(run).await;
        let sql = format!("SELECT pg_terminate_backend(pid) {WAITING}");
        stage.execute(&sql, "").await;
        go_on.notify_one();
    }
    soon("the ack", broker.drained()).await;
    assert_eq!(runs.total(), 3);
    applied_once_and_nothing_counted(&stage, &runs, &["x"]).await;
    running.stop().await;
    stage.end().await;
}

async fn nothing_to_do_is_healthy<S: TestStore>(stage: Stage<S>) {
    let (handler, _) = Scripted::applies(&stage);
    let consumer = stage
        .consumer("c")
        .source(Broker::new().source())
        .handler(handler);
    let running = Running::start(consumer);
    ready(&running).await;
    // Some turns of the loop and polls of the inbox later.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert!(running.health.ready().ok, "{}", running.health.ready());
    assert!(running.health.live().ok);
    let health = running.health.clone();
    running.stop().await;
    assert!(!health.live().ok && !health.ready().ok, "it has ended");
    stage.end().await;
}

async fn a_source_that_panics_is_not_healthy<S: TestStore>(stage: Stage<S>) {
    let (handler, _) = Scripted::applies(&stage);
    let consumer = stage.consumer("c").source(Panics).handler(handler);
    let running = Running::start(consumer);
    let health = running.health.clone();
    let error = running.ended().await.unwrap_err();
    assert!(error.to_string().contains("panicked"), "{error}");
    assert!(
        health.live().to_string().contains("has ended"),
        "{}",
        health.live()
    );
    stage.end().await;
}

struct Panics;

#[onlyonce::async_trait]
impl onlyonce::source::Source for Panics {
    async fn start(&mut self, _: &onlyonce::source::Plan) -> Result<(), onlyonce::source::SourceError> {
        Ok(())
    }

    async fn receive(
        &mut self,
        _: usize,
    ) -> Result<onlyonce::source::Incoming, onlyonce::source::SourceError> {
        panic!("the source panicked on purpose")
    }

    async fn settle(
        &mut self,
        _: Vec<onlyonce::source::Settlement>,
    ) -> Result<(), onlyonce::source::SourceError> {
        Ok(())
    }

    async fn pause(&mut self) -> Result<(), onlyonce::source::SourceError> {
        Ok(())
    }

    async fn stop(&mut self) -> Result<(), onlyonce::source::SourceError> {
        Ok(())
    }

    fn capabilities(&self) -> onlyonce::source::Capabilities {
        onlyonce::source::Capabilities::of("test")
    }

    fn health(&self) -> onlyonce::source::SourceHealth {
        onlyonce::source::SourceHealth::up()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_received_before_the_database_answers() {
    let Some((stage, proxy)) = spoilt_stage().await else {
        return;
    };
    proxy.refuse().await;
    let (handler, runs) = Scripted::applies(&stage);
    let broker = Broker::new();
    broker.publish(event("x", "1"));
    let consumer = Consumer::builder("c", proxy.store(&stage.schema))
        .retry(RetryPolicy::none())
        .source(broker.source())
        .handler(handler);
    let running = Running::start(consumer);
    not_ready(&running, "does not answer yet").await;
    assert_eq!(broker.stats().delivered, 0);
    proxy.accept().await;
    soon("the ack", broker.drained()).await;
    applied_once_and_nothing_counted(&stage, &runs, &["x"]).await;
    running.stop().await;
    stage.end().await;
}
