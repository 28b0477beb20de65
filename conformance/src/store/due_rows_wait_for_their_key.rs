use onlyonce::store::{OutgoingRow, Refusal, Relaying as _};

use super::StoreHarness;
use super::bench::Bench;
use super::outgoing_bench::{LATER, ONE, ids, lane_of, row, rows};
use crate::Result;
use crate::broken::{ensure, promise};

/// A row behind one of its key that waits or is parked is not due, unless it may overtake; rows of other keys, of
/// other destinations and without a key are. What is in hand, paused or for later is left out.
pub async fn due_rows_wait_for_their_key<H: StoreHarness>(harness: &H) -> Result {
    promise("due_rows_wait_for_their_key", async {
        let bench = Bench::new(harness).await?;
        let held = bench.all_lanes(ONE).await?;
        let mut written = rows(&["a-1", "a-2", "b-1", "none", "b-2", "a-3"])?;
        let mut elsewhere = row("a-4", Some("a"))?;
        elsewhere.destination = "other:b".parse()?;
        let mut another = row("another", Some("a"))?;
        another.relay = "another".to_owned();
        written.extend([elsewhere, another]);
        bench.write(&written).await?;
        let all = bench.due(|_| {}).await?;
        let every = ["a-1", "a-2", "b-1", "none", "b-2", "a-3", "a-4"];
        ensure!(ids(&all) == every, "of {every:?} {:?} are due", ids(&all));

        let (first, second) = (&all[0], &all[4]);
        for (again, how) in [(LATER, "waits"), (None, "is parked")] {
            let refusal = Refusal::new(first.id, lane_of(first, &held)?, "no", again);
            bench.store.mark_refused(&[refusal]).await?;
            let due = bench.due(|_| {}).await?;
            ensure!(
                ids(&due) == ["b-1", "none", "b-2", "a-4"],
                "a-1 {how}, and {:?} are due",
                ids(&due)
            );
            let due = bench.due(|request| request.overtake = true).await?;
            ensure!(
                ids(&due) == every[1..],
                "all may overtake a-1, and {:?} are due",
                ids(&due)
            );
        }
        let in_hand = [second.id];
        let due = bench.due(|request| request.except = &in_hand).await?;
        ensure!(
            ids(&due) == ["b-1", "none", "a-4"],
            "b-2 is in hand, and {:?} are due",
            ids(&due)
        );
        let due = bench.due(|request| request.paused = &["memory:a"]).await?;
        ensure!(
            ids(&due) == ["a-4"],
            "memory:a is paused, and {:?} are due",
            ids(&due)
        );
        let due = bench.due(|request| request.down = &["other"]).await?;
        ensure!(
            ids(&due) == ["b-1", "none", "b-2"],
            "other is down, and {:?} are due",
            ids(&due)
        );
        let due = bench.due(|request| request.limit = 1).await?;
        ensure!(
            ids(&due).starts_with(&["b-1"]) && !ids(&due).contains(&"b-2"),
            "one row of each lane was asked for, and {:?} came",
            ids(&due)
        );
        let lanes = [first.lane];
        let due = bench.due(|request| request.lanes = &lanes).await?;
        ensure!(
            due.iter().all(|row| row.lane == first.lane),
            "rows of lanes came that were not asked for"
        );

        let later = |id, key, set: fn(&mut OutgoingRow)| {
            let mut row = row(id, Some(key))?;
            set(&mut row);
            Ok(row)
        };
        let later: Result<Vec<_>> = [
            later("c-1", "c", |row| row.delay = LATER),
            later("c-2", "c", |_| {}),
            later("d-1", "d", |row| {
                row.send_at = LATER.map(|later| std::time::SystemTime::now() + later)
            }),
            later("d-2", "d", |_| {}),
        ]
        .into_iter()
        .collect();
        bench.write(&later?).await?;
        let due = bench.due(|_| {}).await?;
        ensure!(
            ids(&due) == ["b-1", "none", "b-2", "a-4"],
            "c-1 and d-1 are for later, and {:?} are due",
            ids(&due)
        );
        Ok(())
    })
    .await
}
