//! G1 for an event that was claimed with the commit before it: it is committed with its own work or not
//! at all, whatever comes between. A claim without its work is a lost event.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onlyonce::consumer::ConsumerBuilder;
use onlyonce::event::{EventKey, RawEvent};
use onlyonce::source::{
    Capabilities, Delivery, Incoming, Plan, Receipt, Settle, Settlement, Source, SourceError, SourceHealth,
};
use onlyonce::store::PostgresStore;
use onlyonce::store::postgres::PostgresOptions;
use onlyonce::testing::{Broker, CrashPoint, deliver, event};
use onlyonce::{Consumer, HandlerError, Ordering, RetryPolicy, async_trait};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};
use tokio::sync::{Notify, mpsc};

use crate::proxy::Proxy;
use crate::running::{Halt, Process, Running, halt_at, until};
use crate::stage::{Act, Runs, Scripted, Stage, TestStore, postgres_url, soon};

/// A source that the test plays by hand.
pub(crate) struct Played {
    per_call: usize,
    plans: mpsc::UnboundedSender<Plan>,
    incoming: mpsc::UnboundedReceiver<Incoming>,
    settled: mpsc::UnboundedSender<Settlement>,
    outstanding: usize,
    stopped: bool,
}

/// What plays it.
pub(crate) struct Hand {
    plans: mpsc::UnboundedReceiver<Plan>,
    incoming: mpsc::UnboundedSender<Incoming>,
    settled: mpsc::UnboundedReceiver<Settlement>,
    receipts: u64,
}

impl Hand {
    fn new() -> (Self, Played) {
        Self::bringing(1)
    }

    /// Plays a broker that brings so many in one call.
    pub(crate) fn bringing(per_call: usize) -> (Self, Played) {
        let (to_test, plans) = mpsc::unbounded_channel();
        let (to_lanes, incoming) = mpsc::unbounded_channel();
        let (back, settled) = mpsc::unbounded_channel();
        let played = Played {
            per_call,
            plans: to_test,
            incoming,
            settled: back,
            outstanding: 0,
            stopped: false,
        };
        let hand = Self {
            plans,
            incoming: to_lanes,
            settled,
            receipts: 0,
        };
        (hand, played)
    }

    /// What the source was told at its start.
    pub(crate) async fn plan(&mut self) -> Plan {
        soon("the plan", self.plans.recv()).await.unwrap()
    }

    /// Delivers all of these at once, under the next receipts: 1, 2, ..
    fn deliver(&mut self, events: impl IntoIterator<Item = RawEvent>) {
        let deliveries = events.into_iter().map(|event| {
            self.receipts += 1;
            Delivery::new(Receipt(self.receipts), event)
        });
        self.incoming
            .send(Incoming::Deliveries(deliveries.collect()))
            .unwrap();
    }

    fn lose(&self, receipt: u64) {
        self.incoming
            .send(Incoming::Lost(vec![Receipt(receipt)]))
            .unwrap();
    }

    /// The next settlement: its receipt, and whether it is an ack.
    async fn settled(&mut self) -> (u64, bool) {
        let settlement = soon("a settlement", self.settled.recv()).await.unwrap();
        (settlement.receipt.0, settlement.verdict == Settle::Ack)
    }
}

#[async_trait]
impl Source for Played {
    async fn start(&mut self, plan: &Plan) -> Result<(), SourceError> {
        let _ = self.plans.send(plan.clone());
        Ok(())
    }

    async fn receive(&mut self, _: usize) -> Result<Incoming, SourceError> {
        if self.stopped && self.outstanding == 0 {
            return Ok(Incoming::Closed);
        }
        let Some(incoming) = self.incoming.recv().await else {
            return std::future::pending().await;
        };
        if let Incoming::Deliveries(deliveries) = &incoming {
            self.outstanding += deliveries.len();
        }
        Ok(incoming)
    }

