use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{join, join_all};
use onlyonce::publisher::Publisher as _;

use super::arrivals::arrivals;
use super::{PublisherHarness, message, publish};
use crate::broken::{ensure, promise};
use crate::{Broken, Result};

/// A stop loses nothing that was confirmed, also by those who were still waiting, and comes to an end; after
/// it nothing is published.
pub async fn stop_flushes<H: PublisherHarness>(harness: &H) -> Result {
    promise("stop_flushes", async {
        let publisher = harness.publisher();
        let count = harness.capabilities().at_once / 5;
        let messages: Vec<_> = (0..count).map(|n| message(harness, &format!("e{n}"))).collect();
        let publishing = join_all(messages.iter().map(|message| publish(&publisher, message)));
        let mut publishing = std::pin::pin!(publishing);
        // All of them are on their way when the stop comes.
        let early = publishing.as_mut().now_or_never();
        ensure!(early.is_none(), "{count} messages were confirmed at once");
        let limit = publisher.patience() * 2 + Duration::from_secs(5);
        let stopping = tokio::time::timeout(limit, publisher.stop());
        let (told, stopped) = join(publishing, stopping).await;
        stopped.map_err(|_| Broken::new(format!("the publisher did not stop within {limit:?}")))?;
        let mut confirmed = Vec::new();
        for (message, told) in messages.iter().zip(told) {
            if told?.is_ok() {
                confirmed.push(message.event_id.clone());
            }
        }
        ensure!(
            confirmed.len() == messages.len(),
            "{} of {} that were under way when the stop came were published",
            confirmed.len(),
            messages.len()
        );
        let late = publish(&publisher, &message(harness, "late")).await?;
        ensure!(late.is_err(), "a publisher that is stopped confirmed a message");
        arrivals(harness, confirmed).await?;
        Ok(())
    })
    .await
}
