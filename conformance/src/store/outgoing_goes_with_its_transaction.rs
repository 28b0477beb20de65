use onlyonce::store::{Next, Outgoing as _, Store as _};

use super::StoreHarness;
use super::bench::{Bench, EFFECT, Sample, refused};
use super::outgoing_bench::rows;
use crate::Result;
use crate::broken::{ensure, promise};

/// Outgoing rows are there if and only if the transaction that they were written in commits; what a handler sends is
/// written in the transaction of its claim and in no other, also where the handler has ended that.
pub async fn outgoing_goes_with_its_transaction<H: StoreHarness>(harness: &H) -> Result {
    promise("outgoing_goes_with_its_transaction", async {
        let bench = Bench::new(harness).await?;
        let sent = rows(&["a-1", "a-2", "b"])?;
        let event = Sample::new("1", "a")?;
        for how in ["rolled back", "dropped", "abandoned"] {
            let mut conn = bench.store.open().await?;
            let (mut tx, _, claims) = bench.claim(&mut conn, &[&event]).await?;
            bench.handle(&mut tx, EFFECT).await?;
            let claims = bench.store.record_outgoing(&mut tx, claims, &sent).await;
            bench.store.write_outgoing(&mut tx, &sent).await?;
            drop(claims.map_err(refused)?);
            match how {
                "rolled back" => bench.store.rollback(&mut conn).await?,
                "dropped" => drop(conn),
                _ => bench.store.abandon(conn).await,
            }
            let left = bench.outgoing().await?;
            ensure!(left == 0, "{how}, the transaction left {left} outgoing rows");
        }

        let mut conn = bench.store.open().await?;
        let (mut tx, _, claims) = bench.claim(&mut conn, &[&event]).await?;
        let claims = bench.store.record_outgoing(&mut tx, claims, &sent).await;
        let claims = claims.map_err(refused)?;
        bench
            .store
            .commit(tx, claims, Next::Rest)
            .await
            .map_err(refused)?;
        let there = bench.outgoing().await?;
        ensure!(there == 3, "3 rows were committed, and {there} are there");
        drop(conn);

        let mut conn = bench.store.open().await?;
        let other = Sample::new("2", "a")?;
        let (mut tx, _, claims) = bench.claim(&mut conn, &[&other]).await?;
        // A handler that ends what is not its own. Where the store refuses that, nothing is to be found.
        if bench.handle(&mut tx, "ROLLBACK").await.is_ok() {
            let recorded = bench.store.record_outgoing(&mut tx, claims, &sent).await;
            let there = bench.outgoing().await?;
            ensure!(
                there == 3,
                "the handler had ended its transaction, and what it sent was committed alone"
            );
            ensure!(
                recorded.is_err(),
                "the handler had ended its transaction, and what it sent counts as written"
            );
        }
        bench.store.abandon(conn).await;
        Ok(())
    })
    .await
}
