//! Stores: where claims, held events and the handler's own writes commit together.
//!
//! [`Store`] is the transaction: begin, claim, commit. [`Inbox`] is the table of held events, [`Outgoing`] that
//! of events that are sent, [`Operations`] is what runs beside the work: schema, purge. A consumer needs all four; they are
//! apart so that none of them is a giant. `PostgresStore` and `SqliteStore` implement them with
//! the same file names, statement for statement.

mod claim;
mod connection;
mod error;
mod held;
mod outgoing;
#[cfg(feature = "postgres")]
pub mod postgres;
mod signal;
#[cfg(feature = "sqlite")]
pub mod sqlite;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod stored;
#[cfg(all(test, feature = "postgres", feature = "sqlite"))]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::Database;
use uuid::Uuid;

#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) use claim::Found;
pub use claim::{ClaimAnswer, ClaimRequest, Claims, HeldState, Outcome};
#[cfg(feature = "postgres")]
pub(crate) use connection::{Ahead, Inserted};
pub use connection::{Connection, Tx};
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) use connection::{Open, Session, answer};
pub use error::{CommitError, StoreError, StoreErrorKind};
pub use held::{Attempt, Backlog, HeldEvent, Lease, Parked, ParkedAs, Parking};
pub use outgoing::{
    DueRequest, DueRow, HeldLane, LANES, OutgoingBacklog, OutgoingRow, Owner, ParkedRow, Refusal,
    UnreadableRow,
};
#[cfg(feature = "postgres")]
pub use postgres::PostgresStore;
pub use signal::{Heard, Listener, Reach, Signal, Signals};
#[cfg(feature = "sqlite")]
pub use sqlite::SqliteStore;

/// One database transaction that carries the claim, the handler's writes and nothing else.
///
/// `begin`, `claim` and `commit` are never dropped half-way by the framework: a database
/// driver may leave an open transaction in its pool otherwise.
#[async_trait]
pub trait Store: Clone + Send + Sync + 'static {
    /// The sqlx database that handlers write to.
    type Db: Database;

    /// The database's name in logs and messages.
    fn name(&self) -> &'static str;

    /// How many connections the pool may open; lanes and reserve have to fit.
    fn max_connections(&self) -> u32;

    /// Equal for clones of one store, which share its connections.
    fn pool_id(&self) -> usize;

    /// The most lanes that can work at once: `Some(1)` where the database has one writer.
    fn max_useful_lanes(&self) -> Option<usize>;

    /// Takes a connection for a lane, which keeps it.
    async fn open(&self) -> Result<Connection<Self::Db>, StoreError>;

    /// Begins a transaction with its limits, in one round trip.
    ///
    /// Never one in which anything is claimed: a transaction that [`Next::Claim`] has begun is rolled
    /// back first.
    async fn begin<'c>(
        &self,
        conn: &'c mut Connection<Self::Db>,
        limits: &Limits,
    ) -> Result<Tx<'c, Self::Db>, StoreError>;

    /// Claims every event of `requests` that may be claimed, and says for each in the
    /// same order what it found. Waits for another transaction that holds one of the keys, at most
    /// `lock_timeout`; past it the error is [`StoreErrorKind::Busy`].
    ///
    /// The returned [`Claims`] prove what this transaction holds; the commit takes them by value.
    async fn claim(
        &self,
        tx: &mut Tx<'_, Self::Db>,
        requests: &[ClaimRequest<'_>],
        outcome: Outcome,
    ) -> Result<(Vec<ClaimAnswer>, Claims), StoreError>;

    /// Takes over the transaction in which the commit before it has claimed exactly these events
    /// ([`Next::Claim`]), with what that claim has found; its error is this claim's error. `None` if
    /// there is none: then [`begin`](Self::begin) and [`claim`](Self::claim), which cost round trips and
    /// say the same.
    async fn claimed_ahead<'c>(
        &self,
        _conn: &'c mut Connection<Self::Db>,
        _limits: &Limits,
        _requests: &[ClaimRequest<'_>],
        _outcome: Outcome,
    ) -> Result<Option<ClaimedAhead<'c, Self::Db>>, StoreError> {
        Ok(None)
    }

    /// Asks, beside the transaction, whether these claims are committed, although the handler failed
    /// and nothing of ours has: then the handler did it, and part of its work stands.
    async fn is_committed(&self, claims: &Claims) -> bool;

    /// Commits, unless the guard refuses: it proves that this is still the claims' own transaction and
    /// alive, and finishes the held rows of its events. `Ok` means durable.
    async fn commit(&self, tx: Tx<'_, Self::Db>, claims: Claims, next: Next<'_>) -> Result<(), CommitError>;

    /// Rolls back the transaction that is open on this connection, if one is.
    async fn rollback(&self, conn: &mut Connection<Self::Db>) -> Result<(), StoreError>;

    /// Closes a connection whose handler was cut off, and ends on the server what it was running, so
    /// that its locks do not outlive it.
    async fn abandon(&self, conn: Connection<Self::Db>);

    /// Asks, on a fresh connection of its own, whether the database answers, is not recovering and
    /// takes writes. This alone decides what counts as infrastructure.
    async fn probe(&self) -> Result<(), StoreError>;

    /// Claims a business fact such as (`invoice-paid`, `invoice 7`) in the handler's transaction.
    /// True the first time. Waits for a concurrent claim like [`claim`](Self::claim).
    async fn claim_once(
        &self,
        conn: &mut <Self::Db as Database>::Connection,
        consumer: &str,
        name: &str,
        id: &str,
    ) -> Result<bool, sqlx::Error>;
}

