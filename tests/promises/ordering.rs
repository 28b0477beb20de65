//! PerKey: the effects of a key come in the order of its events, whatever fails, repeats or dies; keys
//! run beside each other.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use onlyonce::testing::{Broker, keyed};
use onlyonce::{Ordering, RetryPolicy};
use tokio::sync::Notify;

use crate::running::Running;
use crate::stage::{Act, Eyes, Scripted, Stage, TestStore, soon};

on_each_store!(
    keys_keep_their_order_under_failures_and_duplicates,
    keys_keep_their_order_over_restarts_and_cuts,
    an_event_that_gives_up_lets_its_key_go_on,
);

const KEYS: usize = 6;
const EACH: usize = 15;

/// `EACH` events of each key, the keys mixed: key `k3` has `k3-0`, `k3-1`, ..
fn publish_all(broker: &Broker) {
    for n in 0..EACH {
        for key in 0..KEYS {
            broker.publish(keyed(format!("k{key}-{n}"), format!("k{key}"), "1"));
        }
    }
}

/// The effects of each key in the order in which they were written.
async fn in_order<S: TestStore>(stage: &Stage<S>) -> HashMap<String, Vec<usize>> {
    let ids: Vec<String> = match &stage.eyes {
        Eyes::Postgres(pool) => {
            let sql = format!("SELECT id FROM {}.effects ORDER BY n", stage.schema);
            sqlx::query_scalar(sqlx::AssertSqlSafe(sql))
                .fetch_all(pool)
                .await
                .unwrap()
        }
        Eyes::Sqlite(pool, _) => sqlx::query_scalar("SELECT id FROM effects ORDER BY n")
            .fetch_all(pool)
            .await
            .unwrap(),
    };
    let mut keys: HashMap<String, Vec<usize>> = HashMap::new();
    for id in ids {
        let (key, n) = id.split_once('-').unwrap();
        keys.entry(key.to_owned()).or_default().push(n.parse().unwrap());
    }
    keys
}

async fn every_key_is_in_order<S: TestStore>(stage: &Stage<S>) {
    let keys = in_order(stage).await;
    assert_eq!(keys.len(), KEYS);
    for (key, order) in keys {
        assert_eq!(order, (0..EACH).collect::<Vec<_>>(), "{key}");
    }
    assert_eq!(stage.held().await, []);
}

fn lanes<S: TestStore>(stage: &Stage<S>) -> usize {
    if stage.schema.is_empty() { 1 } else { 4 }
}

/// Fails some first runs, never as often as the policy allows.
fn shaky(run: u32, seed: u64) -> bool {
    run <= 2 && fastrand::Rng::with_seed(seed).f64() < 0.2
}

fn seed_of(id: &str, run: u32) -> u64 {
    id.bytes().fold(u64::from(run), |sum, byte| {
        sum.wrapping_mul(31).wrapping_add(u64::from(byte))
    })
}

async fn keys_keep_their_order_under_failures_and_duplicates<S: TestStore>(stage: Stage<S>) {
    for batch in [1, 5] {
        let broker = Broker::seeded(7)
            .duplicate(2)
            .drop_acks(0.1)
            .redeliver_running(0.1);
        publish_all(&broker);
        let (handler, _) = Scripted::new(&stage, |run, event| {
            if shaky(run, seed_of(&event.identity.id, run)) {
                Act::Fail("no".into())
            } else {
                Act::Apply
            }
        });
        let consumer = stage
            .consumer(&format!("c{batch}"))
            .source(broker.source())
            .handler(handler)
            .ordering(Ordering::PerKey)
            .retry(RetryPolicy::none().immediate(3))
            .lanes(lanes(&stage))
            .batch(batch);
        let running = Running::start(consumer);
        soon("the acks", broker.drained()).await;
        running.stop().await;
        every_key_is_in_order(&stage).await;
        stage
            .execute("TRUNCATE {s}.effects RESTART IDENTITY", "DELETE FROM effects")
            .await;
    }
    stage.end().await;
}

