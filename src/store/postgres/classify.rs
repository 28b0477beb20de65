use crate::store::{StoreError, StoreErrorKind};

/// What a failed statement of ours means. Whatever is not known to be contention or data is taken as
/// infrastructure: the consumer pauses and nothing is counted.
pub(super) fn classify(doing: &str, error: sqlx::Error) -> StoreError {
    let kind = match code(&error).as_deref() {
        Some("40001" | "40P01" | "55P03") => StoreErrorKind::Contention,
        Some(code) if code.starts_with("22") || code.starts_with("23") => StoreErrorKind::Data,
        // Wrong password, no such role, no such database, no right to connect.
        Some(code) if code.starts_with("28") || code == "3D000" => StoreErrorKind::Misconfigured,
        _ => StoreErrorKind::Unavailable,
    };
    StoreError::from_sqlx(kind, doing, error)
}

/// For the claim: waiting too long for another copy is an answer, not a fault.
pub(super) fn classify_claim(error: sqlx::Error) -> StoreError {
    let busy = matches!(code(&error).as_deref(), Some("55P03" | "57014"));
    let error = classify("claiming", error);
    if busy {
        error.with_kind(StoreErrorKind::Busy)
    } else {
        error
    }
}

pub(super) fn code(error: &sqlx::Error) -> Option<String> {
    error
        .as_database_error()
        .and_then(|e| e.code())
        .map(|code| code.into_owned())
}
