//! The embedded durable queue: `inbox` as a consumer's only source.

use std::sync::Arc;
use std::time::Duration;

use onlyonce::consumer::ConsumerBuilder;
use onlyonce::inbox::{Enqueued, InboxSource, Queue, QueueError};
use onlyonce::store::PostgresStore;
use onlyonce::testing::{Broker, deliver, event};
use onlyonce::{Consumer, RetryPolicy};
use tokio::sync::Notify;

use crate::running::{Process, Running, until};
use crate::stage::{Act, Scripted, Stage, TestStore, events};

on_each_store!(
    what_is_enqueued_runs_once,
    an_event_is_enqueued_once_while_it_waits,
    an_event_that_was_processed_is_closed_at_its_turn,
    an_event_without_identity_is_refused,
    a_failed_event_is_retried_and_then_dead,
    an_event_is_there_if_the_callers_transaction_commits,
    a_handler_that_enqueues_its_own_event_is_done_with_it,
    a_lease_is_renewed_while_its_handler_runs,
    the_leases_of_a_dead_process_are_taken_over,
    a_stop_gives_leases_back_at_once,
    held_events_without_a_reader_are_named,
);

fn queue<S: TestStore>(stage: &Stage<S>) -> Queue<S> {
    Queue::new(stage.store.clone(), "c")
}

/// A consumer of the queue and of nothing else.
fn reads_queue<S: TestStore>(store: S) -> ConsumerBuilder<S> {
    Consumer::builder("c", store.clone())
        .source(InboxSource::new(store, "c").lease(Duration::from_secs(1)))
        .retry(RetryPolicy::none())
}

async fn emptied<S: TestStore>(stage: &Stage<S>) {
    until("the empty queue", async || stage.held().await.is_empty()).await;
}

async fn what_is_enqueued_runs_once<S: TestStore>(stage: Stage<S>) {
    let queue = queue(&stage);
    for event in events(30) {
        assert_eq!(queue.enqueue(event).await.unwrap(), Enqueued::New);
    }
    assert_eq!(stage.held().await.len(), 30, "durable before it returns");
    let mut instances = Vec::new();
    let mut counts = Vec::new();
    for _ in 0..2 {
        let (handler, runs) = Scripted::applies(&stage);
        instances.push(Running::start(
            reads_queue(S::another(&stage).await).handler(handler),
        ));
        counts.push(runs);
    }
    emptied(&stage).await;
    let effects = stage.effects().await;
    assert_eq!(effects.len(), 30);
    assert!(effects.values().all(|n| *n == 1));
    assert_eq!(counts.iter().map(|runs| runs.total()).sum::<u32>(), 30);
    for instance in instances {
        instance.stop().await;
    }
    stage.end().await;
}

async fn an_event_is_enqueued_once_while_it_waits<S: TestStore>(stage: Stage<S>) {
    let queue = queue(&stage);
    assert_eq!(queue.enqueue(event("x", "1")).await.unwrap(), Enqueued::New);
    assert_eq!(queue.enqueue(event("x", "1")).await.unwrap(), Enqueued::Held);
    let mut racers = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let queue = queue.clone();
        racers.spawn(async move { queue.enqueue(event("y", "1")).await.unwrap() });
    }
    let outcomes = racers.join_all().await;
    assert_eq!(outcomes.iter().filter(|o| **o == Enqueued::New).count(), 1);
    assert_eq!(stage.held().await.len(), 2);
    let (handler, runs) = Scripted::applies(&stage);
    let running = Running::start(reads_queue(stage.store.clone()).handler(handler));
    emptied(&stage).await;
    assert_eq!((runs.of("x"), runs.of("y")), (1, 1));
    running.stop().await;
    stage.end().await;
}

async fn an_event_that_was_processed_is_closed_at_its_turn<S: TestStore>(stage: Stage<S>) {
    let queue = queue(&stage);
    let (handler, runs) = Scripted::applies(&stage);
    let running = Running::start(reads_queue(stage.store.clone()).handler(handler));
    for _ in 0..3 {
        assert_eq!(queue.enqueue(event("x", "1")).await.unwrap(), Enqueued::New);
        emptied(&stage).await;
    }
    assert_eq!(runs.total(), 1);
    assert_eq!(stage.effects().await.get("x"), Some(&1));
    running.stop().await;
    stage.end().await;
}

async fn an_event_without_identity_is_refused<S: TestStore>(stage: Stage<S>) {
    let mut nameless = event("x", "1");
    nameless.property = None;
    let refused = queue(&stage).enqueue(nameless).await.unwrap_err();
    assert!(matches!(refused, QueueError::Identity(_)), "{refused}");
    assert!(refused.to_string().contains("was not enqueued"), "{refused}");
    assert_eq!(stage.held().await, []);
    stage.end().await;
}

