//! Several consumers, a relay and the purge in one process: one stop, one health, one sum of connections.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::consumer::{BuildError, Consumer, Health, RunError, Vitals, check_connections};
use crate::relay::Relay;
use crate::store::{Inbox, Operations, PurgeCursor, Relaying, StoreError};
use crate::telemetry;

/// Runs consumers and relays until it is told to stop.
///
/// ```no_run
/// # async fn example<S: onlyonce::store::Inbox + onlyonce::store::Operations>(
/// #     payments: onlyonce::Consumer<S>, refunds: onlyonce::Consumer<S>,
/// # ) -> Result<(), Box<dyn std::error::Error>> {
/// let supervisor = onlyonce::Supervisor::builder().consumer(payments).consumer(refunds).build()?;
/// let health = supervisor.health(); // answer /live and /ready from it
/// # drop(health);
/// # let ctrl_c = std::future::pending();
/// supervisor.run_until(ctrl_c).await?;
/// # Ok(()) }
/// ```
pub struct Supervisor {
    members: Vec<Member>,
    health: Health,
    purge: Purge,
}

/// Configures a [`Supervisor`].
pub struct SupervisorBuilder {
    members: Vec<Member>,
    purge: Purge,
}

/// How the purge goes about it.
#[derive(Debug, Clone, Copy)]
struct Purge {
    every: Duration,
    batch: u32,
}

type Running<T> = Pin<Box<dyn Future<Output = T> + Send>>;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    Consumer,
    Relay,
}

/// A consumer or a relay with its types forgotten.
struct Member {
    kind: Kind,
    name: String,
    pool: usize,
    max_connections: u32,
    connections: Vec<(&'static str, u32)>,
    health: Arc<dyn Vitals>,
    run: Box<dyn FnOnce(CancellationToken) -> Running<Result<(), RunError>> + Send>,
    purge: Box<dyn FnOnce(Purge) -> Running<()> + Send>,
}

impl Supervisor {
    /// Begins a supervisor of nothing.
    pub fn builder() -> SupervisorBuilder {
        SupervisorBuilder {
            members: Vec::new(),
            purge: Purge {
                every: Duration::from_secs(60),
                batch: 5000,
            },
        }
    }

    /// Health of everything in here; stays valid while and after it runs.
    pub fn health(&self) -> Health {
        self.health.clone()
    }

    /// Runs until `stop` is ready, then stops in good order: take no more, finish or roll back what
    /// runs within the deadline, give back the rest, flush the acks and marks. Relays stop when the last consumer
    /// has, and publish until then. Ends early with the first error of a consumer or a relay, after the others
    /// have stopped.
    ///
    /// Dropping this future does not cut anything off: it stops them as well, in the background.
    pub async fn run_until(self, stop: impl Future<Output = ()> + Send + 'static) -> Result<(), RunError> {
        let token = CancellationToken::new();
        // Held by this future: dropping it cancels the token, and the tasks below end by themselves.
        let _stop_on_drop = token.clone().drop_guard();
        let whole: JoinHandle<Result<(), RunError>> = tokio::spawn(self.run(token.clone()));
        let wait_for_stop = async {
            stop.await;
            token.cancel();
            std::future::pending::<()>().await
        };
        tokio::select! {
            result = whole => result.unwrap_or_else(|e| Err(RunError::lane_died("supervisor", Some(e)))),
            () = wait_for_stop => Ok(()),
        }
    }

    async fn run(self, stop: CancellationToken) -> Result<(), RunError> {
        let (mut consumers, mut relays, mut purges) = (JoinSet::new(), JoinSet::new(), JoinSet::new());
        let stop_relays = CancellationToken::new();
        for member in self.members {
            match member.kind {
                Kind::Consumer => consumers.spawn((member.run)(stop.clone())),
                Kind::Relay => relays.spawn((member.run)(stop_relays.clone())),
            };
            purges.spawn((member.purge)(self.purge));
        }
        let mut result = Ok(());
        loop {
            let ended = tokio::select! {
                Some(ended) = consumers.join_next() => ended,
                Some(ended) = relays.join_next() => ended,
                // What consumers commit while they stop goes out as before.
                () = stop.cancelled(), if consumers.is_empty() && !stop_relays.is_cancelled() => {
                    stop_relays.cancel();
                    continue;
                }
                else => break,
            };
            stop.cancel();
            let ended = ended.unwrap_or_else(|e| Err(RunError::lane_died("supervisor", Some(e))));
            result = result.and(ended);
        }
        // A batch that is cut off here rolls back; the next start finds the same rows.
        purges.shutdown().await;
        result
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Consumer => "consumer",
            Self::Relay => "relay",
        })
    }
}

impl SupervisorBuilder {
    /// Adds a consumer.
    pub fn consumer<S: Inbox + Operations>(mut self, consumer: Consumer<S>) -> Self {
        let store = consumer.store().clone();
        let (name, window) = (consumer.name().to_owned(), consumer.dedup_window());
        self.members.push(Member {
            kind: Kind::Consumer,
            name: name.clone(),
            pool: store.pool_id(),
            max_connections: store.max_connections(),
            connections: consumer.connections().to_vec(),
            health: consumer.health(),
            run: Box::new(move |stop| Box::pin(consumer.run(stop))),
            purge: Box::new(move |pace| Box::pin(purge(store, name, window, pace))),
        });
        self
    }

