//! G12, the writing half: what a handler sends is in the outbox if and only if its work commits, in order,
//! with the same ids whenever it runs, and nothing gets there that could not be published.

use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use onlyonce::event::Headers;
use onlyonce::outbox::{OutboxError, OutgoingEvent};
use onlyonce::publisher::CloudEventsMode;
use onlyonce::testing::{Broker, deliver, event, keyed};
use onlyonce::{BatchContext, BatchHandler, Bytes, Event, HandlerError, Outbox, RetryPolicy, async_trait};

use crate::running::{Running, until};
use crate::stage::{Act, OutboxRow, Scripted, Stage, TestStore, events, soon};

on_each_store!(
    what_a_handler_sends_is_there_with_its_work,
    what_a_failed_run_sent_is_gone,
    a_handler_that_runs_again_sends_the_same_ids,
    a_duplicate_sends_nothing,
    a_discarded_event_sends_nothing,
    a_batch_sends_in_order_and_each_event_has_its_own_ids,
    of_a_batch_only_the_bad_one_sends_nothing,
    an_escaped_transaction_sends_nothing_and_its_letter_says_what,
    a_swallowed_error_sends_nothing,
    a_row_that_the_database_refuses_is_the_handlers_fault,
    an_outbox_that_cannot_be_written_to_is_nobodys_fault,
    what_is_too_large_is_a_dead_letter_and_costs_no_other,
    what_no_broker_could_carry_is_refused_before_the_database_is_asked,
    every_byte_is_kept,
    an_event_may_wait_by_the_databases_clock,
    a_trace_goes_on_through_the_outbox,
    a_transaction_of_ones_own_sends_if_it_commits,
    several_are_written_in_order_or_not_at_all,
    an_outbox_that_is_not_set_up_is_refused,
    parked_events_are_listed_replayed_and_discarded,
);

/// Derived for consumer `c` and the event `e0` of `test`, computed apart from this code.
const OF_E0: [&str; 2] = [
    "f2246edb-997c-5309-8ebd-1a7ff66f3160",
    "5742a592-641b-5863-973f-b5404964bfec",
];

fn paid(id: &str) -> OutgoingEvent {
    OutgoingEvent::new("kafka:payments", format!("paid.{id}"), "body").key("account-7")
}

/// A handler that writes its effect, sends two events and then ends in this way.
fn sends_two<S: TestStore>(
    stage: &Stage<S>,
    ends: impl Fn(u32, &str) -> Result<(), HandlerError> + Send + Sync + 'static,
) -> Scripted<S> {
    let (schema, ends) = (stage.schema.clone(), Arc::new(ends));
    let (handler, _) = Scripted::new(stage, move |run, event| {
        let (schema, id, ends) = (schema.clone(), event.identity.id.clone(), ends.clone());
        Act::by(move |cx| {
            Box::pin(async move {
                cx.outbox().send(paid(&id))?;
                S::write(cx.tx(), &schema, &id).await?;
                cx.outbox().send(paid(&id))?;
                ends(run, &id)
            })
        })
    });
    handler
}

fn ids(rows: &[OutboxRow]) -> Vec<&str> {
    rows.iter().map(|row| row.event_id.as_str()).collect()
}

fn types(rows: &[OutboxRow]) -> Vec<&str> {
    rows.iter()
        .map(|row| row.event_type.as_deref().unwrap())
        .collect()
}

async fn what_a_handler_sends_is_there_with_its_work<S: TestStore>(stage: Stage<S>) {
    let handler = sends_two(&stage, |_, _| Ok(()));
    let report = deliver(stage.consumer("c").handler(handler).lanes(1), events(3))
        .await
        .unwrap();
    assert_eq!(report.acked, 3);
    assert_eq!(stage.effects().await.len(), 3);
    let rows = stage.outgoing().await;
    assert_eq!(
        types(&rows),
        ["paid.e0", "paid.e0", "paid.e1", "paid.e1", "paid.e2", "paid.e2"]
    );
    let first = &rows[0];
    assert_eq!(ids(&rows)[..2], OF_E0);
    assert_eq!(
        (
            first.relay.as_str(),
            first.source.as_str(),
            first.destination.as_str()
        ),
        ("default", "c", "kafka:payments")
    );
    assert_eq!((first.lane, first.mode.as_str()), (27, "binary"));
    assert_eq!(first.key.as_deref(), Some(&b"account-7"[..]));
    assert_eq!(first.key_hash.as_ref().unwrap()[..4], [0x2c, 0x2e, 0xa3, 0x74]);

    // Another relay, another source.
    let outbox = Outbox::new(stage.store.clone()).relay("slow").source("shop");
    let handler = sends_two(&stage, |_, _| Ok(()));
    deliver(stage.consumer("d").outbox(outbox).handler(handler), events(1))
        .await
        .unwrap();
    let rows = stage.outgoing().await;
    assert_eq!(
        (rows[6].relay.as_str(), rows[6].source.as_str()),
        ("slow", "shop")
    );
    stage.end().await;
}

