use std::time::Duration;

use onlyonce::store::Store as _;
use tokio::time::Instant;

use super::StoreHarness;
use super::bench::{Bench, Sample};
use crate::Result;
use crate::broken::{ensure, promise};

/// The probe finds a working database working, while it is busy as well.
pub async fn probe_answers<H: StoreHarness>(harness: &H) -> Result {
    promise("probe_answers", async {
        let bench = Bench::new(harness).await?;
        bench.store.probe().await?;
        let event = Sample::new("1", "a")?;
        let mut conn = bench.store.open().await?;
        bench.claim(&mut conn, &[&event]).await?;
        let began = Instant::now();
        bench.store.probe().await?;
        ensure!(
            began.elapsed() < Duration::from_secs(5),
            "a busy database took {:?} to say that it is well",
            began.elapsed()
        );
        bench.store.rollback(&mut conn).await?;
        ensure!(!bench.store.name().is_empty(), "the store has no name");
        ensure!(
            bench.store.pool_id() == bench.store.clone().pool_id()
                && bench.store.pool_id() != harness.store().await?.pool_id(),
            "clones share their connections and others do not; the pool's id says otherwise"
        );
        Ok(())
    })
    .await
}
