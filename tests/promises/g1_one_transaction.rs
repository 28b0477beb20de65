//! G1: the claim, the handler's writes and what it sends commit in one transaction, or none of them does.

use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use onlyonce::Ordering::Unordered;
use onlyonce::inbox::{InboxSource, Queue};
use onlyonce::outbox::OutgoingEvent;
use onlyonce::testing::{Broker, CrashPoint, deliver, event};
use onlyonce::{HandlerError, RetryPolicy};
use tokio::sync::Notify;

use crate::running::{Process, crash_at, until};
use crate::stage::{Act, Scripted, Stage, TestStore, events, soon};

on_each_store!(
    effects_and_claims_are_there_together,
    a_failed_run_leaves_neither,
    a_death_at_any_point_leaves_one_effect_and_one_claim,
    a_death_while_a_held_event_runs_leaves_one_effect_and_one_claim,
    what_a_failed_run_believed_is_forgotten_with_it,
    a_business_claim_commits_and_vanishes_with_the_work,
    of_two_concurrent_business_claims_one_is_first,
);

async fn effects_and_claims_are_there_together<S: TestStore>(stage: Stage<S>) {
    let (handler, runs) = Scripted::applies(&stage);
    let report = deliver(stage.consumer("c").handler(handler), events(20))
        .await
        .unwrap();
    assert_eq!(report.acked, 20);
    assert_eq!(runs.total(), 20);
    assert_eq!(stage.effects().await.len(), 20);
    assert_eq!(stage.processed("c").await.len(), 20);
    assert_eq!(stage.held().await, []);
    stage.end().await;
}

async fn a_failed_run_leaves_neither<S: TestStore>(stage: Stage<S>) {
    let (handler, _) = Scripted::new(&stage, |_, _| Act::Fail("no".into()));
    deliver(stage.consumer("c").handler(handler), events(3))
        .await
        .unwrap();
    assert_eq!(stage.effects().await.len(), 0);
    assert_eq!(stage.processed("c").await, []);
    assert_eq!(stage.held().await.len(), 3, "each is a dead letter");
    stage.end().await;
}

async fn a_death_at_any_point_leaves_one_effect_and_one_claim<S: TestStore>(stage: Stage<S>) {
    let lives = CrashPoint::ALL.map(|point| die_with_an_event(&stage, point));
    join_all(lives).await;
    stage.end().await;
}

/// The first process dies at the point, the second one finds what is left. How often the handler
/// runs says which of the two did the work.
async fn die_with_an_event<S: TestStore>(stage: &Stage<S>, point: CrashPoint) {
    let (fails_first, entries) = match point {
        CrashPoint::RolledBack | CrashPoint::Parked => (true, 2),
        CrashPoint::Handled | CrashPoint::Recorded => (false, 2),
        _ => (false, 1),
    };
    let name = point.as_str();
    let entered = Arc::new(AtomicU32::new(0));
    let consumer = |store: S| {
        let (counts, schema) = (entered.clone(), stage.schema.clone());
        let (handler, _) = Scripted::new(stage, move |_, event| {
            let first = counts.fetch_add(1, Ordering::SeqCst) == 0;
            let (schema, id) = (schema.clone(), event.identity.id.clone());
            Act::by(move |cx| {
                Box::pin(async move {
                    S::write(cx.tx(), &schema, &id).await?;
                    cx.outbox().send(OutgoingEvent::new("kafka:t", id, ""))?;
                    if first && fails_first {
                        Err("no".into())
                    } else {
                        Ok(())
                    }
                })
            })
        });
        stage
            .consumer_of(name, store)
            .handler(handler)
            .lanes(1)
            .ordering(Unordered)
            .retry(match point {
                // Not due before the first process is gone.
                CrashPoint::Parked => RetryPolicy::none().delays([Duration::from_secs(2)]),
                _ => RetryPolicy::none().immediate(1),
            })
    };
    let broker = Broker::new();
    broker.publish(event(name, "x"));

    let (plan, crashed) = crash_at(point);
    let first = consumer(S::another(stage).await)
        .source(broker.source())
        .crash_when(plan);
    let process = Process::start(ready(first));
    soon(name, crashed.notified()).await;
    process.die();
    broker.kill();

    let second = consumer(S::another(stage).await).source(broker.source());
    let second = Process::start(ready(second));
    soon(name, broker.drained()).await;
    until(name, async || {
        stage.effects().await.contains_key(name) && stage.held_of(name).await.is_empty()
    })
    .await;
    second.die();
    assert_eq!(stage.effects().await[name], 1, "{name}");
    assert_eq!(
        stage.processed(name).await,
        [(name.to_owned(), "processed".to_owned())],
        "{name}"
    );
    assert_eq!(entered.load(Ordering::SeqCst), entries, "{name}");
    assert_eq!(sent(stage, name).await, 1, "{name}");
}

