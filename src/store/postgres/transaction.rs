use std::time::Duration;

use async_trait::async_trait;
use sqlx::postgres::{PgConnection, PgRow, Postgres};
use sqlx::{AssertSqlSafe, Connection as _, Row as _, SqlSafeStr as _, SqlStr};
use uuid::Uuid;

use super::classify::{classify, classify_claim};
use super::options::RESERVE;
use super::{PostgresStore, Sql};
use crate::event::{EventKey, PayloadHash};
use crate::store::claim::{Answers, in_request_order};
use crate::store::{
    ClaimAnswer, ClaimRequest, ClaimedAhead, Claims, CommitError, Connection, Found, GRACE, HeldState,
    Isolation, Limits, Next, Open, Outcome, Session, Store, StoreError, StoreErrorKind, Tx, answer,
};

/// How often a claim is tried again when what stood in its way was gone before it could be read.
const MOVED: usize = 5;

/// How long a probe may take.
const PROBE: Duration = Duration::from_secs(5);

/// How long ending a stuck session may take: a lane waits for it, and in an outage it cannot succeed.
const ABANDON: Duration = Duration::from_secs(2);

#[async_trait]
impl Store for PostgresStore {
    type Db = Postgres;

    fn name(&self) -> &'static str {
        "postgresql"
    }

    fn max_connections(&self) -> u32 {
        self.lanes.options().get_max_connections() + RESERVE
    }

    fn pool_id(&self) -> usize {
        std::sync::Arc::as_ptr(&self.sql) as usize
    }

    fn max_useful_lanes(&self) -> Option<usize> {
        None
    }

    async fn open(&self) -> Result<Connection<Postgres>, StoreError> {
        let mut conn = self
            .lanes
            .acquire()
            .await
            .map_err(|e| classify("taking a connection", e))?;
        // Not for others any more: when its lane is done with it, it is closed.
        conn.close_on_drop();
        let who = sqlx::query_as(self.sql.session.clone()).fetch_one(&mut *conn);
        let session = match answer(GRACE, who).await {
            Ok((number, began)) => Session { number, began },
            Err(e) => {
                // The pool would wait for the answer before it lends the connection again.
                drop(conn.detach());
                return Err(classify("opening a session", e));
            }
        };
        // Behind a pooler, the next statement may run in another session than this one.
        Ok(Connection {
            conn,
            session: (!self.pooler).then_some(session),
            limits: None,
            open: None,
        })
    }

    async fn begin<'c>(
        &self,
        conn: &'c mut Connection<Postgres>,
        limits: &Limits,
    ) -> Result<Tx<'c, Postgres>, StoreError> {
        let patience = limits.patience();
        if conn.limits.as_ref() == Some(limits) && conn.take_begun() {
            return Ok(Tx { conn, patience });
        }
        if conn.is_ahead() {
            // It holds the claim of an event that is not worked on now.
            self.rollback(conn).await?;
        }
        conn.must_be_clean()?;
        if !self.pooler && conn.limits.as_ref() != Some(limits) {
            let mut setup = limits_statement("SET", limits, conn.conn.server_version_num());
            if conn.limits.is_none() {
                setup.push_str("; ");
                setup.push_str(&self.sql.prepare);
            }
            answer(
                patience,
                sqlx::raw_sql(AssertSqlSafe(setup)).execute(&mut *conn.conn),
            )
            .await
            .map_err(|e| classify("preparing a session", e))?;
            conn.limits = Some(limits.clone());
        }
        let mut begin = SqlStr::from_static(begin_statement(limits));
        if self.pooler {
            // The next transaction may run in another session.
            let set = limits_statement("SET LOCAL", limits, conn.conn.server_version_num());
            begin = AssertSqlSafe(format!("{}; {set}", begin_statement(limits))).into_sql_str();
        }
        // From here on it may have begun, whether or not anybody waits for the answer.
        conn.open = Some(Open {
            ahead: None,
            _writer: None,
        });
        answer(patience, send_begin(conn, begin))
            .await
            .map_err(|e| classify("beginning", e))?;
        Ok(Tx { conn, patience })
    }

    async fn claim(
        &self,
        tx: &mut Tx<'_, Postgres>,
        requests: &[ClaimRequest<'_>],
        outcome: Outcome,
    ) -> Result<(Vec<ClaimAnswer>, Claims), StoreError> {
        self.claim_all(tx, requests, outcome, false).await
    }

    async fn claimed_ahead<'c>(
        &self,
        conn: &'c mut Connection<Postgres>,
        limits: &Limits,
        requests: &[ClaimRequest<'_>],
        outcome: Outcome,
    ) -> Result<Option<ClaimedAhead<'c, Postgres>>, StoreError> {
        let [request] = requests else { return Ok(None) };
        if outcome != Outcome::Processed || conn.limits.as_ref() != Some(limits) {
            return Ok(None);
        }
        let Some(inserted) = conn.take_claimed(request) else {
            return Ok(None);
        };
        let inserted = inserted.map_err(classify_claim)?;
        let patience = limits.patience();
        let mut tx = Tx { conn, patience };
        let (answers, claims) = match inserted {
            Some(xid) => {
                let claims = Claims {
                    keys: vec![request.key],
                    mark: Some(xid),
                    outcome,
                    held: false,
                };
                (vec![ClaimAnswer::New], claims)
            }
            None => self.claim_all(&mut tx, requests, outcome, true).await?,
        };
        Ok(Some((tx, answers, claims)))
    }

    async fn is_committed(&self, claims: &Claims) -> bool {
        let status = sqlx::query("SELECT pg_xact_status($1::text::xid8)").bind(claims.mark.clone());
        match self.row("asking what became of a transaction", status).await {
            Ok(row) => row.try_get::<Option<&str>, _>(0).ok().flatten() == Some("committed"),
            // Then this process cannot write a letter about it either.
            Err(_) => false,
        }
    }

    async fn commit(&self, tx: Tx<'_, Postgres>, claims: Claims, next: Next<'_>) -> Result<(), CommitError> {
        self.commit_behind_guard(tx, claims, next).await
    }

    async fn rollback(&self, conn: &mut Connection<Postgres>) -> Result<(), StoreError> {
        if conn.open.is_some() {
            // The number shows that the answer is ours: a COPY that a handler did not wait for leaves one
            // that sqlx does not know of.
            let number = i64::from(fastrand::i32(..));
            let rollback = AssertSqlSafe(format!("ROLLBACK; SELECT {number}::bigint"));
            let rows = answer(GRACE, sqlx::raw_sql(rollback).fetch_all(&mut *conn.conn))
                .await
                .map_err(|e| classify("rolling back", e))?;
            let answers: Vec<i64> = rows.iter().filter_map(|row| row.try_get(0).ok()).collect();
            if answers != [number] {
                return Err(StoreError::new(
                    StoreErrorKind::Unavailable,
                    "rolling back: the answer is another statement's",
                ));
            }
            conn.open = None;
        }
        Ok(())
    }

    async fn abandon(&self, conn: Connection<Postgres>) {
        if let Some(session) = conn.session
            && let Err(error) = self.terminate(session, ABANDON).await
        {
            tracing::debug!(session = session.number, %error, "could not end a stuck session; the server's own limits will");
        }
        drop(conn.conn.detach());
    }

    async fn probe(&self) -> Result<(), StoreError> {
        let probe = async {
            let mut conn = PgConnection::connect_with(&self.reserve.connect_options()).await?;
            // Assigns a transaction id and commits it: a standby refuses it, and so does a full disk.
            sqlx::raw_sql("BEGIN READ WRITE; SELECT pg_current_xact_id(); COMMIT")
                .execute(&mut conn)
                .await?;
            conn.close().await
        };
        match tokio::time::timeout(PROBE, probe).await {
            Ok(result) => result.map_err(|e| classify("probing the database", e)),
            Err(_) => Err(StoreError::new(
                StoreErrorKind::Unavailable,
                "probing the database: no answer within 5 s",
            )),
        }
    }

    async fn claim_once(
        &self,
        conn: &mut PgConnection,
        consumer: &str,
        name: &str,
        id: &str,
    ) -> Result<bool, sqlx::Error> {
        let done = sqlx::query(self.sql.claim_once.clone())
            .bind(EventKey::of_once(consumer, name, id).as_uuid())
            .bind(consumer)
            .bind(format!("business:{name}"))
            .bind(id)
            .execute(conn)
            .await?;
        Ok(done.rows_affected() == 1)
    }
}