    /// Adds a relay.
    pub fn relay<S: Relaying>(mut self, relay: Relay<S>) -> Self {
        let store = relay.store().clone();
        let (name, kept) = (relay.name().to_owned(), relay.keeps_sent());
        self.members.push(Member {
            kind: Kind::Relay,
            name: name.clone(),
            pool: store.pool_id(),
            max_connections: store.max_connections(),
            connections: relay.connections().to_vec(),
            health: relay.health(),
            run: Box::new(move |stop| Box::pin(relay.run(stop))),
            purge: Box::new(move |pace| Box::pin(purge_sent(store, name, kept, pace))),
        });
        self
    }

    /// How often claims past the dedup window, and sent events past their time, are looked for. Default every minute.
    pub fn purge_every(mut self, every: Duration) -> Self {
        self.purge.every = every;
        self
    }

    /// How many rows one purge statement deletes at most. Default 5,000.
    pub fn purge_batch(mut self, rows: u32) -> Self {
        self.purge.batch = rows;
        self
    }

    /// Checks what can only be checked together: names, and the connections of consumers that share a pool.
    pub fn build(self) -> Result<Supervisor, BuildError> {
        let mut problems = Vec::new();
        if self.members.is_empty() {
            problems.push("consumers is 0 (at least 1)".to_owned());
        }
        if self.purge.batch == 0 {
            problems.push("purge_batch is 0 (at least 1)".to_owned());
        }
        if self.purge.every < Duration::from_millis(100) {
            problems.push(format!("purge_every is {:?} (at least 100ms)", self.purge.every));
        }
        let mut names = HashSet::new();
        for member in &self.members {
            if !names.insert((member.pool, member.kind, member.name.as_str())) {
                problems.push(format!(
                    "{} {} is there twice (two subscribers with one name would starve each other)",
                    member.kind, member.name
                ));
            }
        }
        let mut pools: HashMap<usize, Vec<&Member>> = HashMap::new();
        for member in &self.members {
            pools.entry(member.pool).or_default().push(member);
        }
        for members in pools.values() {
            let parts: Vec<_> = members
                .iter()
                .flat_map(|member| member.connections.clone())
                .collect();
            check_connections(&mut problems, &parts, members[0].max_connections);
        }
        if !problems.is_empty() {
            return Err(BuildError(problems));
        }
        let health = Health::default();
        for member in &self.members {
            health.add(member.health.clone());
        }
        Ok(Supervisor {
            members: self.members,
            health,
            purge: self.purge,
        })
    }
}

/// Removes claims past the window in bounded batches, each beginning where the last one ended. Safe
/// on every instance at once: batches skip rows that another one has locked.
async fn purge<S: Operations>(store: S, consumer: String, window: Duration, pace: Purge) {
    loop {
        sleep(pace.every).await;
        if let Err(error) = purge_once(&store, &consumer, window, pace.batch).await {
            tracing::debug!(consumer, %error, "the purge was interrupted; it goes on at the next turn");
        }
    }
}

async fn purge_once<S: Operations>(
    store: &S,
    consumer: &str,
    window: Duration,
    batch: u32,
) -> Result<(), StoreError> {
    let mut cursor = PurgeCursor::default();
    loop {
        let purged = store.purge(consumer, window, batch, cursor).await?;
        telemetry::purged(consumer, purged.rows, purged.lag);
        if purged.rows > 0 {
            tracing::debug!(consumer, rows = purged.rows, lag = ?purged.lag, "purged");
        }
        if !purged.more {
            return Ok(());
        }
        cursor = purged.next;
        // Leaves room for the work between two batches.
        sleep(Duration::from_millis(50)).await;
    }
}

/// Removes sent events that were kept for long enough, if any are.
async fn purge_sent<S: Relaying>(store: S, relay: String, kept: Option<Duration>, pace: Purge) {
    let Some(kept) = kept else { return };
    loop {
        sleep(pace.every).await;
        loop {
            match store.purge_sent(&relay, kept, pace.batch).await {
                Ok(rows) => {
                    telemetry::sent_purged(&relay, rows);
                    if rows < u64::from(pace.batch) {
                        break;
                    }
                    // Leaves room for the work between two batches.
                    sleep(Duration::from_millis(50)).await;
                }
                Err(error) => {
                    tracing::debug!(relay, %error, "the purge was interrupted; it goes on at the next turn");
                    break;
                }
            }
        }
    }
}

impl fmt::Debug for Supervisor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.members.iter().map(|m| (m.kind, &m.name)).collect();
        f.debug_struct("Supervisor")
            .field("members", &names)
            .field("purge", &self.purge)
            .finish()
    }
}

impl<S: Inbox + Operations> Consumer<S> {
    /// Runs this consumer alone until `stop` is ready, then stops in good order; see
    /// [`Supervisor`](crate::Supervisor) for several, for health and for a purge of your own pace.
    pub async fn run_until(self, stop: impl Future<Output = ()> + Send + 'static) -> Result<(), RunError> {
        let supervisor = Supervisor::builder()
            .consumer(self)
            .build()
            .map_err(RunError::build)?;
        supervisor.run_until(stop).await
    }
}

impl<S: Relaying> Relay<S> {
    /// Runs this relay alone until `stop` is ready, then stops in good order; see
    /// [`Supervisor`](crate::Supervisor) for one beside consumers, for health and for a purge of your own pace.
    pub async fn run_until(self, stop: impl Future<Output = ()> + Send + 'static) -> Result<(), RunError> {
        let supervisor = Supervisor::builder()
            .relay(self)
            .build()
            .map_err(RunError::build)?;
        supervisor.run_until(stop).await
    }
}
