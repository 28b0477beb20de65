use crate::store::{StoreError, StoreErrorKind};

/// What a failed statement of ours means. Whatever is not known to be contention or data is taken as
/// infrastructure: the consumer pauses and nothing is counted.
pub(super) fn classify(doing: &str, error: sqlx::Error) -> StoreError {
    let kind = match primary(&error) {
        // BUSY and LOCKED, whatever their extended codes say: recovery, snapshot, shared cache.
        Some(5 | 6) => StoreErrorKind::Contention,
        // TOOBIG, CONSTRAINT, MISMATCH.
        Some(18..=20) => StoreErrorKind::Data,
        // IOERR, FULL, CANTOPEN, READONLY, CORRUPT, NOTADB and the rest.
        _ => StoreErrorKind::Unavailable,
    };
    StoreError::from_sqlx(kind, doing, error)
}

/// For `BEGIN IMMEDIATE`: SQLite has waited as long as it was told to for another connection.
pub(super) fn classify_begin(doing: &str, error: sqlx::Error) -> StoreError {
    let error = classify(doing, error);
    if error.kind() == StoreErrorKind::Contention {
        error.with_kind(StoreErrorKind::Busy)
    } else {
        error
    }
}

/// The extended code of a commit that a hook did not let through.
pub(super) const COMMIT_HOOK: i32 = 531;

/// The session may not write, by `PRAGMA query_only`.
pub(super) const READ_ONLY: i32 = 8;

/// The extended result code, which sqlx has as a decimal text.
pub(super) fn code(error: &sqlx::Error) -> Option<i32> {
    error.as_database_error()?.code()?.parse().ok()
}

/// The primary result code: the family of the extended ones.
pub(super) fn primary(error: &sqlx::Error) -> Option<i32> {
    code(error).map(|extended| extended & 0xff)
}
