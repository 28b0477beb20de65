//! What one event costs on PostgreSQL, counted: the questions for whose answers a lane waits, and its
//! commits. Times would say less and differ every day.

use onlyonce::outbox::OutgoingEvent;
use onlyonce::store::PostgresStore;
use onlyonce::store::postgres::PostgresOptions;
use onlyonce::testing::{Broker, event};
use onlyonce::{BatchContext, BatchHandler, Bytes, Consumer, Event, HandlerError, RetryPolicy, async_trait};
use sqlx::AssertSqlSafe;

use crate::ahead::holding;
use crate::running::Running;
use crate::stage::{Act, Scripted, Stage, events, postgres_url, soon};
use crate::wire::{Asked, Wire};

struct Counted {
    stage: Stage<PostgresStore>,
    wire: Wire,
    store: PostgresStore,
}

impl Counted {
    async fn new() -> Option<Self> {
        let url = postgres_url()?;
        let stage = Stage::at(&url).await;
        let wire = Wire::default();
        let store = PostgresOptions::new(wire.before(&url).await)
            .schema(&stage.schema)
            .connect()
            .unwrap();
        Some(Self { stage, wire, store })
    }

    fn lane(&self, broker: &Broker) -> onlyonce::consumer::ConsumerBuilder<PostgresStore> {
        Consumer::builder("c", self.store.clone())
            .source(broker.source())
            .lanes(1)
            .window(100)
    }

