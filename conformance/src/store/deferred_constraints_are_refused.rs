use onlyonce::store::{ClaimAnswer, CommitError, Next, Store as _};

use super::StoreHarness;
use super::bench::{Bench, EFFECT, Sample};
use crate::Result;
use crate::broken::{ensure, promise};

/// A constraint of the handler's that fires at `COMMIT` refuses the data; it is not a doubtful commit,
/// and nothing stays.
pub async fn deferred_constraints_are_refused<H: StoreHarness>(harness: &H) -> Result {
    promise("deferred_constraints_are_refused", async {
        let bench = Bench::new(harness).await?;
        bench
            .sql("CREATE TABLE {parents} (id INTEGER PRIMARY KEY)")
            .await?;
        bench
            .sql(
                "CREATE TABLE {children} (parent INTEGER REFERENCES {parents} (id) \
                 DEFERRABLE INITIALLY DEFERRED)",
            )
            .await?;
        let mut conn = bench.store.open().await?;
        let event = Sample::new("1", "a")?;
        let (mut tx, _, claims) = bench.claim(&mut conn, &[&event]).await?;
        bench.handle(&mut tx, EFFECT).await?;
        bench.handle(&mut tx, "INSERT INTO {children} VALUES (7)").await?;
        match bench.store.commit(tx, claims, Next::Rest).await {
            Err(CommitError::Refused(_)) => {}
            other => ensure!(false, "the data was wrong and the commit says {other:?}"),
        }
        drop(conn);
        let stands = bench.stands().await?;
        ensure!(
            stands == (0, 0),
            "a refused commit left (claims, effects) {stands:?}"
        );
        let mut conn = bench.store.open().await?;
        bench
            .expect(&mut conn, &event, ClaimAnswer::New, "the commit was refused")
            .await
    })
    .await
}
