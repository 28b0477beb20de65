use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use sqlx::Row as _;
use sqlx::postgres::{PgConnection, PgRow, Postgres};

use super::PostgresStore;
use super::beside::Statement;
use super::classify::{classify, code};
use super::commit::{hear_out, is_of_copy, says};
use super::sql::NOT_OURS;
use crate::store::{
    Claims, CommitError, Outgoing, OutgoingRow, ParkedRow, Store as _, StoreError, Tx, answer,
};

const RECORDING: &str = "writing outgoing events";

#[async_trait]
impl Outgoing for PostgresStore {
    async fn write_outgoing(&self, conn: &mut PgConnection, rows: &[OutgoingRow]) -> Result<(), sqlx::Error> {
        let done = self.record_statement(rows, None).execute(conn).await?;
        if done.rows_affected() == rows.len() as u64 {
            return Ok(());
        }
        Err(sqlx::Error::Protocol(format!(
            "{} of {} outgoing events were written (is there a trigger on the table outbox?)",
            done.rows_affected(),
            rows.len()
        )))
    }

    async fn record_outgoing(
        &self,
        tx: &mut Tx<'_, Postgres>,
        claims: Claims,
        rows: &[OutgoingRow],
    ) -> Result<Claims, CommitError> {
        if let Err(e) = hear_out(tx).await {
            return Err(CommitError::Store(classify(RECORDING, e)));
        }
        let record = self.record_statement(rows, claims.mark.as_deref());
        match answer(tx.patience, record.execute(&mut **tx)).await {
            Ok(done) if done.rows_affected() == rows.len() as u64 => Ok(claims),
            // The answer to a COPY of the handler's.
            Ok(_) => Err(CommitError::OutOfStep),
            Err(e) if is_of_data(&e) => Err(if self.is_committed(&claims).await {
                CommitError::Escaped(claims)
            } else {
                CommitError::Refused(classify(RECORDING, e))
            }),
            Err(e) => Err(self.refused(claims, RECORDING, e).await),
        }
    }

    async fn parked(&self, relay: &str, after: i64, limit: usize) -> Result<Vec<ParkedRow>, StoreError> {
        let doing = "reading parked events";
        let parked = sqlx::query(self.sql.parked.clone())
            .bind(relay.to_owned())
            .bind(after)
            .bind(i64::try_from(limit).unwrap_or(i64::MAX));
        let rows = self.rows(doing, parked).await?;
        rows.iter()
            .map(parked_row)
            .collect::<Result<_, _>>()
            .map_err(|e| classify(doing, e))
    }

    async fn replay_parked(&self, relay: &str, ids: &[i64]) -> Result<Vec<i64>, StoreError> {
        let replay = sqlx::query(self.sql.replay_parked.clone());
        self.of_parked("replaying parked events", replay, relay, ids)
            .await
    }

    async fn discard_parked(&self, relay: &str, ids: &[i64]) -> Result<Vec<i64>, StoreError> {
        let discard = sqlx::query(self.sql.discard_parked.clone());
        self.of_parked("discarding parked events", discard, relay, ids)
            .await
    }
}

impl PostgresStore {
    /// One statement for any number of rows. With a mark it raises an error anywhere but in that transaction:
    /// in another one, rows could commit on their own.
    fn record_statement(&self, rows: &[OutgoingRow], mark: Option<&str>) -> Statement {
        fn each<'a, T>(rows: &'a [OutgoingRow], column: impl Fn(&'a OutgoingRow) -> T) -> Vec<T> {
            rows.iter().map(column).collect()
        }
        sqlx::query(self.sql.record.clone())
            .bind(each(rows, |row| row.relay.as_str()))
            .bind(each(rows, |row| row.message.event_id.as_str()))
            .bind(each(rows, |row| row.message.source.as_str()))
            .bind(each(rows, |row| row.destination.as_str()))
            .bind(each(rows, |row| row.message.key.as_deref()))
            .bind(each(rows, |row| row.order().map(Vec::from)))
            .bind(each(rows, |row| i16::from(row.lane())))
            .bind(each(rows, |row| row.message.event_type.as_deref()))
            .bind(each(rows, |row| row.message.payload.as_deref()))
            .bind(each(rows, |row| row.message.content_type.as_deref()))
            .bind(each(rows, |row| row.message.headers.encode()))
            .bind(each(rows, OutgoingRow::attributes))
            .bind(each(rows, OutgoingRow::mode))
            .bind(each(rows, OutgoingRow::traceparent))
            .bind(each(rows, OutgoingRow::send_at_micros))
            .bind(each(rows, OutgoingRow::delay_micros))
            .bind(mark)
    }

    async fn of_parked(
        &self,
        doing: &str,
        statement: Statement,
        relay: &str,
        ids: &[i64],
    ) -> Result<Vec<i64>, StoreError> {
        let rows = self.rows(doing, statement.bind(relay).bind(ids)).await?;
        rows.iter()
            .map(|row| row.try_get(0))
            .collect::<Result<_, _>>()
            .map_err(|e| classify(doing, e))
    }
}

/// What was to be written was refused. (A COPY that the handler did not wait for may be refused as well, and
/// that is heard here.)
fn is_of_data(error: &sqlx::Error) -> bool {
    let refused = code(error).is_some_and(|code| code.starts_with("22") || code.starts_with("23"));
    refused && !says(error, NOT_OURS) && !is_of_copy(error)
}

fn parked_row(row: &PgRow) -> Result<ParkedRow, sqlx::Error> {
    let parked_at = Duration::from_micros(row.try_get::<i64, _>(7)?.max(0) as u64);
    Ok(ParkedRow {
        id: row.try_get(0)?,
        event_id: row.try_get(1)?,
        event_type: row.try_get(2)?,
        destination: row.try_get(3)?,
        key: row.try_get::<Option<Vec<u8>>, _>(4)?.map(Bytes::from),
        attempts: row.try_get::<i32, _>(5)? as u32,
        error: row.try_get(6)?,
        parked_at: SystemTime::UNIX_EPOCH + parked_at,
    })
}
