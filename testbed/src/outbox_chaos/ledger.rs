//! What the writers have committed, in tables beside the outbox, and what the outbox still holds.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use onlyonce::Outbox;
use onlyonce::outbox::OutgoingEvent;
use onlyonce::store::postgres::PostgresOptions;
use onlyonce::store::{Operations as _, PostgresStore};
use sqlx::postgres::{PgConnection, PgPool, PgPoolOptions, PgRow};
use sqlx::{AssertSqlSafe, Postgres, Row as _, Transaction};

use super::broker::Arrival;
use super::route::Route;
use super::verdict::Committed;

/// More than there will ever be poison.
const ALL_PARKED: usize = 100_000;

pub(super) struct Ledger {
    pool: PgPool,
    schema: String,
    outbox: Outbox<PostgresStore>,
    rolled_back: Mutex<HashSet<String>>,
}

impl Ledger {
    pub(super) async fn create(url: &str, schema: &str) -> anyhow::Result<Self> {
        let store = PostgresOptions::new(url).schema(schema).connect()?;
        store.migrate().await?;
        let pool = PgPoolOptions::new()
            .max_connections(20)
            .acquire_timeout(Duration::from_secs(30))
            .connect(url)
            .await?;
        let tables = format!(
            "CREATE TABLE {schema}.keys (key text PRIMARY KEY, place bigint NOT NULL);
             CREATE TABLE {schema}.ledger (event_id text PRIMARY KEY, key text NOT NULL, place bigint NOT NULL,
                 route text NOT NULL, poison boolean NOT NULL);
             CREATE TABLE {schema}.arrived (n bigserial PRIMARY KEY, event_id text NOT NULL, key text NOT NULL,
                 body text NOT NULL)"
        );
        sqlx::raw_sql(AssertSqlSafe(tables)).execute(&pool).await?;
        Ok(Self {
            pool,
            schema: schema.to_owned(),
            outbox: Outbox::new(store).source("chaos"),
            rolled_back: Mutex::default(),
        })
    }

    pub(super) fn outbox(&self) -> &Outbox<PostgresStore> {
        &self.outbox
    }

