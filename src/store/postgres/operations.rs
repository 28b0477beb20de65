use std::collections::HashMap;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::migrate::{Migration, MigrationType, Migrator};
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{AssertSqlSafe, FromRow, Row as _, SqlSafeStr as _};

use uuid::Uuid;

use super::PostgresStore;
use super::classify::{classify, code};
use crate::store::{
    Limits, Operations, PurgeCursor, Purged, Store, StoreError, StoreErrorKind, Unread, answer,
};

/// The layout that this version reads and writes.
const LAYOUT: i32 = 1;

const INIT: &str = include_str!("../../../migrations/postgres/0001_init.sql");

/// Tables with their columns and the types of these.
pub(super) type Tables = &'static [Table];
type Table = (&'static str, &'static [(&'static str, &'static str)]);

/// Tables with the columns that are unique in them, all or those of some rows.
pub(super) type Unique = &'static [(&'static str, &'static str, Option<&'static str>)];

/// What a handler's events are written into, and a relay reads.
pub(super) const OUTBOX: Table = (
    "outbox",
    &[
        ("id", "int8"),
        ("relay", "text"),
        ("event_id", "text"),
        ("source", "text"),
        ("destination", "text"),
        ("ordering_key", "bytea"),
        ("key_hash", "bytea"),
        ("lane", "int2"),
        ("event_type", "text"),
        ("payload", "bytea"),
        ("content_type", "text"),
        ("headers", "bytea"),
        ("attributes", "bytea"),
        ("mode", "text"),
        ("traceparent", "text"),
        ("created_at", "timestamptz"),
        ("send_at", "timestamptz"),
        ("attempts", "int4"),
        ("next_attempt_at", "timestamptz"),
        ("last_error", "text"),
        ("parked_at", "timestamptz"),
        ("replays", "int4"),
        ("sent_at", "timestamptz"),
    ],
);

/// What `check` compares with.
const COLUMNS: Tables = &[
    (
        "processed_events",
        &[
            ("event_key", "uuid"),
            ("kind", "text"),
            ("consumer", "text"),
            ("source", "text"),
            ("event_id", "text"),
            ("payload_hash", "bytea"),
            ("outcome", "text"),
            ("processed_at", "timestamptz"),
        ],
    ),
    (
        "consumers",
        &[
            ("name", "text"),
            ("instance", "uuid"),
            ("version", "text"),
            ("seen_at", "timestamptz"),
        ],
    ),
    (
        "inbox",
        &[
            ("id", "int8"),
            ("event_key", "uuid"),
            ("consumer", "text"),
            ("source", "text"),
            ("event_id", "text"),
            ("event_type", "bytea"),
            ("ordering_key", "bytea"),
            ("payload", "bytea"),
            ("payload_hash", "bytea"),
            ("headers", "bytea"),
            ("event_time_ms", "int8"),
            ("copy_payload", "bytea"),
            ("copy_payload_hash", "bytea"),
            ("copy_headers", "bytea"),
            ("origin", "text"),
            ("state", "text"),
            ("reason", "text"),
            ("run_at", "timestamptz"),
            ("attempts", "int4"),
            ("failures", "jsonb"),
            ("lease_token", "uuid"),
            ("leased_until", "timestamptz"),
            ("received_at", "timestamptz"),
            ("dead_at", "timestamptz"),
        ],
    ),
    OUTBOX,
];

/// Without these, an event could be processed twice, or held twice: their absence is fatal.
const UNIQUE: Unique = &[
    ("processed_events", "event_key", None),
    (
        "inbox",
        "event_key",
        Some("state = ANY (ARRAY['ready'::text, 'running'::text, 'dead'::text])"),
    ),
    ("outbox", "id", None),
];

#[async_trait]
impl Operations for PostgresStore {
    async fn migrate(&self) -> Result<(), StoreError> {
        // One transaction with a transaction-scoped lock: a session lock would outlive a failed or
        // cancelled migration and hang every later one, this application's own included. In a task of
        // its own: a caller who stops waiting leaves no transaction half begun.
        let store = self.clone();
        let migration = tokio::spawn(async move {
            let mut tx = store.reserve.begin().await.map_err(migrating)?;
            match store.migrate_in(&mut tx).await {
                Ok(()) => tx.commit().await.map_err(migrating),
                // Now, and not when the pool comes to it: others wait for the lock.
                Err(error) => {
                    let _ = tx.rollback().await;
                    Err(error)
                }
            }
        });
        migration
            .await
            .unwrap_or_else(|e| Err(unavailable(format!("migrating: {e}"))))
    }

