//! What can be read from a destination.

use std::collections::BTreeSet;

use onlyonce::event::{Identity, IdentityRules, RawEvent};
use onlyonce::source::{Delivery, Incoming, Plan, Redelivery, Source};
use tokio::time::{Instant, timeout_at};

use super::{PublisherHarness, SOURCE};
use crate::broken::ensure;
use crate::{Broken, CONSUMER, Result};

const WINDOW: usize = 100;

/// All that arrives, until everything of `due` has come and nothing more comes; taken away from the broker.
pub(super) async fn arrivals<H: PublisherHarness>(
    harness: &H,
    due: impl IntoIterator<Item = impl Into<String>>,
) -> Result<Vec<RawEvent>> {
    let due: BTreeSet<String> = due.into_iter().map(Into::into).collect();
    let mut seen = BTreeSet::new();
    let can = harness.capabilities();
    let mut source = harness.source();
    let mut came = Vec::new();
    let mut until = Instant::now() + can.patience;
    timeout_at(until, source.start(&Plan::for_window(CONSUMER, WINDOW)))
        .await
        .map_err(|_| Broken::new("the source that reads did not start"))??;
    if due.is_subset(&seen) {
        until = Instant::now() + can.quiet;
    }
    while let Ok(incoming) = timeout_at(until, source.receive(WINDOW)).await {
        let Incoming::Deliveries(deliveries) = incoming? else {
            continue;
        };
        for delivery in &deliveries {
            let is_new = seen.insert(identity(&delivery.event)?.id);
            // What the broker hands out again was not published again.
            if is_new || delivery.redelivery == Redelivery::No {
                came.push(RawEvent::clone(&delivery.event));
            }
        }
        source
            .settle(deliveries.into_iter().map(Delivery::ack).collect())
            .await?;
        if due.is_subset(&seen) {
            until = Instant::now() + can.quiet;
        }
    }
    source.stop().await?;
    let closing = Instant::now() + can.patience;
    while let Ok(incoming) = timeout_at(closing, source.receive(0)).await {
        if matches!(incoming?, Incoming::Closed) {
            break;
        }
    }
    let missing: Vec<_> = due.difference(&seen).collect();
    ensure!(
        missing.is_empty(),
        "{} of the messages that were published cannot be read: {:?}",
        missing.len(),
        missing.iter().take(5).collect::<Vec<_>>()
    );
    Ok(came)
}

/// Who a consumer takes an event for.
pub(super) fn identity(event: &RawEvent) -> Result<Identity> {
    IdentityRules::auto().identify(event).map_err(|error| {
        Broken::new(format!(
            "what was published by {SOURCE} has no identity when it arrives: {error}"
        ))
    })
}

/// The one event of this id.
pub(super) fn one<'e>(came: &'e [RawEvent], id: &str) -> Result<&'e RawEvent> {
    let mut found = None;
    for event in came {
        if identity(event)?.id == id {
            ensure!(found.is_none(), "{id} was published once and came twice");
            found = Some(event);
        }
    }
    found.ok_or_else(|| Broken::new(format!("{id} did not come")))
}
