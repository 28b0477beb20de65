//! A fresh database per test, a handler that leaves traces, and eyes of its own.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use onlyonce::consumer::ConsumerBuilder;
use onlyonce::event::RawEvent;
#[cfg(feature = "sqlite")]
use onlyonce::store::SqliteStore;
use onlyonce::store::{Inbox, Operations, Outgoing, PostgresStore};
use onlyonce::{Bytes, Consumer, Context, Event, Handler, HandlerError, RetryPolicy, async_trait};
use sqlx::{AssertSqlSafe, Connection, Database, PgConnection, PgPool, Row, SqlitePool};

use crate::running::until;

/// A store that tests know how to look into.
#[async_trait]
pub(crate) trait TestStore: Inbox + Outgoing + Operations {
    /// A migrated store in a database (or schema) of its own, with the table `effects`.
    async fn fresh() -> Option<Stage<Self>>;

    /// A second store on the same data, as another process has it.
    fn another(stage: &Stage<Self>) -> Opening<Self>;

    /// The handler's write.
    async fn write(conn: &mut <Self::Db as Database>::Connection, schema: &str, id: &str)
    -> sqlx::Result<()>;

    /// Runs any SQL in the handler's transaction.
    async fn raw(conn: &mut <Self::Db as Database>::Connection, sql: String) -> sqlx::Result<()>;

    /// Connections that the store knows nothing of.
    fn outside(stage: &Stage<Self>) -> &sqlx::Pool<Self::Db>;
}

pub(crate) type Opening<S> = Pin<Box<dyn Future<Output = S> + Send>>;

/// One test's database, seen from outside.
pub(crate) struct Stage<S> {
    pub(crate) store: S,
    pub(crate) schema: String,
    pub(crate) eyes: Eyes,
}

/// A second connection to the same data.
pub(crate) enum Eyes {
    Postgres(PgPool),
    Sqlite(SqlitePool, tempfile::TempDir),
}

/// A row of `inbox`, as far as tests look at it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HeldRow {
    pub(crate) event_id: Option<String>,
    pub(crate) state: String,
    pub(crate) reason: Option<String>,
    pub(crate) attempts: i64,
    pub(crate) payload: Option<Vec<u8>>,
    pub(crate) copy_payload: Option<Vec<u8>>,
    pub(crate) failures: String,
    pub(crate) headers: Vec<u8>,
    pub(crate) key: Option<Vec<u8>>,
    pub(crate) event_type: Option<Vec<u8>>,
}

/// A row of `outbox`, as far as tests look at it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OutboxRow {
    pub(crate) id: i64,
    pub(crate) relay: String,
    pub(crate) event_id: String,
    pub(crate) source: String,
    pub(crate) destination: String,
    pub(crate) key: Option<Vec<u8>>,
    pub(crate) key_hash: Option<Vec<u8>>,
    pub(crate) lane: i64,
    pub(crate) event_type: Option<String>,
    pub(crate) payload: Option<Vec<u8>>,
    pub(crate) content_type: Option<String>,
    pub(crate) headers: Vec<u8>,
    pub(crate) attributes: Vec<u8>,
    pub(crate) mode: String,
    pub(crate) traceparent: Option<String>,
}

pub(crate) fn postgres_url() -> Option<String> {
    let url = std::env::var("ONLYONCE_POSTGRES_URL").ok();
    if url.is_none() {
        assert!(
            std::env::var("ONLYONCE_REQUIRE_SERVICES").is_err(),
            "ONLYONCE_POSTGRES_URL is not set"
        );
        println!("skipped: ONLYONCE_POSTGRES_URL is not set (scripts/services up postgres)");
    }
    url
}

fn unique() -> String {
    format!("t_{:016x}", fastrand::u64(..))
}

#[async_trait]
impl TestStore for PostgresStore {
    async fn fresh() -> Option<Stage<Self>> {
        Some(Stage::at(&postgres_url()?).await)
    }

