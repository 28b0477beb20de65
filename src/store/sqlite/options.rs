use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use sqlx::ConnectOptions as _;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous,
};
use tokio::sync::Semaphore;

use super::{Sessions, SqliteStore};
use crate::store::{Signals, StoreError, StoreErrorKind};

/// Connections that the framework keeps for itself: leases and dead letters do not queue for a lane's.
pub(super) const RESERVE: u32 = 2;

/// How a [`SqliteStore`] opens its file: in WAL mode, with `synchronous = FULL` and foreign keys on.
pub struct SqliteOptions {
    url: String,
    max_connections: u32,
    busy_timeout: Duration,
    acquire_timeout: Duration,
}

impl SqliteOptions {
    /// Options for this path or `sqlite://` URL. The file is created if it is missing, unless the URL
    /// has a mode that says otherwise (`?mode=rw`).
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            max_connections: 10,
            busy_timeout: Duration::from_secs(5),
            acquire_timeout: Duration::from_secs(10),
        }
    }

    /// How many connections to open at most, the reserve of two included. Default 10. Every lane
    /// holds one; a consumer whose lanes do not fit is refused at build time.
    pub fn max_connections(mut self, max: u32) -> Self {
        self.max_connections = max;
        self
    }

    /// How long to wait while another process writes. Default 5 s. In a handler's transaction the
    /// consumer's lock timeout takes its place.
    pub fn busy_timeout(mut self, timeout: Duration) -> Self {
        self.busy_timeout = timeout;
        self
    }

    /// How long to wait for a connection of the pool. Default 10 s.
    pub fn acquire_timeout(mut self, timeout: Duration) -> Self {
        self.acquire_timeout = timeout;
        self
    }

    /// The store. Nothing is opened yet.
    pub fn connect(self) -> Result<SqliteStore, StoreError> {
        let misconfigured = |message: String| StoreError::new(StoreErrorKind::Misconfigured, message);
        if self.max_connections <= RESERVE {
            return Err(misconfigured(format!(
                "max_connections is {} (at least {}: {RESERVE} are kept in reserve)",
                self.max_connections,
                RESERVE + 1
            )));
        }
        let file = self
            .url
            .trim_start_matches("sqlite://")
            .trim_start_matches("sqlite:");
        if file.is_empty()
            || file.starts_with('?')
            || file.contains(":memory:")
            || file.contains("mode=memory")
        {
            return Err(misconfigured(IN_MEMORY.to_owned()));
        }
        let base = if self.url.starts_with("sqlite:") {
            SqliteConnectOptions::from_str(&self.url)
                .map_err(|e| {
                    misconfigured(format!(
                        "the database URL cannot be read (expected sqlite://path): {e}"
                    ))
                })?
                .create_if_missing(!self.url.contains("mode=") || self.url.contains("mode=rwc"))
        } else {
            SqliteConnectOptions::new()
                .filename(&self.url)
                .create_if_missing(true)
        };
        let base = base
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .foreign_keys(true)
            .busy_timeout(self.busy_timeout)
            .disable_statement_logging();
        let pool = |max: u32| {
            SqlitePoolOptions::new()
                .max_connections(max)
                .acquire_timeout(self.acquire_timeout)
        };
        Ok(SqliteStore {
            lanes: pool(self.max_connections - RESERVE).connect_lazy_with(base.clone()),
            reserve: pool(RESERVE).connect_lazy_with(base),
            writers: Arc::new(Semaphore::new(1)),
            sessions: Some(Arc::new(Sessions::new())),
            signals: Signals::default(),
        })
    }

    pub(super) fn around(pool: SqlitePool) -> SqliteStore {
        let reserve = SqlitePoolOptions::new()
            .max_connections(RESERVE)
            .acquire_timeout(Duration::from_secs(10))
            .connect_lazy_with((*pool.connect_options()).clone());
        SqliteStore {
            lanes: pool,
            reserve,
            writers: Arc::new(Semaphore::new(1)),
            sessions: None,
            signals: Signals::default(),
        }
    }
}

/// Every pooled connection would have a database of its own, and a crash would lose them all.
pub(super) const IN_MEMORY: &str =
    "an in-memory database keeps nothing and is not shared by connections (name a file)";