    async fn check(&self, limits: &Limits) -> Result<(), StoreError> {
        self.probe_settings(limits).await?;
        self.check_version().await?;
        self.check_columns(COLUMNS).await?;
        self.check_unique(UNIQUE).await?;
        self.check_privileges(COLUMNS).await
    }

    async fn seen(&self, consumer: &str, instance: Uuid) -> Result<Vec<Unread>, StoreError> {
        let doing = "saying that a consumer runs";
        let seen = sqlx::query(self.sql.seen.clone())
            .bind(consumer.to_owned())
            .bind(instance)
            .bind(env!("CARGO_PKG_VERSION"));
        let unread = |row: &PgRow| {
            Ok(Unread {
                consumer: row.try_get(0)?,
                held: row.try_get::<i64, _>(1)? as u64,
            })
        };
        let rows = self.rows(doing, seen).await?;
        rows.iter()
            .map(unread)
            .collect::<Result<_, _>>()
            .map_err(|e| classify(doing, e))
    }

    async fn purge(
        &self,
        consumer: &str,
        window: Duration,
        limit: u32,
        after: PurgeCursor,
    ) -> Result<Purged, StoreError> {
        let purging = |e| classify("purging", e);
        let window_ms = i64::try_from(window.as_millis()).unwrap_or(i64::MAX);
        let purge = sqlx::query(self.sql.purge.clone())
            .bind(consumer)
            .bind(window_ms)
            .bind(i64::from(limit))
            .bind(after.0);
        let row = self.row("purging", purge).await?;
        let rows: i64 = row.try_get(0).map_err(purging)?;
        let next: Option<i64> = row.try_get(1).map_err(purging)?;
        let next = next.map_or(after, PurgeCursor);
        let lag = sqlx::query(self.sql.purge_lag.clone())
            .bind(consumer)
            .bind(window_ms)
            .bind(next.0);
        let lag: i64 = self.row("purging", lag).await?.try_get(0).map_err(purging)?;
        Ok(Purged {
            rows: rows as u64,
            next,
            more: rows >= i64::from(limit),
            lag: Duration::from_millis(lag.max(0) as u64),
        })
    }
}

