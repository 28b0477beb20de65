//! G4: a failed attempt leaves no claim behind.

use std::future::ready;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use onlyonce::Ordering::Unordered;
use onlyonce::RetryPolicy;
use onlyonce::inbox::{InboxSource, Queue};
use onlyonce::testing::{Broker, CrashPoint, deliver, event, keyed};
use serde_json::Value;
use tokio::sync::Notify;

use crate::running::{Process, Running, crash_at, until};
use crate::stage::{Act, HeldRow, Scripted, Stage, TestStore, soon};

on_each_store!(
    every_way_to_fail_is_followed_by_another_run,
    after_a_death_the_redelivery_is_no_duplicate,
    an_event_that_was_given_back_is_no_duplicate_of_itself,
    an_event_that_waits_in_the_inbox_is_no_duplicate_of_itself,
    attempts_add_up_in_place_and_from_the_inbox,
    a_discarded_event_is_remembered_and_its_work_is_not,
    a_copy_that_waited_for_a_letter_adds_to_it,
    a_letter_waits_for_the_copy_that_is_running,
    the_newest_failures_are_kept_and_all_are_counted,
    of_eight_instances_one_runs_a_held_event,
    after_a_death_a_held_event_runs_when_its_lease_is_over,
    a_late_failure_of_a_lost_lease_changes_nothing,
);

async fn every_way_to_fail_is_followed_by_another_run<S: TestStore>(stage: Stage<S>) {
    let schema = stage.schema.clone();
    let (handler, runs) = Scripted::new(&stage, move |run, event| {
        match (run, event.identity.id.as_str()) {
            (1, "error") => Act::Fail("no".into()),
            (1, "panic") => Act::Panic,
            (1, "timeout") => Act::Hang,
            (1, "statement") => {
                let schema = schema.clone();
                Act::by(move |cx| {
                    Box::pin(async move {
                        S::write(cx.tx(), &schema, "statement").await?;
                        Ok(S::raw(cx.tx(), "INSERT INTO no_such_table VALUES (1)".into()).await?)
                    })
                })
            }
            _ => Act::Apply,
        }
    });
    let consumer = stage
        .consumer("c")
        .handler(handler)
        .handler_timeout(Duration::from_millis(300))
        .retry(RetryPolicy::new().immediate(1));
    let ids = ["error", "panic", "timeout", "statement", "fine"];
    deliver(consumer, ids.map(|id| event(id, "x"))).await.unwrap();
    for id in ids {
        assert_eq!(stage.effects().await.get(id), Some(&1), "{id}");
        assert_eq!(runs.of(id), if id == "fine" { 1 } else { 2 }, "{id}");
    }
    assert_eq!(stage.held().await, []);
    stage.end().await;
}

async fn after_a_death_the_redelivery_is_no_duplicate<S: TestStore>(stage: Stage<S>) {
    let broker = Broker::new();
    broker.publish(event("x", "x"));
    let (plan, crashed) = crash_at(CrashPoint::Handled);
    let (handler, runs) = Scripted::applies(&stage);
    let handler = Arc::new(handler);
    let first = stage
        .consumer_of("c", S::another(&stage).await)
        .handler(handler.clone())
        .source(broker.source())
        .crash_when(plan);
    let process = Process::start(ready(first));
    soon("the death", crashed.notified()).await;
    process.die();
    broker.kill();
    assert_eq!(stage.processed("c").await, []);

    let again = broker.clone();
    let second = stage.consumer("c").handler(handler).source(broker.source());
    let drained = async move { again.drained().await };
    soon("the redelivery", second.build().unwrap().run_until(drained))
        .await
        .unwrap();
    assert_eq!((runs.total(), stage.effects().await["x"]), (2, 1));
    stage.end().await;
}

