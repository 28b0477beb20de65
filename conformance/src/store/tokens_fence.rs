use std::time::Duration;

use onlyonce::store::{ClaimAnswer, HeldState, Inbox as _, Store as _};

use super::StoreHarness;
use super::bench::{Bench, DEAD, LONG, NOW, Sample, failure};
use crate::Result;
use crate::broken::{ensure, promise};

/// Whoever lost a lease changes nothing any more: not by failing, closing, giving back or renewing.
pub async fn tokens_fence<H: StoreHarness>(harness: &H) -> Result {
    promise("tokens_fence", async {
        let bench = Bench::new(harness).await?;
        let event = Sample::new("1", "a")?;
        bench.store.enqueue(&event.parked(NOW)).await?;
        let old = bench.lease_one(Duration::ZERO).await?.lease;
        let new = bench.lease_one(LONG).await?.lease;
        let failures = [failure(1)];
        let mut failed = event.parked(DEAD);
        failed.failures = &failures;
        ensure!(
            !bench.store.fail_leased(&old, &failed).await?,
            "the old owner's failure was recorded"
        );
        ensure!(
            !bench.store.close_leased(&old).await?,
            "the old owner closed the row"
        );
        bench
            .store
            .release_leased(std::slice::from_ref(&old), Duration::ZERO)
            .await?;
        let ours = bench.store.renew(&[old.clone(), new.clone()], LONG).await?;
        ensure!(
            ours == [new.id],
            "the old owner's lease was renewed as well: {ours:?}"
        );
        ensure!(
            bench.lease(9, LONG).await?.is_empty(),
            "the old owner gave the row back"
        );

        // As a delivery it is held by somebody else.
        let mut conn = bench.store.open().await?;
        let mut delivery = event.clone();
        delivery.own = Some(old);
        let running = ClaimAnswer::Held(HeldState::Running);
        bench
            .expect(&mut conn, &delivery, running, "the row has another owner")
            .await?;

        ensure!(
            bench.store.fail_leased(&new, &failed).await?,
            "the owner's failure was not recorded"
        );
        let dead = bench
            .number("SELECT count(*) FROM {inbox} WHERE state = 'dead' AND attempts = 1")
            .await?;
        ensure!(dead == 1, "the owner's failure is not what the row says");
        ensure!(
            !bench.store.close_leased(&new).await?,
            "a dead row was closed by a lease"
        );
        Ok(())
    })
    .await
}
