use onlyonce::source::Source as _;

use super::SourceHarness;
use super::tap::{Tap, WINDOW, event};
use crate::Result;
use crate::broken::{ensure, promise};

/// The source promises what its documentation says, before and after it is started, and is healthy
/// while it works.
pub async fn says_what_it_promises<H: SourceHarness>(harness: &H) -> Result {
    promise("says_what_it_promises", async {
        let expected = harness.expected();
        harness.publish(vec![event("e1")]).await?;
        let said = harness.source().capabilities();
        ensure!(
            said == expected,
            "{expected:?} was due and the source says {said:?}"
        );
        let mut tap = Tap::open(harness, WINDOW).await?;
        let taken = tap.take(1).await?;
        let said = tap.source.capabilities();
        ensure!(
            said == expected,
            "started, {expected:?} was due and the source says {said:?}"
        );
        let health = tap.source.health();
        ensure!(
            health.connected && health.problem.is_none(),
            "the source works and says {health:?}"
        );
        let system = taken[0].event.origin.system;
        ensure!(
            !system.is_empty() && !taken[0].event.origin.destination.is_empty(),
            "a delivery does not say where it came from: {:?}",
            taken[0].event.origin
        );
        tap.ack(taken).await?;
        tap.finish().await
    })
    .await
}
