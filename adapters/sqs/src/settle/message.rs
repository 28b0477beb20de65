//! One message: its deliveries, what was said of them, and until when it is ours.

use std::time::Duration;

use onlyonce::event::RawEvent;
use onlyonce::source::Redelivery;
use tokio::time::Instant;

/// Nothing stays invisible for longer than this after it was received.
pub(crate) const LONGEST_HOLD: Duration = Duration::from_secs(12 * 3600);

/// A message as it was received: one delivery for each event in it.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) handle: String,
    /// Of a FIFO queue: what SQS keeps in order.
    pub(crate) group: Option<String>,
    pub(crate) redelivery: Redelivery,
    pub(crate) events: Vec<RawEvent>,
}

/// A message in hand.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) handle: String,
    pub(super) group: Option<String>,
    /// Its deliveries that have no verdict, whether handed out or not.
    pub(super) open: usize,
    /// One of its deliveries is to come again, and not before this.
    pub(super) released: Option<Instant>,
    /// Ours until then.
    pub(super) expires: Instant,
    /// Twelve hours after it was received; not to be moved.
    pub(super) ends: Instant,
    /// When it is to be looked at: a renewal, another try, or the end. It stands under this in `timers`.
    pub(super) look_at: Instant,
    pub(super) calling: bool,
    pub(super) failures: u32,
}

impl Message {
    /// One with this many deliveries, from a call that was sent at `sent`.
    pub(super) fn new(
        sent: Instant,
        visibility: Duration,
        handle: String,
        group: Option<String>,
        open: usize,
    ) -> Self {
        let ends = sent + LONGEST_HOLD;
        Self {
            handle,
            group,
            open,
            released: None,
            expires: (sent + visibility).min(ends),
            ends,
            look_at: sent + visibility / 3,
            calling: false,
            failures: 0,
        }
    }

    /// Not so at the end of the twelve hours.
    pub(super) fn is_renewable(&self) -> bool {
        self.open > 0 && !self.calling && self.ends >= self.expires + Duration::from_secs(1)
    }

    pub(super) fn verdict(&self) -> Verdict {
        match self.released {
            _ if self.open > 0 => Verdict::Open,
            Some(not_before) => Verdict::GiveBack(not_before),
            None => Verdict::Delete,
        }
    }
}

/// What its deliveries say together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Not all of them have said something.
    Open,
    /// It is to come again, and not before this.
    GiveBack(Instant),
    Delete,
}