    async fn settle(&mut self, settlements: Vec<Settlement>) -> Result<(), SourceError> {
        for settlement in settlements {
            self.outstanding -= 1;
            let _ = self.settled.send(settlement);
        }
        Ok(())
    }

    async fn pause(&mut self) -> Result<(), SourceError> {
        Ok(())
    }

    async fn stop(&mut self) -> Result<(), SourceError> {
        self.stopped = true;
        Ok(())
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::of("test");
        capabilities.per_call = self.per_call;
        capabilities
    }

    fn health(&self) -> SourceHealth {
        SourceHealth::up()
    }
}

/// A lane that has committed `a` and claimed `b` with it, and stands still before it does anything else.
struct Ahead {
    stage: Stage<PostgresStore>,
    runs: Arc<Runs>,
    hand: Hand,
    running: Running,
    halt: Halt,
}

impl Ahead {
    /// These events wait behind `b`.
    async fn of(ordering: Ordering, others: impl IntoIterator<Item = RawEvent>) -> Option<Self> {
        let stage = PostgresStore::fresh().await?;
        let (handler, runs) = Scripted::applies(&stage);
        let (mut hand, played) = Hand::new();
        let (plan, halt) = halt_at(CrashPoint::Committed);
        // The schema's name makes the claims of this stage known among those of others.
        let consumer = stage
            .consumer(&stage.schema)
            .source(played)
            .handler(handler)
            .lanes(1)
            .window(10)
            .ordering(ordering)
            .crash_when(plan);
        let running = Running::start(consumer);
        hand.deliver(["a", "b"].map(|id| event(id, "x")).into_iter().chain(others));
        halt.reached().await;
        assert!(claimed_ahead(&stage, "b").await, "the danger is there");
        assert_eq!(processed(&stage).await, ["a"], "and seen by nobody");
        Some(Self {
            stage,
            runs,
            hand,
            running,
            halt,
        })
    }

    /// `b` comes again, under the next receipt, and is as new as it was.
    async fn b_is_new(&mut self) {
        self.hand.deliver([event("b", "x")]);
        assert_eq!(self.hand.settled().await, (self.hand.receipts, true));
        assert_eq!(self.runs.of("b"), 1, "it was not lost");
        assert!(processed(&self.stage).await.contains(&"b".to_owned()));
        assert!(self.stage.effects().await.values().all(|n| *n == 1));
    }

    async fn end(self) {
        self.running.stop().await;
        self.stage.end().await;
    }
}

/// Whether a session has claimed this event, with the commit before it, and does nothing.
async fn claimed_ahead(stage: &Stage<PostgresStore>, id: &str) -> bool {
    let key = EventKey::of_event(&stage.schema, "test", id).as_uuid();
    let sessions = format!(
        "SELECT count(*) FROM pg_stat_activity
          WHERE state = 'idle in transaction' AND query LIKE '%COMMIT AND CHAIN%EXECUTE onlyonce_claim(''{}''%'",
        key.simple()
    );
    stage.number(&sessions, "").await == 1
}

