use std::collections::HashMap;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use sqlx::migrate::{MigrateError, Migration, MigrationType, Migrator};
use sqlx::{Row as _, SqlSafeStr as _};

use uuid::Uuid;

use super::classify::{classify, primary};
use super::inbox::micros;
use super::transaction::has_table;
use super::{SqliteStore, commit, sql};
use crate::store::{Limits, Operations, PurgeCursor, Purged, Store, StoreError, StoreErrorKind, Unread};

/// The layout that this version reads and writes.
const LAYOUT: i32 = 1;

const INIT: &str = include_str!("../../../migrations/sqlite/0001_init.sql");

/// How long a migration waits for other processes that start at the same time.
const MIGRATING: Duration = Duration::from_secs(60);

/// Tables with their columns and the types of these.
pub(super) type Tables = &'static [Table];
type Table = (&'static str, &'static [(&'static str, &'static str)]);

/// Tables with the columns that are unique in them, all or those of some rows.
pub(super) type Unique = &'static [(&'static str, &'static str, Option<&'static str>)];

/// What a handler's events are written into, and a relay reads.
pub(super) const OUTBOX: Table = (
    "onlyonce_outbox",
    &[
        ("id", "INTEGER"),
        ("relay", "TEXT"),
        ("event_id", "TEXT"),
        ("source", "TEXT"),
        ("destination", "TEXT"),
        ("ordering_key", "BLOB"),
        ("key_hash", "BLOB"),
        ("lane", "INTEGER"),
        ("event_type", "TEXT"),
        ("payload", "BLOB"),
        ("content_type", "TEXT"),
        ("headers", "BLOB"),
        ("attributes", "BLOB"),
        ("mode", "TEXT"),
        ("traceparent", "TEXT"),
        ("created_at", "INTEGER"),
        ("send_at", "INTEGER"),
        ("attempts", "INTEGER"),
        ("next_attempt_at", "INTEGER"),
        ("last_error", "TEXT"),
        ("parked_at", "INTEGER"),
        ("replays", "INTEGER"),
        ("sent_at", "INTEGER"),
    ],
);

/// What `check` compares with.
const COLUMNS: Tables = &[
    ("onlyonce_open_claims", &[("mark", "TEXT")]),
    (
        "onlyonce_processed_events",
        &[
            ("event_key", "BLOB"),
            ("kind", "TEXT"),
            ("consumer", "TEXT"),
            ("source", "TEXT"),
            ("event_id", "TEXT"),
            ("payload_hash", "BLOB"),
            ("outcome", "TEXT"),
            ("processed_at", "INTEGER"),
            ("open_mark", "TEXT"),
        ],
    ),
    (
        "onlyonce_consumers",
        &[
            ("name", "TEXT"),
            ("instance", "BLOB"),
            ("version", "TEXT"),
            ("seen_at", "INTEGER"),
        ],
    ),
    (
        "onlyonce_inbox",
        &[
            ("id", "INTEGER"),
            ("event_key", "BLOB"),
            ("consumer", "TEXT"),
            ("source", "TEXT"),
            ("event_id", "TEXT"),
            ("event_type", "BLOB"),
            ("ordering_key", "BLOB"),
            ("payload", "BLOB"),
            ("payload_hash", "BLOB"),
            ("headers", "BLOB"),
            ("event_time_ms", "INTEGER"),
            ("copy_payload", "BLOB"),
            ("copy_payload_hash", "BLOB"),
            ("copy_headers", "BLOB"),
            ("origin", "TEXT"),
            ("state", "TEXT"),
            ("reason", "TEXT"),
            ("run_at", "INTEGER"),
            ("attempts", "INTEGER"),
            ("failures", "TEXT"),
            ("lease_token", "BLOB"),
            ("leased_until", "INTEGER"),
            ("received_at", "INTEGER"),
            ("dead_at", "INTEGER"),
        ],
    ),
    OUTBOX,
];

/// Without these, an event could be processed twice, or held twice: their absence is fatal.
const UNIQUE: Unique = &[
    ("onlyonce_processed_events", "event_key", None),
    (
        "onlyonce_inbox",
        "event_key",
        Some("state IN ('ready', 'running', 'dead')"),
    ),
];

