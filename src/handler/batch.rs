use std::fmt;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use sqlx::Database;

use super::{HandlerError, Item, Progress, Run};
use crate::event::{Event, FromEvent};
use crate::outbox::BatchOutbox;

/// Works on all new events of one transaction at once, for set-based SQL.
///
/// It never sees a duplicate and never an empty batch. If it fails, nothing is kept, and its events
/// are run one by one, in batches of one, so that only the bad one pays for the failure.
#[async_trait]
pub trait BatchHandler<Db: Database>: Send + Sync + 'static {
    /// What each payload is decoded into.
    type Payload: FromEvent;

    /// Works on the events, in their order of arrival.
    async fn handle(
        &self,
        cx: &mut BatchContext<'_, Db>,
        events: Vec<Event<Self::Payload>>,
    ) -> Result<(), HandlerError>;
}

/// What a batch handler has in its hands while its events are worked on.
pub struct BatchContext<'cx, Db: Database> {
    conn: &'cx mut Db::Connection,
    attempt: u32,
    progress: Progress<'cx, Db>,
}

impl<Db: Database> BatchContext<'_, Db> {
    /// The transaction's connection; see [`Context::tx`](super::Context::tx).
    pub fn tx(&mut self) -> &mut Db::Connection {
        self.conn
    }

    /// The highest run number among the events.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Whether the consumer is stopping.
    pub fn stopping(&self) -> bool {
        self.progress.stopping.is_cancelled()
    }

    /// How long this handler may still run.
    pub fn time_left(&self) -> Duration {
        self.progress.deadline.saturating_duration_since(Instant::now())
    }

    /// Takes events along that are published if and only if this handler's work commits, each for the event
    /// that causes it: `cx.outbox().for_event(&event).send(outgoing)?`. See
    /// [`guide::outbox`](crate::guide::outbox).
    pub fn outbox(&self) -> BatchOutbox<'_> {
        BatchOutbox::new(self.progress.outgoing)
    }

    /// Claims a business fact in this transaction; see [`Context::once`](super::Context::once).
    pub async fn once(&mut self, name: &str, id: impl fmt::Display) -> Result<bool, HandlerError> {
        self.progress.claim_once(self.conn, name, &id.to_string()).await
    }
}

impl<Db: Database> fmt::Debug for BatchContext<'_, Db> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BatchContext")
            .field("attempt", &self.attempt)
            .finish_non_exhaustive()
    }
}

/// Runs a [`BatchHandler`]: decodes everything first, so that one bad payload costs no work.
pub(crate) struct BatchRunner<Db, H>(H, PhantomData<fn() -> Db>);

impl<Db: Database, H: BatchHandler<Db>> BatchRunner<Db, H> {
    pub(crate) fn new(handler: H) -> Self {
        Self(handler, PhantomData)
    }
}

#[async_trait]
impl<Db: Database, H: BatchHandler<Db>> Run<Db> for BatchRunner<Db, H> {
    async fn run(
        &self,
        conn: &mut Db::Connection,
        progress: Progress<'_, Db>,
        items: &[Item<'_>],
    ) -> Result<(), HandlerError> {
        let mut events = Vec::with_capacity(items.len());
        for item in items {
            let event = item.event.decode::<H::Payload>(item.identity);
            events.push(event.map_err(HandlerError::undecodable)?);
        }
        let attempt = items.iter().map(|item| item.attempt).max().unwrap_or(1);
        self.0
            .handle(
                &mut BatchContext {
                    conn,
                    attempt,
                    progress,
                },
                events,
            )
            .await
    }
}
