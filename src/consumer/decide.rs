//! What to do about a failure: pure, no clock, no I/O. `recover.rs` acts on it.

use std::fmt::Write as _;
use std::time::Duration;

use super::policy::{Ordering, Retry, RetryPolicy};
use crate::delay::spread;
use crate::event::EventKey;
use crate::handler::{FailureKind, Fault};
use crate::reason::Reason;
use crate::store::{Claims, CommitError, OutgoingRow, StoreError, StoreErrorKind};

/// How one run of an event ended without its commit.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The handler returned an error.
    Handler {
        kind: FailureKind,
        fault: Fault,
        error: String,
    },
    /// The handler panicked.
    Panic(String),
    /// The handler ran out of time, or its session was ended by a limit of ours.
    Timeout(String),
    /// The handler swallowed a failed statement: the transaction was ours but aborted.
    Aborted(String),
    /// A constraint refused the handler's work at COMMIT.
    Refused(String),
    /// The handler left its connection in the middle of something.
    OutOfStep,
    /// The handler ended our transaction by itself; part of its work may stand.
    Escaped {
        /// What was claimed in it.
        claimed: Vec<EventKey>,
        /// What happened, and what was to be sent.
        error: String,
    },
    /// A statement of ours lost against another transaction.
    Contention(String),
    /// A copy of the event is running elsewhere for longer than we wait.
    Busy(String),
    /// The database cannot be worked with.
    Unavailable(String),
    /// The connection died during COMMIT.
    UnknownCommit(String),
    /// The stop's deadline cut the handler off.
    Stopped,
}

/// What has happened to the event so far.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Counts {
    /// Attempts that failed, durably counted or not.
    pub attempts: u32,
    /// Times in a row that it lost against other transactions.
    pub contention: u32,
    /// Times in a row that its handler lost a connection although the database answers.
    pub lost: u32,
}

/// What becomes of the event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Run it again in this lane.
    Again { after: Duration },
    /// Wait until the database is well, then run it again in this lane.
    Pause,
    /// Somebody else is at it: give it back for a while (or wait here, where order forbids that).
    Later { after: Duration },
    /// Hold it in `inbox` and run it again from there.
    Hold { after: Duration },
    /// Hold it for a person.
    Dead { reason: Reason },
    /// Commit its claim alone.
    Discard,
    /// Give it back at once; it did not fail.
    GiveBack,
}

/// How long a copy that is busy elsewhere is left alone.
const BUSY: Duration = Duration::from_secs(1);

/// From this many lost connections in a row on, with a database that answers, each is an attempt.
const LOST: u32 = 3;

/// Whether this failure is an attempt of the handler's. `counts` already include it where it is a
/// contention or a lost connection.
pub(crate) fn is_attempt(failure: &Failure, counts: &Counts, policy: &RetryPolicy) -> bool {
    match failure {
        Failure::Handler {
            kind: FailureKind::Discard,
            ..
        } => false,
        Failure::Handler {
            kind: FailureKind::Retry { .. },
            fault: Fault::Contention,
            ..
        } => counts.contention >= policy.contention_limit(),
        Failure::Handler {
            kind: FailureKind::Retry { .. },
            fault: Fault::Lost,
            ..
        } => counts.lost >= LOST,
        Failure::Handler { .. }
        | Failure::Panic(_)
        | Failure::Timeout(_)
        | Failure::Aborted(_)
        | Failure::Refused(_)
        | Failure::OutOfStep
        | Failure::Escaped { .. } => true,
        Failure::Contention(_)
        | Failure::Busy(_)
        | Failure::Unavailable(_)
        | Failure::UnknownCommit(_)
        | Failure::Stopped => false,
    }
}

