use std::time::Duration;

use tokio::time::Instant;

use super::SourceHarness;
use super::tap::{Tap, WINDOW, event, id};
use crate::Result;
use crate::broken::{ensure, promise};

/// The clock of the broker and ours need not agree on the last milliseconds.
const CLOCKS: Duration = Duration::from_millis(20);

/// What is released for a while does not come before, whether the broker can delay or the source has
/// to wait itself: giving back is never a hot loop. Where the broker can, others go on meanwhile.
pub async fn release_after_waits<H: SourceHarness>(harness: &H) -> Result {
    promise("release_after_waits", async {
        let delay = harness.capabilities().delay;
        harness.publish(vec![event("later")]).await?;
        let mut tap = Tap::open(harness, WINDOW).await?;
        let taken = tap.take(1).await?;
        harness.publish(vec![event("other")]).await?;
        let mut released = Instant::now();
        tap.settle(taken.into_iter().map(|delivery| delivery.release(Some(delay))))
            .await?;
        if harness.expected().delays_release {
            let other = tap.take(1).await?;
            ensure!(
                id(&other[0]) == "other",
                "what was released for {delay:?} came at once"
            );
            tap.ack(other).await?;
        }
        let (mut others, mut rounds) = (usize::from(!harness.expected().delays_release), 0);
        while others > 0 || rounds < 2 {
            let taken = tap.take(1).await?;
            if id(&taken[0]) == "other" {
                ensure!(others > 0, "what had been acked came again");
                others -= 1;
                tap.ack(taken).await?;
                continue;
            }
            let waited = released.elapsed();
            ensure!(
                waited + CLOCKS >= delay,
                "what was released for {delay:?} came after {waited:?}"
            );
            rounds += 1;
            if rounds == 2 {
                tap.ack(taken).await?;
            } else {
                released = Instant::now();
                tap.settle(taken.into_iter().map(|delivery| delivery.release(Some(delay))))
                    .await?;
            }
        }
        tap.finish().await
    })
    .await
}
