//! The schema: migrations that run at once, and a start-up that names what is missing.

use onlyonce::store::postgres::PostgresOptions;
use onlyonce::store::{Operations, PostgresStore, Relaying};
use onlyonce::testing::{Broker, deliver, event};
use onlyonce::{Bytes, Consumer, handler_fn};
use sqlx::Postgres;

use crate::running::{built, until};
use crate::stage::{Scripted, Stage, TestStore, postgres_url, soon};

on_each_store!(
    migrating_again_changes_nothing,
    many_may_migrate_at_once,
    tables_of_another_layout_are_refused
);

async fn migrating_again_changes_nothing<S: TestStore>(stage: Stage<S>) {
    let (handler, _) = Scripted::applies(&stage);
    deliver(stage.consumer("c").handler(handler), [event("x", "1")])
        .await
        .unwrap();
    stage.store.migrate().await.unwrap();
    S::another(&stage).await.migrate().await.unwrap();
    assert_eq!(stage.processed("c").await.len(), 1);
    stage.end().await;
}

async fn many_may_migrate_at_once<S: TestStore>(stage: Stage<S>) {
    let drop = [
        "DROP TABLE {s}.schema_version, {s}.processed_events, {s}.inbox, {s}.consumers, {s}.outbox,
                    {s}.outbox_lanes, {s}.outbox_relays, {s}.migrations",
        "DROP TABLE onlyonce_schema_version; DROP TABLE onlyonce_processed_events; DROP TABLE onlyonce_inbox;
         DROP TABLE onlyonce_open_claims; DROP TABLE onlyonce_consumers; DROP TABLE onlyonce_outbox;
         DROP TABLE onlyonce_outbox_lanes; DROP TABLE onlyonce_outbox_relays; DROP TABLE onlyonce_migrations",
    ];
    stage.execute(drop[0], drop[1]).await;
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let open = S::another(&stage);
        tasks.spawn(async move { open.await.migrate().await });
    }
    while let Some(migrated) = soon("the migrations", tasks.join_next()).await {
        migrated.unwrap().unwrap();
    }
    let (handler, _) = Scripted::applies(&stage);
    deliver(stage.consumer("c").handler(handler), [event("x", "1")])
        .await
        .unwrap();
    assert_eq!(stage.processed("c").await.len(), 1);
    stage.end().await;
}

/// What a consumer says when it may not start; it must not have received anything.
async fn refusal<S: TestStore>(stage: &Stage<S>, store: S) -> Option<String> {
    let broker = Broker::new();
    broker.publish(event("x", "1"));
    let consumer = Consumer::builder("c", store)
        .source(broker.source())
        .handler(Scripted::applies(stage).0);
    let acked = broker.clone();
    let ended = soon(
        "start-up",
        built(consumer).run_until(async move { acked.drained().await }),
    )
    .await;
    let refused = ended.err().map(|e| e.to_string());
    if refused.is_some() {
        assert_eq!(
            broker.stats().delivered,
            0,
            "nothing is taken before the check: {refused:?}"
        );
    }
    refused
}

