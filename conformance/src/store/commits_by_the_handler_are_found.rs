use onlyonce::store::Store as _;

use super::StoreHarness;
use super::bench::{Bench, EFFECT, Sample};
use crate::Result;
use crate::broken::{ensure, promise};

/// Whether a handler that failed has committed the claims by itself is found out beside the
/// transaction. Where the store refuses such a commit there is nothing to be found.
pub async fn commits_by_the_handler_are_found<H: StoreHarness>(harness: &H) -> Result {
    promise("commits_by_the_handler_are_found", async {
        let bench = Bench::new(harness).await?;
        for (n, ends) in ["", "ROLLBACK", "COMMIT"].into_iter().enumerate() {
            let mut conn = bench.store.open().await?;
            let event = Sample::new(&format!("{n}"), "a")?;
            let (mut tx, _, claims) = bench.claim(&mut conn, &[&event]).await?;
            bench.handle(&mut tx, EFFECT).await?;
            if !ends.is_empty() {
                // A handler that ignores its errors.
                let _ = bench.handle(&mut tx, ends).await;
            }
            let said = bench.store.is_committed(&claims).await;
            let (stand, _) = bench.stands().await?;
            ensure!(
                !said || stand > 0,
                "nothing is committed (handler: {ends:?}), and the store says that the claims are"
            );
            ensure!(
                said || stand == 0,
                "the handler has committed the claims, and the store does not see it"
            );
            bench.store.abandon(conn).await;
        }
        Ok(())
    })
    .await
}
