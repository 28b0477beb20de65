use onlyonce::store::{Outgoing as _, Refusal, Relaying as _};

use super::StoreHarness;
use super::bench::Bench;
use super::outgoing_bench::{LATER, ONE, RELAY, ids, lane_of, rows};
use crate::Result;
use crate::broken::{ensure, promise};

/// What is parked is listed; a replay makes it due at its old place, counted, with no attempts; a discard deletes it;
/// both let its key go on, and neither touches what is not parked.
pub async fn parked_rows_are_replayed_or_discarded<H: StoreHarness>(harness: &H) -> Result {
    promise("parked_rows_are_replayed_or_discarded", async {
        let bench = Bench::new(harness).await?;
        let held = bench.all_lanes(ONE).await?;
        bench.write(&rows(&["a-1", "a-2", "b-1", "b-2", "c-1"])?).await?;
        let all = bench.due(|_| {}).await?;
        let numbers: Vec<i64> = all.iter().map(|row| row.id).collect();
        let refusal = |n: usize, again| {
            let lane = lane_of(&all[n], &held)?;
            Ok::<_, crate::Broken>(Refusal::new(all[n].id, lane, "too large", again))
        };
        bench
            .store
            .mark_refused(&[refusal(0, None)?, refusal(2, None)?, refusal(4, LATER)?])
            .await?;

        let parked = bench.store.parked(RELAY, 0, 9).await?;
        let listed: Vec<_> = parked
            .iter()
            .map(|row| (row.id, row.event_id.as_str(), row.attempts, row.error.as_str()))
            .collect();
        ensure!(
            listed
                == [
                    (numbers[0], "a-1", 1, "too large"),
                    (numbers[2], "b-1", 1, "too large")
                ],
            "a-1 and b-1 are parked, and {listed:?} are listed"
        );
        let page = bench.store.parked(RELAY, numbers[0], 1).await?;
        ensure!(
            page.len() == 1 && page[0].id == numbers[2],
            "the page behind the first one has {} rows",
            page.len()
        );
        let others = bench.store.replay_parked("another", &numbers).await?;
        ensure!(
            others.is_empty(),
            "rows of another relay were replayed: {others:?}"
        );

        let replayed = bench
            .store
            .replay_parked(RELAY, &[numbers[0], numbers[1], numbers[4]])
            .await?;
        ensure!(
            replayed == [numbers[0]],
            "of three rows one was parked, and {replayed:?} were replayed"
        );
        let due = bench.due(|_| {}).await?;
        ensure!(
            ids(&due) == ["a-1", "a-2"],
            "a-1 was replayed, and {:?} are due",
            ids(&due)
        );
        let first = &due[0];
        ensure!(
            (first.message.replays, first.attempts, due[1].message.replays) == (1, 0, 0),
            "a replay has {} replays and {} attempts",
            first.message.replays,
            first.attempts
        );
        let twice = bench.store.replay_parked(RELAY, &numbers[..1]).await?;
        ensure!(twice.is_empty(), "what is due was replayed");

        let gone = bench.store.discard_parked(RELAY, &numbers).await?;
        ensure!(
            gone == [numbers[2]],
            "of five rows one was parked, and {gone:?} were discarded"
        );
        let due = bench.due(|_| {}).await?;
        ensure!(
            ids(&due) == ["a-1", "a-2", "b-2"],
            "b-1 was discarded, and {:?} are due",
            ids(&due)
        );
        let left = bench.outgoing().await?;
        ensure!(left == 4, "one row of five was discarded, and {left} are left");
        Ok(())
    })
    .await
}
