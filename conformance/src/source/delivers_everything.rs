use super::SourceHarness;
use super::tap::{Tap, WINDOW, events, id, numbered};
use crate::Result;
use crate::broken::{ensure, promise};

/// Every published event is delivered, once as long as nothing fails, and what was acked is gone.
pub async fn delivers_everything<H: SourceHarness>(harness: &H) -> Result {
    promise("delivers_everything", async {
        let ids = numbered(40);
        harness.publish(events(&ids[..20])).await?;
        let mut tap = Tap::open(harness, WINDOW).await?;
        harness.publish(events(&ids[20..])).await?;
        let mut taken = Vec::new();
        // No more outstanding than the window that the source was promised.
        for _ in 0..4 {
            let some = tap.take_by(10, 7).await?;
            taken.extend(some.iter().map(id));
            tap.ack(some).await?;
        }
        taken.sort();
        let mut due = ids.clone();
        due.sort();
        ensure!(taken == due, "{due:?} were published and {taken:?} came");
        tap.quiet("it had been acked").await?;
        tap.finish_for_good().await
    })
    .await
}
