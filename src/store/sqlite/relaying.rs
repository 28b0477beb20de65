use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use serde::Serialize;
use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;

use super::classify::classify;
use super::inbox::micros;
use super::operations::{OUTBOX, Tables, Unique};
use super::{SqliteStore, commit, sql};
use crate::event::Headers;
use crate::outbox::Destination;
use crate::publisher::Message;
use crate::store::held::storable;
use crate::store::stored::{ERROR_BYTES, attributes_of, mode_of, written_at};
use crate::store::{
    DueRequest, DueRow, HeldLane, LANES, OutgoingBacklog, Owner, Refusal, Relaying, StoreError, UnreadableRow,
};

/// What a relay needs; consumers do without all but the first of them.
const COLUMNS: Tables = &[
    OUTBOX,
    (
        "onlyonce_outbox_lanes",
        &[
            ("relay", "TEXT"),
            ("lane", "INTEGER"),
            ("owner", "BLOB"),
            ("fence", "INTEGER"),
            ("leased_until", "INTEGER"),
        ],
    ),
    (
        "onlyonce_outbox_relays",
        &[("relay", "TEXT"), ("owner", "BLOB"), ("alive_until", "INTEGER")],
    ),
];

/// Without these, a lane could be held twice, and its events go out of order.
const UNIQUE: Unique = &[
    ("onlyonce_outbox_lanes", "relay,lane", None),
    ("onlyonce_outbox_relays", "relay,owner", None),
];

#[async_trait]
impl Relaying for SqliteStore {
    async fn check_outgoing(&self) -> Result<(), StoreError> {
        self.check_version().await?;
        self.check_columns(COLUMNS).await?;
        self.check_unique(UNIQUE).await
    }

    async fn hold_lanes(
        &self,
        relay: &str,
        owner: Owner,
        lease: Duration,
    ) -> Result<Vec<HeldLane>, StoreError> {
        let doing = "holding lanes";
        let holding = |e| classify(doing, e);
        let mut tx = self.begin_reserve(doing).await?;
        sqlx::query(sql::FORGET_DEAD)
            .bind(relay)
            .execute(&mut *tx)
            .await
            .map_err(holding)?;
        sqlx::query(sql::ALIVE)
            .bind(relay)
            .bind(owner)
            .bind(micros(lease))
            .execute(&mut *tx)
            .await
            .map_err(holding)?;
        sqlx::query(sql::MAKE_LANES)
            .bind(relay)
            .bind(i64::from(LANES))
            .execute(&mut *tx)
            .await
            .map_err(holding)?;
        for statement in [sql::RENEW_LANES, sql::TAKE_LANES] {
            sqlx::query(statement)
                .bind(relay)
                .bind(owner)
                .bind(micros(lease))
                .bind(i64::from(LANES))
                .execute(&mut *tx)
                .await
                .map_err(holding)?;
        }
        let held: Vec<(u8, i64)> = sqlx::query_as(sql::HELD_LANES)
            .bind(relay)
            .bind(owner)
            .fetch_all(&mut *tx)
            .await
            .map_err(holding)?;
        commit(tx).await.map_err(holding)?;
        Ok(held
            .into_iter()
            .map(|(lane, fence)| HeldLane { lane, fence })
            .collect())
    }

    async fn give_up_lanes(&self, relay: &str, owner: Owner) -> Result<(), StoreError> {
        let doing = "giving lanes up";
        let giving = |e| classify(doing, e);
        let mut tx = self.begin_reserve(doing).await?;
        for statement in sql::GIVE_UP_LANES.split(';') {
            sqlx::query(statement)
                .bind(relay)
                .bind(owner)
                .execute(&mut *tx)
                .await
                .map_err(giving)?;
        }
        commit(tx).await.map_err(giving)
    }

    async fn due(&self, request: &DueRequest<'_>) -> Result<Vec<Result<DueRow, UnreadableRow>>, StoreError> {
        let reading = |e| classify("reading outgoing events", e);
        let rows = sqlx::query(sql::DUE_OUTGOING)
            .bind(request.relay)
            .bind(json(request.lanes))
            .bind(json(request.except))
            .bind(json(request.paused))
            .bind(json(request.down))
            .bind(request.overtake)
            .bind(request.limit as i64)
            .bind(request.bytes as i64)
            .fetch_all(&self.reserve)
            .await
            .map_err(reading)?;
        rows.iter()
            .map(due_row)
            .collect::<Result<_, _>>()
            .map_err(reading)
    }

