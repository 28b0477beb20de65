use futures_util::future::join_all;
use onlyonce::publisher::Publisher as _;

use super::arrivals::{arrivals, one};
use super::{PublisherHarness, message, publish};
use crate::broken::{ensure, promise};
use crate::{Broken, Result};

/// Many messages that are published at once, by default a thousand, all arrive, each once.
pub async fn many_at_once<H: PublisherHarness>(harness: &H) -> Result {
    promise("many_at_once", async {
        let publisher = harness.publisher();
        let count = harness.capabilities().at_once;
        let messages: Vec<_> = (0..count).map(|n| message(harness, &format!("e{n}"))).collect();
        let told = join_all(messages.iter().map(|message| publish(&publisher, message))).await;
        for (message, told) in messages.iter().zip(told) {
            told?.map_err(|error| {
                Broken::new(format!(
                    "{} was not published as one of {count} at once: {error} ({:?})",
                    message.event_id,
                    error.kind()
                ))
            })?;
        }
        publisher.stop().await;
        let came = arrivals(harness, messages.iter().map(|m| &m.event_id)).await?;
        ensure!(came.len() == messages.len(), "{} messages came", came.len());
        for message in messages.iter().step_by(97) {
            one(&came, &message.event_id)?;
        }
        Ok(())
    })
    .await
}