/// A transaction, what the claim in it has found, and its proof.
pub type ClaimedAhead<'c, Db> = (Tx<'c, Db>, Vec<ClaimAnswer>, Claims);

/// What a lane does after a commit.
#[derive(Debug, Clone, Copy)]
pub enum Next<'a> {
    /// Its next work is this one event, which is to be processed: the next transaction may begin with
    /// the commit and claim it, where that saves round trips. [`claimed_ahead`](Store::claimed_ahead)
    /// takes it over, [`begin`](Store::begin) and [`rollback`](Store::rollback) end it unused. The
    /// answer to the commit comes with that of the claim, so a concurrent copy delays it by at most
    /// `lock_timeout`.
    Claim(ClaimRequest<'a>),
    /// It has more work: the next transaction may begin with the commit, where that saves a round trip.
    /// [`begin`](Store::begin) takes it over, [`rollback`](Store::rollback) ends it unused.
    Begin,
    /// Perhaps nothing for a long time.
    Rest,
}

/// The held events: delayed retries, dead letters and the embedded durable queue.
#[async_trait]
pub trait Inbox: Store {
    /// Holds an event, in one transaction of its own: takes the claim first (so that it waits for a
    /// running copy), inserts or updates the row, gives the claim back, commits.
    async fn park(
        &self,
        conn: &mut Connection<Self::Db>,
        limits: &Limits,
        parked: &Parked<'_>,
    ) -> Result<Parking, StoreError>;

