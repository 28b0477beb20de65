//! The outbox: outgoing events that are published if and only if the work that causes them commits.
//!
//! A handler collects [`OutgoingEvent`]s with `cx.outbox().send(..)`; anything else with a transaction,
//! such as an HTTP endpoint, writes them with [`Outbox::send_in`]. They become rows of the table `outbox` in that
//! transaction, and a relay publishes them afterwards.

mod admission;
mod collector;
mod derived;
mod destination;
mod error;
mod event;
mod settings;
mod trace;
mod wake;

use std::fmt;

use async_trait::async_trait;
use sqlx::Database;
use uuid::Uuid;

pub use collector::{BatchOutbox, EventOutbox};
pub(crate) use destination::is_publisher_name;
pub use destination::{Destination, DestinationError};
pub use error::OutboxError;
pub use event::OutgoingEvent;

pub(crate) use collector::Collector;
pub(crate) use settings::Settings;
pub(crate) use wake::Wake;

use crate::store::{Claims, CommitError, Outgoing, OutgoingRow, ParkedRow, StoreError, Tx, Waking};
use collector::together;

/// Writes outgoing events into transactions, and looks after those that no broker would take.
///
/// ```no_run
/// use onlyonce::Outbox;
/// use onlyonce::outbox::OutgoingEvent;
/// use onlyonce::store::PostgresStore;
/// use sqlx::postgres::PgPool;
///
/// async fn place(pool: &PgPool, outbox: &Outbox<PostgresStore>) -> Result<(), Box<dyn std::error::Error>> {
///     let mut tx = pool.begin().await?;
///     sqlx::query("INSERT INTO orders (id) VALUES ($1)").bind("o-1").execute(&mut *tx).await?;
///     let placed = OutgoingEvent::json("kafka:orders", "order.placed", &"o-1")?.key("o-1");
///     outbox.send_in(&mut tx, placed).await?;
///     tx.commit().await?;
///     outbox.wake();
///     Ok(())
/// }
/// ```
///
/// A consumer has one of its own; give it another by
/// [`ConsumerBuilder::outbox`](crate::consumer::ConsumerBuilder::outbox) to set something. Clones are cheap and
/// the same outbox.
#[derive(Clone)]
pub struct Outbox<S> {
    store: S,
    settings: Settings,
    wake: Wake,
}

impl<S: Waking> Outbox<S> {
    /// An outbox in the tables of this store. Settings are checked where it is used: by a consumer's `build`,
    /// and by `send_in`.
    pub fn new(store: S) -> Self {
        let settings = Settings::default();
        Self {
            wake: Wake::of(&store, &settings.relay),
            settings,
            store,
        }
    }

    /// The relay that publishes what is written here. Default `default`: one relay for all. Give parts of a
    /// system relays of their own where one must not wait behind the other's backlog. 1 to 64 of `a-z`,
    /// `0-9`, `-` and `_`; events for a relay that nobody runs wait.
    pub fn relay(mut self, name: impl Into<String>) -> Self {
        self.settings.relay = name.into();
        self.wake = Wake::of(&self.store, &self.settings.relay);
        self
    }

    /// Whose ids its events carry: the identity source that consumers of them compare together with the id, and
    /// the source of CloudEvents. 1 to 512 bytes; choose a name that nobody else's events have. Default for
    /// a consumer's outbox: the consumer's name. Elsewhere there is none, and it has to be set: two services
    /// that gave ids of their own under one name would each lose the events that the other sent first.
    pub fn source(mut self, source: impl Into<String>) -> Self {
        self.settings.source = Some(source.into());
        self
    }

    /// The most that an event for this publisher may count as, so that one which its broker would refuse is
    /// refused while the transaction can still roll back. Default 1,000,000 bytes, a little less than Kafka's
    /// default; 1 byte to 128 MiB. Set it to a little less than the broker's own limit.
    ///
    /// An event counts: its body (a structured CloudEvent's that is not JSON by its content type: four bytes
    /// for three, as base64), its key, its id and source twice (once as headers of ours, once as CloudEvents
    /// attributes), its type and content type; for each header and attribute, the trace context included, name,
    /// value and 16 bytes; and 256 bytes for the names that a publisher writes.
    pub fn limit(mut self, publisher: impl Into<String>, bytes: usize) -> Self {
        self.settings.limits.insert(publisher.into(), bytes);
        self
    }

    pub(crate) fn or_source(mut self, source: &str) -> Self {
        self.settings.source.get_or_insert_with(|| source.to_owned());
        self
    }

    /// What is wrong with its settings.
    pub(crate) fn problems(&self) -> Vec<String> {
        self.settings.problems()
    }

