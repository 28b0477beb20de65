use onlyonce::store::{ClaimAnswer, HeldState, Store as _};

use super::StoreHarness;
use super::bench::{Bench, DEAD, LATER, Sample, duplicate, failure};
use crate::Result;
use crate::broken::{ensure, promise};

/// A held event is `Held` to its own copies. A copy with another payload is new, and its commit finishes
/// the row; if it fails it becomes the row's copy, and is `Held` from then on.
pub async fn held_events_stand_in_their_own_way<H: StoreHarness>(harness: &H) -> Result {
    promise("held_events_stand_in_their_own_way", async {
        let bench = Bench::new(harness).await?;
        let mut conn = bench.store.open().await?;
        let (a, b) = (Sample::new("1", "a")?, Sample::new("1", "b")?);
        bench.park(&mut conn, &a, LATER, &[failure(1)]).await?;
        let held = ClaimAnswer::Held(HeldState::Ready);
        bench.expect(&mut conn, &a, held, "held for later").await?;
        bench.park(&mut conn, &a, DEAD, &[failure(2)]).await?;
        let dead = ClaimAnswer::Held(HeldState::Dead);
        bench.expect(&mut conn, &a, dead, "dead").await?;
        bench.park(&mut conn, &b, DEAD, &[failure(3)]).await?;
        bench
            .expect(&mut conn, &b, dead, "the copy of a dead event")
            .await?;
        bench.expect(&mut conn, &a, dead, "dead, with a copy").await?;

        let good = Sample::new("1", "good")?;
        bench
            .expect(
                &mut conn,
                &good,
                ClaimAnswer::New,
                "a good resend of a dead event",
            )
            .await?;
        bench
            .expect(&mut conn, &a, duplicate(false), "a resend was processed")
            .await?;
        let unfinished = bench
            .number("SELECT count(*) FROM {inbox} WHERE state <> 'replayed'")
            .await?;
        ensure!(
            unfinished == 0,
            "the resend was processed and the dead row is not finished"
        );
        Ok(())
    })
    .await
}
