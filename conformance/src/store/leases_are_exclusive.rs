use std::time::Duration;

use onlyonce::store::Inbox as _;

use super::StoreHarness;
use super::bench::{Bench, LATER, LONG, NOW, Sample};
use crate::broken::{ensure, promise};
use crate::{CONSUMER, Result};

/// A due event is leased to one at a time and to its own consumer only; a later one is not due. A
/// lease that is renewed stays; one that ran out goes to the next, who is told. One that is given back
/// is due again when it was said to be, and was no attempt.
pub async fn leases_are_exclusive<H: StoreHarness>(harness: &H) -> Result {
    promise("leases_are_exclusive", async {
        let bench = Bench::new(harness).await?;
        let event = Sample::new("1", "a")?;
        bench.store.enqueue(&event.parked(NOW)).await?;
        bench.store.enqueue(&Sample::new("2", "a")?.parked(LATER)).await?;
        let strangers = bench.store.lease("other", 9, LONG).await?;
        ensure!(strangers.is_empty(), "another consumer leased the event");
        let first = bench.lease_one(LONG).await?;
        ensure!(
            first.lease.identity == event.identity && !first.released_by_timeout,
            "a fresh event was leased as {first:?}"
        );
        let elsewhere = harness.store().await?;
        let twice = elsewhere.lease(CONSUMER, 9, LONG).await?;
        ensure!(twice.is_empty(), "two have leased one event");

        let ours = bench
            .store
            .renew(std::slice::from_ref(&first.lease), Duration::ZERO)
            .await?;
        ensure!(ours == [first.lease.id], "a valid lease was renewed for {ours:?}");
        // It was renewed for no time at all: it has run out.
        let second = bench.lease_one(LONG).await?;
        ensure!(
            second.released_by_timeout && second.lease.token != first.lease.token,
            "a lease that ran out went on as {second:?}"
        );
        bench
            .store
            .release_leased(std::slice::from_ref(&second.lease), Duration::from_secs(3600))
            .await?;
        let early = bench.lease(9, LONG).await?;
        ensure!(
            early.is_empty(),
            "an event was given back for an hour and leased at once"
        );
        let backlog = bench.store.backlog(CONSUMER).await?;
        ensure!(
            backlog.delayed == 2,
            "two events wait for later, and the backlog is {backlog:?}"
        );

        bench.store.enqueue(&Sample::new("3", "a")?.parked(NOW)).await?;
        let third = bench.lease_one(LONG).await?;
        bench
            .store
            .release_leased(std::slice::from_ref(&third.lease), Duration::ZERO)
            .await?;
        let again = bench.lease_one(LONG).await?;
        ensure!(
            again.lease.attempts == 0 && !again.released_by_timeout,
            "giving back counted as a failure: {again:?}"
        );
        Ok(())
    })
    .await
}