    pub(super) async fn begin(&self) -> sqlx::Result<Transaction<'static, Postgres>> {
        self.pool.begin().await
    }

    /// The first of so many places of a key. Whoever wants places of the same key waits for the end of this
    /// transaction.
    pub(super) async fn next_places(
        &self,
        tx: &mut PgConnection,
        key: &str,
        count: usize,
    ) -> sqlx::Result<i64> {
        let next = self.sql(
            "INSERT INTO {s}.keys AS k VALUES ($1, $2) ON CONFLICT (key) DO UPDATE SET place = k.place + $2
             RETURNING place - $2 + 1",
        );
        sqlx::query_scalar(next)
            .bind(key)
            .bind(count as i64)
            .fetch_one(tx)
            .await
    }

    /// Writes these events, and to the outbox what they are to be published as.
    pub(super) async fn write(
        &self,
        tx: &mut PgConnection,
        events: &[Committed],
        outgoing: Vec<OutgoingEvent>,
    ) -> anyhow::Result<()> {
        for event in events {
            sqlx::query(self.sql("INSERT INTO {s}.ledger VALUES ($1, $2, $3, $4, $5)"))
                .bind(&event.event_id)
                .bind(&event.key)
                .bind(event.place)
                .bind(event.route.as_str())
                .bind(event.poison)
                .execute(&mut *tx)
                .await?;
        }
        self.outbox.send_all_in(tx, outgoing).await?;
        Ok(())
    }

    pub(super) fn note_rolled_back(&self, events: Vec<Committed>) {
        let ids = events.into_iter().map(|event| event.event_id);
        self.lock().extend(ids);
    }

    pub(super) fn rolled_back(&self) -> HashSet<String> {
        self.lock().clone()
    }

    /// How many events of each route wait in the outbox, other than for poison.
    pub(super) async fn pending(&self) -> anyhow::Result<HashMap<Route, u64>> {
        let count = self.sql(
            "SELECT l.route, count(*) FROM {s}.outbox o JOIN {s}.ledger l USING (event_id)
              WHERE l.key NOT LIKE 'poison-%' GROUP BY l.route",
        );
        let rows = sqlx::query(count).fetch_all(&self.pool).await?;
        rows.iter()
            .map(|row| Ok((route(row, 0)?, row.try_get::<i64, _>(1)? as u64)))
            .collect()
    }

    /// All poison is parked, and nothing else waits but what waits behind it.
    pub(super) async fn only_poison_is_left(&self) -> anyhow::Result<bool> {
        let others = "SELECT count(*) FROM {s}.outbox o JOIN {s}.ledger l USING (event_id)
                       WHERE NOT (l.poison AND o.parked_at IS NOT NULL) AND (l.poison OR l.key NOT LIKE 'poison-%' OR l.place = 1)";
        Ok(self.number(others).await? == 0)
    }

    /// What is parked, against what was planted.
    pub(super) async fn problems_of_poison(&self) -> anyhow::Result<Vec<String>> {
        let parked = self.outbox.parked(0, ALL_PARKED).await?;
        let parked: HashSet<&str> = parked.iter().map(|row| row.event_id.as_str()).collect();
        let committed = self.committed().await?;
        let planted: HashSet<&str> = committed
            .iter()
            .filter(|event| event.poison)
            .map(|event| event.event_id.as_str())
            .collect();
        let innocent = parked
            .difference(&planted)
            .map(|id| format!("{id} is parked and is no poison"));
        let loose = planted
            .difference(&parked)
            .map(|id| format!("the poison {id} is not parked"));
        Ok(innocent.chain(loose).collect())
    }

    /// Lets go on what waits behind the poison.
    pub(super) async fn discard_poison(&self) -> anyhow::Result<()> {
        let parked = self.outbox.parked(0, ALL_PARKED).await?;
        let rows: Vec<i64> = parked.iter().map(|row| row.id).collect();
        self.outbox.discard(&rows).await?;
        Ok(())
    }

    pub(super) async fn is_empty(&self) -> anyhow::Result<bool> {
        Ok(self.number("SELECT count(*) FROM {s}.outbox").await? == 0)
    }

    /// What the outbox holds, for a person who wonders why a run did not end.
    pub(super) async fn left(&self) -> anyhow::Result<String> {
        let rows = self.sql(
            "SELECT concat_ws(' ', id, event_id, destination, 'attempts', attempts, 'due', next_attempt_at - now(),
                    'parked', parked_at, last_error)
               FROM {s}.outbox ORDER BY id LIMIT 20",
        );
        let rows: Vec<String> = sqlx::query_scalar(rows).fetch_all(&self.pool).await?;
        Ok(rows.join("\n"))
    }

    pub(super) async fn committed(&self) -> anyhow::Result<Vec<Committed>> {
        let all = self.sql("SELECT event_id, key, place, route, poison FROM {s}.ledger ORDER BY key, place");
        let rows = sqlx::query(all).fetch_all(&self.pool).await?;
        rows.iter()
            .map(|row| {
                Ok(Committed {
                    event_id: row.try_get(0)?,
                    key: row.try_get(1)?,
                    place: row.try_get(2)?,
                    route: route(row, 3)?,
                    poison: row.try_get(4)?,
                })
            })
            .collect()
    }

    /// What has arrived by [`Route::Table`].
    pub(super) async fn arrived(&self) -> anyhow::Result<Vec<Arrival>> {
        let all = self.sql("SELECT event_id, key, body FROM {s}.arrived ORDER BY n");
        let rows = sqlx::query(all).fetch_all(&self.pool).await?;
        rows.iter()
            .map(|row| {
                Ok(Arrival {
                    event_id: row.try_get(0)?,
                    key: row.try_get(1)?,
                    body: row.try_get(2)?,
                })
            })
            .collect()
    }

    pub(super) async fn drop_schema(&self) -> anyhow::Result<()> {
        let drop = self.sql("DROP SCHEMA {s} CASCADE");
        sqlx::raw_sql(drop).execute(&self.pool).await?;
        Ok(())
    }

    async fn number(&self, sql: &str) -> sqlx::Result<i64> {
        sqlx::query_scalar(self.sql(sql)).fetch_one(&self.pool).await
    }

    fn sql(&self, text: &str) -> AssertSqlSafe<String> {
        AssertSqlSafe(text.replace("{s}", &self.schema))
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<String>> {
        self.rolled_back.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn route(row: &PgRow, column: usize) -> anyhow::Result<Route> {
    let name: &str = row.try_get(column)?;
    Route::named(name).with_context(|| format!("{name} is no route"))
}