async fn sent<S: TestStore>(stage: &Stage<S>, event_type: &str) -> usize {
    let mut rows = stage.outgoing().await;
    rows.retain(|row| row.event_type.as_deref() == Some(event_type));
    rows.len()
}

async fn a_death_while_a_held_event_runs_leaves_one_effect_and_one_claim<S: TestStore>(stage: Stage<S>) {
    let lives = CrashPoint::ALL.map(|point| die_with_a_held_event(&stage, point));
    join_all(lives).await;
    stage.end().await;
}

async fn die_with_a_held_event<S: TestStore>(stage: &Stage<S>, point: CrashPoint) {
    let name = point.as_str();
    let fails_first = matches!(point, CrashPoint::RolledBack | CrashPoint::Parked);
    let entered = Arc::new(AtomicU32::new(0));
    let consumer = |store: S| {
        let (counts, schema) = (entered.clone(), stage.schema.clone());
        let (handler, _) = Scripted::new(stage, move |_, event| {
            let first = counts.fetch_add(1, Ordering::SeqCst) == 0;
            let (schema, id) = (schema.clone(), event.identity.id.clone());
            Act::by(move |cx| {
                Box::pin(async move {
                    S::write(cx.tx(), &schema, &id).await?;
                    cx.outbox().send(OutgoingEvent::new("kafka:t", id, ""))?;
                    if first && fails_first {
                        Err("no".into())
                    } else {
                        Ok(())
                    }
                })
            })
        });
        stage
            .consumer_of(name, store.clone())
            .source(InboxSource::new(store, name).lease(Duration::from_secs(1)))
            .handler(handler)
            .lanes(1)
            .ordering(Unordered)
            // In place or held: the crash point is reached before the one and after the other.
            .retry(match point {
                CrashPoint::Parked => RetryPolicy::none().delays([Duration::ZERO]),
                _ => RetryPolicy::none().immediate(1),
            })
    };
    Queue::new(stage.store.clone(), name)
        .enqueue(event(name, "x"))
        .await
        .unwrap();

    let (plan, crashed) = crash_at(point);
    let first = consumer(S::another(stage).await).crash_when(plan);
    let process = Process::start(ready(first));
    soon(name, crashed.notified()).await;
    process.die();

    let second = consumer(S::another(stage).await);
    let process = Process::start(ready(second));
    until(name, async || {
        stage.effects().await.contains_key(name) && stage.held_of(name).await.is_empty()
    })
    .await;
    process.die();
    assert_eq!(stage.effects().await[name], 1, "{name}");
    assert_eq!(stage.processed(name).await.len(), 1, "{name}");
    assert_eq!(sent(stage, name).await, 1, "{name}");
}

/// A unique violation rolls everything back; what becomes of the event is decided by its dead letter
/// alone, and neither a redelivery nor a restart runs it again.
async fn what_a_failed_run_believed_is_forgotten_with_it<S: TestStore>(stage: Stage<S>) {
    stage
        .execute(
            "CREATE UNIQUE INDEX ON {s}.effects (id)",
            "CREATE UNIQUE INDEX one_effect ON effects (id)",
        )
        .await;
    let schema = stage.schema.clone();
    let script = move |_: u32, _: &onlyonce::Event| {
        let schema = schema.clone();
        Act::by(move |cx| {
            Box::pin(async move {
                S::write(cx.tx(), &schema, "same").await?;
                S::write(cx.tx(), &schema, "same")
                    .await
                    .map_err(HandlerError::permanent)
            })
        })
    };
    for restart in 0..2 {
        let (handler, runs) = Scripted::new(&stage, script.clone());
        let report = deliver(stage.consumer("c").handler(handler), events(1))
            .await
            .unwrap();
        assert_eq!(
            (report.acked, runs.total()),
            (1, if restart == 0 { 1 } else { 0 })
        );
        let letters = stage.held().await;
        assert_eq!(letters.len(), 1);
        assert_eq!(
            (letters[0].state.as_str(), letters[0].reason.as_deref()),
            ("dead", Some("permanent_error"))
        );
    }
    assert!(stage.effects().await.is_empty());
    assert_eq!(stage.processed("c").await, []);
    stage.end().await;
}

