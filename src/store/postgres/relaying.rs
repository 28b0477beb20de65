use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use sqlx::Row as _;
use sqlx::postgres::PgRow;

use super::PostgresStore;
use super::classify::classify;
use super::operations::{OUTBOX, Tables, Unique};
use crate::event::Headers;
use crate::outbox::Destination;
use crate::publisher::Message;
use crate::store::held::storable;
use crate::store::stored::{ERROR_BYTES, attributes_of, mode_of, written_at};
use crate::store::{
    DueRequest, DueRow, HeldLane, OutgoingBacklog, Owner, Refusal, Relaying, StoreError, UnreadableRow,
};

/// What a relay needs; consumers do without all but the first of them.
const COLUMNS: Tables = &[
    OUTBOX,
    (
        "outbox_lanes",
        &[
            ("relay", "text"),
            ("lane", "int2"),
            ("owner", "uuid"),
            ("fence", "int8"),
            ("leased_until", "timestamptz"),
        ],
    ),
    (
        "outbox_relays",
        &[
            ("relay", "text"),
            ("owner", "uuid"),
            ("alive_until", "timestamptz"),
        ],
    ),
];

/// Without these, a lane could be held twice, and its events go out of order.
const UNIQUE: Unique = &[
    ("outbox_lanes", "relay, lane", None),
    ("outbox_relays", "relay, owner", None),
];

#[async_trait]
impl Relaying for PostgresStore {
    async fn check_outgoing(&self) -> Result<(), StoreError> {
        self.check_version().await?;
        self.check_columns(COLUMNS).await?;
        self.check_unique(UNIQUE).await?;
        self.check_privileges(COLUMNS).await
    }

    async fn hold_lanes(
        &self,
        relay: &str,
        owner: Owner,
        lease: Duration,
    ) -> Result<Vec<HeldLane>, StoreError> {
        let held = self.hold_lanes_there(relay, owner, lease).await?;
        if !held.is_empty() {
            return Ok(held);
        }
        // Others may have them all, or nobody has made them yet.
        let make = sqlx::query(self.sql.make_lanes.clone()).bind(relay.to_owned());
        if self.execute("making lanes", make).await?.rows_affected() == 0 {
            return Ok(held);
        }
        self.hold_lanes_there(relay, owner, lease).await
    }

    async fn give_up_lanes(&self, relay: &str, owner: Owner) -> Result<(), StoreError> {
        let give_up = sqlx::query(self.sql.give_up_lanes.clone())
            .bind(relay.to_owned())
            .bind(owner);
        self.execute("giving lanes up", give_up).await?;
        Ok(())
    }

    async fn due(&self, request: &DueRequest<'_>) -> Result<Vec<Result<DueRow, UnreadableRow>>, StoreError> {
        let doing = "reading outgoing events";
        let owned = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
        let due = sqlx::query(self.sql.due.clone())
            .bind(request.relay.to_owned())
            .bind(
                request
                    .lanes
                    .iter()
                    .map(|&lane| i16::from(lane))
                    .collect::<Vec<_>>(),
            )
            .bind(request.except.to_vec())
            .bind(owned(request.paused))
            .bind(owned(request.down))
            .bind(request.overtake)
            .bind(request.limit as i64)
            .bind(request.bytes as i64);
        let rows = self.rows(doing, due).await?;
        rows.iter()
            .map(due_row)
            .collect::<Result<_, _>>()
            .map_err(|e| classify(doing, e))
    }

    async fn mark_sent(&self, ids: &[i64], keep: bool) -> Result<(), StoreError> {
        let mark = if keep {
            &self.sql.keep_sent
        } else {
            &self.sql.delete_sent
        };
        let mark = sqlx::query(mark.clone()).bind(ids.to_vec());
        self.execute("marking outgoing events as sent", mark).await?;
        Ok(())
    }

