//! The end of a handler's transaction: what goes before COMMIT, and what an error there means.

use futures_util::TryStreamExt as _;
use sqlx::postgres::{PgDatabaseError, Postgres};
use sqlx::{AssertSqlSafe, Connection as _, Either, Row as _};
use uuid::Uuid;

use super::classify::{classify, code};
use super::sql::{HELD, NOT_OURS, push_claim};
use super::transaction::begin_statement;
use super::{PostgresStore, Sql};
use crate::event::EventKey;
use crate::store::{
    Ahead, ClaimRequest, Claims, CommitError, Inserted, Limits, Next, Open, Store as _, StoreError,
    StoreErrorKind, Tx, answer,
};

/// Which of the two statements that end a transaction together has failed.
enum Stopped {
    Guarding(sqlx::Error),
    /// Or nobody knows which.
    Committing(sqlx::Error),
    /// The answer was not ours.
    OutOfStep,
}

impl PostgresStore {
    pub(super) async fn commit_behind_guard(
        &self,
        mut tx: Tx<'_, Postgres>,
        claims: Claims,
        next: Next<'_>,
    ) -> Result<(), CommitError> {
        if let Err(e) = hear_out(&mut tx).await {
            return Err(CommitError::Store(classify("guarding", e)));
        }
        if claims.held
            && let Err(e) = answer(tx.patience, finish(&self.sql, &mut tx, &claims)).await
        {
            return Err(self.refused(claims, "guarding", e).await);
        }
        let e = match self.guard_and_commit(&mut tx, &claims, next).await {
            Ok(()) => return Ok(()),
            Err(Stopped::Guarding(e)) => return Err(self.refused(claims, "guarding", e).await),
            Err(Stopped::OutOfStep) => return Err(CommitError::OutOfStep),
            Err(Stopped::Committing(e)) => e,
        };
        if e.as_database_error().is_some() {
            // The server has rolled back what it refuses to commit.
            tx.conn.open = None;
        }
        Err(match code(&e).as_deref() {
            Some("40001" | "40P01") => CommitError::Contention(classify("committing", e)),
            // Deferred constraints (23), and what deferred triggers raise of their own (22, P0).
            Some(code) if ["22", "23", "P0"].iter().any(|class| code.starts_with(class)) => {
                CommitError::Refused(classify("committing", e))
            }
            _ => CommitError::Unknown(classify("committing", e).with_kind(StoreErrorKind::Unavailable)),
        })
    }

    /// The guard and COMMIT in one message: where the guard raises an error, the server does not come to
    /// COMMIT. A lane that has more to do begins its next transaction by the same message, and claims its
    /// next event in it. sqlx would take a round trip for each.
    ///
    /// The server sends the answers together, so a commit is heard of when the claim behind it has got
    /// what it waited for, `lock_timeout` later at most. A link that is lost meanwhile makes it an unknown
    /// commit, like one that is lost at any other moment.
    async fn guard_and_commit(
        &self,
        tx: &mut Tx<'_, Postgres>,
        claims: &Claims,
        next: Next<'_>,
    ) -> Result<(), Stopped> {
        let mut message = self.sql.guard(claims, self.pooler);
        let next = push_commit(&mut message, tx.conn.limits.as_ref(), next);
        let (statements, patience) = match next {
            Next::Rest => (COMMITTED, tx.patience),
            Next::Begin => (COMMITTED + 1, tx.patience),
            Next::Claim(_) => (COMMITTED + 1, tx.patience * 2),
        };
        let mut heard = Heard::default();
        let result = answer(patience, heard.all(tx, message)).await;
        let ahead = match (result, heard.done, next) {
            (Ok(()), done, _) if (heard.rows, done) != (1, statements) => return Err(Stopped::OutOfStep),
            (Ok(()), _, Next::Rest) => None,
            (Ok(()), _, Next::Begin) => Some(Ahead::Begun),
            (Ok(()), _, Next::Claim(request)) => Some(claimed(&request, Ok(heard.claimed))),
            (Err(e), 0, _) if e.as_database_error().is_some() => return Err(Stopped::Guarding(e)),
            (Err(e), 0 | 1, _) => return Err(Stopped::Committing(e)),
            // Committed. What has failed is the claim; whoever asks for it is told.
            (Err(e), COMMITTED, Next::Claim(request))
                if e.as_database_error().is_some() && !is_read_only(&e) =>
            {
                Some(claimed(&request, Err(e)))
            }
            // Committed. The connection still counts as inside a transaction, and is given up for that. The
            // next one begins anew, which is all it needs if this handler had made its own read-only.
            (Err(_), _, _) => return Ok(()),
        };
        tx.conn.open = ahead.map(|ahead| Open {
            ahead: Some(ahead),
            _writer: None,
        });
        Ok(())
    }

