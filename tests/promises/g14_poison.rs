//! G14: one poison message costs its own attempts: not its batch's, not its key's, not its
//! neighbours', not the consumer's.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use onlyonce::event::{DecodeError, FromEvent, RawEvent};
use onlyonce::testing::{Broker, deliver, event, keyed};
use onlyonce::{Bytes, Context, Event, Handler, HandlerError, Json, Ordering, RetryPolicy, async_trait};

use crate::running::{Running, until};
use crate::stage::{Act, Runs, Scripted, Stage, TestStore, events, soon};

on_each_store!(
    three_bad_ones_among_a_thousand_cost_their_own_attempts,
    in_a_batch_only_the_bad_one_pays,
    per_key_the_other_keys_go_on,
    a_panic_of_any_kind_is_an_attempt_and_the_lane_goes_on,
    what_cannot_be_decoded_is_dead_after_one_attempt,
    a_hook_that_panics_pauses_the_consumer_and_does_not_end_it,
    a_letter_that_the_table_refuses_is_kept_in_a_reduced_form,
);

fn bad_ones_fail<S: TestStore>(stage: &Stage<S>) -> (Scripted<S>, Arc<Runs>) {
    Scripted::new(stage, |_, event| {
        if event.identity.id.starts_with("bad") {
            Act::Fail("always".into())
        } else {
            Act::Apply
        }
    })
}

/// With room for three deliveries, all of which are bad at first. They wait in the inbox for their
/// next attempt, so the good ones pass, and nothing goes round between here and the broker.
async fn three_bad_ones_among_a_thousand_cost_their_own_attempts<S: TestStore>(stage: Stage<S>) {
    let (handler, runs) = bad_ones_fail(&stage);
    let broker = Broker::new();
    let bad = ["bad1", "bad2", "bad3"];
    for message in bad.map(|id| event(id, "x")).into_iter().chain(events(1000)) {
        broker.publish(message);
    }
    let consumer = stage
        .consumer("c")
        .handler(handler)
        .source(broker.source())
        .ordering(Ordering::Unordered)
        .window(3)
        .retry(
            RetryPolicy::none()
                .immediate(1)
                .delays([50, 100].map(Duration::from_millis)),
        );
    let consumer = Running::start(consumer);
    soon("every ack", broker.drained()).await;
    until("three dead letters", async || {
        stage
            .held()
            .await
            .iter()
            .filter(|row| row.state == "dead")
            .count()
            == 3
    })
    .await;
    consumer.stop().await;

    let stats = broker.stats();
    assert_eq!((stats.delivered, stats.acked, stats.released), (1003, 1003, 0));
    let effects = stage.effects().await;
    assert_eq!(effects.len(), 1000);
    assert!(effects.values().all(|n| *n == 1));
    for id in bad {
        assert_eq!(runs.of(id), 4, "{id}: once, once in place, twice from the inbox");
    }
    assert_eq!(runs.total(), 1012, "no good one ran twice");
    stage.end().await;
}

async fn in_a_batch_only_the_bad_one_pays<S: TestStore>(stage: Stage<S>) {
    let attempts = Arc::new(Mutex::new(Vec::new()));
    let (seen, schema) = (attempts.clone(), stage.schema.clone());
    let (handler, runs) = Scripted::new(&stage, move |_, event| {
        let (seen, schema, id) = (seen.clone(), schema.clone(), event.identity.id.clone());
        Act::by(move |cx| {
            Box::pin(async move {
                seen.lock().unwrap().push((id.clone(), cx.attempt()));
                S::write(cx.tx(), &schema, &id).await?;
                if id == "bad" { Err("always".into()) } else { Ok(()) }
            })
        })
    });
    let mut messages = events(99);
    messages.insert(50, event("bad", "x"));
    let consumer = stage
        .consumer("c")
        .handler(handler)
        .lanes(1)
        .batch(100)
        .retry(RetryPolicy::none().immediate(1));
    let report = deliver(consumer, messages).await.unwrap();
    assert_eq!((report.delivered, report.acked), (100, 100));
    let effects = stage.effects().await;
    assert_eq!(effects.len(), 99);
    assert!(effects.values().all(|n| *n == 1));
    let letters = stage.held().await;
    assert_eq!(letters.len(), 1);
    assert_eq!(
        (letters[0].event_id.as_deref(), letters[0].attempts),
        (Some("bad"), 2),
        "the batch's failure is not an attempt"
    );
    let attempts = attempts.lock().unwrap().clone();
    assert!(attempts.iter().all(|(id, attempt)| id == "bad" || *attempt == 1));
    assert!(attempts.len() <= 99 + 51 + 2 && runs.of("bad") == 3);
    stage.end().await;
}