    async fn mark_refused(&self, refusals: &[Refusal<'_>]) -> Result<Vec<i64>, StoreError> {
        let doing = "marking refused events";
        let mark = sqlx::query(self.sql.mark_refused.clone())
            .bind(refusals.iter().map(|r| r.id).collect::<Vec<_>>())
            .bind(
                refusals
                    .iter()
                    .map(|r| i16::from(r.lane.lane))
                    .collect::<Vec<_>>(),
            )
            .bind(refusals.iter().map(|r| r.lane.fence).collect::<Vec<_>>())
            .bind(
                refusals
                    .iter()
                    .map(|r| storable(r.error, ERROR_BYTES))
                    .collect::<Vec<_>>(),
            )
            .bind(
                refusals
                    .iter()
                    .map(|r| r.again.map(|after| after.as_millis() as i64))
                    .collect::<Vec<_>>(),
            );
        let rows = self.rows(doing, mark).await?;
        rows.iter()
            .map(|row| row.try_get(0))
            .collect::<Result<_, _>>()
            .map_err(|e| classify(doing, e))
    }

    async fn outgoing(&self, relay: &str) -> Result<OutgoingBacklog, StoreError> {
        let doing = "counting outgoing events";
        let read = |e| classify(doing, e);
        let count = sqlx::query(self.sql.outgoing.clone()).bind(relay.to_owned());
        let row = self.row(doing, count).await?;
        let oldest: Option<i64> = row.try_get(1).map_err(read)?;
        Ok(OutgoingBacklog {
            pending: row.try_get::<i64, _>(0).map_err(read)? as u64,
            oldest: oldest.map(|age| Duration::from_millis(age.max(0) as u64)),
            parked: row.try_get::<i64, _>(2).map_err(read)? as u64,
        })
    }

    async fn purge_sent(&self, relay: &str, kept: Duration, limit: u32) -> Result<u64, StoreError> {
        let purge = sqlx::query(self.sql.purge_sent.clone())
            .bind(relay.to_owned())
            .bind(i64::try_from(kept.as_millis()).unwrap_or(i64::MAX))
            .bind(i64::from(limit));
        let done = self.execute("purging sent events", purge).await?;
        Ok(done.rows_affected())
    }
}

impl PostgresStore {
    #[cfg(all(test, feature = "sqlite"))]
    pub(crate) fn due_statement(&self) -> String {
        self.sql.due.as_str().to_owned()
    }

    async fn hold_lanes_there(
        &self,
        relay: &str,
        owner: Owner,
        lease: Duration,
    ) -> Result<Vec<HeldLane>, StoreError> {
        let doing = "holding lanes";
        let hold = sqlx::query(self.sql.hold_lanes.clone())
            .bind(relay.to_owned())
            .bind(owner)
            .bind(lease.as_millis() as i64);
        let held = |row: &PgRow| {
            Ok(HeldLane {
                lane: row.try_get::<i16, _>(0)? as u8,
                fence: row.try_get(1)?,
            })
        };
        let rows = self.rows(doing, hold).await?;
        rows.iter()
            .map(held)
            .collect::<Result<_, _>>()
            .map_err(|e| classify(doing, e))
    }
}

/// What identifies a row is always there; what describes its event may be of a form that this version
/// does not know. The columns are counted as the statement names them: to look them up by name takes longer
/// than to read them.
fn due_row(row: &PgRow) -> Result<Result<DueRow, UnreadableRow>, sqlx::Error> {
    let id = row.try_get(0)?;
    let lane = row.try_get::<i16, _>(1)? as u8;
    let order = row.try_get::<Option<&[u8]>, _>(2)?;
    let order = order.and_then(|order| order.try_into().ok());
    Ok(event(row, id, lane, order).map_err(|error| UnreadableRow {
        id,
        lane,
        order,
        why: format!("this version cannot read the row: {error}"),
    }))
}

fn event(row: &PgRow, id: i64, lane: u8, order: Option<[u8; 16]>) -> Result<DueRow, sqlx::Error> {
    let bytes =
        |column: usize| Ok::<_, sqlx::Error>(row.try_get::<Option<Vec<u8>>, _>(column)?.map(Bytes::from));
    let unknown =
        |column: &str| sqlx::Error::Decode(format!("outbox.{column} is not in a form that it knows").into());
    let destination: Destination = row
        .try_get::<&str, _>(3)?
        .parse()
        .map_err(|e| sqlx::Error::Decode(Box::new(e)))?;
    Ok(DueRow {
        id,
        lane,
        order,
        attempts: row.try_get::<i32, _>(4)? as u32,
        traceparent: row.try_get(14)?,
        message: Message {
            event_id: row.try_get(5)?,
            source: row.try_get(6)?,
            event_type: row.try_get(7)?,
            address: destination.address().to_owned(),
            key: bytes(8)?,
            payload: bytes(9)?,
            content_type: row.try_get(10)?,
            headers: Headers::decode(row.try_get(11)?).ok_or_else(|| unknown("headers"))?,
            attributes: attributes_of(row.try_get(12)?).ok_or_else(|| unknown("attributes"))?,
            mode: mode_of(row.try_get(13)?).ok_or_else(|| unknown("mode"))?,
            time: written_at(row.try_get(16)?),
            replays: row.try_get::<i32, _>(15)? as u32,
        },
        destination,
    })
}
