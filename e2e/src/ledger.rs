//! The handlers' tables, read directly, and what they are compared with.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use onlyonce::store::Operations as _;
use onlyonce::store::postgres::PostgresOptions;
use sqlx::AssertSqlSafe;
use sqlx::postgres::{PgPool, PgPoolOptions};

use crate::payment::Payment;

pub(crate) struct Ledger {
    pool: PgPool,
    schema: String,
}

/// The end of a run in numbers.
#[derive(Debug, Default)]
pub(crate) struct Verdict {
    payments: usize,
    captured: Found,
    booked: Found,
    /// Booked from an event of an attempt that failed.
    of_failed_attempts: usize,
    dead: i64,
    outbox: i64,
    /// The first few that are not as they should be.
    examples: Vec<String>,
}

/// What is in one table.
#[derive(Debug, Default)]
struct Found {
    once: usize,
    lost: usize,
    doubled: usize,
    /// Rows of no payment, or of another amount.
    wrong: usize,
}

impl Ledger {
    pub(crate) async fn create(url: &str, schema: &str) -> anyhow::Result<Self> {
        let store = PostgresOptions::new(url).schema(schema).connect()?;
        store.migrate().await?;
        let pool = PgPoolOptions::new()
            .max_connections(2)
            .acquire_timeout(Duration::from_secs(10))
            .connect(url)
            .await?;
        let tables = format!(
            "CREATE TABLE {schema}.captured (payment text NOT NULL, cents bigint NOT NULL);
             CREATE TABLE {schema}.booked (payment text NOT NULL, cents bigint NOT NULL, attempt int NOT NULL)"
        );
        sqlx::raw_sql(AssertSqlSafe(tables)).execute(&pool).await?;
        Ok(Self {
            pool,
            schema: schema.to_owned(),
        })
    }

    /// Whether nothing is left to do for so many payments. What is dead by then is a fault, but nothing to wait for.
    pub(crate) async fn is_done(&self, payments: usize) -> anyhow::Result<bool> {
        let left = "SELECT (SELECT count(*) FROM {s}.outbox) + (SELECT count(*) FROM {s}.inbox WHERE state <> 'dead')
                         + GREATEST($1 - (SELECT count(DISTINCT payment) FROM {s}.booked)
                                       - (SELECT count(*) FROM {s}.inbox WHERE state = 'dead'), 0)";
        let left: i64 = sqlx::query_scalar(self.sql(left))
            .bind(payments as i64)
            .fetch_one(&self.pool)
            .await?;
        Ok(left == 0)
    }

    pub(crate) async fn compare(&self, payments: &[Payment]) -> anyhow::Result<Verdict> {
        let mut verdict = Verdict {
            payments: payments.len(),
            ..Verdict::default()
        };
        let captured: Vec<(String, i64, i32)> =
            sqlx::query_as(self.sql("SELECT payment, cents, 0 FROM {s}.captured"))
                .fetch_all(&self.pool)
                .await?;
        let booked: Vec<(String, i64, i32)> =
            sqlx::query_as(self.sql("SELECT payment, cents, attempt FROM {s}.booked"))
                .fetch_all(&self.pool)
                .await?;
        let fails: HashMap<&str, bool> = payments.iter().map(|p| (p.id.as_str(), p.fails)).collect();
        for (payment, _, attempt) in &booked {
            if *attempt == 1 && fails.get(payment.as_str()) == Some(&true) {
                verdict.of_failed_attempts += 1;
                verdict
                    .examples
                    .push(format!("{payment} is booked by attempt 1, which failed"));
            }
        }
        verdict.captured = verdict.found("captured", payments, captured);
        verdict.booked = verdict.found("booked", payments, booked);
        verdict.dead = self.number("SELECT count(*) FROM {s}.inbox").await?;
        verdict.outbox = self.number("SELECT count(*) FROM {s}.outbox").await?;
        Ok(verdict)
    }

    pub(crate) async fn drop_schema(&self) -> anyhow::Result<()> {
        sqlx::raw_sql(self.sql("DROP SCHEMA {s} CASCADE"))
            .execute(&self.pool)
            .await?;
        Ok(())
    }

    async fn number(&self, sql: &str) -> sqlx::Result<i64> {
        sqlx::query_scalar(self.sql(sql)).fetch_one(&self.pool).await
    }

    fn sql(&self, text: &str) -> AssertSqlSafe<String> {
        AssertSqlSafe(text.replace("{s}", &self.schema))
    }
}

impl Verdict {
    fn found(&mut self, table: &str, payments: &[Payment], rows: Vec<(String, i64, i32)>) -> Found {
        let mut found = Found::default();
        let mut amounts: HashMap<String, Vec<i64>> = HashMap::new();
        for (payment, cents, _) in rows {
            amounts.entry(payment).or_default().push(cents);
        }
        for payment in payments {
            let there = amounts.remove(&payment.id).unwrap_or_default();
            match there.as_slice() {
                [] => found.lost += 1,
                [cents] if *cents == payment.cents => {
                    found.once += 1;
                    continue;
                }
                [_] => found.wrong += 1,
                _ => found.doubled += 1,
            }
            self.examples.push(format!("{table}: {payment:?}: {there:?}"));
        }
        found.wrong += amounts.len();
        self.examples
            .extend(amounts.keys().map(|id| format!("{table}: {id} is no payment")));
        found
    }

    pub(crate) fn is_good(&self) -> bool {
        self.captured.once == self.payments
            && self.booked.once == self.payments
            && self.captured.wrong + self.booked.wrong + self.of_failed_attempts == 0
            && self.dead + self.outbox == 0
    }
}

/// With `#` the summary in one line, else the examples.
impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !f.alternate() {
            return self
                .examples
                .iter()
                .take(10)
                .try_for_each(|example| writeln!(f, "  {example}"));
        }
        let (captured, booked) = (&self.captured, &self.booked);
        write!(
            f,
            "payments {}, captured {}, booked {}, lost {}, doubled {}, wrong {}, of failed attempts {}, inbox {}, outbox {}",
            self.payments,
            captured.once,
            booked.once,
            captured.lost + booked.lost,
            captured.doubled + booked.doubled,
            captured.wrong + booked.wrong,
            self.of_failed_attempts,
            self.dead,
            self.outbox
        )
    }
}
