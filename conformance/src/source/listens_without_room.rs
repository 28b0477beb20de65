use onlyonce::source::{Incoming, Source as _};
use tokio::time::timeout;

use super::SourceHarness;
use super::tap::{Tap, WINDOW, events, numbered};
use crate::Result;
use crate::broken::{ensure, promise};

/// `receive(0)` delivers nothing and still hears of losses: the loop calls it while it has no room.
pub async fn listens_without_room<H: SourceHarness>(harness: &H) -> Result {
    promise("listens_without_room", async {
        let ids = numbered(3);
        harness.publish(events(&ids)).await?;
        let mut tap = Tap::open(harness, WINDOW).await?;
        nothing(&mut tap).await?;
        let mut taken = tap.take(2).await?;
        nothing(&mut tap).await?;
        if tap.can.cuts {
            harness.cut().await?;
            match timeout(tap.can.patience, tap.source.receive(0)).await {
                Ok(Ok(Incoming::Lost(_)) | Err(_)) => {}
                Ok(Ok(other)) => ensure!(false, "after a cut, receive(0) said {other:?}"),
                Err(_) => ensure!(
                    false,
                    "deliveries were cut off, and receive(0) did not hear of it"
                ),
            }
            taken.clear();
        }
        taken.extend(tap.take(3 - taken.len()).await?);
        tap.expect(&taken, &ids)?;
        tap.ack(taken).await?;
        tap.finish().await
    })
    .await
}

async fn nothing<H: SourceHarness>(tap: &mut Tap<'_, H>) -> Result {
    match timeout(tap.can.quiet, tap.source.receive(0)).await {
        Err(_) => Ok(()),
        Ok(said) => {
            ensure!(false, "there was no room, and receive(0) said {said:?}");
            Ok(())
        }
    }
}
