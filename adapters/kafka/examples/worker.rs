//! A whole worker to copy: payments from a Kafka topic into a ledger in PostgreSQL, each once.
//!
//! ```sh
//! export DATABASE_URL=postgres://app:secret@localhost/app KAFKA_BROKERS=localhost:9092 TOPIC=payments
//! cargo run -p onlyonce-kafka --example worker -- migrate # creates the tables
//! cargo run -p onlyonce-kafka --example worker
//! curl localhost:8080/ready
//! ```
//!
//! A message is `{"account": "alice", "cents": 500}` with the headers `ce_id`, `ce_source` and `ce_specversion`,
//! and the account as its key. SIGTERM and ctrl-c stop in good order with exit code 0; any other end is 1.
//! Optional: `LANES` (payments at once, 8), `RETRY` (`{"immediate": 3, "delays_ms": [10000, 60000]}`),
//! `HEALTH_ADDR` (`127.0.0.1:8080`), `KAFKA_SETTINGS` (librdkafka's, such as
//! `session.timeout.ms=6000,security.protocol=SASL_SSL`), `RUST_LOG`.

use std::process::ExitCode;

use anyhow::{Context as _, anyhow, bail};
use axum::{extract::State, http::StatusCode, routing::get};
use onlyonce::consumer::Check;
use onlyonce::store::Operations;
use onlyonce::store::postgres::PostgresOptions;
use onlyonce::{Consumer, Context, Event, Handler, HandlerError, Health, Json, Supervisor, async_trait};
use onlyonce_kafka::{Kafka, StartAt};
use sqlx::{Connection as _, PgConnection, Postgres};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

#[derive(serde::Deserialize)]
struct Payment {
    account: String,
    cents: i64,
}

struct Ledger;

#[async_trait]
impl Handler<Postgres> for Ledger {
    type Payload = Json<Payment>;

    async fn handle(
        &self,
        cx: &mut Context<'_, Postgres>,
        event: Event<Json<Payment>>,
    ) -> Result<(), HandlerError> {
        let Json(payment) = event.payload;
        sqlx::query("INSERT INTO ledger (event_id, account, cents) VALUES ($1, $2, $3)")
            .bind(event.identity.id)
            .bind(payment.account)
            .bind(payment.cents)
            .execute(cx.tx()) // the transaction that also holds the claim: both commit, or neither
            .await?;
        Ok(())
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let log = EnvFilter::new(variable("RUST_LOG").unwrap_or_else(|| "info".to_owned()));
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(log)
        .init();
    let done = match std::env::args().nth(1).as_deref() {
        None => run().await,
        Some("migrate") => migrate().await,
        Some(other) => Err(anyhow!(
            "{other:?} is not known (`migrate` creates the tables; nothing works)"
        )),
    };
    if let Err(error) = &done {
        tracing::error!("{error}");
    }
    ExitCode::from(u8::from(done.is_err()))
}

async fn run() -> anyhow::Result<()> {
    let lanes = variable("LANES").unwrap_or_else(|| "8".to_owned());
    let lanes: u32 = lanes
        .parse()
        .with_context(|| format!("LANES is {lanes:?} (a number from 1 to 1000)"))?;
    let held_lanes = (lanes / 4).max(1); // for retries of failed payments
    let retry = variable("RETRY").unwrap_or_else(|| "{}".to_owned());
    let retry = serde_json::from_str(&retry).map_err(|e| anyhow!("RETRY is {retry}: {e}"))?;

    let store = PostgresOptions::new(required(
        "DATABASE_URL",
        "postgres://user:password@host/database",
    )?)
    .max_connections(lanes.saturating_add(held_lanes + 2))
    .connect()?;
    let mut source = Kafka::group(
        required("KAFKA_BROKERS", "host:9092, several with commas")?,
        "ledger",
    )
    .topic(required("TOPIC", "the name of a topic that exists")?)
    .start_at(StartAt::Earliest);
    for setting in variable("KAFKA_SETTINGS").iter().flat_map(|all| all.split(',')) {
        let (name, value) = setting
            .split_once('=')
            .context("KAFKA_SETTINGS is name=value, several with commas")?;
        source = source.set(name.trim(), value.trim());
    }
    let consumer = Consumer::builder("ledger", store)
        .source(source.build()?)
        .handler(Ledger)
        .retry(retry)
        .lanes(lanes as usize)
        .held_lanes(held_lanes as usize)
        .build()?;
    let supervisor = Supervisor::builder().consumer(consumer).build()?;

    serve_health(supervisor.health()).await?;
    let mut terminated = signal(SignalKind::terminate())?;
    let stop = async move {
        tokio::select! {
            _ = terminated.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
        tracing::info!("stopping: what runs is finished, the rest is given back");
    };
    supervisor.run_until(stop).await?;
    tracing::info!("stopped");
    Ok(())
}

/// The framework's tables and our own. A step of a deployment, not of every start.
async fn migrate() -> anyhow::Result<()> {
    let url = required("DATABASE_URL", "postgres://user:password@host/database")?;
    PostgresOptions::new(&url).connect()?.migrate().await?;
    let ledger = "CREATE TABLE IF NOT EXISTS ledger (event_id text NOT NULL, account text NOT NULL, cents bigint NOT NULL)";
    sqlx::raw_sql(ledger)
        .execute(&mut PgConnection::connect(&url).await?)
        .await?;
    tracing::info!("the tables are there");
    Ok(())
}

/// `/live`: a restart would not help. `/ready`: events are being taken. Else 503 with the reasons.
async fn serve_health(health: Health) -> anyhow::Result<()> {
    async fn answer(check: Check) -> (StatusCode, String) {
        let status = if check.ok {
            StatusCode::OK
        } else {
            StatusCode::SERVICE_UNAVAILABLE
        };
        (status, format!("{check}\n"))
    }
    let routes = axum::Router::new()
        .route("/live", get(|State(health): State<Health>| answer(health.live())))
        .route(
            "/ready",
            get(|State(health): State<Health>| answer(health.ready())),
        )
        .with_state(health);
    let address = variable("HEALTH_ADDR").unwrap_or_else(|| "127.0.0.1:8080".to_owned());
    match tokio::net::TcpListener::bind(&address).await {
        Ok(listener) => drop(tokio::spawn(async { axum::serve(listener, routes).await })),
        Err(error) => bail!("HEALTH_ADDR is {address:?}: {error} (where /live and /ready are to answer)"),
    }
    tracing::info!(address, "health");
    Ok(())
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn required(name: &str, what: &str) -> anyhow::Result<String> {
    variable(name).with_context(|| format!("{name} is not set ({what})"))
}