/// What becomes of the event. `counts` include this failure.
pub(crate) fn decide(
    failure: &Failure,
    counts: &Counts,
    policy: &RetryPolicy,
    ordering: Ordering,
) -> Decision {
    match failure {
        Failure::Handler {
            kind: FailureKind::Permanent,
            ..
        } => Decision::Dead {
            reason: Reason::PermanentError,
        },
        Failure::Handler {
            kind: FailureKind::Undecodable,
            ..
        } => Decision::Dead {
            reason: Reason::Undecodable,
        },
        Failure::Handler {
            kind: FailureKind::UnknownEventType,
            ..
        } => Decision::Dead {
            reason: Reason::UnknownEventType,
        },
        Failure::Escaped { .. } => Decision::Dead {
            reason: Reason::TransactionEscaped,
        },
        Failure::Handler {
            kind: FailureKind::Discard,
            ..
        } => Decision::Discard,

        Failure::Stopped => Decision::GiveBack,
        Failure::Unavailable(_) | Failure::UnknownCommit(_) => Decision::Pause,
        // A database that lets us lose for ever is not well.
        Failure::Contention(_) if counts.contention > policy.contention_limit() => Decision::Pause,
        Failure::Contention(_) => Decision::Again {
            after: contended(counts.contention),
        },
        Failure::Busy(_) if ordering == Ordering::PerKey => Decision::Again { after: BUSY },
        Failure::Busy(_) => Decision::Later { after: BUSY },

        Failure::Handler { fault, .. } if !is_attempt(failure, counts, policy) => match fault {
            Fault::Lost => Decision::Again {
                after: contended(counts.lost),
            },
            _ => Decision::Again {
                after: contended(counts.contention),
            },
        },
        Failure::Handler {
            kind: FailureKind::Retry { after: Some(wish) },
            ..
        } => {
            match retry(counts, policy, ordering) {
                // Short waits are not worth a row; and where order forbids letting go, the lane waits.
                Decision::Again { after }
                    if ordering == Ordering::PerKey || *wish <= Duration::from_secs(1) =>
                {
                    Decision::Again {
                        after: after.max(*wish),
                    }
                }
                Decision::Again { .. } => Decision::Hold { after: *wish },
                Decision::Hold { after } => Decision::Hold {
                    after: after.max(*wish),
                },
                decided => decided,
            }
        }
        Failure::Handler { .. }
        | Failure::Panic(_)
        | Failure::Timeout(_)
        | Failure::Aborted(_)
        | Failure::Refused(_)
        | Failure::OutOfStep => retry(counts, policy, ordering),
    }
}

fn retry(counts: &Counts, policy: &RetryPolicy, ordering: Ordering) -> Decision {
    match policy.after(counts.attempts) {
        Retry::InPlace { after } => Decision::Again { after },
        // A held event would be overtaken by the later ones of its key.
        Retry::Delayed { after } if ordering == Ordering::Unordered => Decision::Hold { after },
        Retry::Delayed { .. } | Retry::Never => Decision::Dead {
            reason: Reason::RetriesExhausted,
        },
    }
}

fn contended(times: u32) -> Duration {
    spread(Duration::from_millis(5), Duration::from_millis(500), times)
}

impl Failure {
    /// What the failure of a whole batch already says about one of its events. Work that may stand
    /// must not be done again; everything else was rolled back, and the event is run on its own.
    pub(crate) fn of_one(&self, key: EventKey) -> Option<Self> {
        match self {
            Self::Escaped { claimed, error } if claimed.contains(&key) => Some(Self::Escaped {
                claimed: vec![key],
                error: error.clone(),
            }),
            _ => None,
        }
    }

    /// Whether the connection may be inside a statement, in a foreign transaction, or dead.
    pub(crate) fn spoils_connection(&self) -> bool {
        matches!(
            self,
            Self::Timeout(_)
                | Self::Stopped
                | Self::Escaped { .. }
                | Self::OutOfStep
                | Self::Unavailable(_)
                | Self::UnknownCommit(_)
                | Self::Handler {
                    fault: Fault::Lost,
                    ..
                }
        )
    }

