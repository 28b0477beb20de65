use tokio::time::sleep;

use super::SourceHarness;
use super::tap::{Tap, WINDOW, event};
use crate::Result;
use crate::broken::promise;

/// With nothing to deliver, `receive` waits; it neither fails nor returns empty-handed. What is
/// published while it waits is delivered.
pub async fn waits_when_there_is_nothing<H: SourceHarness>(harness: &H) -> Result {
    promise("waits_when_there_is_nothing", async {
        let mut tap = Tap::open(harness, WINDOW).await?;
        tap.quiet("the queue is empty").await?;
        let publishing = async {
            sleep(harness.capabilities().quiet / 4).await;
            harness.publish(vec![event("e1")]).await
        };
        let (taken, published) = tokio::join!(tap.take(1), publishing);
        published?;
        let taken = taken?;
        tap.expect(&taken, &["e1".to_owned()])?;
        tap.ack(taken).await?;
        tap.finish().await
    })
    .await
}
