use std::io;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::{Connection as _, Database};
use tokio::sync::OwnedSemaphorePermit;

use super::Limits;

/// A lane's connection, with what is needed to end its statement from outside.
#[derive(Debug)]
pub struct Connection<Db: Database> {
    pub(crate) conn: PoolConnection<Db>,
    /// What ends this session from outside, where there is something.
    pub(crate) session: Option<Session>,
    /// The limits that the session has for good, so that no transaction has to name them.
    #[cfg_attr(
        not(feature = "postgres"),
        allow(dead_code, reason = "SQLite has no session settings")
    )]
    pub(crate) limits: Option<Limits>,
}

/// One session. A server that was restarted gives the same numbers again, in a container within
/// minutes; a session that began at another time is somebody else's.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Session {
    pub(crate) number: i32,
    /// When it began, in microseconds by the server's clock.
    #[cfg_attr(
        not(feature = "postgres"),
        allow(dead_code, reason = "a file has no sessions of others")
    )]
    pub(crate) began: i64,
}

impl<Db: Database> Connection<Db> {
    /// Whether the connection is outside any transaction, as far as the client knows. After a commit
    /// it must be: otherwise a leaked savepoint made `COMMIT` a mere release of that savepoint.
    pub fn is_clean(&self) -> bool {
        !self.conn.is_in_transaction()
    }
}

/// An open transaction of a lane. Dropping it rolls back.
#[derive(Debug)]
pub struct Tx<'c, Db: Database> {
    pub(crate) tx: sqlx::Transaction<'c, Db>,
    /// How long each statement's answer is waited for.
    pub(crate) patience: Duration,
    /// Where the database has one writer, the right to be it; given up after the transaction ended.
    pub(crate) _writer: Option<OwnedSemaphorePermit>,
}

impl<Db: Database> Tx<'_, Db> {
    /// Rolls back and waits until that is done.
    pub async fn rollback(self) -> Result<(), sqlx::Error> {
        answer(self.patience, self.tx.rollback()).await
    }
}

/// Waits for the server's answer, but not for ever: a peer that is gone without a word never gives
/// one, and no limit of the server's helps then. Past `patience` the connection is only good to be
/// closed.
pub(crate) async fn answer<T>(
    patience: Duration,
    statement: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, sqlx::Error> {
    match tokio::time::timeout(patience, statement).await {
        Ok(result) => result,
        Err(_) => Err(sqlx::Error::Io(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("no answer within {patience:?}"),
        ))),
    }
}

impl<Db: Database> Deref for Tx<'_, Db> {
    type Target = Db::Connection;

    fn deref(&self) -> &Self::Target {
        &self.tx
    }
}

impl<Db: Database> DerefMut for Tx<'_, Db> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.tx
    }
}
