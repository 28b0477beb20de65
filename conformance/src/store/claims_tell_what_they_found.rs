use onlyonce::store::{ClaimAnswer, Next, Outcome, Store as _};

use super::StoreHarness;
use super::bench::{Bench, Sample, duplicate, refused};
use crate::Result;
use crate::broken::{ensure, promise};

/// The first claim is new. Later ones are told that it was committed, whether the payload is the same,
/// and what became of the first.
pub async fn claims_tell_what_they_found<H: StoreHarness>(harness: &H) -> Result {
    promise("claims_tell_what_they_found", async {
        let bench = Bench::new(harness).await?;
        let mut conn = bench.store.open().await?;
        let event = Sample::new("1", "a")?;
        bench
            .expect(&mut conn, &event, ClaimAnswer::New, "a first delivery")
            .await?;
        bench
            .expect(&mut conn, &event, duplicate(true), "a second one")
            .await?;
        let other = Sample::new("1", "b")?;
        bench
            .expect(&mut conn, &other, duplicate(false), "another payload")
            .await?;
        let neighbour = Sample::new("2", "a")?;
        bench
            .expect(&mut conn, &neighbour, ClaimAnswer::New, "another event")
            .await?;
        ensure!(
            bench.stands().await? == (2, 2),
            "a duplicate left something behind"
        );

        let dropped = Sample::new("3", "a")?;
        let (tx, _, claims) = bench.claim_as(&mut conn, &[&dropped], Outcome::Discarded).await?;
        bench
            .store
            .commit(tx, claims, Next::Rest)
            .await
            .map_err(refused)?;
        let discarded = ClaimAnswer::Duplicate {
            same_payload: true,
            outcome: Outcome::Discarded,
        };
        bench
            .expect(&mut conn, &dropped, discarded, "an event that was discarded")
            .await
    })
    .await
}