async fn what_a_failed_run_sent_is_gone<S: TestStore>(stage: Stage<S>) {
    let handler = sends_two(&stage, |_, id| match id {
        "e0" => Err("no".into()),
        "e1" => panic!("the handler panics on purpose"),
        _ => Err(HandlerError::permanent("never")),
    });
    deliver(stage.consumer("c").handler(handler), events(3))
        .await
        .unwrap();
    assert_eq!(stage.held().await.len(), 3);
    assert_eq!(stage.outgoing().await, []);

    let (hangs, _) = Scripted::new(&stage, |_, _| {
        Act::by(|cx| {
            Box::pin(async move {
                cx.outbox().send(paid("late"))?;
                std::future::pending().await
            })
        })
    });
    let consumer = stage.consumer("d").handler(hangs);
    deliver(consumer.handler_timeout(Duration::from_millis(100)), events(1))
        .await
        .unwrap();
    assert_eq!(stage.held().await.len(), 4);
    assert_eq!(stage.outgoing().await, []);
    stage.end().await;
}

async fn a_handler_that_runs_again_sends_the_same_ids<S: TestStore>(stage: Stage<S>) {
    let handler = sends_two(
        &stage,
        |run, _| if run < 3 { Err("not yet".into()) } else { Ok(()) },
    );
    let consumer = stage.consumer("c").retry(RetryPolicy::none().immediate(3));
    deliver(consumer.handler(handler), events(1)).await.unwrap();
    assert_eq!(ids(&stage.outgoing().await), OF_E0);
    stage.end().await;
}

async fn a_duplicate_sends_nothing<S: TestStore>(stage: Stage<S>) {
    let handler = sends_two(&stage, |_, _| Ok(()));
    let twice = events(2).into_iter().chain(events(2));
    let report = deliver(stage.consumer("c").handler(handler), twice)
        .await
        .unwrap();
    assert_eq!(report.acked, 4);
    assert_eq!(stage.outgoing().await.len(), 4);
    stage.end().await;
}

async fn a_discarded_event_sends_nothing<S: TestStore>(stage: Stage<S>) {
    let handler = sends_two(&stage, |_, _| Err(HandlerError::discard("nothing to do")));
    deliver(stage.consumer("c").handler(handler), events(1))
        .await
        .unwrap();
    assert_eq!(
        stage.processed("c").await,
        [("e0".to_owned(), "discarded".to_owned())]
    );
    assert_eq!(stage.outgoing().await, []);
    stage.end().await;
}

/// Sends one event for each, then another one for each, last event first.
struct TwoRounds;

#[async_trait]
impl<Db: sqlx::Database> BatchHandler<Db> for TwoRounds {
    type Payload = Bytes;

    async fn handle(&self, cx: &mut BatchContext<'_, Db>, events: Vec<Event>) -> Result<(), HandlerError> {
        for event in events.iter().chain(events.iter().rev()) {
            cx.outbox().for_event(event).send(paid(&event.identity.id))?;
        }
        Ok(())
    }
}

async fn a_batch_sends_in_order_and_each_event_has_its_own_ids<S: TestStore>(stage: Stage<S>) {
    let broker = Broker::new();
    for event in events(3) {
        broker.publish(event);
    }
    let consumer = stage.consumer("c").batch_handler(TwoRounds).batch(3).lanes(1);
    let running = Running::start(consumer.source(broker.source()));
    soon("every ack", broker.drained()).await;
    running.stop().await;
    let mut rows = stage.outgoing().await;
    // However many of them were in one batch: ids ascend, and each event's own two are those of a handler.
    rows.retain(|row| row.event_type.as_deref() == Some("paid.e0"));
    assert_eq!(ids(&rows), OF_E0);
    stage.end().await;
}

async fn of_a_batch_only_the_bad_one_sends_nothing<S: TestStore>(stage: Stage<S>) {
    let handler = sends_two(&stage, |_, id| if id == "e1" { Err("no".into()) } else { Ok(()) });
    let consumer = stage.consumer("c").handler(handler).batch(10).lanes(1);
    deliver(consumer, events(4)).await.unwrap();
    let rows = stage.outgoing().await;
    let mut types = types(&rows);
    types.sort_unstable();
    assert_eq!(
        types,
        ["paid.e0", "paid.e0", "paid.e2", "paid.e2", "paid.e3", "paid.e3"]
    );
    stage.end().await;
}

