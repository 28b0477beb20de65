use super::SourceHarness;
use super::tap::{Tap, WINDOW, events, ids as ids_of, numbered};
use crate::Result;
use crate::broken::promise;

/// What is released comes again, at once and on the same source.
pub async fn release_gives_back<H: SourceHarness>(harness: &H) -> Result {
    promise("release_gives_back", async {
        let ids = numbered(5);
        harness.publish(events(&ids)).await?;
        let mut tap = Tap::open(harness, WINDOW).await?;
        for _ in 0..2 {
            let taken = tap.take(5).await?;
            tap.expect(&taken, &ids)?;
            tap.release(taken).await?;
        }
        let mut taken = tap.take(5).await?;
        tap.expect(&taken, &ids)?;
        // Some are done and some are not, in one call.
        let back = taken.split_off(3);
        let back_ids = ids_of(&back);
        let mut settlements = tap.done(taken).await?;
        settlements.extend(back.into_iter().map(|delivery| delivery.release(None)));
        tap.settle(settlements).await?;
        let taken = tap.take(2).await?;
        tap.expect(&taken, &back_ids)?;
        tap.ack(taken).await?;
        tap.quiet("it had been acked").await?;
        tap.finish().await
    })
    .await
}
