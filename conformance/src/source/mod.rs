//! The promises of a source, one per file, and what an adapter brings for them.

mod bytes_survive;
mod delivers_everything;
mod effects_happen_once;
mod life;
mod listens_without_room;
mod lost_receipts_are_void;
mod nothing_is_acked_before_its_commit;
mod order_per_key;
mod order_survives_release;
mod pause_gives_back;
mod receipts_are_unique;
mod receive_is_cancel_safe;
mod receives_at_most_max;
mod redelivers_what_was_not_acked;
mod redelivery_is_marked;
mod release_after_waits;
mod release_gives_back;
mod says_what_it_promises;
mod settles_twice_and_late;
mod stop_closes_last;
mod stop_gives_back;
mod stops_in_the_middle;
mod survives_kills;
mod tap;
mod waits_when_there_is_nothing;

use std::time::Duration;

use onlyonce::async_trait;
use onlyonce::event::RawEvent;
use onlyonce::source::{Capabilities, Delivery, Plan, Source};
use onlyonce::store::Outgoing;

pub use bytes_survive::bytes_survive;
pub use delivers_everything::delivers_everything;
pub use effects_happen_once::effects_happen_once;
pub use listens_without_room::listens_without_room;
pub use lost_receipts_are_void::lost_receipts_are_void;
pub use nothing_is_acked_before_its_commit::nothing_is_acked_before_its_commit;
pub use order_per_key::order_per_key;
pub use order_survives_release::order_survives_release;
pub use pause_gives_back::pause_gives_back;
pub use receipts_are_unique::receipts_are_unique;
pub use receive_is_cancel_safe::receive_is_cancel_safe;
pub use receives_at_most_max::receives_at_most_max;
pub use redelivers_what_was_not_acked::redelivers_what_was_not_acked;
pub use redelivery_is_marked::redelivery_is_marked;
pub use release_after_waits::release_after_waits;
pub use release_gives_back::release_gives_back;
pub use says_what_it_promises::says_what_it_promises;
pub use settles_twice_and_late::settles_twice_and_late;
pub use stop_closes_last::stop_closes_last;
pub use stop_gives_back::stop_gives_back;
pub use stops_in_the_middle::stops_in_the_middle;
pub use survives_kills::survives_kills;
pub use waits_when_there_is_nothing::waits_when_there_is_nothing;

use crate::{CONSUMER, Result, StoreHarness};

/// What an adapter's test brings: a queue of its own for each promise, and hands on the broker.
#[async_trait]
pub trait SourceHarness: Sized + Send + Sync + 'static {
    /// The source that is put to the test.
    type Source: Source;

    /// The database of promises that need a whole consumer; [`Sqlite`](crate::Sqlite), unless the
    /// source reads from a database itself.
    type Stage: StoreHarness<Store: Outgoing>;

    /// An empty queue that nobody else uses. `None`: there is no broker to be had; say why.
    async fn empty() -> Result<Option<Self>>;

    /// What the source must say of itself. Write it down rather than asking the source: a source
    /// that forgets to promise something is not tested for it.
    fn expected(&self) -> Capabilities;

    /// What this broker, and this harness, can do.
    fn capabilities(&self) -> HarnessCapabilities {
        HarnessCapabilities::default()
    }

    /// A source on this queue, not started. There is one at a time: a promise that wants a second
    /// one stops or drops the first.
    fn source(&self) -> Self::Source;

    /// What the source is started with.
    fn plan(&self, window: usize) -> Plan {
        Plan::for_window(CONSUMER, window)
    }

    /// Publishes these events, in this order, and returns when the broker has them. Key, payload,
    /// headers and event type are to be carried as the source reads them; the identity is in the
    /// headers `onlyonce-event-id` and `onlyonce-event-source`.
    async fn publish(&self, events: Vec<RawEvent>) -> Result;

    /// What the transaction that processed a delivery does to the queue itself, called before each ack
    /// of the suite's own. Only a source that reads from the database of the work has anything to do.
    async fn committed(&self, delivery: &Delivery) -> Result {
        let _ = delivery;
        Ok(())
    }

    /// How many messages the queue has, where the broker can be asked.
    async fn depth(&self) -> Result<Option<Depth>> {
        Ok(None)
    }

    /// Severs what the source has with the broker, as a network or an operator does, and makes what
    /// was unacked be delivered again. Called where [`HarnessCapabilities::cuts`] says so.
    async fn cut(&self) -> Result {
        Ok(())
    }

    /// An empty database for a consumer's effects.
    async fn stage(&self) -> Result<Self::Stage>;

    /// Removes the queue. Also called after a failure.
    async fn end(self) -> Result {
        Ok(())
    }
}

/// How many messages a queue has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Depth {
    /// Those that no consumer has.
    pub waiting: u64,
    /// Those that a consumer has and did not ack.
    pub unacked: u64,
}

/// What a broker, and the harness around it, can do. Start from the default, which is a kind broker
/// that carries everything, and take away.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct HarnessCapabilities {
    /// How long to wait for what must happen. Default 30 s: test machines are busy.
    pub patience: Duration,
    /// How long to wait before believing that nothing happens. Default 400 ms.
    pub quiet: Duration,
    /// The delay that is asked for when a release is delayed. Default 600 ms; a whole number of
    /// seconds where the broker counts in seconds.
    pub delay: Duration,
    /// How long it takes until what a dead source had is delivered again: a visibility timeout, a
    /// session timeout. Default 0: the broker notices.
    pub redelivered_after: Duration,
    /// Two messages with one identity are two messages. Default true; false where the broker
    /// deduplicates.
    pub keeps_copies: bool,
    /// The broker may deliver twice without a reason that one could see. Default false.
    pub may_repeat: bool,
    /// While some events of a key are in hand, the broker hands out no more of that key. Default false.
    pub withholds_keys: bool,
    /// An ack is for one message and not for all before it. Default true; false for logs.
    pub acks_singly: bool,
    /// [`SourceHarness::cut`] works. Default false.
    pub cuts: bool,
    /// A release marks or counts the redelivery, as a death does. Default true.
    pub release_marks: bool,
    /// Ordering keys are carried. Default true.
    pub keys: bool,
    /// Event types are carried. Default true.
    pub event_types: bool,
    /// A body may be empty. Default true.
    pub empty_payload: bool,
    /// A body may be null, which is not empty. Default true.
    pub null_payload: bool,
    /// A body may be any bytes. Default true.
    pub binary_payload: bool,
    /// A header's name may stand there twice. Default true.
    pub repeated_headers: bool,
    /// A header may have no value. Default true.
    pub null_headers: bool,
    /// A header may be empty. Default true.
    pub empty_headers: bool,
    /// A header may be any bytes. Default true.
    pub binary_headers: bool,
    /// The order of headers is kept. Default true.
    pub ordered_headers: bool,
    /// The largest body that is tried. Default 200,000 bytes.
    pub large_payload: usize,
}

impl Default for HarnessCapabilities {
    fn default() -> Self {
        Self {
            patience: Duration::from_secs(30),
            quiet: Duration::from_millis(400),
            delay: Duration::from_millis(600),
            redelivered_after: Duration::ZERO,
            keeps_copies: true,
            may_repeat: false,
            withholds_keys: false,
            acks_singly: true,
            cuts: false,
            release_marks: true,
            keys: true,
            event_types: true,
            empty_payload: true,
            null_payload: true,
            binary_payload: true,
            repeated_headers: true,
            null_headers: true,
            empty_headers: true,
            binary_headers: true,
            ordered_headers: true,
            large_payload: 200_000,
        }
    }
}
