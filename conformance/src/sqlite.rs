use std::time::Duration;

use onlyonce::async_trait;
use onlyonce::store::SqliteStore;
use onlyonce::store::sqlite::SqliteOptions;
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection};
use sqlx::{AssertSqlSafe, ConnectOptions as _};
use tempfile::TempDir;

use crate::{Result, StoreHarness};

/// A SQLite file of its own in a temporary directory: the stage for sources that are tried with a
/// whole consumer.
#[derive(Debug)]
pub struct Sqlite {
    dir: TempDir,
}

impl Sqlite {
    /// An empty one.
    pub fn open() -> Result<Self> {
        Ok(Self {
            dir: tempfile::tempdir()?,
        })
    }

    async fn outside(&self) -> Result<SqliteConnection> {
        let options = SqliteConnectOptions::new()
            .filename(self.dir.path().join("conformance.db"))
            .create_if_missing(true)
            .busy_timeout(Duration::from_secs(30));
        Ok(options.connect().await?)
    }
}

#[async_trait]
impl StoreHarness for Sqlite {
    type Store = SqliteStore;

    async fn empty() -> Result<Option<Self>> {
        Self::open().map(Some)
    }

    async fn store(&self) -> Result<SqliteStore> {
        let path = self.dir.path().join("conformance.db");
        Ok(SqliteOptions::new(path.display().to_string())
            .busy_timeout(Duration::from_secs(30))
            .connect()?)
    }

    fn table(&self, name: &str) -> String {
        format!("onlyonce_{name}")
    }

    async fn sql_in(conn: &mut SqliteConnection, sql: &str) -> std::result::Result<(), sqlx::Error> {
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(conn).await?;
        Ok(())
    }

    async fn sql(&self, sql: &str) -> Result {
        Self::sql_in(&mut self.outside().await?, sql).await?;
        Ok(())
    }

    async fn number(&self, sql: &str) -> Result<i64> {
        let sql = AssertSqlSafe(sql.to_owned());
        Ok(sqlx::query_scalar(sql)
            .fetch_one(&mut self.outside().await?)
            .await?)
    }

    async fn age_claims(&self, by: Duration) -> Result {
        let (claims, by) = (self.table("processed_events"), by.as_micros());
        self.sql(&format!("UPDATE {claims} SET processed_at = processed_at - {by}"))
            .await
    }

    async fn end(self) -> Result {
        Ok(())
    }
}