    pub(crate) fn store(&self) -> &S {
        &self.store
    }
}

impl<S: Outgoing> Outbox<S> {
    /// Writes an event in a transaction of yours: it is published if and only if that commits. Returns its id,
    /// a random UUID if it was not given one: an endpoint that is called twice has to find that out itself, or
    /// to give ids.
    ///
    /// Its `traceparent` header, if it has a valid one, is published and stored. Call [`wake`](Self::wake) after
    /// the commit.
    ///
    /// # Errors
    ///
    /// If no broker could carry it, or it is too large for its publisher, before anything was asked of the
    /// database; and if that refuses the row, after which PostgreSQL has aborted the transaction.
    pub async fn send_in(
        &self,
        conn: &mut <S::Db as Database>::Connection,
        event: OutgoingEvent,
    ) -> Result<String, OutboxError> {
        let mut ids = self.send_all_in(conn, [event]).await?;
        Ok(ids.remove(0))
    }

    /// Writes events in this order in a transaction of yours, all of them or none, and returns their ids.
    /// As [`send_in`](Self::send_in), and in one statement.
    pub async fn send_all_in(
        &self,
        conn: &mut <S::Db as Database>::Connection,
        events: impl IntoIterator<Item = OutgoingEvent> + Send,
    ) -> Result<Vec<String>, OutboxError> {
        let problems = self.problems();
        if !problems.is_empty() {
            return Err(OutboxError::Settings(problems.join("; ")));
        }
        let rows = self.rows(events)?;
        if !rows.is_empty() {
            self.store
                .write_outgoing(conn, &rows)
                .await
                .map_err(OutboxError::Store)?;
        }
        Ok(rows.into_iter().map(|row| row.message.event_id).collect())
    }

    fn rows(&self, events: impl IntoIterator<Item = OutgoingEvent>) -> Result<Vec<OutgoingRow>, OutboxError> {
        let mut so_far = 0;
        events
            .into_iter()
            .map(|event| {
                let (row, size) = self.settings.row(event, || Uuid::new_v4().to_string(), None)?;
                so_far = together(so_far, size)?;
                Ok(row)
            })
            .collect()
    }

    /// Tells the relay that something was committed. Call it after the commit; without it a relay finds
    /// out when it looks the next time. Costs next to nothing.
    pub fn wake(&self) {
        self.wake.wake();
    }

    /// Up to `limit` events that need a person, because their broker has refused them too often or for good,
    /// beginning after the row with this number (0: from the start).
    pub async fn parked(&self, after: i64, limit: usize) -> Result<Vec<ParkedRow>, StoreError> {
        self.store.parked(&self.settings.relay, after, limit).await
    }

    /// Sends parked events once more, as if they were new: each keeps its id and its place in the order of
    /// its key. Returns the numbers of those that were parked.
    pub async fn replay(&self, rows: &[i64]) -> Result<Vec<i64>, StoreError> {
        let due = self.store.replay_parked(&self.settings.relay, rows).await?;
        self.wake();
        Ok(due)
    }

    /// Deletes parked events; they are never sent. Returns the numbers of those that were parked.
    pub async fn discard(&self, rows: &[i64]) -> Result<Vec<i64>, StoreError> {
        let gone = self.store.discard_parked(&self.settings.relay, rows).await?;
        // What waited behind them may go on.
        self.wake();
        Ok(gone)
    }
}

impl<S> fmt::Debug for Outbox<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outbox")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

/// The part of an outbox that a consumer's lanes need, as an object, so that only who builds a consumer has
/// to say that its store has an outbox.
#[async_trait]
pub(crate) trait Record<Db: Database>: Send + Sync {
    fn settings(&self) -> &Settings;

    /// Writes what was collected, in the claims' own transaction and in no other. Nothing costs nothing.
    async fn record(
        &self,
        tx: &mut Tx<'_, Db>,
        claims: Claims,
        rows: &[OutgoingRow],
    ) -> Result<Claims, CommitError>;

    /// Tells the relay that something was committed.
    fn committed(&self);
}

#[async_trait]
impl<S: Outgoing> Record<S::Db> for Outbox<S> {
    fn settings(&self) -> &Settings {
        &self.settings
    }

    async fn record(
        &self,
        tx: &mut Tx<'_, S::Db>,
        claims: Claims,
        rows: &[OutgoingRow],
    ) -> Result<Claims, CommitError> {
        if rows.is_empty() {
            return Ok(claims);
        }
        self.store.record_outgoing(tx, claims, rows).await
    }

    fn committed(&self) {
        self.wake();
    }
}
