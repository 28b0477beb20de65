//! G5: a commit whose outcome is unknown is neither success nor failure; running the event again finds out.

use onlyonce::RetryPolicy;

use onlyonce::store::{Isolation, PostgresStore};
use onlyonce::testing::{Broker, CrashPoint, deliver, event};
use tokio::sync::watch;

use crate::proxy::{Cut, Proxy};
use crate::running::{Process, Running};
use crate::stage::{Act, Scripted, Stage, TestStore, events, soon};

/// One event whose COMMIT is cut, with a policy that forgives nothing.
async fn one_event_whose_commit_is_cut(cut: Cut) {
    let (Some(stage), Some(proxy)) = (PostgresStore::fresh().await, Proxy::start().await) else {
        return;
    };
    let (handler, runs) = Scripted::applies(&stage);
    let broker = Broker::new();
    // Counts how often the lane believed that a commit was durable.
    let (committed, seen) = watch::channel(0);
    let consumer = onlyonce::Consumer::builder("c", proxy.store(&stage.schema))
        .source(broker.source())
        .handler(handler)
        .retry(RetryPolicy::none())
        .crash_when(move |point| {
            if point == CrashPoint::Committed {
                committed.send_modify(|n| *n += 1);
            }
            false
        });
    proxy.cut_next_commit(cut);
    let running = Running::start(consumer);
    broker.publish(event("x", "1"));
    soon("the ack", broker.drained()).await;

    assert_eq!(proxy.commits_cut(), 1, "the fault was there");
    assert_eq!(stage.effects().await.get("x"), Some(&1), "applied once");
    assert_eq!(stage.held().await, [], "neither a dead letter nor a retry");
    assert_eq!(broker.stats().acked, 1);
    assert_eq!(broker.stats().released, 0, "found out in place");
    match cut {
        Cut::Before => {
            assert_eq!(runs.attempts_of("x"), [1, 1], "it was not an attempt");
            assert_eq!(*seen.borrow(), 1);
        }
        Cut::After => {
            assert_eq!(runs.total(), 1, "the claim told that it was a duplicate");
            assert_eq!(*seen.borrow(), 0, "no commit was confirmed");
        }
    }
    running.stop().await;
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_never_arrived_is_made_again() {
    one_event_whose_commit_is_cut(Cut::Before).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_answer_was_lost_is_recognised() {
    one_event_whose_commit_is_cut(Cut::After).await;
}

/// The same without a way to find out: the process dies before it can run the event again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_acked_while_the_outcome_is_unknown() {
    for cut in [Cut::Before, Cut::After] {
        let (Some(stage), Some(proxy)) = (PostgresStore::fresh().await, Proxy::start().await) else {
            return;
        };
        let (handler, _) = Scripted::applies(&stage);
        let broker = Broker::new();
        let (rolled_back, mut seen) = watch::channel(false);
        proxy.cut_next_commit(cut);
        let process = Process::start({
            let (proxy, schema, source) = (proxy.clone(), stage.schema.clone(), broker.source());
            async move {
                onlyonce::Consumer::builder("c", proxy.store(&schema))
                    .source(source)
                    .handler(handler)
                    .retry(RetryPolicy::none())
                    .crash_when(move |point| {
                        let crashes = point == CrashPoint::RolledBack;
                        if crashes {
                            rolled_back.send_replace(true);
                        }
                        crashes
                    })
            }
        });
        broker.publish(event("x", "1"));
        soon("the cut", seen.wait_for(|seen| *seen)).await.unwrap();

        assert_eq!(broker.stats().acked, 0, "{cut:?}");
        let applied = usize::from(cut == Cut::After);
        assert_eq!(stage.effects().await.len(), applied, "{cut:?}");
        assert_eq!(stage.processed("c").await.len(), applied, "{cut:?}");

        // What comes after it knows by the claim.
        process.die();
        broker.kill();
        let (handler, runs) = Scripted::applies(&stage);
        let next = stage.consumer("c").handler(handler).source(broker.source());
        let next = Running::start(next);
        soon("the ack", broker.drained()).await;
        assert_eq!(runs.total() as usize, 1 - applied, "{cut:?}");
        assert_eq!(stage.effects().await.get("x"), Some(&1), "{cut:?}");
        next.stop().await;
        stage.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_finds_out_event_by_event() {
    for cut in [Cut::Before, Cut::After] {
        let (Some(stage), Some(proxy)) = (PostgresStore::fresh().await, Proxy::start().await) else {
            return;
        };
        let (handler, runs) = Scripted::applies(&stage);
        let consumer = onlyonce::Consumer::builder("c", proxy.store(&stage.schema))
            .handler(handler)
            .lanes(1)
            .batch(5)
            .retry(RetryPolicy::none());
        proxy.cut_next_commit(cut);
        let report = soon("delivery", deliver(consumer, events(5))).await.unwrap();
        assert_eq!(proxy.commits_cut(), 1);
        assert_eq!((report.acked, report.released), (5, 0), "{cut:?}");
        assert_eq!(runs.total(), if cut == Cut::After { 5 } else { 10 }, "{cut:?}");
        assert!(stage.effects().await.values().all(|n| *n == 1), "{cut:?}");
        assert_eq!(stage.held().await, [], "{cut:?}");
        stage.end().await;
    }
}

on_each_store!(a_constraint_that_fires_at_commit_is_the_handlers_fault);

async fn a_constraint_that_fires_at_commit_is_the_handlers_fault<S: TestStore>(stage: Stage<S>) {
    let (parent, child) = (
        "CREATE TABLE {s}.parent (id text PRIMARY KEY)",
        "CREATE TABLE {s}.child (id text REFERENCES {s}.parent DEFERRABLE INITIALLY DEFERRED)",
    );
    for table in [parent, child] {
        stage.execute(table, &table.replace("{s}.", "")).await;
    }
    let place = if stage.schema.is_empty() {
        String::new()
    } else {
        format!("{}.", stage.schema)
    };
    let (handler, runs) = Scripted::new(&stage, move |_, _| {
        Act::Run(format!("INSERT INTO {place}child VALUES ('nobody')"))
    });
    let consumer = stage
        .consumer("c")
        .handler(handler)
        .retry(RetryPolicy::none().immediate(1));
    let report = deliver(consumer, [event("x", "1")]).await.unwrap();
    assert_eq!(report.acked, 1, "acked once it was held");
    assert_eq!(runs.attempts_of("x"), [1, 2]);
    assert_eq!(stage.effects().await.len(), 0);
    assert_eq!(stage.processed("c").await, []);
    let held = stage.held().await;
    assert_eq!((held[0].state.as_str(), held[0].attempts), ("dead", 2));
    assert!(
        held[0].failures.contains("commit_refused"),
        "{}",
        held[0].failures
    );
    stage.end().await;
}

/// A deferred trigger that loses against nobody in particular, `times` times, at COMMIT.
async fn losing_commits(stage: &Stage<PostgresStore>, code: &str, times: u32) {
    let sql = format!(
        "CREATE SEQUENCE {{s}}.lost;
         CREATE FUNCTION {{s}}.lose() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN
             IF nextval('{{s}}.lost') <= {times} THEN RAISE EXCEPTION 'lost' USING ERRCODE = '{code}'; END IF;
             RETURN NULL;
         END $$;
         CREATE CONSTRAINT TRIGGER lose AFTER INSERT ON {{s}}.effects DEFERRABLE INITIALLY DEFERRED
         FOR EACH ROW EXECUTE FUNCTION {{s}}.lose();"
    );
    stage.execute(&sql, "").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn losing_at_commit_is_tried_again_and_not_counted() {
    for code in ["40001", "40P01"] {
        let Some(stage) = PostgresStore::fresh().await else {
            return;
        };
        losing_commits(&stage, code, 5).await;
        let (handler, runs) = Scripted::applies(&stage);
        let consumer = stage.consumer("c").handler(handler);
        let report = soon("delivery", deliver(consumer, [event("x", "1")]))
            .await
            .unwrap();
        assert_eq!((report.acked, report.released), (1, 0), "{code}");
        assert_eq!(runs.attempts_of("x"), [1; 6], "{code}");
        assert_eq!(stage.effects().await.get("x"), Some(&1));
        assert_eq!(stage.held().await, []);
        stage.end().await;
    }
}

/// Two serializable transactions of which each reads what the other writes: one of them must lose.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn serializable_handlers_that_skew_all_succeed_in_the_end() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    stage
        .execute(
            "CREATE TABLE {s}.doctors (n int, on_call bool); INSERT INTO {s}.doctors VALUES (0, true), (1, true)",
            "",
        )
        .await;
    let schema = stage.schema.clone();
    let (handler, runs) = Scripted::new(&stage, move |_, event| {
        let n = event.identity.id.trim_start_matches('e');
        Act::Run(format!(
            "SELECT sum(on_call::int) FROM {schema}.doctors; SELECT pg_sleep(0.05);
             UPDATE {schema}.doctors SET on_call = NOT on_call WHERE n = {n} % 2"
        ))
    });
    let consumer = stage
        .consumer("c")
        .handler(handler)
        .lanes(4)
        .isolation(Isolation::Serializable);
    let report = soon("delivery", deliver(consumer, events(12))).await.unwrap();
    assert_eq!((report.acked, report.released), (12, 0));
    assert_eq!(stage.effects().await.len(), 12);
    assert!(stage.effects().await.values().all(|n| *n == 1));
    assert_eq!(stage.held().await, [], "losing is not an attempt");
    assert!(runs.total() > 12, "nobody lost: this proves nothing");
    stage.end().await;
}