async fn processed(stage: &Stage<PostgresStore>) -> Vec<String> {
    let claims = stage.processed(&stage.schema).await;
    claims.into_iter().map(|(id, _)| id).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_before_its_turn_it_is_not_committed_with_another_event() {
    for ordering in [Ordering::Unordered, Ordering::PerKey] {
        let Some(mut ahead) = Ahead::of(ordering, [event("c", "x")]).await else {
            return;
        };
        ahead.hand.lose(2);
        assert_eq!(ahead.hand.settled().await, (2, false));
        ahead.halt.go_on();
        assert_eq!(ahead.hand.settled().await, (1, true));
        assert_eq!(ahead.hand.settled().await, (3, true));
        assert_eq!(processed(&ahead.stage).await, ["a", "c"]);
        ahead.b_is_new().await;
        ahead.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_before_its_turn_it_is_not_committed_with_a_letter() {
    let nameless = RawEvent {
        property: None,
        ..event("", "x")
    };
    let Some(mut ahead) = Ahead::of(Ordering::Unordered, [nameless]).await else {
        return;
    };
    ahead.hand.lose(2);
    assert_eq!(ahead.hand.settled().await, (2, false));
    ahead.halt.go_on();
    assert_eq!(ahead.hand.settled().await, (1, true));
    assert_eq!(ahead.hand.settled().await, (3, true));
    assert_eq!(ahead.stage.held().await.len(), 1, "the letter");
    assert_eq!(processed(&ahead.stage).await, ["a"]);
    ahead.b_is_new().await;
    ahead.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_before_its_turn_with_nothing_behind_it_its_claim_is_gone() {
    let Some(mut ahead) = Ahead::of(Ordering::Unordered, []).await else {
        return;
    };
    ahead.hand.lose(2);
    assert_eq!(ahead.hand.settled().await, (2, false));
    ahead.halt.go_on();
    assert_eq!(ahead.hand.settled().await, (1, true));
    until("the end of the claim", async || {
        !claimed_ahead(&ahead.stage, "b").await
    })
    .await;
    assert_eq!(processed(&ahead.stage).await, ["a"]);
    ahead.b_is_new().await;
    ahead.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_before_its_turn_gives_it_back_and_its_claim_up() {
    let Some(mut ahead) = Ahead::of(Ordering::Unordered, [event("c", "x")]).await else {
        return;
    };
    ahead.running.tell();
    for receipt in [2, 3] {
        assert_eq!(ahead.hand.settled().await, (receipt, false));
    }
    ahead.halt.go_on();
    assert_eq!(ahead.hand.settled().await, (1, true));
    soon("the end", ahead.running.ended()).await.unwrap();
    assert_eq!(processed(&ahead.stage).await, ["a"]);
    assert_eq!(ahead.stage.held().await, [], "a stop is not an attempt");

    let (handler, runs) = Scripted::applies(&ahead.stage);
    let next = ahead.stage.consumer(&ahead.stage.schema).handler(handler);
    deliver(next, ["a", "b", "c"].map(|id| event(id, "x")))
        .await
        .unwrap();
    assert_eq!((runs.of("a"), runs.of("b"), runs.of("c")), (0, 1, 1));
    ahead.stage.end().await;
}

/// The database cannot be had for a while: another lane finds out, and this one does not begin what it has
/// claimed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pause_before_its_turn_gives_its_claim_up() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let (role, url) = stage.role().await;
    let store = PostgresOptions::new(url)
        .schema(&stage.schema)
        .acquire_timeout(Duration::from_secs(2))
        .connect()
        .unwrap();
    let end = Arc::new(Notify::new());
    let (handler, runs) = Scripted::new(&stage, {
        let end = end.clone();
        move |run, event| match event.identity.id.as_str() {
            "ends" if run == 1 => {
                let end = end.clone();
                Act::by(move |cx| {
                    Box::pin(async move {
                        end.notified().await;
                        let end = "SELECT pg_terminate_backend(pg_backend_pid())";
                        sqlx::raw_sql(end).execute(cx.tx()).await?;
                        Ok(())
                    })
                })
            }
            _ => Act::Apply,
        }
    });
    let broker = Broker::new();
    let (plan, halt) = halt_at(CrashPoint::Committed);
    let consumer = Consumer::builder(&stage.schema, store)
        .retry(RetryPolicy::none())
        .source(broker.source())
        .handler(handler)
        .lanes(2)
        .ordering(Ordering::Unordered)
        .crash_when(plan);
    let running = Running::start(consumer);
    broker.publish(event("ends", "x"));
    runs.until(1).await;
    for id in ["a", "b", "c"] {
        broker.publish(event(id, "x"));
    }
    halt.reached().await;
    let ahead = {
        let mut ahead = None;
        for id in ["b", "c"] {
            if claimed_ahead(&stage, id).await {
                ahead = Some(id);
            }
        }
        ahead.expect("the danger is there")
    };
    stage.execute(&format!("ALTER ROLE {role} NOLOGIN"), "").await;
    end.notify_one();
    until("the pause", async || {
        running.health.ready().to_string().contains("paused")
    })
    .await;
    halt.go_on();
    until("the end of the claim", async || {
        !claimed_ahead(&stage, ahead).await
    })
    .await;
    assert_eq!(processed(&stage).await, ["a"]);
    stage.execute(&format!("ALTER ROLE {role} LOGIN"), "").await;
    soon("every ack", broker.drained()).await;
    assert_eq!(processed(&stage).await, ["a", "b", "c", "ends"]);
    assert_eq!(stage.effects().await.len(), 4);
    assert!(stage.effects().await.values().all(|n| *n == 1));
    assert_eq!(stage.held().await, [], "a pause is not an attempt");
    running.stop().await;
    stage.drop_role().await;
    stage.end().await;
}

/// However the run of an event that was claimed ahead ends, the claim ends with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn its_claim_ends_as_its_run_does() {
    type Ends = fn() -> Act<PostgresStore>;
    let ways: [(&str, Ends, Option<&str>, Option<&str>); 6] = [
        (
            "fails",
            || Act::Fail("no".into()),
            None,
            Some("retries_exhausted"),
        ),
        ("panics", || Act::Panic, None, Some("retries_exhausted")),
        (
            "is discarded",
            || Act::Fail(HandlerError::discard("nothing to do")),
            Some("discarded"),
            None,
        ),
        (
            "swallows an error",
            || {
                Act::by(|cx| {
                    Box::pin(async move {
                        let _ = sqlx::raw_sql("no SQL").execute(cx.tx()).await;
                        Ok(())
                    })
                })
            },
            None,
            Some("retries_exhausted"),
        ),
        (
            "rolls back",
            || Act::Run("ROLLBACK".into()),
            None,
            Some("transaction_escaped"),
        ),
        (
            "commits",
            || Act::Run("COMMIT".into()),
            Some("processed"),
            Some("transaction_escaped"),
        ),
    ];
    for (way, ends, claim, letter) in ways {
        let Some(stage) = PostgresStore::fresh().await else {
            return;
        };
        let (handler, runs) = Scripted::new(&stage, move |_, event| match event.identity.id.as_str() {
            "b" => ends(),
            _ => Act::Apply,
        });
        let consumer = stage.consumer("c").handler(handler).lanes(1);
        let report = deliver(consumer, ["a", "b", "c"].map(|id| event(id, "x")))
            .await
            .unwrap();
        assert_eq!(report.acked, 3, "{way}");
        assert_eq!(runs.of("b"), 1, "{way}");
        let claims = stage.processed("c").await;
        let of = |id: &str| {
            let claim = claims.iter().find(|(claimed, _)| claimed == id);
            claim.map(|(_, outcome)| outcome.as_str())
        };
        assert_eq!(
            (of("a"), of("b"), of("c")),
            (Some("processed"), claim, Some("processed")),
            "{way}"
        );
        let mut effects: Vec<_> = stage.effects().await.into_keys().collect();
        effects.sort();
        let due: &[&str] = if way == "commits" {
            &["a", "b", "c"]
        } else {
            &["a", "c"]
        };
        assert_eq!(effects, due, "{way}");
        let letters: Vec<_> = stage.held().await.into_iter().map(|row| row.reason).collect();
        assert_eq!(
            letters.iter().map(Option::as_deref).collect::<Vec<_>>(),
            letter.map(Some).into_iter().collect::<Vec<_>>(),
            "{way}"
        );
        stage.end().await;
    }
}

/// The process dies with its second event, which was claimed with the commit of the first, and with a
/// third one behind it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_death_at_any_point_of_a_backlog_leaves_one_effect_and_one_claim_of_each() {
    for point in CrashPoint::ALL {
        let Some(stage) = PostgresStore::fresh().await else {
            return;
        };
        let name = point.as_str();
        let fails = matches!(point, CrashPoint::RolledBack | CrashPoint::Parked);
        // The first two points of an event are passed once before the second event comes to them.
        let passes = if fails { 0 } else { 1 };
        let (crashed, left) = (Arc::new(Notify::new()), std::sync::Mutex::new(passes));
        let signal = crashed.clone();
        let plan = move |reached| {
            if reached != point {
                return false;
            }
            let mut left = left.lock().unwrap();
            if *left > 0 {
                *left -= 1;
                return false;
            }
            signal.notify_one();
            true
        };
        let consumer = |store, fails: bool| {
            let (handler, _) = Scripted::new(&stage, move |_, event| match event.identity.id.as_str() {
                "b" if fails => Act::Fail("no".into()),
                _ => Act::Apply,
            });
            let retry = match point {
                CrashPoint::Parked => RetryPolicy::none().delays([Duration::ZERO]),
                _ => RetryPolicy::none().immediate(1),
            };
            let consumer: ConsumerBuilder<PostgresStore> = stage.consumer_of("c", store);
            consumer
                .handler(handler)
                .lanes(1)
                .ordering(Ordering::Unordered)
                .retry(retry)
        };
        let broker = Broker::new();
        for id in ["a", "b", "c"] {
            broker.publish(event(id, "x"));
        }
        let first = consumer(PostgresStore::another(&stage).await, fails)
            .source(broker.source())
            .crash_when(plan);
        let process = Process::start(std::future::ready(first));
        soon(name, crashed.notified()).await;
        process.die();
        broker.kill();

        let second = consumer(PostgresStore::another(&stage).await, false).source(broker.source());
        let second = Process::start(std::future::ready(second));
        soon(name, broker.drained()).await;
        until(name, async || {
            stage.effects().await.len() == 3 && stage.held().await.is_empty()
        })
        .await;
        second.die();
        assert!(stage.effects().await.values().all(|n| *n == 1), "{name}");
        let claims = stage.processed("c").await;
        let due = ["a", "b", "c"].map(|id| (id.to_owned(), "processed".to_owned()));
        assert_eq!(claims, due, "{name}");
        stage.end().await;
    }
}

/// Another transaction that has claimed `b` and goes on for as long as the test wants.
async fn holding_b(stage: &Stage<PostgresStore>) -> PgConnection {
    holding(stage, &stage.schema, "b").await
}

/// A transaction that has claimed this event for this consumer.
pub(crate) async fn holding(stage: &Stage<PostgresStore>, consumer: &str, id: &str) -> PgConnection {
    let mut holds = PgConnection::connect(&postgres_url().unwrap()).await.unwrap();
    let key = EventKey::of_event(consumer, "test", id).as_uuid();
    let claim = format!(
        "BEGIN; INSERT INTO {}.processed_events (event_key, kind, consumer, source, event_id, payload_hash, outcome)
         VALUES ('{key}', 'event', '{consumer}', 'test', '{id}', '', 'processed')",
        stage.schema
    );
    sqlx::raw_sql(AssertSqlSafe(claim))
        .execute(&mut holds)
        .await
        .unwrap();
    holds
}

/// A session that waits for `b`, having committed what came before.
async fn waits_for_b(stage: &Stage<PostgresStore>) -> bool {
    let key = EventKey::of_event(&stage.schema, "test", "b").as_uuid();
    let waits = format!(
        "SELECT count(*) FROM pg_stat_activity
          WHERE wait_event_type = 'Lock' AND query LIKE '%EXECUTE onlyonce_claim(''{}''%'",
        key.simple()
    );
    stage.number(&waits, "").await == 1
}

/// A copy that runs elsewhere is waited for, and the ack of the event before with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_busy_one_is_waited_for_and_given_back() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let limit = Duration::from_secs(2);
    let mut holds = holding_b(&stage).await;
    let (handler, runs) = Scripted::applies(&stage);
    let (mut hand, played) = Hand::new();
    let consumer = stage
        .consumer(&stage.schema)
        .source(played)
        .handler(handler)
        .lanes(1)
        .ordering(Ordering::Unordered)
        .lock_timeout(limit);
    let running = Running::start(consumer);
    let began = Instant::now();
    hand.deliver(["a", "b"].map(|id| event(id, "x")));
    until("the wait", async || waits_for_b(&stage).await).await;
    assert_eq!(processed(&stage).await, ["a"], "committed before the wait");
    assert_eq!(hand.settled().await, (1, true));
    assert_eq!(hand.settled().await, (2, false), "given back");
    let waited = began.elapsed();
    assert!(waited >= limit, "{waited:?}");
    assert_eq!(stage.held().await, [], "waiting is not an attempt");

    sqlx::raw_sql("ROLLBACK").execute(&mut holds).await.unwrap();
    hand.deliver([event("b", "x")]);
    assert_eq!(hand.settled().await, (3, true));
    assert_eq!((runs.of("a"), runs.of("b")), (1, 1));
    assert_eq!(processed(&stage).await, ["a", "b"]);
    running.stop().await;
    stage.end().await;
}

/// What the wait comes to is the answer to the claim, as always.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_was_waited_for_is_a_duplicate_or_runs() {
    for (ends, ran) in [("COMMIT", 0), ("ROLLBACK", 1)] {
        let Some(stage) = PostgresStore::fresh().await else {
            return;
        };
        let mut holds = holding_b(&stage).await;
        let (handler, runs) = Scripted::applies(&stage);
        let broker = Broker::new();
        for id in ["a", "b", "c"] {
            broker.publish(event(id, "x"));
        }
        let consumer = stage
            .consumer(&stage.schema)
            .source(broker.source())
            .handler(handler)
            .lanes(1)
            .lock_timeout(Duration::from_secs(20));
        let running = Running::start(consumer);
        until("the wait", async || waits_for_b(&stage).await).await;
        sqlx::raw_sql(ends).execute(&mut holds).await.unwrap();
        soon("every ack", broker.drained()).await;
        assert_eq!((runs.of("a"), runs.of("b"), runs.of("c")), (1, ran, 1), "{ends}");
        assert_eq!(processed(&stage).await, ["a", "b", "c"], "{ends}");
        assert_eq!((broker.stats().acked, broker.stats().released), (3, 0), "{ends}");
        running.stop().await;
        stage.end().await;
    }
}