    /// The word that is stored with the attempt.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Handler {
                kind: FailureKind::Permanent,
                ..
            } => "permanent",
            Self::Handler {
                kind: FailureKind::Undecodable,
                ..
            } => "undecodable",
            Self::Handler {
                kind: FailureKind::UnknownEventType,
                ..
            } => "unknown_event_type",
            Self::Handler {
                kind: FailureKind::Discard,
                ..
            } => "discard",
            Self::Handler {
                fault: Fault::Contention,
                ..
            }
            | Self::Contention(_) => "contention",
            Self::Handler {
                fault: Fault::Lost, ..
            } => "connection_lost",
            Self::Handler { .. } => "error",
            Self::Panic(_) => "panic",
            Self::Timeout(_) => "timeout",
            Self::Aborted(_) => "transaction_aborted",
            Self::Refused(_) => "commit_refused",
            Self::OutOfStep => "out_of_step",
            Self::Escaped { .. } => "transaction_escaped",
            Self::Busy(_) => "busy",
            Self::Unavailable(_) => "unavailable",
            Self::UnknownCommit(_) => "commit_unknown",
            Self::Stopped => "stopped",
        }
    }

    /// What went wrong, in words.
    pub(crate) fn text(&self) -> &str {
        match self {
            Self::Handler { error, .. } | Self::Escaped { error, .. } => error,
            Self::Panic(text)
            | Self::Timeout(text)
            | Self::Aborted(text)
            | Self::Refused(text)
            | Self::Contention(text)
            | Self::Busy(text)
            | Self::Unavailable(text)
            | Self::UnknownCommit(text) => text,
            Self::OutOfStep => {
                "the handler left its connection in the middle of a COPY (wait for finish() or abort(), also when time is up)"
            }
            Self::Stopped => "the stop's deadline cut the handler off",
        }
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        let text = error.to_string();
        match error.kind() {
            StoreErrorKind::Contention => Self::Contention(text),
            StoreErrorKind::Busy => Self::Busy(text),
            // Whatever else a statement of ours meets is the database's trouble and never the event's.
            StoreErrorKind::Data | StoreErrorKind::Unavailable | StoreErrorKind::Misconfigured => {
                Self::Unavailable(text)
            }
        }
    }
}

impl Failure {
    /// Why a transaction was not committed in which this was to be sent.
    pub(super) fn of_commit(error: CommitError, outgoing: &[OutgoingRow]) -> Self {
        match error {
            CommitError::Aborted(e) => Self::Aborted(format!(
                "a failed statement was swallowed and the transaction is aborted: {e}"
            )),
            CommitError::Escaped(claims) => Self::escaped(claims, outgoing),
            CommitError::OutOfStep => Self::OutOfStep,
            CommitError::Store(e) => e.into(),
            CommitError::Refused(e) => Self::Refused(e.to_string()),
            CommitError::Contention(e) => Self::Contention(e.to_string()),
            CommitError::Unknown(e) => Self::UnknownCommit(e.to_string()),
        }
    }

