//! The handler's table, read directly, and what it is compared with.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use sqlx::postgres::{PgPool, PgPoolOptions};
use sqlx::{AssertSqlSafe, Row as _};

use onlyonce::store::Operations;
use onlyonce::store::postgres::PostgresOptions;

use super::events::Event;

pub(super) struct Ledger {
    pool: PgPool,
    schema: String,
}

/// The end of a run in numbers.
#[derive(Debug, Clone, Default)]
pub(super) struct Verdict {
    pub(super) sent: usize,
    pub(super) applied: usize,
    pub(super) lost: usize,
    pub(super) doubled: usize,
    /// Rows of events with a key that did not come right after the one before them.
    pub(super) out_of_order: usize,
    /// Rows that no event stands behind, or with another amount than it was sent with.
    pub(super) wrong: usize,
    pub(super) dead: usize,
    pub(super) held: usize,
    pub(super) queued: u64,
    /// Rows whose event had failed before.
    retried: usize,
    hung: bool,
    /// The first few that are not as they should be.
    examples: Vec<String>,
}

impl Ledger {
    pub(super) async fn create(url: &str, schema: &str) -> anyhow::Result<Self> {
        let store = PostgresOptions::new(url).schema(schema).connect()?;
        store.migrate().await?;
        let pool = PgPoolOptions::new()
            .max_connections(2)
            .acquire_timeout(Duration::from_secs(10))
            .connect(url)
            .await?;
        let table = format!(
            "CREATE TABLE {schema}.ledger (
                event_id text NOT NULL, amount bigint NOT NULL, attempt int NOT NULL,
                key text, place bigint, before bigint);
             CREATE INDEX ON {schema}.ledger (key, place) WHERE key IS NOT NULL"
        );
        sqlx::raw_sql(AssertSqlSafe(table)).execute(&pool).await?;
        Ok(Self {
            pool,
            schema: schema.to_owned(),
        })
    }

    pub(super) async fn applied(&self) -> Result<usize, sqlx::Error> {
        self.count("SELECT count(DISTINCT event_id) FROM {s}.ledger")
            .await
    }

    pub(super) async fn held(&self) -> Result<usize, sqlx::Error> {
        self.count("SELECT count(*) FROM {s}.inbox WHERE state IN ('ready', 'running')")
            .await
    }

    pub(super) async fn dead(&self) -> Result<usize, sqlx::Error> {
        self.count("SELECT count(*) FROM {s}.inbox WHERE state = 'dead'")
            .await
    }

    async fn count(&self, sql: &str) -> Result<usize, sqlx::Error> {
        let sql = AssertSqlSafe(sql.replace("{s}", &self.schema));
        let count: i64 = sqlx::query_scalar(sql).fetch_one(&self.pool).await?;
        Ok(count as usize)
    }

    pub(super) async fn compare(&self, sent: &[Event], queued: u64) -> Result<Verdict, sqlx::Error> {
        let sql = AssertSqlSafe(format!(
            "SELECT event_id, amount, attempt FROM {}.ledger",
            self.schema
        ));
        let mut verdict = Verdict {
            sent: sent.len(),
            queued,
            ..Default::default()
        };
        let mut applied: HashMap<String, Vec<i64>> = HashMap::new();
        for row in sqlx::query(sql).fetch_all(&self.pool).await? {
            applied.entry(row.try_get(0)?).or_default().push(row.try_get(1)?);
            verdict.retried += usize::from(row.try_get::<i32, _>(2)? > 1);
        }
        for event in sent {
            let rows = applied.remove(&event.id).unwrap_or_default();
            match rows.len() {
                0 => verdict.lost += 1,
                1 => verdict.applied += 1,
                _ => {
                    verdict.applied += 1;
                    verdict.doubled += 1;
                }
            }
            verdict.wrong += rows.iter().filter(|&&amount| amount != event.amount).count();
            if (rows.len() != 1 || rows[0] != event.amount) && verdict.examples.len() < 10 {
                verdict.examples.push(format!("{event:?}: {rows:?}"));
            }
        }
        verdict.wrong += applied.len();
        verdict.held = self.held().await?;
        verdict.out_of_order = self
            .count("SELECT count(*) FROM {s}.ledger WHERE before <> place - 1")
            .await?;
        verdict.dead = self.dead().await?;
        Ok(verdict)
    }

    /// What is in `inbox`, for a person who wonders why a run did not end.
    pub(super) async fn held_rows(&self) -> Result<String, sqlx::Error> {
        let sql = format!(
            "SELECT concat_ws(' ', event_id, state, reason, 'attempts', attempts, 'due', run_at - now(), \
                    'leased', leased_until - now(), failures)
               FROM {}.inbox ORDER BY id LIMIT 20",
            self.schema
        );
        let rows: Vec<String> = sqlx::query_scalar(AssertSqlSafe(sql))
            .fetch_all(&self.pool)
            .await?;
        Ok(rows.join("\n"))
    }

    pub(super) async fn drop_schema(&self) -> Result<(), sqlx::Error> {
        let sql = format!("DROP SCHEMA {} CASCADE", self.schema);
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&self.pool).await?;
        Ok(())
    }
}

impl Verdict {
    /// Even if everything is right by now, it was not in time.
    pub(super) fn of_a_hung_run(self) -> Self {
        Self { hung: true, ..self }
    }

    pub(super) fn is_good(&self) -> bool {
        let bad = [
            self.lost,
            self.doubled,
            self.out_of_order,
            self.wrong,
            self.dead,
            self.held,
            self.queued as usize,
        ];
        !self.hung && bad == [0; 7] && self.applied == self.sent
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "  ledger")?;
        writeln!(f, "  sent                             {:>5}", self.sent)?;
        writeln!(f, "  applied                          {:>5}", self.applied)?;
        writeln!(f, "  of them after failed attempts    {:>5}", self.retried)?;
        writeln!(f, "  wrong payload or unknown         {:>5}", self.wrong)?;
        self.examples
            .iter()
            .try_for_each(|example| writeln!(f, "  {example}"))
    }
}
