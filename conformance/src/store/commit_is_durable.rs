use onlyonce::store::{Next, Outcome, Store as _};

use super::StoreHarness;
use super::bench::{Bench, EFFECT, Sample, duplicate, refused};
use crate::Result;
use crate::broken::{ensure, promise};

/// Claim and effect are seen by others together, and not before `commit` has said that they are.
pub async fn commit_is_durable<H: StoreHarness>(harness: &H) -> Result {
    promise("commit_is_durable", async {
        let bench = Bench::new(harness).await?;
        let mut conn = bench.store.open().await?;
        let event = Sample::new("1", "a")?;
        let (mut tx, _, claims) = bench.claim(&mut conn, &[&event]).await?;
        bench.handle(&mut tx, EFFECT).await?;
        let stands = bench.stands().await?;
        ensure!(
            stands == (0, 0),
            "before the commit others see (claims, effects) {stands:?}"
        );
        bench
            .store
            .commit(tx, claims, Next::Rest)
            .await
            .map_err(refused)?;
        let stands = bench.stands().await?;
        ensure!(
            stands == (1, 1),
            "after the commit others see (claims, effects) {stands:?}"
        );
        let again = harness.store().await?;
        let mut other = again.open().await?;
        let mut tx = again.begin(&mut other, &bench.limits).await?;
        let (answers, _) = again
            .claim(&mut tx, &[event.request()], Outcome::Processed)
            .await?;
        bench.store.rollback(&mut conn).await?;
        ensure!(
            answers == [duplicate(true)],
            "another process is told {answers:?} of what was committed"
        );
        Ok(())
    })
    .await
}