impl PostgresStore {
    async fn migrate_in(&self, conn: &mut PgConnection) -> Result<(), StoreError> {
        sqlx::raw_sql("SET LOCAL lock_timeout = '60s'; SET LOCAL statement_timeout = 0")
            .execute(&mut *conn)
            .await
            .map_err(migrating)?;
        sqlx::query("SELECT pg_advisory_xact_lock(hashtextextended('onlyonce.' || $1, 0))")
            .bind(self.schema.as_str())
            .execute(&mut *conn)
            .await
            .map_err(migrating)?;
        let schema = self.schema.quoted();
        // Asked first, so that a role that may not create schemas can use one that is there.
        let there: bool = sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM pg_namespace WHERE nspname = $1)")
            .bind(self.schema.as_str())
            .fetch_one(&mut *conn)
            .await
            .map_err(migrating)?;
        if !there {
            sqlx::raw_sql(AssertSqlSafe(format!("CREATE SCHEMA {schema}")))
                .execute(&mut *conn)
                .await
                .map_err(migrating)?;
        }
        let migrations = vec![Migration::new(
            1,
            "init".into(),
            MigrationType::Simple,
            AssertSqlSafe(INIT.replace("onlyonce.", &format!("{schema}."))).into_sql_str(),
            false,
        )];
        let mut migrator = Migrator::with_migrations(migrations);
        migrator.dangerous_set_table_name(format!("{schema}.migrations"));
        migrator.set_locking(false);
        // A newer program may have migrated further; whether this one can work with that is for `check` to say.
        migrator.set_ignore_missing(true);
        migrator
            .run_direct(None, &mut *conn, false)
            .await
            .map_err(|e| StoreError::new(StoreErrorKind::Misconfigured, format!("migrating: {e}")))?;
        Ok(())
    }

    async fn probe_settings(&self, limits: &Limits) -> Result<(), StoreError> {
        // A session as handlers get it: a pool of the application's own may have hooks.
        let mut conn = self.open().await?;
        let settings = sqlx::query(
            "SELECT pg_is_in_recovery(), current_setting('synchronous_commit'), current_setting('fsync'), \
                    current_setting('server_version_num')::int",
        );
        let row = match answer(limits.patience(), settings.fetch_one(&mut *conn.conn)).await {
            Ok(row) => row,
            Err(e) => {
                drop(conn.conn.detach());
                return Err(classify("connecting", e));
            }
        };
        let read = |e| classify("connecting", e);
        if row.try_get::<bool, _>(0).map_err(read)? {
            return Err(unavailable(
                "the server is in recovery and takes no writes (connect to the primary)",
            ));
        }
        let version: i32 = row.try_get(3).map_err(read)?;
        if version < 130_000 {
            return Err(misconfigured(format!(
                "the server is PostgreSQL {} (13 or later is needed)",
                version / 10_000
            )));
        }
        let (commit, fsync): (&str, &str) = (row.try_get(1).map_err(read)?, row.try_get(2).map_err(read)?);
        if !limits.allow_async_commit && (commit == "off" || fsync == "off") {
            return Err(misconfigured(format!(
                "synchronous_commit is {commit} and fsync is {fsync}: a confirmed commit could be lost in a crash of \
                 the server, after its message was acked (set both to on for this role, or allow_async_commit if a \
                 lost event is acceptable)"
            )));
        }
        Ok(())
    }

    pub(super) async fn check_version(&self) -> Result<(), StoreError> {
        let sql = format!(
            "SELECT min_supported, max_supported FROM {}.schema_version",
            self.schema.quoted()
        );
        let rows = self
            .rows("checking the schema", sqlx::query(AssertSqlSafe(sql)))
            .await;
        let rows = rows.map_err(|e| match e.code().as_deref() {
            Some("42P01" | "3F000") => misconfigured(format!(
                "schema {} has no onlyonce tables (run migrate(), or apply migrations/postgres/0001_init.sql)",
                self.schema.as_str()
            )),
            Some("42501") => misconfigured(format!(
                "this role may not read schema {} (GRANT USAGE ON SCHEMA, and ALL ON ALL TABLES in it)",
                self.schema.as_str()
            )),
            _ => e,
        })?;
        let read = |e| classify("checking the schema", e);
        let (min, max): (i32, i32) = match rows.first() {
            None => (0, 0),
            Some(row) => (row.try_get(0).map_err(read)?, row.try_get(1).map_err(read)?),
        };
        if min <= LAYOUT && LAYOUT <= max {
            return Ok(());
        }
        Err(misconfigured(format!(
            "the tables in schema {} support layouts {min} to {max}, this version needs {LAYOUT} ({})",
            self.schema.as_str(),
            if max < LAYOUT {
                "run migrate()"
            } else {
                "update this program"
            }
        )))
    }

    pub(super) async fn check_columns(&self, tables: Tables) -> Result<(), StoreError> {
        let columns = sqlx::query(
            "SELECT c.relname::text, a.attname::text, t.typname::text, COALESCE(l.collname::text, '')
               FROM pg_class c
               JOIN pg_namespace n ON n.oid = c.relnamespace
               JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
               JOIN pg_type t ON t.oid = a.atttypid
               LEFT JOIN pg_collation l ON l.oid = a.attcollation
              WHERE n.nspname = $1 AND c.relkind IN ('r', 'p')",
        )
        .bind(self.schema.as_str().to_owned());
        let rows = self.rows("checking the schema", columns).await?;
        let mut there: HashMap<(String, String), String> = HashMap::new();
        for row in rows {
            let read = |e| classify("checking the schema", e);
            there.insert(
                (row.try_get(0).map_err(read)?, row.try_get(1).map_err(read)?),
                row.try_get(2).map_err(read)?,
            );
        }
        for (table, columns) in tables {
            for (column, needed) in *columns {
                match there.get(&((*table).to_owned(), (*column).to_owned())) {
                    Some(found) if found == needed => {}
                    Some(found) => {
                        return Err(misconfigured(format!(
                            "column {table}.{column} is {found}, {needed} is needed (ALTER TABLE {}.{table} ALTER COLUMN \
                             {column} TYPE {needed})",
                            self.schema.quoted()
                        )));
                    }
                    None => {
                        return Err(misconfigured(format!(
                            "column {table}.{column} ({needed}) is missing in schema {} (run migrate(), or compare \
                             with migrations/postgres/0001_init.sql)",
                            self.schema.as_str()
                        )));
                    }
                }
            }
        }
        Ok(())
    }

    pub(super) async fn check_unique(&self, unique: Unique) -> Result<(), StoreError> {
        let indexes = sqlx::query(
            "SELECT c.relname::text,
                    (SELECT string_agg(COALESCE(a.attname::text, '()'), ', ' ORDER BY k.n)
                       FROM unnest(i.indkey::int2[]) WITH ORDINALITY AS k (attnum, n)
                       LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.attnum
                      WHERE k.n <= i.indnkeyatts),
                    pg_get_expr(i.indpred, i.indrelid)
               FROM pg_index i
               JOIN pg_class c ON c.oid = i.indrelid
               JOIN pg_namespace n ON n.oid = c.relnamespace
              WHERE n.nspname = $1 AND i.indisunique AND i.indisvalid AND i.indimmediate",
        )
        .bind(self.schema.as_str().to_owned());
        let rows = self.rows("checking the schema", indexes).await?;
        let rows = rows
            .iter()
            .map(<(String, Option<String>, Option<String>)>::from_row)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|e| classify("checking the schema", e))?;
        for (table, column, predicate) in unique {
            let matches = |(t, c, p): &(String, Option<String>, Option<String>)| {
                t == table && c.as_deref() == Some(*column) && p.as_deref().map(plain) == predicate.map(plain)
            };
            if !rows.iter().any(matches) {
                let place = predicate.map_or(String::new(), |_| {
                    " WHERE state IN ('ready', 'running', 'dead')".into()
                });
                return Err(misconfigured(format!(
                    "table {table} has no unique index on {column}{place}, so events could be applied twice or \
                     sent out of order (CREATE UNIQUE INDEX ON {}.{table} ({column}){place})",
                    self.schema.quoted()
                )));
            }
        }
        Ok(())
    }

    pub(super) async fn check_privileges(&self, tables: Tables) -> Result<(), StoreError> {
        let read = |e| classify("checking the schema", e);
        let missing = sqlx::query(
            "SELECT current_user::text, COALESCE(string_agg(p.needed || ' on ' || c.relname, ', '), '')
               FROM pg_class c
               JOIN pg_namespace n ON n.oid = c.relnamespace
              CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS p (needed)
              WHERE n.nspname = $1 AND c.relname = ANY ($2) AND NOT has_table_privilege(c.oid, p.needed)",
        )
        .bind(self.schema.as_str().to_owned())
        .bind(tables.iter().map(|(table, _)| *table).collect::<Vec<_>>());
        let row = self.row("checking the schema", missing).await?;
        let (role, missing): (String, String) = FromRow::from_row(&row).map_err(read)?;
        if missing.is_empty() {
            return Ok(());
        }
        Err(misconfigured(format!(
            "role {role} lacks {missing} in schema {} (GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {} \
             TO \"{role}\")",
            self.schema.as_str(),
            self.schema.quoted()
        )))
    }
}

/// A predicate without the outer brackets that the server's own printing adds.
fn plain(predicate: &str) -> String {
    predicate.trim_matches(['(', ')']).to_owned()
}

fn migrating(error: sqlx::Error) -> StoreError {
    let kind = if code(&error).is_some() {
        StoreErrorKind::Misconfigured
    } else {
        StoreErrorKind::Unavailable
    };
    StoreError::from_sqlx(kind, "migrating", error)
}

fn misconfigured(message: impl Into<String>) -> StoreError {
    StoreError::new(StoreErrorKind::Misconfigured, message)
}

fn unavailable(message: impl Into<String>) -> StoreError {
    StoreError::new(StoreErrorKind::Unavailable, message)
}