async fn a_failed_event_is_retried_and_then_dead<S: TestStore>(stage: Stage<S>) {
    let queue = queue(&stage);
    let (handler, runs) = Scripted::new(&stage, |run, event| match event.identity.id.as_str() {
        "bad" => Act::Fail("no".into()),
        "shaky" if run < 3 => Act::Fail("not yet".into()),
        _ => Act::Apply,
    });
    let consumer = reads_queue(stage.store.clone()).handler(handler);
    let consumer = consumer.retry(RetryPolicy::none().delays([Duration::ZERO; 2]));
    let running = Running::start(consumer);
    for id in ["bad", "shaky", "good"] {
        queue.enqueue(event(id, "1")).await.unwrap();
    }
    until("one dead letter and nothing else", async || {
        let held = stage.held().await;
        held.len() == 1 && held[0].state == "dead"
    })
    .await;
    assert_eq!(runs.attempts_of("bad"), [1, 2, 3]);
    assert_eq!(runs.attempts_of("shaky"), [1, 2, 3]);
    assert_eq!(stage.held().await[0].attempts, 3);
    assert_eq!(queue.enqueue(event("bad", "1")).await.unwrap(), Enqueued::Held);
    running.stop().await;
    stage.end().await;
}

/// A handler enqueues for another consumer in its own transaction: both happen or neither does.
async fn an_event_is_there_if_the_callers_transaction_commits<S: TestStore>(stage: Stage<S>) {
    struct Forwards<S>(Queue<S>);

    #[onlyonce::async_trait]
    impl<S: TestStore> onlyonce::Handler<S::Db> for Forwards<S> {
        type Payload = onlyonce::Bytes;

        async fn handle(
            &self,
            cx: &mut onlyonce::Context<'_, S::Db>,
            incoming: onlyonce::Event<onlyonce::Bytes>,
        ) -> Result<(), onlyonce::HandlerError> {
            let id = incoming.identity.id;
            let follow_up = event(format!("after-{id}"), "1");
            let enqueued = self.0.enqueue_in(cx.tx(), follow_up).await?;
            assert_eq!(enqueued, Enqueued::New);
            if id == "fails" { Err("no".into()) } else { Ok(()) }
        }
    }

    let consumer = stage
        .consumer("c")
        .handler(Forwards(Queue::new(stage.store.clone(), "next")));
    onlyonce::testing::deliver(consumer, [event("works", "1"), event("fails", "1")])
        .await
        .unwrap();
    let next: Vec<_> = stage
        .held()
        .await
        .into_iter()
        .filter(|row| row.state == "ready")
        .map(|row| row.event_id.unwrap())
        .collect();
    assert_eq!(next, ["after-works"]);
    stage.end().await;
}

/// Three times as long as its lease, with another instance that would take it over.
async fn a_lease_is_renewed_while_its_handler_runs<S: TestStore>(stage: Stage<S>) {
    let end = Arc::new(Notify::new());
    let mut instances = Vec::new();
    let mut counts = Vec::new();
    for _ in 0..2 {
        let (handler, runs) = Scripted::new(&stage, {
            let end = end.clone();
            move |_, event| match event.identity.id.as_str() {
                "long" => Act::Wait(end.clone()),
                _ => Act::Apply,
            }
        });
        instances.push(Running::start(
            reads_queue(S::another(&stage).await).handler(handler),
        ));
        counts.push(runs);
    }
    queue(&stage).enqueue(event("long", "1")).await.unwrap();
    let runs = async || counts.iter().map(|runs| runs.of("long")).sum::<u32>();
    until("the run", async || runs().await == 1).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(runs().await, 1, "it was taken over from a living owner");
    end.notify_one();
    emptied(&stage).await;
    assert_eq!(runs().await, 1);
    assert_eq!(stage.effects().await.get("long"), Some(&1));
    for instance in instances {
        instance.stop().await;
    }
    stage.end().await;
}

async fn the_leases_of_a_dead_process_are_taken_over<S: TestStore>(stage: Stage<S>) {
    let (handler, doomed) = Scripted::new(&stage, |_, _| Act::Hang);
    let process = Process::start({
        let open = S::another(&stage);
        async move { reads_queue(open.await).handler(handler) }
    });
    queue(&stage).enqueue(event("x", "1")).await.unwrap();
    doomed.until(1).await;
    process.die();
    let (handler, runs) = Scripted::applies(&stage);
    let running = Running::start(reads_queue(stage.store.clone()).handler(handler));
    emptied(&stage).await;
    assert_eq!(
        runs.attempts_of("x"),
        [1],
        "nobody knows yet that it was this event"
    );
    assert_eq!(stage.effects().await.get("x"), Some(&1));
    running.stop().await;
    stage.end().await;
}

