//! G6: a transaction that the handler broke is never acked as done.

use std::sync::Arc;

use futures_util::FutureExt as _;
use onlyonce::testing::{Broker, deliver, event};
use onlyonce::{HandlerError, RetryPolicy};
use sqlx::{Connection as _, Database};

use crate::running::{Running, until};
use crate::stage::{Act, Eyes, Scripted, Stage, TestStore, events, postgres_url};

on_each_store!(
    a_swallowed_error_is_a_failed_attempt_or_none_at_all,
    a_forgotten_savepoint_is_committed_with_the_rest,
    a_dropped_savepoint_is_rolled_back_and_the_rest_commits,
    a_begin_that_was_cut_off_escapes,
    a_rollback_of_the_handlers_escapes,
    a_rollback_that_is_followed_by_another_transaction_escapes,
    a_connection_that_may_not_write_any_more_is_never_half_a_success,
    the_neighbours_of_an_escape_are_not_acked_as_done,
    a_held_event_that_escapes_is_dead,
);

/// What a handler does in the transaction; its errors are swallowed.
type Statements = &'static [&'static str];

/// A handler that runs these statements around its write for the event `bad`, and applies every other.
fn script<S: TestStore>(
    stage: &Stage<S>,
    before: Statements,
    after: Statements,
    ends: fn() -> Result<(), HandlerError>,
) -> Scripted<S> {
    let schema = stage.schema.clone();
    let (handler, _) = Scripted::new(stage, move |_, event| {
        let (schema, id) = (schema.clone(), event.identity.id.clone());
        if id != "bad" {
            return Act::Apply;
        }
        Act::by(move |cx| {
            Box::pin(async move {
                for sql in before {
                    let _ = S::raw(cx.tx(), (*sql).to_owned()).await;
                }
                let _ = S::write(cx.tx(), &schema, &id).await;
                for sql in after {
                    let _ = S::raw(cx.tx(), (*sql).to_owned()).await;
                }
                ends()
            })
        })
    });
    handler
}

/// Delivers `bad` and then `next` on one lane and says what became of `bad`: the reason of its letter
/// and the kind of its last failure. `next` has to be applied whatever that was.
async fn verdict<S: TestStore>(stage: &Stage<S>, name: &str, handler: Scripted<S>) -> (String, String) {
    let consumer = stage.consumer(name).handler(handler).lanes(1);
    let report = deliver(consumer, [event("bad", "x"), event("next", "x")])
        .await
        .unwrap();
    assert_eq!(report.acked, 2, "{name}");
    assert!(
        stage
            .processed(name)
            .await
            .contains(&("next".to_owned(), "processed".to_owned())),
        "{name}: the lane goes on"
    );
    let mut letters = stage.held_of("bad").await;
    let letter = letters.pop().unwrap_or_else(|| panic!("{name}: acked as done"));
    assert_eq!(letter.state, "dead", "{name}");
    let failures: serde_json::Value = serde_json::from_str(&letter.failures).unwrap();
    let kind = failures.as_array().unwrap().last().unwrap()["kind"].as_str();
    // Each case has a letter of its own.
    stage
        .execute("DELETE FROM {s}.inbox", "DELETE FROM onlyonce_inbox")
        .await;
    (letter.reason.unwrap(), kind.unwrap().to_owned())
}

fn failed(kind: &str) -> (String, String) {
    ("retries_exhausted".to_owned(), kind.to_owned())
}

fn escaped() -> (String, String) {
    let word = "transaction_escaped".to_owned();
    (word.clone(), word)
}

fn fine() -> Result<(), HandlerError> {
    Ok(())
}

fn fails() -> Result<(), HandlerError> {
    Err("it fails after that".into())
}

async fn bad_effects<S: TestStore>(stage: &Stage<S>) -> usize {
    stage.effects().await.get("bad").copied().unwrap_or(0)
}

async fn a_swallowed_error_is_a_failed_attempt_or_none_at_all<S: TestStore>(stage: Stage<S>) {
    let swallows = script(&stage, &["INSERT INTO no_such_table VALUES (1)"], &[], fine);
    if stage.has_one_writer() {
        // SQLite undoes the statement and nothing else: the handler's work is whole.
        let report = deliver(stage.consumer("c").handler(swallows), [event("bad", "x")])
            .await
            .unwrap();
        assert_eq!((report.acked, bad_effects(&stage).await), (1, 1));
        assert_eq!(stage.processed("c").await.len(), 1);
    } else {
        assert_eq!(
            verdict(&stage, "c", swallows).await,
            failed("transaction_aborted")
        );
        assert_eq!(bad_effects(&stage).await, 0);
        assert_eq!(stage.processed("c").await.len(), 1, "nothing was kept of it");
    }
    stage.end().await;
}

