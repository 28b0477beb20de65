use onlyonce::source::{Delivery, Redelivery};

use super::SourceHarness;
use super::tap::{Tap, WINDOW, event};
use crate::broken::{ensure, not_promised, promise};
use crate::{Broken, Result};

/// A first delivery never claims to be a second one; a second one says so, and how often, as far as
/// the source promises it.
pub async fn redelivery_is_marked<H: SourceHarness>(harness: &H) -> Result {
    promise("redelivery_is_marked", async {
        let expected = harness.expected();
        harness.publish(vec![event("e1")]).await?;
        let mut tap = Tap::open(harness, WINDOW).await?;
        let first = tap.take(1).await?;
        ensure!(
            first[0].redelivery == Redelivery::No,
            "the first delivery says {:?}",
            first[0].redelivery
        );
        if !expected.marks_redelivery {
            tap.ack(first).await?;
            return not_promised("marks of redeliveries");
        }
        let mut times = 1;
        if tap.can.release_marks {
            tap.release(first).await?;
            let second = tap.take(1).await?;
            marked(&second[0], expected.counts_deliveries, times)?;
            times += 1;
        }
        for _ in 0..2 {
            drop(tap);
            tap = Tap::open(harness, WINDOW).await?;
            let again = tap.take(1).await?;
            marked(&again[0], expected.counts_deliveries, times)?;
            times += 1;
        }
        Ok(())
    })
    .await
}

fn marked(delivery: &Delivery, counts: bool, times: u32) -> Result {
    match delivery.redelivery {
        Redelivery::Times(said) if said == times => Ok(()),
        // Once it has begun to count, at least as often as we know of.
        Redelivery::Times(said) if !counts && said > 0 => Ok(()),
        Redelivery::Yes if !counts => Ok(()),
        said => Err(Broken::new(format!(
            "a message that was delivered {times} times before says {said:?}"
        ))),
    }
}
