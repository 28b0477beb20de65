use std::collections::HashSet;

use onlyonce::source::{Delivery, Incoming, Receipt, Source as _};
use tokio::time::{Instant, timeout_at};

use super::SourceHarness;
use super::tap::{Tap, WINDOW, events, numbered};
use crate::Result;
use crate::broken::{ensure, not_promised, promise};

/// When the broker takes back what was handed out, the source says so (it yields `Lost`, or it breaks),
/// delivers it again under new receipts, and settlements of the old ones change nothing.
pub async fn lost_receipts_are_void<H: SourceHarness>(harness: &H) -> Result {
    promise("lost_receipts_are_void", async {
        if !harness.capabilities().cuts {
            return not_promised("that connections can be cut");
        }
        let ids = numbered(4);
        harness.publish(events(&ids)).await?;
        let mut tap = Tap::open(harness, WINDOW).await?;
        let held = tap.take(4).await?;
        harness.cut().await?;

        let lost: HashSet<Receipt> = held.iter().map(|delivery| delivery.receipt).collect();
        let until = Instant::now() + tap.can.patience + tap.can.redelivered_after;
        let mut again = Vec::new();
        let mut told = HashSet::new();
        while told != lost {
            let max = 4 - again.len();
            match timeout_at(until, tap.source.receive(max.max(1))).await {
                Ok(Ok(Incoming::Lost(receipts))) => told.extend(receipts),
                Ok(Err(error)) => {
                    ensure!(!error.is_fatal(), "a cut ended the source for good: {error}");
                    told.extend(&lost);
                }
                Ok(Ok(Incoming::Deliveries(deliveries))) => {
                    ensure!(
                        !told.is_empty(),
                        "deliveries were cut off, and before the source said so {:?} came again",
                        super::tap::ids(&deliveries)
                    );
                    tap.look_at(&deliveries, max.max(1))?;
                    again.extend(deliveries);
                }
                Ok(Ok(other)) => ensure!(false, "after a cut, receive said {other:?}"),
                Err(_) => ensure!(false, "deliveries were cut off and the source did not say so"),
            }
        }
        ensure!(told.is_subset(&lost), "the source lost what it had not given out");
        // Late, and void. The source may be broken still: that is not what is asked here.
        let _ = tap
            .source
            .settle(held.into_iter().map(Delivery::ack).collect())
            .await;
        again.extend(tap.take(4 - again.len()).await?);
        tap.expect(&again, &ids)?;
        drop((tap, again));
        let mut tap = Tap::open(harness, WINDOW).await?;
        let taken = tap.take(4).await?;
        tap.expect(&taken, &ids)?;
        tap.ack(taken).await?;
        tap.finish().await
    })
    .await
}