    /// Its letter names what was not sent: whoever mends by hand what stands may have to send it, too.
    pub(super) fn escaped(claims: Claims, outgoing: &[OutgoingRow]) -> Self {
        let mut error = "the handler ended the framework's transaction itself (COMMIT or ROLLBACK through cx.tx()); part of \
                         its work may stand"
            .to_owned();
        if !outgoing.is_empty() {
            let _ = write!(error, "; outgoing events not written: {}", outgoing.len());
        }
        for (n, row) in outgoing.iter().enumerate() {
            let separator = if n == 0 { " (" } else { ", " };
            let event_type = row.message.event_type.as_deref().unwrap_or("tombstone");
            let _ = write!(
                error,
                "{separator}{event_type} {} to {}",
                row.message.event_id, row.destination
            );
            // No more is stored of a failure.
            if error.len() > 1024 {
                break;
            }
        }
        if !outgoing.is_empty() {
            error.push(')');
        }
        Self::Escaped {
            claimed: claims.keys,
            error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handler(kind: FailureKind, fault: Fault) -> Failure {
        Failure::Handler {
            kind,
            fault,
            error: "e".into(),
        }
    }

    fn retry_kind() -> FailureKind {
        FailureKind::Retry { after: None }
    }

    /// What is decided after `attempts` failures; delays are checked in the policy's own tests.
    fn after(failure: &Failure, attempts: u32, ordering: Ordering) -> &'static str {
        let counts = Counts {
            attempts,
            ..Counts::default()
        };
        match decide(failure, &counts, &RetryPolicy::default(), ordering) {
            Decision::Again { .. } => "again",
            Decision::Pause => "pause",
            Decision::Later { .. } => "later",
            Decision::Hold { .. } => "hold",
            Decision::Dead { reason } => reason.as_str(),
            Decision::Discard => "discard",
            Decision::GiveBack => "give back",
        }
    }

    #[test]
    fn the_table_of_failures() {
        use Ordering::{PerKey, Unordered};
        let text = String::new;
        let own = || handler(retry_kind(), Fault::Own);
        let escaped = Failure::Escaped {
            claimed: Vec::new(),
            error: text(),
        };
        for (failure, attempts, ordering, decision) in [
            (own(), 1, Unordered, "again"),
            (own(), 3, Unordered, "again"),
            (own(), 4, Unordered, "hold"),
            (own(), 7, Unordered, "hold"),
            (own(), 8, Unordered, "retries_exhausted"),
            (own(), 3, PerKey, "again"),
            (own(), 4, PerKey, "retries_exhausted"),
            (Failure::Panic(text()), 1, Unordered, "again"),
            (Failure::Timeout(text()), 4, Unordered, "hold"),
            (Failure::Aborted(text()), 1, Unordered, "again"),
            (Failure::Refused(text()), 8, Unordered, "retries_exhausted"),
            (Failure::OutOfStep, 1, PerKey, "again"),
            (escaped, 1, Unordered, "transaction_escaped"),
            (
                handler(FailureKind::Permanent, Fault::Own),
                1,
                Unordered,
                "permanent_error",
            ),
            (
                handler(FailureKind::Undecodable, Fault::Own),
                1,
                PerKey,
                "undecodable",
            ),
            (
                handler(FailureKind::UnknownEventType, Fault::Own),
                1,
                Unordered,
                "unknown_event_type",
            ),
            (handler(FailureKind::Discard, Fault::Own), 0, Unordered, "discard"),
            (Failure::Busy(text()), 0, Unordered, "later"),
            (Failure::Busy(text()), 0, PerKey, "again"),
            (Failure::Unavailable(text()), 99, Unordered, "pause"),
            (Failure::UnknownCommit(text()), 99, PerKey, "pause"),
            (Failure::Contention(text()), 99, Unordered, "again"),
            (Failure::Stopped, 99, Unordered, "give back"),
        ] {
            assert_eq!(
                after(&failure, attempts, ordering),
                decision,
                "{failure:?} after {attempts}, {ordering:?}"
            );
        }
    }

    #[test]
    fn what_is_not_the_handlers_fault_is_never_an_attempt() {
        let policy = RetryPolicy::default();
        let many = Counts {
            attempts: 0,
            contention: 1000,
            lost: 1000,
        };
        let text = String::new;
        for failure in [
            Failure::Contention(text()),
            Failure::Busy(text()),
            Failure::Unavailable(text()),
            Failure::UnknownCommit(text()),
            Failure::Stopped,
        ] {
            assert!(!is_attempt(&failure, &many, &policy), "{failure:?}");
        }
    }

    #[test]
    fn contention_and_lost_connections_count_only_in_a_row() {
        let policy = RetryPolicy::default();
        let contended = handler(retry_kind(), Fault::Contention);
        let lost = handler(retry_kind(), Fault::Lost);
        for n in 1..10 {
            assert!(!is_attempt(
                &contended,
                &Counts {
                    contention: n,
                    ..Counts::default()
                },
                &policy
            ));
        }
        assert!(is_attempt(
            &contended,
            &Counts {
                contention: 10,
                ..Counts::default()
            },
            &policy
        ));
        assert!(!is_attempt(
            &lost,
            &Counts {
                lost: 2,
                ..Counts::default()
            },
            &policy
        ));
        assert!(is_attempt(
            &lost,
            &Counts {
                lost: 3,
                ..Counts::default()
            },
            &policy
        ));
    }

    #[test]
    fn a_wish_for_a_later_retry_is_kept_within_the_policy() {
        let wish = Duration::from_secs(30);
        let failure = handler(FailureKind::Retry { after: Some(wish) }, Fault::Own);
        let decided = |attempts, ordering| {
            decide(
                &failure,
                &Counts {
                    attempts,
                    ..Counts::default()
                },
                &RetryPolicy::default(),
                ordering,
            )
        };
        assert_eq!(decided(1, Ordering::Unordered), Decision::Hold { after: wish });
        assert!(matches!(decided(4, Ordering::Unordered), Decision::Hold { after } if after == wish));
        assert!(matches!(decided(1, Ordering::PerKey), Decision::Again { after } if after == wish));
        assert_eq!(
            decided(8, Ordering::Unordered),
            Decision::Dead {
                reason: Reason::RetriesExhausted
            }
        );
    }
}
