use std::time::Duration;

use onlyonce::store::Relaying as _;

use super::StoreHarness;
use super::bench::{Bench, LONG};
use super::outgoing_bench::{RELAY, ids, rows};
use crate::Result;
use crate::broken::{ensure, promise};

/// What was sent is gone, or kept and never due again, also where it was parked meanwhile; what is kept is purged
/// when its time is over and not before.
pub async fn sent_rows_are_never_due<H: StoreHarness>(harness: &H) -> Result {
    promise("sent_rows_are_never_due", async {
        let bench = Bench::new(harness).await?;
        bench.write(&rows(&["a-1", "a-2", "a-3", "a-4"])?).await?;
        let all = bench.due(|_| {}).await?;
        bench.store.mark_sent(&[all[0].id], false).await?;
        bench
            .sql("UPDATE {outbox} SET parked_at = created_at WHERE event_id = 'a-2'")
            .await?;
        bench.store.mark_sent(&[all[1].id, all[2].id], true).await?;
        let left = bench.outgoing().await?;
        ensure!(left == 3, "one row was not to be kept, and {left} are left");
        let due = bench.due(|_| {}).await?;
        ensure!(
            ids(&due) == ["a-4"],
            "three of four were sent, and {:?} are due",
            ids(&due)
        );
        let backlog = bench.store.outgoing(RELAY).await?;
        ensure!(
            (backlog.pending, backlog.parked) == (1, 0) && backlog.oldest.is_some(),
            "one row is not sent, and the backlog is {backlog:?}"
        );
        let purged = bench.store.purge_sent(RELAY, LONG, 9).await?;
        ensure!(purged == 0, "{purged} sent rows were purged before their time");
        tokio::time::sleep(Duration::from_millis(20)).await;
        let purged = bench.store.purge_sent(RELAY, Duration::from_millis(1), 1).await?;
        ensure!(purged == 1, "one row was to be purged, and {purged} were");
        let purged = bench.store.purge_sent(RELAY, Duration::from_millis(1), 9).await?;
        let left = bench.outgoing().await?;
        ensure!(
            (purged, left) == (1, 1),
            "after the purge of sent rows {left} are left"
        );
        Ok(())
    })
    .await
}
