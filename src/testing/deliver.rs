use crate::consumer::{ConsumerBuilder, RunError};
use crate::event::RawEvent;
use crate::store::{Inbox, Operations, Outgoing};

use super::Broker;

/// What [`deliver`] saw.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Deliveries, released ones counted each time.
    pub delivered: u64,
    /// Deliveries that were acked: processed, a duplicate, or durably held.
    pub acked: u64,
    /// Deliveries that were given back.
    pub released: u64,
}

/// Delivers events to a consumer (all but its source) and returns when every one of them is settled
/// and the consumer has stopped. Waits on signals, never on time.
///
/// A failed event is settled when it is held in `inbox`; use a [`RetryPolicy`](crate::RetryPolicy)
/// without delays to see it dead at once.
pub async fn deliver<S: Inbox + Outgoing + Operations>(
    consumer: ConsumerBuilder<S>,
    events: impl IntoIterator<Item = RawEvent>,
) -> Result<Report, RunError> {
    let broker = Broker::new();
    for event in events {
        broker.publish(event);
    }
    let consumer = consumer
        .source(broker.source())
        .build()
        .map_err(RunError::build)?;
    let drained = broker.clone();
    consumer.run_until(async move { drained.drained().await }).await?;
    let stats = broker.stats();
    Ok(Report {
        delivered: stats.delivered,
        acked: stats.acked,
        released: stats.released,
    })
}
