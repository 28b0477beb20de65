use onlyonce::store::{Operations as _, StoreErrorKind};

use super::StoreHarness;
use super::bench::Bench;
use crate::Result;
use crate::broken::{ensure, promise};

/// `check` refuses a database without its tables, and one that lacks a column, by name.
pub async fn check_names_what_is_missing<H: StoreHarness>(harness: &H) -> Result {
    promise("check_names_what_is_missing", async {
        let store = harness.store().await?;
        let limits = onlyonce::store::Limits::default();
        match store.check(&limits).await {
            Ok(()) => ensure!(false, "there are no tables, and check finds nothing wrong"),
            Err(error) => ensure!(
                error.kind() == StoreErrorKind::Misconfigured && error.to_string().contains("migrate"),
                "there are no tables, and check says {:?}: {error}",
                error.kind()
            ),
        }
        let bench = Bench::new(harness).await?;
        bench.store.check(&limits).await?;
        bench.sql("ALTER TABLE {inbox} ADD COLUMN theirs TEXT").await?;
        bench.store.check(&limits).await?;
        bench.sql("ALTER TABLE {inbox} DROP COLUMN copy_headers").await?;
        match bench.store.check(&limits).await {
            Ok(()) => ensure!(false, "a column is missing, and check finds nothing wrong"),
            Err(error) => ensure!(
                error.kind() == StoreErrorKind::Misconfigured && error.to_string().contains("copy_headers"),
                "inbox.copy_headers is missing, and check says {:?}: {error}",
                error.kind()
            ),
        }
        Ok(())
    })
    .await
}
