use onlyonce::store::{Next, Store as _};

use super::StoreHarness;
use super::bench::{Bench, Sample, refused};
use crate::broken::{ensure, promise};
use crate::{CONSUMER, Result};

/// A business claim is true once, for one consumer, and is undone with its transaction.
pub async fn business_claims_go_with_their_transaction<H: StoreHarness>(harness: &H) -> Result {
    promise("business_claims_go_with_their_transaction", async {
        let bench = Bench::new(harness).await?;
        let mut conn = bench.store.open().await?;
        for commits in [false, true] {
            let event = Sample::new(if commits { "2" } else { "1" }, "a")?;
            let (mut tx, _, claims) = bench.claim(&mut conn, &[&event]).await?;
            let first = bench.store.claim_once(&mut tx, CONSUMER, "paid", "7").await?;
            let second = bench.store.claim_once(&mut tx, CONSUMER, "paid", "7").await?;
            let other = bench.store.claim_once(&mut tx, "other", "paid", "7").await?;
            ensure!(
                (first, second, other) == (true, false, true),
                "first, second and another consumer's claim are {:?}",
                (first, second, other)
            );
            if commits {
                bench
                    .store
                    .commit(tx, claims, Next::Rest)
                    .await
                    .map_err(refused)?;
            } else {
                bench.store.rollback(&mut conn).await?;
            }
        }
        let mut tx = bench.store.begin(&mut conn, &bench.limits).await?;
        let again = bench.store.claim_once(&mut tx, CONSUMER, "paid", "7").await?;
        bench.store.rollback(&mut conn).await?;
        ensure!(!again, "a committed business claim was given a second time");
        Ok(())
    })
    .await
}