impl PostgresStore {
    /// Claims. `tried`: the first insert was sent ahead, and inserted nothing.
    async fn claim_all(
        &self,
        tx: &mut Tx<'_, Postgres>,
        requests: &[ClaimRequest<'_>],
        outcome: Outcome,
        tried: bool,
    ) -> Result<(Vec<ClaimAnswer>, Claims), StoreError> {
        // Sorted, so that two transactions that claim the same events never wait for each other in a circle.
        let mut pending: Vec<_> = requests.iter().collect();
        pending.sort_by_key(|r| r.key);
        pending.dedup_by_key(|r| r.question());

        let mut answers = Answers::new();
        let mut claims = Claims {
            keys: Vec::with_capacity(pending.len()),
            mark: None,
            outcome,
            held: requests.iter().any(|request| request.own.is_some()),
        };
        for round in 0..MOVED {
            // First, what has no held row at all. What has one of another payload may run as well, and
            // its commit finishes that row.
            let any = round == 0;
            let new = if tried && round == 0 {
                New::default()
            } else {
                answer(tx.patience, insert(&self.sql, tx, &pending, outcome, any))
                    .await
                    .map_err(classify_claim)?
            };
            claims.keys.extend(new.questions.iter().map(|(key, _)| *key));
            claims.mark = new.mark.or(claims.mark);
            claims.held |= !any && !new.questions.is_empty();
            if claims.keys.len() == requests.len() {
                // Nearly every claim ends here.
                return Ok((vec![ClaimAnswer::New; requests.len()], claims));
            }
            answers.extend(
                new.questions
                    .into_iter()
                    .map(|question| (question, ClaimAnswer::New)),
            );
            pending.retain(|r| !answers.contains_key(&r.question()));
            if pending.is_empty() {
                break;
            }
            let there = answer(tx.patience, read(&self.sql, tx, &pending))
                .await
                .map_err(classify_claim)?;
            for (question, found) in there {
                let request = pending.iter().find(|r| r.question() == question);
                if let Some(answer) = request.and_then(|r| found.answer(r)) {
                    answers.insert(question, answer);
                }
            }
            pending.retain(|r| !answers.contains_key(&r.question()));
            if pending.is_empty() {
                break;
            }
        }
        if let Some(request) = pending.first() {
            return Err(StoreError::new(
                StoreErrorKind::Busy,
                format!(
                    "event {} kept moving between claim and inbox",
                    request.identity.id
                ),
            ));
        }
        Ok((in_request_order(requests, &answers, outcome), claims))
    }
}

async fn send_begin(conn: &mut Connection<Postgres>, begin: SqlStr) -> Result<(), sqlx::Error> {
    if conn.conn.is_in_transaction() {
        sqlx::raw_sql(begin).execute(&mut *conn.conn).await?;
    } else {
        std::mem::forget(conn.conn.begin_with(begin).await?);
    }
    Ok(())
}

pub(super) fn begin_statement(limits: &Limits) -> &'static str {
    match limits.isolation {
        Isolation::ReadCommitted => "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE",
        Isolation::RepeatableRead => "BEGIN ISOLATION LEVEL REPEATABLE READ READ WRITE",
        Isolation::Serializable => "BEGIN ISOLATION LEVEL SERIALIZABLE READ WRITE",
    }
}

