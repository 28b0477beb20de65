use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use sqlx::Database;
use tokio_util::sync::CancellationToken;

use super::error::BuildError;
use super::gate::Gate;
use super::health::ConsumerHealth;
use super::lane::{BeginHook, Shared};
use super::lifecycle::{Consumer, Held};
use super::policy::{OnMismatch, Ordering, RetryPolicy};
use super::run::Shape;
use crate::event::IdentityRules;
use crate::handler::{BatchHandler, BatchRunner, Handler, HandlerRunner, Run};
use crate::inbox::InboxSource;
use crate::outbox::{Outbox, Record};
use crate::source::{Plan, Source};
use crate::store::{Inbox, Isolation, Limits, Operations, Outgoing, Store, Waking};

/// Connections that are kept for what must go on while all lanes are busy.
const RESERVE: u32 = 2;

/// Configures a [`Consumer`]. Everything is checked together by [`build`](Self::build); each message
/// names the field, its value and the bound.
pub struct ConsumerBuilder<S: Store> {
    name: String,
    store: S,
    source: Option<Box<dyn Source>>,
    handler: Option<Arc<dyn Run<S::Db>>>,
    /// The handler takes all events of a transaction at once.
    handles_batches: bool,
    outbox: Option<Outbox<S>>,
    identity: IdentityRules,
    policy: RetryPolicy,
    ordering: Option<Ordering>,
    on_mismatch: OnMismatch,
    lanes: Option<usize>,
    held_lanes: Option<usize>,
    batch: usize,
    window: Option<usize>,
    window_bytes: usize,
    handler_timeout: Duration,
    stop_timeout: Duration,
    stop_when_idle: Option<Duration>,
    dedup_window: Duration,
    lease: Duration,
    limits: Limits,
    statement_timeout: Option<Duration>,
    keep_while_paused: Duration,
    on_begin: Option<BeginHook<S::Db>>,
    #[cfg(feature = "testing")]
    crash: Option<crate::crash::Plan>,
}

impl<S: Inbox + Outgoing + Operations> Consumer<S> {
    /// Begins a consumer of this name. The name is part of every deduplication key: it is required,
    /// and must stay the same over releases and be the same on every instance.
    pub fn builder(name: impl Into<String>, store: S) -> ConsumerBuilder<S> {
        ConsumerBuilder::new(name.into(), store)
    }
}

impl<S: Inbox + Outgoing + Operations> ConsumerBuilder<S> {
    fn new(name: String, store: S) -> Self {
        Self {
            name,
            store,
            source: None,
            handler: None,
            handles_batches: false,
            outbox: None,
            identity: IdentityRules::auto(),
            policy: RetryPolicy::default(),
            ordering: None,
            on_mismatch: OnMismatch::default(),
            lanes: None,
            held_lanes: None,
            batch: 1,
            window: None,
            window_bytes: 64 << 20,
            handler_timeout: Duration::from_secs(30),
            stop_timeout: Duration::from_secs(20),
            stop_when_idle: None,
            dedup_window: Duration::from_secs(30 * 86_400),
            lease: Duration::from_secs(30),
            limits: Limits::default(),
            statement_timeout: None,
            keep_while_paused: Duration::from_secs(60),
            on_begin: None,
            #[cfg(feature = "testing")]
            crash: None,
        }
    }

    /// Where deliveries come from. Required.
    pub fn source(mut self, source: impl Source) -> Self {
        self.source = Some(Box::new(source));
        self
    }

    /// What is done with each event. Required, unless there is a [`batch_handler`](Self::batch_handler).
    pub fn handler(mut self, handler: impl Handler<S::Db>) -> Self {
        self.handler = Some(Arc::new(HandlerRunner::new(handler)));
        self.handles_batches = false;
        self
    }

    /// What is done with all new events of a transaction at once. Set [`batch`](Self::batch) as well.
    pub fn batch_handler(mut self, handler: impl BatchHandler<S::Db>) -> Self {
        self.handler = Some(Arc::new(BatchRunner::new(handler)));
        self.handles_batches = true;
        self
    }

    /// Where the events that handlers send are written, with its relay, source and limits. Default: an
    /// outbox of the same store for the relay `default`. Its source, if it has none, is this consumer's name.
    pub fn outbox(mut self, outbox: Outbox<S>) -> Self {
        self.outbox = Some(outbox);
        self
    }

    /// How events are identified. Default: [`IdentityRules::auto`].
    pub fn identity(mut self, rules: IdentityRules) -> Self {
        self.identity = rules;
        self
    }

