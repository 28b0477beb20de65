//! Named places in the story of an event at which a test can stop the world.
//!
//! Without the feature `testing` each of them is an empty function that the compiler removes.

/// A place in [`process.rs`](https://docs.rs/onlyonce) between two steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CrashPoint {
    /// Deliveries reached a lane; nothing has begun.
    Received,
    /// The transaction holds the claims.
    Claimed,
    /// The handler has returned; nothing is committed.
    Handled,
    /// What the handler sent is written; nothing is committed.
    Recorded,
    /// The commit is durable; nothing is acked.
    Committed,
    /// The settlements are on their way to the source, which has not seen them.
    Settling,
    /// An attempt failed and was rolled back.
    RolledBack,
    /// The event is durably held in `inbox`; nothing is acked.
    Parked,
}

impl CrashPoint {
    /// All of them, in the order of the story.
    pub const ALL: [Self; 8] = [
        Self::Received,
        Self::Claimed,
        Self::Handled,
        Self::Recorded,
        Self::Committed,
        Self::Settling,
        Self::RolledBack,
        Self::Parked,
    ];

    /// The name by which a worker's environment names it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Received => "received",
            Self::Claimed => "claimed",
            Self::Handled => "handled",
            Self::Recorded => "recorded",
            Self::Committed => "committed",
            Self::Settling => "settling",
            Self::RolledBack => "rolled_back",
            Self::Parked => "parked",
        }
    }
}

/// What a test does when a crash point is reached.
#[cfg(feature = "testing")]
pub(crate) type Plan = std::sync::Arc<dyn Fn(CrashPoint) -> bool + Send + Sync>;

/// Called between two steps. A plan that answers true has "crashed the process": the task stands
/// still for ever, like one whose machine is gone, and the test throws its runtime away.
#[cfg(feature = "testing")]
pub(crate) async fn reached(plan: Option<&Plan>, point: CrashPoint) {
    if plan.is_some_and(|crashes| crashes(point)) {
        std::future::pending::<()>().await;
    }
}