    fn another(stage: &Stage<Self>) -> Opening<Self> {
        let schema = stage.schema.clone();
        Box::pin(async move {
            let url = postgres_url().unwrap();
            onlyonce::store::postgres::PostgresOptions::new(url)
                .schema(schema)
                .connect()
                .unwrap()
        })
    }

    async fn write(conn: &mut PgConnection, schema: &str, id: &str) -> sqlx::Result<()> {
        let sql = format!("INSERT INTO {schema}.effects (id) VALUES ($1)");
        sqlx::query(AssertSqlSafe(sql)).bind(id).execute(conn).await?;
        Ok(())
    }

    async fn raw(conn: &mut PgConnection, sql: String) -> sqlx::Result<()> {
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(conn).await?;
        Ok(())
    }

    fn outside(stage: &Stage<Self>) -> &PgPool {
        let Eyes::Postgres(pool) = &stage.eyes else {
            unreachable!("a stage of PostgreSQL")
        };
        pool
    }
}

#[cfg(feature = "sqlite")]
#[async_trait]
impl TestStore for SqliteStore {
    async fn fresh() -> Option<Stage<Self>> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("test.db");
        let store = SqliteStore::connect(path.to_str().unwrap()).await.unwrap();
        store.migrate().await.unwrap();
        let eyes = SqlitePool::connect(path.to_str().unwrap()).await.unwrap();
        sqlx::raw_sql("CREATE TABLE effects (n INTEGER PRIMARY KEY, id TEXT NOT NULL)")
            .execute(&eyes)
            .await
            .unwrap();
        Some(Stage {
            store,
            schema: String::new(),
            eyes: Eyes::Sqlite(eyes, dir),
        })
    }

    fn another(stage: &Stage<Self>) -> Opening<Self> {
        let file = stage.file();
        Box::pin(async move { SqliteStore::connect(&file).await.unwrap() })
    }

    async fn write(conn: &mut sqlx::SqliteConnection, _schema: &str, id: &str) -> sqlx::Result<()> {
        sqlx::query("INSERT INTO effects (id) VALUES (?)")
            .bind(id)
            .execute(conn)
            .await?;
        Ok(())
    }

    async fn raw(conn: &mut sqlx::SqliteConnection, sql: String) -> sqlx::Result<()> {
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(conn).await?;
        Ok(())
    }

    fn outside(stage: &Stage<Self>) -> &SqlitePool {
        let Eyes::Sqlite(pool, _) = &stage.eyes else {
            unreachable!("a stage of SQLite")
        };
        pool
    }
}

impl Stage<PostgresStore> {
    /// A stage on this server.
    pub(crate) async fn at(url: &str) -> Self {
        let schema = unique();
        let store = onlyonce::store::postgres::PostgresOptions::new(url)
            .schema(&schema)
            .connect()
            .unwrap();
        store.migrate().await.unwrap();
        let eyes = PgPool::connect(url).await.unwrap();
        let sql = format!("CREATE TABLE {schema}.effects (n bigserial PRIMARY KEY, id text NOT NULL)");
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&eyes).await.unwrap();
        Stage {
            store,
            schema,
            eyes: Eyes::Postgres(eyes),
        }
    }

    /// Options for another store on the same tables.
    pub(crate) fn options(&self) -> onlyonce::store::postgres::PostgresOptions {
        onlyonce::store::postgres::PostgresOptions::new(postgres_url().unwrap()).schema(&self.schema)
    }

    /// A role of the test's own that may use the stage's schema, and its URL.
    pub(crate) async fn role(&self) -> (String, String) {
        let name = format!("{}_role", self.schema);
        let grants = "CREATE ROLE {s}_role LOGIN PASSWORD 'x'; GRANT USAGE ON SCHEMA {s} TO {s}_role;
                      GRANT ALL ON ALL TABLES IN SCHEMA {s} TO {s}_role;
                      GRANT ALL ON ALL SEQUENCES IN SCHEMA {s} TO {s}_role";
        self.execute(grants, "").await;
        let url = postgres_url().unwrap();
        let (_, rest) = url.split_once('@').unwrap();
        let url = format!("postgres://{name}:x@{rest}");
        (name, url)
    }

    pub(crate) async fn drop_role(&self) {
        let drop = "DROP OWNED BY {s}_role; DROP ROLE {s}_role";
        self.execute(drop, "").await;
    }
}

