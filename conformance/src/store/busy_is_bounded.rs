use std::time::Duration;

use onlyonce::store::{ClaimAnswer, Store as _, StoreErrorKind};
use tokio::time::timeout;

use super::StoreHarness;
use super::bench::{Bench, Sample};
use crate::Result;
use crate::broken::{ensure, promise};

/// A copy that runs for longer than `lock_timeout` makes the claim `Busy`; the database is not down.
pub async fn busy_is_bounded<H: StoreHarness>(harness: &H) -> Result {
    promise("busy_is_bounded", async {
        let mut bench = Bench::new(harness).await?;
        let event = Sample::new("1", "a")?;
        let (mut a, mut b) = (bench.store.open().await?, bench.store.open().await?);
        bench.claim(&mut a, &[&event]).await?;
        bench.limits.lock_timeout = Duration::from_millis(200);
        match timeout(BOUND, bench.claim(&mut b, &[&event])).await {
            Err(_) => ensure!(
                false,
                "lock_timeout is 200 ms, and after {BOUND:?} the claim still waits"
            ),
            Ok(Ok((_, answers, _))) => ensure!(
                false,
                "the first copy is undecided and the second was told {answers:?}"
            ),
            Ok(Err(error)) => ensure!(
                error.kind() == StoreErrorKind::Busy,
                "a busy event is {:?}: {error}",
                error.kind()
            ),
        }
        bench.store.abandon(b).await;
        bench.store.probe().await?;
        bench.store.rollback(&mut a).await?;
        let mut b = bench.store.open().await?;
        bench
            .expect(&mut b, &event, ClaimAnswer::New, "the other copy was rolled back")
            .await
    })
    .await
}

const BOUND: Duration = Duration::from_secs(10);
