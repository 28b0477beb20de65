//! G7: identity is explicit. What has none is a dead letter with a reason, never a shared key, and
//! nothing of it is lost.

use std::sync::{Arc, Mutex};

use onlyonce::event::{Headers, Identity, PropertyId, RawEvent};
use onlyonce::testing::{deliver, event};
use onlyonce::{
    Bytes, Context, Event, Handler, HandlerError, IdentityRules, Json, OnUnknown, Router, async_trait,
};

use crate::stage::{Act, Scripted, Stage, TestStore};

on_each_store!(
    two_events_without_an_id_are_two_letters,
    values_that_a_pointer_finds_are_ids_or_letters,
    ids_are_compared_byte_for_byte,
    the_same_id_of_two_sources_is_two_events,
    a_tombstone_is_not_an_empty_body,
    whatever_a_message_holds_it_can_be_applied_or_kept,
    what_cannot_be_identified_is_kept_whatever_it_holds,
    an_unknown_type_is_a_letter_or_discarded_by_choice,
);

/// An event with this value in the place that identifies it, or nothing there.
fn with_id(id: Option<&[u8]>, body: &str) -> RawEvent {
    RawEvent {
        property: id.map(|id| PropertyId {
            source: "test".into(),
            id: Bytes::copy_from_slice(id),
        }),
        ..event("", body.to_owned())
    }
}

async fn two_events_without_an_id_are_two_letters<S: TestStore>(stage: Stage<S>) {
    let long = vec![b'x'; 10 * 1024];
    let cases: &[(Option<&[u8]>, &str)] = &[
        (None, "missing_event_id"),
        (Some(b""), "missing_event_id"),
        (Some(b"   "), "missing_event_id"),
        (Some(b"null"), "missing_event_id"),
        (Some(b"undefined"), "missing_event_id"),
        (Some(b"a\0b"), "invalid_event_id"),
        (Some(b"\xff\xfe"), "invalid_event_id"),
        (Some(&long), "invalid_event_id"),
    ];
    let (handler, runs) = Scripted::applies(&stage);
    let deliveries = cases
        .iter()
        .enumerate()
        .flat_map(|(n, (id, _))| ["first", "second"].map(|body| with_id(*id, &format!("{n} {body}"))));
    let report = deliver(stage.consumer("c").handler(handler).lanes(1), deliveries)
        .await
        .unwrap();
    assert_eq!((report.acked, runs.total()), (16, 0));
    let letters = stage.held().await;
    assert_eq!(letters.len(), 16);
    for (n, (id, reason)) in cases.iter().enumerate() {
        for (letter, body) in letters[2 * n..].iter().zip(["first", "second"]) {
            assert_eq!(letter.payload, Some(format!("{n} {body}").into_bytes()), "{id:?}");
            assert_eq!(letter.reason.as_deref(), Some(*reason), "{id:?}");
            assert_eq!(
                (letter.state.as_str(), &letter.event_id),
                ("dead", &None),
                "{id:?}"
            );
        }
    }
    assert_eq!(stage.processed("c").await, []);
    stage.end().await;
}

async fn values_that_a_pointer_finds_are_ids_or_letters<S: TestStore>(stage: Stage<S>) {
    let (handler, runs) = Scripted::applies(&stage);
    let consumer = stage
        .consumer("c")
        .handler(handler)
        .identity(IdentityRules::json_pointer("/id", "api"))
        .lanes(1);
    let bodies = [
        r#"{"id":0,"n":1}"#,
        r#"{"id":null,"n":1}"#,
        r#"{"id":null,"n":2}"#,
        r#"{"id":{},"n":1}"#,
        r#"{"id":{},"n":2}"#,
        r#"{"id":[],"n":1}"#,
        r#"{"id":"undefined","n":1}"#,
        "not JSON",
    ];
    let report = deliver(consumer, bodies.map(|body| with_id(None, body)))
        .await
        .unwrap();
    assert_eq!((report.acked, runs.total(), runs.of("0")), (8, 1, 1));
    let letters = stage.held().await;
    let payloads: Vec<_> = letters
        .iter()
        .map(|letter| String::from_utf8(letter.payload.clone().unwrap()).unwrap())
        .collect();
    assert_eq!(payloads, bodies[1..]);
    let reasons: Vec<_> = letters.iter().map(|l| l.reason.as_deref().unwrap()).collect();
    let (missing, invalid) = ("missing_event_id", "invalid_event_id");
    assert_eq!(
        reasons,
        [missing, missing, invalid, invalid, invalid, missing, missing]
    );
    stage.end().await;
}

