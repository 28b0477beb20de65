use futures_util::future::join_all;
use onlyonce::publisher::Publisher as _;

use super::arrivals::arrivals;
use super::outages_end::{away, works_again};
use super::{PublisherHarness, message, publish, publish_all};
use crate::Result;
use crate::broken::{not_promised, promise};

/// A broker that keeps its connections and says nothing is given up within the patience, by a publisher that
/// was connected and by one that was not; when it speaks again both publish.
pub async fn silence_is_bounded<H: PublisherHarness>(harness: &H) -> Result {
    promise("silence_is_bounded", async {
        if !harness.capabilities().outages {
            return not_promised("the harness cannot cut the publisher off");
        }
        let (connected, unconnected) = (harness.publisher(), harness.publisher());
        publish_all(&connected, &[message(harness, "before")]).await?;
        harness.freeze().await?;
        let during: Vec<_> = (0..10)
            .map(|n| message(harness, &format!("during {n}")))
            .collect();
        let told = join_all(during.iter().map(async |message| {
            let told = (publish(&connected, message), publish(&unconnected, message));
            futures_util::future::join(told.0, told.1).await
        }));
        for (of_connected, of_unconnected) in told.await {
            away(of_connected?)?;
            away(of_unconnected?)?;
        }
        harness.mend().await?;
        works_again(harness, &connected, "after 1").await?;
        works_again(harness, &unconnected, "after 2").await?;
        connected.stop().await;
        unconnected.stop().await;
        arrivals(harness, ["before", "after 1", "after 2"]).await?;
        Ok(())
    })
    .await
}
