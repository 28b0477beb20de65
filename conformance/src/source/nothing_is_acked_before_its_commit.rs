use onlyonce::testing::CrashPoint;

use super::SourceHarness;
use super::life::{Ended, Lives};
use super::tap::{events, numbered};
use crate::Result;
use crate::broken::{ensure, promise};

/// As long as the transaction is open the broker has seen no ack: it still has the message, and a
/// process that dies there loses nothing.
pub async fn nothing_is_acked_before_its_commit<H: SourceHarness>(harness: &H) -> Result {
    promise("nothing_is_acked_before_its_commit", async {
        let ids = numbered(1);
        harness.publish(events(&ids)).await?;
        let lives = Lives::new(harness).await?;
        for point in [CrashPoint::Claimed, CrashPoint::Handled] {
            let ended = lives.live(Some((point, 1)), async || {
                if let Some(depth) = harness.depth().await? {
                    ensure!(
                        depth.waiting + depth.unacked == 1,
                        "before the commit the broker has {depth:?}: the event was acked"
                    );
                }
                Ok(())
            })?;
            ensure!(
                ended == Ended::Died,
                "e1 did not come again after a death before its commit: it was acked, and is lost"
            );
        }
        lives.live_on()?;
        lives.all_applied_once(&ids).await
    })
    .await
}
