//! Statements beside the work, on the reserve: leases, letters from `inbox`, purge, checks.

use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgArguments, PgQueryResult, PgRow, Postgres};
use sqlx::query::Query;

use super::PostgresStore;
use super::classify::classify;
use crate::store::{GRACE, Session, StoreError, answer};

/// How long a statement beside the work may run on the server.
pub(super) const STATEMENT_TIMEOUT: Duration = Duration::from_secs(30);

const PATIENCE: Duration = STATEMENT_TIMEOUT.saturating_add(GRACE);

/// One statement with its arguments.
pub(super) type Statement = Query<'static, Postgres, PgArguments>;

impl PostgresStore {
    pub(super) async fn execute(
        &self,
        doing: &str,
        statement: Statement,
    ) -> Result<PgQueryResult, StoreError> {
        let mut conn = self.reserved(doing).await?;
        let result = answer(PATIENCE, statement.execute(&mut *conn)).await;
        given_back(conn, doing, result)
    }

    pub(super) async fn rows(&self, doing: &str, statement: Statement) -> Result<Vec<PgRow>, StoreError> {
        let mut conn = self.reserved(doing).await?;
        let result = answer(PATIENCE, statement.fetch_all(&mut *conn)).await;
        given_back(conn, doing, result)
    }

    pub(super) async fn row(&self, doing: &str, statement: Statement) -> Result<PgRow, StoreError> {
        let mut conn = self.reserved(doing).await?;
        let result = answer(PATIENCE, statement.fetch_one(&mut *conn)).await;
        given_back(conn, doing, result)
    }

    /// Ends a session whose client gave up on it. Does not insist: the server's own limits are behind it.
    pub(super) async fn terminate(&self, session: Session, patience: Duration) -> Result<(), StoreError> {
        let doing = "ending a stuck session";
        let mut conn = answer(patience, self.reserve.acquire())
            .await
            .map_err(|e| classify(doing, e))?;
        let end = sqlx::query(self.sql.end_session.clone())
            .bind(session.number)
            .bind(session.began);
        let result = answer(patience, end.execute(&mut *conn)).await;
        given_back(conn, doing, result).map(|_| ())
    }

    async fn reserved(&self, doing: &str) -> Result<PoolConnection<Postgres>, StoreError> {
        self.reserve.acquire().await.map_err(|e| classify(doing, e))
    }
}

/// A connection goes back to its pool if the server has answered. Otherwise it is closed: the pool
/// would wait for that answer before it lends the connection again, and for a dead link for ever.
fn given_back<T>(
    conn: PoolConnection<Postgres>,
    doing: &str,
    result: Result<T, sqlx::Error>,
) -> Result<T, StoreError> {
    result.map_err(|e| {
        if e.as_database_error().is_none() {
            drop(conn.detach());
        }
        classify(doing, e)
    })
}
