use std::time::Duration;

use onlyonce::store::{ClaimAnswer, Next, Operations as _, PurgeCursor, Store as _};

use super::StoreHarness;
use super::bench::{Bench, Sample, duplicate, refused};
use crate::broken::{ensure, promise};
use crate::{CONSUMER, Result};

/// Purge deletes what is older than the window, of this consumer, in batches that go on where the last
/// one ended; business claims stay.
pub async fn purge_respects_the_window<H: StoreHarness>(harness: &H) -> Result {
    promise("purge_respects_the_window", async {
        let bench = Bench::new(harness).await?;
        let mut conn = bench.store.open().await?;
        for n in 0..5 {
            bench
                .process(&mut conn, &Sample::new(&format!("{n}"), "a")?)
                .await?;
        }
        let event = Sample::new("with a fact", "a")?;
        let (mut tx, _, claims) = bench.claim(&mut conn, &[&event]).await?;
        bench.store.claim_once(&mut tx, CONSUMER, "paid", "7").await?;
        bench
            .store
            .commit(tx, claims, Next::Rest)
            .await
            .map_err(refused)?;
        harness.age_claims(Duration::from_secs(3600)).await?;
        let young = Sample::new("young", "a")?;
        bench.process(&mut conn, &young).await?;

        let others = bench
            .store
            .purge("other", Duration::from_secs(1800), 9, PurgeCursor::default())
            .await?;
        let forever = bench
            .store
            .purge(CONSUMER, Duration::from_secs(7200), 9, PurgeCursor::default())
            .await?;
        ensure!(
            (others.rows, forever.rows) == (0, 0),
            "claims of another consumer, or inside the window, were purged"
        );
        let (mut cursor, mut sizes) = (PurgeCursor::default(), Vec::new());
        loop {
            let purged = bench
                .store
                .purge(CONSUMER, Duration::from_secs(1800), 4, cursor)
                .await?;
            sizes.push(purged.rows);
            if !purged.more || sizes.len() > 9 {
                ensure!(
                    purged.lag == Duration::ZERO,
                    "purged, and {:?} behind",
                    purged.lag
                );
                break;
            }
            ensure!(
                !purged.lag.is_zero(),
                "more is to be purged, and the purge is not behind"
            );
            cursor = purged.next;
        }
        ensure!(
            sizes == [4, 2],
            "six claims were to be purged by four, and {sizes:?} were"
        );
        let facts = bench
            .number("SELECT count(*) FROM {processed_events} WHERE kind = 'once'")
            .await?;
        ensure!(facts == 1, "a business claim was purged");
        bench
            .expect(&mut conn, &young, duplicate(true), "inside the window")
            .await?;
        let old = Sample::new("0", "a")?;
        bench
            .expect(&mut conn, &old, ClaimAnswer::New, "past the window, and purged")
            .await
    })
    .await
}