async fn once_claims<S: TestStore>(stage: &Stage<S>) -> i64 {
    stage
        .number(
            "SELECT count(*) FROM {s}.processed_events WHERE kind = 'once'",
            "SELECT count(*) FROM onlyonce_processed_events WHERE kind = 'once'",
        )
        .await
}

async fn a_business_claim_commits_and_vanishes_with_the_work<S: TestStore>(stage: Stage<S>) {
    let schema = stage.schema.clone();
    let (handler, _) = Scripted::new(&stage, move |run, event| {
        let (schema, id) = (schema.clone(), event.identity.id.clone());
        Act::by(move |cx| {
            Box::pin(async move {
                if cx.once("invoice-paid", 7).await? {
                    S::write(cx.tx(), &schema, "paid").await?;
                } else {
                    S::write(cx.tx(), &schema, "known").await?;
                }
                if id == "e0" && run == 1 {
                    Err("no".into())
                } else {
                    Ok(())
                }
            })
        })
    });
    let consumer = stage
        .consumer("c")
        .handler(handler)
        .lanes(1)
        .retry(RetryPolicy::none().immediate(1));
    deliver(consumer, events(3)).await.unwrap();
    let effects = stage.effects().await;
    assert_eq!(
        (effects["paid"], effects["known"]),
        (1, 2),
        "the claim of the run that failed went with it"
    );
    assert_eq!(once_claims(&stage).await, 1);

    // A name is good for one consumer.
    let schema = stage.schema.clone();
    let (handler, _) = Scripted::new(&stage, move |_, _| {
        let schema = schema.clone();
        Act::by(move |cx| {
            Box::pin(async move {
                assert!(cx.once("invoice-paid", 7).await?);
                Ok(S::write(cx.tx(), &schema, "other").await?)
            })
        })
    });
    deliver(stage.consumer("d").handler(handler), events(1))
        .await
        .unwrap();
    assert_eq!(stage.effects().await["other"], 1);
    stage.end().await;
}

/// Two events that mean one fact, at the same time, and the first of them fails after the second has
/// begun to wait for it.
async fn of_two_concurrent_business_claims_one_is_first<S: TestStore>(stage: Stage<S>) {
    for first_fails in [false, true] {
        let name = if first_fails { "fails" } else { "commits" };
        let (holds, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let handler = |first: bool| {
            let (schema, holds, go) = (stage.schema.clone(), holds.clone(), go.clone());
            let (handler, runs) = Scripted::new(&stage, move |_, _| {
                let (schema, holds, go) = (schema.clone(), holds.clone(), go.clone());
                Act::by(move |cx| {
                    Box::pin(async move {
                        let mine = cx.once("invoice-paid", name).await?;
                        let id = format!("{name}-{}", if mine { "paid" } else { "known" });
                        S::write(cx.tx(), &schema, &id).await?;
                        if first {
                            holds.notify_one();
                            go.notified().await;
                            if first_fails {
                                return Err(HandlerError::permanent("no"));
                            }
                        }
                        Ok(())
                    })
                })
            });
            (handler, runs)
        };
        let (handler_a, _) = handler(true);
        let (handler_b, runs_b) = handler(false);
        let a = tokio::spawn(deliver(
            stage.consumer(name).handler(handler_a),
            [event("a", "x")],
        ));
        soon("the first claim", holds.notified()).await;
        let b = tokio::spawn(deliver(
            stage.consumer(name).handler(handler_b),
            [event("b", "x")],
        ));
        if !stage.has_one_writer() {
            runs_b.until(1).await;
        }
        go.notify_one();
        soon("both", async {
            a.await.unwrap().unwrap();
            b.await.unwrap().unwrap();
        })
        .await;
        let effects = stage.effects().await;
        assert_eq!(effects.get(&format!("{name}-paid")), Some(&1), "{name}");
        assert_eq!(
            effects.get(&format!("{name}-known")).copied(),
            (!first_fails).then_some(1),
            "{name}"
        );
    }
    assert_eq!(once_claims(&stage).await, 2);
    stage.end().await;
}
