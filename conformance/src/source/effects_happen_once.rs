use super::SourceHarness;
use super::life::Lives;
use super::tap::{events, numbered};
use crate::Result;
use crate::broken::promise;

/// A consumer on this source applies every event once, however many copies of it come.
pub async fn effects_happen_once<H: SourceHarness>(harness: &H) -> Result {
    promise("effects_happen_once", async {
        let ids = numbered(20);
        let copies = if harness.capabilities().keeps_copies { 3 } else { 1 };
        let lives = Lives::new(harness).await?;
        for _ in 0..copies {
            harness.publish(events(&ids)).await?;
        }
        lives.live_on()?;
        lives.all_applied_once(&ids).await
    })
    .await
}
