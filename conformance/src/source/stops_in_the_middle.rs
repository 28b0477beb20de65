use std::sync::Arc;

use onlyonce::{Consumer, RetryPolicy};
use tokio::sync::Notify;
use tokio::time::timeout;

use super::SourceHarness;
use super::life::Lives;
use super::tap::{WINDOW, events, numbered};
use crate::broken::{ensure, promise};
use crate::{CONSUMER, Result, StoreHarness as _};

/// A stop finishes what runs, gives back the rest, and is nobody's failed attempt.
pub async fn stops_in_the_middle<H: SourceHarness>(harness: &H) -> Result {
    promise("stops_in_the_middle", async {
        let ids = numbered(20);
        harness.publish(events(&ids)).await?;
        let lives = Lives::new(harness).await?;
        let (here, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let consumer = Consumer::builder(CONSUMER, lives.stage.store().await?)
            .source(harness.source())
            .handler(lives.handler().pausing(3, here.clone(), go_on.clone()))
            .retry(RetryPolicy::none())
            .window(WINDOW)
            .build()?;
        let stop = async move {
            here.notified().await;
            // The handler goes on after the stop: it is let finish.
            go_on.notify_one();
        };
        let can = harness.capabilities();
        let limit = can.patience * 2 + can.redelivered_after;
        let stopped = timeout(limit, consumer.run_until(stop)).await;
        ensure!(stopped.is_ok(), "a stopped consumer was not done after {limit:?}");
        stopped??;
        let effects = lives.stage.table("effects");
        let applied = lives
            .stage
            .number(&format!("SELECT count(*) FROM {effects}"))
            .await?;
        ensure!(applied >= 3, "the stop cut off a handler that was about to end");
        lives.live_on()?;
        lives.all_applied_once(&ids).await
    })
    .await
}