/// The consumer is stopped, cut off from its broker, and dropped, again and again.
async fn keys_keep_their_order_over_restarts_and_cuts<S: TestStore>(stage: Stage<S>) {
    for batch in [1, 4] {
        let broker = Broker::seeded(11);
        publish_all(&broker);
        let (handler, _) = Scripted::new(&stage, |run, event| {
            if shaky(run, seed_of(&event.identity.id, run)) {
                Act::Fail("no".into())
            } else {
                Act::Apply
            }
        });
        let handler = Arc::new(handler);
        let mut chance = fastrand::Rng::with_seed(3);
        let mut turn = 0;
        while broker.waiting() > 0 {
            turn += 1;
            let consumer = stage
                .consumer(&format!("c{batch}"))
                .source(broker.source())
                .handler(handler.clone())
                .ordering(Ordering::PerKey)
                .retry(RetryPolicy::none().immediate(3))
                .lanes(lanes(&stage))
                .batch(batch)
                .stop_timeout(Duration::from_millis(chance.u64(0..50)));
            let running = Running::start(consumer);
            for _ in 0..3 {
                let target = broker.stats().acked + chance.u64(1..15);
                let enough = broker.until(|s| s.acked >= target);
                tokio::select! {
                    () = enough => {}
                    () = broker.drained() => {}
                }
                if chance.bool() {
                    broker.kill();
                }
            }
            // Without an orderly stop the old one would still be at it beside the new one.
            running.stop().await;
        }
        assert!(turn > 1);
        every_key_is_in_order(&stage).await;
        stage
            .execute("TRUNCATE {s}.effects RESTART IDENTITY", "DELETE FROM effects")
            .await;
    }
    stage.end().await;
}

/// Retries wait in place, as a later event must not overtake; a dead event no longer holds its key.
async fn an_event_that_gives_up_lets_its_key_go_on<S: TestStore>(stage: Stage<S>) {
    let (handler, runs) = Scripted::new(&stage, |_, event| match event.identity.id.as_str() {
        "k-1" => Act::Fail("no".into()),
        _ => Act::Apply,
    });
    let broker = Broker::new();
    let consumer = stage
        .consumer("c")
        .source(broker.source())
        .handler(handler)
        .ordering(Ordering::PerKey)
        .retry(
            RetryPolicy::none()
                .immediate(2)
                .delays([Duration::from_secs(3600)]),
        );
    let running = Running::start(consumer);
    for n in 0..3 {
        broker.publish(keyed(format!("k-{n}"), "k", "1"));
    }
    soon("the acks", broker.drained()).await;
    assert_eq!(in_order(&stage).await["k"], [0, 2]);
    assert_eq!(runs.attempts_of("k-1"), [1, 2, 3]);
    let held = stage.held().await;
    assert_eq!((held.len(), held[0].state.as_str()), (1, "dead"));
    running.stop().await;
    stage.end().await;
}

/// One key's handler does not come back, and every other key goes on; its own waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_run_beside_each_other() {
    let Some(stage) = onlyonce::store::PostgresStore::fresh().await else {
        return;
    };
    let end = Arc::new(Notify::new());
    let (handler, runs) = Scripted::new(&stage, {
        let end = end.clone();
        move |_, event| match event.identity.id.as_str() {
            "slow-0" => Act::Wait(end.clone()),
            _ => Act::Apply,
        }
    });
    let broker = Broker::new();
    // Keys are dealt to lanes by their hash: enough of them meet every lane.
    let consumer = stage
        .consumer("c")
        .source(broker.source())
        .handler(handler)
        .ordering(Ordering::PerKey)
        .lanes(8)
        .window(200);
    let running = Running::start(consumer);
    for n in 0..2 {
        broker.publish(keyed(format!("slow-{n}"), "slow", "1"));
    }
    runs.until(1).await;
    for key in 0..50 {
        broker.publish(keyed(format!("k{key}-0"), format!("k{key}"), "1"));
    }
    // Most keys belong to the seven lanes that are free.
    soon("the other keys", broker.until(|s| s.acked >= 30)).await;
    assert_eq!((runs.of("slow-0"), runs.of("slow-1")), (1, 0));
    end.notify_one();
    soon("all", broker.drained()).await;
    assert_eq!(in_order(&stage).await["slow"], [0, 1]);
    assert_eq!(stage.effects().await.len(), 52);
    running.stop().await;
    stage.end().await;
}
