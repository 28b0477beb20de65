//! One row on its way to a broker.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures_util::FutureExt as _;
use tokio::time::Instant;
use tracing::Instrument as _;

use crate::publisher::{PublishError, PublishErrorKind, Publisher};
use crate::store::{DueRow, HeldLane};
use crate::telemetry;

/// A row that goes to a broker, and what has to be known when it ends.
pub(crate) struct Flight {
    pub(crate) row: Arc<DueRow>,
    /// The lane, with the fence under which the row was read.
    pub(crate) lane: HeldLane,
    /// Which of the publishers.
    pub(crate) outlet: usize,
    pub(crate) alone: bool,
    /// How often publisher and destination had failed when it began.
    pub(crate) publisher_era: u32,
    pub(crate) destination_era: u32,
}

/// A row whose publish has ended.
pub(crate) struct Landed {
    pub(crate) flight: Flight,
    pub(crate) result: Result<(), PublishError>,
}

impl Flight {
    /// Publishes the row. Whatever the publisher does, it comes back as a value.
    pub(crate) async fn fly(self, relay: Arc<str>, publisher: Arc<dyn Publisher>) -> Landed {
        let system = publisher.system();
        let span = span(system, &self.row);
        let began = Instant::now();
        let publish = AssertUnwindSafe(publisher.publish(&self.row.message)).catch_unwind();
        let result = publish.instrument(span).await.unwrap_or_else(|_| {
            // It may be this message that it cannot stand: the row goes alone, and is refused if it happens again.
            Err(PublishError::new(
                PublishErrorKind::Interrupted,
                "the publisher panicked",
            ))
        });
        telemetry::published(
            &relay,
            system,
            began.elapsed(),
            result.as_ref().err().map(PublishError::kind),
        );
        Landed { flight: self, result }
    }
}

fn span(system: &'static str, row: &DueRow) -> tracing::Span {
    macro_rules! span {
        ($name:literal) => {
            tracing::info_span!(
                $name,
                messaging.system = system,
                messaging.destination.name = row.destination.address(),
                messaging.operation.name = $name,
                messaging.operation.r#type = "send",
                messaging.message.id = row.message.event_id,
                onlyonce.origin.traceparent = row.traceparent,
            )
        };
    }
    // As the conventions name it for each broker.
    if system == "rabbitmq" {
        span!("publish")
    } else {
        span!("send")
    }
}