async fn per_key_the_other_keys_go_on<S: TestStore>(stage: Stage<S>) {
    let order = Arc::new(Mutex::new(Vec::new()));
    let (done, schema) = (order.clone(), stage.schema.clone());
    let (handler, _) = Scripted::new(&stage, move |_, event| {
        let (done, schema, id) = (done.clone(), schema.clone(), event.identity.id.clone());
        Act::by(move |cx| {
            Box::pin(async move {
                if id == "bad" {
                    return Err("always".into());
                }
                done.lock().unwrap().push(id.clone());
                Ok(S::write(cx.tx(), &schema, &id).await?)
            })
        })
    });
    let broker = Broker::new();
    broker.publish(keyed("bad", "k0", "x"));
    for n in 0..40 {
        broker.publish(keyed(format!("k{}-{n:02}", n % 4), format!("k{}", n % 4), "x"));
    }
    let consumer = stage
        .consumer("c")
        .handler(handler)
        .source(broker.source())
        .ordering(Ordering::PerKey)
        .retry(RetryPolicy::none().immediate(3));
    let consumer = Running::start(consumer);
    soon("every ack", broker.drained()).await;
    consumer.stop().await;
    assert_eq!(broker.stats().delivered, 41, "nothing went round");
    assert_eq!(stage.effects().await.len(), 40, "the later ones of its key, too");
    let letters = stage.held().await;
    assert_eq!((letters.len(), letters[0].attempts), (1, 4));
    let order = order.lock().unwrap().clone();
    for key in 0..4 {
        let of_key: Vec<_> = order
            .iter()
            .filter(|id| id.starts_with(&format!("k{key}")))
            .collect();
        assert!(of_key.is_sorted(), "{of_key:?}");
    }
    stage.end().await;
}

/// Panics in its own way for each event that asks for it.
struct Panics<S: TestStore> {
    schema: String,
    store: std::marker::PhantomData<fn() -> S>,
}

struct PanicsInDecoding;

impl FromEvent for PanicsInDecoding {
    fn from_event(raw: &RawEvent) -> Result<Self, DecodeError> {
        assert_ne!(raw.payload.as_deref(), Some(&b"decoding"[..]), "on purpose");
        Ok(Self)
    }
}

#[async_trait]
impl<S: TestStore> Handler<S::Db> for Panics<S> {
    type Payload = PanicsInDecoding;

    async fn handle(
        &self,
        cx: &mut Context<'_, S::Db>,
        event: Event<PanicsInDecoding>,
    ) -> Result<(), HandlerError> {
        S::write(cx.tx(), &self.schema, &event.identity.id).await?;
        match event.identity.id.as_str() {
            "text" => panic!("on purpose"),
            "formatted" => panic!("on purpose: {}", event.identity.id),
            "no text" => std::panic::panic_any(7),
            "in a statement" => {
                let _running = S::raw(cx.tx(), "SELECT 1".into());
                panic!("on purpose")
            }
            _ => Ok(()),
        }
    }
}

