//! A relay's side: one as a user would run it, with short times.

use std::time::Duration;

use onlyonce::Relay;
use onlyonce::store::postgres::PostgresOptions;
use tokio::signal::unix::{SignalKind, signal};

use super::broker::Broker;
use super::rough::Rough;
use super::route::Route;
use super::table::Table;
use crate::chaos::variable;
use crate::processes::{end_with_the_runner, logs_to_stderr};

/// The lanes of a dead relay are free again after this.
const LEASE: Duration = Duration::from_secs(2);

/// Runs until SIGTERM, or until it is killed.
pub(super) async fn run<B: Broker>(broker: &B) -> anyhow::Result<()> {
    logs_to_stderr();
    end_with_the_runner();
    let (name, url) = (variable("CHAOS_NAME")?, variable("ONLYONCE_POSTGRES_URL")?);
    let store = PostgresOptions::new(&url)
        .schema(&name)
        .max_connections(4)
        .connect()?;
    let rough = Rough {
        publisher: broker.publisher()?,
        refuses: broker.address(&name, Route::Rough),
    };
    let relay = Relay::builder(store)
        .publisher("broker", rough)
        .publisher("table", Table::in_schema(&url, &name)?)
        .lease(LEASE)
        .poll(Duration::from_millis(200))
        .delays(Duration::from_millis(20), Duration::from_millis(200))
        .build()?;
    let mut terminated = signal(SignalKind::terminate())?;
    relay
        .run_until(async move {
            terminated.recv().await;
        })
        .await?;
    Ok(())
}