    /// The questions in their order, but for what a session asks once.
    fn asked(&self) -> Vec<&'static str> {
        let once = |text: &str| text.starts_with("SET ");
        self.wire
            .asked_by_lanes()
            .iter()
            .filter(|asked| **asked != Asked::ToPrepare)
            .filter(|asked| !matches!(asked, Asked::Text(text) if once(text)))
            .map(|asked| match asked {
                Asked::Text(text) if text.contains("; EXECUTE onlyonce_claim") => {
                    assert!(text.contains("; COMMIT AND CHAIN;"), "{text}");
                    "guard, COMMIT AND CHAIN, claim"
                }
                Asked::Text(text) if text.contains("; COMMIT; BEGIN") => "guard, COMMIT, BEGIN",
                Asked::Text(text) if text.ends_with("; COMMIT") => "guard, COMMIT",
                Asked::Text(text) if text.starts_with("BEGIN") => "BEGIN",
                Asked::Text(text) if text.starts_with("ROLLBACK; SELECT ") => "ROLLBACK",
                Asked::Text(text) => panic!("{text:?}"),
                Asked::Prepared => "statement",
                Asked::ToPrepare | Asked::Ping => "nothing",
            })
            // Who it is, when it is opened.
            .skip(1)
            .collect()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_a_backlog_an_event_is_two_round_trips() {
    let Some(counted) = Counted::new().await else {
        return;
    };
    let broker = Broker::new();
    for event in events(50) {
        broker.publish(event);
    }
    let (handler, _) = Scripted::applies(&counted.stage);
    let running = Running::start(counted.lane(&broker).handler(handler));
    soon("every ack", broker.drained()).await;
    running.stop().await;

    // The handler's own, the commit.
    let mut expected = vec!["BEGIN", "statement"];
    for n in 0..50 {
        let commit = if n < 49 {
            "guard, COMMIT AND CHAIN, claim"
        } else {
            "guard, COMMIT"
        };
        expected.extend(["statement", commit]);
    }
    assert_eq!(counted.asked(), expected);
    assert_eq!(counted.wire.errors(), Vec::<String>::new());
    counted.stage.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn alone_an_event_is_four_round_trips_and_a_duplicate_too() {
    let Some(counted) = Counted::new().await else {
        return;
    };
    let broker = Broker::new();
    let (handler, _) = Scripted::applies(&counted.stage);
    let running = Running::start(counted.lane(&broker).handler(handler));
    for _ in 0..2 {
        for event in events(5) {
            broker.publish(event);
            soon("the ack", broker.drained()).await;
        }
    }
    running.stop().await;

    let new = ["BEGIN", "statement", "statement", "guard, COMMIT"];
    // What stands in its way is read by a second statement, and nothing is committed.
    let duplicate = ["BEGIN", "statement", "statement", "ROLLBACK"];
    assert_eq!(counted.asked(), [new.repeat(5), duplicate.repeat(5)].concat());
    counted.stage.end().await;
}

/// However many are sent, and only where any are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn outgoing_events_cost_one_statement_more() {
    let Some(counted) = Counted::new().await else {
        return;
    };
    let broker = Broker::new();
    let (handler, _) = Scripted::new(&counted.stage, |_, event| {
        let sends = match event.identity.id.as_str() {
            "e0" => 1,
            "e1" => 30,
            _ => 0,
        };
        Act::by(move |cx| {
            Box::pin(async move {
                for _ in 0..sends {
                    cx.outbox()
                        .send(OutgoingEvent::new("kafka:t", "paid", "x").key("k"))?;
                }
                Ok(())
            })
        })
    });
    let running = Running::start(counted.lane(&broker).handler(handler));
    for event in events(3) {
        broker.publish(event);
        soon("the ack", broker.drained()).await;
    }
    running.stop().await;

    // Claim, outgoing events, the commit.
    let sends = ["BEGIN", "statement", "statement", "guard, COMMIT"];
    let sends_nothing = ["BEGIN", "statement", "guard, COMMIT"];
    assert_eq!(
        counted.asked(),
        [sends.repeat(2), sends_nothing.to_vec()].concat()
    );
    assert_eq!(counted.stage.outgoing().await.len(), 31);
    counted.stage.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_is_one_claim_and_one_commit() {
    let Some(counted) = Counted::new().await else {
        return;
    };
    let broker = Broker::new();
    for event in events(50) {
        broker.publish(event);
    }
    let (handler, _) = Scripted::applies(&counted.stage);
    let running = Running::start(counted.lane(&broker).batch(10).handler(handler));
    soon("every ack", broker.drained()).await;
    running.stop().await;

    let mut expected = vec!["BEGIN"];
    for n in 0..5 {
        expected.extend(["statement"; 11]);
        expected.push(if n < 4 {
            "guard, COMMIT, BEGIN"
        } else {
            "guard, COMMIT"
        });
    }
    assert_eq!(counted.asked(), expected);
    counted.stage.end().await;
}

struct AtOnce(String);

#[async_trait]
impl BatchHandler<sqlx::Postgres> for AtOnce {
    type Payload = Bytes;

    async fn handle(
        &self,
        cx: &mut BatchContext<'_, sqlx::Postgres>,
        events: Vec<Event>,
    ) -> Result<(), HandlerError> {
        let ids: Vec<_> = events.into_iter().map(|event| event.identity.id).collect();
        let insert = format!(
            "INSERT INTO {}.effects (id) SELECT * FROM unnest($1::text[])",
            self.0
        );
        sqlx::query(AssertSqlSafe(insert))
            .bind(ids)
            .execute(cx.tx())
            .await?;
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_handlers_batch_costs_what_one_event_costs() {
    let Some(counted) = Counted::new().await else {
        return;
    };
    let broker = Broker::new();
    for event in events(50) {
        broker.publish(event);
    }
    let handler = AtOnce(counted.stage.schema.clone());
    let running = Running::start(counted.lane(&broker).batch(10).batch_handler(handler));
    soon("every ack", broker.drained()).await;
    running.stop().await;

    let mut expected = vec!["BEGIN"];
    for n in 0..5 {
        let commit = if n < 4 {
            "guard, COMMIT, BEGIN"
        } else {
            "guard, COMMIT"
        };
        expected.extend(["statement", "statement", commit]);
    }
    assert_eq!(counted.asked(), expected);
    assert_eq!(counted.stage.effects().await.len(), 50);
    counted.stage.end().await;
}

/// A duplicate that was claimed ahead is known as soon as it is read what stands in its way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_a_backlog_a_duplicate_is_two_round_trips() {
    let Some(counted) = Counted::new().await else {
        return;
    };
    let broker = Broker::new();
    for id in ["0", "0", "1"] {
        broker.publish(event(id, "x"));
    }
    let (handler, _) = Scripted::applies(&counted.stage);
    let running = Running::start(counted.lane(&broker).handler(handler));
    soon("every ack", broker.drained()).await;
    running.stop().await;
    assert_eq!(
        counted.asked(),
        [
            [
                "BEGIN",
                "statement",
                "statement",
                "guard, COMMIT AND CHAIN, claim"
            ]
            .as_slice(),
            &["statement", "ROLLBACK"],
            &["BEGIN", "statement", "statement", "guard, COMMIT"],
        ]
        .concat()
    );
    counted.stage.end().await;
}

/// Nobody waits a second time for what was waited for with the commit before it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_that_is_busy_is_asked_for_once() {
    let Some(counted) = Counted::new().await else {
        return;
    };
    let mut holds = holding(&counted.stage, "c", "e1").await;
    let broker = Broker::new();
    for event in events(2) {
        broker.publish(event);
    }
    let (handler, _) = Scripted::applies(&counted.stage);
    let limit = std::time::Duration::from_millis(100);
    let running = Running::start(counted.lane(&broker).lock_timeout(limit).handler(handler));
    soon("the release", broker.until(|stats| stats.released > 0)).await;
    sqlx::raw_sql("ROLLBACK").execute(&mut holds).await.unwrap();
    soon("every ack", broker.drained()).await;
    running.stop().await;
    assert_eq!(
        counted.asked(),
        [
            [
                "BEGIN",
                "statement",
                "statement",
                "guard, COMMIT AND CHAIN, claim",
                "ROLLBACK"
            ]
            .as_slice(),
            // When it has come again.
            &["BEGIN", "statement", "statement", "guard, COMMIT"],
        ]
        .concat()
    );
    counted.stage.end().await;
}

/// The transaction of the next event is chained to one that its handler has left read-only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_only_end_costs_the_lane_its_session_and_nothing_else() {
    let Some(counted) = Counted::new().await else {
        return;
    };
    let broker = Broker::new();
    for event in events(4) {
        broker.publish(event);
    }
    let (handler, runs) = Scripted::new(&counted.stage, |_, _| {
        Act::Run("SET TRANSACTION READ ONLY".into())
    });
    let consumer = counted.lane(&broker).handler(handler);
    let running = Running::start(consumer.retry(RetryPolicy::none()));
    soon("every ack", broker.drained()).await;
    assert_eq!(runs.total(), 4, "nothing was tried again");
    let errors = counted.wire.errors();
    let refused = errors.iter().filter(|code| *code == "25006").count();
    assert_eq!(refused, 3, "claims that nobody was told of");
    assert_eq!(
        counted.wire.probes(),
        1,
        "no pause: the database was asked for at the start alone"
    );
    assert_eq!((broker.stats().acked, broker.stats().released), (4, 0));
    assert_eq!(counted.stage.processed("c").await.len(), 4);
    assert!(counted.stage.effects().await.values().all(|n| *n == 1));
    running.stop().await;
    counted.stage.end().await;
}

/// The user's hook comes before the claim, in a statement of its own here.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_a_hook_nothing_is_claimed_before_it_has_run() {
    let Some(counted) = Counted::new().await else {
        return;
    };
    let broker = Broker::new();
    for event in events(3) {
        broker.publish(event);
    }
    let (handler, _) = Scripted::applies(&counted.stage);
    let consumer = counted.lane(&broker).handler(handler).on_begin(|conn| {
        Box::pin(async move {
            let sets = "SELECT set_config('app.tenant', 'x', true)";
            sqlx::query(sets).execute(conn).await.map(|_| ())
        })
    });
    let running = Running::start(consumer);
    soon("every ack", broker.drained()).await;
    running.stop().await;
    let event = ["statement"; 3];
    assert_eq!(
        counted.asked(),
        [
            ["BEGIN"].as_slice(),
            &event,
            &["guard, COMMIT, BEGIN"],
            &event,
            &["guard, COMMIT, BEGIN"],
            &event,
            &["guard, COMMIT"],
        ]
        .concat()
    );
    counted.stage.end().await;
}

