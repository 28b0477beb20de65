use super::*;

#[tokio::test]
async fn a_second_delivery_is_a_duplicate_and_changes_nothing() {
    let bench = Bench::new().await;
    let mut conn = bench.store.open().await.unwrap();
    let event = Event::new("1", "a");
    assert_eq!(bench.process(&mut conn, &event, INSERT).await, ClaimAnswer::New);
    assert_eq!(bench.process(&mut conn, &event, INSERT).await, duplicate(true));
    assert_eq!(
        bench.process(&mut conn, &Event::new("1", "b"), INSERT).await,
        duplicate(false)
    );
    assert_eq!(
        bench.process(&mut conn, &Event::new("2", "a"), INSERT).await,
        ClaimAnswer::New
    );
    assert_eq!(bench.effects().await, 2);
}

#[tokio::test]
async fn a_rolled_back_attempt_leaves_no_claim() {
    let bench = Bench::new().await;
    let mut conn = bench.store.open().await.unwrap();
    let event = Event::new("1", "a");
    let mut tx = bench.store.begin(&mut conn, &Limits::default()).await.unwrap();
    bench
        .store
        .claim(&mut tx, &[event.request()], Outcome::Processed)
        .await
        .unwrap();
    run(&mut tx, INSERT).await.unwrap();
    bench.store.rollback(&mut conn).await.unwrap();
    assert_eq!((bench.claims().await, bench.effects().await), (0, 0));
    assert_eq!(bench.process(&mut conn, &event, INSERT).await, ClaimAnswer::New);
}

#[tokio::test]
async fn another_identity_under_the_same_digest_is_a_collision_and_never_a_duplicate() {
    let bench = Bench::new().await;
    let mut conn = bench.store.open().await.unwrap();
    let event = Event::new("1", "a");
    bench.process(&mut conn, &event, INSERT).await;
    bench
        .sql("UPDATE onlyonce_processed_events SET event_id = 'other'")
        .await;
    assert_eq!(
        bench.process(&mut conn, &event, INSERT).await,
        ClaimAnswer::Collision
    );
}

#[tokio::test]
async fn a_batch_is_answered_in_its_order_and_an_event_that_stands_twice_is_new_once() {
    let bench = Bench::new().await;
    let mut conn = bench.store.open().await.unwrap();
    let (done, a, a2, b) = (
        Event::new("0", "x"),
        Event::new("1", "x"),
        Event::new("1", "y"),
        Event::new("2", "x"),
    );
    bench.process(&mut conn, &done, INSERT).await;

    let mut tx = bench.store.begin(&mut conn, &Limits::default()).await.unwrap();
    let batch = [
        b.request(),
        a.request(),
        done.request(),
        a2.request(),
        a.request(),
    ];
    let (answers, claims) = bench
        .store
        .claim(&mut tx, &batch, Outcome::Processed)
        .await
        .unwrap();
    let expected = [
        ClaimAnswer::New,
        ClaimAnswer::New,
        duplicate(true),
        duplicate(false),
        duplicate(true),
    ];
    assert_eq!(answers, expected);
    bench.store.commit(tx, claims, Next::Rest).await.unwrap();
    assert_eq!(bench.claims().await, 3);
}

#[tokio::test]
async fn a_large_batch_is_claimed_and_finished_in_one_transaction() {
    let bench = Bench::new().await;
    let mut conn = bench.store.open().await.unwrap();
    let events: Vec<Event> = (0..1000).map(|n| Event::new(&n.to_string(), "x")).collect();
    bench
        .park(&mut conn, &Event::new("7", "other"), DEAD, &[failure(1)])
        .await;
    let requests: Vec<_> = events.iter().map(Event::request).collect();
    let mut tx = bench.store.begin(&mut conn, &Limits::default()).await.unwrap();
    let (answers, claims) = bench
        .store
        .claim(&mut tx, &requests, Outcome::Processed)
        .await
        .unwrap();
    assert!(answers.iter().all(|answer| *answer == ClaimAnswer::New));
    bench.store.commit(tx, claims, Next::Rest).await.unwrap();
    assert_eq!(bench.claims().await, 1000);
    assert_eq!(bench.held().await.0, "replayed");
}

