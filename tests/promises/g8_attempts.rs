//! G8: attempts are counted durably, over restarts and instances.

use std::time::Duration;

use onlyonce::testing::{Broker, CrashPoint, event};
use onlyonce::{Consumer, RetryPolicy};
use tokio::sync::watch;

use crate::running::{Process, Running, until};
use crate::stage::{Act, HeldRow, Scripted, Stage, TestStore, soon};

on_each_store!(
    there_are_exactly_as_many_attempts_as_the_policy_says,
    several_instances_count_together,
    a_stop_between_two_attempts_forgets_none,
    a_restart_goes_on_counting,
    a_redelivery_does_not_start_again
);

const SHORT: Duration = Duration::from_millis(20);

async fn dead<S: TestStore>(stage: &Stage<S>) -> Vec<HeldRow> {
    until("the dead letter", async || {
        let held = stage.held().await;
        !held.is_empty() && held.iter().all(|row| row.state == "dead")
    })
    .await;
    stage.held().await
}

async fn there_are_exactly_as_many_attempts_as_the_policy_says<S: TestStore>(stage: Stage<S>) {
    for (n, policy) in [
        RetryPolicy::none(),
        RetryPolicy::none().immediate(2),
        RetryPolicy::none().delays([SHORT, SHORT]),
        RetryPolicy::none().immediate(2).delays([SHORT, SHORT]),
    ]
    .into_iter()
    .enumerate()
    {
        let (name, max) = (format!("c{n}"), policy.max_attempts());
        let (handler, runs) = Scripted::new(&stage, |_, _| Act::Fail("no".into()));
        let broker = Broker::new();
        broker.publish(event("x", "1"));
        let consumer = stage.consumer(&name).handler(handler).retry(policy);
        let running = Running::start(consumer.source(broker.source()));
        soon("the ack", broker.drained()).await;
        let held = dead(&stage).await;
        assert_eq!((held.len(), held[0].attempts), (1, i64::from(max)), "{name}");
        assert_eq!(held[0].reason.as_deref(), Some("retries_exhausted"));
        assert_eq!(runs.attempts_of("x"), (1..=max).collect::<Vec<_>>(), "{name}");
        running.stop().await;
        stage
            .execute("DELETE FROM {s}.inbox", "DELETE FROM onlyonce_inbox")
            .await;
    }
    stage.end().await;
}

/// Three instances race for the same held events; each attempt is somebody's, and only once.
async fn several_instances_count_together<S: TestStore>(stage: Stage<S>) {
    let broker = Broker::new();
    let policy = RetryPolicy::none().delays([Duration::ZERO; 4]);
    let mut instances = Vec::new();
    let mut counts = Vec::new();
    for _ in 0..3 {
        let (handler, runs) = Scripted::new(&stage, |_, _| Act::Fail("no".into()));
        let store = S::another(&stage).await;
        let consumer = Consumer::builder("c", store)
            .retry(policy.clone())
            .handler(handler);
        instances.push(Running::start(consumer.source(broker.source())));
        counts.push(runs);
    }
    for id in ["x", "y", "z"] {
        broker.publish(event(id, "1"));
    }
    soon("the acks", broker.drained()).await;
    until("the dead letters", async || {
        stage
            .held()
            .await
            .iter()
            .filter(|row| row.state == "dead")
            .count()
            == 3
    })
    .await;
    for id in ["x", "y", "z"] {
        let mut attempts: Vec<u32> = counts.iter().flat_map(|runs| runs.attempts_of(id)).collect();
        attempts.sort_unstable();
        assert_eq!(attempts, (1..=5).collect::<Vec<_>>(), "{id}");
    }
    assert!(stage.held().await.iter().all(|row| row.attempts == 5));
    for instance in instances {
        instance.stop().await;
    }
    stage.end().await;
}

/// A long wait between two attempts in place is cut short by a stop; the event is held with what it has.
async fn a_stop_between_two_attempts_forgets_none<S: TestStore>(stage: Stage<S>) {
    let policy = RetryPolicy::none().immediate(4);
    let broker = Broker::new();
    broker.publish(event("x", "1"));
    let mut attempts = Vec::new();
    for instance in 1.. {
        let (handler, runs) = Scripted::new(&stage, |_, _| Act::Fail("no".into()));
        let consumer = stage.consumer("c").handler(handler).retry(policy.clone());
        let running = Running::start(consumer.source(broker.source()));
        runs.until(1).await;
        running.stop().await;
        let runs = runs.attempts_of("x");
        attempts.extend(runs.iter().copied());
        let held = stage.held().await;
        assert_eq!(
            held[0].attempts,
            i64::from(*runs.last().unwrap()),
            "instance {instance} left its count behind"
        );
        if held[0].state == "dead" {
            break;
        }
        assert_eq!(held[0].state, "ready");
    }
    assert_eq!(attempts, [1, 2, 3, 4, 5]);
    assert_eq!(broker.stats().released, 0);
    stage.end().await;
}

/// Each process dies while it holds the event, right after a failed attempt was stored.
async fn a_restart_goes_on_counting<S: TestStore>(stage: Stage<S>) {
    let policy = RetryPolicy::none().delays([Duration::ZERO; 3]);
    let broker = Broker::new();
    broker.publish(event("x", "1"));
    let mut attempts = Vec::new();
    for _ in 0..4 {
        let (handler, runs) = Scripted::new(&stage, |_, _| Act::Fail("no".into()));
        let (parked, mut seen) = watch::channel(false);
        let process = Process::start({
            let (open, source, policy) = (S::another(&stage), broker.source(), policy.clone());
            async move {
                Consumer::builder("c", open.await)
                    .source(source)
                    .handler(handler)
                    .retry(policy)
                    .crash_when(move |point| {
                        let crashes = point == CrashPoint::Parked;
                        if crashes {
                            parked.send_replace(true);
                        }
                        crashes
                    })
            }
        });
        soon("the parking", seen.wait_for(|seen| *seen)).await.unwrap();
        process.die();
        broker.kill();
        attempts.extend(runs.attempts_of("x"));
        assert_eq!(stage.held().await[0].attempts, attempts.len() as i64);
    }
    assert_eq!(attempts, [1, 2, 3, 4]);
    assert_eq!(stage.held().await[0].state, "dead");
    stage.end().await;
}

/// The broker's copy of a held event is acked: the count stands with the row, not with the copy.
async fn a_redelivery_does_not_start_again<S: TestStore>(stage: Stage<S>) {
    let (handler, runs) = Scripted::new(&stage, |_, _| Act::Fail("no".into()));
    let broker = Broker::new();
    let later = RetryPolicy::none().delays([Duration::from_secs(3600)]);
    let consumer = stage.consumer("c").handler(handler).retry(later);
    let running = Running::start(consumer.source(broker.source()));
    for copies in 1..=3 {
        broker.publish(event("x", "1"));
        soon("the ack", broker.drained()).await;
        assert_eq!(broker.stats().acked, copies);
    }
    assert_eq!(runs.attempts_of("x"), [1]);
    let held = stage.held().await;
    assert_eq!((held[0].state.as_str(), held[0].attempts), ("ready", 1));
    running.stop().await;
    stage.end().await;
}