async fn an_escaped_transaction_sends_nothing_and_its_letter_says_what<S: TestStore>(stage: Stage<S>) {
    escapes(&stage, stage.store.clone()).await;
    stage.end().await;
}

/// Where sessions are not read-only by themselves, rows would commit on their own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_escaped_transaction_sends_nothing_in_a_session_that_may_write() {
    let Some(stage) = <onlyonce::store::PostgresStore as TestStore>::fresh().await else {
        return;
    };
    let store = stage.options().behind_pooler().connect().unwrap();
    escapes(&stage, store).await;
    stage.end().await;
}

async fn escapes<S: TestStore>(stage: &Stage<S>, store: S) {
    for (name, statements, fails) in [
        ("rollback", &["ROLLBACK"][..], false),
        ("rollback and fail", &["ROLLBACK"], true),
        ("rollback and begin", &["ROLLBACK", "BEGIN"], false),
        ("commit", &["COMMIT"], false),
        ("commit and fail", &["COMMIT"], true),
        ("commit and begin", &["COMMIT", "BEGIN"], false),
    ] {
        // On SQLite a handler's COMMIT is refused, and its transaction goes on.
        if stage.has_one_writer() && name.starts_with("commit") {
            continue;
        }
        let (handler, _) = Scripted::new(stage, move |_, event| {
            if event.identity.id != "bad" {
                return Act::Apply;
            }
            Act::by(move |cx| {
                Box::pin(async move {
                    cx.outbox().send(paid("bad"))?;
                    cx.outbox().send(paid("worse"))?;
                    for sql in statements {
                        let _ = S::raw(cx.tx(), (*sql).to_owned()).await;
                    }
                    if fails { Err("and fails".into()) } else { Ok(()) }
                })
            })
        });
        let consumer = stage.consumer_of(name, store.clone()).handler(handler).lanes(1);
        deliver(consumer, [event("bad", "x"), event("next", "x")])
            .await
            .unwrap();
        let letters = stage.held_of("bad").await;
        assert_eq!(stage.outgoing().await, [], "{name}");
        assert_eq!(letters.len(), 1, "{name}");
        // What was rolled back, and failed, is an ordinary failure: nothing of it stands.
        if name == "rollback and fail" {
            assert_eq!(letters[0].reason.as_deref(), Some("retries_exhausted"), "{name}");
        } else {
            assert_eq!(
                letters[0].reason.as_deref(),
                Some("transaction_escaped"),
                "{name}"
            );
            let says = "outgoing events not written: 2 (paid.bad ";
            assert!(
                letters[0].failures.contains(says),
                "{name}: {}",
                letters[0].failures
            );
            assert!(
                letters[0].failures.contains(" to kafka:payments, paid.worse "),
                "{name}: {}",
                letters[0].failures
            );
        }
        stage
            .execute("DELETE FROM {s}.inbox", "DELETE FROM onlyonce_inbox")
            .await;
    }
}

async fn a_swallowed_error_sends_nothing<S: TestStore>(stage: Stage<S>) {
    let (handler, _) = Scripted::new(&stage, |_, event| {
        let id = event.identity.id.clone();
        Act::by(move |cx| {
            Box::pin(async move {
                cx.outbox().send(paid(&id))?;
                let _ = S::raw(cx.tx(), "INSERT INTO no_such_table VALUES (1)".into()).await;
                Ok(())
            })
        })
    });
    deliver(stage.consumer("c").handler(handler), events(1))
        .await
        .unwrap();
    if stage.has_one_writer() {
        // SQLite undoes the statement and nothing else: the work is whole.
        assert_eq!(stage.outgoing().await.len(), 1);
    } else {
        assert_eq!(stage.outgoing().await, []);
        let letters = stage.held().await;
        assert!(
            letters[0].failures.contains("transaction_aborted"),
            "{}",
            letters[0].failures
        );
    }
    stage.end().await;
}

/// A rule of the user's own on the table.
async fn a_row_that_the_database_refuses_is_the_handlers_fault<S: TestStore>(stage: Stage<S>) {
    stage
        .execute(
            "ALTER TABLE {s}.outbox ADD CHECK (event_type <> 'paid.e1')",
            "CREATE TRIGGER refuse BEFORE INSERT ON onlyonce_outbox WHEN NEW.event_type = 'paid.e1'
             BEGIN SELECT RAISE(ABORT, 'refused'); END",
        )
        .await;
    let handler = sends_two(&stage, |_, _| Ok(()));
    deliver(stage.consumer("c").handler(handler).lanes(1), events(3))
        .await
        .unwrap();
    let letters = stage.held().await;
    assert_eq!(letters.len(), 1);
    assert_eq!(letters[0].event_id.as_deref(), Some("e1"));
    assert_eq!(letters[0].attempts, 1);
    assert!(
        letters[0].failures.contains("writing outgoing events"),
        "{}",
        letters[0].failures
    );
    assert_eq!(stage.effects().await.len(), 2);
    assert_eq!(stage.outgoing().await.len(), 4);
    stage.end().await;
}