#[cfg(feature = "sqlite")]
impl Stage<SqliteStore> {
    /// The path of the database.
    pub(crate) fn file(&self) -> String {
        let Eyes::Sqlite(_, dir) = &self.eyes else {
            unreachable!("a stage of SQLite")
        };
        dir.path().join("test.db").to_str().unwrap().to_owned()
    }
}

impl<S: TestStore> Stage<S> {
    /// A consumer of this stage with a policy that has no delays, so that tests wait for nothing.
    pub(crate) fn consumer(&self, name: &str) -> ConsumerBuilder<S> {
        self.consumer_of(name, self.store.clone())
    }

    /// The same on another store of this stage.
    pub(crate) fn consumer_of(&self, name: &str, store: S) -> ConsumerBuilder<S> {
        Consumer::builder(name, store).retry(RetryPolicy::none())
    }

    /// Whether handlers wait for each other before they begin, and not at what both of them touch.
    pub(crate) fn has_one_writer(&self) -> bool {
        self.store.max_useful_lanes() == Some(1)
    }

    /// How often each event was applied.
    pub(crate) async fn effects(&self) -> HashMap<String, usize> {
        let ids: Vec<String> = match &self.eyes {
            Eyes::Postgres(pool) => {
                let sql = format!("SELECT id FROM {}.effects", self.schema);
                sqlx::query_scalar(AssertSqlSafe(sql))
                    .fetch_all(pool)
                    .await
                    .unwrap()
            }
            Eyes::Sqlite(pool, _) => sqlx::query_scalar("SELECT id FROM effects")
                .fetch_all(pool)
                .await
                .unwrap(),
        };
        let mut effects = HashMap::new();
        for id in ids {
            *effects.entry(id).or_default() += 1;
        }
        effects
    }

    /// The ids of the claims of this consumer, with their outcome.
    pub(crate) async fn processed(&self, consumer: &str) -> Vec<(String, String)> {
        let order = "ORDER BY event_id";
        match &self.eyes {
            Eyes::Postgres(pool) => {
                let sql = format!(
                    "SELECT event_id, outcome FROM {}.processed_events WHERE kind = 'event' AND consumer = $1 {order}",
                    self.schema
                );
                sqlx::query_as(AssertSqlSafe(sql))
                    .bind(consumer)
                    .fetch_all(pool)
                    .await
                    .unwrap()
            }
            Eyes::Sqlite(pool, _) => {
                let sql = format!(
                    "SELECT event_id, outcome FROM onlyonce_processed_events WHERE kind = 'event' AND consumer = ? {order}"
                );
                sqlx::query_as(AssertSqlSafe(sql))
                    .bind(consumer)
                    .fetch_all(pool)
                    .await
                    .unwrap()
            }
        }
    }

    /// The rows of `inbox`, oldest first.
    pub(crate) async fn held(&self) -> Vec<HeldRow> {
        let columns = "event_id, state, reason, CAST(attempts AS BIGINT), payload, copy_payload, CAST(failures AS TEXT), headers, \
                       ordering_key, event_type";
        macro_rules! rows {
            ($rows:expr) => {
                $rows
                    .iter()
                    .map(|row| HeldRow {
                        event_id: row.get(0),
                        state: row.get(1),
                        reason: row.get(2),
                        attempts: row.get(3),
                        payload: row.get(4),
                        copy_payload: row.get(5),
                        failures: row.get(6),
                        headers: row.get(7),
                        key: row.get(8),
                        event_type: row.get(9),
                    })
                    .collect()
            };
        }
        match &self.eyes {
            Eyes::Postgres(pool) => {
                let sql = format!("SELECT {columns} FROM {}.inbox ORDER BY id", self.schema);
                rows!(sqlx::query(AssertSqlSafe(sql)).fetch_all(pool).await.unwrap())
            }
            Eyes::Sqlite(pool, _) => {
                let sql = format!("SELECT {columns} FROM onlyonce_inbox ORDER BY id");
                rows!(sqlx::query(AssertSqlSafe(sql)).fetch_all(pool).await.unwrap())
            }
        }
    }

