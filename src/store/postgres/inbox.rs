use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use sqlx::postgres::{PgConnection, PgRow, Postgres};
use sqlx::{FromRow as _, Row as _};
use uuid::Uuid;

use super::PostgresStore;
use super::beside::Statement;
use super::classify::{classify, classify_claim};
use crate::event::{EventKey, Headers, Identity, Origin, RawEvent};
use crate::store::held::{readable, reduced};
use crate::store::{
    Backlog, Connection, HeldEvent, Inbox, Lease, Limits, Parked, ParkedAs, Parking, Store, StoreError,
    StoreErrorKind, Tx, answer,
};

#[async_trait]
impl Inbox for PostgresStore {
    async fn park(
        &self,
        conn: &mut Connection<Postgres>,
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
        let (state, reason, after) = becomes(parked.becomes);
        let fail = sqlx::query(self.sql.fail.clone())
            .bind(lease.id)
            .bind(lease.token)
            .bind(state)
            .bind(reason)
            .bind(after)
            .bind(parked.failures.len() as i32)
            .bind(parked.failures_json());
        let done = self.execute("recording a failed held event", fail).await?;
        Ok(done.rows_affected() == 1)
    }

    async fn close_leased(&self, lease: &Lease) -> Result<bool, StoreError> {
        let doing = "closing a held event";
        let close = sqlx::query(self.sql.close.clone())
            .bind(lease.id)
            .bind(lease.token);
        let row = self.row(doing, close).await?;
        let closed: i64 = row.try_get(0).map_err(|e| classify(doing, e))?;
        Ok(closed == 1)
    }

    async fn enqueue(&self, parked: &Parked<'_>) -> Result<bool, StoreError> {
        let done = self
            .execute("enqueuing an event", self.enqueue_statement(parked, false))
            .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn enqueue_in(&self, conn: &mut PgConnection, parked: &Parked<'_>) -> Result<bool, StoreError> {
        let done = self
            .enqueue_statement(parked, true)
            .execute(conn)
            .await
            .map_err(|e| classify("enqueuing an event", e))?;
        Ok(done.rows_affected() == 1)
    }

    async fn lease(&self, consumer: &str, max: usize, lease: Duration) -> Result<Vec<HeldEvent>, StoreError> {
        let token = Uuid::from_u128(fastrand::u128(..));
        let query = sqlx::query(self.sql.lease.clone())
            .bind(consumer)
            .bind(max as i64)
            .bind(token)
            .bind(lease.as_millis() as i64);
        let rows = self.rows("leasing held events", query).await?;
        let mut held: Vec<_> = rows
            .iter()
            .filter_map(|row| readable(consumer, held_event(row, token)))
            .collect();
        held.sort_by_key(|h| h.lease.id);
        Ok(held)
    }

    async fn renew(&self, leases: &[Lease], lease: Duration) -> Result<Vec<i64>, StoreError> {
        let (ids, tokens) = columns(leases);
        let renew = sqlx::query(self.sql.renew.clone())
            .bind(ids)
            .bind(tokens)
            .bind(lease.as_millis() as i64);
        let rows = self.rows("renewing leases", renew).await?;
        rows.iter()
            .map(|row| row.try_get(0))
            .collect::<Result<_, _>>()
            .map_err(|e| classify("renewing leases", e))
    }

    async fn release_leased(&self, leases: &[Lease], after: Duration) -> Result<(), StoreError> {
        let (ids, tokens) = columns(leases);
        let release = sqlx::query(self.sql.release.clone())
            .bind(ids)
            .bind(tokens)
            .bind(after.as_millis() as i64);
        self.execute("giving held events back", release).await?;
        Ok(())
    }

    async fn backlog(&self, consumer: &str) -> Result<Backlog, StoreError> {
        let doing = "counting held events";
        let row = self
            .row(doing, sqlx::query(self.sql.backlog.clone()).bind(consumer))
            .await?;
        let row = <(i64, i64, i64, i64)>::from_row(&row).map_err(|e| classify(doing, e))?;
        Ok(Backlog {
            due: row.0 as u64,
            delayed: row.1 as u64,
            dead: row.2 as u64,
            oldest_due: Duration::from_millis(row.3.max(0) as u64),
        })
    }
}

impl PostgresStore {
    /// A crash before the commit leaves nothing, and the source delivers again; a crash after it
    /// leaves the row, and the redelivery finds it held.
    async fn park_once(
        &self,
        conn: &mut Connection<Postgres>,
        limits: &Limits,
        parked: &Parked<'_>,
    ) -> Result<Parking, StoreError> {
        let mut tx = self.begin(conn, limits).await?;
        let mut claimed = None;
        if let Some((key, identity)) = parked.key {
            if self.park_claim(&mut tx, parked, key, identity).await? {
                claimed = Some(key);
            } else if !parked.escaped {
                self.rollback(conn).await?;
                return Ok(Parking::Duplicate);
            }
        }
        answer(tx.patience, self.park_insert(&mut tx, parked))
            .await
            .map_err(|e| classify("holding an event", e))?;
        if let Some(key) = claimed {
            let unclaim = sqlx::query(self.sql.park_unclaim.clone()).bind(key.as_uuid());
            answer(tx.patience, unclaim.execute(&mut *tx))
                .await
                .map_err(|e| classify("giving a claim back", e))?;
        }
        let commit = sqlx::raw_sql("COMMIT").execute(&mut *tx.conn.conn);
        answer(tx.patience, commit)
            .await
            .map_err(|e| classify("committing a held event", e))?;
        tx.conn.open = None;
        Ok(Parking::Held)
    }