#[tokio::test]
async fn a_handlers_own_commit_is_refused_and_its_transaction_goes_on() {
    let bench = Bench::new().await;
    let mut conn = bench.store.open().await.unwrap();
    let event = Event::new("1", "a");
    let mut tx = bench.store.begin(&mut conn, &Limits::default()).await.unwrap();
    let (_, claims) = bench
        .store
        .claim(&mut tx, &[event.request()], Outcome::Processed)
        .await
        .unwrap();
    run(&mut tx, INSERT).await.unwrap();
    let refused = run(&mut tx, "COMMIT").await.unwrap_err();
    assert_eq!(refused.as_database_error().unwrap().code().unwrap(), "787");
    assert_eq!(
        (bench.claims().await, bench.effects().await),
        (0, 0),
        "nothing of it stands alone"
    );
    bench.store.commit(tx, claims, Next::Rest).await.unwrap();
    assert_eq!((bench.claims().await, bench.effects().await), (1, 1));
}

/// Runs a handler that breaks its transaction and expects the guard to notice. Returns what stands.
async fn escape(bench: &Bench, store: &SqliteStore, handler: &[&'static str]) -> (i64, i64) {
    let mut conn = store.open().await.unwrap();
    let event = Event::new("1", "a");
    bench
        .park(&mut conn, &Event::new("1", "held before"), DEAD, &[failure(1)])
        .await;
    let mut tx = store.begin(&mut conn, &Limits::default()).await.unwrap();
    let (_, claims) = store
        .claim(&mut tx, &[event.request()], Outcome::Processed)
        .await
        .unwrap();
    for sql in handler {
        // A handler that ignores its errors.
        let _ = run(&mut tx, sql).await;
    }
    assert!(
        matches!(
            store.commit(tx, claims, Next::Rest).await,
            Err(CommitError::Escaped(_))
        ),
        "{handler:?}"
    );
    store.abandon(conn).await;
    assert_eq!(
        bench.held().await.0,
        "dead",
        "the guard finishes nothing that is not proven ours"
    );
    (bench.claims().await, bench.effects().await)
}

const ESCAPES: &[&[&str]] = &[
    &["ROLLBACK"],
    &["ROLLBACK", INSERT],
    &["ROLLBACK", "BEGIN", INSERT],
    &["ROLLBACK", "BEGIN", INSERT, "COMMIT"],
    &["ROLLBACK", "SAVEPOINT s", INSERT, "RELEASE s"],
    &[INSERT, "INSERT OR ROLLBACK INTO effects VALUES (NULL)", INSERT],
];

#[tokio::test]
async fn an_escaped_transaction_is_noticed_and_nothing_of_it_stands() {
    for handler in ESCAPES {
        let bench = Bench::new().await;
        assert_eq!(escape(&bench, &bench.store, handler).await, (0, 0), "{handler:?}");
    }
}

#[tokio::test]
async fn on_a_pool_of_the_users_an_escape_is_noticed_as_well() {
    for handler in ESCAPES {
        let bench = Bench::new().await;
        let store = SqliteStore::from_pool(SqlitePool::connect_with(bench.options()).await.unwrap());
        assert_eq!(escape(&bench, &store, handler).await.0, 0, "{handler:?}");
    }
}

#[tokio::test]
async fn a_savepoint_that_a_handler_forgets_is_committed_with_the_rest() {
    let bench = Bench::new().await;
    let mut conn = bench.store.open().await.unwrap();
    let event = Event::new("1", "a");
    let mut tx = bench.store.begin(&mut conn, &Limits::default()).await.unwrap();
    let (_, claims) = bench
        .store
        .claim(&mut tx, &[event.request()], Outcome::Processed)
        .await
        .unwrap();
    std::mem::forget(tx.begin().await.unwrap());
    run(&mut tx, INSERT).await.unwrap();
    bench.store.commit(tx, claims, Next::Rest).await.unwrap();
    assert_eq!((bench.claims().await, bench.effects().await), (1, 1));

    // What the next handler does to a savepoint of its own is still right.
    let next = Event::new("2", "a");
    let mut tx = bench.store.begin(&mut conn, &Limits::default()).await.unwrap();
    let (_, claims) = bench
        .store
        .claim(&mut tx, &[next.request()], Outcome::Processed)
        .await
        .unwrap();
    let mut nested = tx.begin().await.unwrap();
    sqlx::query(INSERT).execute(&mut *nested).await.unwrap();
    nested.rollback().await.unwrap();
    let mut nested = tx.begin().await.unwrap();
    sqlx::query(INSERT).execute(&mut *nested).await.unwrap();
    nested.commit().await.unwrap();
    bench.store.commit(tx, claims, Next::Rest).await.unwrap();
    assert_eq!((bench.claims().await, bench.effects().await), (2, 2));
}

#[tokio::test]
async fn a_deferred_constraint_of_the_handlers_refuses_the_commit_and_nothing_stays() {
    let bench = Bench::new().await;
    bench
        .sql(
            "CREATE TABLE parents (id INTEGER PRIMARY KEY);
             CREATE TABLE children (parent INTEGER REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED)",
        )
        .await;
    let mut conn = bench.store.open().await.unwrap();
    let event = Event::new("1", "a");
    let mut tx = bench.store.begin(&mut conn, &Limits::default()).await.unwrap();
    let (_, claims) = bench
        .store
        .claim(&mut tx, &[event.request()], Outcome::Processed)
        .await
        .unwrap();
    run(&mut tx, "INSERT INTO children VALUES (7)").await.unwrap();
    assert!(matches!(
        bench.store.commit(tx, claims, Next::Rest).await,
        Err(CommitError::Refused(_))
    ));
    bench.store.rollback(&mut conn).await.unwrap();
    assert_eq!(bench.claims().await, 0);
    assert_eq!(bench.process(&mut conn, &event, INSERT).await, ClaimAnswer::New);
}

#[tokio::test]
async fn a_business_claim_is_true_once_and_goes_with_its_transaction() {
    let bench = Bench::new().await;
    let mut conn = bench.store.open().await.unwrap();
    for expected in [(true, false), (true, false)] {
        let mut tx = bench.store.begin(&mut conn, &Limits::default()).await.unwrap();
        let first = bench.store.claim_once(&mut tx, "c", "paid", "7").await.unwrap();
        let second = bench.store.claim_once(&mut tx, "c", "paid", "7").await.unwrap();
        assert_eq!((first, second), expected);
        bench.store.rollback(&mut conn).await.unwrap();
    }
}

#[tokio::test]
async fn the_connection_that_a_lane_had_is_closed_and_others_commit() {
    let bench = Bench::new().await;
    drop(bench.store.open().await.unwrap());
    sqlx::query(INSERT).execute(bench.store.pool()).await.unwrap();
    assert_eq!(bench.effects().await, 1);
}

#[tokio::test]
async fn a_statement_that_was_cut_off_does_not_keep_the_write_lock() {
    let bench = Bench::new().await;
    let mut conn = bench.store.open().await.unwrap();
    let mut tx = bench.store.begin(&mut conn, &Limits::default()).await.unwrap();
    let endless = run(
        &mut tx,
        "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) INSERT INTO effects SELECT 'x' FROM n WHERE i < 0",
    );
    assert!(
        tokio::time::timeout(Duration::from_millis(100), endless)
            .await
            .is_err()
    );
    let cut = Instant::now();
    bench.store.abandon(conn).await;
    let mut conn = bench.store.open().await.unwrap();
    assert_eq!(
        bench.process(&mut conn, &Event::new("1", "a"), INSERT).await,
        ClaimAnswer::New
    );
    assert!(cut.elapsed() < Duration::from_secs(2));
}

#[tokio::test]
async fn waiting_too_long_for_the_right_to_write_is_busy_here_and_across_processes() {
    let bench = Bench::new().await;
    let limits = Limits {
        lock_timeout: Duration::from_millis(50),
        ..Limits::default()
    };
    let (mut a, mut b) = (
        bench.store.open().await.unwrap(),
        bench.store.open().await.unwrap(),
    );
    bench.store.begin(&mut a, &limits).await.unwrap();
    let error = bench.store.begin(&mut b, &limits).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Busy);
    bench.store.probe().await.expect("a busy database is not down");
    bench.store.rollback(&mut a).await.unwrap();

    let mut outside = bench.outside().await;
    sqlx::raw_sql("BEGIN IMMEDIATE")
        .execute(&mut outside)
        .await
        .unwrap();
    let error = bench.store.begin(&mut b, &limits).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Busy);
    sqlx::raw_sql("ROLLBACK").execute(&mut outside).await.unwrap();
    bench.store.begin(&mut b, &limits).await.unwrap();
}