/// The transaction that was begun ahead is the next event's, and never one that waits for work.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_begun_ahead_is_used_or_rolled_back() {
    let Some(counted) = Counted::new().await else {
        return;
    };
    let broker = Broker::new();
    for n in 0..3 {
        broker.publish(event(format!("{n}"), "x"));
    }
    // Event 0 pauses the lane's neighbours for ever: a stop takes back what waits behind it.
    let go_on = std::sync::Arc::new(tokio::sync::Notify::new());
    let (handler, runs) = Scripted::new(&counted.stage, {
        let go_on = go_on.clone();
        move |_, event| match event.identity.id.as_str() {
            "1" => Act::Wait(go_on.clone()),
            _ => Act::Apply,
        }
    });
    let running = Running::start(counted.lane(&broker).handler(handler));
    runs.until_waiting(1).await;
    // The lane is inside event 1, and 2 waits: its commit will begin ahead, unless there is a stop.
    let stopping = tokio::spawn(running.stop());
    until_released(&broker).await;
    go_on.notify_one();
    stopping.await.unwrap();
    assert_eq!(
        counted.asked(),
        [
            "BEGIN",
            "statement",
            "statement",
            "guard, COMMIT AND CHAIN, claim",
            "statement",
            "guard, COMMIT"
        ]
    );
    counted.stage.end().await;
}

