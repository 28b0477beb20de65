use std::time::Duration;

use onlyonce::publisher::Publisher as _;

use super::arrivals::arrivals;
use super::{PublisherHarness, message, publish_all};
use crate::Result;
use crate::broken::{ensure, promise};

/// The publisher names its system as its source does, says how long it may take, and is well while it works
/// and before it was asked for anything.
pub async fn says_who_it_is<H: PublisherHarness>(harness: &H) -> Result {
    promise("says_who_it_is", async {
        let publisher = harness.publisher();
        let system = harness.system();
        ensure!(
            publisher.system() == system,
            "{system:?} was due and the publisher says {:?}",
            publisher.system()
        );
        let patience = publisher.patience();
        ensure!(
            patience > Duration::ZERO && patience <= Duration::from_secs(600),
            "its patience is {patience:?}"
        );
        let health = publisher.health();
        ensure!(
            health.problem.is_none(),
            "nobody asked it for anything, and it says {health:?}"
        );
        publish_all(&publisher, &[message(harness, "e1")]).await?;
        let health = publisher.health();
        ensure!(health.problem.is_none(), "it works, and says {health:?}");
        publisher.stop().await;
        let came = arrivals(harness, ["e1"]).await?;
        ensure!(
            came[0].origin.system == system,
            "what it publishes is read as of the system {:?}",
            came[0].origin.system
        );
        Ok(())
    })
    .await
}
