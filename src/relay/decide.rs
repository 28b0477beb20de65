//! What the end of a publish means for the row, its destination and its publisher: pure, no clock, no I/O.

use std::time::Duration;

use super::retry::Retries;
use crate::publisher::PublishErrorKind;

/// What is known of a row when its publish ends.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Standing {
    /// How often it was refused so far.
    pub(crate) attempts: u32,
    /// Nothing else was on its way to its publisher, so nothing else can have cost the connection.
    pub(crate) alone: bool,
    /// How often in a row the connection died with it alone.
    pub(crate) died_alone: u32,
}

/// What becomes of the row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// The broker has it: mark it.
    Sent,
    /// An attempt of its own: write it down, and try again after this long or park it.
    Refused { again: Option<Duration> },
    /// Nothing was said about it: it is as due as before.
    Due,
    /// It may have cost the connection: it is as due as before, and goes alone.
    Suspect,
}

/// What the end of a publish says about everybody else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Says {
    Works,
    Fails,
    Nothing,
}

/// What the end of a publish means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Decision {
    pub(crate) row: Fate,
    pub(crate) destination: Says,
    pub(crate) publisher: Says,
}

/// A row that the connection does not survive this often in a row, with nothing else on it, is to blame.
const TO_BLAME: u32 = 2;

pub(crate) fn decide(
    result: Result<(), PublishErrorKind>,
    standing: Standing,
    retries: &Retries,
) -> Decision {
    let refused = || Fate::Refused {
        again: retries.after(standing.attempts + 1),
    };
    let (row, destination, publisher) = match result {
        Ok(()) => (Fate::Sent, Says::Works, Says::Works),
        Err(PublishErrorKind::Invalid) => (Fate::Refused { again: None }, Says::Works, Says::Works),
        Err(PublishErrorKind::Refused) => (refused(), Says::Works, Says::Works),
        Err(PublishErrorKind::Destination) => (Fate::Due, Says::Fails, Says::Works),
        Err(PublishErrorKind::Unavailable) => (Fate::Due, Says::Nothing, Says::Fails),
        // With others on their way nobody knows whose fault it was, and going on is how to find out.
        Err(PublishErrorKind::Interrupted) if !standing.alone => {
            (Fate::Suspect, Says::Nothing, Says::Nothing)
        }
        Err(PublishErrorKind::Interrupted) if standing.died_alone + 1 < TO_BLAME => {
            (Fate::Suspect, Says::Nothing, Says::Fails)
        }
        Err(PublishErrorKind::Interrupted) => (refused(), Says::Nothing, Says::Fails),
    };
    Decision {
        row,
        destination,
        publisher,
    }
}

#[cfg(test)]
mod tests {
    use PublishErrorKind::{Destination, Interrupted, Invalid, Refused, Unavailable};
    use Says::{Fails, Nothing, Works};

    use super::*;

    const PARKED: Fate = Fate::Refused { again: None };

    fn kinds(decision: Decision) -> (Fate, Says, Says) {
        let row = match decision.row {
            Fate::Refused { again: Some(_) } => Fate::Refused {
                again: Some(Duration::ZERO),
            },
            other => other,
        };
        (row, decision.destination, decision.publisher)
    }

    #[test]
    fn each_end_says_what_it_can_and_no_more() {
        let again = Fate::Refused {
            again: Some(Duration::ZERO),
        };
        let (fresh, last) = (0, 9);
        for (result, attempts, alone, died_alone, row, destination, publisher) in [
            (Ok(()), fresh, false, 0, Fate::Sent, Works, Works),
            (Ok(()), last, true, 1, Fate::Sent, Works, Works),
            (Err(Invalid), fresh, false, 0, PARKED, Works, Works),
            (Err(Refused), fresh, false, 0, again, Works, Works),
            (Err(Refused), last, false, 0, PARKED, Works, Works),
            (Err(Destination), last, false, 0, Fate::Due, Fails, Works),
            (Err(Unavailable), last, true, 1, Fate::Due, Nothing, Fails),
            (Err(Interrupted), last, false, 0, Fate::Suspect, Nothing, Nothing),
            (Err(Interrupted), last, false, 1, Fate::Suspect, Nothing, Nothing),
            (Err(Interrupted), last, true, 0, Fate::Suspect, Nothing, Fails),
            (Err(Interrupted), fresh, true, 1, again, Nothing, Fails),
            (Err(Interrupted), last, true, 1, PARKED, Nothing, Fails),
        ] {
            let standing = Standing {
                attempts,
                alone,
                died_alone,
            };
            let decision = decide(result, standing, &Retries::default());
            assert_eq!(
                kinds(decision),
                (row, destination, publisher),
                "{result:?} {standing:?}"
            );
        }
    }

    #[test]
    fn a_broker_that_is_down_for_a_day_counts_for_nobody() {
        let mut standing = Standing::default();
        for nth in 0..86_400 {
            standing.alone = nth % 2 == 0;
            let decision = decide(Err(Unavailable), standing, &Retries::default());
            assert_eq!(decision.row, Fate::Due);
        }
    }
}
