//! A schema of its own per test, and consumers that work on it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use onlyonce::consumer::{ConsumerBuilder, RunError};
use onlyonce::store::postgres::PostgresOptions;
use onlyonce::store::{Operations as _, PostgresStore};
use sqlx::{AssertSqlSafe, PgConnection, PgPool};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::harness::*;

/// Tables for one test. In their names nothing needs quoting.
#[derive(Clone)]
pub(crate) struct Database {
    pub(crate) url: String,
    pub(crate) schema: String,
    pool: PgPool,
}

impl Database {
    /// `None` if there is no PostgreSQL to test against.
    pub(crate) async fn fresh() -> Option<Self> {
        let url = variable("ONLYONCE_POSTGRES_URL")?;
        let schema = unique("test").replace('-', "_");
        let options = PostgresOptions::new(&url).schema(&schema);
        options.connect().unwrap().migrate().await.unwrap();
        let pool = PgPool::connect(&url).await.unwrap();
        let table = format!("CREATE TABLE {schema}.effects (id text NOT NULL)");
        sqlx::raw_sql(AssertSqlSafe(table)).execute(&pool).await.unwrap();
        Some(Self { url, schema, pool })
    }

    pub(crate) fn store(&self) -> PostgresStore {
        self.store_at(&self.url)
    }

    /// The same schema, connected to by another way.
    pub(crate) fn store_at(&self, url: &str) -> PostgresStore {
        PostgresOptions::new(url).schema(&self.schema).connect().unwrap()
    }

    pub(crate) async fn insert(&self, conn: &mut PgConnection, id: &str) -> sqlx::Result<()> {
        let insert = format!("INSERT INTO {}.effects VALUES ($1)", self.schema);
        sqlx::query(AssertSqlSafe(insert)).bind(id).execute(conn).await?;
        Ok(())
    }

    /// Every effect, in order, also those that should not be there.
    pub(crate) async fn effects(&self) -> Vec<String> {
        let select = format!("SELECT id FROM {}.effects ORDER BY id", self.schema);
        sqlx::query_scalar(AssertSqlSafe(select))
            .fetch_all(&self.pool)
            .await
            .unwrap()
    }

    /// Every dead letter and how often it was tried.
    pub(crate) async fn dead(&self) -> Vec<(String, i32)> {
        let select = format!(
            "SELECT event_id, attempts FROM {}.inbox WHERE state = 'dead' ORDER BY event_id",
            self.schema
        );
        sqlx::query_as(AssertSqlSafe(select))
            .fetch_all(&self.pool)
            .await
            .unwrap()
    }

    pub(crate) async fn has_effects(&self, count: usize) {
        let until = Instant::now() + SOON;
        while self.effects().await.len() < count {
            assert!(Instant::now() < until, "effects: {:?}", self.effects().await);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) async fn has_dead(&self, count: usize) {
        let until = Instant::now() + SOON;
        while self.dead().await.len() < count {
            assert!(Instant::now() < until, "dead: {:?}", self.dead().await);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Not on `drop`: what a failed test leaves behind is worth looking at.
    pub(crate) async fn end(self) {
        let drop = format!("DROP SCHEMA {} CASCADE", self.schema);
        sqlx::raw_sql(AssertSqlSafe(drop))
            .execute(&self.pool)
            .await
            .unwrap();
    }
}

/// A consumer that runs until it is told to stop.
pub(crate) struct Running {
    stop: Arc<Notify>,
    ended: JoinHandle<Result<(), RunError>>,
}

impl Running {
    pub(crate) fn start(consumer: ConsumerBuilder<PostgresStore>) -> Self {
        let consumer = consumer.build().unwrap();
        let stop = Arc::new(Notify::new());
        let told = stop.clone();
        Self {
            ended: tokio::spawn(consumer.run_until(async move { told.notified().await })),
            stop,
        }
    }

    pub(crate) async fn stop(self) {
        self.stop.notify_one();
        soon(self.ended).await.unwrap().unwrap();
    }
}
