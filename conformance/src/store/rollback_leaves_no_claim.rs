use onlyonce::store::{ClaimAnswer, Store as _};

use super::StoreHarness;
use super::bench::{Bench, EFFECT, Sample};
use crate::Result;
use crate::broken::{ensure, promise};

/// An attempt that is rolled back, dropped or abandoned at any step leaves neither claim nor effect,
/// and the event is as new as it was.
pub async fn rollback_leaves_no_claim<H: StoreHarness>(harness: &H) -> Result {
    promise("rollback_leaves_no_claim", async {
        let bench = Bench::new(harness).await?;
        let event = Sample::new("1", "a")?;
        for how in ["rolled back", "dropped", "abandoned"] {
            let mut conn = bench.store.open().await?;
            let (mut tx, answers, _) = bench.claim(&mut conn, &[&event]).await?;
            ensure!(
                answers == [ClaimAnswer::New],
                "before it was {how} the event was not new: {answers:?}"
            );
            bench.handle(&mut tx, EFFECT).await?;
            match how {
                "rolled back" => bench.store.rollback(&mut conn).await?,
                "dropped" => drop(conn),
                _ => bench.store.abandon(conn).await,
            }
            let stands = bench.stands().await?;
            ensure!(
                stands == (0, 0),
                "{how}, the attempt left (claims, effects) {stands:?}"
            );
        }
        let mut conn = bench.store.open().await?;
        bench
            .expect(&mut conn, &event, ClaimAnswer::New, "every attempt was undone")
            .await
    })
    .await
}
