use std::time::Duration;

use onlyonce::store::{Refusal, Relaying as _};

use super::StoreHarness;
use super::bench::{Bench, LONG};
use super::outgoing_bench::{LATER, ONE, OTHER, RELAY, lane_of, rows};
use crate::Result;
use crate::broken::{ensure, promise};

/// Whoever lost a lane writes no refusal down any more; who holds it does, and may mark as sent what it likes.
pub async fn refusals_are_fenced<H: StoreHarness>(harness: &H) -> Result {
    promise("refusals_are_fenced", async {
        let bench = Bench::new(harness).await?;
        bench.write(&rows(&["a-1", "b-1", "c-1"])?).await?;
        let old = bench.store.hold_lanes(RELAY, ONE, Duration::ZERO).await?;
        bench.store.give_up_lanes(RELAY, ONE).await?;
        let new = bench.store.hold_lanes(RELAY, OTHER, LONG).await?;
        let (parked, waiting, sent) = (
            bench.due_row("a-1").await?,
            bench.due_row("b-1").await?,
            bench.due_row("c-1").await?,
        );
        for again in [None, LATER] {
            let refusals = [Refusal::new(parked.id, lane_of(&parked, &old)?, "no", again)];
            let ours = bench.store.mark_refused(&refusals).await?;
            ensure!(ours.is_empty(), "the old owner's refusal was written down");
        }
        let untouched = bench.due_row("a-1").await?;
        ensure!(
            untouched.attempts == 0,
            "the old owner's refusal counts, though it was not written down"
        );

        let refusals = [
            Refusal::new(parked.id, lane_of(&parked, &new)?, "never", None),
            Refusal::new(waiting.id, lane_of(&waiting, &new)?, "not now", LATER),
            Refusal::new(sent.id, lane_of(&sent, &old)?, "too late", None),
        ];
        let mut ours = bench.store.mark_refused(&refusals).await?;
        ours.sort_unstable();
        ensure!(
            ours == [parked.id, waiting.id],
            "refusals of rows {:?} were the owner's, and {ours:?} were written down",
            [parked.id, waiting.id]
        );
        let said = bench
            .number(
                "SELECT count(*) FROM {outbox} WHERE attempts = 1 AND ((event_id = 'a-1' AND last_error = 'never' AND \
                 parked_at IS NOT NULL) OR (event_id = 'b-1' AND last_error = 'not now' AND next_attempt_at IS NOT NULL))",
            )
            .await?;
        ensure!(said == 2, "the owner's refusals are not what the rows say");

        // Needs no lane: the broker has it.
        bench.store.mark_sent(&[sent.id], false).await?;
        bench.store.mark_sent(&[sent.id], false).await?;
        let left = bench.outgoing().await?;
        ensure!(left == 2, "{left} rows are left of three, of which one was sent");
        Ok(())
    })
    .await
}
