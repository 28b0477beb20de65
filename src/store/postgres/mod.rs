//! The PostgreSQL store: version 13 and later.

mod beside;
mod classify;
mod commit;
mod inbox;
mod listening;
mod name;
mod operations;
mod options;
mod outgoing;
mod relaying;
mod sql;
mod transaction;

use std::fmt;
use std::sync::Arc;

use sqlx::postgres::PgPool;

pub use name::{InvalidName, SchemaName};
pub use options::PostgresOptions;

use sql::Sql;

use super::{Signals, StoreError};

/// Claims, held events and handler transactions on PostgreSQL.
///
/// Holds two pools: one for lanes, and a reserve of two connections for everything that must go on
/// while all lanes are busy or stuck (leases, dead letters, purge, ending a stuck statement).
///
/// ```no_run
/// # async fn example() -> Result<(), onlyonce::store::StoreError> {
/// use onlyonce::store::{Operations, PostgresStore};
///
/// let store = PostgresStore::connect("postgres://app@localhost/app").await?;
/// store.migrate().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct PostgresStore {
    lanes: PgPool,
    reserve: PgPool,
    sql: Arc<Sql>,
    schema: SchemaName,
    pooler: bool,
    signals: Signals,
}

impl PostgresStore {
    /// Opens a store with the defaults of [`PostgresOptions`]. Connections are made when they are
    /// needed, so an unreachable server is not an error yet; the consumer waits for it.
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        PostgresOptions::new(url).connect()
    }

    /// Uses a pool of yours for handler transactions, and two connections of its own beside it, with
    /// the same settings. Sessions of your pool are not made read-only by default, so a handler's
    /// write outside its transaction goes unnoticed; [`PostgresOptions`] is the safer way. The pool's
    /// connections must reach the server itself, not a pooler in transaction mode.
    pub fn from_pool(pool: PgPool) -> Self {
        PostgresOptions::around(pool)
    }

    /// The pool that handler transactions are taken from. Sessions of a pool that this store opened
    /// are read-only by default; begin with `BEGIN READ WRITE` to write through it.
    pub fn pool(&self) -> &PgPool {
        &self.lanes
    }

    /// The schema that holds the tables.
    pub fn schema(&self) -> &SchemaName {
        &self.schema
    }
}

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Connect options hold the password: name what identifies the store and nothing more.
        f.debug_struct("PostgresStore")
            .field("schema", &self.schema)
            .finish_non_exhaustive()
    }
}
