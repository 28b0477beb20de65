use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use sqlx::ConnectOptions as _;
use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions};

use super::beside::STATEMENT_TIMEOUT;
use super::{PostgresStore, SchemaName, Sql};
use crate::store::{Signals, StoreError, StoreErrorKind};

/// Connections that the framework keeps for itself: leases and dead letters go on while every lane is busy.
pub(super) const RESERVE: u32 = 2;

/// How a [`PostgresStore`] connects.
pub struct PostgresOptions {
    url: String,
    schema: String,
    max_connections: u32,
    pooler: bool,
    acquire_timeout: Duration,
}

impl PostgresOptions {
    /// Options for this `postgres://` URL.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            schema: SchemaName::default().as_str().to_owned(),
            max_connections: 20,
            pooler: false,
            acquire_timeout: Duration::from_secs(10),
        }
    }

    /// The schema that holds the tables. Default `onlyonce`.
    pub fn schema(mut self, name: impl Into<String>) -> Self {
        self.schema = name.into();
        self
    }

    /// How many connections to open at most, the reserve of two included. Default 20. Every lane
    /// holds one; a consumer whose lanes do not fit is refused at build time.
    pub fn max_connections(mut self, max: u32) -> Self {
        self.max_connections = max;
        self
    }

    /// A pooler in transaction mode stands between, such as PgBouncer, which must keep prepared
    /// statements (1.21 and later, with `max_prepared_statements` above 0). Sessions are then not made
    /// read-only by default, since a session setting would leak to other clients of the pooler; limits
    /// are named by every transaction; and nothing is done ahead for the next one.
    pub fn behind_pooler(mut self) -> Self {
        self.pooler = true;
        self
    }

    /// How long to wait for a connection of the pool. Default 10 s.
    pub fn acquire_timeout(mut self, timeout: Duration) -> Self {
        self.acquire_timeout = timeout;
        self
    }

    /// The store. Nothing is connected yet.
    pub fn connect(self) -> Result<PostgresStore, StoreError> {
        let misconfigured = |message: String| StoreError::new(StoreErrorKind::Misconfigured, message);
        let schema = SchemaName::from_str(&self.schema).map_err(|e| misconfigured(e.to_string()))?;
        if self.max_connections <= RESERVE {
            return Err(misconfigured(format!(
                "max_connections is {} (at least {}: {RESERVE} are kept in reserve)",
                self.max_connections,
                RESERVE + 1
            )));
        }
        // The parser's own error may quote parts of the URL, and with them the password.
        let base = PgConnectOptions::from_str(&self.url)
            .map_err(|_| {
                misconfigured(
                    "the database URL cannot be read (expected postgres://user:password@host:port/database)"
                        .into(),
                )
            })?
            .application_name("onlyonce")
            .disable_statement_logging();
        let (lanes, reserve) = if self.pooler {
            // A startup parameter that poolers do not know; servers since 12 need none for exact numbers.
            let base = base.extra_float_digits(None);
            (base.clone(), base)
        } else {
            let limit = STATEMENT_TIMEOUT.as_millis().to_string();
            (
                base.clone().options([("default_transaction_read_only", "on")]),
                // As `BEGIN READ WRITE` does for the lanes; and a session whose client has given up ends. What runs
                // here is over before it could be compiled.
                base.options([
                    ("default_transaction_read_only", "off"),
                    ("statement_timeout", limit.as_str()),
                    ("jit", "off"),
                ]),
            )
        };
        let pool = |max: u32, options: PgConnectOptions| {
            PgPoolOptions::new()
                .max_connections(max)
                .acquire_timeout(self.acquire_timeout)
                .test_before_acquire(true)
                .connect_lazy_with(options)
        };
        Ok(PostgresStore {
            lanes: pool(self.max_connections - RESERVE, lanes),
            reserve: pool(RESERVE, reserve),
            sql: Arc::new(Sql::new(&schema)),
            schema,
            pooler: self.pooler,
            signals: Signals::default(),
        })
    }

    pub(super) fn around(pool: PgPool) -> PostgresStore {
        let schema = SchemaName::default();
        let reserve = PgPoolOptions::new()
            .max_connections(RESERVE)
            .acquire_timeout(Duration::from_secs(10))
            .connect_lazy_with((*pool.connect_options()).clone());
        PostgresStore {
            lanes: pool,
            reserve,
            sql: Arc::new(Sql::new(&schema)),
            schema,
            pooler: false,
            signals: Signals::default(),
        }
    }
}