    /// How often and when failed events are tried again. Default: 8 attempts over about 1 h 11 min.
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.policy = policy;
        self
    }

    /// In which order events run. Default: per key if the source promises an order, else unordered.
    pub fn ordering(mut self, ordering: Ordering) -> Self {
        self.ordering = Some(ordering);
        self
    }

    /// What to do with a known identity that comes with another payload. Default: warn.
    pub fn on_mismatch(mut self, rule: OnMismatch) -> Self {
        self.on_mismatch = rule;
        self
    }

    /// How many transactions run at once; each lane holds one connection. Default 8, on SQLite 1.
    pub fn lanes(mut self, lanes: usize) -> Self {
        self.lanes = Some(lanes);
        self
    }

    /// How many lanes run held events (delayed retries), beside the others. Default: a quarter of
    /// the lanes, at least one.
    pub fn held_lanes(mut self, lanes: usize) -> Self {
        self.held_lanes = Some(lanes);
        self
    }

    /// How many waiting events a lane takes into one transaction at most. Default 1. It never waits
    /// for more to come. A batch saves round trips and commits; in exchange its handlers share row
    /// locks, and if one of them fails all are run again one by one, so effects outside the
    /// transaction are repeated more often.
    pub fn batch(mut self, events: usize) -> Self {
        self.batch = events;
        self
    }

    /// How many deliveries are in hand at most, running ones included; the broker's prefetch.
    /// Default: for each lane its batch and as many again, at least three, and no fewer than one call to
    /// the broker brings ([`per_call`](crate::source::Capabilities::per_call): ten on SQS).
    pub fn window(mut self, deliveries: usize) -> Self {
        self.window = Some(deliveries);
        self
    }

    /// How many bytes of payloads, keys and headers are in hand at most. Default 64 MiB. The last
    /// delivery may go over it; a broker's prefetch counts messages and not bytes, so the adapter's
    /// buffer comes on top.
    pub fn window_bytes(mut self, bytes: usize) -> Self {
        self.window_bytes = bytes;
        self
    }

    /// How long a handler may take for one event. Default 30 s. Past it the attempt has failed.
    pub fn handler_timeout(mut self, limit: Duration) -> Self {
        self.handler_timeout = limit;
        self
    }

    /// How long a concurrent copy of an event, or a row lock, is waited for. Default 2 s.
    pub fn lock_timeout(mut self, limit: Duration) -> Self {
        self.limits.lock_timeout = limit;
        self
    }

    /// How long one statement may run on the server. Default: as long as the handler, at least 30 s. It
    /// is also what a claim waits at most in all, and how long the framework waits for an answer of a
    /// server that has vanished without a word (5 s more).
    pub fn statement_timeout(mut self, limit: Duration) -> Self {
        self.statement_timeout = Some(limit);
        self
    }

    /// The isolation level of handler transactions. Default: read committed.
    pub fn isolation(mut self, level: Isolation) -> Self {
        self.limits.isolation = level;
        self
    }

    /// Accept a database that may lose commits that it has confirmed, and with them events that were
    /// acked: PostgreSQL with `synchronous_commit = off`, SQLite with `synchronous` below FULL.
    pub fn allow_async_commit(mut self) -> Self {
        self.limits.allow_async_commit = true;
        self
    }

    /// How long deliveries in hand are kept while the database cannot be worked with. Default 1 min; then
    /// all of them are given back, once. More of it saves redeliveries after a short outage, less lets an
    /// instance with a healthy database take over sooner.
    pub fn keep_while_paused(mut self, limit: Duration) -> Self {
        self.keep_while_paused = limit;
        self
    }

    /// How long running handlers have to finish after a stop. Default 20 s; the process supervisor's
    /// own limit should be longer.
    pub fn stop_timeout(mut self, limit: Duration) -> Self {
        self.stop_timeout = limit;
        self
    }

    /// Stop by itself when nothing has arrived for this long: for one-off jobs and tests.
    pub fn stop_when_idle(mut self, after: Duration) -> Self {
        self.stop_when_idle = Some(after);
        self
    }

    /// How long a processed identity is remembered. Default 30 days. It must be longer than the
    /// source can redeliver: an older event that comes again is new.
    pub fn dedup_window(mut self, window: Duration) -> Self {
        self.dedup_window = window;
        self
    }

    /// How long a held event stays leased to a process that has died. Default 30 s; a living one renews it.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Runs at the start of each transaction, before the claim: `SET LOCAL` for tenants, roles or
    /// `search_path`. The role it sets needs rights on the framework's tables. An error pauses the
    /// consumer: it says nothing about an event.
    pub fn on_begin<F>(mut self, hook: F) -> Self
    where
        F: for<'a> Fn(
                &'a mut <S::Db as Database>::Connection,
            ) -> Pin<Box<dyn Future<Output = Result<(), sqlx::Error>> + Send + 'a>>
            + Send
            + Sync
            + 'static,
    {
        self.on_begin = Some(Arc::new(hook));
        self
    }

    /// Asks at every crash point whether the process dies there; see [`testing`](crate::testing).
    #[cfg(feature = "testing")]
    pub fn crash_when(
        mut self,
        crashes: impl Fn(crate::crash::CrashPoint) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.crash = Some(Arc::new(crashes));
        self
    }

    /// Checks everything and makes the consumer.
    pub fn build(self) -> Result<Consumer<S>, BuildError> {
        let mut problems = Problems::default();
        let day = Duration::from_secs(86_400);
        problems.name(&self.name, "it is part of every deduplication key");
        // A name that is wrong is said once.
        let source = if problems.0.is_empty() { &self.name } else { "name" };
        let outbox = self
            .outbox
            .unwrap_or_else(|| Outbox::new(self.store.clone()))
            .or_source(source);
        let lanes = self
            .lanes
            .unwrap_or_else(|| self.store.max_useful_lanes().unwrap_or(8));
        // Only what was set can be wrong: a default that follows from something else is within its bounds.
        let held_lanes = self.held_lanes.unwrap_or_else(|| (lanes / 4).clamp(1, 1000));
        problems.range("lanes", lanes, 1, 1000);
        problems.range("held_lanes", held_lanes, 1, 1000);
        if let Some(max) = self.store.max_useful_lanes()
            && lanes > max
        {
            problems.add(format!(
                "lanes is {lanes} (at most {max} on {}: it has one writer)",
                self.store.name()
            ));
        }
        problems.range("batch", self.batch, 1, 10_000);
        if let Some(window) = self.window {
            problems.range("window", window, 1, 65_535);
        }
        problems.range("window_bytes", self.window_bytes, 1024, usize::MAX);
        problems.time(
            "handler_timeout",
            self.handler_timeout,
            Duration::from_millis(1),
            day,
        );
        problems.time(
            "lock_timeout",
            self.limits.lock_timeout,
            Duration::from_millis(1),
            day,
        );
        let statement_timeout = self
            .statement_timeout
            .unwrap_or_else(|| self.handler_timeout.clamp(Duration::from_secs(30), day));
        // It bounds our own statements as well.
        problems.time(
            "statement_timeout",
            statement_timeout,
            Duration::from_millis(100),
            day,
        );
        problems.time("keep_while_paused", self.keep_while_paused, Duration::ZERO, day);
        problems.time("stop_timeout", self.stop_timeout, Duration::ZERO, day);
        problems.time("lease", self.lease, Duration::from_secs(1), day);
        problems.time(
            "dedup_window",
            self.dedup_window,
            Duration::from_secs(1),
            3660 * day,
        );
        if let Err(problem) = self.policy.check() {
            problems.add(problem);
        }
        problems.outbox(&outbox, &self.store);
        if self.source.is_none() {
            problems.add("source is not set (where the events come from)".into());
        }
        if self.handler.is_none() {
            problems.add("handler is not set (what is done with the events)".into());
        }

        let reads_inbox = self.source.as_ref().is_some_and(|s| s.capabilities().reads_inbox);
        let mut connections = vec![("lanes", u32::try_from(lanes).unwrap_or(u32::MAX))];
        if !reads_inbox {
            connections.push(("held lanes", u32::try_from(held_lanes).unwrap_or(u32::MAX)));
        }
        check_connections(&mut problems.0, &connections, self.store.max_connections());
        let (Some(source), Some(handler), true) = (self.source, self.handler, problems.0.is_empty()) else {
            return Err(BuildError(problems.0));
        };
        let handles_batches = self.handles_batches;
        let outbox: Arc<dyn Record<S::Db>> = Arc::new(outbox);

        let capabilities = source.capabilities();
        let window = self
            .window
            .unwrap_or_else(|| window_of(lanes, self.batch, capabilities.per_call));
        let ordering = self.ordering.unwrap_or(if capabilities.ordered {
            Ordering::PerKey
        } else {
            Ordering::Unordered
        });
        if ordering == Ordering::PerKey && !capabilities.ordered && !reads_inbox {
            tracing::warn!(
                consumer = self.name,
                system = capabilities.system,
                "PerKey keeps the order in which deliveries arrive, but this source does not promise an order"
            );
        }
        let mut limits = self.limits;
        limits.idle_timeout = self.handler_timeout + Duration::from_secs(5);
        limits.statement_timeout = statement_timeout;
        let per_transaction = if handles_batches { 1 } else { self.batch as u32 };
        limits.transaction_timeout = self.handler_timeout * per_transaction + limits.statement_timeout * 2;

        let gate = Arc::new(Gate::new(&self.name, self.keep_while_paused));
        let shared = |system| {
            Arc::new(Shared {
                name: self.name.clone(),
                system,
                store: self.store.clone(),
                handler: handler.clone(),
                outbox: outbox.clone(),
                identity: self.identity.clone(),
                policy: self.policy.clone(),
                ordering,
                on_mismatch: self.on_mismatch,
                limits: limits.clone(),
                handler_timeout: self.handler_timeout,
                handles_batches,
                on_begin: self.on_begin.clone(),
                gate: gate.clone(),
                stopping: CancellationToken::new(),
                abort: CancellationToken::new(),
                #[cfg(feature = "testing")]
                crash: self.crash.clone(),
            })
        };
        // Those after them come from `inbox`, each in a delivery of its own.
        let attempts = self.policy.attempts_in_place();
        let plan = |lanes, window| Plan {
            consumer: self.name.clone(),
            lanes,
            window,
            window_bytes: self.window_bytes,
            longest_unsettled: self.handler_timeout * attempts + self.policy.longest_in_place(),
            attempts,
            dedup_window: Some(self.dedup_window),
        };
        let shape = |lanes, window, stop_when_idle| Shape {
            lanes,
            batch: self.batch,
            plan: plan(lanes, window),
            stop_when_idle,
        };

        let main = shared(capabilities.system);
        let held = (!reads_inbox).then(|| {
            let inbox = InboxSource::new(self.store.clone(), &self.name).lease(self.lease);
            let capabilities = inbox.capabilities();
            // One stop for both loops.
            let mut held = shared(capabilities.system);
            if let Some(held) = Arc::get_mut(&mut held) {
                held.stopping = main.stopping.clone();
                held.abort = main.abort.clone();
            }
            let window = window_of(held_lanes, self.batch, capabilities.per_call);
            Held {
                shared: held,
                source: Box::new(inbox),
                shape: shape(held_lanes, window, None),
            }
        });
        Ok(Consumer {
            shape: shape(lanes, window, self.stop_when_idle),
            health: Arc::new(ConsumerHealth::new(&self.name, gate)),
            shared: main,
            source,
            held,
            stop_timeout: self.stop_timeout,
            dedup_window: self.dedup_window,
            connections,
        })
    }
}

