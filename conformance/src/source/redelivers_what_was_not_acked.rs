use super::SourceHarness;
use super::tap::{Tap, WINDOW, events, numbered};
use crate::Result;
use crate::broken::{ensure, promise};

/// What a process had in hand when it died is delivered again, all of it.
pub async fn redelivers_what_was_not_acked<H: SourceHarness>(harness: &H) -> Result {
    promise("redelivers_what_was_not_acked", async {
        let ids = numbered(6);
        harness.publish(events(&ids)).await?;
        for _ in 0..2 {
            let mut tap = Tap::open(harness, WINDOW).await?;
            let taken = tap.take(4).await?;
            ensure!(taken.len() == 4, "no four deliveries");
            // Dropped without a stop: the process is gone.
            drop(tap);
        }
        let mut tap = Tap::open(harness, WINDOW).await?;
        let taken = tap.take(6).await?;
        tap.expect(&taken, &ids)?;
        tap.ack(taken).await?;
        tap.finish().await
    })
    .await
}
