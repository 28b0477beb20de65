use std::time::Duration;

use super::SourceHarness;
use super::tap::{Tap, events, numbered};
use crate::Result;
use crate::broken::promise;

const SHORTLY: Duration = Duration::from_millis(20);

/// `receive(max)` returns at most `max` deliveries, whatever an earlier call that was dropped had room for.
pub async fn receives_at_most_max<H: SourceHarness>(harness: &H) -> Result {
    promise("receives_at_most_max", async {
        let ids = numbered(20);
        harness.publish(events(&ids)).await?;
        let mut tap = Tap::open(harness, 20).await?;
        let mut taken = tap.take_by(1, 1).await?;
        taken.extend(tap.take_by(6, 2).await?);
        for polls in 1..4 {
            taken.extend(tap.receive_and_drop(5, polls, SHORTLY).await?);
            if taken.len() < 20 {
                taken.extend(tap.take_by(1, 1).await?);
            }
        }
        let rest = 20_usize.saturating_sub(taken.len());
        taken.extend(tap.take_by(rest, 3).await?);
        tap.expect(&taken, &ids)?;
        tap.ack(taken).await?;
        tap.finish().await
    })
    .await
}