#[tokio::test]
async fn a_probe_notices_a_missing_and_a_read_only_file() {
    let bench = Bench::empty();
    assert_eq!(
        bench.store.probe().await.unwrap_err().kind(),
        StoreErrorKind::Unavailable
    );
    let bench = Bench::new().await;
    bench.store.probe().await.unwrap();
    let read_only = SqliteStore::from_pool(
        SqlitePool::connect_with(bench.options().read_only(true))
            .await
            .unwrap(),
    );
    assert_eq!(
        read_only.probe().await.unwrap_err().kind(),
        StoreErrorKind::Unavailable
    );
}

#[tokio::test]
async fn a_full_disk_is_an_outage_and_leaves_nothing_behind() {
    let bench = Bench::new().await;
    let mut conn = bench.store.open().await.unwrap();
    let event = Event::new("1", "a");
    let mut tx = bench.store.begin(&mut conn, &Limits::default()).await.unwrap();
    sqlx::raw_sql("PRAGMA max_page_count = 1")
        .execute(&mut *tx)
        .await
        .unwrap();
    let mut full = None;
    let events: Vec<Event> = (0..2000).map(|n| Event::new(&n.to_string(), "x")).collect();
    for event in &events {
        if let Err(e) = bench
            .store
            .claim(&mut tx, &[event.request()], Outcome::Processed)
            .await
        {
            full = Some(e);
            break;
        }
    }
    assert_eq!(
        full.expect("the disk is full").kind(),
        StoreErrorKind::Unavailable
    );
    let _ = bench.store.rollback(&mut conn).await;
    bench.store.abandon(conn).await;
    assert_eq!(bench.claims().await, 0);
    let mut conn = bench.store.open().await.unwrap();
    assert_eq!(bench.process(&mut conn, &event, INSERT).await, ClaimAnswer::New);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_lanes_a_purge_and_an_outside_writer_apply_every_effect_once() {
    const EVENTS: u32 = 100;
    for wal in [true, false] {
        let bench = Bench::new().await;
        let store = if wal {
            SqliteOptions::new(bench.dir.path().join("test.db").to_str().unwrap())
                .max_connections(24)
                .connect()
                .unwrap()
        } else {
            bench.store.pool().close().await;
            bench.store.reserve.close().await;
            // Refused while any other connection is open, and dropped ones close in their own threads.
            let leave_wal = async {
                let mut conn = bench.outside().await;
                while sqlx::raw_sql("PRAGMA journal_mode = DELETE")
                    .execute(&mut conn)
                    .await
                    .is_err()
                {
                    tokio::task::yield_now().await;
                }
            };
            tokio::time::timeout(std::time::Duration::from_secs(30), leave_wal)
                .await
                .unwrap();
            SqliteStore::from_pool(
                SqlitePoolOptions::new()
                    .max_connections(24)
                    .connect_with(bench.options())
                    .await
                    .unwrap(),
            )
        };
        bench
            .sql("CREATE TABLE outside (n INTEGER); CREATE UNIQUE INDEX once ON effects (id)")
            .await;
        let bench = Arc::new(bench);
        let running = Arc::new(AtomicU32::new(20));
        let outside = {
            let (bench, running) = (Arc::clone(&bench), Arc::clone(&running));
            tokio::spawn(async move {
                let mut conn = bench.outside().await;
                while running.load(Ordering::SeqCst) > 0 {
                    sqlx::raw_sql("BEGIN IMMEDIATE; INSERT INTO outside VALUES (1); COMMIT")
                        .execute(&mut conn)
                        .await
                        .unwrap();
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            })
        };
        let purge = {
            let (store, running) = (store.clone(), Arc::clone(&running));
            tokio::spawn(async move {
                while running.load(Ordering::SeqCst) > 0 {
                    store
                        .purge("c", Duration::from_secs(60), 10, PurgeCursor::default())
                        .await
                        .unwrap();
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            })
        };
        // Every lane is given every event, so each is delivered twenty times.
        let lanes: Vec<_> = (0..20)
            .map(|_| {
                let (store, running) = (store.clone(), Arc::clone(&running));
                tokio::spawn(async move {
                    let mut conn = store.open().await.unwrap();
                    for n in 0..EVENTS {
                        let event = Event::new(&n.to_string(), "x");
                        while let Err(e) = once(&store, &mut conn, &event).await {
                            assert!(
                                matches!(e.kind(), StoreErrorKind::Busy | StoreErrorKind::Contention),
                                "never more than contention: {e}"
                            );
                        }
                    }
                    running.fetch_sub(1, Ordering::SeqCst);
                })
            })
            .collect();
        for lane in lanes {
            lane.await.unwrap();
        }
        outside.await.unwrap();
        purge.await.unwrap();
        assert_eq!(
            (bench.effects().await, bench.claims().await),
            (EVENTS.into(), EVENTS.into())
        );
    }
}

async fn once(store: &SqliteStore, conn: &mut Connection<Sqlite>, event: &Event) -> Result<(), StoreError> {
    let mut tx = store.begin(conn, &Limits::default()).await?;
    let (_, claims) = store
        .claim(&mut tx, &[event.request()], Outcome::Processed)
        .await?;
    if claims.is_empty() {
        return store.rollback(conn).await;
    }
    sqlx::query("INSERT INTO effects VALUES (?1)")
        .bind(&event.identity.id)
        .execute(&mut *tx)
        .await
        .unwrap();
    store.commit(tx, claims, Next::Rest).await.map_err(|e| match e {
        CommitError::Store(e) | CommitError::Contention(e) => e,
        other => panic!("{other:?}"),
    })
}

#[tokio::test]
async fn a_step_that_is_dropped_anywhere_leaves_the_connection_usable() {
    let bench = Bench::new().await;
    let mut conn = bench.store.open().await.unwrap();
    for n in 0..400 {
        let dropped = Event::new(&format!("dropped {n}"), "x");
        let patience = Duration::from_micros(fastrand::u64(0..1500));
        let _ = tokio::time::timeout(patience, bench.process(&mut conn, &dropped, INSERT)).await;
        // As a lane does.
        if bench.store.rollback(&mut conn).await.is_err() {
            let spoiled = std::mem::replace(&mut conn, bench.store.open().await.unwrap());
            bench.store.abandon(spoiled).await;
        }
        let good = Event::new(&format!("good {n}"), "x");
        assert_eq!(bench.process(&mut conn, &good, INSERT).await, ClaimAnswer::New);
    }
    assert_eq!(bench.claims().await, bench.effects().await);
    let good = bench
        .count("SELECT count(*) FROM onlyonce_processed_events WHERE event_id LIKE 'good%'")
        .await;
    assert_eq!(good, 400);
}