/// The link is lost while the claim waits, so that nobody has heard of the commit before it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_link_that_is_lost_in_the_wait_leaves_an_unknown_commit() {
    let (Some(stage), Some(proxy)) = (PostgresStore::fresh().await, Proxy::start().await) else {
        return;
    };
    let mut holds = holding_b(&stage).await;
    let (handler, runs) = Scripted::applies(&stage);
    let broker = Broker::new();
    for id in ["a", "b"] {
        broker.publish(event(id, "x"));
    }
    let consumer = Consumer::builder(&stage.schema, proxy.store(&stage.schema))
        .retry(RetryPolicy::none())
        .source(broker.source())
        .handler(handler)
        .lanes(1)
        .lock_timeout(Duration::from_secs(20));
    let running = Running::start(consumer);
    until("the wait", async || waits_for_b(&stage).await).await;
    assert_eq!(broker.stats().acked, 0, "nobody knows of the commit");
    proxy.cut();
    soon("the ack", broker.until(|stats| stats.acked == 1)).await;
    sqlx::raw_sql("ROLLBACK").execute(&mut holds).await.unwrap();
    soon("every ack", broker.drained()).await;
    assert_eq!(
        (runs.of("a"), runs.of("b")),
        (1, 1),
        "the claim told that it was a duplicate"
    );
    assert_eq!(processed(&stage).await, ["a", "b"]);
    assert!(stage.effects().await.values().all(|n| *n == 1));
    assert_eq!(stage.held().await, [], "neither was an attempt");
    running.stop().await;
    stage.end().await;
}