/// A renamed table, a revoked grant: the consumer waits, and no event pays for it.
async fn an_outbox_that_cannot_be_written_to_is_nobodys_fault<S: TestStore>(stage: Stage<S>) {
    let broker = Broker::new();
    let handler = sends_two(&stage, |_, _| Ok(()));
    let running = Running::start(stage.consumer("c").handler(handler).source(broker.source()));
    broker.publish(event("before", "x"));
    soon("the first ack", broker.drained()).await;
    let [away, back] = [("outbox", "elsewhere"), ("elsewhere", "outbox")].map(|(from, to)| {
        (
            format!("ALTER TABLE {{s}}.{from} RENAME TO {to}"),
            format!("ALTER TABLE onlyonce_{from} RENAME TO onlyonce_{to}"),
        )
    });
    stage.execute(&away.0, &away.1).await;
    broker.publish(event("meanwhile", "x"));
    until("a pause", async || {
        let ready = running.health.ready();
        !ready.ok && ready.to_string().contains("paused")
    })
    .await;
    assert_eq!(stage.held().await, []);
    stage.execute(&back.0, &back.1).await;
    soon("the second ack", broker.drained()).await;
    running.stop().await;
    assert_eq!(stage.held().await, []);
    assert_eq!(stage.outgoing().await.len(), 4);
    stage.end().await;
}

async fn what_is_too_large_is_a_dead_letter_and_costs_no_other<S: TestStore>(stage: Stage<S>) {
    let of_size = |len: usize| OutgoingEvent::new("kafka:t", "t", vec![b'x'; len]);
    // What it counts besides its body: found out, not assumed.
    let outbox = Outbox::new(stage.store.clone()).source("c").limit("kafka", 1);
    let mut tx = S::outside(&stage).begin().await.unwrap();
    let overhead = match outbox.send_in(&mut tx, of_size(0)).await {
        Err(OutboxError::TooLarge { size, limit: 1, .. }) => size,
        other => panic!("{other:?}"),
    };
    drop(tx);

    const LIMIT: usize = 10_000;
    let limited = Outbox::new(stage.store.clone()).limit("kafka", LIMIT);
    let (handler, _) = Scripted::new(&stage, move |_, event| {
        let more = match event.identity.id.as_str() {
            "e0" => 0,
            "e1" => 2,
            _ => 1,
        };
        Act::by(move |cx| {
            Box::pin(async move {
                cx.outbox().send(of_size(LIMIT - 1 - overhead + more))?;
                Ok(())
            })
        })
    });
    // A limit is that of one publisher.
    let consumer = stage
        .consumer("c")
        .outbox(limited)
        .handler(handler)
        .batch(10)
        .lanes(1);
    deliver(consumer.retry(RetryPolicy::default()), events(20))
        .await
        .unwrap();
    let letters = stage.held().await;
    assert_eq!(letters.len(), 1);
    assert_eq!(
        (letters[0].event_id.as_deref(), letters[0].reason.as_deref()),
        (Some("e1"), Some("permanent_error"))
    );
    let says = format!("it counts {} bytes, and publisher kafka takes {LIMIT}", LIMIT + 1);
    assert!(letters[0].failures.contains(&says), "{}", letters[0].failures);
    let rows = stage.outgoing().await;
    assert_eq!(rows.len(), 19);
    let longest = rows.iter().map(|row| row.payload.as_ref().unwrap().len()).max();
    assert_eq!(longest, Some(LIMIT - overhead));
    stage.end().await;
}

