//! A relay's life: wait for the database, run the loop, stop.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::builder::RelayBuilder;
use super::health::RelayHealth;
use super::listening::listen;
use super::outlet::Outlet;
use super::run::run;
use super::work::Shared;
use crate::consumer::{RunError, store_answers};
use crate::store::Relaying;
use crate::telemetry;

/// Publishes what was written to the outbox, ready to run. Made by [`Relay::builder`].
pub struct Relay<S> {
    pub(super) shared: Arc<Shared<S>>,
    pub(super) outlets: Vec<Outlet>,
    pub(super) connections: Vec<(&'static str, u32)>,
}

impl<S: Relaying> Relay<S> {
    /// Begins a relay for the outbox in this store.
    pub fn builder(store: S) -> RelayBuilder<S> {
        RelayBuilder::new(store)
    }

    /// The relay's name.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    pub(crate) fn store(&self) -> &S {
        &self.shared.store
    }

    pub(crate) fn health(&self) -> Arc<RelayHealth> {
        self.shared.health.clone()
    }

    pub(crate) fn keeps_sent(&self) -> Option<Duration> {
        self.shared.settings.keep_sent
    }

    /// What it takes of the store's connections, part by part.
    pub(crate) fn connections(&self) -> &[(&'static str, u32)] {
        &self.connections
    }

    /// Runs until `stop` is cancelled, and for at most the stop's deadline and its last steps longer.
    pub(crate) async fn run(self, stop: CancellationToken) -> Result<(), RunError> {
        let Self { shared, outlets, .. } = self;
        let check = || async {
            shared.store.probe().await?;
            shared.store.check_outgoing().await
        };
        let waiting_for = |why| shared.health.waiting_for(why);
        let answers = store_answers(&shared.name, check, waiting_for, &stop).await;
        let result = answers.map_err(|error| RunError::relay(&shared.name, &error));
        if let Ok(true) = result {
            let mut beside = JoinSet::new();
            beside.spawn(listen(shared.clone()));
            beside.spawn(watch_backlog(shared.clone()));
            run(shared.clone(), outlets, stop).await;
            beside.shutdown().await;
        }
        shared.health.ended();
        result.map(|_| ())
    }
}

/// Counts what waits, for metrics and health.
async fn watch_backlog<S: Relaying>(shared: Arc<Shared<S>>) {
    let mut every = tokio::time::interval(Duration::from_secs(15));
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        every.tick().await;
        match shared.store.outgoing(&shared.name).await {
            Ok(backlog) => {
                telemetry::outgoing(&shared.name, &backlog);
                shared.health.set_backlog(backlog);
            }
            Err(error) => {
                tracing::debug!(relay = &*shared.name, %error, "outgoing events could not be counted");
            }
        }
    }
}

impl<S> fmt::Debug for Relay<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let publishers: Vec<_> = self.outlets.iter().map(|outlet| &outlet.name).collect();
        f.debug_struct("Relay")
            .field("name", &self.shared.name)
            .field("publishers", &publishers)
            .finish_non_exhaustive()
    }
}