/// Each of the first two consumers is stopped while the event waits for its next run in place.
async fn an_event_that_was_given_back_is_no_duplicate_of_itself<S: TestStore>(stage: Stage<S>) {
    let broker = Broker::new();
    broker.publish(keyed("x", "k", "x"));
    for run in 1..=3 {
        let failing = Arc::new(Notify::new());
        let failed = failing.clone();
        let (handler, runs) = Scripted::new(&stage, move |_, _| {
            if run == 3 {
                return Act::Apply;
            }
            failing.notify_one();
            Act::Fail("no".into())
        });
        // In its key's order nothing is held at a stop: it goes back.
        let consumer = stage
            .consumer("c")
            .handler(handler)
            .source(broker.source())
            .ordering(onlyonce::Ordering::PerKey)
            .retry(RetryPolicy::none().immediate(1000));
        let done = broker.clone();
        let stop = async move {
            if run == 3 {
                done.drained().await;
            } else {
                failed.notified().await;
            }
        };
        soon("a stop", consumer.build().unwrap().run_until(stop))
            .await
            .unwrap();
        assert!(runs.total() >= 1);
        assert_eq!(broker.stats().acked, u64::from(run == 3));
    }
    assert_eq!(stage.effects().await["x"], 1);
    assert_eq!(stage.processed("c").await.len(), 1);
    assert_eq!(stage.held().await, []);
    stage.end().await;
}

async fn an_event_that_waits_in_the_inbox_is_no_duplicate_of_itself<S: TestStore>(stage: Stage<S>) {
    let attempts = Arc::new(Mutex::new(Vec::new()));
    let (seen, schema) = (attempts.clone(), stage.schema.clone());
    let (handler, runs) = Scripted::new(&stage, move |run, _| {
        let (seen, schema) = (seen.clone(), schema.clone());
        Act::by(move |cx| {
            Box::pin(async move {
                seen.lock().unwrap().push(cx.attempt());
                S::write(cx.tx(), &schema, "x").await?;
                if run < 3 { Err("no".into()) } else { Ok(()) }
            })
        })
    });
    let broker = Broker::new();
    broker.publish(event("x", "x"));
    let consumer = stage
        .consumer("c")
        .handler(handler)
        .source(broker.source())
        .ordering(Unordered)
        .retry(RetryPolicy::none().delays([Duration::ZERO; 4]));
    let process = Running::start(consumer);
    until("the third run", async || {
        runs.total() == 3 && stage.held().await.is_empty()
    })
    .await;
    process.stop().await;
    assert_eq!(broker.stats().acked, 1);
    assert_eq!(
        *attempts.lock().unwrap(),
        [1, 2, 3],
        "attempts are counted in the row"
    );
    assert_eq!(stage.effects().await["x"], 1);
    stage.end().await;
}

async fn attempts_add_up_in_place_and_from_the_inbox<S: TestStore>(stage: Stage<S>) {
    let (handler, runs) = Scripted::new(&stage, |run, _| Act::Fail(format!("no {run}").into()));
    let broker = Broker::new();
    broker.publish(event("x", "x"));
    let consumer = stage
        .consumer("c")
        .handler(handler)
        .source(broker.source())
        .ordering(Unordered)
        .retry(RetryPolicy::none().immediate(2).delays([Duration::ZERO; 2]));
    let process = Running::start(consumer);
    until("the dead letter", async || {
        stage.held().await.iter().any(|row| row.state == "dead")
    })
    .await;
    process.stop().await;
    let row = &stage.held().await[0];
    assert_eq!(
        (runs.total(), row.attempts),
        (5, 5),
        "1 + 2 in place + 2 from the inbox"
    );
    assert_eq!(row.reason.as_deref(), Some("retries_exhausted"));
    assert_eq!(errors(row), ["no 1", "no 2", "no 3", "no 4", "no 5"]);
    assert_eq!(stage.processed("c").await, []);
    stage.end().await;
}

async fn a_discarded_event_is_remembered_and_its_work_is_not<S: TestStore>(stage: Stage<S>) {
    let (handler, runs) = Scripted::new(&stage, |_, _| {
        Act::Fail(onlyonce::HandlerError::discard("nothing to do"))
    });
    let copies = [event("x", "x"), event("x", "x")];
    let report = deliver(stage.consumer("c").handler(handler).lanes(1), copies)
        .await
        .unwrap();
    assert_eq!((report.acked, runs.total()), (2, 1));
    assert!(stage.effects().await.is_empty());
    assert_eq!(stage.held().await, []);
    assert_eq!(
        stage.processed("c").await,
        [("x".to_owned(), "discarded".to_owned())]
    );
    stage.end().await;
}