async fn what_no_broker_could_carry_is_refused_before_the_database_is_asked<S: TestStore>(stage: Stage<S>) {
    let outbox = Outbox::new(stage.store.clone()).source("shop");
    let good = || paid("x");
    let mut tx = S::outside(&stage).begin().await.unwrap();
    for bad in [
        OutgoingEvent::new("nowhere", "t", ""),
        OutgoingEvent::new("kafka:a\0b", "t", ""),
        OutgoingEvent::new("kafka:t", "a\0b", ""),
        good().id("a\0b"),
        good().id(""),
        good().key(""),
        good().header("a\0b", ""),
        good().header("onlyonce-event-id", "another"),
        good().attribute("a\0b", "x"),
        good().attribute("a", "x\0"),
        good().content_type("a\0b"),
        good().delay(Duration::MAX),
        good().send_at(SystemTime::UNIX_EPOCH + Duration::from_secs(1 << 55)),
        OutgoingEvent::tombstone("kafka:t", "k").mode(CloudEventsMode::Structured),
    ] {
        let error = outbox
            .send_all_in(&mut tx, [good(), bad.clone()])
            .await
            .unwrap_err();
        assert!(
            matches!(error, OutboxError::Destination(_) | OutboxError::Unusable { .. }),
            "{bad:?}: {error}"
        );
        assert!(!error.to_string().contains('\0'), "{error}");
    }
    // The transaction has heard nothing of it.
    outbox.send_in(&mut tx, good()).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(stage.outgoing().await.len(), 1);

    // In a handler it is a dead letter at once.
    let (handler, runs) = Scripted::new(&stage, |_, _| {
        Act::by(|cx| {
            Box::pin(async move {
                cx.outbox().send(paid("x").key(""))?;
                Ok(())
            })
        })
    });
    let consumer = stage.consumer("c").handler(handler).retry(RetryPolicy::default());
    deliver(consumer, events(1)).await.unwrap();
    let letters = stage.held().await;
    assert_eq!(
        (runs.total(), letters[0].reason.as_deref()),
        (1, Some("permanent_error"))
    );
    assert!(
        letters[0].failures.contains("its key is"),
        "{}",
        letters[0].failures
    );
    stage.end().await;
}

async fn every_byte_is_kept<S: TestStore>(stage: Stage<S>) {
    let every: Vec<u8> = (0..=255).collect();
    let long = format!("kafka:{}", "é".repeat(253));
    let outbox = Outbox::new(stage.store.clone()).source("shop é");
    let hostile = OutgoingEvent::new(&long, "bezahlt ß \u{1f4b6}", every.clone())
        .id("'; DROP TABLE outbox; -- \u{202e}")
        .key(every.clone())
        .header("X-\"'{},\\", every.clone())
        .header("a", "")
        .header("a", "2")
        .attribute("subject", "{\"a\",NULL}")
        .content_type("text/plain; charset=\"utf-8\"")
        .mode(CloudEventsMode::Structured);
    let bare = OutgoingEvent::tombstone("rabbitmq:/invoices", "k");
    let empty = OutgoingEvent::new("sqs:q", "t", "");
    let mut tx = S::outside(&stage).begin().await.unwrap();
    let given = outbox.send_all_in(&mut tx, [hostile, bare, empty]).await.unwrap();
    tx.commit().await.unwrap();

    let rows = stage.outgoing().await;
    assert_eq!(ids(&rows), given);
    let row = &rows[0];
    assert_eq!(
        (row.destination.as_str(), row.source.as_str()),
        (long.as_str(), "shop é")
    );
    assert_eq!(row.event_id, "'; DROP TABLE outbox; -- \u{202e}");
    assert_eq!(row.event_type.as_deref(), Some("bezahlt ß \u{1f4b6}"));
    assert_eq!(
        (row.key.as_ref(), row.payload.as_ref()),
        (Some(&every), Some(&every))
    );
    assert_eq!(row.content_type.as_deref(), Some("text/plain; charset=\"utf-8\""));
    assert_eq!(row.mode, "structured");
    assert_eq!(
        pairs(&row.headers),
        [
            ("X-\"'{},\\".to_owned(), every.clone()),
            ("a".into(), vec![]),
            ("a".into(), b"2".to_vec())
        ]
    );
    assert_eq!(
        pairs(&row.attributes),
        [("subject".to_owned(), b"{\"a\",NULL}".to_vec())]
    );
    assert_eq!(
        (rows[1].payload.as_ref(), rows[1].event_type.as_ref()),
        (None, None)
    );
    assert_eq!(
        (rows[2].payload.as_deref(), rows[2].key.as_ref()),
        (Some(&b""[..]), None)
    );
    assert_eq!(rows[2].key_hash, None);
    stage.end().await;
}

/// The stored form of headers: a version, then for each the name and the value behind their lengths.
fn pairs(stored: &[u8]) -> Vec<(String, Vec<u8>)> {
    let (mut rest, mut pairs) = (&stored[1..], Vec::new());
    let take = |rest: &mut &[u8]| {
        let (len, more) = rest.split_at(4);
        let len = u32::from_be_bytes(len.try_into().unwrap()) as usize;
        let (taken, more) = more.split_at(len);
        *rest = more;
        taken.to_vec()
    };
    while !rest.is_empty() {
        let name = String::from_utf8(take(&mut rest)).unwrap();
        assert_eq!(rest[0], 1, "no null value");
        rest = &rest[1..];
        pairs.push((name, take(&mut rest)));
    }
    pairs
}