/// All that is held by consumers of one pool, and the reserve, must fit into it.
pub(crate) fn check_connections(problems: &mut Vec<String>, parts: &[(&'static str, u32)], max: u32) {
    let sum = parts
        .iter()
        .fold(RESERVE, |sum, (_, count)| sum.saturating_add(*count));
    if sum > max {
        let parts: Vec<_> = parts
            .iter()
            .map(|(part, count)| format!("{count} {part}"))
            .collect();
        problems.push(format!(
            "max_connections is {max} (at least {sum}: {}, {RESERVE} in reserve)",
            parts.join(", ")
        ));
    }
}

/// One batch for each lane, and what it takes next: finished ones that are not acked yet, and those on
/// their way from the broker, must not leave it without work. Where they come `per_call`, what brings them
/// takes as long for one as for all.
fn window_of(lanes: usize, batch: usize, per_call: usize) -> usize {
    let waiting = batch.max(3);
    lanes
        .saturating_mul(batch.saturating_add(waiting).max(per_call))
        .clamp(1, 65_535)
}

/// What is wrong with settings: all of it, not only the first.
#[derive(Default)]
pub(crate) struct Problems(pub(crate) Vec<String>);

impl Problems {
    pub(crate) fn add(&mut self, problem: String) {
        self.0.push(problem);
    }

    pub(crate) fn range(&mut self, field: &str, value: usize, min: usize, max: usize) {
        if value < min {
            self.add(format!("{field} is {value} (at least {min})"));
        } else if value > max {
            self.add(format!("{field} is {value} (at most {max})"));
        }
    }

    pub(crate) fn time(&mut self, field: &str, value: Duration, min: Duration, max: Duration) {
        if value < min {
            self.add(format!("{field} is {value:?} (at least {min:?})"));
        } else if value > max {
            self.add(format!("{field} is {value:?} (at most {max:?})"));
        }
    }

    /// Rows are written in the handler's transaction, whatever store the outbox was made with.
    fn outbox<S: Waking>(&mut self, outbox: &Outbox<S>, store: &S) {
        let of_outbox = |problem| format!("outbox: {problem}");
        self.0.extend(outbox.problems().into_iter().map(of_outbox));
        if outbox.store().pool_id() != store.pool_id() {
            self.add("outbox is of another store (it has to be of the consumer's own)".into());
        }
    }

    /// Names are compared byte for byte; one with a blank at its end would be another consumer.
    pub(crate) fn name(&mut self, name: &str, because: &str) {
        if name.is_empty() || name.len() > 128 {
            self.add(format!("name is {} bytes long (1 to 128: {because})", name.len()));
        } else if name.trim() != name || name.chars().any(char::is_control) {
            self.add(format!(
                "name is {name:?} (no blanks around it, no control characters)"
            ));
        }
    }
}
