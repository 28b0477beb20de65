use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use serde_json::Value;
use sqlx::query::Query;
use sqlx::sqlite::{Sqlite, SqliteArguments, SqliteConnection, SqliteRow};
use sqlx::{Row as _, SqliteExecutor};
use uuid::Uuid;

use super::classify::classify;
use super::{SqliteStore, commit, sql};
use crate::event::{EventKey, Headers, Identity, Origin, RawEvent};
use crate::store::held::{FAILURES, readable, reduced};
use crate::store::{
    Attempt, Backlog, Connection, HeldEvent, Inbox, Lease, Limits, Parked, ParkedAs, Parking, Store,
    StoreError, StoreErrorKind, Tx,
};

#[async_trait]
impl Inbox for SqliteStore {
    async fn park(
        &self,
        conn: &mut Connection<Sqlite>,
        limits: &Limits,
        parked: &Parked<'_>,
    ) -> Result<Parking, StoreError> {
        match self.park_once(conn, limits, parked).await {
            // The row must be storable whatever the message holds: keep the body, reduce the rest.
            Err(e) if e.kind() == StoreErrorKind::Data => {
                self.rollback(conn).await?;
                let small = reduced(parked.event);
                self.park_once(
                    conn,
                    limits,
                    &Parked {
                        event: &small,
                        ..parked.clone()
                    },
                )
                .await
            }
            result => result,
        }
    }

    async fn fail_leased(&self, lease: &Lease, parked: &Parked<'_>) -> Result<bool, StoreError> {
        let failing = |e| classify("recording a failed held event", e);
        let (state, reason, after) = becomes(parked.becomes);
        let mut tx = self.begin_reserve("recording a failed held event").await?;
        let stored: Option<String> = sqlx::query_scalar(sql::FAIL_FIND)
            .bind(lease.id)
            .bind(lease.token)
            .fetch_optional(&mut *tx)
            .await
            .map_err(failing)?;
        let Some(stored) = stored else { return Ok(false) };
        sqlx::query(sql::FAIL)
            .bind(lease.id)
            .bind(state)
            .bind(reason)
            .bind(after)
            .bind(parked.failures.len() as i64)
            .bind(appended(&stored, parked.newest_failures()).1)
            .execute(&mut *tx)
            .await
            .map_err(failing)?;
        commit(tx).await.map_err(failing)?;
        Ok(true)
    }

    async fn close_leased(&self, lease: &Lease) -> Result<bool, StoreError> {
        let closing = |e| classify("closing a held event", e);
        let mut tx = self.begin_reserve("closing a held event").await?;
        let mut closed = 0;
        for statement in [sql::CLOSE_DELETE, sql::CLOSE_FINISH] {
            let done = sqlx::query(statement)
                .bind(lease.id)
                .bind(lease.token)
                .execute(&mut *tx)
                .await;
            closed += done.map_err(closing)?.rows_affected();
        }
        commit(tx).await.map_err(closing)?;
        Ok(closed == 1)
    }

    async fn enqueue(&self, parked: &Parked<'_>) -> Result<bool, StoreError> {
        let mut tx = self.begin_reserve("enqueuing an event").await?;
        let added = enqueue_with(&mut *tx, parked, false).await?;
        commit(tx).await.map_err(|e| classify("enqueuing an event", e))?;
        Ok(added)
    }

    async fn enqueue_in(&self, conn: &mut SqliteConnection, parked: &Parked<'_>) -> Result<bool, StoreError> {
        // The caller's transaction may be a handler's, which is the writer already: waiting for that
        // right here would be waiting for ourselves.
        enqueue_with(conn, parked, true).await
    }

    async fn lease(&self, consumer: &str, max: usize, lease: Duration) -> Result<Vec<HeldEvent>, StoreError> {
        let leasing = |e| classify("leasing held events", e);
        // Polled all the time: look first, so that nobody waits for a write that changes nothing.
        let waiting = sqlx::query(sql::DUE)
            .bind(consumer)
            .bind(1)
            .fetch_optional(&self.reserve)
            .await
            .map_err(leasing)?;
        if waiting.is_none() {
            return Ok(Vec::new());
        }
        let token = Uuid::from_u128(fastrand::u128(..));
        let mut tx = self.begin_reserve("leasing held events").await?;
        let rows = sqlx::query(sql::DUE)
            .bind(consumer)
            .bind(max as i64)
            .fetch_all(&mut *tx)
            .await
            .map_err(leasing)?;
        for row in &rows {
            sqlx::query(sql::LEASE)
                .bind(row.try_get::<i64, _>("id").map_err(leasing)?)
                .bind(token)
                .bind(micros(lease))
                .execute(&mut *tx)
                .await
                .map_err(leasing)?;
        }
        commit(tx).await.map_err(leasing)?;
        let mut held: Vec<_> = rows
            .iter()
            .filter_map(|row| readable(consumer, held_event(row, token)))
            .collect();
        held.sort_by_key(|h| h.lease.id);
        Ok(held)
    }

