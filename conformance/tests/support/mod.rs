//! The harnesses of the core's own sources and stores.
#![allow(dead_code, clippy::print_stdout)] // each test binary uses its part

use std::sync::Arc;
use std::time::Duration;

use onlyonce::async_trait;
use onlyonce::event::RawEvent;
use onlyonce::inbox::{InboxSource, Queue};
use onlyonce::source::{Capabilities, Delivery};
use onlyonce::store::postgres::PostgresOptions;
use onlyonce::store::{Operations as _, PostgresStore};
use onlyonce::testing::{Broker, BrokerSource};
use onlyonce_conformance::{
    CONSUMER, Conn, Depth, HarnessCapabilities, Result, SourceHarness, Sqlite, StoreHarness,
};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};

/// The broker in memory.
pub(crate) struct Memory(pub(crate) Broker);

pub(crate) fn memory_capabilities() -> Capabilities {
    let mut expected = Capabilities::of("memory");
    expected.ordered = true;
    expected.marks_redelivery = true;
    expected.counts_deliveries = true;
    expected.delays_release = true;
    expected
}

pub(crate) fn memory_depth(broker: &Broker) -> Depth {
    Depth {
        waiting: broker.waiting() as u64,
        unacked: broker.unacked() as u64,
    }
}

#[async_trait]
impl SourceHarness for Memory {
    type Source = BrokerSource;
    type Stage = Sqlite;

    async fn empty() -> Result<Option<Self>> {
        Ok(Some(Self(Broker::new())))
    }

    fn expected(&self) -> Capabilities {
        memory_capabilities()
    }

    fn capabilities(&self) -> HarnessCapabilities {
        let mut can = HarnessCapabilities::default();
        can.cuts = true;
        can
    }

    fn source(&self) -> BrokerSource {
        self.0.source()
    }

    async fn publish(&self, events: Vec<RawEvent>) -> Result {
        for mut event in events {
            event.origin.system = "memory";
            event.origin.destination = "memory".into();
            self.0.publish(event);
        }
        Ok(())
    }

    async fn depth(&self) -> Result<Option<Depth>> {
        Ok(Some(memory_depth(&self.0)))
    }

    async fn cut(&self) -> Result {
        self.0.kill();
        Ok(())
    }

    async fn stage(&self) -> Result<Sqlite> {
        Sqlite::open()
    }
}

/// A schema of its own on the PostgreSQL server of `ONLYONCE_POSTGRES_URL`.
pub(crate) struct Postgres {
    url: String,
    schema: String,
}

#[async_trait]
impl StoreHarness for Postgres {
    type Store = PostgresStore;

    async fn empty() -> Result<Option<Self>> {
        let Ok(url) = std::env::var("ONLYONCE_POSTGRES_URL") else {
            assert!(
                std::env::var("ONLYONCE_REQUIRE_SERVICES").is_err(),
                "ONLYONCE_POSTGRES_URL is not set"
            );
            println!("skipped: ONLYONCE_POSTGRES_URL is not set (scripts/services up postgres)");
            return Ok(None);
        };
        let schema = format!("conf_{:016x}", fastrand::u64(..));
        Ok(Some(Self { url, schema }))
    }

    async fn store(&self) -> Result<PostgresStore> {
        Ok(PostgresOptions::new(&self.url)
            .schema(&self.schema)
            .max_connections(12)
            .connect()?)
    }

    fn table(&self, name: &str) -> String {
        format!("{}.{name}", self.schema)
    }

    async fn sql_in(conn: &mut PgConnection, sql: &str) -> std::result::Result<(), sqlx::Error> {
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(conn).await?;
        Ok(())
    }

    async fn sql(&self, sql: &str) -> Result {
        let mut conn = PgConnection::connect(&self.url).await?;
        Self::sql_in(&mut conn, sql).await?;
        conn.close().await?;
        Ok(())
    }

    async fn number(&self, sql: &str) -> Result<i64> {
        let mut conn = PgConnection::connect(&self.url).await?;
        let number = sqlx::query_scalar(AssertSqlSafe(sql.to_owned()))
            .fetch_one(&mut conn)
            .await?;
        conn.close().await?;
        Ok(number)
    }

