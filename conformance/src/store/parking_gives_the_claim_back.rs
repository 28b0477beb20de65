use onlyonce::store::{Inbox as _, Parking, Store as _};

use super::StoreHarness;
use super::bench::{Bench, DEAD, LATER, Sample, failure};
use crate::broken::{ensure, promise};
use crate::{CONSUMER, Result};

/// Parking holds an event and leaves no claim of it. What was processed is a duplicate and not held,
/// unless its own transaction escaped. What has no identity is held each time.
pub async fn parking_gives_the_claim_back<H: StoreHarness>(harness: &H) -> Result {
    promise("parking_gives_the_claim_back", async {
        let bench = Bench::new(harness).await?;
        let mut conn = bench.store.open().await?;
        let event = Sample::new("1", "a")?;
        let parking = bench.park(&mut conn, &event, LATER, &[failure(1)]).await?;
        ensure!(parking == Parking::Held, "a new event was parked as {parking:?}");
        let (claims, _) = bench.stands().await?;
        ensure!(claims == 0, "parking left a claim: the event would never run");

        let done = Sample::new("2", "a")?;
        bench.process(&mut conn, &done).await?;
        let parking = bench.park(&mut conn, &done, DEAD, &[failure(1)]).await?;
        ensure!(
            parking == Parking::Duplicate,
            "a processed event was parked as {parking:?}: a replay would find nothing to do"
        );
        let mut escaped = done.parked(DEAD);
        escaped.escaped = true;
        let parking = bench.store.park(&mut conn, &bench.limits, &escaped).await?;
        ensure!(
            parking == Parking::Held,
            "an escaped event was parked as {parking:?}"
        );
        let (claims, _) = bench.stands().await?;
        ensure!(
            claims == 1,
            "parking an escaped event took its committed claim away"
        );

        let mut nameless = event.parked(DEAD);
        nameless.key = None;
        for _ in 0..2 {
            bench.store.park(&mut conn, &bench.limits, &nameless).await?;
        }
        let backlog = bench.store.backlog(CONSUMER).await?;
        ensure!(
            (backlog.due, backlog.delayed, backlog.dead) == (0, 1, 3),
            "one event is held for later and three are dead, and the backlog is {backlog:?}"
        );
        Ok(())
    })
    .await
}