    /// Records a failed run of a leased row. Fenced by the lease's token: `false` means that the row
    /// has another owner by now, who decides instead.
    async fn fail_leased(&self, lease: &Lease, parked: &Parked<'_>) -> Result<bool, StoreError>;

    /// Finishes a leased row whose event turned out to be processed already. Fenced.
    async fn close_leased(&self, lease: &Lease) -> Result<bool, StoreError>;

    /// Adds an event to be run as soon as possible, in a transaction of its own.
    /// `false`: an event of this identity is held already.
    async fn enqueue(&self, parked: &Parked<'_>) -> Result<bool, StoreError>;

    /// As [`enqueue`](Self::enqueue), in a transaction of the caller's: the event is there if and
    /// only if that commits. `false` also if it is processed, which that transaction may be about to do.
    async fn enqueue_in(
        &self,
        conn: &mut <Self::Db as Database>::Connection,
        parked: &Parked<'_>,
    ) -> Result<bool, StoreError>;

    /// Leases up to `max` due events of this consumer for `lease`, by the database's clock.
    async fn lease(&self, consumer: &str, max: usize, lease: Duration) -> Result<Vec<HeldEvent>, StoreError>;

    /// Renews leases and returns those that are still ours, by row id.
    async fn renew(&self, leases: &[Lease], lease: Duration) -> Result<Vec<i64>, StoreError>;

    /// Gives leased rows back, to run again not before `after`. Not an attempt. Fenced.
    async fn release_leased(&self, leases: &[Lease], after: Duration) -> Result<(), StoreError>;

    /// What waits for this consumer.
    async fn backlog(&self, consumer: &str) -> Result<Backlog, StoreError>;
}

/// How a relay learns at once that there is something to publish: a hint and never more, since it also
/// looks by itself every now and then.
#[async_trait]
pub trait Waking: Store {
    /// The signal of this relay within the process: the same for all clones of a store.
    fn signal(&self, relay: &str) -> Arc<Signal>;

    /// Whom [`tell`](Self::tell) reaches.
    fn reach(&self) -> Reach;

    /// Tells the relays of this name in all processes, on a connection of the store's own. Never in a
    /// handler's transaction: the database takes a lock over all commits that tell something.
    async fn tell(&self, relay: &str) -> Result<(), StoreError>;

    /// Listens for what [`tell`](Self::tell) tells, on a connection that is kept for it.
    async fn listen(&self, relay: &str) -> Result<Box<dyn Listener>, StoreError>;
}

/// Writes outgoing events with the work that causes them.
#[async_trait]
pub trait Outgoing: Waking {
    /// Writes rows in one statement, in this order: their ids ascend with it. They are there if and only if
    /// the transaction on `conn` commits.
    async fn write_outgoing(
        &self,
        conn: &mut <Self::Db as Database>::Connection,
        rows: &[OutgoingRow],
    ) -> Result<(), sqlx::Error>;

    /// The same for what the handlers of a consumer have sent, but only in the transaction of these claims:
    /// in another one (the handler has ended ours) it writes nothing, and the error says so. Errors are those
    /// of [`commit`](Store::commit); [`Refused`](CommitError::Refused) is about the rows. `rows` is not empty.
    async fn record_outgoing(
        &self,
        tx: &mut Tx<'_, Self::Db>,
        claims: Claims,
        rows: &[OutgoingRow],
    ) -> Result<Claims, CommitError>;

    /// Up to `limit` rows of this relay that need a person, after row `after`, by id.
    async fn parked(&self, relay: &str, after: i64, limit: usize) -> Result<Vec<ParkedRow>, StoreError>;

    /// Makes parked rows due again, with no attempts: each is a replay of its event. Returns those that were parked.
    async fn replay_parked(&self, relay: &str, ids: &[i64]) -> Result<Vec<i64>, StoreError>;

    /// Deletes parked rows; their events are never sent. Returns those that were parked.
    async fn discard_parked(&self, relay: &str, ids: &[i64]) -> Result<Vec<i64>, StoreError>;
}

/// What a relay asks of the outbox. All times are the database's clock; no statement of it is open
/// while a broker is spoken to.
#[async_trait]
pub trait Relaying: Waking {
    /// Compares the tables of the outbox with what this version needs. The error names what is missing or
    /// wrong and how to repair it.
    async fn check_outgoing(&self) -> Result<(), StoreError>;

    /// Says that this instance is alive, renews its lanes for `lease`, gives up those above its share of
    /// ceil([`LANES`] / living instances), and takes free ones up to it. Returns all that it holds now.
    ///
    /// A lane that is given up is nobody's for a third of the lease: what is in flight of it is confirmed
    /// and marked before another instance begins with it.
    async fn hold_lanes(
        &self,
        relay: &str,
        owner: Owner,
        lease: Duration,
    ) -> Result<Vec<HeldLane>, StoreError>;

    /// Gives up every lane of this instance, which is alive no more. Others may take them at once.
    async fn give_up_lanes(&self, relay: &str, owner: Owner) -> Result<(), StoreError>;

    /// Rows that may be published now, by id: of each lane the first ones. A row behind an earlier one of
    /// its key that may not is not among them.
    async fn due(&self, request: &DueRequest<'_>) -> Result<Vec<Result<DueRow, UnreadableRow>>, StoreError>;

    /// Deletes rows that the broker has confirmed, or keeps them as sent. Needs no lease: what is
    /// confirmed is confirmed. Rows that are gone already are no error.
    async fn mark_sent(&self, ids: &[i64], keep: bool) -> Result<(), StoreError>;

    /// Writes down refusals. Fenced by each one's lane; returns those that were ours to write.
    async fn mark_refused(&self, refusals: &[Refusal<'_>]) -> Result<Vec<i64>, StoreError>;

    /// What waits for this relay.
    async fn outgoing(&self, relay: &str) -> Result<OutgoingBacklog, StoreError>;

    /// Deletes up to `limit` rows that were sent longer than `kept` ago. Returns how many.
    async fn purge_sent(&self, relay: &str, kept: Duration, limit: u32) -> Result<u64, StoreError>;
}

/// What runs beside the work: the schema and retention.
#[async_trait]
pub trait Operations: Store {
    /// Creates or updates the tables. Safe when several processes start at once.
    async fn migrate(&self) -> Result<(), StoreError>;

    /// Compares the tables, the durability settings and the server's state with what this version
    /// needs. The error names what is missing or wrong and how to repair it.
    async fn check(&self, limits: &Limits) -> Result<(), StoreError>;

    /// Says that this instance of the consumer is running, forgets instances that have not said so for
    /// a week, and returns the held events of consumers that nobody runs.
    async fn seen(&self, consumer: &str, instance: Uuid) -> Result<Vec<Unread>, StoreError>;

    /// Deletes up to `limit` claims of this consumer that are older than `window`, beginning at
    /// `after` (where the last batch ended).
    async fn purge(
        &self,
        consumer: &str,
        window: Duration,
        limit: u32,
        after: PurgeCursor,
    ) -> Result<Purged, StoreError>;
}

/// Held events of a consumer that no instance has run for five minutes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unread {
    /// The consumer's name.
    pub consumer: String,
    /// How many events wait for it or are dead.
    pub held: u64,
}

/// Where the last batch of a purge ended, in microseconds since 1970 by the database's clock.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PurgeCursor(pub(crate) i64);

/// What one batch of a purge did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Purged {
    /// How many claims it deleted.
    pub rows: u64,
    /// Where the next batch begins.
    pub next: PurgeCursor,
    /// The batch was full, so there may be more.
    pub more: bool,
    /// How far the oldest claim is past the window: 0 when the purge keeps up.
    pub lag: Duration,
}

/// The limits of one transaction. The server enforces them too, so that a client that froze cannot
/// hold its locks for ever.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// The isolation level of handler transactions.
    pub isolation: Isolation,
    /// How long one lock may be waited for: a concurrent copy's claim, a row lock of the handler's.
    pub lock_timeout: Duration,
    /// How long one statement may run.
    pub statement_timeout: Duration,
    /// How long a transaction may stay idle between two statements: a little more than the handler may run.
    pub idle_timeout: Duration,
    /// How long a transaction may last in all; the server enforces it from PostgreSQL 17 on.
    pub transaction_timeout: Duration,
    /// Accept a database that may lose commits that it has confirmed.
    pub allow_async_commit: bool,
}

impl Limits {
    /// How long the answer to one statement is waited for: the server's own limit comes first.
    pub(crate) fn patience(&self) -> Duration {
        self.statement_timeout + GRACE
    }
}

/// How much longer than the server's own limit an answer is waited for. One that has not come by
/// then will not come: the link is dead.
pub(crate) const GRACE: Duration = Duration::from_secs(5);

impl Default for Limits {
    fn default() -> Self {
        Self {
            isolation: Isolation::ReadCommitted,
            lock_timeout: Duration::from_secs(2),
            statement_timeout: Duration::from_secs(30),
            idle_timeout: Duration::from_secs(35),
            transaction_timeout: Duration::from_secs(90),
            allow_async_commit: false,
        }
    }
}

/// A transaction isolation level. SQLite has one level only, which is serializable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Isolation {
    /// The default: a concurrent duplicate is answered at once when the first copy commits.
    #[default]
    ReadCommitted,
    /// A concurrent duplicate meets a serialization failure first and is run again.
    RepeatableRead,
    /// As repeatable read; the handler's own reads are checked as well.
    Serializable,
}