#[async_trait]
impl Operations for SqliteStore {
    async fn migrate(&self) -> Result<(), StoreError> {
        let began = Instant::now();
        let mut pause = Duration::from_millis(20);
        loop {
            match self.migrate_once().await {
                // Another process migrates, or is turning WAL mode on, which no timeout waits for.
                Err(e)
                    if matches!(e.kind(), StoreErrorKind::Busy | StoreErrorKind::Contention)
                        && began.elapsed() < MIGRATING =>
                {
                    tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64())).await;
                    pause = (pause * 2).min(Duration::from_secs(1));
                }
                result => return result,
            }
        }
    }

    async fn check(&self, limits: &Limits) -> Result<(), StoreError> {
        self.check_settings(limits).await?;
        self.check_version().await?;
        self.check_columns(COLUMNS).await?;
        self.check_unique(UNIQUE).await?;
        self.check_open_mark().await
    }

    async fn seen(&self, consumer: &str, instance: Uuid) -> Result<Vec<Unread>, StoreError> {
        let saying = |e| classify("saying that a consumer runs", e);
        let mut tx = self.begin_reserve("saying that a consumer runs").await?;
        sqlx::query(sql::SEEN)
            .bind(consumer)
            .bind(instance.as_bytes().as_slice())
            .bind(env!("CARGO_PKG_VERSION"))
            .execute(&mut *tx)
            .await
            .map_err(saying)?;
        sqlx::query(sql::FORGET).execute(&mut *tx).await.map_err(saying)?;
        let rows: Vec<(String, i64)> = sqlx::query_as(sql::UNREAD)
            .bind(consumer)
            .fetch_all(&mut *tx)
            .await
            .map_err(saying)?;
        commit(tx).await.map_err(saying)?;
        Ok(rows
            .into_iter()
            .map(|(consumer, held)| Unread {
                consumer,
                held: held as u64,
            })
            .collect())
    }

    async fn purge(
        &self,
        consumer: &str,
        window: Duration,
        limit: u32,
        after: PurgeCursor,
    ) -> Result<Purged, StoreError> {
        let purging = |e| classify("purging", e);
        let mut tx = self.begin_reserve("purging").await?;
        let gone: Vec<i64> = sqlx::query_scalar(sql::PURGE)
            .bind(consumer)
            .bind(micros(window))
            .bind(i64::from(limit))
            .bind(after.0)
            .fetch_all(&mut *tx)
            .await
            .map_err(purging)?;
        commit(tx).await.map_err(purging)?;
        let lag: i64 = sqlx::query_scalar(sql::PURGE_LAG)
            .bind(consumer)
            .bind(micros(window))
            .fetch_one(&self.reserve)
            .await
            .map_err(purging)?;
        Ok(Purged {
            rows: gone.len() as u64,
            next: gone.iter().max().map_or(after, |at| PurgeCursor(*at)),
            more: gone.len() as u64 >= u64::from(limit),
            lag: Duration::from_micros(lag.max(0) as u64),
        })
    }
}

impl SqliteStore {
    /// One transaction: a crash leaves the old tables or the new ones.
    async fn migrate_once(&self) -> Result<(), StoreError> {
        let mut tx = self.begin_reserve("migrating").await?;
        let init = Migration::new(
            1,
            "init".into(),
            MigrationType::Simple,
            INIT.into_sql_str(),
            false,
        );
        let mut migrator = Migrator::with_migrations(vec![init]);
        migrator.dangerous_set_table_name("onlyonce_migrations");
        migrator.set_locking(false);
        // A newer program may have migrated further; whether this one can work with that is for `check` to say.
        migrator.set_ignore_missing(true);
        migrator
            .run_direct(None, &mut *tx, false)
            .await
            .map_err(|e| match e {
                MigrateError::Execute(e) | MigrateError::ExecuteMigration(e, _) => migrating(e),
                other => misconfigured(format!("migrating: {other}")),
            })?;
        commit(tx).await.map_err(migrating)
    }

    async fn check_settings(&self, limits: &Limits) -> Result<(), StoreError> {
        let read = |e| classify("opening the database", e);
        // A lane's connection, as handlers will have it; opening it checks foreign keys and the file.
        let mut conn = self.open().await?;
        let (version, synchronous): (String, i64) =
            sqlx::query_as("SELECT sqlite_version(), (SELECT synchronous FROM pragma_synchronous)")
                .fetch_one(&mut *conn.conn)
                .await
                .map_err(read)?;
        let mut numbers = version
            .split('.')
            .map(|number| number.parse::<u32>().unwrap_or(0));
        let (major, minor) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        if (major, minor) < (3, 42) {
            return Err(misconfigured(format!(
                "this is SQLite {version} (3.42 or later is needed)"
            )));
        }
        if !limits.allow_async_commit && synchronous < 2 {
            return Err(misconfigured(format!(
                "synchronous is {}: a confirmed commit could be lost when the machine loses power, after its \
                 message was acked (open the pool with synchronous = FULL, or allow_async_commit if a lost event \
                 is acceptable)",
                if synchronous == 0 { "OFF" } else { "NORMAL" }
            )));
        }
        Ok(())
    }