/// A commit that fails after the next event was looked at: that event is not kept waiting behind the
/// one that is run again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_is_not_reserved_behind_one_that_is_run_again() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let (in_second, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (handler, runs) = Scripted::new(&stage, {
        let (in_second, go) = (in_second.clone(), go.clone());
        move |run, event| match (event.identity.id.as_str(), run) {
            // The guard finds it aborted.
            ("a", 1) => Act::by(|cx| {
                Box::pin(async move {
                    let _ = sqlx::raw_sql("no SQL").execute(cx.tx()).await;
                    Ok(())
                })
            }),
            ("a", _) => {
                in_second.notify_one();
                Act::Wait(go.clone())
            }
            _ => Act::Apply,
        }
    });
    let (mut hand, played) = Hand::new();
    let consumer = stage
        .consumer("c")
        .source(played)
        .handler(handler)
        .lanes(2)
        .ordering(Ordering::Unordered)
        .retry(RetryPolicy::none().immediate(1));
    let running = Running::start(consumer);
    hand.deliver(["a", "b", "c", "d"].map(|id| event(id, "x")));
    soon("the second run", in_second.notified()).await;
    let mut acked = VecDeque::from([2, 3, 4]);
    while let Some(receipt) = acked.pop_front() {
        let (settled, ack) = hand.settled().await;
        assert!(
            ack && settled != 1,
            "{receipt} of three, while the first still runs"
        );
    }
    runs.until_waiting(1).await;
    go.notify_one();
    assert_eq!(hand.settled().await, (1, true));
    running.stop().await;
    stage.end().await;
}

