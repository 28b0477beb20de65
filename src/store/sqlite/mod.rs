//! The SQLite store, on a file.
//!
//! SQLite has one writer at a time, and [`SqliteStore`] keeps it so by choice: a handler's transaction
//! takes the right to write when it begins and gives it back when it ends, so one lane works at a
//! time and the others would only wait. What follows from that:
//!
//! - In a handler, write through the handler's own transaction. A write on another connection waits
//!   for that transaction, which waits for it, and fails as busy.
//! - Leases are renewed between handlers, not during one. Nobody can take an event whose lease ran
//!   out meanwhile, because that would be a write as well.
//! - Clones of a store share the right to write. Two stores on one file, like two processes, wait
//!   for each other inside SQLite, which is slower and not in order of arrival.

mod classify;
mod commit;
mod inbox;
mod listening;
mod operations;
mod options;
mod outgoing;
mod relaying;
mod session;
mod sql;
#[cfg(test)]
mod tests;
mod transaction;

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use sqlx::sqlite::{Sqlite, SqliteConnection, SqlitePool};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

pub use options::SqliteOptions;

use classify::classify_begin;
use session::Sessions;

use super::{Signals, StoreError, StoreErrorKind};

/// How long a write beside the work (a lease, a letter, purge) waits for the handler that is running.
const PATIENCE: Duration = Duration::from_secs(30);

/// Claims, held events and handler transactions in a SQLite file.
///
/// Holds two pools: one for lanes, and a reserve of two connections for everything that goes on beside
/// them (leases, dead letters, purge).
///
/// ```no_run
/// # async fn example() -> Result<(), onlyonce::store::StoreError> {
/// use onlyonce::store::{Operations, SqliteStore};
///
/// let store = SqliteStore::connect("sqlite://app.db").await?;
/// store.migrate().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct SqliteStore {
    lanes: SqlitePool,
    reserve: SqlitePool,
    /// One permit: the right to write.
    writers: Arc<Semaphore>,
    /// `None` where the pool is not ours to fit.
    sessions: Option<Arc<Sessions>>,
    signals: Signals,
}

impl SqliteStore {
    /// Opens a store with the defaults of [`SqliteOptions`], on a path or a `sqlite://` URL. The file is
    /// opened when it is needed, and created if it is missing.
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        SqliteOptions::new(url).connect()
    }

    /// Uses a pool of yours for handler transactions, and two connections of its own beside it, with
    /// the same settings. Connections of your pool are left as they are: what a handler writes after it
    /// rolled back its transaction stands, and a statement that was cut off runs to its end.
    /// [`SqliteOptions`] is the safer way.
    pub fn from_pool(pool: SqlitePool) -> Self {
        SqliteOptions::around(pool)
    }

    /// The pool that handler transactions are taken from.
    pub fn pool(&self) -> &SqlitePool {
        &self.lanes
    }

    /// Waits for the right to write.
    async fn writer(&self, patience: Duration) -> Result<OwnedSemaphorePermit, StoreError> {
        match tokio::time::timeout(patience, Arc::clone(&self.writers).acquire_owned()).await {
            Ok(Ok(writer)) => Ok(writer),
            _ => Err(StoreError::new(
                StoreErrorKind::Busy,
                format!("another transaction of this process has been writing for more than {patience:?}"),
            )),
        }
    }

    /// Begins a write beside the work.
    async fn begin_reserve(&self, doing: &str) -> Result<Beside, StoreError> {
        let writer = self.writer(PATIENCE).await?;
        let tx = self
            .reserve
            .begin_with(sql::BEGIN)
            .await
            .map_err(|e| classify_begin(doing, e))?;
        Ok(Beside { tx, _writer: writer })
    }
}

/// A write beside the work. The right to write is given up after the transaction has ended.
struct Beside {
    tx: sqlx::Transaction<'static, Sqlite>,
    _writer: OwnedSemaphorePermit,
}

async fn commit(write: Beside) -> Result<(), sqlx::Error> {
    let Beside { tx, _writer } = write;
    tx.commit().await
}

impl Deref for Beside {
    type Target = SqliteConnection;

    fn deref(&self) -> &SqliteConnection {
        &self.tx
    }
}

impl DerefMut for Beside {
    fn deref_mut(&mut self) -> &mut SqliteConnection {
        &mut self.tx
    }
}

impl fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Connect options may hold an encryption key: name what identifies the store and nothing more.
        let options = self.lanes.connect_options();
        f.debug_struct("SqliteStore")
            .field("file", &options.get_filename())
            .finish_non_exhaustive()
    }
}
