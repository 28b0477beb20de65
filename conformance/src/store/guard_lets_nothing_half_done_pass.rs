use onlyonce::store::{CommitError, Next, Store as _};

use super::StoreHarness;
use super::bench::{Bench, DEAD, EFFECT, Sample, failure};
use crate::Result;
use crate::broken::{ensure, promise};

/// Whatever a handler does to its transaction: if it is committed, claim and effect stand. If it is not, what was refused as aborted left nothing, and only what is refused as escaped may have
/// left a part. The held row of the event is finished with the commit and not otherwise.
pub async fn guard_lets_nothing_half_done_pass<H: StoreHarness>(harness: &H) -> Result {
    promise("guard_lets_nothing_half_done_pass", async {
        for handler in HANDLERS {
            let ended = one(harness, handler).await;
            harness
                .sql(&format!("DROP TABLE {}", harness.table("effects")))
                .await?;
            ended?;
        }
        Ok(())
    })
    .await
}

/// What handlers do to their transaction, errors ignored.
const HANDLERS: &[&[&str]] = &[
    &[EFFECT],
    &[EFFECT, BROKEN],
    &[BROKEN, EFFECT],
    &[EFFECT, "COMMIT"],
    &["ROLLBACK"],
    &[EFFECT, "ROLLBACK"],
    &["ROLLBACK", EFFECT],
    &["ROLLBACK", "BEGIN", EFFECT],
    &["ROLLBACK", "BEGIN", EFFECT, "COMMIT"],
    &[EFFECT, "COMMIT", "BEGIN"],
    &[EFFECT, "COMMIT", "BEGIN", EFFECT],
    &[EFFECT, "COMMIT", "BEGIN", BROKEN],
    &["SAVEPOINT s", EFFECT, "RELEASE SAVEPOINT s"],
    &[EFFECT, "SAVEPOINT s", BROKEN, "ROLLBACK TO SAVEPOINT s"],
];

/// A statement that fails.
const BROKEN: &str = "INSERT INTO {effects} VALUES (NULL)";

async fn one<H: StoreHarness>(harness: &H, handler: &[&str]) -> Result {
    let bench = Bench::new(harness).await?;
    bench.sql("DELETE FROM {processed_events}").await?;
    bench.sql("DELETE FROM {inbox}").await?;
    let mut conn = bench.store.open().await?;
    let event = Sample::new("1", "a")?;
    bench
        .park(&mut conn, &Sample::new("1", "held before")?, DEAD, &[failure(1)])
        .await?;
    let (mut tx, _, claims) = bench.claim(&mut conn, &[&event]).await?;
    for sql in handler {
        // A handler that ignores its errors.
        let _ = bench.handle(&mut tx, sql).await;
    }
    let passed = match bench.store.commit(tx, claims, Next::Rest).await {
        Ok(()) => Ok(()),
        Err(CommitError::Escaped(_)) => {
            ensure!(
                handler.iter().any(|sql| matches!(*sql, "COMMIT" | "ROLLBACK")),
                "{handler:?} did not escape, and the guard says that it did"
            );
            Err("escaped".to_owned())
        }
        Err(error) => Err(format!("{error:?}")),
    };
    let clean = conn.is_clean();
    bench.store.abandon(conn).await;
    let (claims, effects) = bench.stands().await?;
    let unfinished = bench
        .number("SELECT count(*) FROM {inbox} WHERE state = 'dead'")
        .await?;
    match passed {
        Ok(()) => {
            ensure!(
                clean && claims == 1 && effects >= 1,
                "{handler:?} was committed, and (claims, effects) are {:?}",
                (claims, effects)
            );
            ensure!(
                unfinished == 0,
                "{handler:?} was committed and its held row is not finished"
            );
        }
        Err(said) => {
            ensure!(
                said == "escaped" || (claims, effects) == (0, 0),
                "{handler:?} was refused as {said}, and (claims, effects) are {:?}",
                (claims, effects)
            );
            ensure!(
                unfinished == 1,
                "{handler:?} was refused and its held row is finished"
            );
        }
    }
    Ok(())
}
