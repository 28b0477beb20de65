use std::collections::HashMap;
use std::time::Duration;

use onlyonce::store::{HeldLane, LANES, Relaying as _};

use super::StoreHarness;
use super::bench::Bench;
use super::outgoing_bench::{ONE, OTHER, RELAY};
use crate::Result;
use crate::broken::{ensure, promise};

/// What a lease lasts here, and how often it is renewed.
const LEASE: Duration = Duration::from_secs(3);
const TURN: Duration = Duration::from_millis(100);

/// Each lane has one owner at a time; living owners have equal shares; what changes its owner gets another fence; what
/// is given up at an end is free at once.
pub async fn lanes_are_shared_and_fenced<H: StoreHarness>(harness: &H) -> Result {
    promise("lanes_are_shared_and_fenced", async {
        let bench = Bench::new(harness).await?;
        let all = usize::from(LANES);
        let hold = async |owner| bench.store.hold_lanes(RELAY, owner, LEASE).await;
        let alone = hold(ONE).await?;
        ensure!(
            alone.len() == all,
            "one that is alone holds {} lanes",
            alone.len()
        );
        let again = hold(ONE).await?;
        ensure!(again == alone, "a renewal has changed lanes or fences");

        let began = std::time::Instant::now();
        let mut newcomer = hold(OTHER).await?;
        ensure!(newcomer.is_empty(), "two hold {} lanes", newcomer.len());
        let mut first = hold(ONE).await?;
        while newcomer.len() < all / 2 {
            ensure!(
                began.elapsed() < LEASE * 10,
                "the newcomer has {} lanes only",
                newcomer.len()
            );
            tokio::time::sleep(TURN).await;
            first = hold(ONE).await?;
            newcomer = hold(OTHER).await?;
            let both = first
                .iter()
                .filter(|one| newcomer.iter().any(|other| other.lane == one.lane));
            let both = both.count();
            ensure!(both == 0, "two hold {both} lanes");
        }
        ensure!(
            first.len() == all / 2,
            "two have {} and {} lanes",
            first.len(),
            newcomer.len()
        );
        ensure!(
            began.elapsed() >= LEASE / 3,
            "lanes that were given up had a new owner while rows of the old one could be on their way"
        );
        let fences = |held: &[HeldLane]| {
            held.iter()
                .map(|held| (held.lane, held.fence))
                .collect::<HashMap<_, _>>()
        };
        let before = fences(&alone);
        ensure!(
            newcomer
                .iter()
                .all(|held| before.get(&held.lane) < Some(&held.fence)),
            "a lane has another owner and no higher fence"
        );

        bench.store.give_up_lanes(RELAY, ONE).await?;
        let rest = hold(OTHER).await?;
        ensure!(
            rest.len() == all,
            "after the other's end one holds {} lanes",
            rest.len()
        );
        let other_relay = bench.store.hold_lanes("another", ONE, LEASE).await?;
        ensure!(other_relay.len() == all, "another relay's lanes are not its own");
        Ok(())
    })
    .await
}
