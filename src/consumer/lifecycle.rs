//! A consumer's life: wait for the database, run the loops, stop.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::error::RunError;
use super::health::ConsumerHealth;
use super::lane::Shared;
use super::run::{Shape, run};
use crate::delay::spread;
use crate::source::Source;
use crate::store::{Inbox, Operations, StoreError, StoreErrorKind, Unread};

/// One logical subscriber, ready to run. Made by [`Consumer::builder`].
pub struct Consumer<S: Inbox + Operations> {
    pub(super) shared: Arc<Shared<S>>,
    pub(super) source: Box<dyn Source>,
    pub(super) shape: Shape,
    /// `None`: the source reads the held events itself.
    pub(super) held: Option<Held<S>>,
    pub(super) health: Arc<ConsumerHealth>,
    pub(super) stop_timeout: Duration,
    pub(super) dedup_window: Duration,
    pub(super) connections: Vec<(&'static str, u32)>,
}

/// The second loop of a consumer, over its held events.
pub(super) struct Held<S: Inbox> {
    pub(super) shared: Arc<Shared<S>>,
    pub(super) source: Box<dyn Source>,
    pub(super) shape: Shape,
}

impl<S: Inbox + Operations> Consumer<S> {
    /// The consumer's name.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    pub(crate) fn health(&self) -> Arc<ConsumerHealth> {
        self.health.clone()
    }

    pub(crate) fn store(&self) -> &S {
        &self.shared.store
    }

    pub(crate) fn dedup_window(&self) -> Duration {
        self.dedup_window
    }

    /// What it takes of the store's connections, part by part.
    pub(crate) fn connections(&self) -> &[(&'static str, u32)] {
        &self.connections
    }

    /// Runs until `stop` is cancelled, and for at most the stop's deadline and its last transaction longer.
    pub(crate) async fn run(self, stop: CancellationToken) -> Result<(), RunError> {
        let Self {
            shared,
            source,
            shape,
            held,
            health,
            stop_timeout,
            ..
        } = self;
        let result = async {
            if let Some(weakness) = shared.identity.weakness(source.capabilities().weak_ids) {
                tracing::warn!(consumer = shared.name, weakness, "weak identity");
            }
            // The probe has a connection of its own and says why there is none; the pool that the check
            // uses says, much later, only that it has waited.
            let check = || async {
                shared.store.probe().await?;
                shared.store.check(&shared.limits).await
            };
            let answers = store_answers(&shared.name, check, |why| health.waiting_for(why), &stop).await;
            if !answers.map_err(|error| RunError::store(&shared.name, error.to_string()))? {
                return Ok(());
            }
            let mut beside = JoinSet::new();
            beside.spawn({
                let (gate, store) = (shared.gate.clone(), shared.store.clone());
                async move { gate.keep(store).await }
            });
            beside.spawn(watch_backlog(shared.clone(), health.clone()));
            beside.spawn(watch_readers(shared.clone(), health.clone()));
            beside.spawn(deadline(shared.clone(), stop.clone(), stop_timeout));

            let mut loops = JoinSet::new();
            loops.spawn(run(shared.clone(), source, shape, health.add_loop("main")));
            if let Some(held) = held {
                loops.spawn(run(held.shared, held.source, held.shape, health.add_loop("held")));
            }
            let mut result = Ok(());
            while let Some(ended) = loops.join_next().await {
                // Whichever ends first, by a stop or by an error, the other ends with it.
                shared.stopping.cancel();
                let ended = ended.unwrap_or_else(|e| Err(RunError::lane_died(&shared.name, Some(e))));
                result = result.and(ended);
            }
            beside.shutdown().await;
            result
        }
        .await;
        health.ended();
        result
    }
}

/// Nothing is done before the database has answered and its tables are what this version needs: what
/// `check` says, again and again until it is well or a person has to put it right. `false`: stopped before that.
pub(crate) async fn store_answers<F>(
    who: &str,
    check: impl Fn() -> F,
    waiting_for: impl Fn(Option<String>),
    stop: &CancellationToken,
) -> Result<bool, StoreError>
where
    F: Future<Output = Result<(), StoreError>>,
{
    for attempt in 1.. {
        let checked = tokio::select! {
            checked = check() => checked,
            _ = stop.cancelled() => return Ok(false),
        };
        let error = match checked {
            Ok(()) => break,
            Err(error) if error.kind() == StoreErrorKind::Misconfigured => return Err(error),
            Err(error) => error,
        };
        waiting_for(Some(format!("the database does not answer yet: {error}")));
        if attempt == 1 {
            tracing::warn!(who, %error, "the database does not answer yet; trying until it does");
        }
        tokio::select! {
            _ = tokio::time::sleep(spread(Duration::from_millis(100), Duration::from_secs(2), attempt)) => {}
            _ = stop.cancelled() => return Ok(false),
        }
    }
    waiting_for(None);
    Ok(true)
}

/// From the stop on, running handlers have `limit` to finish.
async fn deadline<S: Inbox>(shared: Arc<Shared<S>>, stop: CancellationToken, limit: Duration) {
    tokio::select! {
        _ = stop.cancelled() => {}
        _ = shared.stopping.cancelled() => {}
    }
    shared.stopping.cancel();
    tokio::time::sleep(limit).await;
    shared.abort.cancel();
    std::future::pending().await
}

/// Counts what is held, for metrics and health.
async fn watch_backlog<S: Inbox>(shared: Arc<Shared<S>>, health: Arc<ConsumerHealth>) {
    let mut every = tokio::time::interval(Duration::from_secs(15));
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        every.tick().await;
        if !shared.gate.is_open() {
            continue;
        }
        match shared.store.backlog(&shared.name).await {
            Ok(backlog) => {
                health.set_backlog(backlog);
                crate::telemetry::backlog(&shared.name, &backlog);
            }
            Err(error) => tracing::debug!(consumer = shared.name, %error, "held events could not be counted"),
        }
    }
}

/// Says that this consumer runs, and notices held events whose consumer nobody runs: one that was
/// renamed leaves its dead letters and retries behind, and no other consumer reads them.
async fn watch_readers<S: Operations>(shared: Arc<Shared<S>>, health: Arc<ConsumerHealth>) {
    let instance = Uuid::from_u128(fastrand::u128(..));
    let mut every = tokio::time::interval(Duration::from_secs(60));
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut known = Vec::new();
    loop {
        every.tick().await;
        if !shared.gate.is_open() {
            continue;
        }
        let unread = match shared.store.seen(&shared.name, instance).await {
            Ok(unread) => unread,
            Err(error) => {
                tracing::debug!(consumer = shared.name, %error, "could not say that the consumer runs");
                continue;
            }
        };
        for Unread { consumer, held } in unread.iter().filter(|u| !known.contains(&u.consumer)) {
            tracing::warn!(
                consumer = shared.name,
                unread = consumer,
                held,
                "held events have no reader (run that consumer; if it was renamed, it is another subscriber now)"
            );
        }
        known = unread.iter().map(|unread| unread.consumer.clone()).collect();
        health.set_unread(unread);
    }
}
