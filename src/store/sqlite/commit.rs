//! The end of a handler's transaction: what goes before COMMIT, and what an error there means.

use sqlx::sqlite::Sqlite;

use super::classify::{COMMIT_HOOK, READ_ONLY, classify, code, primary};
use super::{SqliteStore, sql};
use crate::event::EventKey;
use crate::store::{Claims, CommitError, StoreErrorKind, Tx};

impl SqliteStore {
    pub(super) async fn commit_behind_guard(
        &self,
        mut tx: Tx<'_, Sqlite>,
        claims: Claims,
    ) -> Result<(), CommitError> {
        guard(&mut tx, claims).await?;
        // A refused COMMIT leaves the transaction open, and with it the right to write.
        self.commit_lane(tx).await.map_err(|e| match primary(&e) {
            // Without WAL, COMMIT waits for readers.
            Some(5 | 6) => CommitError::Contention(classify("committing", e)),
            // Deferred foreign keys.
            Some(19) => CommitError::Refused(classify("committing", e)),
            _ => CommitError::Unknown(classify("committing", e).with_kind(StoreErrorKind::Unavailable)),
        })
    }

    /// Commits a lane's transaction, which its connection's hook would not let pass by itself.
    pub(super) async fn commit_lane(&self, tx: Tx<'_, Sqlite>) -> Result<(), sqlx::Error> {
        if let Some(sessions) = &self.sessions {
            sessions.let_commit(true);
        }
        let committed = sqlx::raw_sql("COMMIT").execute(&mut *tx.conn.conn).await;
        // Before the right to write goes to the next, whose permission this would take away.
        if let Some(sessions) = &self.sessions {
            sessions.let_commit(false);
        }
        committed?;
        tx.conn.open = None;
        Ok(())
    }
}

/// The last statements before commit: prove that this is still the claims' own transaction and alive,
/// and finish the held rows of its events.
async fn guard(tx: &mut Tx<'_, Sqlite>, claims: Claims) -> Result<(), CommitError> {
    let guarding = |e| CommitError::Store(classify("guarding", e));
    let keys = hex_keys(&claims.keys);
    let unmarked = match sqlx::query(sql::GUARD)
        .bind(&keys)
        .bind(&claims.mark)
        .execute(&mut **tx)
        .await
    {
        Ok(done) => done.rows_affected(),
        // It was a transaction of its own, which our hook did not let commit.
        Err(e) if code(&e) == Some(COMMIT_HOOK) => 0,
        // The claim could be written, so it is the handler that has forbidden writing since.
        Err(e) if code(&e) == Some(READ_ONLY) => {
            return Err(CommitError::Aborted(classify("guarding", e)));
        }
        Err(e) => return Err(guarding(e)),
    };
    // Also where SQLite itself rolled back (a full disk, RAISE(ROLLBACK)) and the handler swallowed
    // the error: what it wrote after that was outside any transaction, as after its own ROLLBACK.
    if unmarked == 0 || unmarked != claims.keys.len() as u64 {
        return Err(CommitError::Escaped(claims));
    }
    sqlx::query(sql::FINISH)
        .bind(&keys)
        .bind(claims.outcome.held_state())
        .execute(&mut **tx)
        .await
        .map_err(guarding)?;
    Ok(())
}

/// Keys as a JSON array of hexadecimal texts.
fn hex_keys(keys: &[EventKey]) -> String {
    let texts: Vec<String> = keys
        .iter()
        .map(|key| format!("\"{}\"", key.as_uuid().simple()))
        .collect();
    format!("[{}]", texts.join(","))
}