    async fn renew(&self, leases: &[Lease], lease: Duration) -> Result<Vec<i64>, StoreError> {
        let renewing = |e| classify("renewing leases", e);
        let mut tx = self.begin_reserve("renewing leases").await?;
        let ours = sqlx::query_scalar(sql::RENEW)
            .bind(hex_leases(leases))
            .bind(micros(lease))
            .fetch_all(&mut *tx)
            .await
            .map_err(renewing)?;
        commit(tx).await.map_err(renewing)?;
        Ok(ours)
    }

    async fn release_leased(&self, leases: &[Lease], after: Duration) -> Result<(), StoreError> {
        let releasing = |e| classify("giving held events back", e);
        let mut tx = self.begin_reserve("giving held events back").await?;
        sqlx::query(sql::RELEASE)
            .bind(hex_leases(leases))
            .bind(micros(after))
            .execute(&mut *tx)
            .await
            .map_err(releasing)?;
        commit(tx).await.map_err(releasing)
    }

    async fn backlog(&self, consumer: &str) -> Result<Backlog, StoreError> {
        let row: (i64, i64, i64, i64) = sqlx::query_as(sql::BACKLOG)
            .bind(consumer)
            .fetch_one(&self.reserve)
            .await
            .map_err(|e| classify("counting held events", e))?;
        Ok(Backlog {
            due: row.0 as u64,
            delayed: row.1 as u64,
            dead: row.2 as u64,
            oldest_due: Duration::from_micros(row.3.max(0) as u64),
        })
    }
}

impl SqliteStore {
    /// A crash before the commit leaves nothing, and the source delivers again; a crash after it
    /// leaves the row, and the redelivery finds it held.
    async fn park_once(
        &self,
        conn: &mut Connection<Sqlite>,
        limits: &Limits,
        parked: &Parked<'_>,
    ) -> Result<Parking, StoreError> {
        let holding = |e| classify("holding an event", e);
        let mut tx = self.begin(conn, limits).await?;
        let mut claimed = None;
        if let Some((key, identity)) = parked.key {
            if park_claim(&mut tx, parked, key, identity).await? {
                claimed = Some(key);
            } else if !parked.escaped {
                self.rollback(conn).await?;
                return Ok(Parking::Duplicate);
            }
        }
        match find(&mut tx, parked).await.map_err(holding)? {
            None => park_insert(&mut tx, parked).await.map_err(holding)?,
            Some(row) => park_again(&mut tx, parked, &row).await.map_err(holding)?,
        }
        if let Some(key) = claimed {
            sqlx::query(sql::PARK_UNCLAIM)
                .bind(key.as_uuid())
                .execute(&mut *tx)
                .await
                .map_err(|e| classify("giving a claim back", e))?;
        }
        self.commit_lane(tx)
            .await
            .map_err(|e| classify("committing a held event", e))?;
        Ok(Parking::Held)
    }
}

async fn park_claim(
    tx: &mut Tx<'_, Sqlite>,
    parked: &Parked<'_>,
    key: EventKey,
    identity: &Identity,
) -> Result<bool, StoreError> {
    let done = sqlx::query(sql::PARK_CLAIM)
        .bind(key.as_uuid())
        .bind(parked.consumer)
        .bind(&identity.source)
        .bind(&identity.id)
        .bind(parked.event.payload_hash().as_bytes())
        .execute(&mut **tx)
        .await
        .map_err(|e| classify("claiming", e))?;
    Ok(done.rows_affected() == 1)
}

/// The row that holds an event already.
struct HeldRow {
    id: i64,
    state: String,
    payload_hash: Vec<u8>,
    failures: String,
}

/// An event without an identity is held on its own each time.
async fn find(tx: &mut Tx<'_, Sqlite>, parked: &Parked<'_>) -> Result<Option<HeldRow>, sqlx::Error> {
    let Some((key, _)) = parked.key else {
        return Ok(None);
    };
    let row: Option<(i64, String, Vec<u8>, String)> = sqlx::query_as(sql::PARK_FIND)
        .bind(key.as_uuid())
        .fetch_optional(&mut **tx)
        .await?;
    Ok(row.map(|(id, state, payload_hash, failures)| HeldRow {
        id,
        state,
        payload_hash,
        failures,
    }))
}

async fn park_insert(tx: &mut Tx<'_, Sqlite>, parked: &Parked<'_>) -> Result<(), sqlx::Error> {
    let (state, reason, after) = becomes(parked.becomes);
    about(parked, sqlx::query(sql::PARK_INSERT))
        .bind(state)
        .bind(reason)
        .bind(after)
        .bind(parked.failures.len() as i64)
        .bind(parked.failures_json())
        .execute(&mut **tx)
        .await?;
    Ok(())
}

