use onlyonce::store::{ClaimAnswer, Next, Store as _};

use super::StoreHarness;
use super::bench::{Bench, EFFECT, Sample, duplicate};
use crate::Result;
use crate::broken::{ensure, promise};

/// A savepoint that a handler forgets must not turn the commit into a mere release of it, after which
/// the event would count as done and be rolled back later: all of it is committed, or nothing.
pub async fn leaked_savepoints_commit_whole_or_not<H: StoreHarness>(harness: &H) -> Result {
    promise("leaked_savepoints_commit_whole_or_not", async {
        let bench = Bench::new(harness).await?;
        let mut conn = bench.store.open().await?;
        let event = Sample::new("1", "a")?;
        let (mut tx, _, claims) = bench.claim(&mut conn, &[&event]).await?;
        std::mem::forget(sqlx::Connection::begin(&mut *tx).await?);
        bench.handle(&mut tx, EFFECT).await?;
        let committed = bench.store.commit(tx, claims, Next::Rest).await.is_ok();
        // Before the connection's end, which would roll back what is only released.
        let stands = bench.stands().await?;
        let due = if committed { (1, 1) } else { (0, 0) };
        ensure!(
            stands == due,
            "a savepoint was left open; committed: {committed}, (claims, effects): {stands:?}"
        );
        bench.store.abandon(conn).await;
        let mut conn = bench.store.open().await?;
        let again = if committed {
            duplicate(true)
        } else {
            ClaimAnswer::New
        };
        bench.expect(&mut conn, &event, again, "the commit said so").await
    })
    .await
}