async fn an_event_may_wait_by_the_databases_clock<S: TestStore>(stage: Stage<S>) {
    let outbox = Outbox::new(stage.store.clone()).source("shop");
    let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    let hour = Duration::from_secs(3600);
    let mut tx = S::outside(&stage).begin().await.unwrap();
    let events = [
        paid("at once"),
        paid("at").send_at(at(4_000_000_000)),
        paid("after").delay(hour),
        // Of both, the later one counts.
        paid("late").send_at(at(4_000_000_000)).delay(hour),
        paid("later").send_at(at(1)).delay(hour),
        paid("last")
            .send_at(at(253_402_300_799))
            .delay(Duration::from_secs(3660 * 86_400)),
    ];
    outbox.send_all_in(&mut tx, events).await.unwrap();
    tx.commit().await.unwrap();
    let seconds = |event_type: &str, from: &str| {
        let postgres = format!(
            "SELECT COALESCE(EXTRACT(EPOCH FROM send_at - {from})::bigint, -1) FROM {{s}}.outbox
              WHERE event_type = 'paid.{event_type}'"
        );
        let from = if from == "created_at" { from } else { "0" };
        let sqlite = format!(
            "SELECT COALESCE((send_at - {from} + 500000) / 1000000, -1) FROM onlyonce_outbox
              WHERE event_type = 'paid.{event_type}'"
        );
        let stage = &stage;
        async move { stage.number(&postgres, &sqlite).await }
    };
    let epoch = "'epoch'::timestamptz";
    assert_eq!(seconds("at once", epoch).await, -1);
    assert_eq!(seconds("at", epoch).await, 4_000_000_000);
    assert_eq!(seconds("after", "created_at").await, 3600);
    assert_eq!(seconds("late", epoch).await, 4_000_000_000);
    assert_eq!(seconds("later", "created_at").await, 3600);
    assert_eq!(seconds("last", epoch).await, 253_402_300_799);
    stage.end().await;
}

async fn a_trace_goes_on_through_the_outbox<S: TestStore>(stage: Stage<S>) {
    let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let mut traced = event("traced", "x");
    traced.headers = Headers::from_iter([("traceparent", good), ("tracestate", "a=1")]);
    let mut strange = event("strange", "x");
    strange.headers = Headers::from_iter([("traceparent", vec![0xff; 10_000])]);
    let handler = sends_two(&stage, |_, _| Ok(()));
    let untraced = event("untraced", "x");
    let consumer = stage.consumer("c").handler(handler).lanes(1);
    deliver(consumer, [traced, strange, untraced]).await.unwrap();
    let rows = stage.outgoing().await;
    let found: Vec<_> = rows.iter().map(|row| row.traceparent.as_deref()).collect();
    assert_eq!(found, [Some(good), Some(good), None, None, None, None]);
    assert_eq!(
        pairs(&rows[0].headers),
        [
            ("traceparent".to_owned(), good.as_bytes().to_vec()),
            ("tracestate".to_owned(), b"a=1".to_vec())
        ]
    );
    assert_eq!(pairs(&rows[2].headers), []);
    stage.end().await;
}

async fn a_transaction_of_ones_own_sends_if_it_commits<S: TestStore>(stage: Stage<S>) {
    let outbox = Outbox::new(stage.store.clone()).source("shop").relay("api");
    let mut gone = S::outside(&stage).begin().await.unwrap();
    outbox.send_in(&mut gone, paid("gone")).await.unwrap();
    gone.rollback().await.unwrap();

    let mut tx = S::outside(&stage).begin().await.unwrap();
    S::write(&mut tx, &stage.schema, "order").await.unwrap();
    let id = outbox.send_in(&mut tx, paid("kept")).await.unwrap();
    assert_eq!(
        outbox.send_in(&mut tx, paid("named").id("o-1")).await.unwrap(),
        "o-1"
    );
    assert_eq!(stage.outgoing().await, [], "not before the commit");
    tx.commit().await.unwrap();
    outbox.wake();

    let rows = stage.outgoing().await;
    assert_eq!(types(&rows), ["paid.kept", "paid.named"]);
    assert_eq!(ids(&rows), [id.as_str(), "o-1"]);
    assert_eq!((rows[0].relay.as_str(), rows[0].source.as_str()), ("api", "shop"));
    assert_eq!(stage.effects().await["order"], 1);

    // In a handler's transaction it goes with that, and it does not wait for itself.
    let (handler, _) = Scripted::new(&stage, move |run, _| {
        let outbox = outbox.clone();
        Act::by(move |cx| {
            Box::pin(async move {
                outbox.send_in(cx.tx(), paid("within")).await?;
                if run == 1 { Err("once more".into()) } else { Ok(()) }
            })
        })
    });
    let consumer = stage.consumer("c").handler(handler);
    deliver(consumer.retry(RetryPolicy::none().immediate(1)), events(1))
        .await
        .unwrap();
    let rows = stage.outgoing().await;
    assert_eq!(types(&rows), ["paid.kept", "paid.named", "paid.within"]);
    stage.end().await;
}