async fn until_released(broker: &Broker) {
    crate::running::until("what was not started to go back", async || {
        broker.stats().released == 1
    })
    .await;
}

/// Behind a pooler the next transaction may run in another session: nothing is left in one, and
/// nothing is expected of one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_a_pooler_every_transaction_brings_what_it_needs() {
    let Some(url) = postgres_url() else { return };
    let stage = Stage::at(&url).await;
    let wire = Wire::default();
    let store = PostgresOptions::new(wire.before(&url).await)
        .schema(&stage.schema)
        .behind_pooler()
        .connect()
        .unwrap();
    let broker = Broker::new();
    let (handler, _) = Scripted::new(&stage, |run, event| match (event.identity.id.as_str(), run) {
        ("e1", 1) => Act::Fail("once".into()),
        ("e2", _) => Act::by(|cx| {
            Box::pin(async move {
                sqlx::raw_sql("COMMIT").execute(cx.tx()).await?;
                Ok(())
            })
        }),
        _ => Act::Apply,
    });
    for event in events(5).into_iter().chain(events(1)) {
        broker.publish(event);
    }
    let consumer = Consumer::builder("c", store)
        .source(broker.source())
        .handler(handler);
    let running = Running::start(consumer.lanes(1).window(100));
    soon("every ack", broker.drained()).await;
    running.stop().await;

    assert_eq!(stage.effects().await.len(), 4, "all but the one that escaped");
    let letters = stage.held().await;
    assert_eq!(letters.len(), 1);
    assert_eq!(letters[0].reason.as_deref(), Some("transaction_escaped"));

    let texts: Vec<_> = wire
        .asked_by_lanes()
        .into_iter()
        .filter_map(|asked| match asked {
            Asked::Text(text) => Some(text),
            _ => None,
        })
        .collect();
    let begins = texts.iter().filter(|text| text.starts_with("BEGIN"));
    for begin in begins.clone() {
        for limit in [
            "lock_timeout",
            "statement_timeout",
            "idle_in_transaction_session_timeout",
        ] {
            assert!(begin.contains(&format!("SET LOCAL {limit}")), "{begin}");
        }
    }
    let commits = texts.iter().filter(|text| text.ends_with("COMMIT"));
    assert!(begins.count() >= commits.count());
    let of_a_session = |text: &&String| {
        ["SET ", "PREPARE", "EXECUTE", "DISCARD"]
            .iter()
            .any(|word| text.starts_with(word))
            || text.contains("; BEGIN")
    };
    assert_eq!(texts.iter().find(of_a_session), None);
    stage.end().await;
}
