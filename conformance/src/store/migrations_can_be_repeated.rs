use onlyonce::store::{Operations as _, Store as _};

use super::StoreHarness;
use super::bench::{Bench, Sample, duplicate};
use crate::Result;
use crate::broken::promise;

/// Several processes that start at once, and again, make one set of tables, which `check` finds in order.
pub async fn migrations_can_be_repeated<H: StoreHarness>(harness: &H) -> Result {
    promise("migrations_can_be_repeated", async {
        let limits = onlyonce::store::Limits::default();
        let mut stores = Vec::new();
        for _ in 0..5 {
            stores.push(harness.store().await?);
        }
        let migrations = stores.iter().map(|store| store.migrate());
        for migrated in futures_util::future::join_all(migrations).await {
            migrated?;
        }
        let bench = Bench::new(harness).await?;
        let mut conn = bench.store.open().await?;
        let event = Sample::new("1", "a")?;
        bench.process(&mut conn, &event).await?;
        bench.store.migrate().await?;
        bench.store.check(&limits).await?;
        bench
            .expect(&mut conn, &event, duplicate(true), "migrated again")
            .await
    })
    .await
}
