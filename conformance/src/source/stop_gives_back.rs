use super::SourceHarness;
use super::tap::{Tap, WINDOW, events, id, numbered};
use crate::Result;
use crate::broken::promise;

/// A stop loses nothing: what was not handed out is given back, what was is settled as it is said, and
/// all of that has reached the broker when the source closes.
pub async fn stop_gives_back<H: SourceHarness>(harness: &H) -> Result {
    promise("stop_gives_back", async {
        let ids = numbered(10);
        harness.publish(events(&ids)).await?;
        let mut tap = Tap::open(harness, WINDOW).await?;
        let mut taken = tap.take(4).await?;
        tap.stop().await?;
        let back = taken.split_off(2);
        let done: Vec<String> = taken.iter().map(id).collect();
        tap.ack(taken).await?;
        tap.release(back).await?;
        tap.closed().await?;

        let left: Vec<String> = ids.into_iter().filter(|id| !done.contains(id)).collect();
        let mut tap = Tap::open(harness, WINDOW).await?;
        let taken = tap.take(8).await?;
        tap.expect(&taken, &left)?;
        tap.ack(taken).await?;
        tap.finish_for_good().await
    })
    .await
}
