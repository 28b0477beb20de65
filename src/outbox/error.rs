use super::DestinationError;

/// Why events were not taken into the outbox. Nothing of them was stored.
///
/// All but the last two say that an event cannot be sent as it is, and would not be the next time: by
/// `?` in a handler they are a [permanent](crate::HandlerError::permanent) failure.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OutboxError {
    /// It says no destination that a relay could read.
    #[error("an outgoing event was refused: {0}")]
    Destination(#[from] DestinationError),
    /// A part of it cannot be stored, or no broker could carry it.
    #[error("an outgoing event to {destination} was refused: its {field} is {value} ({bound})")]
    Unusable {
        /// Where it was to go.
        destination: String,
        /// The part: `id`, `type`, `key`, `header`, `attribute`, `send_at` and so on.
        field: &'static str,
        /// What it is, shortened.
        value: String,
        /// What it may be.
        bound: String,
    },
    /// It is larger than its publisher's broker takes.
    #[error(
        "an outgoing event to {destination} was refused: it counts {size} bytes, and publisher {publisher} takes {limit} \
         (Outbox::limit, if its broker takes more)"
    )]
    TooLarge {
        /// Where it was to go.
        destination: String,
        /// Whose limit it is.
        publisher: String,
        /// What it counts as; see [`Outbox::limit`](super::Outbox::limit).
        size: usize,
        /// The most that the publisher takes.
        limit: usize,
    },
    /// All events of one transaction together are more than one statement should carry.
    #[error(
        "the outgoing events of one transaction count {size} bytes (at most {limit}: send them from several events)"
    )]
    TooMuch {
        /// What they count as together.
        size: usize,
        /// The most.
        limit: usize,
    },
    /// The outbox itself is not set up as it has to be.
    #[error("the outbox cannot be used: {0}")]
    Settings(String),
    /// The database refused or does not answer.
    #[error("the outgoing events were not written: {0}")]
    Store(#[source] sqlx::Error),
}

impl OutboxError {
    /// Whether the same event would be refused again.
    pub(crate) fn is_permanent(&self) -> bool {
        !matches!(self, Self::Settings(_) | Self::Store(_))
    }
}
