use std::error::Error;
use std::fmt;
use std::time::Duration;

use crate::event::DecodeError;
use crate::outbox::OutboxError;

type BoxError = Box<dyn Error + Send + Sync>;

/// How a handler failed, and what should become of the event.
///
/// Anything that is an error becomes one by `?` and means: try again by the policy. (But for an
/// [`OutboxError`] about an outgoing event: it would be refused again, and the failure is permanent.) Say otherwise
/// by [`retry_after`](Self::retry_after), [`permanent`](Self::permanent) or [`discard`](Self::discard).
pub struct HandlerError {
    kind: FailureKind,
    error: BoxError,
}

/// What a handler asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FailureKind {
    Retry { after: Option<Duration> },
    Permanent,
    Discard,
    Undecodable,
    UnknownEventType,
}

/// What a handler's error looks like from the database's side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Another transaction won: the same work may succeed at once.
    Contention,
    /// A connection was lost, or none was to be had. Whether the database is down is for a probe to say.
    Lost,
    /// Anything else: the handler's own.
    Own,
}

impl HandlerError {
    /// Try again, not before this much later. Counts as an attempt.
    pub fn retry_after(after: Duration, error: impl Into<BoxError>) -> Self {
        Self {
            kind: FailureKind::Retry { after: Some(after) },
            error: error.into(),
        }
    }

    /// Trying again cannot help: a dead letter at once, reason `permanent_error`.
    pub fn permanent(error: impl Into<BoxError>) -> Self {
        Self {
            kind: FailureKind::Permanent,
            error: error.into(),
        }
    }

    /// There is nothing to do for this event. What the handler wrote is rolled back, the event is
    /// remembered as `discarded`, and its duplicates are acked.
    pub fn discard(reason: impl Into<BoxError>) -> Self {
        Self {
            kind: FailureKind::Discard,
            error: reason.into(),
        }
    }

    pub(crate) fn undecodable(error: DecodeError) -> Self {
        Self {
            kind: FailureKind::Undecodable,
            error: error.into(),
        }
    }

    pub(crate) fn unknown_event_type(error: String) -> Self {
        Self {
            kind: FailureKind::UnknownEventType,
            error: error.into(),
        }
    }

    pub(crate) fn kind(&self) -> FailureKind {
        self.kind
    }