    async fn age_claims(&self, by: Duration) -> Result {
        let (claims, by) = (self.table("processed_events"), by.as_secs());
        self.sql(&format!(
            "UPDATE {claims} SET processed_at = processed_at - {by} * interval '1 second'"
        ))
        .await
    }

    async fn end(self) -> Result {
        self.sql(&format!("DROP SCHEMA IF EXISTS {} CASCADE", self.schema))
            .await
    }
}

/// Several hands on one database.
pub(crate) struct Shared<D>(Arc<D>);

impl<D> Clone for Shared<D> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

#[async_trait]
impl<D: StoreHarness> StoreHarness for Shared<D> {
    type Store = D::Store;

    async fn empty() -> Result<Option<Self>> {
        Ok(D::empty().await?.map(|database| Self(Arc::new(database))))
    }

    async fn store(&self) -> Result<D::Store> {
        self.0.store().await
    }

    fn table(&self, name: &str) -> String {
        self.0.table(name)
    }

    async fn sql_in(conn: &mut Conn<Self>, sql: &str) -> std::result::Result<(), sqlx::Error> {
        D::sql_in(conn, sql).await
    }

    async fn sql(&self, sql: &str) -> Result {
        self.0.sql(sql).await
    }

    async fn number(&self, sql: &str) -> Result<i64> {
        self.0.number(sql).await
    }

    async fn age_claims(&self, by: Duration) -> Result {
        self.0.age_claims(by).await
    }

    async fn end(self) -> Result {
        match Arc::into_inner(self.0) {
            Some(last) => last.end().await,
            None => Ok(()),
        }
    }
}

/// The held events of a store, read as a source and filled as a queue.
pub(crate) struct Held<D: StoreHarness> {
    database: Shared<D>,
    store: D::Store,
}

const LEASE: Duration = Duration::from_millis(1500);

#[async_trait]
impl<D: StoreHarness> SourceHarness for Held<D> {
    type Source = InboxSource<D::Store>;
    type Stage = Shared<D>;

    async fn empty() -> Result<Option<Self>> {
        let Some(database) = Shared::<D>::empty().await? else {
            return Ok(None);
        };
        let store = database.store().await?;
        store.migrate().await?;
        Ok(Some(Self { database, store }))
    }

    fn expected(&self) -> Capabilities {
        let mut expected = Capabilities::of("onlyonce");
        expected.marks_redelivery = true;
        expected.delays_release = true;
        expected.reads_inbox = true;
        expected
    }

    fn capabilities(&self) -> HarnessCapabilities {
        let mut can = HarnessCapabilities::default();
        can.cuts = true;
        // An empty table is looked at every half second.
        can.quiet = Duration::from_millis(700);
        can.redelivered_after = LEASE + Duration::from_millis(500);
        can.keeps_copies = false;
        can.release_marks = false;
        can
    }

    fn source(&self) -> Self::Source {
        InboxSource::new(self.store.clone(), CONSUMER).lease(LEASE)
    }

    async fn publish(&self, events: Vec<RawEvent>) -> Result {
        let queue = Queue::new(self.store.clone(), CONSUMER);
        for event in events {
            queue
                .enqueue(event)
                .await
                .map_err(|error| onlyonce_conformance::Broken::new(error.to_string()))?;
        }
        Ok(())
    }

    async fn committed(&self, delivery: &Delivery) -> Result {
        // The guard does this in the transaction of the work; an ack says nothing to the table.
        let id = delivery
            .event
            .headers
            .get("onlyonce-event-id")
            .unwrap_or_default();
        let (inbox, id) = (self.database.table("inbox"), String::from_utf8_lossy(id));
        self.database
            .sql(&format!("DELETE FROM {inbox} WHERE event_id = '{id}'"))
            .await
    }

    async fn cut(&self) -> Result {
        // As if each lease had run out, and another process had taken the row and given it back.
        let inbox = self.database.table("inbox");
        self.database
            .sql(&format!(
                "UPDATE {inbox} SET state = 'ready', lease_token = NULL, leased_until = NULL \
                  WHERE state = 'running'"
            ))
            .await
    }

    async fn stage(&self) -> Result<Shared<D>> {
        Ok(self.database.clone())
    }

    async fn end(self) -> Result {
        self.database.end().await
    }
}
