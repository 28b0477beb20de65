use onlyonce::store::{ClaimAnswer, Store as _};

use super::StoreHarness;
use super::bench::{Bench, EFFECT, Sample};
use crate::Result;
use crate::broken::{ensure, promise};

/// A savepoint that a handler leaves open turns `COMMIT` into a mere release of it. The connection is
/// unclean then, and nothing of the attempt is left when it is abandoned.
pub async fn leaked_savepoints_are_noticed<H: StoreHarness>(harness: &H) -> Result {
    promise("leaked_savepoints_are_noticed", async {
        let bench = Bench::new(harness).await?;
        let mut conn = bench.store.open().await?;
        let event = Sample::new("1", "a")?;
        let (mut tx, _, claims) = bench.claim(&mut conn, &[&event]).await?;
        std::mem::forget(sqlx::Connection::begin(&mut *tx).await?);
        bench.handle(&mut tx, EFFECT).await?;
        let committed = match bench.store.guard(&mut tx, claims).await {
            Ok(guarded) => bench.store.commit(tx, guarded).await.is_ok(),
            Err(_) => {
                drop(tx);
                false
            }
        };
        let clean = conn.is_clean();
        bench.store.abandon(conn).await;
        let stands = bench.stands().await?;
        ensure!(
            stands == (0, 0) && !(committed && clean),
            "a savepoint was left open; committed: {committed}, clean: {clean}, (claims, effects): {stands:?}"
        );
        let mut conn = bench.store.open().await?;
        bench
            .expect(&mut conn, &event, ClaimAnswer::New, "nothing was committed")
            .await
    })
    .await
}