/// A handler that begins savepoints by sqlx, in one of these ways.
fn begins<S: TestStore>(
    stage: &Stage<S>,
    deed: impl Fn(
        &mut <S::Db as Database>::Connection,
    ) -> futures_util::future::BoxFuture<'_, Result<(), HandlerError>>
    + Send
    + Sync
    + 'static,
) -> Scripted<S> {
    let deed = Arc::new(deed);
    let schema = stage.schema.clone();
    let (handler, _) = Scripted::new(stage, move |_, event| {
        let (deed, schema, id) = (deed.clone(), schema.clone(), event.identity.id.clone());
        if id != "bad" {
            return Act::Apply;
        }
        Act::by(move |cx| {
            Box::pin(async move {
                S::write(cx.tx(), &schema, &id).await?;
                deed(cx.tx()).await
            })
        })
    });
    handler
}

/// What sqlx would send for a commit then is a release of the savepoint, and the lane's work so far
/// and from then on would be one open transaction.
async fn a_forgotten_savepoint_is_committed_with_the_rest<S: TestStore>(stage: Stage<S>) {
    let forgets = begins(&stage, |conn| {
        Box::pin(async {
            std::mem::forget(conn.begin().await?);
            Ok(())
        })
    });
    let mut batch = vec![event("bad", "x")];
    batch.extend(events(5));
    let consumer = stage.consumer("c").handler(forgets).lanes(1);
    let report = deliver(consumer, batch).await.unwrap();
    assert_eq!(report.acked, 6);
    // From another connection.
    assert_eq!(bad_effects(&stage).await, 1);
    assert_eq!(stage.effects().await.len(), 6);
    assert_eq!(stage.processed("c").await.len(), 6);
    assert_eq!(stage.held().await, []);
    stage.end().await;
}

async fn a_dropped_savepoint_is_rolled_back_and_the_rest_commits<S: TestStore>(stage: Stage<S>) {
    let schema = stage.schema.clone();
    let drops = begins(&stage, move |conn| {
        let schema = schema.clone();
        Box::pin(async move {
            let mut savepoint = conn.begin().await?;
            S::write(&mut savepoint, &schema, "dropped").await?;
            drop(savepoint);
            Ok(())
        })
    });
    let report = deliver(stage.consumer("c").handler(drops), [event("bad", "x")])
        .await
        .unwrap();
    assert_eq!(report.acked, 1);
    assert_eq!(stage.effects().await.len(), 1, "the savepoint's work is gone");
    assert_eq!(bad_effects(&stage).await, 1);
    assert_eq!(stage.held().await, []);
    stage.end().await;
}

/// sqlx answers a `begin` that is dropped half-way with a rollback of the whole transaction.
async fn a_begin_that_was_cut_off_escapes<S: TestStore>(stage: Stage<S>) {
    let cuts = begins(&stage, |conn| {
        Box::pin(async {
            // The answer may be there before it was waited for; then once more.
            while let Some(begun) = conn.begin().now_or_never() {
                begun?.rollback().await?;
            }
            Ok(())
        })
    });
    assert_eq!(verdict(&stage, "c", cuts).await, escaped());
    assert_eq!(bad_effects(&stage).await, 0);
    stage.end().await;
}

async fn a_rollback_of_the_handlers_escapes<S: TestStore>(stage: Stage<S>) {
    // What is written after it does not commit alone.
    let rolls_back = script(&stage, &["ROLLBACK"], &[], fine);
    assert_eq!(verdict(&stage, "before", rolls_back).await, escaped());
    let rolls_back = script(&stage, &[], &["ROLLBACK"], fine);
    assert_eq!(verdict(&stage, "after", rolls_back).await, escaped());
    assert_eq!(bad_effects(&stage).await, 0);

    // If it fails as well, nothing stands, and it may be tried again.
    let rolls_back = script(&stage, &["ROLLBACK"], &[], fails);
    assert_eq!(verdict(&stage, "fails", rolls_back).await, failed("error"));
    assert_eq!(bad_effects(&stage).await, 0);
    stage.end().await;
}