    /// The rows of `outbox`, by id.
    pub(crate) async fn outgoing(&self) -> Vec<OutboxRow> {
        let columns = "id, relay, event_id, source, destination, ordering_key, key_hash, CAST(lane AS BIGINT), event_type, \
                       payload, content_type, headers, attributes, mode, traceparent";
        macro_rules! rows {
            ($rows:expr) => {
                $rows
                    .iter()
                    .map(|row| OutboxRow {
                        id: row.get(0),
                        relay: row.get(1),
                        event_id: row.get(2),
                        source: row.get(3),
                        destination: row.get(4),
                        key: row.get(5),
                        key_hash: row.get(6),
                        lane: row.get(7),
                        event_type: row.get(8),
                        payload: row.get(9),
                        content_type: row.get(10),
                        headers: row.get(11),
                        attributes: row.get(12),
                        mode: row.get(13),
                        traceparent: row.get(14),
                    })
                    .collect()
            };
        }
        match &self.eyes {
            Eyes::Postgres(pool) => {
                let sql = format!("SELECT {columns} FROM {}.outbox ORDER BY id", self.schema);
                rows!(sqlx::query(AssertSqlSafe(sql)).fetch_all(pool).await.unwrap())
            }
            Eyes::Sqlite(pool, _) => {
                let sql = format!("SELECT {columns} FROM onlyonce_outbox ORDER BY id");
                rows!(sqlx::query(AssertSqlSafe(sql)).fetch_all(pool).await.unwrap())
            }
        }
    }

    /// What is held of one event, finished rows included.
    pub(crate) async fn held_of(&self, id: &str) -> Vec<HeldRow> {
        let mut rows = self.held().await;
        rows.retain(|row| row.event_id.as_deref() == Some(id));
        rows
    }

    /// Waits until a statement on this stage's tables waits for another transaction. SQLite does not
    /// tell; whoever waits there does it before the transaction begins.
    pub(crate) async fn somebody_waits_for_a_lock(&self) {
        if self.has_one_writer() {
            return;
        }
        let waits =
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%\"{s}\"%'";
        until("a wait for a lock", async || self.number(waits, "").await > 0).await;
    }

    /// One number, seen from outside.
    pub(crate) async fn number(&self, postgres: &str, sqlite: &str) -> i64 {
        match &self.eyes {
            Eyes::Postgres(pool) => {
                let sql = postgres.replace("{s}", &self.schema);
                sqlx::query_scalar(AssertSqlSafe(sql))
                    .fetch_one(pool)
                    .await
                    .unwrap()
            }
            Eyes::Sqlite(pool, _) => sqlx::query_scalar(AssertSqlSafe(sqlite.to_owned()))
                .fetch_one(pool)
                .await
                .unwrap(),
        }
    }

    /// Runs SQL from outside.
    pub(crate) async fn execute(&self, postgres: &str, sqlite: &str) {
        match &self.eyes {
            Eyes::Postgres(pool) => {
                let sql = postgres.replace("{s}", &self.schema);
                sqlx::raw_sql(AssertSqlSafe(sql)).execute(pool).await.unwrap();
            }
            Eyes::Sqlite(pool, _) => {
                sqlx::raw_sql(AssertSqlSafe(sqlite.to_owned()))
                    .execute(pool)
                    .await
                    .unwrap();
            }
        }
    }

