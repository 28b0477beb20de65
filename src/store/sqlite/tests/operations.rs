use super::*;
use crate::store::Relaying as _;

#[tokio::test]
async fn purge_goes_on_where_it_stopped_and_leaves_business_claims() {
    let bench = Bench::new().await;
    let mut conn = bench.store.open().await.unwrap();
    for n in 0..5 {
        bench
            .process(&mut conn, &Event::new(&n.to_string(), "a"), INSERT)
            .await;
    }
    bench
        .store
        .claim_once(&mut bench.outside().await, "c", "paid", "7")
        .await
        .unwrap();
    bench
        .sql("UPDATE onlyonce_processed_events SET processed_at = processed_at - 3600000000")
        .await;
    bench.process(&mut conn, &Event::new("young", "a"), INSERT).await;

    let window = Duration::from_secs(1800);
    let first = bench
        .store
        .purge("c", window, 3, PurgeCursor::default())
        .await
        .unwrap();
    assert_eq!((first.rows, first.more), (3, true));
    assert!(first.lag > Duration::from_secs(1700));
    let second = bench.store.purge("c", window, 3, first.next).await.unwrap();
    assert_eq!((second.rows, second.more, second.lag), (2, false, Duration::ZERO));
    assert_eq!(bench.claims().await, 2);
    let forever = bench
        .store
        .purge("c", Duration::MAX, 3, PurgeCursor::default())
        .await
        .unwrap();
    assert_eq!(forever.rows, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn migrating_twice_and_by_several_at_once_gives_one_set_of_tables() {
    let bench = Bench::empty();
    let url = bench.dir.path().join("test.db");
    let tasks: Vec<_> = (0..6)
        .map(|_| {
            // A store of its own each, as six processes would have.
            let store = SqliteOptions::new(url.to_str().unwrap()).connect().unwrap();
            tokio::spawn(async move { store.migrate().await })
        })
        .collect();
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    bench.store.migrate().await.unwrap();
    bench.check().await.unwrap();
    assert_eq!(bench.count("SELECT count(*) FROM onlyonce_migrations").await, 1);
    assert_eq!(
        bench.count("SELECT count(*) FROM onlyonce_schema_version").await,
        1
    );
    assert_eq!(
        bench
            .count("SELECT count(*) FROM pragma_journal_mode WHERE journal_mode = 'wal'")
            .await,
        1
    );
}

#[tokio::test]
async fn what_only_a_relay_needs_is_asked_for_by_the_relay() {
    let bench = Bench::empty();
    let mut conn = bench.options().create_if_missing(true).connect().await.unwrap();
    let tables = include_str!("../../../../migrations/sqlite/0001_init.sql");
    let tables = tables.replace("PRIMARY KEY (relay, lane)", "PRIMARY KEY (relay, lane, fence)");
    sqlx::raw_sql(sqlx::AssertSqlSafe(tables))
        .execute(&mut conn)
        .await
        .unwrap();
    let error = bench.store.check_outgoing().await.unwrap_err().to_string();
    for text in [
        "onlyonce_outbox_lanes has no unique index on relay,lane",
        "CREATE UNIQUE INDEX onlyonce_outbox_lanes_relay_lane ON onlyonce_outbox_lanes (relay,lane)",
    ] {
        assert!(error.contains(text), "{error}");
    }
    bench.check().await.unwrap();
}

#[tokio::test]
async fn check_names_what_is_missing_or_wrong_and_how_to_repair_it() {
    let rebuilt = |find: &str, put: &str| -> &'static str {
        let tables = include_str!("../../../../migrations/sqlite/0001_init.sql");
        assert!(tables.contains(find));
        String::leak(tables.replace(find, put))
    };
    let cases: &[(&'static str, &[&str])] = &[
        ("", &["no onlyonce tables", "migrate()"]),
        (
            rebuilt("dead_at           INTEGER\n", "x INTEGER\n"),
            &["onlyonce_inbox.dead_at", "ADD COLUMN dead_at"],
        ),
        (
            rebuilt("consumer     TEXT", "consumer     BLOB"),
            &["processed_events.consumer is BLOB, TEXT is needed"],
        ),
        (
            rebuilt(
                "event_key    BLOB NOT NULL PRIMARY KEY,",
                "event_key BLOB, x BLOB PRIMARY KEY,",
            ),
            &[
                "onlyonce_processed_events has no unique index on event_key",
                "CREATE UNIQUE INDEX",
            ],
        ),
        (
            rebuilt("traceparent     TEXT", "tracing TEXT"),
            &["onlyonce_outbox.traceparent is missing", "ADD COLUMN traceparent"],
        ),
        (
            rebuilt("CREATE UNIQUE INDEX", "CREATE INDEX"),
            &[
                "onlyonce_inbox has no unique index on event_key WHERE state IN",
                "CREATE UNIQUE INDEX",
            ],
        ),
        (
            rebuilt(
                "WHERE state IN ('ready', 'running', 'dead')",
                "WHERE state IN ('ready', 'dead')",
            ),
            &["onlyonce_inbox has no unique index"],
        ),
        (
            rebuilt(
                "REFERENCES onlyonce_open_claims (mark) DEFERRABLE INITIALLY DEFERRED",
                "",
            ),
            &["open_mark does not reference onlyonce_open_claims"],
        ),
        (
            rebuilt("VALUES (1, 1)", "VALUES (2, 3)"),
            &["layouts 2 to 3", "needs 1", "update this program"],
        ),
    ];
    for (tables, expected) in cases {
        let bench = Bench::empty();
        let mut conn = bench.options().create_if_missing(true).connect().await.unwrap();
        sqlx::raw_sql(*tables).execute(&mut conn).await.unwrap();
        let error = bench.check().await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured);
        for text in *expected {
            assert!(error.to_string().contains(text), "{error}");
        }
    }
    let bench = Bench::new().await;
    bench
        .sql("ALTER TABLE onlyonce_inbox ADD COLUMN theirs TEXT")
        .await;
    bench
        .check()
        .await
        .expect("a column of the user's own does no harm");
}

#[tokio::test]
async fn every_statement_finds_its_rows_by_an_index() {
    let bench = Bench::new().await;
    let mut conn = bench.outside().await;
    let due_by_time = "onlyonce_inbox_due (consumer=? AND <expr><?)";
    let by_key = "onlyonce_inbox_unfinished (event_key=?)";
    for (sql, expected) in [
        (sql::CLAIM, by_key),
        (sql::CLAIM_READ, by_key),
        (
            sql::GUARD,
            "onlyonce_processed_events USING PRIMARY KEY (event_key=?)",
        ),
        (sql::FINISH, by_key),
        (
            sql::RECORD,
            "onlyonce_processed_events USING PRIMARY KEY (event_key=?)",
        ),
        (sql::PARKED, "onlyonce_outbox_parked (relay=? AND id>?)"),
        (sql::REPLAY_PARKED, "onlyonce_outbox_parked (relay=? AND id=?)"),
        (sql::DISCARD_PARKED, "onlyonce_outbox_parked (relay=? AND id=?)"),
        (sql::PARK_FIND, by_key),
        (sql::DUE, due_by_time),
        (sql::RENEW, "onlyonce_inbox USING INTEGER PRIMARY KEY"),
        (sql::RELEASE, "onlyonce_inbox USING INTEGER PRIMARY KEY"),
        (sql::BACKLOG, "onlyonce_inbox_due (consumer=?)"),
        (
            sql::PURGE,
            "onlyonce_processed_events_purge (consumer=? AND processed_at>? AND processed_at<?)",
        ),
        (sql::PURGE_LAG, "onlyonce_processed_events_purge (consumer=?)"),
        (sql::DUE_OUTGOING, "onlyonce_outbox_due (relay=? AND lane=?)"),
        (sql::DUE_OUTGOING, "onlyonce_outbox_waiting (key_hash=? AND id<?)"),
        (sql::DELETE_SENT, "onlyonce_outbox USING INTEGER PRIMARY KEY"),
        (sql::KEEP_SENT, "onlyonce_outbox USING INTEGER PRIMARY KEY"),
        (sql::MARK_REFUSED, "onlyonce_outbox USING INTEGER PRIMARY KEY"),
        (sql::OUTGOING, "onlyonce_outbox_due (relay=?)"),
        (
            sql::PURGE_SENT,
            "onlyonce_outbox_sent (relay=? AND sent_at>? AND sent_at<?)",
        ),
        (
            sql::HELD_LANES,
            "onlyonce_outbox_lanes USING PRIMARY KEY (relay=?)",
        ),
    ] {
        for statement in sql.split(';') {
            let plan: Vec<(i64, i64, i64, String)> =
                sqlx::query_as(sqlx::AssertSqlSafe(format!("EXPLAIN QUERY PLAN {statement}")))
                    .fetch_all(&mut conn)
                    .await
                    .unwrap();
            let plan: String = plan.into_iter().map(|(.., step)| step + "\n").collect();
            assert!(
                plan.contains(expected) && !plan.contains("SCAN onlyonce_"),
                "{statement}\n{plan}"
            );
        }
    }
}

#[tokio::test]
async fn settings_that_break_a_guarantee_are_refused_with_their_remedy() {
    let bench = Bench::new().await;
    let around = async |options| {
        let store = SqliteStore::from_pool(SqlitePoolOptions::new().connect_with(options).await.unwrap());
        store.check(&Limits::default()).await.map_err(|e| e.to_string())
    };
    around(bench.options()).await.unwrap();
    let off = around(bench.options().foreign_keys(false)).await.unwrap_err();
    assert!(off.contains("foreign_keys(true)"), "{off}");
    let normal = around(bench.options().synchronous(SqliteSynchronous::Normal))
        .await
        .unwrap_err();
    assert!(normal.contains("synchronous is NORMAL"), "{normal}");
    let memory = around("sqlite::memory:".parse().unwrap()).await.unwrap_err();
    assert!(memory.contains("in-memory"), "{memory}");
    for url in [
        "",
        "sqlite::memory:",
        ":memory:",
        "sqlite://x?mode=memory",
        "sqlite://?mode=memory",
    ] {
        let error = SqliteStore::connect(url).await.unwrap_err();
        assert!(error.to_string().contains("in-memory"), "{url:?}: {error}");
    }
    let normal = SqliteStore::from_pool(
        SqlitePool::connect_with(bench.options().synchronous(SqliteSynchronous::Normal))
            .await
            .unwrap(),
    );
    let limits = Limits {
        allow_async_commit: true,
        ..Limits::default()
    };
    normal.check(&limits).await.unwrap();
}