async fn several_are_written_in_order_or_not_at_all<S: TestStore>(stage: Stage<S>) {
    let outbox = Outbox::new(stage.store.clone()).source("shop");
    let mut tx = S::outside(&stage).begin().await.unwrap();
    let given = outbox
        .send_all_in(&mut tx, (0..500).map(|n| paid(&n.to_string())))
        .await
        .unwrap();
    assert_eq!(
        outbox.send_all_in(&mut tx, []).await.unwrap(),
        Vec::<String>::new()
    );
    tx.commit().await.unwrap();
    let rows = stage.outgoing().await;
    assert_eq!(ids(&rows), given);
    let expected: Vec<String> = (0..500).map(|n| format!("paid.{n}")).collect();
    assert_eq!(types(&rows), expected);

    // The database refuses the last one, and the caller swallows that inside of a savepoint, if any.
    stage
        .execute(
            "ALTER TABLE {s}.outbox ADD CHECK (event_type <> 'paid.bad')",
            "CREATE TRIGGER refuse BEFORE INSERT ON onlyonce_outbox WHEN NEW.event_type = 'paid.bad'
             BEGIN SELECT RAISE(ABORT, 'refused'); END",
        )
        .await;
    let mut tx = S::outside(&stage).begin().await.unwrap();
    let mut savepoint = sqlx::Connection::begin(&mut *tx).await.unwrap();
    let refused = outbox
        .send_all_in(&mut savepoint, [paid("good"), paid("bad")])
        .await;
    assert!(matches!(refused, Err(OutboxError::Store(_))), "{refused:?}");
    if stage.has_one_writer() {
        savepoint.commit().await.unwrap();
    } else {
        savepoint.rollback().await.unwrap();
    }
    tx.commit().await.unwrap();
    assert_eq!(stage.outgoing().await.len(), 500);

    // Rows that something makes vanish are not taken for written.
    stage
        .execute(
            "CREATE FUNCTION {s}.none() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
             CREATE TRIGGER none BEFORE INSERT ON {s}.outbox FOR EACH ROW EXECUTE FUNCTION {s}.none()",
            "CREATE TRIGGER none BEFORE INSERT ON onlyonce_outbox BEGIN SELECT RAISE(IGNORE); END",
        )
        .await;
    let mut tx = S::outside(&stage).begin().await.unwrap();
    let error = outbox.send_in(&mut tx, paid("x")).await.unwrap_err().to_string();
    assert!(error.contains("0 of 1 outgoing events were written"), "{error}");
    drop(tx);
    let handler = sends_two(&stage, |_, _| Ok(()));
    deliver(stage.consumer("c").handler(handler), events(1))
        .await
        .unwrap();
    assert_eq!(stage.processed("c").await, [], "not acked as done");
    assert_eq!(stage.held().await.len(), 1);
    stage.end().await;
}

async fn an_outbox_that_is_not_set_up_is_refused<S: TestStore>(stage: Stage<S>) {
    let new = || Outbox::new(stage.store.clone());
    let mut tx = S::outside(&stage).begin().await.unwrap();
    let error = new().send_in(&mut tx, paid("x")).await.unwrap_err();
    assert!(error.to_string().contains("source is not set"), "{error}");
    drop(tx);

    let (handler, _) = Scripted::applies(&stage);
    let built = stage
        .consumer("c")
        .source(Broker::new().source())
        .handler(handler)
        .outbox(new().relay("A").limit("kafka", 0))
        .build();
    assert_eq!(
        built.err().unwrap().problems(),
        [
            "outbox: relay is \"A\" (1 to 64 of a-z, 0-9, - and _)",
            "outbox: limit for publisher kafka is 0 (1 to 134217728 bytes)"
        ]
    );
    let other = S::another(&stage).await;
    let (handler, _) = Scripted::applies(&stage);
    let built = stage
        .consumer("c")
        .source(Broker::new().source())
        .handler(handler)
        .outbox(Outbox::new(other))
        .build();
    assert_eq!(
        built.err().unwrap().problems(),
        ["outbox is of another store (it has to be of the consumer's own)"]
    );
    stage.end().await;
}

