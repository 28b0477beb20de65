use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use sqlx::Row as _;
use sqlx::sqlite::{Sqlite, SqliteConnection, SqliteRow};

use super::classify::{COMMIT_HOOK, READ_ONLY, classify, code, primary};
use super::{SqliteStore, commit, sql};
use crate::store::{Claims, CommitError, Outgoing, OutgoingRow, ParkedRow, StoreError, Tx};

const RECORDING: &str = "writing outgoing events";

#[async_trait]
impl Outgoing for SqliteStore {
    async fn write_outgoing(
        &self,
        conn: &mut SqliteConnection,
        rows: &[OutgoingRow],
    ) -> Result<(), sqlx::Error> {
        // The caller's transaction may be a handler's, which is the writer already: waiting for that right
        // here would be waiting for ourselves. A statement costs no round trip; the savepoint makes them one.
        sqlx::raw_sql(sql::RECORD_ALL).execute(&mut *conn).await?;
        match insert_all(conn, rows, None).await {
            Ok(written) if written == rows.len() => {
                sqlx::raw_sql(sql::RECORD_END).execute(conn).await?;
                Ok(())
            }
            result => {
                sqlx::raw_sql(sql::RECORD_UNDO).execute(conn).await?;
                let written = result?;
                Err(sqlx::Error::Protocol(format!(
                    "{written} of {} outgoing events were written (is there a trigger on the table \
                     onlyonce_outbox?)",
                    rows.len()
                )))
            }
        }
    }

    async fn record_outgoing(
        &self,
        tx: &mut Tx<'_, Sqlite>,
        claims: Claims,
        rows: &[OutgoingRow],
    ) -> Result<Claims, CommitError> {
        match insert_all(tx, rows, Some(&claims)).await {
            Ok(written) if written == rows.len() => Ok(claims),
            Ok(_) => Err(CommitError::Escaped(claims)),
            // It was a transaction of its own, which our hook did not let commit.
            Err(e) if code(&e) == Some(COMMIT_HOOK) => Err(CommitError::Escaped(claims)),
            // The claim could be written, so it is the handler that has forbidden writing since.
            Err(e) if code(&e) == Some(READ_ONLY) => Err(CommitError::Aborted(classify(RECORDING, e))),
            // TOOBIG, CONSTRAINT, MISMATCH.
            Err(e) if matches!(primary(&e), Some(18..=20)) => {
                Err(CommitError::Refused(classify(RECORDING, e)))
            }
            Err(e) => Err(CommitError::Store(classify(RECORDING, e))),
        }
    }

    async fn parked(&self, relay: &str, after: i64, limit: usize) -> Result<Vec<ParkedRow>, StoreError> {
        let reading = |e| classify("reading parked events", e);
        let rows = sqlx::query(sql::PARKED)
            .bind(relay)
            .bind(after)
            .bind(i64::try_from(limit).unwrap_or(i64::MAX))
            .fetch_all(&self.reserve)
            .await
            .map_err(reading)?;
        rows.iter()
            .map(parked_row)
            .collect::<Result<_, _>>()
            .map_err(reading)
    }

    async fn replay_parked(&self, relay: &str, ids: &[i64]) -> Result<Vec<i64>, StoreError> {
        self.of_parked("replaying parked events", sql::REPLAY_PARKED, relay, ids)
            .await
    }

    async fn discard_parked(&self, relay: &str, ids: &[i64]) -> Result<Vec<i64>, StoreError> {
        self.of_parked("discarding parked events", sql::DISCARD_PARKED, relay, ids)
            .await
    }
}

impl SqliteStore {
    async fn of_parked(
        &self,
        doing: &str,
        statement: &'static str,
        relay: &str,
        ids: &[i64],
    ) -> Result<Vec<i64>, StoreError> {
        let failed = |e| classify(doing, e);
        let mut tx = self.begin_reserve(doing).await?;
        let changed = sqlx::query_scalar(statement)
            .bind(relay)
            .bind(serde_json::json!(ids).to_string())
            .fetch_all(&mut *tx)
            .await
            .map_err(failed)?;
        commit(tx).await.map_err(failed)?;
        Ok(changed)
    }
}

/// How many were written: none where these claims are not of this transaction, which would commit them on
/// their own.
async fn insert_all(
    conn: &mut SqliteConnection,
    rows: &[OutgoingRow],
    claims: Option<&Claims>,
) -> Result<usize, sqlx::Error> {
    let mark = claims.and_then(|claims| claims.mark.as_deref());
    let claim = claims.and_then(|claims| claims.keys.first());
    let mut written = 0;
    for row in rows {
        let done = sqlx::query(sql::RECORD)
            .bind(&row.relay)
            .bind(&row.message.event_id)
            .bind(&row.message.source)
            .bind(row.destination.as_str())
            .bind(row.message.key.as_deref())
            .bind(row.order().map(Vec::from))
            .bind(row.lane())
            .bind(&row.message.event_type)
            .bind(row.message.payload.as_deref())
            .bind(&row.message.content_type)
            .bind(row.message.headers.encode())
            .bind(row.attributes())
            .bind(row.mode())
            .bind(row.traceparent())
            .bind(row.send_at_micros())
            .bind(row.delay_micros())
            .bind(mark)
            .bind(claim.map(|key| key.as_uuid()))
            .execute(&mut *conn)
            .await?;
        written += done.rows_affected() as usize;
    }
    Ok(written)
}

fn parked_row(row: &SqliteRow) -> Result<ParkedRow, sqlx::Error> {
    let parked_at = Duration::from_micros(row.try_get::<i64, _>(7)?.max(0) as u64);
    Ok(ParkedRow {
        id: row.try_get(0)?,
        event_id: row.try_get(1)?,
        event_type: row.try_get(2)?,
        destination: row.try_get(3)?,
        key: row.try_get::<Option<Vec<u8>>, _>(4)?.map(Bytes::from),
        attempts: row.try_get(5)?,
        error: row.try_get(6)?,
        parked_at: SystemTime::UNIX_EPOCH + parked_at,
    })
}
