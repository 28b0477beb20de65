//! Consumers: a source, a store and a handler, checked together and run.

mod builder;
mod decide;
mod gate;
mod lane;
mod policy;
mod process;
mod recover;
mod run;
mod window;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub(crate) use builder::check_connections;
pub use builder::{BuildError, ConsumerBuilder};
pub use policy::RetryPolicy;

pub(crate) use gate::Gate;
pub(crate) use policy::spread;

use crate::health::ConsumerHealth;
use crate::source::{Source, SourceError};
use crate::store::{Inbox, Operations, StoreErrorKind};
use lane::Shared;
use run::{Shape, run};

/// In which order events run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ordering {
    /// In any order, as many at once as there are lanes.
    Unordered,
    /// Events of one key in the order in which the source delivers them; keys beside each other. An
    /// event without a key is ordered with nothing. A failed event with a key is tried again in place
    /// only: the later ones of its key wait, and when those attempts are used up the event is dead and
    /// the key goes on.
    PerKey,
}

/// What to do with an event whose identity was processed before with another payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnMismatch {
    /// It is a duplicate; warn and count it.
    #[default]
    Warn,
    /// Keep it as a dead letter, reason `identity_mismatch`.
    DeadLetter,
    /// It is a duplicate like any other.
    Ignore,
}

/// One logical subscriber, ready to run. Made by [`Consumer::builder`].
pub struct Consumer<S: Inbox + Operations> {
    shared: Arc<Shared<S>>,
    source: Box<dyn Source>,
    shape: Shape,
    /// `None`: the source reads the held events itself.
    held: Option<Held<S>>,
    health: Arc<ConsumerHealth>,
    stop_timeout: Duration,
    dedup_window: Duration,
    connections: Vec<(&'static str, u32)>,
}

/// The second loop of a consumer, over its held events.
struct Held<S: Inbox> {
    shared: Arc<Shared<S>>,
    source: Box<dyn Source>,
    shape: Shape,
}

impl<S: Inbox + Operations> Consumer<S> {
    /// Begins a consumer of this name. The name is part of every deduplication key: it is required,
    /// and must stay the same over releases and be the same on every instance.
    pub fn builder(name: impl Into<String>, store: S) -> ConsumerBuilder<S> {
        ConsumerBuilder::new(name.into(), store)
    }

    /// The consumer's name.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Runs this consumer alone until `stop` is ready, then stops in good order; see
    /// [`Supervisor`](crate::Supervisor) for several, for health and for a purge of your own pace.
    pub async fn run_until(self, stop: impl Future<Output = ()> + Send + 'static) -> Result<(), RunError> {
        let supervisor = crate::Supervisor::builder()
            .consumer(self)
            .build()
            .map_err(RunError::build)?;
        supervisor.run_until(stop).await
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
            if let Some(weakness) = shared.identity.weakness() {
                tracing::warn!(consumer = shared.name, weakness, "weak identity");
            }
            if !store_answers(&shared, &health, &stop).await? {
                return Ok(());
            }
            let mut beside = JoinSet::new();
            beside.spawn({
                let (gate, store) = (shared.gate.clone(), shared.store.clone());
                async move { gate.keep(store).await }
            });
            beside.spawn(watch_backlog(shared.clone(), health.clone()));
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

/// Nothing is received before the database has answered and its tables are what this version needs.
async fn store_answers<S: Inbox + Operations>(
    shared: &Shared<S>,
    health: &ConsumerHealth,
    stop: &CancellationToken,
) -> Result<bool, RunError> {
    for attempt in 1.. {
        let checked = tokio::select! {
            checked = shared.store.check(&shared.limits) => checked,
            _ = stop.cancelled() => return Ok(false),
        };
        let error = match checked {
            Ok(()) => break,
            Err(error) if error.kind() == StoreErrorKind::Misconfigured => {
                return Err(RunError::store(&shared.name, error.to_string()));
            }
            Err(error) => error,
        };
        health.waiting_for(Some(format!("the database does not answer yet: {error}")));
        if attempt == 1 {
            tracing::warn!(consumer = shared.name, %error, "the database does not answer yet; trying until it does");
        }
        tokio::select! {
            _ = tokio::time::sleep(spread(Duration::from_millis(100), Duration::from_secs(2), attempt)) => {}
            _ = stop.cancelled() => return Ok(false),
        }
    }
    health.waiting_for(None);
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

/// A consumer ended, and not because it was told to. Nothing is lost: what was not acked comes again.
#[derive(Debug)]
pub struct RunError {
    message: String,
}

impl RunError {
    pub(crate) fn source(consumer: &str, error: SourceError) -> Self {
        Self {
            message: format!("consumer {consumer}: {error}"),
        }
    }

    pub(crate) fn store(consumer: &str, error: String) -> Self {
        Self {
            message: format!("consumer {consumer}: {error}"),
        }
    }

    pub(crate) fn build(error: BuildError) -> Self {
        Self {
            message: error.to_string(),
        }
    }

    pub(crate) fn lane_died(consumer: &str, error: Option<tokio::task::JoinError>) -> Self {
        let why = error.map_or_else(|| "it ended early".to_owned(), |e| e.to_string());
        Self {
            message: format!(
                "consumer {consumer}: a task of the framework died ({why}); this is a bug in onlyonce, and what was \
                 not acked comes again"
            ),
        }
    }
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for RunError {}