async fn tables_of_another_layout_are_refused<S: TestStore>(stage: Stage<S>) {
    for (min, max, says) in [
        (2, 3, Some("update this program")),
        (0, 0, Some("run migrate()")),
        (1, 7, None),
        (0, 1, None),
    ] {
        let set = format!("schema_version SET min_supported = {min}, max_supported = {max}");
        stage
            .execute(&format!("UPDATE {{s}}.{set}"), &format!("UPDATE onlyonce_{set}"))
            .await;
        let refused = refusal(&stage, stage.store.clone()).await;
        match says {
            None => assert_eq!(refused, None),
            Some(says) => {
                let refused = refused.unwrap();
                assert!(refused.contains(says), "{refused}");
                assert!(refused.contains(&format!("layouts {min} to {max}")), "{refused}");
            }
        }
    }
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_missing_is_named_before_anything_is_taken() {
    for (breaks, says) in [
        (
            "ALTER TABLE {s}.inbox DROP COLUMN origin",
            "column inbox.origin (text) is missing",
        ),
        (
            "ALTER TABLE {s}.processed_events DROP COLUMN payload_hash",
            "column processed_events.payload_hash (bytea) is missing",
        ),
        (
            "ALTER TABLE {s}.inbox ALTER COLUMN payload TYPE text USING payload::text",
            "column inbox.payload is text, bytea is needed",
        ),
        (
            "ALTER TABLE {s}.inbox ALTER COLUMN attempts TYPE bigint",
            "column inbox.attempts is int8, int4 is needed",
        ),
        (
            "DROP INDEX {s}.inbox_unfinished",
            "table inbox has no unique index on event_key",
        ),
        (
            "ALTER TABLE {s}.processed_events DROP CONSTRAINT processed_events_pkey",
            "table processed_events has no unique index on event_key",
        ),
        // Nearly right is wrong: not unique, not for all states, not at once.
        (
            "DROP INDEX {s}.inbox_unfinished;
             CREATE INDEX ON {s}.inbox (event_key) WHERE state IN ('ready', 'running', 'dead')",
            "table inbox has no unique index on event_key",
        ),
        (
            "DROP INDEX {s}.inbox_unfinished; CREATE UNIQUE INDEX ON {s}.inbox (event_key) WHERE state = 'ready'",
            "table inbox has no unique index on event_key",
        ),
        (
            "ALTER TABLE {s}.processed_events DROP CONSTRAINT processed_events_pkey;
             ALTER TABLE {s}.processed_events ADD UNIQUE (event_key) DEFERRABLE INITIALLY DEFERRED",
            "table processed_events has no unique index on event_key",
        ),
        (
            "ALTER TABLE {s}.processed_events DROP CONSTRAINT processed_events_pkey;
             ALTER TABLE {s}.processed_events ADD PRIMARY KEY (event_key, consumer)",
            "table processed_events has no unique index on event_key",
        ),
        // Unique, but not by the column alone.
        (
            "DROP INDEX {s}.inbox_unfinished;
             CREATE UNIQUE INDEX ON {s}.inbox (event_key, (attempts + 1)) WHERE state IN ('ready', 'running', 'dead')",
            "table inbox has no unique index on event_key",
        ),
        (
            "ALTER TABLE {s}.outbox DROP CONSTRAINT outbox_pkey",
            "table outbox has no unique index on id",
        ),
        (
            "ALTER TABLE {s}.outbox DROP COLUMN traceparent",
            "column outbox.traceparent (text) is missing",
        ),
        ("DROP TABLE {s}.inbox", "column inbox.id (int8) is missing"),
        ("DROP TABLE {s}.schema_version", "run migrate()"),
    ] {
        let Some(stage) = PostgresStore::fresh().await else {
            return;
        };
        stage.execute(breaks, "").await;
        let refused = refusal(&stage, stage.store.clone()).await;
        let refused = refused.unwrap_or_else(|| panic!("started after {breaks}"));
        assert!(refused.contains(says), "{breaks}: {refused}");
        stage.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_only_a_relay_needs_is_asked_for_by_the_relay() {
    for (breaks, says) in [
        // Unique, but not by these two: a relay could not hold a lane of its own.
        (
            "ALTER TABLE {s}.outbox_lanes DROP CONSTRAINT outbox_lanes_pkey;
             CREATE UNIQUE INDEX ON {s}.outbox_lanes (relay, lane, owner)",
            "table outbox_lanes has no unique index on relay, lane",
        ),
        (
            "DROP TABLE {s}.outbox_relays",
            "column outbox_relays.relay (text) is missing",
        ),
    ] {
        let Some(stage) = PostgresStore::fresh().await else {
            return;
        };
        stage.execute(breaks, "").await;
        let refused = stage.store.check_outgoing().await.unwrap_err().to_string();
        assert!(refused.contains(says), "{breaks}: {refused}");
        assert_eq!(refusal(&stage, stage.store.clone()).await, None, "{breaks}");
        stage.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_others_added_is_fine() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    stage
        .execute(
            "ALTER TABLE {s}.inbox ADD COLUMN ours text; ALTER TABLE {s}.processed_events ADD COLUMN ours int DEFAULT 1;
             CREATE INDEX ON {s}.inbox (origin); DROP INDEX {s}.inbox_unfinished;
             CREATE UNIQUE INDEX renamed ON {s}.inbox (event_key) WHERE state IN ('ready', 'running', 'dead')",
            "",
        )
        .await;
    assert_eq!(refusal(&stage, stage.store.clone()).await, None);
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_that_may_not_write_is_named() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let (role, url) = stage.role().await;
    stage
        .execute(
            "REVOKE INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {s} FROM {s}_role",
            "",
        )
        .await;
    let store = || {
        PostgresOptions::new(&url)
            .schema(&stage.schema)
            .connect()
            .unwrap()
    };
    let refused = refusal(&stage, store()).await.unwrap();
    for part in [&role, "INSERT on processed_events", "DELETE on inbox", "GRANT"] {
        assert!(refused.contains(part), "{refused}");
    }
    stage
        .execute("REVOKE USAGE ON SCHEMA {s} FROM {s}_role", "")
        .await;
    let refused = refusal(&stage, store()).await.unwrap();
    assert!(refused.contains("may not read schema"), "{refused}");
    stage.drop_role().await;
    stage.end().await;
}

/// Another schema on the search_path has all the tables; ours has none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tables_of_another_schema_are_not_mistaken_for_ours() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let (_, url) = stage.role().await;
    stage
        .execute(
            "ALTER ROLE {s}_role SET search_path = {s}, public; CREATE SCHEMA {s}_own; GRANT ALL ON SCHEMA {s}_own TO {s}_role",
            "",
        )
        .await;
    let own = format!("{}_own", stage.schema);
    let store = PostgresOptions::new(&url).schema(&own).connect().unwrap();
    let refused = refusal(&stage, store.clone()).await.unwrap();
    assert!(
        refused.contains(&own) && refused.contains("run migrate()"),
        "{refused}"
    );
    // Nor do ours hide a column that is missing in the right place.
    store.migrate().await.unwrap();
    stage
        .execute("ALTER TABLE {s}_own.inbox DROP COLUMN origin", "")
        .await;
    let refused = refusal(&stage, store).await.unwrap();
    assert!(refused.contains("column inbox.origin"), "{refused}");
    stage.drop_role().await;
    stage.execute("DROP SCHEMA IF EXISTS {s}_own CASCADE", "").await;
    stage.end().await;
}

/// A migration that fails leaves nothing: no lock, no half of the tables, and the next one works.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_migration_leaves_no_lock() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    stage
        .execute("CREATE SCHEMA {s}_m; CREATE TABLE {s}_m.inbox (mine int)", "")
        .await;
    let schema = format!("{}_m", stage.schema);
    let open = || {
        PostgresOptions::new(postgres_url().unwrap())
            .schema(&schema)
            .connect()
            .unwrap()
    };
    let store = open();
    for _ in 0..3 {
        let error = soon("the failure", store.migrate()).await.unwrap_err();
        assert!(error.to_string().contains("already exists"), "{error}");
    }
    let locks = "SELECT count(*) FROM pg_locks l, (SELECT hashtextextended('onlyonce.{s}_m', 0)) AS k (key)
                  WHERE l.locktype = 'advisory' AND l.classid::bigint = (key >> 32) & 4294967295
                    AND l.objid::bigint = key & 4294967295";
    // The rollback goes out with the connection's return to its pool.
    until("the end of the lock", async || stage.number(locks, "").await == 0).await;
    let tables = "SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                   WHERE n.nspname = '{s}_m' AND c.relkind = 'r'";
    assert_eq!(stage.number(tables, "").await, 1, "theirs alone");
    stage.execute("DROP TABLE {s}_m.inbox", "").await;
    soon("the migration", open().migrate()).await.unwrap();
    stage.execute("DROP SCHEMA {s}_m CASCADE", "").await;
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_applications_own_migrations_are_left_alone() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let theirs = "CREATE TABLE {s}._sqlx_migrations (version bigint PRIMARY KEY, description text NOT NULL,
         installed_on timestamptz NOT NULL DEFAULT now(), success boolean NOT NULL, checksum bytea NOT NULL,
         execution_time bigint NOT NULL);
         INSERT INTO {s}._sqlx_migrations VALUES (7, 'theirs', now(), true, 'x', 1);
         DROP TABLE {s}.schema_version, {s}.processed_events, {s}.inbox, {s}.consumers, {s}.outbox,
                    {s}.outbox_lanes, {s}.outbox_relays, {s}.migrations";
    stage.execute(theirs, "").await;
    let (_, url) = stage.role().await;
    stage
        .execute(
            "ALTER ROLE {s}_role SET search_path = {s}; ALTER SCHEMA {s} OWNER TO {s}_role",
            "",
        )
        .await;
    let store = PostgresOptions::new(url).schema(&stage.schema).connect().unwrap();
    store.migrate().await.unwrap();
    let left = "SELECT count(*) FROM {s}._sqlx_migrations WHERE version = 7 AND description = 'theirs'";
    assert_eq!(stage.number(left, "").await, 1);
    assert_eq!(
        stage
            .number("SELECT count(*) FROM {s}._sqlx_migrations", "")
            .await,
        1
    );
    assert_eq!(stage.number("SELECT count(*) FROM {s}.migrations", "").await, 1);
    stage.execute("ALTER SCHEMA {s} OWNER TO CURRENT_USER", "").await;
    stage.drop_role().await;
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn schema_names_work_or_are_refused_and_are_never_more_than_names() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let url = postgres_url().unwrap();
    let upper = format!("Tenant_{}", stage.schema);
    let longest = format!("{:x<63}", stage.schema);
    for name in [upper.as_str(), "select", longest.as_str()] {
        let drop = format!("DROP SCHEMA IF EXISTS \"{name}\" CASCADE");
        stage.execute(&drop, "").await;
        let store = PostgresOptions::new(&url).schema(name).connect().unwrap();
        store.migrate().await.unwrap();
        let schema = stage.schema.clone();
        let handler = handler_fn::<Postgres, Bytes, _>(move |cx, event| {
            let schema = schema.clone();
            Box::pin(async move {
                let fails = event.identity.id == "fails";
                PostgresStore::write(cx.tx(), &schema, &event.identity.id).await?;
                if fails { Err("no".into()) } else { Ok(()) }
            })
        });
        let consumer = Consumer::builder("c", store)
            .retry(onlyonce::RetryPolicy::none())
            .handler(handler);
        let events = [event(name, "1"), event(name, "1"), event("fails", "1")];
        let report = soon("delivery", deliver(consumer, events)).await.unwrap();
        assert_eq!(report.acked, 3, "{name}");
        assert_eq!(stage.effects().await.get(name), Some(&1), "{name}");
        for (table, rows) in [("processed_events", 1), ("inbox", 1)] {
            let sql = format!("SELECT count(*) FROM \"{name}\".{table}");
            assert_eq!(stage.number(&sql, "").await, rows, "{name}.{table}");
        }
        stage.execute(&drop, "").await;
    }
    for name in [
        "x\"; DROP SCHEMA public; --",
        "a.b",
        "Tenant-1",
        "",
        "é",
        "nul\0",
        "1a",
        "pg_x",
        &"x".repeat(64),
    ] {
        let refused = PostgresOptions::new(&url).schema(name).connect().unwrap_err();
        assert!(refused.to_string().contains("is not a usable name"), "{refused}");
    }
    stage.end().await;
}
