//! The worker's side: a consumer as a user would write it, with short times.

use std::time::Duration;

use onlyonce::store::postgres::PostgresOptions;
use onlyonce::testing::crash_from_env;
use onlyonce::{Consumer, Context, Event, Handler, HandlerError, Json, RetryPolicy, async_trait};
use sqlx::{AssertSqlSafe, Postgres};
use tokio::signal::unix::{SignalKind, signal};

use super::broker::{Broker, Seat};
use super::events::{self, How};
use super::variable;
use crate::processes::{end_with_the_runner, logs_to_stderr};

/// What a dead process had leased is free again after this.
const LEASE: Duration = Duration::from_secs(2);
const LANES: usize = 4;

struct Ledger {
    insert: String,
    last: String,
}

#[async_trait]
impl Handler<Postgres> for Ledger {
    type Payload = Json<events::Event>;

    async fn handle(
        &self,
        cx: &mut Context<'_, Postgres>,
        event: Event<Json<events::Event>>,
    ) -> Result<(), HandlerError> {
        let attempt = cx.attempt();
        let Json(payload) = event.payload;
        // The last of its key that has taken effect: it should be the one before this.
        let before: Option<i64> = match &payload.key {
            None => None,
            Some(key) => Some(
                sqlx::query_scalar(AssertSqlSafe(self.last.as_str()))
                    .bind(key)
                    .fetch_one(cx.tx())
                    .await?,
            ),
        };
        sqlx::query(AssertSqlSafe(self.insert.as_str()))
            .bind(&event.identity.id)
            .bind(payload.amount)
            .bind(attempt as i32)
            .bind(payload.key)
            .bind(payload.place)
            .bind(before)
            .execute(cx.tx())
            .await?;
        // Time for something to happen in the middle of it.
        tokio::time::sleep(Duration::from_millis(fastrand::u64(0..30))).await;
        if attempt > payload.fails {
            return Ok(());
        }
        match payload.how {
            How::Error => Err("fails on purpose".into()),
            How::Panic => panic!("panics on purpose"),
            How::Swallow => {
                let _ = sqlx::query("SELECT 1 / 0").execute(cx.tx()).await;
                Ok(())
            }
        }
    }
}

/// Runs until SIGTERM, or until it is killed, or until a crash point named by `ONLYONCE_CRASH`.
pub(super) async fn run<B: Broker>(mut broker: B) -> anyhow::Result<()> {
    logs_to_stderr();
    for argument in std::env::args().skip(2) {
        anyhow::ensure!(broker.option(&argument), "{argument} is not known to the worker");
    }
    let seat = Seat {
        name: variable("CHAOS_NAME")?,
        url: variable("CHAOS_BROKER_URL")?,
        member: variable("CHAOS_MEMBER").ok(),
    };
    let name = &seat.name;
    let store = PostgresOptions::new(variable("CHAOS_POSTGRES_URL")?)
        .schema(name)
        .max_connections(LANES as u32 + 2 + 2)
        .acquire_timeout(Duration::from_secs(2))
        .connect()?;
    let consumer = Consumer::builder("chaos", store)
        .source(broker.source(&seat)?)
        .handler(Ledger {
            insert: format!("INSERT INTO {name}.ledger VALUES ($1, $2, $3, $4, $5, $6)"),
            last: format!("SELECT coalesce(max(place), 0) FROM {name}.ledger WHERE key = $1"),
        })
        .lanes(LANES)
        .held_lanes(2)
        .lease(LEASE)
        .handler_timeout(Duration::from_secs(2))
        .statement_timeout(Duration::from_secs(2)) // and, with it, how long a silent server is waited for
        .retry(
            RetryPolicy::new()
                .immediate(events::immediate(broker.keys()))
                .delays([100, 200, 400, 800, 1600, 3200].map(Duration::from_millis)),
        )
        .crash_when(crash_from_env())
        .build()?;
    end_with_the_runner();
    let mut terminated = signal(SignalKind::terminate())?;
    consumer
        .run_until(async move {
            terminated.recv().await;
        })
        .await?;
    Ok(())
}
