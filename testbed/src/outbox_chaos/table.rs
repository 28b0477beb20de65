//! A publisher that writes to a table of PostgreSQL: real, and out of reach of any broker's trouble.

use onlyonce::async_trait;
use onlyonce::publisher::{Message, PublishError, PublishErrorKind, Publisher, PublisherHealth};
use sqlx::postgres::{PgPool, PgPoolOptions};
use sqlx::{AssertSqlSafe, SqlSafeStr as _, SqlStr};

pub(super) struct Table {
    pool: PgPool,
    insert: SqlStr,
}

impl Table {
    pub(super) fn in_schema(url: &str, schema: &str) -> anyhow::Result<Self> {
        let insert = format!("INSERT INTO {schema}.arrived (event_id, key, body) VALUES ($1, $2, $3)");
        Ok(Self {
            pool: PgPoolOptions::new().max_connections(4).connect_lazy(url)?,
            insert: AssertSqlSafe(insert).into_sql_str(),
        })
    }
}

#[async_trait]
impl Publisher for Table {
    fn system(&self) -> &'static str {
        "postgresql"
    }

    async fn publish(&self, message: &Message) -> Result<(), PublishError> {
        let text = |bytes: &Option<onlyonce::Bytes>| {
            String::from_utf8_lossy(bytes.as_deref().unwrap_or_default()).into_owned()
        };
        sqlx::query(self.insert.clone())
            .bind(&message.event_id)
            .bind(text(&message.key))
            .bind(text(&message.payload))
            .execute(&self.pool)
            .await
            .map(|_| ())
            .map_err(|error| PublishError::new(PublishErrorKind::Unavailable, error))
    }

    fn health(&self) -> PublisherHealth {
        PublisherHealth::up()
    }

    async fn stop(&self) {
        self.pool.close().await;
    }
}
