use std::error::Error;
use std::fmt;

use super::Claims;

/// A statement of the framework's own failed. Never an attempt of the handler's.
#[derive(Debug)]
pub struct StoreError {
    kind: StoreErrorKind,
    message: String,
    source: Option<sqlx::Error>,
}

/// What a failed statement means for the event it was about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// Lost against another transaction (serialization failure, deadlock, busy): run it again.
    Contention,
    /// Another transaction holds the event's key for longer than the lock timeout: come back later.
    Busy,
    /// The data itself was refused (SQLSTATE 22 and 23).
    Data,
    /// The database is unreachable, read-only, full, or refuses us: pause until it is well again.
    Unavailable,
    /// Something only a person can put right: a missing table, a setting that breaks a guarantee.
    Misconfigured,
}

impl StoreError {
    pub(crate) fn new(kind: StoreErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            source: None,
        }
    }

    pub(crate) fn from_sqlx(kind: StoreErrorKind, doing: &str, source: sqlx::Error) -> Self {
        Self {
            kind,
            message: doing.to_owned(),
            source: Some(source),
        }
    }

    /// What it means for the event.
    pub fn kind(&self) -> StoreErrorKind {
        self.kind
    }

    /// What the database itself called it.
    #[cfg(feature = "postgres")]
    pub(crate) fn code(&self) -> Option<String> {
        let code = self.source.as_ref()?.as_database_error()?.code()?;
        Some(code.into_owned())
    }

    pub(crate) fn with_kind(mut self, kind: StoreErrorKind) -> Self {
        self.kind = kind;
        self
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source {
            None => f.write_str(&self.message),
            Some(source) => write!(f, "{}: {source}", self.message),
        }
    }
}

impl Error for StoreError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_ref().map(|e| e as &(dyn Error + 'static))
    }
}

/// Why a commit did not succeed.
#[derive(Debug)]
pub enum CommitError {
    /// The transaction is ours but aborted: a failed statement was swallowed. Nothing was kept.
    Aborted(StoreError),
    /// The transaction is not the one that claimed: the handler committed or rolled back by itself,
    /// and part of its work may stand. These are the claims that it was given.
    Escaped(Claims),
    /// The handler left the connection in the middle of a `COPY`, so that answers are not what they
    /// seem: it may or may not have happened, and the connection is only good to be closed.
    OutOfStep,
    /// What goes before `COMMIT` could not run. Nothing was kept.
    Store(StoreError),
    /// The database refused the data: a deferred constraint failed. Nothing was kept.
    Refused(StoreError),
    /// Lost against another transaction at the last moment. Nothing was kept.
    Contention(StoreError),
    /// The connection died during `COMMIT`: it may or may not have happened.
    Unknown(StoreError),
}
