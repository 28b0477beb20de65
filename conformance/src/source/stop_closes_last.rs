use super::SourceHarness;
use super::tap::{Tap, WINDOW, event, events, ids as ids_of, numbered};
use crate::Result;
use crate::broken::{ensure, promise};

/// After a stop, nothing is delivered, settlements still work, and the source closes when, and only
/// when, the last delivery is settled.
pub async fn stop_closes_last<H: SourceHarness>(harness: &H) -> Result {
    promise("stop_closes_last", async {
        let mut idle = Tap::open(harness, WINDOW).await?;
        idle.stop().await?;
        idle.closed().await?;

        let ids = numbered(3);
        harness.publish(events(&ids)).await?;
        let mut tap = Tap::open(harness, WINDOW).await?;
        let mut taken = tap.take(2).await?;
        tap.stop().await?;
        harness.publish(vec![event("late")]).await?;
        tap.quiet("the source was stopped, and two deliveries are not settled")
            .await?;
        let last = taken.split_off(1);
        tap.ack(taken).await?;
        tap.quiet("the source was stopped, and one delivery is not settled")
            .await?;
        tap.ack(last).await?;
        tap.closed().await?;

        let mut tap = Tap::open(harness, WINDOW).await?;
        let taken = tap.take(2).await?;
        ensure!(
            ids_of(&taken).contains(&"late".to_owned()),
            "what was published after the stop did not come afterwards: {:?}",
            ids_of(&taken)
        );
        tap.ack(taken).await?;
        tap.finish().await
    })
    .await
}