    /// Looks for what the database said along the error and its sources.
    pub(crate) fn fault(&self) -> Fault {
        let mut next: Option<&(dyn Error + 'static)> = Some(self.error.as_ref());
        while let Some(error) = next {
            if let Some(fault) = database_fault(error) {
                return fault;
            }
            next = error.source();
        }
        Fault::Own
    }
}

fn database_fault(error: &(dyn Error + 'static)) -> Option<Fault> {
    if let Some(error) = error.downcast_ref::<sqlx::Error>() {
        return match error {
            sqlx::Error::Database(e) => e.code().map(|code| code_fault(&code)),
            sqlx::Error::Io(_)
            | sqlx::Error::Tls(_)
            | sqlx::Error::Protocol(_)
            | sqlx::Error::PoolTimedOut
            | sqlx::Error::PoolClosed
            | sqlx::Error::WorkerCrashed => Some(Fault::Lost),
            _ => None,
        };
    }
    // Some error types hide the sqlx error itself and show only what it came from.
    #[cfg(feature = "postgres")]
    if let Some(error) = error.downcast_ref::<sqlx::postgres::PgDatabaseError>() {
        return Some(code_fault(error.code()));
    }
    #[cfg(feature = "sqlite")]
    if let Some(error) = error.downcast_ref::<sqlx::sqlite::SqliteError>() {
        return sqlx::error::DatabaseError::code(error).map(|code| code_fault(&code));
    }
    None
}

/// SQLSTATEs have five characters; SQLite's codes are decimal numbers.
fn code_fault(code: &str) -> Fault {
    match code {
        "40001" | "40P01" | "55P03" => Fault::Contention,
        "5" | "6" | "261" | "517" => Fault::Contention,
        "57P01" | "57P02" | "57P03" | "53300" => Fault::Lost,
        // The session idled until the server ended it. A handler that waits so long is known by the time it
        // took; otherwise the process stood still before the handler began, a neighbour's blocked thread say.
        "25P03" => Fault::Lost,
        // A full disk, no memory, a broken disk: rarely the event's fault, and where it is, from the third
        // time on it counts.
        "53100" | "53200" | "58030" | "13" => Fault::Lost,
        _ if code.len() == 5 && code.starts_with("08") => Fault::Lost,
        _ => Fault::Own,
    }
}

/// Every error that a handler may meet. `HandlerError` itself is deliberately not an `Error`, which
/// is what makes this conversion possible.
impl<E: Into<BoxError>> From<E> for HandlerError {
    fn from(error: E) -> Self {
        let error = error.into();
        let kind = if is_permanent(error.as_ref()) {
            FailureKind::Permanent
        } else {
            FailureKind::Retry { after: None }
        };
        Self { kind, error }
    }
}

/// An outgoing event that was refused is refused again: from the same event the handler makes the same one.
fn is_permanent(error: &(dyn Error + 'static)) -> bool {
    std::iter::successors(Some(error), |error| (*error).source())
        .filter_map(|error| error.downcast_ref::<OutboxError>())
        .any(OutboxError::is_permanent)
}

impl fmt::Display for HandlerError {
    /// The error and its sources, separated by colons.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.error)?;
        let mut last = self.error.to_string();
        let mut next = self.error.source();
        while let Some(error) = next {
            let text = error.to_string();
            // Many errors repeat their source in their own text.
            if !last.contains(&text) {
                write!(f, ": {text}")?;
            }
            last = text;
            next = error.source();
        }
        Ok(())
    }
}

impl fmt::Debug for HandlerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HandlerError")
            .field("kind", &self.kind)
            .field("error", &self.error)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("charging failed")]
    struct Wrapped(#[source] sqlx::Error);

    #[test]
    fn lost_connections_are_found_below_other_errors() {
        let direct = HandlerError::from(sqlx::Error::PoolTimedOut);
        assert_eq!(direct.fault(), Fault::Lost);
        let wrapped = HandlerError::from(Wrapped(sqlx::Error::PoolTimedOut));
        assert_eq!(wrapped.fault(), Fault::Lost);
        assert!(wrapped.to_string().starts_with("charging failed: "));
        assert_eq!(HandlerError::from("no such account").fault(), Fault::Own);
        let context = anyhow::Error::from(sqlx::Error::PoolTimedOut).context("while charging");
        assert_eq!(HandlerError::from(context).fault(), Fault::Lost);
    }

    #[test]
    fn a_refused_outgoing_event_is_permanent_and_a_database_in_trouble_is_not() {
        let refused = || OutboxError::TooMuch { size: 2, limit: 1 };
        assert_eq!(HandlerError::from(refused()).kind(), FailureKind::Permanent);
        #[derive(Debug, thiserror::Error)]
        #[error("announcing failed")]
        struct Announcing(#[source] OutboxError);
        assert_eq!(
            HandlerError::from(Announcing(refused())).kind(),
            FailureKind::Permanent
        );
        let lost = HandlerError::from(Announcing(OutboxError::Store(sqlx::Error::PoolTimedOut)));
        assert_eq!(lost.kind(), FailureKind::Retry { after: None });
        assert_eq!(lost.fault(), Fault::Lost);
    }

    #[test]
    fn codes_of_both_databases_are_told_apart() {
        for contention in ["40001", "40P01", "55P03", "5", "517"] {
            assert_eq!(code_fault(contention), Fault::Contention, "{contention}");
        }
        for lost in ["57P01", "25P03", "08006", "53300", "53100", "58030", "13"] {
            assert_eq!(code_fault(lost), Fault::Lost, "{lost}");
        }
        for own in ["23505", "42P01", "57014", "25P02", "19", "2067", "8"] {
            assert_eq!(code_fault(own), Fault::Own, "{own}");
        }
    }
}
