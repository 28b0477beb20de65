use std::time::Duration;

use onlyonce::store::{ClaimAnswer, Next, Store as _};
use tokio::time::timeout;

use super::StoreHarness;
use super::bench::{Bench, EFFECT, Sample, duplicate, refused};
use crate::Result;
use crate::broken::{ensure, promise};

/// A concurrent copy, of this process or another, waits for the first: if that commits it is a
/// duplicate, if it is rolled back it is new.
pub async fn copies_wait_for_each_other<H: StoreHarness>(harness: &H) -> Result {
    promise("copies_wait_for_each_other", async {
        let bench = Bench::new(harness).await?;
        for (n, elsewhere, commits) in [
            (1, false, true),
            (2, false, false),
            (3, true, true),
            (4, true, false),
        ] {
            let mut second = Bench {
                harness,
                store: if elsewhere {
                    harness.store().await?
                } else {
                    bench.store.clone()
                },
                limits: bench.limits.clone(),
            };
            second.limits.lock_timeout = Duration::from_secs(20);
            let event = Sample::new(&format!("{n}"), "a")?;
            let (mut a, mut b) = (bench.store.open().await?, second.store.open().await?);
            let (mut tx, _, claims) = bench.claim(&mut a, &[&event]).await?;
            bench.handle(&mut tx, EFFECT).await?;
            let copy = second.process(&mut b, &event);
            tokio::pin!(copy);
            // It must not be answered while the first is undecided.
            let early = timeout(Duration::from_millis(300), &mut copy).await;
            ensure!(
                early.is_err(),
                "the first copy was undecided and the second was told {early:?}"
            );
            let due = if commits {
                bench
                    .store
                    .commit(tx, claims, Next::Rest)
                    .await
                    .map_err(refused)?;
                duplicate(true)
            } else {
                bench.store.rollback(&mut a).await?;
                ClaimAnswer::New
            };
            let answer = copy.await?;
            ensure!(
                answer == due,
                "the first copy ended (committed: {commits}) and the second was told {answer:?}"
            );
        }
        let stands = bench.stands().await?;
        ensure!(
            stands == (4, 4),
            "four events were processed, and (claims, effects) are {stands:?}"
        );
        Ok(())
    })
    .await
}
