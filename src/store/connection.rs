use std::io;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use sqlx::Database;
use sqlx::pool::PoolConnection;
use tokio::sync::OwnedSemaphorePermit;

#[cfg(feature = "postgres")]
use super::ClaimRequest;
use super::{Limits, StoreError, StoreErrorKind};
#[cfg(feature = "postgres")]
use crate::event::{EventKey, PayloadHash};

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
    /// The transaction that has begun and not ended.
    ///
    /// sqlx keeps a count of its own, so that a handler's `begin` is a savepoint. It is not told how ours
    /// begin and end, because it can send neither a guard with its `COMMIT` nor, after a savepoint
    /// that a handler forgot, a `COMMIT` at all: where it counts one already, ours begins by a
    /// statement of our own, and its count stays.
    pub(crate) open: Option<Open>,
}

/// An open transaction.
#[derive(Debug)]
pub(crate) struct Open {
    /// What the commit before it has done for it, if nobody has taken it over yet.
    pub(crate) ahead: Option<Ahead>,
    /// Where the database has one writer, the right to be it; given up when the transaction has ended.
    pub(crate) _writer: Option<OwnedSemaphorePermit>,
}

/// How far a transaction has come together with the commit before it.
#[derive(Debug)]
#[cfg_attr(
    not(feature = "postgres"),
    allow(dead_code, reason = "a file's commit begins nothing")
)]
pub(crate) enum Ahead {
    /// It has begun, and nothing has been done in it.
    Begun,
    /// It has begun, and a claim was sent. Committed with any other event's work, that claim would be
    /// a lost event: nobody gets this transaction but by [`Connection::take_claimed`].
    #[cfg(feature = "postgres")]
    Claimed {
        question: (EventKey, PayloadHash),
        inserted: Inserted,
    },
}

/// What the insert of one claim has come to: the transaction's number, `None` where something stood in
/// its way, or the error that has ended the transaction.
#[cfg(feature = "postgres")]
pub(crate) type Inserted = Result<Option<String>, sqlx::Error>;

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
    /// Whether the connection is outside any transaction.
    pub fn is_clean(&self) -> bool {
        self.open.is_none()
    }

    /// Takes over the next transaction, if it has begun already and nothing has been done in it. One
    /// that has claimed stays as it is, to be rolled back.
    #[cfg(feature = "postgres")]
    pub(crate) fn take_begun(&mut self) -> bool {
        let ahead = self.open.as_mut().map(|open| &mut open.ahead);
        ahead.is_some_and(|ahead| ahead.take_if(|ahead| matches!(ahead, Ahead::Begun)).is_some())
    }

    /// Takes over the next transaction, if this very event has been claimed in it already. The one way
    /// to a transaction that holds a claim made ahead: whatever else comes first ends it.
    #[cfg(feature = "postgres")]
    pub(crate) fn take_claimed(&mut self, request: &ClaimRequest<'_>) -> Option<Inserted> {
        // A held row of the delivery's own was not looked for.
        let asked = request.own.is_none().then(|| request.question());
        let is_it =
            |ahead: &mut Ahead| matches!(ahead, Ahead::Claimed { question, .. } if asked == Some(*question));
        match self.open.as_mut()?.ahead.take_if(is_it)? {
            Ahead::Claimed { inserted, .. } => Some(inserted),
            Ahead::Begun => None,
        }
    }

    /// Whether a transaction is open that the commit before it has begun and nobody has taken over.
    pub(crate) fn is_ahead(&self) -> bool {
        self.open.as_ref().is_some_and(|open| open.ahead.is_some())
    }

    /// Whether nobody knows what its last transaction has come to.
    pub(crate) fn is_in_doubt(&self) -> bool {
        !self.is_clean() && !self.is_ahead()
    }

    /// PostgreSQL only warns of a `BEGIN` inside a transaction, and goes on in that one.
    pub(crate) fn must_be_clean(&self) -> Result<(), StoreError> {
        if self.is_clean() {
            return Ok(());
        }
        Err(StoreError::new(
            StoreErrorKind::Unavailable,
            "this connection's last transaction was neither committed nor rolled back",
        ))
    }
}

/// The open transaction of a lane's connection. Dropping it leaves it open: what became of it is for
/// [`Store::commit`](super::Store::commit) and [`Store::rollback`](super::Store::rollback) to say.
#[derive(Debug)]
pub struct Tx<'c, Db: Database> {
    pub(crate) conn: &'c mut Connection<Db>,
    /// How long each statement's answer is waited for.
    #[cfg_attr(
        not(feature = "postgres"),
        allow(dead_code, reason = "a file has no peer that could vanish")
    )]
    pub(crate) patience: Duration,
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
        &self.conn.conn
    }
}

impl<Db: Database> DerefMut for Tx<'_, Db> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.conn.conn
    }
}