/// Nothing that a message carries is ever SQL, whatever the server makes of a backslash.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_of_any_text_are_claimed_ahead_as_they_are() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let (role, url) = stage.role().await;
    let names = [
        "'); DROP TABLE processed_events; --".to_owned(),
        "\\'); COMMIT; --".to_owned(),
        "\\x27".to_owned(),
        "$1 $$ \"quoted\" E'\\\\'".to_owned(),
        "Ω≈ç√ 漢字 🦀".to_owned(),
        "x".repeat(512),
        "é".repeat(256),
    ];
    for strings in ["on", "off"] {
        let settings = "ALTER ROLE {r} SET standard_conforming_strings = {s}; ALTER ROLE {r} SET bytea_output = 'escape'";
        let settings = settings.replace("{r}", &role).replace("{s}", strings);
        stage.execute(&settings, "").await;
        let store = PostgresOptions::new(&url)
            .schema(&stage.schema)
            .connect()
            .unwrap();
        let (handler, runs) = Scripted::applies(&stage);
        let events = names.iter().flat_map(|name| {
            let named = RawEvent::new(name.clone(), name.clone(), "x");
            [
                event(format!("before {name}").chars().take(60).collect::<String>(), "x"),
                named,
            ]
        });
        let events: Vec<_> = events.collect();
        let report = deliver(
            stage.consumer_of(strings, store).handler(handler).lanes(1),
            events.clone(),
        )
        .await
        .unwrap();
        assert_eq!((report.acked, runs.total()), (14, 14), "{strings}");
        assert_eq!(stage.held().await, [], "{strings}");
        for name in &names {
            let exact = format!(
                "SELECT count(*) FROM {{s}}.processed_events
                  WHERE consumer = '{strings}' AND source = event_id AND event_id = convert_from('{}', 'UTF8')",
                name.bytes().fold("\\x".to_owned(), |hex, byte| format!("{hex}{byte:02x}"))
            );
            assert_eq!(stage.number(&exact, "").await, 1, "{strings}: {name}");
        }
        // A copy of each is found by the texts.
        let (handler, runs) = Scripted::applies(&stage);
        deliver(stage.consumer(strings).handler(handler), events)
            .await
            .unwrap();
        assert_eq!(runs.total(), 0, "{strings}");
    }
    stage.drop_role().await;
    stage.end().await;
}