/// On a row that is already there, attempts add up and failures append. Failures that it holds
/// already are those of a parking whose commit was in doubt: they count once. Another payload is kept
/// as the row's copy and changes neither its state nor its payload.
async fn park_again(tx: &mut Tx<'_, Sqlite>, parked: &Parked<'_>, row: &HeldRow) -> Result<(), sqlx::Error> {
    let event = parked.event;
    let (known, failures) = appended(&row.failures, parked.newest_failures());
    sqlx::query(sql::PARK_COUNT)
        .bind(row.id)
        .bind(if known { 0 } else { parked.failures.len() as i64 })
        .bind(failures)
        .execute(&mut **tx)
        .await?;
    let same_payload = row.payload_hash.as_slice() == event.payload_hash().as_bytes();
    if !same_payload {
        sqlx::query(sql::PARK_COPY)
            .bind(row.id)
            .bind(event.payload.as_deref())
            .bind(event.payload_hash().as_bytes())
            .bind(event.headers.encode())
            .execute(&mut **tx)
            .await?;
    } else if row.state == "ready" {
        let (state, reason, after) = becomes(parked.becomes);
        sqlx::query(sql::PARK_MOVE)
            .bind(row.id)
            .bind(state)
            .bind(reason)
            .bind(after)
            .execute(&mut **tx)
            .await?;
    }
    Ok(())
}

async fn enqueue_with<'e>(
    executor: impl SqliteExecutor<'e>,
    parked: &Parked<'_>,
    unless_claimed: bool,
) -> Result<bool, StoreError> {
    let (_, _, after) = becomes(parked.becomes);
    let done = about(parked, sqlx::query(sql::ENQUEUE))
        .bind(after)
        .bind(unless_claimed)
        .execute(executor)
        .await
        .map_err(|e| classify("enqueuing an event", e))?;
    Ok(done.rows_affected() == 1)
}

/// One statement with its arguments.
type Statement = Query<'static, Sqlite, SqliteArguments>;

/// Binds what a row says of its event: the first eleven values of every insert into `inbox`.
fn about(parked: &Parked<'_>, insert: Statement) -> Statement {
    let event = parked.event;
    insert
        .bind(parked.key.map(|(key, _)| key.as_uuid()))
        .bind(parked.consumer)
        .bind(parked.key.map(|(_, identity)| identity.source.as_str()))
        .bind(parked.key.map(|(_, identity)| identity.id.as_str()))
        .bind(event.event_type.as_deref())
        .bind(event.key.as_deref())
        .bind(event.payload.as_deref())
        .bind(event.payload_hash().as_bytes())
        .bind(event.headers.encode())
        .bind(event.time_ms)
        .bind(parked.origin_text())
}

/// State, reason, and the delay in microseconds.
fn becomes(parked: ParkedAs) -> (&'static str, Option<&'static str>, i64) {
    match parked {
        ParkedAs::Ready { after } => ("ready", None, micros(after)),
        ParkedAs::Dead { reason } => ("dead", Some(reason.as_str()), 0),
    }
}

/// A duration that can be added to the database's clock without leaving 64 bits.
pub(super) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros())
        .unwrap_or(i64::MAX)
        .min(i64::MAX / 2)
}

/// The newest failures of a row as JSON, with `new` behind those it holds; true if it holds `new` already.
fn appended(stored: &str, new: &[Attempt]) -> (bool, String) {
    // Kept as they are, so that fields of a later version survive.
    let mut all: Vec<Value> = serde_json::from_str(stored).unwrap_or_default();
    let new: Vec<Value> = new
        .iter()
        .filter_map(|attempt| serde_json::to_value(attempt).ok())
        .collect();
    let known = new.iter().all(|attempt| all.contains(attempt));
    if !known {
        all.extend(new);
    }
    let newest = all.split_off(all.len().saturating_sub(FAILURES));
    (known, Value::Array(newest).to_string())
}

/// Leases as a JSON array of [id, token], the token in hexadecimal.
fn hex_leases(leases: &[Lease]) -> String {
    let pairs: Vec<String> = leases
        .iter()
        .map(|lease| format!("[{},\"{}\"]", lease.id, lease.token.simple()))
        .collect();
    format!("[{}]", pairs.join(","))
}

fn held_event(row: &SqliteRow, token: Uuid) -> Result<HeldEvent, sqlx::Error> {
    let bytes =
        |column: &str| Ok::<_, sqlx::Error>(row.try_get::<Option<Vec<u8>>, _>(column)?.map(Bytes::from));
    let stored: &[u8] = row.try_get("headers")?;
    let identity = Identity::strong(
        row.try_get::<String, _>("source")?,
        row.try_get::<String, _>("event_id")?,
    )
    .map_err(|e| sqlx::Error::Decode(Box::new(e)))?;
    Ok(HeldEvent {
        lease: Lease {
            id: row.try_get("id")?,
            token,
            attempts: row.try_get("attempts")?,
            identity,
        },
        event: RawEvent {
            event_type: bytes("event_type")?,
            key: bytes("ordering_key")?,
            payload: bytes("payload")?,
            headers: Headers::decode(stored).ok_or_else(|| {
                sqlx::Error::Decode("inbox.headers is not in a form that this version knows".into())
            })?,
            time_ms: row.try_get("event_time_ms")?,
            property: None,
            native: None,
            origin: Origin {
                system: "onlyonce",
                destination: "inbox".into(),
                detail: row.try_get("origin")?,
            },
        },
        released_by_timeout: row.try_get("ran_out")?,
    })
}