    /// Drops what the test has made; a test that fails leaves its schema to look into.
    pub(crate) async fn end(self) {
        if let Eyes::Postgres(pool) = &self.eyes {
            let sql = format!("DROP SCHEMA {} CASCADE", self.schema);
            sqlx::raw_sql(AssertSqlSafe(sql)).execute(pool).await.unwrap();
            pool.close().await;
        }
    }
}

type Script<S> = dyn Fn(u32, &Event<Bytes>) -> Act<S> + Send + Sync;

/// What the scripted handler does in one run.
pub(crate) enum Act<S: TestStore> {
    /// Write the effect and succeed.
    Apply,
    /// Write the effect and fail.
    Fail(HandlerError),
    /// Write the effect and panic.
    Panic,
    /// Write the effect and go on for ever.
    Hang,
    /// Write the effect, then run this SQL; its error is the handler's.
    Run(String),
    /// Write the effect, then wait for the signal, then succeed.
    Wait(Arc<tokio::sync::Notify>),
    /// Do this and nothing else.
    Do(Box<Deed<S::Db>>),
}

/// Anything that a handler may do.
pub(crate) type Deed<Db> = dyn for<'a, 'c> FnOnce(
        &'a mut Context<'c, Db>,
    ) -> Pin<Box<dyn Future<Output = Result<(), HandlerError>> + Send + 'a>>
    + Send;

impl<S: TestStore> Act<S> {
    pub(crate) fn by<F>(deed: F) -> Self
    where
        F: for<'a, 'c> FnOnce(
                &'a mut Context<'c, S::Db>,
            )
                -> Pin<Box<dyn Future<Output = Result<(), HandlerError>> + Send + 'a>>
            + Send
            + 'static,
    {
        Self::Do(Box::new(deed))
    }
}

/// A handler that writes one effect per run and then does what its script says. It counts its runs.
pub(crate) struct Scripted<S: TestStore> {
    pub(crate) schema: String,
    pub(crate) runs: Arc<Runs>,
    script: Box<Script<S>>,
}

/// How often the handler was entered, in all and per event id.
#[derive(Default)]
pub(crate) struct Runs {
    total: AtomicU32,
    running: AtomicU32,
    waiting: AtomicU32,
    most_at_once: AtomicU32,
    by_id: Mutex<HashMap<String, u32>>,
    attempts: Mutex<HashMap<String, Vec<u32>>>,
    pub(crate) entered: tokio::sync::Notify,
}

impl Runs {
    pub(crate) fn total(&self) -> u32 {
        self.total.load(Ordering::SeqCst)
    }

    pub(crate) fn of(&self, id: &str) -> u32 {
        self.by_id.lock().unwrap().get(id).copied().unwrap_or(0)
    }

    /// What `cx.attempt()` said in each run of this event.
    pub(crate) fn attempts_of(&self, id: &str) -> Vec<u32> {
        self.attempts.lock().unwrap().get(id).cloned().unwrap_or_default()
    }

    pub(crate) fn running(&self) -> u32 {
        self.running.load(Ordering::SeqCst)
    }

    /// Waits until the handler was entered this often in all.
    pub(crate) async fn until(&self, total: u32) {
        self.until_count("run", &self.total, total).await;
    }

    /// Waits until a handler has written its effect and waits, for the `nth` time in all. From then on
    /// it cannot miss its signal.
    pub(crate) async fn until_waiting(&self, nth: u32) {
        self.until_count("wait", &self.waiting, nth).await;
    }

    async fn until_count(&self, what: &str, counter: &AtomicU32, count: u32) {
        let reached = async {
            loop {
                let changed = self.entered.notified();
                tokio::pin!(changed);
                changed.as_mut().enable();
                if counter.load(Ordering::SeqCst) >= count {
                    return;
                }
                changed.await;
            }
        };
        soon(&format!("{what} {count} of the handler"), reached).await;
    }