/// All limits of a transaction, for one of them or for a session's life.
fn limits_statement(set: &str, limits: &Limits, server_version: Option<u32>) -> String {
    let ms = |limit: Duration| limit.as_millis().clamp(1, i32::MAX as u128);
    let mut statement = format!(
        "{set} lock_timeout = {}; {set} statement_timeout = {}; {set} idle_in_transaction_session_timeout = {}",
        ms(limits.lock_timeout),
        ms(limits.statement_timeout),
        ms(limits.idle_timeout),
    );
    if server_version.is_some_and(|version| version >= 170_000) {
        statement.push_str(&format!(
            "; {set} transaction_timeout = {}",
            ms(limits.transaction_timeout)
        ));
    }
    statement
}

/// What an insert has claimed.
#[derive(Default)]
struct New {
    questions: Vec<Question>,
    /// The transaction's number, if there is anything.
    mark: Option<String>,
}

async fn insert(
    sql: &Sql,
    tx: &mut Tx<'_, Postgres>,
    requests: &[&ClaimRequest<'_>],
    outcome: Outcome,
    any: bool,
) -> Result<New, sqlx::Error> {
    let Some(first) = requests.first() else {
        return Ok(New::default());
    };
    let all = || requests.iter().map(|r| r.question()).collect();
    if requests.len() == 1 {
        let xid = sqlx::query_scalar(sql.claim_one.clone())
            .bind(first.key.as_uuid())
            .bind(first.consumer)
            .bind(&first.identity.source)
            .bind(&first.identity.id)
            .bind(first.payload_hash.as_bytes())
            .bind(first.own.map(|lease| lease.id))
            .bind(first.own.map(|lease| lease.token))
            .bind(outcome.as_str())
            .bind(any)
            .fetch_optional(&mut **tx)
            .await?;
        return Ok(match xid {
            None => New::default(),
            mark => New {
                questions: all(),
                mark,
            },
        });
    }
    let (keys, hashes, own, tokens) = columns(requests);
    let sources: Vec<&str> = requests.iter().map(|r| r.identity.source.as_str()).collect();
    let ids: Vec<&str> = requests.iter().map(|r| r.identity.id.as_str()).collect();
    let rows = sqlx::query(sql.claim.clone())
        .bind(keys)
        .bind(first.consumer)
        .bind(sources)
        .bind(ids)
        .bind(hashes)
        .bind(own)
        .bind(tokens)
        .bind(outcome.as_str())
        .bind(any)
        .fetch_all(&mut **tx)
        .await?;
    let Some(row) = rows.first() else {
        return Ok(New::default());
    };
    let questions = match row.try_get::<Option<Uuid>, _>(0)? {
        None => all(),
        Some(_) => rows.iter().map(question).collect::<Result<_, _>>()?,
    };
    let mark = row.try_get(2)?;
    Ok(New { questions, mark })
}

async fn read(
    sql: &Sql,
    tx: &mut Tx<'_, Postgres>,
    requests: &[&ClaimRequest<'_>],
) -> Result<Vec<(Question, Found)>, sqlx::Error> {
    let (keys, hashes, own, tokens) = columns(requests);
    sqlx::query(sql.claim_read.clone())
        .bind(keys)
        .bind(hashes)
        .bind(own)
        .bind(tokens)
        .fetch_all(&mut **tx)
        .await?
        .into_iter()
        .map(|row| {
            let processed = match row.try_get::<Option<String>, _>(2)? {
                None => None,
                Some(source) => {
                    let outcome = match row.try_get::<&str, _>(5)? {
                        "discarded" => Outcome::Discarded,
                        _ => Outcome::Processed,
                    };
                    Some((source, row.try_get(3)?, row.try_get(4)?, outcome))
                }
            };
            let held = row.try_get::<Option<&str>, _>(6)?.map(|state| match state {
                "ready" => HeldState::Ready,
                "running" => HeldState::Running,
                _ => HeldState::Dead,
            });
            Ok((question(&row)?, Found { processed, held }))
        })
        .collect()
}

type Question = (EventKey, PayloadHash);

/// Which request a row is about; never its position.
fn question(row: &PgRow) -> Result<Question, sqlx::Error> {
    let hash = PayloadHash::from_stored(row.try_get(1)?)
        .ok_or_else(|| sqlx::Error::Decode("a payload hash has 16 bytes".into()))?;
    Ok((EventKey::from_uuid(row.try_get(0)?), hash))
}

/// Of nobody's own row there are no numbers and tokens either: `unnest` makes NULLs of what an array lacks.
type Columns<'a> = (Vec<Uuid>, Vec<&'a [u8]>, Vec<Option<i64>>, Vec<Option<Uuid>>);

fn columns<'a>(requests: &[&'a ClaimRequest<'_>]) -> Columns<'a> {
    let mut own = requests;
    if own.iter().all(|r| r.own.is_none()) {
        own = &[];
    }
    (
        requests.iter().map(|r| r.key.as_uuid()).collect(),
        requests.iter().map(|r| r.payload_hash.as_bytes()).collect(),
        own.iter().map(|r| r.own.map(|lease| lease.id)).collect(),
        own.iter().map(|r| r.own.map(|lease| lease.token)).collect(),
    )
}