async fn parked_events_are_listed_replayed_and_discarded<S: TestStore>(stage: Stage<S>) {
    let outbox = Outbox::new(stage.store.clone()).source("shop");
    let other = outbox.clone().relay("other");
    let mut tx = S::outside(&stage).begin().await.unwrap();
    outbox
        .send_all_in(&mut tx, (0..5).map(|n| paid(&n.to_string())))
        .await
        .unwrap();
    other.send_in(&mut tx, paid("other")).await.unwrap();
    tx.commit().await.unwrap();
    let rows: Vec<i64> = stage.outgoing().await.iter().map(|row| row.id).collect();
    let park = |set: &str| {
        [
            format!("UPDATE {{s}}.outbox SET parked_at = to_timestamp(1700000000), {set}"),
            format!("UPDATE onlyonce_outbox SET parked_at = 1700000000000000, {set}"),
        ]
    };
    let [postgres, sqlite] = park("attempts = 8, last_error = 'too large' WHERE event_type <> 'paid.0'");
    stage.execute(&postgres, &sqlite).await;

    let parked = outbox.parked(0, 100).await.unwrap();
    let numbers: Vec<i64> = parked.iter().map(|row| row.id).collect();
    assert_eq!(numbers, rows[1..5]);
    let first = &parked[0];
    assert_eq!(
        (
            first.event_type.as_deref(),
            first.destination.as_str(),
            first.attempts
        ),
        (Some("paid.1"), "kafka:payments", 8)
    );
    assert_eq!(
        (first.key.as_deref(), first.error.as_str()),
        (Some(&b"account-7"[..]), "too large")
    );
    assert_eq!(
        first.parked_at,
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000)
    );
    let page = outbox.parked(numbers[0], 2).await.unwrap();
    assert_eq!(page.iter().map(|row| row.id).collect::<Vec<_>>(), rows[2..4]);

    // Only what is parked, and only of this relay.
    assert_eq!(sorted(outbox.replay(&rows[..2]).await.unwrap()), rows[1..2]);
    assert_eq!(sorted(outbox.replay(&rows[..2]).await.unwrap()), [0_i64; 0]);
    assert_eq!(sorted(outbox.discard(&rows[1..3]).await.unwrap()), rows[2..3]);
    assert_eq!(sorted(outbox.discard(&rows[5..]).await.unwrap()), [0_i64; 0]);
    assert_eq!(outbox.parked(0, 100).await.unwrap().len(), 2);
    assert_eq!(other.parked(0, 100).await.unwrap().len(), 1);
    let left: Vec<i64> = stage.outgoing().await.iter().map(|row| row.id).collect();
    assert_eq!(left, [rows[0], rows[1], rows[3], rows[4], rows[5]]);
    let due = "outbox WHERE parked_at IS NULL AND attempts = 0 AND next_attempt_at IS NULL AND replays = 1";
    let due = stage
        .number(
            &format!("SELECT id FROM {{s}}.{due}"),
            &format!("SELECT id FROM onlyonce_{due}"),
        )
        .await;
    assert_eq!(due, rows[1], "due again, and its replay is counted");
    stage.end().await;
}

fn sorted(mut numbers: Vec<i64>) -> Vec<i64> {
    numbers.sort_unstable();
    numbers
}

/// Order in the outbox is the order of the handlers, where those of a key run in order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn per_key_the_outbox_has_the_order_of_the_commits() {
    let Some(stage) = <onlyonce::store::PostgresStore as TestStore>::fresh().await else {
        return;
    };
    let seen = Arc::new(Mutex::new(Vec::new()));
    let commits = seen.clone();
    let (handler, _) = Scripted::new(&stage, move |_, event| {
        let (key, id) = (event.key.clone().unwrap(), event.identity.id.clone());
        commits.lock().unwrap().push((key.clone(), id.clone()));
        Act::by(move |cx| {
            Box::pin(async move {
                tokio::task::yield_now().await;
                cx.outbox().send(paid(&id).key(key))?;
                Ok(())
            })
        })
    });
    let events = (0..200).map(|n| keyed(format!("e{n}"), format!("k{}", n % 7), "x"));
    let consumer = stage.consumer("c").handler(handler).lanes(4).batch(3);
    deliver(consumer.ordering(onlyonce::Ordering::PerKey), events)
        .await
        .unwrap();
    let rows = stage.outgoing().await;
    assert_eq!(rows.len(), 200);
    for key in 0..7 {
        let key = format!("k{key}").into_bytes();
        let handled: Vec<String> = seen
            .lock()
            .unwrap()
            .iter()
            .filter(|(of, _)| *of == key)
            .map(|(_, id)| format!("paid.{id}"))
            .collect();
        let mut sent = rows.clone();
        sent.retain(|row| row.key.as_ref() == Some(&key));
        assert_eq!(types(&sent), handled);
    }
    stage.end().await;
}
