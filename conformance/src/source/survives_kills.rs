use onlyonce::testing::CrashPoint;

use super::SourceHarness;
use super::life::Lives;
use super::tap::{events, numbered};
use crate::Result;
use crate::broken::promise;

/// A consumer that dies at any step, again and again, loses nothing and applies nothing twice.
pub async fn survives_kills<H: SourceHarness>(harness: &H) -> Result {
    promise("survives_kills", async {
        let ids = numbered(24);
        harness.publish(events(&ids)).await?;
        let lives = Lives::new(harness).await?;
        for point in [
            CrashPoint::Received,
            CrashPoint::Claimed,
            CrashPoint::Handled,
            CrashPoint::Committed,
            CrashPoint::Settling,
        ] {
            lives.live(Some((point, 3)), async || Ok(()))?;
        }
        lives.live_on()?;
        lives.all_applied_once(&ids).await
    })
    .await
}
