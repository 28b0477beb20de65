use futures_util::future::join_all;
use onlyonce::publisher::Publisher as _;

use super::arrivals::arrivals;
use super::{PublisherHarness, message, publish};
use crate::broken::{ensure, promise};
use crate::{Broken, Result};

const GOOD: usize = 60;

/// Among many that are under way, one that cannot be published is refused alone.
pub async fn one_bad_message_costs_itself<H: PublisherHarness>(harness: &H) -> Result {
    promise("one_bad_message_costs_itself", async {
        let publisher = harness.publisher();
        let mut bad = harness.invalid();
        for address in [Some(harness.missing()), harness.unroutable()]
            .into_iter()
            .flatten()
        {
            let mut lost = message(harness, "bad");
            lost.address = address;
            bad.push(lost);
        }
        let good: Vec<_> = (0..GOOD).map(|n| message(harness, &format!("e{n}"))).collect();
        // The bad ones spread among the good ones.
        let mut all: Vec<_> = good.iter().map(|message| (true, message)).collect();
        for (n, message) in bad.iter().enumerate() {
            all.insert((n + 1) * all.len() / (bad.len() + 1), (false, message));
        }
        let told = join_all(all.iter().map(|(_, message)| publish(&publisher, message))).await;
        for ((is_good, message), told) in all.iter().zip(told) {
            match (is_good, told?) {
                (true, Ok(())) | (false, Err(_)) => {}
                (true, Err(error)) => {
                    return Err(Broken::new(format!(
                        "{} was good, and a bad one beside it cost it its publishing: {error} ({:?})",
                        message.event_id,
                        error.kind()
                    )));
                }
                (false, Ok(())) => {
                    return Err(Broken::new(format!(
                        "what could go nowhere was confirmed: {:?}",
                        message.address
                    )));
                }
            }
        }
        publisher.stop().await;
        let came = arrivals(harness, good.iter().map(|m| &m.event_id)).await?;
        ensure!(
            came.len() == GOOD,
            "{GOOD} messages were good and {} came",
            came.len()
        );
        Ok(())
    })
    .await
}
