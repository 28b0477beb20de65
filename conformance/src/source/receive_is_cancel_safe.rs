use std::time::Duration;

use tokio::time::Instant;

use super::SourceHarness;
use super::tap::{Tap, events, id, numbered};
use crate::Result;
use crate::broken::{ensure, promise};

/// A `receive` that is dropped, at whatever point, loses nothing: the loop drops it whenever it has
/// something else to do.
pub async fn receive_is_cancel_safe<H: SourceHarness>(harness: &H) -> Result {
    promise("receive_is_cancel_safe", async {
        let ids = numbered(30);
        let mut tap = Tap::open(harness, 30).await?;
        let mut taken: Vec<String> = Vec::new();
        let (mut published, mut round) = (0, 0);
        let mut until = Instant::now() + tap.can.patience;
        while taken.len() < ids.len() {
            if published < ids.len() {
                harness.publish(events(&ids[published..published + 3])).await?;
                published += 3;
            }
            // More and more is let happen before the call is dropped: each await in it has its turn.
            round += 1;
            let a_while = Duration::from_millis(10) * (1 + round as u32 / 10);
            let some = tap.receive_and_drop(3, 1 + round % 7, a_while).await?;
            if !some.is_empty() {
                until = Instant::now() + tap.can.patience;
                taken.extend(some.iter().map(id));
                tap.ack(some).await?;
            }
            let missing: Vec<_> = ids[..published].iter().filter(|id| !taken.contains(id)).collect();
            ensure!(
                Instant::now() < until,
                "{missing:?} were lost in a receive that was dropped"
            );
        }
        let mut once = taken.clone();
        once.sort();
        once.dedup();
        ensure!(
            tap.can.may_repeat || once.len() == taken.len(),
            "a delivery came twice although nothing was given back: {taken:?}"
        );
        tap.quiet("it had been acked").await?;
        tap.finish().await
    })
    .await
}