async fn a_rollback_that_is_followed_by_another_transaction_escapes<S: TestStore>(stage: Stage<S>) {
    let begin = if stage.has_one_writer() {
        "BEGIN"
    } else {
        "BEGIN READ WRITE"
    };
    let statements: &'static [&'static str] = Box::leak(Box::new(["ROLLBACK", begin]));
    let begins_again = script(&stage, statements, &[], fine);
    assert_eq!(verdict(&stage, "open", begins_again).await, escaped());
    assert_eq!(
        bad_effects(&stage).await,
        0,
        "the second transaction ends with the lane's connection"
    );
    stage.end().await;
}

async fn a_connection_that_may_not_write_any_more_is_never_half_a_success<S: TestStore>(stage: Stage<S>) {
    let forbids: Statements = if stage.has_one_writer() {
        &["PRAGMA query_only = ON"]
    } else {
        &["SET TRANSACTION READ ONLY"]
    };
    let (reason, _) = verdict(&stage, "before", script(&stage, forbids, &[], fine)).await;
    assert_eq!(reason, "retries_exhausted", "its write failed");
    assert_eq!(bad_effects(&stage).await, 0);
    if stage.has_one_writer() {
        let (reason, _) = verdict(&stage, "after", script(&stage, &[], forbids, fine)).await;
        assert_eq!(reason, "retries_exhausted", "the guard could not write");
    } else {
        // All was written by then, and PostgreSQL commits it.
        let consumer = stage
            .consumer("after")
            .handler(script(&stage, &[], forbids, fine));
        deliver(consumer, [event("bad", "x")]).await.unwrap();
        assert_eq!(stage.processed("after").await.len(), 1);
        assert_eq!(bad_effects(&stage).await, 1);
    }
    stage.end().await;
}

/// In a batch the claims of all stand or fall together: where one handler ends the transaction, no
/// other may be taken for done, nor be done again.
async fn the_neighbours_of_an_escape_are_not_acked_as_done<S: TestStore>(stage: Stage<S>) {
    let ends: Statements = if stage.has_one_writer() {
        &["ROLLBACK"]
    } else {
        &["COMMIT"]
    };
    for (name, end) in [("ends", fine as fn() -> _), ("fails", fails)] {
        let (handler, _) = Scripted::applies(&stage);
        deliver(stage.consumer(name).handler(handler), [event("seen", "x")])
            .await
            .unwrap();
        stage
            .execute("DELETE FROM {s}.effects", "DELETE FROM effects")
            .await;
        let handler = script(&stage, &[], ends, end);
        let batch = stage.consumer(name).handler(handler).lanes(1).batch(10);
        let ids = ["first", "bad", "seen", "last"];
        let report = deliver(batch, ids.map(|id| event(id, "x"))).await.unwrap();
        assert_eq!(report.acked, 4, "{name}");
        for id in ["first", "last"] {
            let letters = stage.held_of(id).await;
            if stage.has_one_writer() {
                // Nothing of a rollback stands, and what came after it could not be written.
                assert_eq!(letters, [], "{name}: {id}");
                assert_eq!(stage.effects().await[id], 1, "{name}: {id}");
            } else {
                let reason = letters.first().and_then(|row| row.reason.as_deref());
                assert_eq!(reason, Some("transaction_escaped"), "{name}: {id}");
            }
        }
        assert_eq!(stage.held_of("bad").await.len(), 1, "{name}");
        assert_eq!(stage.held_of("seen").await, [], "{name}: it was done before");
        stage
            .execute("DELETE FROM {s}.inbox", "DELETE FROM onlyonce_inbox")
            .await;
    }
    stage.end().await;
}

async fn a_held_event_that_escapes_is_dead<S: TestStore>(stage: Stage<S>) {
    onlyonce::inbox::Queue::new(stage.store.clone(), "c")
        .enqueue(event("bad", "x"))
        .await
        .unwrap();
    let handler = script(&stage, &[], &["ROLLBACK"], fine);
    let source = onlyonce::inbox::InboxSource::new(stage.store.clone(), "c");
    let consumer = Running::start(
        stage
            .consumer("c")
            .handler(handler)
            .source(source)
            .lanes(1)
            .retry(RetryPolicy::new()),
    );
    until("the letter", async || stage.held().await[0].state == "dead").await;
    consumer.stop().await;
    let row = &stage.held().await[0];
    assert_eq!(
        (row.reason.as_deref(), row.attempts),
        (Some("transaction_escaped"), 1)
    );
    stage.end().await;
}

