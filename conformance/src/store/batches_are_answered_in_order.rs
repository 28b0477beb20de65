use onlyonce::store::{ClaimAnswer, HeldState, Next, Store as _};

use super::StoreHarness;
use super::bench::{Bench, DEAD, Sample, duplicate, failure, refused};
use crate::Result;
use crate::broken::{ensure, promise};

/// Each event of a batch gets its own answer, in the order of the requests. One that stands there
/// twice is new once.
pub async fn batches_are_answered_in_order<H: StoreHarness>(harness: &H) -> Result {
    promise("batches_are_answered_in_order", async {
        let bench = Bench::new(harness).await?;
        let mut conn = bench.store.open().await?;
        let (done, a, a2, b, dead) = (
            Sample::new("done", "x")?,
            Sample::new("a", "x")?,
            Sample::new("a", "y")?,
            Sample::new("b", "x")?,
            Sample::new("dead", "x")?,
        );
        bench.process(&mut conn, &done).await?;
        bench.park(&mut conn, &dead, DEAD, &[failure(1)]).await?;
        let batch = [&b, &a, &done, &a2, &dead, &a];
        let (tx, answers, claims) = bench.claim(&mut conn, &batch).await?;
        let due = [
            ClaimAnswer::New,
            ClaimAnswer::New,
            duplicate(true),
            duplicate(false),
            ClaimAnswer::Held(HeldState::Dead),
            duplicate(true),
        ];
        ensure!(
            answers == due,
            "{due:?} were due and the batch was answered {answers:?}"
        );
        bench
            .store
            .commit(tx, claims, Next::Rest)
            .await
            .map_err(refused)?;
        let (claims, _) = bench.stands().await?;
        ensure!(
            claims == 3,
            "three events are processed, and {claims} claims stand"
        );

        let many: Vec<Sample> = (0..500)
            .map(|n| Sample::new(&format!("m{n}"), "x"))
            .collect::<Result<_>>()?;
        let many: Vec<&Sample> = many.iter().collect();
        let (tx, answers, claims) = bench.claim(&mut conn, &many).await?;
        ensure!(
            answers.iter().all(|answer| *answer == ClaimAnswer::New),
            "of 500 new events some were not"
        );
        bench
            .store
            .commit(tx, claims, Next::Rest)
            .await
            .map_err(refused)?;
        let (claims, _) = bench.stands().await?;
        ensure!(
            claims == 503,
            "503 events are processed, and {claims} claims stand"
        );
        Ok(())
    })
    .await
}
