use std::time::Duration;

use async_trait::async_trait;
use sqlx::sqlite::{Sqlite, SqliteConnection};
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _, Row as _, SqlSafeStr};

use super::classify::{classify, classify_begin, primary};
use super::options::{IN_MEMORY, RESERVE};
use super::{SqliteStore, sql};
use crate::event::EventKey;
use crate::store::claim::{Answers, in_request_order};
use crate::store::{
    ClaimAnswer, ClaimRequest, Claims, CommitError, Connection, Found, GRACE, HeldState, Limits, Next, Open,
    Outcome, Store, StoreError, StoreErrorKind, Tx, answer,
};

/// How long a probe, or the end of a stuck statement, may take.
const PROBE: Duration = Duration::from_secs(5);

#[async_trait]
impl Store for SqliteStore {
    type Db = Sqlite;

    fn name(&self) -> &'static str {
        "sqlite"
    }

    fn max_connections(&self) -> u32 {
        self.lanes.options().get_max_connections() + RESERVE
    }

    fn pool_id(&self) -> usize {
        std::sync::Arc::as_ptr(&self.writers) as usize
    }

    fn max_useful_lanes(&self) -> Option<usize> {
        Some(1)
    }

    async fn open(&self) -> Result<Connection<Sqlite>, StoreError> {
        let mut conn = self
            .lanes
            .acquire()
            .await
            .map_err(|e| classify("taking a connection", e))?;
        // Not for others any more: when its lane is done with it, it is closed.
        conn.close_on_drop();
        let (foreign_keys, file): (bool, Option<String>) = sqlx::query_as(
            "SELECT (SELECT foreign_keys FROM pragma_foreign_keys), \
                    (SELECT file FROM pragma_database_list WHERE name = 'main')",
        )
        .fetch_one(&mut *conn)
        .await
        .map_err(|e| classify("opening a session", e))?;
        if file.is_none_or(|file| file.is_empty()) {
            return Err(StoreError::new(StoreErrorKind::Misconfigured, IN_MEMORY));
        }
        if !foreign_keys {
            return Err(StoreError::new(
                StoreErrorKind::Misconfigured,
                "foreign keys are off, so a handler's own COMMIT would go unnoticed (open the pool with \
                 foreign_keys(true))",
            ));
        }
        let session = match &self.sessions {
            None => None,
            Some(sessions) => Some(
                sessions
                    .fit(&mut conn)
                    .await
                    .map_err(|e| classify("opening a session", e))?,
            ),
        };
        Ok(Connection {
            conn,
            session,
            limits: None,
            open: None,
        })
    }

    async fn begin<'c>(
        &self,
        conn: &'c mut Connection<Sqlite>,
        limits: &Limits,
    ) -> Result<Tx<'c, Sqlite>, StoreError> {
        conn.must_be_clean()?;
        // First the queue of this process, which is in order, then SQLite's own wait for other processes.
        let writer = self.writer(limits.lock_timeout).await?;
        let begin = AssertSqlSafe(begin_statement(limits));
        // From here on it may have begun, whether or not anybody waits for the answer.
        conn.open = Some(Open {
            ahead: None,
            _writer: Some(writer),
        });
        if let Err(e) = send_begin(conn, begin).await {
            conn.open = None;
            return Err(classify_begin("beginning", e));
        }
        // We hold the write lock now, so a permission that still stands is that of a COMMIT never sent.
        if let Some(sessions) = &self.sessions {
            sessions.let_commit(false);
        }
        Ok(Tx {
            conn,
            patience: limits.patience(),
        })
    }

    async fn claim(
        &self,
        tx: &mut Tx<'_, Sqlite>,
        requests: &[ClaimRequest<'_>],
        outcome: Outcome,
    ) -> Result<(Vec<ClaimAnswer>, Claims), StoreError> {
        let claiming = |e| classify("claiming", e);
        // A mark that `open_claims` does not hold: with it in place no COMMIT succeeds.
        let mark = format!("{:032x}", fastrand::u128(..));
        let mut answers = Answers::with_capacity(requests.len());
        let mut claims = Claims {
            keys: Vec::with_capacity(requests.len()),
            mark: None,
            outcome,
            held: false,
        };
        // One by one: a statement costs no round trip here, and no other writer can come between.
        for request in requests {
            if answers.contains_key(&request.question()) {
                continue;
            }
            let answer = if insert(tx, request, outcome, &mark).await.map_err(claiming)? {
                claims.keys.push(request.key);
                claims.mark = Some(mark.clone());
                Some(ClaimAnswer::New)
            } else {
                read(tx, request).await.map_err(claiming)?.answer(request)
            };
            let answer = answer.ok_or_else(|| {
                StoreError::new(
                    StoreErrorKind::Busy,
                    format!("event {} moved between claim and inbox", request.identity.id),
                )
            })?;
            answers.insert(request.question(), answer);
        }
        Ok((in_request_order(requests, &answers, outcome), claims))
    }

    async fn is_committed(&self, _claims: &Claims) -> bool {
        // The mark does not let a handler's COMMIT through, so what failed has left nothing.
        false
    }

    async fn commit(&self, tx: Tx<'_, Sqlite>, claims: Claims, _next: Next<'_>) -> Result<(), CommitError> {
        self.commit_behind_guard(tx, claims).await
    }

    async fn rollback(&self, conn: &mut Connection<Sqlite>) -> Result<(), StoreError> {
        if conn.open.is_some() {
            // SQLite may have done it by itself (a full disk, RAISE(ROLLBACK)), and so may the handler.
            let rollback = sqlx::raw_sql("ROLLBACK").execute(&mut *conn.conn);
            answer(GRACE, rollback)
                .await
                .map_err(|e| classify("rolling back", e))?;
            conn.open = None;
        }
        Ok(())
    }

    async fn abandon(&self, conn: Connection<Sqlite>) {
        if let (Some(sessions), Some(session)) = (&self.sessions, conn.session) {
            sessions.cut_off(session.number);
        }
        // Closing waits for the statement and rolls back. Other writers wait in SQLite until then.
        if tokio::time::timeout(PROBE, conn.conn.detach().close())
            .await
            .is_err()
        {
            tracing::debug!("a statement that was cut off still runs; its connection closes when it ends");
        }
    }

    async fn probe(&self) -> Result<(), StoreError> {
        let options = (*self.reserve.connect_options())
            .clone()
            .create_if_missing(false)
            .busy_timeout(Duration::from_millis(100));
        let probe = async {
            let mut conn = options.connect().await?;
            let mut tx = conn.begin_with(sql::BEGIN).await?;
            // Tables that are missing are for `check` to name.
            if has_table(&mut tx, "onlyonce_schema_version").await? {
                sqlx::query(sql::PROBE).execute(&mut *tx).await?;
            }
            tx.commit().await?;
            conn.close().await
        };
        match tokio::time::timeout(PROBE, probe).await {
            // Somebody else is writing, so it can be written to.
            Ok(Err(e)) if matches!(primary(&e), Some(5 | 6)) => Ok(()),
            Ok(result) => result.map_err(|e| classify("probing the database", e)),
            Err(_) => Err(StoreError::new(
                StoreErrorKind::Unavailable,
                "probing the database: no answer within 5 s",
            )),
        }
    }

    async fn claim_once(
        &self,
        conn: &mut SqliteConnection,
        consumer: &str,
        name: &str,
        id: &str,
    ) -> Result<bool, sqlx::Error> {
        let done = sqlx::query(sql::CLAIM_ONCE)
            .bind(EventKey::of_once(consumer, name, id).as_uuid())
            .bind(consumer)
            .bind(format!("business:{name}"))
            .bind(id)
            .execute(conn)
            .await?;
        Ok(done.rows_affected() == 1)
    }
}