    pub(crate) fn by_id(&self) -> HashMap<String, u32> {
        self.by_id.lock().unwrap().clone()
    }

    pub(crate) fn most_at_once(&self) -> u32 {
        self.most_at_once.load(Ordering::SeqCst)
    }
}

impl<S: TestStore> Scripted<S> {
    pub(crate) fn new(
        stage: &Stage<S>,
        script: impl Fn(u32, &Event<Bytes>) -> Act<S> + Send + Sync + 'static,
    ) -> (Self, Arc<Runs>) {
        let runs = Arc::new(Runs::default());
        (
            Self {
                schema: stage.schema.clone(),
                runs: runs.clone(),
                script: Box::new(script),
            },
            runs,
        )
    }

    /// A handler that always succeeds.
    pub(crate) fn applies(stage: &Stage<S>) -> (Self, Arc<Runs>) {
        Self::new(stage, |_, _| Act::Apply)
    }
}

struct Running<'a>(&'a Runs);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::SeqCst);
    }
}

#[async_trait]
impl<S: TestStore> Handler<S::Db> for Scripted<S> {
    type Payload = Bytes;

    async fn handle(&self, cx: &mut Context<'_, S::Db>, event: Event<Bytes>) -> Result<(), HandlerError> {
        let id = event.identity.id.clone();
        self.runs.total.fetch_add(1, Ordering::SeqCst);
        let running = self.runs.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.runs.most_at_once.fetch_max(running, Ordering::SeqCst);
        let _running = Running(&self.runs);
        let run = {
            let mut by_id = self.runs.by_id.lock().unwrap();
            let run = by_id.entry(id.clone()).or_default();
            *run += 1;
            *run
        };
        let attempt = cx.attempt();
        self.runs
            .attempts
            .lock()
            .unwrap()
            .entry(id.clone())
            .or_default()
            .push(attempt);
        self.runs.entered.notify_waiters();
        let act = (self.script)(run, &event);
        if let Act::Do(deed) = act {
            return deed(cx).await;
        }
        S::write(cx.tx(), &self.schema, &id).await?;
        match act {
            Act::Fail(error) => Err(error),
            Act::Run(sql) => Ok(S::raw(cx.tx(), sql).await?),
            Act::Panic => panic!("the handler panics on purpose"),
            Act::Hang => std::future::pending().await,
            Act::Wait(signal) => {
                let signal = signal.notified();
                tokio::pin!(signal);
                signal.as_mut().enable();
                self.runs.waiting.fetch_add(1, Ordering::SeqCst);
                self.runs.entered.notify_waiters();
                signal.await;
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// Makes one test per store of each async function `fn name<S: TestStore>(stage: Stage<S>)`.
macro_rules! on_each_store {
    ($($name:ident),* $(,)?) => {
        mod postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                if let Some(stage) = <onlyonce::store::PostgresStore as $crate::stage::TestStore>::fresh().await {
                    super::$name(stage).await;
                }
            })*
        }
        #[cfg(feature = "sqlite")]
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                if let Some(stage) = <onlyonce::store::SqliteStore as $crate::stage::TestStore>::fresh().await {
                    super::$name(stage).await;
                }
            })*
        }
    };
}

/// `n` events with ids `e0`, `e1`, ..
pub(crate) fn events(n: usize) -> Vec<RawEvent> {
    (0..n)
        .map(|i| onlyonce::testing::event(format!("e{i}"), format!("{{\"n\":{i}}}")))
        .collect()
}

/// The longest a test waits for something that should happen at once.
pub(crate) const SOON: Duration = Duration::from_secs(60);

/// Fails the test when something that must happen does not.
pub(crate) async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(SOON, future)
        .await
        .unwrap_or_else(|_| panic!("{what} did not happen within {SOON:?}"))
}

/// A connection of its own, for tests that need to hold something open.
pub(crate) async fn postgres_connection() -> Option<PgConnection> {
    Some(PgConnection::connect(&postgres_url()?).await.unwrap())
}
