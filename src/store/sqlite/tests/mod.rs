//! The promises of the store, each on a file of its own.

mod inbox;
mod operations;
mod transaction;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use sqlx::sqlite::{
    Sqlite, SqliteConnectOptions, SqliteConnection, SqlitePool, SqlitePoolOptions, SqliteSynchronous,
};
use sqlx::{ConnectOptions as _, Connection as _};
use tempfile::TempDir;

use super::{SqliteOptions, SqliteStore, sql};
use crate::Reason;
use crate::event::{EventKey, Identity, PayloadHash, RawEvent};
use crate::store::{
    Attempt, ClaimAnswer, ClaimRequest, CommitError, Connection, HeldState, Inbox, Lease, Limits, Next,
    Operations, Outcome, Parked, ParkedAs, Parking, PurgeCursor, Store, StoreError, StoreErrorKind, Tx,
};

/// A store on a file of its own, with the tables and one table of the handler's.
struct Bench {
    store: SqliteStore,
    dir: TempDir,
}

impl Bench {
    async fn new() -> Self {
        let bench = Self::empty();
        bench.store.migrate().await.unwrap();
        bench.sql("CREATE TABLE effects (id TEXT NOT NULL)").await;
        bench
    }

    fn empty() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = SqliteOptions::new(dir.path().join("test.db").to_str().unwrap())
            .connect()
            .unwrap();
        Self { store, dir }
    }

    fn options(&self) -> SqliteConnectOptions {
        SqliteConnectOptions::new().filename(self.dir.path().join("test.db"))
    }

    async fn outside(&self) -> SqliteConnection {
        self.options().connect().await.unwrap()
    }

    async fn sql(&self, sql: &'static str) {
        sqlx::raw_sql(sql)
            .execute(&mut self.outside().await)
            .await
            .unwrap();
    }

    async fn count(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql)
            .fetch_one(&mut self.outside().await)
            .await
            .unwrap()
    }

    async fn effects(&self) -> i64 {
        self.count("SELECT count(*) FROM effects").await
    }

    async fn claims(&self) -> i64 {
        self.count("SELECT count(*) FROM onlyonce_processed_events").await
    }

    async fn check(&self) -> Result<(), StoreError> {
        self.store.check(&Limits::default()).await
    }

    /// Runs `event` as a consumer does, with `handler` as its SQL.
    async fn process(
        &self,
        conn: &mut Connection<Sqlite>,
        event: &Event,
        handler: &'static str,
    ) -> ClaimAnswer {
        let mut tx = self.store.begin(conn, &Limits::default()).await.unwrap();
        let (answers, claims) = self
            .store
            .claim(&mut tx, &[event.request()], Outcome::Processed)
            .await
            .unwrap();
        if !claims.is_empty() {
            sqlx::raw_sql(handler).execute(&mut *tx).await.unwrap();
            self.store.commit(tx, claims, Next::Rest).await.unwrap();
        } else {
            self.store.rollback(conn).await.unwrap();
        }
        assert!(conn.is_clean());
        answers[0]
    }

    async fn park(
        &self,
        conn: &mut Connection<Sqlite>,
        event: &Event,
        becomes: ParkedAs,
        failures: &[Attempt],
    ) {
        let parked = event.parked(becomes, failures);
        assert_eq!(
            self.store.park(conn, &Limits::default(), &parked).await.unwrap(),
            Parking::Held
        );
    }

    /// Of the one held row: state, attempts, failures, whether it has a copy, whether it was ever dead.
    async fn held(&self) -> (String, i64, i64, bool, bool) {
        sqlx::query_as(
            "SELECT state, attempts, json_array_length(failures), copy_payload IS NOT NULL, dead_at IS NOT NULL
               FROM onlyonce_inbox",
        )
        .fetch_one(&mut self.outside().await)
        .await
        .unwrap()
    }
}

const INSERT: &str = "INSERT INTO effects VALUES ('x')";

const NOW: ParkedAs = ParkedAs::Ready {
    after: Duration::ZERO,
};

const LATER: ParkedAs = ParkedAs::Ready {
    after: Duration::from_secs(3600),
};

const DEAD: ParkedAs = ParkedAs::Dead {
    reason: Reason::RetriesExhausted,
};

struct Event {
    identity: Identity,
    raw: RawEvent,
    own: Option<Lease>,
}

impl Event {
    fn new(id: &str, payload: &'static str) -> Self {
        Self {
            identity: Identity::strong("orders", id).unwrap(),
            raw: RawEvent {
                payload: Some(payload.into()),
                ..Default::default()
            },
            own: None,
        }
    }

    fn key(&self) -> EventKey {
        EventKey::of_event("c", &self.identity.source, &self.identity.id)
    }

    fn request(&self) -> ClaimRequest<'_> {
        ClaimRequest {
            key: self.key(),
            consumer: "c",
            identity: &self.identity,
            payload_hash: PayloadHash::of(self.raw.payload.as_deref()),
            own: self.own.as_ref(),
        }
    }

    fn parked<'a>(&'a self, becomes: ParkedAs, failures: &'a [Attempt]) -> Parked<'a> {
        Parked {
            consumer: "c",
            key: Some((self.key(), &self.identity)),
            event: &self.raw,
            becomes,
            failures,
            escaped: false,
        }
    }
}

fn duplicate(same_payload: bool) -> ClaimAnswer {
    ClaimAnswer::Duplicate {
        same_payload,
        outcome: Outcome::Processed,
    }
}

fn failure(n: i64) -> Attempt {
    Attempt {
        at_ms: n,
        kind: "error".into(),
        error: format!("failure {n}"),
    }
}

async fn run(tx: &mut Tx<'_, Sqlite>, sql: &'static str) -> Result<(), sqlx::Error> {
    sqlx::raw_sql(sql).execute(&mut **tx).await.map(|_| ())
}