async fn send_begin(conn: &mut Connection<Sqlite>, begin: impl SqlSafeStr) -> Result<(), sqlx::Error> {
    if conn.conn.is_in_transaction() {
        sqlx::raw_sql(begin).execute(&mut *conn.conn).await?;
    } else {
        std::mem::forget(conn.conn.begin_with(begin).await?);
    }
    Ok(())
}

/// The transaction, that it may write, and the one limit that SQLite knows: how long to wait for
/// another process.
fn begin_statement(limits: &Limits) -> String {
    let ms = limits.lock_timeout.as_millis().clamp(1, i32::MAX as u128);
    format!(
        "PRAGMA query_only = OFF; PRAGMA busy_timeout = {ms}; {}",
        sql::BEGIN
    )
}

async fn insert(
    tx: &mut Tx<'_, Sqlite>,
    request: &ClaimRequest<'_>,
    outcome: Outcome,
    mark: &str,
) -> Result<bool, sqlx::Error> {
    let done = sqlx::query(sql::CLAIM)
        .bind(request.key.as_uuid())
        .bind(request.consumer)
        .bind(&request.identity.source)
        .bind(&request.identity.id)
        .bind(request.payload_hash.as_bytes())
        .bind(request.own.map(|lease| lease.id))
        .bind(request.own.map(|lease| lease.token))
        .bind(outcome.as_str())
        .bind(mark)
        .execute(&mut **tx)
        .await?;
    Ok(done.rows_affected() == 1)
}

async fn read(tx: &mut Tx<'_, Sqlite>, request: &ClaimRequest<'_>) -> Result<Found, sqlx::Error> {
    let row = sqlx::query(sql::CLAIM_READ)
        .bind(request.key.as_uuid())
        .bind(request.payload_hash.as_bytes())
        .bind(request.own.map(|lease| lease.id))
        .bind(request.own.map(|lease| lease.token))
        .fetch_one(&mut **tx)
        .await?;
    let processed = match row.try_get::<Option<String>, _>(0)? {
        None => None,
        Some(source) => {
            let outcome = match row.try_get::<&str, _>(3)? {
                "discarded" => Outcome::Discarded,
                _ => Outcome::Processed,
            };
            Some((source, row.try_get(1)?, row.try_get(2)?, outcome))
        }
    };
    let held = row.try_get::<Option<&str>, _>(4)?.map(|state| match state {
        "ready" => HeldState::Ready,
        "running" => HeldState::Running,
        _ => HeldState::Dead,
    });
    Ok(Found { processed, held })
}

pub(super) async fn has_table(conn: &mut SqliteConnection, table: &str) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?1)")
        .bind(table)
        .fetch_one(conn)
        .await
}
