//! The promises of a store, one per file, and what its test brings for them.

mod abandoned_work_frees_its_locks;
mod answers_have_their_precedence;
mod attempts_add_up;
mod batches_are_answered_in_order;
mod bench;
mod business_claims_go_with_their_transaction;
mod busy_is_bounded;
mod check_names_what_is_missing;
mod claims_ahead_are_for_their_own_event;
mod claims_tell_what_they_found;
mod commit_is_durable;
mod commits_by_the_handler_are_found;
mod copies_wait_for_each_other;
mod deferred_constraints_are_refused;
mod due_rows_wait_for_their_key;
mod enqueues_once;
mod guard_lets_nothing_half_done_pass;
mod held_events_stand_in_their_own_way;
mod inbox_keeps_every_byte;
mod lanes_are_shared_and_fenced;
mod leaked_savepoints_commit_whole_or_not;
mod leases_are_exclusive;
mod migrations_can_be_repeated;
mod outgoing_bench;
mod outgoing_goes_with_its_transaction;
mod outgoing_keeps_order_and_bytes;
mod parked_rows_are_replayed_or_discarded;
mod parking_gives_the_claim_back;
mod probe_answers;
mod purge_respects_the_window;
mod refusals_are_fenced;
mod rollback_leaves_no_claim;
mod sent_rows_are_never_due;
mod success_finishes_the_held_row;
mod tokens_fence;

use std::time::Duration;

use onlyonce::async_trait;
use onlyonce::store::{Inbox, Operations, Outgoing, Relaying, Store};
use sqlx::Database;

pub use abandoned_work_frees_its_locks::abandoned_work_frees_its_locks;
pub use answers_have_their_precedence::answers_have_their_precedence;
pub use attempts_add_up::attempts_add_up;
pub use batches_are_answered_in_order::batches_are_answered_in_order;
pub use business_claims_go_with_their_transaction::business_claims_go_with_their_transaction;
pub use busy_is_bounded::busy_is_bounded;
pub use check_names_what_is_missing::check_names_what_is_missing;
pub use claims_ahead_are_for_their_own_event::claims_ahead_are_for_their_own_event;
pub use claims_tell_what_they_found::claims_tell_what_they_found;
pub use commit_is_durable::commit_is_durable;
pub use commits_by_the_handler_are_found::commits_by_the_handler_are_found;
pub use copies_wait_for_each_other::copies_wait_for_each_other;
pub use deferred_constraints_are_refused::deferred_constraints_are_refused;
pub use due_rows_wait_for_their_key::due_rows_wait_for_their_key;
pub use enqueues_once::enqueues_once;
pub use guard_lets_nothing_half_done_pass::guard_lets_nothing_half_done_pass;
pub use held_events_stand_in_their_own_way::held_events_stand_in_their_own_way;
pub use inbox_keeps_every_byte::inbox_keeps_every_byte;
pub use lanes_are_shared_and_fenced::lanes_are_shared_and_fenced;
pub use leaked_savepoints_commit_whole_or_not::leaked_savepoints_commit_whole_or_not;
pub use leases_are_exclusive::leases_are_exclusive;
pub use migrations_can_be_repeated::migrations_can_be_repeated;
pub use outgoing_goes_with_its_transaction::outgoing_goes_with_its_transaction;
pub use outgoing_keeps_order_and_bytes::outgoing_keeps_order_and_bytes;
pub use parked_rows_are_replayed_or_discarded::parked_rows_are_replayed_or_discarded;
pub use parking_gives_the_claim_back::parking_gives_the_claim_back;
pub use probe_answers::probe_answers;
pub use purge_respects_the_window::purge_respects_the_window;
pub use refusals_are_fenced::refusals_are_fenced;
pub use rollback_leaves_no_claim::rollback_leaves_no_claim;
pub use sent_rows_are_never_due::sent_rows_are_never_due;
pub use success_finishes_the_held_row::success_finishes_the_held_row;
pub use tokens_fence::tokens_fence;

use crate::Result;

/// The sqlx database of a harness's store.
pub type Db<H> = <<H as StoreHarness>::Store as Store>::Db;

/// A connection to it.
pub type Conn<H> = <Db<H> as Database>::Connection;

/// What a store's test brings: a database of its own for each promise, and a second pair of eyes.
#[async_trait]
pub trait StoreHarness: Sized + Send + Sync + 'static {
    /// The store that is put to the test.
    type Store: Inbox + Outgoing + Relaying + Operations;

    /// An empty database (or schema) without any of the tables. `None`: there is no server to be had;
    /// say why.
    async fn empty() -> Result<Option<Self>>;

    /// A store on this database with connections of its own, as another process has them.
    async fn store(&self) -> Result<Self::Store>;

    /// The name in SQL of a table, such as `inbox`, or of one of the suite's own.
    fn table(&self, name: &str) -> String;

    /// Runs statements on this connection, inside the transaction that it has open.
    async fn sql_in(conn: &mut Conn<Self>, sql: &str) -> std::result::Result<(), sqlx::Error>;

    /// Runs statements from outside, on a connection that the store does not know.
    async fn sql(&self, sql: &str) -> Result;

    /// A number, read from outside.
    async fn number(&self, sql: &str) -> Result<i64>;

    /// Makes every claim older by this much.
    async fn age_claims(&self, by: Duration) -> Result;

    /// Removes the database. Also called after a failure.
    async fn end(self) -> Result;
}
