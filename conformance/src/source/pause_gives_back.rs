use std::time::Duration;

use onlyonce::source::Source as _;
use tokio::time::{Instant, sleep};

use super::SourceHarness;
use super::tap::{Tap, WINDOW, events, id, numbered};
use crate::Result;
use crate::broken::{ensure, promise};

/// A pause gives back what was not handed out; what was can still be settled, and the next `receive`
/// goes on where it was.
pub async fn pause_gives_back<H: SourceHarness>(harness: &H) -> Result {
    promise("pause_gives_back", async {
        let ids = numbered(8);
        harness.publish(events(&ids)).await?;
        let mut tap = Tap::open(harness, WINDOW).await?;
        let mut taken = tap.take(3).await?;
        for _ in 0..2 {
            tap.source.pause().await?;
        }
        let until = Instant::now() + tap.can.patience;
        while let Some(depth) = harness.depth().await? {
            if depth.waiting == 5 {
                break;
            }
            ensure!(
                Instant::now() < until,
                "five events were not handed out, and while paused {depth:?} is with the broker"
            );
            sleep(Duration::from_millis(20)).await;
        }
        let done = taken.split_off(1);
        let mut came: Vec<String> = done.iter().map(id).collect();
        tap.ack(done).await?;
        tap.release(taken).await?;

        let rest = tap.take(6).await?;
        came.extend(rest.iter().map(id));
        came.sort();
        ensure!(came == ids, "{ids:?} were published and {came:?} came");
        tap.ack(rest).await?;
        tap.quiet("it had been acked").await?;
        tap.source.pause().await?;
        tap.finish().await
    })
    .await
}