/// PostgreSQL lets a handler's own COMMIT through, and with it the claim.
mod postgres_only {
    use super::*;
    use std::time::Duration;

    use onlyonce::outbox::OutgoingEvent;
    use onlyonce::store::PostgresStore;
    use sqlx::{AssertSqlSafe, PgConnection};
    use tokio::time::timeout;

    /// The handler's statements, and how often its write stands after that.
    const COMMITS: &[(&str, Statements, Statements, usize)] = &[
        ("at the end", &[], &["COMMIT"], 1),
        ("at the start", &["COMMIT"], &[], 0),
        ("and begins", &[], &["COMMIT", "BEGIN"], 1),
        ("and begins to write", &["COMMIT", "BEGIN READ WRITE"], &[], 0),
        (
            "and breaks the next",
            &[],
            &["COMMIT", "BEGIN", "SELECT 1 / 0"],
            1,
        ),
        ("and chains", &[], &["COMMIT AND CHAIN"], 1),
    ];

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_commit_of_the_handlers_escapes_and_its_claim_stands() {
        let Some(stage) = PostgresStore::fresh().await else {
            return;
        };
        for (name, before, after, stands) in COMMITS {
            let handler = script(&stage, before, after, fine);
            assert_eq!(verdict(&stage, name, handler).await, escaped(), "{name}");
            assert_eq!(bad_effects(&stage).await, *stands, "{name}");
            stage.execute("DELETE FROM {s}.effects", "").await;
        }
        stage.end().await;
    }

    /// What comes after the COMMIT fails, since the session is read-only by itself. Tried again, the
    /// event would be a duplicate of its own half-done work.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_handler_that_commits_and_then_fails_escapes_as_well() {
        let Some(stage) = PostgresStore::fresh().await else {
            return;
        };
        for (name, before, after, _) in COMMITS {
            let handler = script(&stage, before, after, fails);
            assert_eq!(verdict(&stage, name, handler).await, escaped(), "{name}");
        }
        let panics = script(&stage, &[], &["COMMIT"], || panic!("it panics after that"));
        assert_eq!(verdict(&stage, "panics", panics).await, escaped());
        let discards = script(&stage, &[], &["COMMIT"], || Err(HandlerError::discard("no")));
        assert_eq!(verdict(&stage, "discards", discards).await, escaped());
        stage.end().await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_handler_that_commits_and_then_hangs_escapes_as_well() {
        let Some(stage) = PostgresStore::fresh().await else {
            return;
        };
        let hangs = begins(&stage, |conn| {
            Box::pin(async {
                PostgresStore::raw(conn, "COMMIT".into()).await?;
                PostgresStore::raw(conn, "SELECT pg_sleep(60)".into()).await?;
                Ok(())
            })
        });
        let consumer = stage
            .consumer("c")
            .handler(hangs)
            .handler_timeout(std::time::Duration::from_millis(200));
        deliver(consumer, [event("bad", "x")]).await.unwrap();
        let letter = &stage.held_of("bad").await[0];
        assert_eq!(letter.reason.as_deref(), Some("transaction_escaped"));
        stage.end().await;
    }