    pub(super) async fn check_version(&self) -> Result<(), StoreError> {
        let read = |e| classify("checking the schema", e);
        let mut conn = self.reserve.acquire().await.map_err(read)?;
        if !has_table(&mut conn, "onlyonce_schema_version")
            .await
            .map_err(read)?
        {
            return Err(misconfigured(
                "the database has no onlyonce tables (run migrate(), or apply migrations/sqlite/0001_init.sql)",
            ));
        }
        let row = sqlx::query("SELECT min_supported, max_supported FROM onlyonce_schema_version")
            .fetch_optional(&mut *conn)
            .await
            .map_err(read)?;
        let (min, max): (i32, i32) = match &row {
            None => (0, 0),
            Some(row) => (row.try_get(0).map_err(read)?, row.try_get(1).map_err(read)?),
        };
        if min <= LAYOUT && LAYOUT <= max {
            return Ok(());
        }
        Err(misconfigured(format!(
            "the onlyonce tables support layouts {min} to {max}, this version needs {LAYOUT} ({})",
            if max < LAYOUT {
                "run migrate()"
            } else {
                "update this program"
            }
        )))
    }

    pub(super) async fn check_columns(&self, tables: Tables) -> Result<(), StoreError> {
        for (table, columns) in tables {
            let there: HashMap<String, String> =
                sqlx::query_as("SELECT name, upper(type) FROM pragma_table_info(?1)")
                    .bind(table)
                    .fetch_all(&self.reserve)
                    .await
                    .map_err(|e| classify("checking the schema", e))?
                    .into_iter()
                    .collect();
            if there.is_empty() {
                return Err(misconfigured(format!(
                    "table {table} is missing (run migrate(), or compare with migrations/sqlite/0001_init.sql)"
                )));
            }
            for (column, needed) in *columns {
                match there.get(*column) {
                    Some(found) if found == needed => {}
                    Some(found) => {
                        return Err(misconfigured(format!(
                            "column {table}.{column} is {found}, {needed} is needed (SQLite cannot change a type: \
                             copy the rows into a table as in migrations/sqlite/0001_init.sql)"
                        )));
                    }
                    None => {
                        return Err(misconfigured(format!(
                            "column {table}.{column} is missing (ALTER TABLE {table} ADD COLUMN {column} {needed}, \
                             as in migrations/sqlite/0001_init.sql)"
                        )));
                    }
                }
            }
        }
        Ok(())
    }

    pub(super) async fn check_unique(&self, unique: Unique) -> Result<(), StoreError> {
        for (table, column, predicate) in unique {
            let rows: Vec<(String, Option<String>)> = sqlx::query_as(
                "SELECT (SELECT group_concat(COALESCE(c.name, '')) FROM pragma_index_info(i.name) c), m.sql
                   FROM pragma_index_list(?1) i
                   LEFT JOIN sqlite_master m ON m.type = 'index' AND m.name = i.name
                  WHERE i.\"unique\"",
            )
            .bind(table)
            .fetch_all(&self.reserve)
            .await
            .map_err(|e| classify("checking the schema", e))?;
            let matches = |(columns, sql): &(String, Option<String>)| {
                columns == column && sql.as_deref().and_then(predicate_of) == predicate.map(plain)
            };
            if !rows.iter().any(matches) {
                let place = predicate.map_or(String::new(), |p| format!(" WHERE {p}"));
                return Err(misconfigured(format!(
                    "table {table} has no unique index on {column}{place}, so events could be applied twice or \
                     sent out of order (CREATE UNIQUE INDEX {table}_{} ON {table} ({column}){place})",
                    column.replace(',', "_")
                )));
            }
        }
        Ok(())
    }

    /// Without it a handler's own COMMIT would succeed, and its work would stand without its claim's outcome.
    async fn check_open_mark(&self) -> Result<(), StoreError> {
        let there: bool = sqlx::query_scalar(
            "SELECT EXISTS (SELECT 1 FROM pragma_foreign_key_list('onlyonce_processed_events')
                             WHERE \"from\" = 'open_mark' AND \"table\" = 'onlyonce_open_claims')",
        )
        .fetch_one(&self.reserve)
        .await
        .map_err(|e| classify("checking the schema", e))?;
        if there {
            return Ok(());
        }
        Err(misconfigured(
            "column onlyonce_processed_events.open_mark does not reference onlyonce_open_claims, so a handler's own \
             COMMIT would go unnoticed (copy the rows into a table as in migrations/sqlite/0001_init.sql)",
        ))
    }
}

/// The condition of a partial index, from the text that created it.
fn predicate_of(sql: &str) -> Option<String> {
    let sql = plain(sql);
    sql.rfind("where").map(|at| sql[at + "where".len()..].to_owned())
}

/// SQL without what makes no difference here: spaces and upper case.
fn plain(sql: &str) -> String {
    sql.to_ascii_lowercase().split_whitespace().collect()
}

/// A statement that SQLite refuses is a table that is not as it should be.
fn migrating(error: sqlx::Error) -> StoreError {
    let refused = primary(&error) == Some(1);
    let error = classify("migrating", error);
    if refused {
        error.with_kind(StoreErrorKind::Misconfigured)
    } else {
        error
    }
}

fn misconfigured(message: impl Into<String>) -> StoreError {
    StoreError::new(StoreErrorKind::Misconfigured, message)
}
