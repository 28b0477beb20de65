use onlyonce::store::Store as _;

use super::StoreHarness;
use super::bench::{Bench, DEAD, LATER, Sample, failure};
use crate::Result;
use crate::broken::{ensure, promise};

/// Attempts of a held event add up, those that are known count once (a parking whose commit was in
/// doubt is repeated), and dead stays dead.
pub async fn attempts_add_up<H: StoreHarness>(harness: &H) -> Result {
    promise("attempts_add_up", async {
        let bench = Bench::new(harness).await?;
        let mut conn = bench.store.open().await?;
        let event = Sample::new("1", "a")?;
        let one_two = [failure(1), failure(2)];
        bench.park(&mut conn, &event, LATER, &one_two).await?;
        attempts(&bench, 2, "two attempts failed").await?;
        bench.park(&mut conn, &event, LATER, &one_two).await?;
        attempts(&bench, 2, "they were parked again").await?;
        bench.park(&mut conn, &event, DEAD, &[failure(3)]).await?;
        attempts(&bench, 3, "another one failed").await?;
        bench.park(&mut conn, &event, LATER, &[failure(4)]).await?;
        bench
            .park(&mut conn, &Sample::new("1", "b")?, LATER, &[failure(5)])
            .await?;
        attempts(&bench, 5, "copies of a dead event failed").await?;
        let dead = bench
            .number("SELECT count(*) FROM {inbox} WHERE state = 'dead'")
            .await?;
        ensure!(dead == 1, "a dead event came to life by a failed copy");
        Ok(())
    })
    .await
}

async fn attempts<H: StoreHarness>(bench: &Bench<'_, H>, due: i64, because: &str) -> Result {
    let rows = bench.number("SELECT count(*) FROM {inbox}").await?;
    ensure!(rows == 1, "one event is held in {rows} rows");
    let stored = bench
        .number("SELECT CAST(attempts AS BIGINT) FROM {inbox}")
        .await?;
    ensure!(
        stored == due,
        "{because}: {due} attempts were due and {stored} are stored"
    );
    Ok(())
}
