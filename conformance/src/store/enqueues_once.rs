use onlyonce::store::{Inbox as _, Next, Store as _};

use super::StoreHarness;
use super::bench::{Bench, LONG, NOW, Sample, refused};
use crate::Result;
use crate::broken::{ensure, promise};

/// An event is in the queue once, however often it is enqueued; in a transaction it is there if and only
/// if that commits.
pub async fn enqueues_once<H: StoreHarness>(harness: &H) -> Result {
    promise("enqueues_once", async {
        let bench = Bench::new(harness).await?;
        let event = Sample::new("1", "a")?;
        ensure!(
            bench.store.enqueue(&event.parked(NOW)).await?,
            "a new event was not enqueued"
        );
        ensure!(
            !bench.store.enqueue(&event.parked(NOW)).await?,
            "an event was enqueued twice"
        );
        let mut conn = bench.store.open().await?;
        let handled = Sample::new("handled", "a")?;
        for (n, commits) in [("2", false), ("3", true)] {
            let inner = Sample::new(n, "a")?;
            let (mut tx, _, claims) = bench.claim(&mut conn, &[&handled]).await?;
            bench.store.enqueue_in(&mut tx, &inner.parked(NOW)).await?;
            if commits {
                bench
                    .store
                    .commit(tx, claims, Next::Rest)
                    .await
                    .map_err(refused)?;
            } else {
                bench.store.rollback(&mut conn).await?;
            }
        }
        let mut ids: Vec<String> = bench
            .lease(9, LONG)
            .await?
            .into_iter()
            .map(|held| held.lease.identity.id)
            .collect();
        ids.sort();
        ensure!(ids == ["1", "3"], "1 and 3 were enqueued, and {ids:?} are due");
        Ok(())
    })
    .await
}