    /// What an error before COMMIT says about the transaction.
    pub(super) async fn refused(&self, claims: Claims, doing: &str, e: sqlx::Error) -> CommitError {
        if says(&e, NOT_OURS) {
            return CommitError::Escaped(claims);
        }
        // An answer that fits no statement with values is the late one to a COPY of the handler's.
        if matches!(e, sqlx::Error::Protocol(_)) {
            return CommitError::OutOfStep;
        }
        if says(&e, HELD) {
            // It came after the claim; run again, the event is found held.
            let held = StoreError::new(StoreErrorKind::Contention, "a copy of the event is held");
            return CommitError::Contention(held);
        }
        let aborted = match code(&e).as_deref() {
            Some("25P02") => true,
            // Not even our session: the guard was never prepared in it.
            Some("26000") => false,
            // No data of a message is in what we send; it is the late answer to a COPY of the handler's.
            Some(code) if code.starts_with("22") || code.starts_with("23") || is_of_copy(&e) => {
                return CommitError::OutOfStep;
            }
            // A session is read-only outside our transactions, so this is another one, or none. (Ours can be
            // made read-only, too; nobody can tell any more.)
            Some("25006") => false,
            _ => return CommitError::Store(classify(doing, e)),
        };
        // What is aborted may be another transaction, begun after the handler's own COMMIT.
        if !aborted || self.is_committed(&claims).await {
            CommitError::Escaped(claims)
        } else {
            CommitError::Aborted(classify(doing, e))
        }
    }
}

/// What was heard in answer to the message that ends a transaction.
#[derive(Default)]
struct Heard {
    /// How many of its statements are done.
    done: usize,
    /// The rows of all statements but the claim.
    rows: usize,
    /// The number of the next transaction, if it has claimed.
    claimed: Option<String>,
}

/// So many statements are done when it is committed: the guard, COMMIT.
const COMMITTED: usize = 2;

impl Heard {
    async fn all(&mut self, tx: &mut Tx<'_, Postgres>, message: String) -> Result<(), sqlx::Error> {
        let mut answers = sqlx::raw_sql(AssertSqlSafe(message)).fetch_many(&mut **tx);
        while let Some(answer) = answers.try_next().await? {
            match answer {
                Either::Left(_) => self.done += 1,
                Either::Right(row) if self.done == COMMITTED => self.claimed = Some(row.try_get(0)?),
                Either::Right(_) => self.rows += 1,
            }
        }
        Ok(())
    }
}

/// Adds COMMIT and what is done for the next transaction.
///
/// One that claims at once is chained, and so is what the last one was by its BEGIN. A BEGIN that names it
/// sets it, and the server then goes through all its settings at the end of the transaction: not long, but
/// they push out of the processor's cache what the next event needs.
fn push_commit<'a>(message: &mut String, limits: Option<&Limits>, next: Next<'a>) -> Next<'a> {
    match (next, limits) {
        (Next::Begin, Some(limits)) => {
            message.extend(["; COMMIT; ", begin_statement(limits)]);
            Next::Begin
        }
        (Next::Claim(request), Some(_)) => {
            message.push_str("; COMMIT AND CHAIN");
            push_claim(message, &request);
            Next::Claim(request)
        }
        // Behind a pooler no limits are the session's, and the next transaction may run in another one.
        (_, None) | (Next::Rest, _) => {
            message.push_str("; COMMIT");
            Next::Rest
        }
    }
}

/// A handler may have made its transaction read-only, and what is chained to it is as well.
fn is_read_only(error: &sqlx::Error) -> bool {
    code(error).as_deref() == Some("25006")
}

fn claimed(request: &ClaimRequest<'_>, inserted: Inserted) -> Ahead {
    Ahead::Claimed {
        question: request.question(),
        inserted,
    }
}

/// Takes the answers that the handler did not wait for, so that their errors are not taken for the
/// guard's. It costs nothing where there are none. (A hidden method of sqlx, and the only one that
/// does not ask the server anything.)
pub(super) async fn hear_out(tx: &mut Tx<'_, Postgres>) -> Result<(), sqlx::Error> {
    let patience = tx.patience;
    let heard = async {
        loop {
            match tx.flush().await {
                Err(e) if e.as_database_error().is_some() => {}
                heard => return heard,
            }
        }
    };
    answer(patience, heard).await
}

/// Whether this is the guard's own error with this word in it.
pub(super) fn says(error: &sqlx::Error, word: &str) -> bool {
    error
        .as_database_error()
        .is_some_and(|e| e.message().contains(word))
}

/// sqlx does not count the answers of a COPY, and a dropped one is cancelled in what comes next.
pub(super) fn is_of_copy(error: &sqlx::Error) -> bool {
    error
        .as_database_error()
        .and_then(|e| e.try_downcast_ref::<PgDatabaseError>())
        .is_some_and(|e| {
            // Its own, or that of a value in a line of it.
            e.file().is_some_and(|file| file.starts_with("copy"))
                || e.r#where().is_some_and(|place| place.starts_with("COPY "))
        })
}

/// Finishes the held rows of the claimed events; in a transaction that is not the claims' it finds none.
async fn finish(sql: &Sql, tx: &mut Tx<'_, Postgres>, claims: &Claims) -> Result<(), sqlx::Error> {
    let keys: Vec<Uuid> = claims.keys.iter().map(EventKey::as_uuid).collect();
    sqlx::query(sql.finish.clone())
        .bind(keys)
        .bind(&claims.mark)
        .bind(claims.outcome.held_state())
        .execute(&mut **tx)
        .await?;
    Ok(())
}