/// What was leased and not begun is free for others as soon as the stop is told.
async fn a_stop_gives_leases_back_at_once<S: TestStore>(stage: Stage<S>) {
    let end = Arc::new(Notify::new());
    let (handler, runs) = Scripted::new(&stage, {
        let end = end.clone();
        move |_, _| Act::Wait(end.clone())
    });
    let hour = InboxSource::new(stage.store.clone(), "c").lease(Duration::from_secs(3600));
    for event in events(5) {
        queue(&stage).enqueue(event).await.unwrap();
    }
    let consumer = stage
        .consumer("c")
        .source(hour)
        .handler(handler)
        .lanes(1)
        .window(5);
    let running = Running::start(consumer);
    runs.until(1).await;
    running.tell();
    end.notify_one();
    running.stop().await;
    let held = stage.held().await;
    assert_eq!(held.len(), 4);
    assert!(held.iter().all(|row| row.state == "ready" && row.attempts == 0));
    let (handler, runs) = Scripted::applies(&stage);
    let next = Running::start(reads_queue(stage.store.clone()).handler(handler));
    emptied(&stage).await;
    assert_eq!(runs.total(), 4);
    next.stop().await;
    stage.end().await;
}

/// A consumer that was renamed leaves events behind that its new name does not read.
async fn held_events_without_a_reader_are_named<S: TestStore>(stage: Stage<S>) {
    let (handler, _) = Scripted::new(&stage, |_, _| Act::Fail("no".into()));
    deliver(stage.consumer("old name").handler(handler), events(3))
        .await
        .unwrap();
    // It has run a moment ago; five minutes later nobody has.
    let ago = "UPDATE {s}.consumers SET seen_at = seen_at - interval '10 minutes'";
    let ago_sqlite = "UPDATE onlyonce_consumers SET seen_at = seen_at - 600000000";
    stage.execute(ago, ago_sqlite).await;

    let (handler, _) = Scripted::applies(&stage);
    let again = stage
        .consumer("new name")
        .source(Broker::new().source())
        .handler(handler);
    let running = Running::start(again);
    until("the note", async || {
        running.health.ready().notes == ["3 held events of consumer old name have no reader"]
    })
    .await;
    until("readiness", async || running.health.ready().ok).await;
    running.stop().await;

    let (handler, _) = Scripted::applies(&stage);
    let old = stage
        .consumer("old name")
        .source(Broker::new().source())
        .handler(handler);
    let running = Running::start(old);
    until("readiness", async || running.health.ready().ok).await;
    assert_eq!(
        running.health.ready().notes,
        [] as [String; 0],
        "now they have one"
    );
    running.stop().await;
    stage.end().await;
}

async fn a_handler_that_enqueues_its_own_event_is_done_with_it<S: TestStore>(stage: Stage<S>) {
    let queue = Arc::new(queue(&stage));
    let schema = stage.schema.clone();
    let (handler, runs) = Scripted::new(&stage, move |_, incoming| {
        let (queue, schema, id) = (queue.clone(), schema.clone(), incoming.identity.id.clone());
        Act::<S>::by(move |cx| {
            Box::pin(async move {
                S::write(cx.tx(), &schema, &id).await?;
                assert_eq!(
                    queue.enqueue_in(cx.tx(), event("own", "x")).await?,
                    Enqueued::Held
                );
                if id == "own" {
                    assert_eq!(
                        queue.enqueue_in(cx.tx(), event("other", "x")).await?,
                        Enqueued::New
                    );
                }
                Ok(())
            })
        })
    });
    let broker = Broker::new();
    broker.publish(event("own", "x"));
    let running = Running::start(stage.consumer("c").handler(handler).source(broker.source()));
    until("both to run", async || stage.processed("c").await.len() == 2).await;
    emptied(&stage).await;
    running.stop().await;
    assert_eq!(runs.total(), 2);
    assert_eq!(stage.effects().await["own"], 1);
    assert_eq!(stage.effects().await["other"], 1);
    stage.end().await;
}

/// Nobody can do that while SQLite's one writer is taken.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_enqueued_while_its_batch_runs_is_seen_by_the_guard() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let queue = Arc::new(queue(&stage));
    let schema = stage.schema.clone();
    let (handler, runs) = Scripted::new(&stage, move |_, incoming| {
        let (queue, schema, id) = (queue.clone(), schema.clone(), incoming.identity.id.clone());
        Act::<PostgresStore>::by(move |cx| {
            Box::pin(async move {
                PostgresStore::write(cx.tx(), &schema, &id).await?;
                if id == "e1" && cx.attempt() == 1 {
                    queue.enqueue(event("e2", "2")).await?;
                }
                Ok(())
            })
        })
    });
    let broker = Broker::new();
    for (id, body) in [("e0", "0"), ("e1", "1"), ("e2", "2")] {
        broker.publish(event(id, body));
    }
    let consumer = stage.consumer("c").handler(handler).lanes(1).batch(3);
    let running = Running::start(consumer.source(broker.source()));
    until("all to be done", async || stage.processed("c").await.len() == 3).await;
    emptied(&stage).await;
    running.stop().await;
    for id in ["e0", "e1", "e2"] {
        assert_eq!(
            runs.attempts_of(id),
            [1, 1],
            "{id}: rolled back with the batch, and run again"
        );
        assert_eq!(stage.effects().await[id], 1);
    }
    stage.end().await;
}
