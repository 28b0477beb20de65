use std::fmt;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use sqlx::Database;
use tokio_util::sync::CancellationToken;

use super::HandlerError;
use crate::event::{Headers, Identity};
use crate::outbox::{Collector, EventOutbox};
use crate::store::Store;

/// What a handler has in its hands while one event is worked on.
pub struct Context<'cx, Db: Database> {
    pub(super) conn: &'cx mut Db::Connection,
    pub(super) identity: &'cx Identity,
    pub(super) headers: &'cx Headers,
    pub(super) attempt: u32,
    pub(super) progress: Progress<'cx, Db>,
}

/// What is the same for all events of one transaction.
pub(crate) struct Progress<'cx, Db: Database> {
    pub(crate) consumer: &'cx str,
    pub(crate) once: &'cx dyn OnceClaims<Db>,
    pub(crate) outgoing: &'cx Collector<'cx>,
    pub(crate) stopping: &'cx CancellationToken,
    pub(crate) deadline: Instant,
}

impl<Db: Database> Clone for Progress<'_, Db> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<Db: Database> Copy for Progress<'_, Db> {}

impl<Db: Database> Context<'_, Db> {
    /// The transaction's connection: what is written through it commits with the claim or not at all.
    ///
    /// `begin()` on it is a savepoint. Do not send `COMMIT` or `ROLLBACK` through it: the framework
    /// notices, and the event is a dead letter with reason `transaction_escaped`.
    pub fn tx(&mut self) -> &mut Db::Connection {
        self.conn
    }

    /// Who the event is.
    pub fn identity(&self) -> &Identity {
        self.identity
    }

    /// Which run this is: 1 for the first. Attempts are counted across restarts and instances from
    /// the moment the event is held.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Whether the consumer is stopping. A handler that is still running at the stop's deadline is
    /// cut off and its event given back; that is not an attempt.
    pub fn stopping(&self) -> bool {
        self.progress.stopping.is_cancelled()
    }

    /// How long this handler may still run before it counts as failed by timeout.
    pub fn time_left(&self) -> Duration {
        self.progress.deadline.saturating_duration_since(Instant::now())
    }

    /// Takes events along that are published if and only if this handler's work commits:
    /// `cx.outbox().send(event)?`. See [`guide::outbox`](crate::guide::outbox).
    pub fn outbox(&self) -> EventOutbox<'_> {
        EventOutbox::new(self.progress.outgoing, self.identity, self.headers)
    }

    /// Claims a business fact in this transaction: true the first time for this consumer, false ever after.
    ///
    /// For two events that mean one fact (`invoice.paid` and `invoice.payment_succeeded`): whoever
    /// comes first does the work, the other sees `false`. The claim commits or vanishes with the
    /// handler's work, and is kept until it is purged on purpose.
    pub async fn once(&mut self, name: &str, id: impl fmt::Display) -> Result<bool, HandlerError> {
        self.progress.claim_once(self.conn, name, &id.to_string()).await
    }
}

impl<Db: Database> Progress<'_, Db> {
    pub(super) async fn claim_once(
        &self,
        conn: &mut Db::Connection,
        name: &str,
        id: &str,
    ) -> Result<bool, HandlerError> {
        for (what, text) in [("name", name), ("id", id)] {
            if text.trim().is_empty() || text.len() > 512 || text.chars().any(char::is_control) {
                return Err(HandlerError::permanent(format!(
                    "the {what} of a business claim is blank, longer than 512 bytes or holds control characters: {text:.40?}"
                )));
            }
        }
        Ok(self.once.claim_once(conn, self.consumer, name, id).await?)
    }
}

impl<Db: Database> fmt::Debug for Context<'_, Db> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("identity", self.identity)
            .field("attempt", &self.attempt)
            .finish_non_exhaustive()
    }
}

/// The part of a store that a context needs, as an object, so that `Context` names only the database.
#[async_trait]
pub(crate) trait OnceClaims<Db: Database>: Send + Sync {
    async fn claim_once(
        &self,
        conn: &mut Db::Connection,
        consumer: &str,
        name: &str,
        id: &str,
    ) -> Result<bool, sqlx::Error>;
}

#[async_trait]
impl<S: Store> OnceClaims<S::Db> for S {
    async fn claim_once(
        &self,
        conn: &mut <S::Db as Database>::Connection,
        consumer: &str,
        name: &str,
        id: &str,
    ) -> Result<bool, sqlx::Error> {
        Store::claim_once(self, conn, consumer, name, id).await
    }
}