    async fn mark_sent(&self, ids: &[i64], keep: bool) -> Result<(), StoreError> {
        let doing = "marking outgoing events as sent";
        let marking = |e| classify(doing, e);
        let mut tx = self.begin_reserve(doing).await?;
        sqlx::query(if keep { sql::KEEP_SENT } else { sql::DELETE_SENT })
            .bind(json(ids))
            .execute(&mut *tx)
            .await
            .map_err(marking)?;
        commit(tx).await.map_err(marking)
    }

    async fn mark_refused(&self, refusals: &[Refusal<'_>]) -> Result<Vec<i64>, StoreError> {
        let doing = "marking refused events";
        let marking = |e| classify(doing, e);
        let mut tx = self.begin_reserve(doing).await?;
        let mut ours = Vec::new();
        for refusal in refusals {
            let done = sqlx::query(sql::MARK_REFUSED)
                .bind(refusal.id)
                .bind(refusal.lane.lane)
                .bind(refusal.lane.fence)
                .bind(storable(refusal.error, ERROR_BYTES))
                .bind(refusal.again.map(micros))
                .execute(&mut *tx)
                .await
                .map_err(marking)?;
            if done.rows_affected() == 1 {
                ours.push(refusal.id);
            }
        }
        commit(tx).await.map_err(marking)?;
        Ok(ours)
    }

    async fn outgoing(&self, relay: &str) -> Result<OutgoingBacklog, StoreError> {
        let (pending, oldest, parked): (i64, Option<i64>, i64) = sqlx::query_as(sql::OUTGOING)
            .bind(relay)
            .fetch_one(&self.reserve)
            .await
            .map_err(|e| classify("counting outgoing events", e))?;
        Ok(OutgoingBacklog {
            pending: pending as u64,
            oldest: oldest.map(|age| Duration::from_micros(age.max(0) as u64)),
            parked: parked as u64,
        })
    }

    async fn purge_sent(&self, relay: &str, kept: Duration, limit: u32) -> Result<u64, StoreError> {
        let doing = "purging sent events";
        let purging = |e| classify(doing, e);
        let mut tx = self.begin_reserve(doing).await?;
        let done = sqlx::query(sql::PURGE_SENT)
            .bind(relay)
            .bind(micros(kept))
            .bind(i64::from(limit))
            .execute(&mut *tx)
            .await
            .map_err(purging)?;
        commit(tx).await.map_err(purging)?;
        Ok(done.rows_affected())
    }
}

/// Numbers and texts always have a form as JSON.
fn json<T: Serialize>(values: &[T]) -> String {
    serde_json::to_string(values).unwrap_or_default()
}

/// What identifies a row is always there; what describes its event may be of a form that this version
/// does not know.
fn due_row(row: &SqliteRow) -> Result<Result<DueRow, UnreadableRow>, sqlx::Error> {
    let id = row.try_get("id")?;
    let lane = row.try_get("lane")?;
    let order = row.try_get::<Option<&[u8]>, _>("key_hash")?;
    let order = order.and_then(|order| order.try_into().ok());
    Ok(event(row, id, lane, order).map_err(|error| UnreadableRow {
        id,
        lane,
        order,
        why: format!("this version cannot read the row: {error}"),
    }))
}

fn event(row: &SqliteRow, id: i64, lane: u8, order: Option<[u8; 16]>) -> Result<DueRow, sqlx::Error> {
    let bytes =
        |column: &str| Ok::<_, sqlx::Error>(row.try_get::<Option<Vec<u8>>, _>(column)?.map(Bytes::from));
    let unknown =
        |column: &str| sqlx::Error::Decode(format!("outbox.{column} is not in a form that it knows").into());
    let destination: Destination = row
        .try_get::<&str, _>("destination")?
        .parse()
        .map_err(|e| sqlx::Error::Decode(Box::new(e)))?;
    Ok(DueRow {
        id,
        lane,
        order,
        attempts: row.try_get("attempts")?,
        traceparent: row.try_get("traceparent")?,
        message: Message {
            event_id: row.try_get("event_id")?,
            source: row.try_get("source")?,
            event_type: row.try_get("event_type")?,
            address: destination.address().to_owned(),
            key: bytes("ordering_key")?,
            payload: bytes("payload")?,
            content_type: row.try_get("content_type")?,
            headers: Headers::decode(row.try_get("headers")?).ok_or_else(|| unknown("headers"))?,
            attributes: attributes_of(row.try_get("attributes")?).ok_or_else(|| unknown("attributes"))?,
            mode: mode_of(row.try_get("mode")?).ok_or_else(|| unknown("mode"))?,
            time: written_at(row.try_get("created_at")?),
            replays: row.try_get("replays")?,
        },
        destination,
    })
}