async fn a_panic_of_any_kind_is_an_attempt_and_the_lane_goes_on<S: TestStore>(stage: Stage<S>) {
    let handler = Panics::<S> {
        schema: stage.schema.clone(),
        store: std::marker::PhantomData,
    };
    let bad = ["text", "formatted", "no text", "in a statement", "decoding"];
    let messages = bad
        .iter()
        .flat_map(|id| [event(*id, *id), event(format!("after {id}"), "x")]);
    let report = deliver(stage.consumer("c").handler(handler).lanes(1), messages)
        .await
        .unwrap();
    assert_eq!(report.acked, 10);
    assert_eq!(stage.effects().await.len(), 5);
    for id in bad {
        let letter = &stage.held_of(id).await[0];
        assert_eq!(
            (letter.attempts, letter.reason.as_deref()),
            (1, Some("retries_exhausted")),
            "{id}"
        );
        assert!(letter.failures.contains(r#"panic""#), "{id}: {}", letter.failures);
    }
    stage.end().await;
}

/// A format with a magic byte, as schema registries have it.
struct Avro;

impl FromEvent for Avro {
    fn from_event(raw: &RawEvent) -> Result<Self, DecodeError> {
        match Bytes::from_event(raw)?.first() {
            Some(0) => Ok(Self),
            byte => Err(DecodeError::new(format!("the magic byte is {byte:?}, not 0"))),
        }
    }
}

async fn what_cannot_be_decoded_is_dead_after_one_attempt<S: TestStore>(stage: Stage<S>) {
    let nested = format!("{}{}", "[".repeat(200), "]".repeat(200));
    let bodies: Vec<Bytes> = vec![
        r#"{"cents":"#.into(),
        Bytes::from_static(b"\x1f\x8b\x08\x00junk"),
        Bytes::new(),
        nested.into(),
        "1e400".into(),
        Bytes::from_static(b"\xff\xfe"),
    ];
    let json = onlyonce::handler_fn::<S::Db, Json<serde_json::Value>, _>(|_, _| Box::pin(async { Ok(()) }));
    dead_after_one(&stage, "json", stage.consumer("json").handler(json), &bodies, "7").await;

    let avro = onlyonce::handler_fn::<S::Db, Avro, _>(|_, _| Box::pin(async { Ok(()) }));
    let wrong = [Bytes::from_static(b"\x01rest"), Bytes::new()];
    dead_after_one(
        &stage,
        "avro",
        stage.consumer("avro").handler(avro),
        &wrong,
        "\0rest",
    )
    .await;
    stage.end().await;
}

async fn dead_after_one<S: TestStore>(
    stage: &Stage<S>,
    name: &str,
    consumer: onlyonce::consumer::ConsumerBuilder<S>,
    bad: &[Bytes],
    good: &'static str,
) {
    let id = |n: usize| format!("{name} {n}");
    let messages = bad
        .iter()
        .enumerate()
        .map(|(n, body)| event(id(n), body.clone()))
        .chain([event("good", good)]);
    // A policy that would try again for hours if it were asked.
    let consumer = consumer.lanes(1).retry(RetryPolicy::new());
    let report = soon(name, deliver(consumer, messages)).await.unwrap();
    assert_eq!(report.acked as usize, bad.len() + 1);
    for (n, body) in bad.iter().enumerate() {
        let letter = &stage.held_of(&id(n)).await[0];
        assert_eq!(
            (letter.state.as_str(), letter.reason.as_deref(), letter.attempts),
            ("dead", Some("undecodable"), 1),
            "{body:?}"
        );
        assert_eq!(letter.payload.as_deref(), Some(&body[..]), "{body:?}");
    }
    assert_eq!(
        stage.processed(name).await,
        [("good".to_owned(), "processed".to_owned())]
    );
}

async fn a_hook_that_panics_pauses_the_consumer_and_does_not_end_it<S: TestStore>(stage: Stage<S>) {
    let (handler, runs) = Scripted::applies(&stage);
    let calls = Arc::new(std::sync::atomic::AtomicU32::new(0));
    let counts = calls.clone();
    let consumer = stage
        .consumer("c")
        .handler(handler)
        .lanes(1)
        .on_begin(move |_conn| {
            let call = counts.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            assert!(call > 0, "before its future is there");
            Box::pin(async move {
                assert!(call > 1, "and in its future");
                Ok(())
            })
        });
    let report = deliver(consumer, events(3)).await.unwrap();
    assert_eq!((report.acked, runs.total()), (3, 3));
    assert_eq!(calls.load(std::sync::atomic::Ordering::SeqCst), 5);
    assert_eq!(stage.held().await, [], "it says nothing about an event");
    stage.end().await;
}

/// A constraint of the user's own, or a database that is not UTF-8: the body is kept, the rest is what
/// can be stored, and nobody waits for it.
async fn a_letter_that_the_table_refuses_is_kept_in_a_reduced_form<S: TestStore>(stage: Stage<S>) {
    stage
        .execute(
            "ALTER TABLE {s}.inbox ADD CHECK (event_type IS NULL OR get_byte(event_type, 0) < 128)",
            "CREATE TRIGGER picky BEFORE INSERT ON onlyonce_inbox WHEN hex(NEW.event_type) LIKE 'FF%'
                 BEGIN SELECT RAISE(ABORT, 'no'); END",
        )
        .await;
    let (handler, _) = Scripted::new(&stage, |_, event| match event.identity.id.as_str() {
        "bad" => Act::Fail(HandlerError::permanent("no")),
        _ => Act::Apply,
    });
    let bad = RawEvent {
        event_type: Some(Bytes::from_static(b"\xff\xfe")),
        ..event("bad", "the body")
    };
    let consumer = stage.consumer("c").handler(handler).lanes(1);
    let report = soon("both", deliver(consumer, [bad, event("next", "x")]))
        .await
        .unwrap();
    assert_eq!(report.acked, 2);
    let letters = stage.held_of("bad").await;
    assert_eq!(letters.len(), 1);
    assert_eq!(letters[0].payload.as_deref(), Some(&b"the body"[..]));
    assert_eq!(letters[0].event_type.as_deref(), Some(&b"\\xff\\xfe"[..]));
    assert_eq!(stage.effects().await["next"], 1);
    stage.end().await;
}