    async fn park_claim(
        &self,
        tx: &mut Tx<'_, Postgres>,
        parked: &Parked<'_>,
        key: EventKey,
        identity: &Identity,
    ) -> Result<bool, StoreError> {
        let claim = sqlx::query(self.sql.park_claim.clone())
            .bind(key.as_uuid())
            .bind(parked.consumer)
            .bind(&identity.source)
            .bind(&identity.id)
            .bind(parked.event.payload_hash().as_bytes());
        let done = answer(tx.patience, claim.execute(&mut **tx))
            .await
            .map_err(classify_claim)?;
        Ok(done.rows_affected() == 1)
    }

    async fn park_insert(&self, tx: &mut Tx<'_, Postgres>, parked: &Parked<'_>) -> Result<(), sqlx::Error> {
        let (state, reason, after) = becomes(parked.becomes);
        about(parked, sqlx::query(self.sql.park_insert.clone()))
            .bind(state)
            .bind(reason)
            .bind(after)
            .bind(parked.failures.len() as i32)
            .bind(parked.failures_json())
            .execute(&mut **tx)
            .await?;
        Ok(())
    }

    fn enqueue_statement(&self, parked: &Parked<'_>, unless_claimed: bool) -> Statement {
        let (_, _, after) = becomes(parked.becomes);
        about(parked, sqlx::query(self.sql.enqueue.clone()))
            .bind(after)
            .bind(unless_claimed)
    }
}

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

/// State, reason, and the delay in milliseconds.
fn becomes(parked: ParkedAs) -> (&'static str, Option<&'static str>, i64) {
    match parked {
        ParkedAs::Ready { after } => ("ready", None, after.as_millis() as i64),
        ParkedAs::Dead { reason } => ("dead", Some(reason.as_str()), 0),
    }
}

fn columns(leases: &[Lease]) -> (Vec<i64>, Vec<Uuid>) {
    leases.iter().map(|lease| (lease.id, lease.token)).unzip()
}

fn held_event(row: &PgRow, token: Uuid) -> Result<HeldEvent, sqlx::Error> {
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
            attempts: row.try_get::<i32, _>("attempts")? as u32,
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