async fn ids_are_compared_byte_for_byte<S: TestStore>(stage: Stage<S>) {
    let ids = [
        "evt_Ab",
        "evt_aB",
        "evt_Ab ",
        " evt_Ab",
        "\u{e9}vt",
        "e\u{301}vt",
        "\u{df}",
        "ss",
    ];
    let (handler, runs) = Scripted::applies(&stage);
    let copies = ids.iter().chain(&ids).map(|id| event(*id, "x"));
    let report = deliver(stage.consumer("c").handler(handler), copies)
        .await
        .unwrap();
    assert_eq!((report.acked, runs.total()), (16, 8));
    assert_eq!(stage.processed("c").await.len(), 8);
    stage.end().await;
}

/// (`a`, `b|1`) and (`a|b`, `1`) would be one key if the parts were simply joined.
async fn the_same_id_of_two_sources_is_two_events<S: TestStore>(stage: Stage<S>) {
    let pairs = [("a", "b|1"), ("a|b", "1"), ("a", "1")];
    let structured = |source: &str, id: &str| RawEvent {
        headers: [("content-type", "application/cloudevents+json")]
            .into_iter()
            .collect(),
        ..with_id(
            None,
            &format!(r#"{{"specversion":"1.0","type":"t","source":"{source}","id":"{id}"}}"#),
        )
    };
    let binary = |prefix: &str, source: &str, id: &str| RawEvent {
        headers: [("id", id), ("source", source), ("specversion", "1.0")]
            .map(|(name, value)| (format!("{prefix}{name}"), value.to_owned()))
            .into_iter()
            .collect(),
        ..with_id(None, "x")
    };
    let property = |source: &str, id: &str| RawEvent {
        property: Some(PropertyId {
            source: source.into(),
            id: Bytes::copy_from_slice(id.as_bytes()),
        }),
        ..with_id(None, "x")
    };
    type Mode<'a> = (&'a str, &'a dyn Fn(&str, &str) -> RawEvent);
    let modes: [Mode<'_>; 5] = [
        ("structured", &structured),
        ("kafka", &|source, id| binary("ce_", source, id)),
        ("amqp", &|source, id| binary("cloudEvents:", source, id)),
        ("http", &|source, id| binary("ce-", source, id)),
        ("property", &property),
    ];
    for (mode, message) in modes {
        let (handler, runs) = Scripted::applies(&stage);
        let copies = pairs.iter().chain(&pairs).map(|(source, id)| message(source, id));
        let report = deliver(stage.consumer(mode).handler(handler), copies)
            .await
            .unwrap();
        assert_eq!((report.acked, runs.total()), (6, 3), "{mode}");
        assert_eq!(stage.processed(mode).await.len(), 3, "{mode}");
    }

    // An id that does not say whose it is, twice: two letters.
    let (handler, runs) = Scripted::applies(&stage);
    let without_source = ["first", "second"].map(|body| RawEvent {
        headers: [("ce_id", "1"), ("ce_specversion", "1.0")].into_iter().collect(),
        ..with_id(None, body)
    });
    deliver(stage.consumer("none").handler(handler), without_source)
        .await
        .unwrap();
    assert_eq!((runs.total(), stage.held().await.len()), (0, 2));
    stage.end().await;
}

/// An id and the length of its payload, if it had one.
type Got = (String, Option<usize>);

/// Takes tombstones, and says what it got.
struct Tombstones<S: TestStore> {
    schema: String,
    got: Arc<Mutex<Vec<Got>>>,
    store: std::marker::PhantomData<fn() -> S>,
}

#[async_trait]
impl<S: TestStore> Handler<S::Db> for Tombstones<S> {
    type Payload = Option<Bytes>;

    async fn handle(
        &self,
        cx: &mut Context<'_, S::Db>,
        event: Event<Option<Bytes>>,
    ) -> Result<(), HandlerError> {
        let got = (event.identity.id.clone(), event.payload.map(|body| body.len()));
        self.got.lock().unwrap().push(got);
        S::write(cx.tx(), &self.schema, &event.identity.id).await?;
        if event.identity.id.starts_with("fails") {
            return Err("no".into());
        }
        Ok(())
    }
}

async fn a_tombstone_is_not_an_empty_body<S: TestStore>(stage: Stage<S>) {
    let null = |id| RawEvent {
        payload: None,
        ..with_id(id, "")
    };
    let got = Arc::new(Mutex::new(Vec::new()));
    let handler = Arc::new(Tombstones::<S> {
        schema: stage.schema.clone(),
        got: got.clone(),
        store: std::marker::PhantomData,
    });
    let consumer = || stage.consumer("c").handler(handler.clone()).lanes(1);
    let messages = [
        null(Some(b"null")),
        null(Some(b"n")),
        with_id(Some(b"e"), ""),
        null(None),
        null(Some(b"fails null")),
        with_id(Some(b"fails empty"), ""),
        // The same identity again, empty instead of null: it is another payload, so it is not held.
        with_id(Some(b"fails null"), ""),
    ];
    let report = deliver(consumer(), messages).await.unwrap();
    assert_eq!(report.acked, 7);
    let expected = [
        ("n", None),
        ("e", Some(0)),
        ("fails null", None),
        ("fails empty", Some(0)),
        ("fails null", Some(0)),
    ];
    assert_eq!(
        *got.lock().unwrap(),
        expected.map(|(id, length)| (id.to_owned(), length))
    );
    let kept: Vec<_> = stage
        .held()
        .await
        .into_iter()
        .map(|row| (row.event_id, row.payload))
        .collect();
    let expected = [
        (None, None),
        (None, None),
        (Some("fails null".to_owned()), None),
        (Some("fails empty".to_owned()), Some(Vec::new())),
    ];
    assert_eq!(kept, expected);

    // A handler that does not take them leaves a letter with its reason, and the lane goes on.
    let (handler, runs) = Scripted::applies(&stage);
    let messages = [null(Some(b"null payload")), with_id(Some(b"good"), "x")];
    deliver(stage.consumer("d").handler(handler).lanes(1), messages)
        .await
        .unwrap();
    assert_eq!(runs.total(), 1);
    let letter = &stage.held_of("null payload").await[0];
    assert_eq!(
        (letter.reason.as_deref(), &letter.payload),
        (Some("undecodable"), &None)
    );
    stage.end().await;
}

/// Messages that somebody may send, each with an identity of its own. `true`: a handler of bytes can
/// apply it; otherwise decoding is where it ends.
fn hostile() -> Vec<(bool, RawEvent)> {
    let mut odd_headers = Headers::new();
    odd_headers.push("nul\0name", &b"nul\0value"[..]);
    odd_headers.push("binary", &b"\xff\xfe\x00"[..]);
    odd_headers.push_null("null");
    odd_headers.push("", &b""[..]);
    let at = |id: &str| event(id, "x");
    vec![
        (
            true,
            RawEvent {
                headers: odd_headers,
                ..at("odd headers")
            },
        ),
        (
            true,
            RawEvent {
                headers: (0..10_000).map(|n| (format!("h{n}"), vec![0u8; 20])).collect(),
                ..at("10,000 headers")
            },
        ),
        (
            true,
            RawEvent {
                key: Some(vec![0xff; 1 << 20].into()),
                ..at("1 MB key")
            },
        ),
        (
            true,
            RawEvent {
                key: Some(Bytes::from_static(b"\0\xff")),
                ..at("binary key")
            },
        ),
        (
            true,
            RawEvent {
                key: Some(Bytes::new()),
                ..at("empty key")
            },
        ),
        (
            true,
            RawEvent {
                payload: Some(vec![0; 5 << 20].into()),
                ..at("5 MB body")
            },
        ),
        (
            true,
            RawEvent {
                event_type: Some(Bytes::from_static(b"a\0b")),
                ..at("NUL in the type")
            },
        ),
        (
            false,
            RawEvent {
                event_type: Some(Bytes::from_static(b"\xff")),
                ..at("binary type")
            },
        ),
        (
            true,
            RawEvent {
                time_ms: Some(i64::MAX),
                ..at("far future")
            },
        ),
        (
            true,
            RawEvent {
                time_ms: Some(i64::MIN),
                ..at("far past")
            },
        ),
        (
            true,
            RawEvent {
                origin: onlyonce::event::Origin {
                    system: "memory",
                    destination: "nul\0".repeat(1000).into(),
                    detail: "\u{feff}\0".repeat(10_000).into(),
                },
                ..at("odd origin")
            },
        ),
        (true, at(&"x".repeat(512))),
    ]
}

async fn whatever_a_message_holds_it_can_be_applied_or_kept<S: TestStore>(stage: Stage<S>) {
    let (handler, runs) = Scripted::applies(&stage);
    let messages = hostile().into_iter().map(|(_, message)| message);
    let report = deliver(stage.consumer("applies").handler(handler), messages)
        .await
        .unwrap();
    assert_eq!(
        (report.acked as usize, runs.total() as usize),
        (hostile().len(), hostile().len() - 1)
    );
    let letter = &stage.held().await[0];
    assert_eq!(
        (letter.event_id.as_deref(), letter.reason.as_deref()),
        (Some("binary type"), Some("undecodable"))
    );

    let (handler, _) = Scripted::new(&stage, |_, _| Act::Fail("nul \0 and \u{d7ff} in an error".into()));
    let messages = hostile().into_iter().map(|(_, message)| message);
    deliver(stage.consumer("keeps").handler(handler), messages)
        .await
        .unwrap();
    for (decodes, message) in hostile() {
        let id = String::from_utf8(message.property.unwrap().id.to_vec()).unwrap();
        let letter = stage.held_of(&id).await.pop().unwrap();
        let reason = if decodes {
            "retries_exhausted"
        } else {
            "undecodable"
        };
        assert_eq!(letter.reason.as_deref(), Some(reason), "{id}");
        assert_eq!(letter.payload, message.payload.map(|body| body.to_vec()), "{id}");
        assert_eq!(letter.attempts, 1, "{id}");
        assert_eq!(
            (
                letter.headers.as_slice(),
                letter.key.as_deref(),
                letter.event_type.as_deref()
            ),
            (
                stored(&message.headers).as_slice(),
                message.key.as_deref(),
                message.event_type.as_deref()
            ),
            "{id}"
        );
    }
    stage.end().await;
}

/// The documented form of stored headers: a version byte, then names and values behind their lengths.
fn stored(headers: &Headers) -> Vec<u8> {
    let mut out = vec![1];
    for (name, value) in headers.iter() {
        out.extend((name.len() as u32).to_be_bytes());
        out.extend(name.as_bytes());
        match value {
            None => out.push(0),
            Some(value) => {
                out.push(1);
                out.extend((value.len() as u32).to_be_bytes());
                out.extend(value);
            }
        }
    }
    out
}

async fn what_cannot_be_identified_is_kept_whatever_it_holds<S: TestStore>(stage: Stage<S>) {
    let (handler, runs) = Scripted::applies(&stage);
    let messages: Vec<_> = hostile()
        .into_iter()
        .map(|(_, message)| RawEvent {
            property: None,
            ..message
        })
        .collect();
    let panics = IdentityRules::with(|event| {
        if event.event_type.as_deref() == Some(b"panic") {
            panic!("a rule that panics on purpose");
        }
        Identity::strong("s", "").map(Some)
    });
    let consumer = stage.consumer("c").handler(handler).identity(panics).lanes(1);
    let bad_rule = RawEvent {
        event_type: Some(Bytes::from_static(b"panic")),
        ..event("panic", "body")
    };
    let count = messages.len() + 1;
    let report = deliver(consumer, messages.clone().into_iter().chain([bad_rule]))
        .await
        .unwrap();
    assert_eq!((report.acked as usize, runs.total()), (count, 0));
    let letters = stage.held().await;
    assert_eq!(letters.len(), count);
    for (letter, message) in letters.iter().zip(&messages) {
        assert_eq!(letter.payload.as_deref(), message.payload.as_deref());
        assert_eq!(letter.headers, stored(&message.headers));
        assert_eq!(letter.reason.as_deref(), Some("missing_event_id"));
    }
    let last = letters.last().unwrap();
    assert_eq!(
        last.reason.as_deref(),
        Some("invalid_event_id"),
        "the rule's panic is its own"
    );
    assert_eq!(last.payload.as_deref(), Some(&b"body"[..]));
    stage.end().await;
}

#[derive(serde::Deserialize)]
struct Payment {
    #[allow(dead_code)]
    cents: i64,
}

async fn an_unknown_type_is_a_letter_or_discarded_by_choice<S: TestStore>(stage: Stage<S>) {
    for rule in [OnUnknown::DeadLetter, OnUnknown::Discard] {
        let name = format!("{rule:?}");
        let paid = onlyonce::handler_fn::<S::Db, Json<Payment>, _>(|_, _| Box::pin(async { Ok(()) }));
        let router = Router::<S::Db>::new().on("paid", paid).on_unknown(rule);
        let typed = |id: &str, event_type: Option<&'static str>, body: &'static str| RawEvent {
            event_type: event_type.map(|t| Bytes::from_static(t.as_bytes())),
            ..event(format!("{name} {id}"), body)
        };
        let messages = [
            typed("good", Some("paid"), r#"{"cents":1}"#),
            typed("not json", Some("paid"), "{"),
            typed("other", Some("refunded"), "{}"),
            typed("none", None, "{}"),
        ];
        deliver(stage.consumer(&name).handler(router).lanes(1), messages)
            .await
            .unwrap();
        let reason = async |id: &str| {
            let letter = stage.held_of(&format!("{name} {id}")).await.pop();
            letter.map(|letter| (letter.reason.unwrap(), letter.payload.unwrap()))
        };
        let outcomes = stage.processed(&name).await;
        let outcome = |id: &str| {
            let id = format!("{name} {id}");
            outcomes
                .iter()
                .find(|(found, _)| *found == id)
                .map(|(_, outcome)| outcome.as_str())
        };
        assert_eq!((reason("good").await, outcome("good")), (None, Some("processed")));
        let undecodable = ("undecodable".to_owned(), b"{".to_vec());
        assert_eq!(
            (reason("not json").await, outcome("not json")),
            (Some(undecodable), None)
        );
        for id in ["other", "none"] {
            let unknown = ("unknown_event_type".to_owned(), b"{}".to_vec());
            match rule {
                OnUnknown::Discard => {
                    assert_eq!((reason(id).await, outcome(id)), (None, Some("discarded")));
                }
                _ => assert_eq!((reason(id).await, outcome(id)), (Some(unknown), None)),
            }
        }
    }
    stage.end().await;
}
