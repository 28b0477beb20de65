//! A whole relay to copy: publishes to SQS what was written to the outbox in PostgreSQL, at least once each.
//!
//! ```sh
//! export DATABASE_URL=postgres://app:secret@localhost/app
//! export AWS_REGION=us-east-1 AWS_ACCESS_KEY_ID=test AWS_SECRET_ACCESS_KEY=test AWS_ENDPOINT_URL=http://localhost:9324
//! cargo run -p onlyonce-sqs --example relay -- migrate # creates the tables
//! cargo run -p onlyonce-sqs --example relay
//! curl localhost:8081/ready
//! ```
//!
//! It publishes the events whose destination is `sqs:queue`; run as many as you like. SIGTERM and
//! ctrl-c stop in good order with exit code 0; any other end is 1. Optional: `RELAY` (its name, `default`),
//! `IN_FLIGHT` (events on their way at once, 1000), `HEALTH_ADDR` (`127.0.0.1:8081`), `AWS_SESSION_TOKEN`,
//! `AWS_ENDPOINT_URL` (an emulator; without it AWS itself, with the feature `tls`), `RUST_LOG`.

use std::process::ExitCode;

use anyhow::{Context as _, anyhow, bail};
use axum::{extract::State, http::StatusCode, routing::get};
use onlyonce::consumer::Check;
use onlyonce::store::Operations;
use onlyonce::store::postgres::PostgresOptions;
use onlyonce::{Health, Relay, Supervisor};
use onlyonce_sqs::{Connection as Aws, SqsPublisher};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

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
            "{other:?} is not known (`migrate` creates the tables; nothing publishes)"
        )),
    };
    if let Err(error) = &done {
        tracing::error!("{error}");
    }
    ExitCode::from(u8::from(done.is_err()))
}

async fn run() -> anyhow::Result<()> {
    let in_flight = variable("IN_FLIGHT").unwrap_or_else(|| "1000".to_owned());
    let in_flight = in_flight
        .parse()
        .with_context(|| format!("IN_FLIGHT is {in_flight:?} (a number from 1 to 100000)"))?;
    let store = PostgresOptions::new(required(
        "DATABASE_URL",
        "postgres://user:password@host/database",
    )?)
    .max_connections(3) // one listens; the statements are on the reserve of two
    .connect()?;
    // With roles, profiles or a metadata service: a client made by aws-config.
    let mut aws = Aws::new(
        required("AWS_REGION", "such as eu-central-1")?,
        required("AWS_ACCESS_KEY_ID", "the key to call SQS with")?,
        required("AWS_SECRET_ACCESS_KEY", "its secret")?,
    );
    if let Some(token) = variable("AWS_SESSION_TOKEN") {
        aws = aws.session_token(token);
    }
    if let Some(url) = variable("AWS_ENDPOINT_URL") {
        aws = aws.endpoint(url);
    }
    let publisher = SqsPublisher::to(aws.client()?);
    let relay = Relay::builder(store)
        .name(variable("RELAY").unwrap_or_else(|| "default".to_owned()))
        .publisher("sqs", publisher.build()?)
        .in_flight(in_flight)
        .build()?;
    let supervisor = Supervisor::builder().relay(relay).build()?;

    serve_health(supervisor.health()).await?;
    let mut terminated = signal(SignalKind::terminate())?;
    let stop = async move {
        tokio::select! {
            _ = terminated.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
        tracing::info!("stopping: what is on its way is confirmed, the rest is left to others");
    };
    supervisor.run_until(stop).await?;
    tracing::info!("stopped");
    Ok(())
}

/// The framework's tables. A step of a deployment, not of every start.
async fn migrate() -> anyhow::Result<()> {
    let url = required("DATABASE_URL", "postgres://user:password@host/database")?;
    PostgresOptions::new(url).connect()?.migrate().await?;
    tracing::info!("the tables are there");
    Ok(())
}

/// `/live`: a restart would not help. `/ready`: events go out. Else 503 with the reasons.
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
    let address = variable("HEALTH_ADDR").unwrap_or_else(|| "127.0.0.1:8081".to_owned());
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
