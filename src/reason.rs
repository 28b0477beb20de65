use std::fmt;

/// Why a held event is dead: the closed set that `inbox.reason` holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// The handler failed as often as the policy allows.
    RetriesExhausted,
    /// The handler said that trying again cannot help.
    PermanentError,
    /// The event carries no id, or a blank one.
    MissingEventId,
    /// The event's id is too long, not UTF-8, or holds control characters.
    InvalidEventId,
    /// The payload or the event type could not be decoded.
    Undecodable,
    /// No route takes this event type.
    UnknownEventType,
    /// The handler ended the framework's transaction itself; part of its work may stand.
    TransactionEscaped,
    /// An event with this identity and another payload was processed before, and that is a dead letter by choice.
    IdentityMismatch,
    /// Two different identities have one digest.
    DigestCollision,
}

impl Reason {
    /// The word in the table, in logs and in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::RetriesExhausted => "retries_exhausted",
            Self::PermanentError => "permanent_error",
            Self::MissingEventId => "missing_event_id",
            Self::InvalidEventId => "invalid_event_id",
            Self::Undecodable => "undecodable",
            Self::UnknownEventType => "unknown_event_type",
            Self::TransactionEscaped => "transaction_escaped",
            Self::IdentityMismatch => "identity_mismatch",
            Self::DigestCollision => "digest_collision",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
