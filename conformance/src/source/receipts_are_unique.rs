use super::SourceHarness;
use super::tap::{Tap, WINDOW, events, numbered};
use crate::Result;
use crate::broken::promise;

/// No receipt is given out twice in the life of a source, also not for a message that comes again or
/// after a reconnection.
pub async fn receipts_are_unique<H: SourceHarness>(harness: &H) -> Result {
    promise("receipts_are_unique", async {
        let ids = numbered(3);
        harness.publish(events(&ids)).await?;
        let mut tap = Tap::open(harness, WINDOW).await?;
        // `take` compares the receipts.
        for _ in 0..3 {
            let taken = tap.take(3).await?;
            tap.release(taken).await?;
        }
        if tap.can.cuts {
            tap.take(3).await?;
            harness.cut().await?;
        }
        let taken = tap.take(3).await?;
        tap.expect(&taken, &ids)?;
        tap.ack(taken).await?;
        tap.finish().await
    })
    .await
}