    /// The rollback to it is sent with the guard's message, or rather before, and fails.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_savepoint_that_is_dropped_after_the_transaction_ended_escapes() {
        let Some(stage) = PostgresStore::fresh().await else {
            return;
        };
        for (name, ends) in [
            ("rolls back", "ROLLBACK"),
            ("commits", "COMMIT"),
            ("commits and begins", "COMMIT; BEGIN READ WRITE"),
        ] {
            let drops = begins(&stage, move |conn| {
                Box::pin(async move {
                    let mut savepoint = conn.begin().await?;
                    sqlx::raw_sql(ends).execute(&mut *savepoint).await?;
                    drop(savepoint);
                    Ok(())
                })
            });
            assert_eq!(verdict(&stage, name, drops).await, escaped(), "{name}");
        }
        // Begun again, the savepoint is unknown and nothing of the first transaction stands.
        let drops = begins(&stage, |conn| {
            Box::pin(async {
                let mut savepoint = conn.begin().await?;
                sqlx::raw_sql("ROLLBACK; BEGIN READ WRITE")
                    .execute(&mut *savepoint)
                    .await?;
                drop(savepoint);
                Ok(())
            })
        });
        assert_eq!(
            verdict(&stage, "begins again", drops).await,
            failed("transaction_aborted")
        );
        stage.end().await;
    }

    /// A begin that fails or is cut off makes sqlx roll back everything and count no transaction any more;
    /// the next event's savepoint must not become a transaction of its own for that.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_begin_that_was_refused_hurts_no_other_event() {
        let Some(stage) = PostgresStore::fresh().await else {
            return;
        };
        let schema = stage.schema.clone();
        let (handler, _) = Scripted::new(&stage, move |_, event| {
            let (schema, id) = (schema.clone(), event.identity.id.clone());
            Act::<PostgresStore>::by(move |cx| {
                Box::pin(async move {
                    let conn: &mut PgConnection = cx.tx();
                    if id == "aborted" {
                        let _ = PostgresStore::raw(conn, "SELECT 1 / 0".into()).await;
                    }
                    if id == "begin_with" {
                        conn.begin_with("BEGIN READ WRITE").await?;
                    }
                    let mut savepoint = conn.begin().await?;
                    PostgresStore::write(&mut savepoint, &schema, &id).await?;
                    savepoint.commit().await?;
                    if id == "fails" {
                        return Err(HandlerError::permanent("after its savepoint"));
                    }
                    Ok(())
                })
            })
        });
        let consumer = stage.consumer("c").handler(handler).lanes(1);
        let order = [
            "aborted",
            "innocent",
            "begin_with",
            "blameless",
            "aborted too",
            "fails",
        ];
        let report = deliver(consumer, order.map(|id| event(id, "x"))).await.unwrap();
        assert_eq!(report.acked, 6);
        let mut applied: Vec<_> = stage.effects().await.into_keys().collect();
        applied.sort();
        assert_eq!(applied, ["aborted too", "blameless", "innocent"]);
        for id in ["aborted", "begin_with", "fails"] {
            let letters = stage.held_of(id).await;
            assert_eq!((letters.len(), letters[0].state.as_str()), (1, "dead"), "{id}");
        }
        stage.end().await;
    }

    /// The late error of a statement that the handler did not wait for is its own, whatever it says.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_statement_that_the_handler_cut_off_fails_for_the_handler() {
        let Some(stage) = PostgresStore::fresh().await else {
            return;
        };
        for (name, sql) in [
            ("a division", "SELECT pg_sleep(0.2); SELECT 1 / 0"),
            (
                "a table",
                "SELECT pg_sleep(0.2); INSERT INTO no_such_table VALUES (1)",
            ),
            ("a word", "SELECT pg_sleep(0.2); SELECT 'onlyonce: held'::int"),
        ] {
            let cuts = begins(&stage, move |conn| {
                Box::pin(async move {
                    let late = PostgresStore::raw(conn, sql.into());
                    assert!(timeout(Duration::from_millis(50), late).await.is_err());
                    Ok(())
                })
            });
            assert_eq!(
                verdict(&stage, name, cuts).await,
                failed("transaction_aborted"),
                "{name}"
            );
        }
        assert_eq!(bad_effects(&stage).await, 0);
        stage.end().await;
    }

    /// Before the guard comes what finishes its row, and that gets the answer of the COPY.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_copy_that_a_held_event_did_not_wait_for_is_its_own_fault() {
        let Some(stage) = PostgresStore::fresh().await else {
            return;
        };
        stage
            .execute(
                "CREATE TABLE {s}.copies (n int);
                 CREATE FUNCTION {s}.slow() RETURNS trigger LANGUAGE plpgsql
                     AS $$BEGIN PERFORM pg_sleep(0.3); RETURN NEW; END$$;
                 CREATE TRIGGER slow BEFORE INSERT ON {s}.copies FOR EACH ROW EXECUTE FUNCTION {s}.slow()",
                "",
            )
            .await;
        let copy = format!("COPY {}.copies FROM STDIN", stage.schema);
        let (handler, _) = Scripted::new(&stage, move |run, _| {
            let copy = copy.clone();
            Act::by(move |cx| {
                Box::pin(async move {
                    if run == 1 {
                        return Err("held".into());
                    }
                    let conn: &mut PgConnection = cx.tx();
                    let mut copy = conn.copy_in_raw(&copy).await?;
                    copy.send(&b"7\n"[..]).await?;
                    assert!(timeout(Duration::from_millis(50), copy.finish()).await.is_err());
                    Ok(())
                })
            })
        });
        let broker = Broker::new();
        broker.publish(event("bad", "x"));
        let consumer = stage.consumer("c").handler(handler).source(broker.source());
        let running = Running::start(consumer.retry(RetryPolicy::none().delays([Duration::ZERO])));
        until("the letter", async || {
            stage.held_of("bad").await.iter().any(|row| row.state == "dead")
        })
        .await;
        running.stop().await;
        let letters = stage.held_of("bad").await;
        assert!(
            letters[0].failures.contains("out_of_step"),
            "{}",
            letters[0].failures
        );
        assert_eq!(stage.number("SELECT count(*) FROM {s}.copies", "").await, 0);
        stage.end().await;
    }

    /// sqlx does not count the answer of a COPY: the next statement gets it in place of its own.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_copy_that_was_not_waited_for_is_not_taken_for_a_commit() {
        let Some(stage) = PostgresStore::fresh().await else {
            return;
        };
        stage
            .execute(
                "CREATE TABLE {s}.parents (id int PRIMARY KEY);
                 CREATE TABLE {s}.children (p int REFERENCES {s}.parents DEFERRABLE INITIALLY DEFERRED);
                 CREATE FUNCTION {s}.slow() RETURNS trigger LANGUAGE plpgsql
                     AS $$BEGIN PERFORM pg_sleep(0.3); RETURN NEW; END$$;
                 CREATE TRIGGER slow BEFORE INSERT ON {s}.children FOR EACH ROW EXECUTE FUNCTION {s}.slow()",
                "",
            )
            .await;
        #[derive(Clone, Copy, Debug)]
        enum Ends {
            CutOff { fails: bool },
            Dropped,
        }
        for (name, data, ends, sends) in [
            ("the commit would fail", "7\n", Ends::CutOff { fails: false }, 0),
            ("the copy fails", "7\nseven\n", Ends::CutOff { fails: false }, 0),
            ("the handler fails", "7\n", Ends::CutOff { fails: true }, 0),
            ("dropped", "7\n", Ends::Dropped, 0),
            // One, as many as the COPY says that it has copied.
            (
                "sending, the commit would fail",
                "7\n",
                Ends::CutOff { fails: false },
                1,
            ),
            (
                "sending, the copy fails",
                "7\nseven\n",
                Ends::CutOff { fails: false },
                1,
            ),
            (
                "sending, the handler fails",
                "7\n",
                Ends::CutOff { fails: true },
                1,
            ),
            ("sending, dropped", "7\n", Ends::Dropped, 1),
            ("sending more", "7\n", Ends::CutOff { fails: false }, 2),
        ] {
            let copy = format!("COPY {}.children FROM STDIN", stage.schema);
            let (handler, _) = Scripted::new(&stage, move |_, event| {
                let copy = copy.clone();
                match event.identity.id.as_str() {
                    // So that the statements of parking are prepared on this lane.
                    "first" => Act::Fail(HandlerError::permanent("no")),
                    "bad" => Act::by(move |cx| {
                        Box::pin(async move {
                            for _ in 0..sends {
                                cx.outbox().send(OutgoingEvent::new("kafka:t", "copied", ""))?;
                            }
                            let conn: &mut PgConnection = cx.tx();
                            let mut copy = conn.copy_in_raw(&copy).await?;
                            copy.send(data.as_bytes()).await?;
                            if let Ends::CutOff { fails } = ends {
                                assert!(timeout(Duration::from_millis(50), copy.finish()).await.is_err());
                                if fails {
                                    return Err("no time left".into());
                                }
                            }
                            Ok(())
                        })
                    }),
                    _ => Act::Apply,
                }
            });
            let consumer = stage.consumer(name).handler(handler).lanes(1);
            let report = deliver(consumer, ["first", "bad", "next"].map(|id| event(id, "x")))
                .await
                .unwrap();
            assert_eq!(report.acked, 3, "{name}");
            let processed = stage.processed(name).await;
            assert_eq!(processed, [("next".to_owned(), "processed".to_owned())], "{name}");
            let letters = stage.held_of("bad").await;
            let kind = match ends {
                Ends::CutOff { fails: true } => "\"error\"",
                _ => "out_of_step",
            };
            assert_eq!(letters.len(), 1, "{name}: parked, neither lost nor done");
            assert!(
                letters[0].failures.contains(kind),
                "{name}: {}",
                letters[0].failures
            );
            assert_eq!(stage.outgoing().await, [], "{name}");
            stage.execute("DELETE FROM {s}.inbox", "").await;
        }
        let Eyes::Postgres(eyes) = &stage.eyes else {
            panic!("it is PostgreSQL")
        };
        let children = format!("SELECT count(*) FROM {}.children", stage.schema);
        let children: i64 = sqlx::query_scalar(AssertSqlSafe(children))
            .fetch_one(eyes)
            .await
            .unwrap();
        assert_eq!(children, 0);
        stage.end().await;
    }

    /// `cx.tx()` is a mutable reference, and what is behind it can be exchanged.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn an_exchanged_connection_escapes() {
        let Some(stage) = PostgresStore::fresh().await else {
            return;
        };
        let url = postgres_url().unwrap();
        for (name, keeps) in [("drops it", false), ("leaks it", true)] {
            let url = url.clone();
            let exchanges = begins(&stage, move |conn| {
                let url = url.clone();
                Box::pin(async move {
                    let other = PgConnection::connect(&url).await?;
                    let ours = std::mem::replace(conn, other);
                    if keeps {
                        std::mem::forget(ours);
                    }
                    Ok(())
                })
            });
            assert_eq!(verdict(&stage, name, exchanges).await, escaped(), "{name}");
        }
        assert_eq!(bad_effects(&stage).await, 0);
        stage.end().await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn an_escape_leaves_the_letter_of_an_earlier_payload_alone() {
        let Some(stage) = PostgresStore::fresh().await else {
            return;
        };
        let (handler, _) = Scripted::new(&stage, |_, _| Act::Fail("no".into()));
        deliver(stage.consumer("c").handler(handler), [event("bad", "earlier")])
            .await
            .unwrap();
        let handler = script(&stage, &[], &["COMMIT"], fine);
        deliver(stage.consumer("c").handler(handler), [event("bad", "later")])
            .await
            .unwrap();
        let rows = stage.held_of("bad").await;
        assert_eq!(rows.len(), 1);
        assert_eq!((rows[0].state.as_str(), rows[0].attempts), ("dead", 2));
        assert_eq!(rows[0].payload.as_deref(), Some(&b"earlier"[..]));
        assert_eq!(rows[0].copy_payload.as_deref(), Some(&b"later"[..]));
        stage.end().await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_write_beside_the_transaction_fails_and_does_not_commit_alone() {
        let Some(stage) = PostgresStore::fresh().await else {
            return;
        };
        let (pool, schema) = (stage.store.pool().clone(), stage.schema.clone());
        let (handler, _) = Scripted::new(&stage, move |_, _| {
            let (pool, schema) = (pool.clone(), schema.clone());
            Act::by(move |_cx| {
                Box::pin(async move {
                    let mut beside = pool.acquire().await?;
                    Ok(PostgresStore::write(&mut beside, &schema, "beside").await?)
                })
            })
        });
        deliver(stage.consumer("c").handler(handler), [event("bad", "x")])
            .await
            .unwrap();
        assert!(stage.effects().await.is_empty());
        let letter = &stage.held_of("bad").await[0];
        assert_eq!(letter.reason.as_deref(), Some("retries_exhausted"));
        assert!(
            letter.failures.contains("read-only transaction"),
            "{}",
            letter.failures
        );
        stage.end().await;
    }
}

/// SQLite does not let it through: the claim points at nothing until the guard has passed.
#[cfg(feature = "sqlite")]
mod sqlite_only {
    use super::*;
    use onlyonce::store::SqliteStore;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_commit_of_the_handlers_fails_and_its_transaction_goes_on() {
        let Some(stage) = SqliteStore::fresh().await else {
            return;
        };
        let handler = script(&stage, &["COMMIT"], &["COMMIT"], fine);
        let report = deliver(stage.consumer("c").handler(handler), [event("bad", "x")])
            .await
            .unwrap();
        assert_eq!((report.acked, bad_effects(&stage).await), (1, 1));
        assert_eq!(stage.processed("c").await.len(), 1);
        assert_eq!(stage.held().await, []);
        stage.end().await;
    }
}
