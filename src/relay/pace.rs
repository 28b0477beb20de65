//! When a publisher or a destination that failed as a whole is tried again: pure.

use std::time::Duration;

use tokio::time::Instant;

use crate::delay::spread;

/// How long one is left alone, at first and at most.
const PAUSE_MIN: Duration = Duration::from_millis(200);
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Open while rows go through. A failure closes it for a while; then one row is the try, and what comes
/// of that opens it or closes it for longer.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    state: State,
    /// Failures in a row.
    failed: u32,
    /// Counts closings up. What was sent before the last of them says nothing any more: a thousand
    /// rows that fail together are one failure.
    era: u32,
    /// The last failure, in the broker's words.
    reason: String,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum State {
    #[default]
    Open,
    Closed {
        until: Instant,
    },
    /// One row is on its way to find out.
    Trying,
}

/// What may go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Admits {
    All,
    /// One row, as the try.
    One,
    Nothing,
}

impl Pace {
    pub(crate) fn admits(&self, now: Instant) -> Admits {
        match self.state {
            State::Open => Admits::All,
            State::Closed { until } if until <= now => Admits::One,
            State::Closed { .. } | State::Trying => Admits::Nothing,
        }
    }

    /// When it admits something again; `None` if it does now, or if the try will tell.
    pub(crate) fn closed_until(&self) -> Option<Instant> {
        match self.state {
            State::Closed { until } => Some(until),
            State::Open | State::Trying => None,
        }
    }

    /// Why it is not open.
    pub(crate) fn closed_because(&self) -> Option<&str> {
        (self.state != State::Open).then_some(self.reason.as_str())
    }

    /// What a row that is sent now has to say later belongs to this era.
    pub(crate) fn era(&self) -> u32 {
        self.era
    }

    /// A row goes out as the try.
    pub(crate) fn tries(&mut self) {
        self.state = State::Trying;
    }

    /// A row of this era went through, or was refused for itself. True if this opened it.
    pub(crate) fn works(&mut self, era: u32) -> bool {
        if era != self.era {
            return false;
        }
        self.failed = 0;
        std::mem::replace(&mut self.state, State::Open) != State::Open
    }

    /// A row of this era failed, and not by its own fault. True if this closed it.
    pub(crate) fn fails(&mut self, era: u32, now: Instant, reason: &str) -> bool {
        if era != self.era {
            return false;
        }
        self.era += 1;
        self.failed += 1;
        self.state = State::Closed {
            until: now + spread(PAUSE_MIN, PAUSE_MAX, self.failed),
        };
        reason.clone_into(&mut self.reason);
        true
    }

    /// A row of this era has ended and said nothing. If it was the try, another one has to be.
    pub(crate) fn learns_nothing(&mut self, era: u32, now: Instant) {
        if era == self.era && self.state == State::Trying {
            self.state = State::Closed { until: now };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_fails_together_is_one_failure_and_one_row_is_the_try() {
        let mut pace = Pace::default();
        let (began, era) = (Instant::now(), pace.era());
        assert_eq!(pace.admits(began), Admits::All);
        assert!(pace.fails(era, began, "down"));
        assert!(
            !pace.fails(era, began, "down"),
            "sent before the first failure was known"
        );
        assert!(!pace.works(era), "nor does a straggler open it");
        assert_eq!((pace.failed, pace.closed_because()), (1, Some("down")));
        assert_eq!(pace.admits(began), Admits::Nothing);

        let until = pace.closed_until().unwrap();
        assert!(until >= began + PAUSE_MIN && until <= began + PAUSE_MIN * 2);
        assert_eq!(pace.admits(until), Admits::One);
        pace.tries();
        assert_eq!((pace.admits(until), pace.closed_until()), (Admits::Nothing, None));
        pace.learns_nothing(pace.era(), until);
        assert_eq!(pace.admits(until), Admits::One, "another row has to try");
        pace.tries();
        assert!(pace.works(pace.era()));
        assert_eq!((pace.admits(until), pace.closed_because()), (Admits::All, None));
        assert!(!pace.works(pace.era()), "it is open already");
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_grow_and_stay_within_bounds() {
        let mut pace = Pace::default();
        let mut now = Instant::now();
        for _ in 0..5000 {
            pace.fails(pace.era(), now, "down");
            let until = pace.closed_until().unwrap();
            assert!(until - now <= PAUSE_MAX * 2);
            now = until;
            pace.tries();
        }
        assert!(now.elapsed().is_zero());
        pace.works(pace.era());
        pace.fails(pace.era(), now, "down");
        assert!(
            pace.closed_until().unwrap() - now <= PAUSE_MIN * 2,
            "a success makes the next pause short"
        );
    }
}
