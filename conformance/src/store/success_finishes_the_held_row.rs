use onlyonce::store::{ClaimAnswer, HeldState, Inbox as _, Store as _};

use super::StoreHarness;
use super::bench::{Bench, LONG, NOW, Sample};
use crate::Result;
use crate::broken::{ensure, promise};

/// The commit of an event that came from the inbox finishes its row: one that was never dead is gone,
/// and can be leased by nobody.
pub async fn success_finishes_the_held_row<H: StoreHarness>(harness: &H) -> Result {
    promise("success_finishes_the_held_row", async {
        let bench = Bench::new(harness).await?;
        let mut conn = bench.store.open().await?;
        let mut event = Sample::new("1", "a")?;
        bench.store.enqueue(&event.parked(NOW)).await?;
        let running = ClaimAnswer::Held(HeldState::Running);
        let lease = bench.lease_one(LONG).await?.lease;
        bench
            .expect(&mut conn, &event, running, "a copy of a running event")
            .await?;
        event.own = Some(lease.clone());

        bench.claim(&mut conn, &[&event]).await?;
        bench.store.rollback(&mut conn).await?;
        let ours = bench.store.renew(std::slice::from_ref(&lease), LONG).await?;
        ensure!(
            ours == [lease.id],
            "an attempt was rolled back and its row was finished"
        );

        bench
            .expect(&mut conn, &event, ClaimAnswer::New, "its own row")
            .await?;
        let rows = bench.number("SELECT count(*) FROM {inbox}").await?;
        ensure!(rows == 0, "the event was processed and its row is still there");
        ensure!(
            bench.lease(9, LONG).await?.is_empty(),
            "a finished event was leased"
        );

        let other = Sample::new("2", "a")?;
        bench.store.enqueue(&other.parked(NOW)).await?;
        let lease = bench.lease_one(LONG).await?.lease;
        ensure!(
            bench.store.close_leased(&lease).await?,
            "the owner could not close its row"
        );
        ensure!(
            bench.lease(9, LONG).await?.is_empty(),
            "a closed event was leased"
        );
        Ok(())
    })
    .await
}
