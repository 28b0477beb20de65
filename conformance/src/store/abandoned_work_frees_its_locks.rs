use std::time::Duration;

use onlyonce::store::{ClaimAnswer, Store as _};
use tokio::time::timeout;

use super::StoreHarness;
use super::bench::{Bench, Sample};
use crate::Result;
use crate::broken::{ensure, promise};

/// When a handler was cut off in the middle of a statement, its locks go with its connection.
pub async fn abandoned_work_frees_its_locks<H: StoreHarness>(harness: &H) -> Result {
    promise("abandoned_work_frees_its_locks", async {
        let bench = Bench::new(harness).await?;
        let mut conn = bench.store.open().await?;
        let event = Sample::new("1", "a")?;
        let (mut tx, ..) = bench.claim(&mut conn, &[&event]).await?;
        let endless = bench.handle(&mut tx, ENDLESS);
        let cut_off = timeout(Duration::from_millis(300), endless).await;
        ensure!(cut_off.is_err(), "a statement without an end ended: {cut_off:?}");
        bench.store.abandon(conn).await;
        let mut conn = bench.store.open().await?;
        let next = timeout(Duration::from_secs(10), bench.process(&mut conn, &event)).await;
        match next {
            Ok(answer) => {
                let answer = answer?;
                ensure!(answer == ClaimAnswer::New, "what was abandoned is {answer:?}");
            }
            Err(_) => ensure!(false, "what was abandoned 10 s ago still holds its locks"),
        }
        Ok(())
    })
    .await
}

const ENDLESS: &str = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) \
     INSERT INTO {effects} SELECT 'x' FROM n WHERE i < 0";