/// Two failing copies at once: one row, the attempts of both.
async fn a_copy_that_waited_for_a_letter_adds_to_it<S: TestStore>(stage: Stage<S>) {
    let (handler, runs) = Scripted::new(&stage, |run, _| Act::Fail(format!("no {run}").into()));
    let handler = Arc::new(handler);
    let copies = (0..8).map(|_| {
        let consumer = stage.consumer("c").handler(handler.clone()).lanes(1);
        tokio::spawn(deliver(consumer, [event("x", "x")]))
    });
    for copy in futures_util::future::join_all(copies).await {
        assert_eq!(copy.unwrap().unwrap().acked, 1);
    }
    let rows = stage.held().await;
    assert_eq!(rows.len(), 1);
    assert_eq!(rows[0].state, "dead");
    assert_eq!(rows[0].attempts, i64::from(runs.total()));
    assert_eq!(errors(&rows[0]).len(), runs.total() as usize);
    assert_eq!(stage.processed("c").await, [], "parking gives its claim back");
    stage.end().await;
}

/// The first copy has failed and wants to write its letter while the second one runs: it waits, and
/// when the second commits there is nothing left to hold.
async fn a_letter_waits_for_the_copy_that_is_running<S: TestStore>(stage: Stage<S>) {
    let (failed, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let signal = go.clone();
    let (handler, runs) = Scripted::new(&stage, move |run, _| match run {
        1 => Act::Fail("no".into()),
        _ => Act::Wait(signal.clone()),
    });
    let handler = Arc::new(handler);
    // Holds the first lane between its rollback and its letter.
    let (let_go, held) = mpsc::channel::<()>();
    let (held, reached) = (Mutex::new(held), failed.clone());
    let first = stage
        .consumer("c")
        .handler(handler.clone())
        .lanes(1)
        .crash_when(move |point| {
            if point == CrashPoint::RolledBack {
                reached.notify_one();
                tokio::task::block_in_place(|| held.lock().unwrap().recv().ok());
            }
            false
        });
    let first = tokio::spawn(deliver(first, [event("x", "x")]));
    soon("the failure", failed.notified()).await;
    let second = stage.consumer("c").handler(handler).lanes(1);
    let second = tokio::spawn(deliver(second, [event("x", "x")]));
    runs.until(2).await;
    let_go.send(()).unwrap();
    stage.somebody_waits_for_a_lock().await;
    assert_eq!(stage.held().await, []);
    go.notify_one();
    soon("both acks", async {
        assert_eq!(first.await.unwrap().unwrap().acked, 1);
        assert_eq!(second.await.unwrap().unwrap().acked, 1);
    })
    .await;
    assert_eq!((runs.total(), stage.effects().await["x"]), (2, 1));
    assert_eq!(stage.held().await, [], "a processed event has no letter");
    stage.end().await;
}

async fn the_newest_failures_are_kept_and_all_are_counted<S: TestStore>(stage: Stage<S>) {
    let (handler, _) = Scripted::new(&stage, |run, event| {
        Act::Fail(format!("{} {run}: {}", event.identity.id, "long ".repeat(1000)).into())
    });
    // Another payload each time, so that none of them is held by the one before.
    let copies = (0..25).map(|n| event("x", format!("{n}")));
    let consumer = stage.consumer("c").handler(handler).lanes(1);
    deliver(consumer, copies).await.unwrap();
    let row = &stage.held().await[0];
    assert_eq!(row.attempts, 25);
    let errors = errors(row);
    assert_eq!(errors.len(), 20);
    assert!(errors[0].starts_with("x 6: ") && errors[19].starts_with("x 25: "));
    assert!(errors.iter().all(|error| error.len() <= 1024));
    stage.end().await;
}

async fn of_eight_instances_one_runs_a_held_event<S: TestStore>(stage: Stage<S>) {
    Queue::new(stage.store.clone(), "c")
        .enqueue(event("x", "x"))
        .await
        .unwrap();
    let entries = Arc::new(AtomicU32::new(0));
    let (counts, schema) = (entries.clone(), stage.schema.clone());
    let (handler, runs) = Scripted::new(&stage, move |_, _| {
        let (counts, schema) = (counts.clone(), schema.clone());
        Act::by(move |cx| {
            Box::pin(async move {
                let entry = counts.fetch_add(1, Ordering::SeqCst);
                S::write(cx.tx(), &schema, "x").await?;
                tokio::time::sleep(Duration::from_millis(200)).await;
                if entry == 0 {
                    Ok(())
                } else {
                    Err("ran twice".into())
                }
            })
        })
    });
    let handler = Arc::new(handler);
    let scanners: Vec<_> = (0..8)
        .map(|_| {
            Running::start(
                stage
                    .consumer("c")
                    .handler(handler.clone())
                    .source(InboxSource::new(stage.store.clone(), "c"))
                    .lanes(1),
            )
        })
        .collect();
    until("the end of the row", async || stage.held().await.is_empty()).await;
    for scanner in scanners {
        scanner.stop().await;
    }
    assert_eq!((runs.total(), stage.effects().await["x"]), (1, 1));
    assert_eq!(stage.processed("c").await.len(), 1);
    assert_eq!(stage.held().await, []);
    stage.end().await;
}

async fn after_a_death_a_held_event_runs_when_its_lease_is_over<S: TestStore>(stage: Stage<S>) {
    let (handler, runs) = Scripted::applies(&stage);
    let handler = Arc::new(handler);
    let consumer = |store: S| {
        let source = InboxSource::new(store.clone(), "c").lease(Duration::from_secs(2));
        stage
            .consumer_of("c", store)
            .handler(handler.clone())
            .source(source)
            .lanes(1)
    };
    Queue::new(stage.store.clone(), "c")
        .enqueue(event("x", "x"))
        .await
        .unwrap();
    let (plan, crashed) = crash_at(CrashPoint::Claimed);
    let first = consumer(S::another(&stage).await).crash_when(plan);
    let dies = Process::start(ready(first));
    soon("the death", crashed.notified()).await;
    dies.die();
    assert_eq!(stage.held().await[0].state, "running");
    let leased = std::time::Instant::now();

    let others: Vec<_> = (0..3)
        .map(|_| Running::start(consumer(stage.store.clone())))
        .collect();
    until("the end of the row", async || stage.held().await.is_empty()).await;
    // Renewed at most once more while it was dying.
    assert!(
        leased.elapsed() > Duration::from_millis(1000),
        "not before the lease is over"
    );
    for other in others {
        other.stop().await;
    }
    assert_eq!((runs.total(), stage.effects().await["x"]), (1, 1));
    stage.end().await;
}

/// An instance fails with an event whose lease ran out meanwhile, and whose next owner has it now.
/// Its word, which would be a dead letter, does not count any more.
async fn a_late_failure_of_a_lost_lease_changes_nothing<S: TestStore>(stage: Stage<S>) {
    Queue::new(stage.store.clone(), "c")
        .enqueue(event("x", "x"))
        .await
        .unwrap();
    let (failed, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let signal = go.clone();
    let (handler, runs) = Scripted::new(&stage, move |run, _| match run {
        1 => Act::Fail("late".into()),
        _ => Act::Wait(signal.clone()),
    });
    let handler = Arc::new(handler);
    let consumer = || {
        stage
            .consumer("c")
            .handler(handler.clone())
            .source(InboxSource::new(stage.store.clone(), "c"))
            .lanes(1)
            // The first must not take its own row again.
            .window(1)
    };
    let (let_go, held) = mpsc::channel::<()>();
    let (held, reached) = (Mutex::new(held), failed.clone());
    let first = Running::start(consumer().crash_when(move |point| {
        if point == CrashPoint::RolledBack {
            reached.notify_one();
            tokio::task::block_in_place(|| held.lock().unwrap().recv().ok());
        }
        false
    }));
    soon("the failure", failed.notified()).await;
    stage
        .execute(
            "UPDATE {s}.inbox SET leased_until = now() - interval '1 second'",
            "UPDATE onlyonce_inbox SET leased_until = 0",
        )
        .await;
    let second = Running::start(consumer());
    runs.until(2).await;
    let_go.send(()).unwrap();
    if !stage.has_one_writer() {
        // The first is done with it, and the row is as the second has it.
        first.stop().await;
        let row = &stage.held().await[0];
        assert_eq!(
            (row.state.as_str(), row.attempts, row.failures.as_str()),
            ("running", 0, "[]")
        );
        go.notify_one();
    } else {
        go.notify_one();
        first.stop().await;
    }
    until("the end of the row", async || stage.held().await.is_empty()).await;
    second.stop().await;
    assert_eq!((runs.total(), stage.effects().await["x"]), (2, 1));
    assert_eq!(stage.processed("c").await.len(), 1);
    stage.end().await;
}

/// The texts of a row's failures, oldest first.
fn errors(row: &HeldRow) -> Vec<String> {
    let failures: Vec<Value> = serde_json::from_str(&row.failures).unwrap();
    failures
        .iter()
        .map(|failure| failure["error"].as_str().unwrap().to_owned())
        .collect()
}
