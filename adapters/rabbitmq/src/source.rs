//! The source: one session after the other, each opened anew when the last one ended.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use onlyonce::source::{
    Capabilities, Delivery, Incoming, Plan, Receipt, Settlement, Source, SourceError, SourceHealth,
};
use tokio::sync::oneshot;
use tokio_util::task::AbortOnDropHandle;

use crate::check;
use crate::config::{ConfigError, RabbitMqBuilder, Settings};
use crate::identity::{Arrival, SYSTEM};
use crate::session::{Order, Session};
use crate::status::Status;

const FIRST_RETRY: Duration = Duration::from_millis(100);
const SLOWEST_RETRY: Duration = Duration::from_secs(10);
/// A session that lived this long shows that the broker is well; after it, retries start fast again.
const WELL_AFTER: Duration = SLOWEST_RETRY;

/// A RabbitMQ queue as a source of deliveries.
///
/// Made by [`RabbitMq::queue`]. It owns one connection, opens it anew for as long as it takes when it
/// is lost, and says so in its [health](Source::health); see the [crate's documentation](crate) for
/// what it promises.
pub struct RabbitMq {
    settings: Arc<Settings>,
    status: Arc<Status>,
    consumer: String,
    window: usize,
    link: State,
    /// Receipts that were handed out by the current session, and their delivery tags.
    outstanding: HashMap<Receipt, u64>,
    /// Receipts of a session that ended, to be reported before anything else.
    lost: Vec<Receipt>,
    last_receipt: u64,
    retry: ExponentialBackoff,
    paused: bool,
    stopping: Stopping,
    counts_deliveries: bool,
    native_dead_letters: bool,
}

enum State {
    /// Nobody is connected or connecting.
    Down,
    /// A task connects; a caller that stops waiting for it loses nothing.
    Opening(AbortOnDropHandle<Result<Session, SourceError>>),
    Up(Session),
}

#[derive(Debug, PartialEq, Eq)]
enum Stopping {
    No,
    /// No more is taken; what was handed out can be settled.
    Yes,
    /// Everything is settled and the session was told to finish.
    Finishing,
}

impl RabbitMqBuilder {
    /// Checks the settings together and makes the source. Nothing is connected yet.
    ///
    /// # Errors
    ///
    /// All settings that cannot work, in one error.
    pub fn build(self) -> Result<RabbitMq, ConfigError> {
        Ok(RabbitMq::new(Arc::new(self.settings()?)))
    }
}

impl RabbitMq {
    /// Consumes this queue of the broker at `url`, such as `amqp://user:password@host:5672/%2f`.
    ///
    /// The queue has to exist: who publishes to it, declares it. The vhost is the URL's path,
    /// percent-encoded: `/%2f` or no path is RabbitMQ's default vhost `/`, while a path of only `/`
    /// is a vhost with an empty name.
    pub fn queue(url: impl Into<String>, queue: impl Into<String>) -> RabbitMqBuilder {
        RabbitMqBuilder::new(url, queue)
    }

    pub(crate) fn new(settings: Arc<Settings>) -> Self {
        Self {
            settings,
            status: Arc::new(Status::new()),
            consumer: String::new(),
            window: 1,
            link: State::Down,
            outstanding: HashMap::new(),
            lost: Vec::new(),
            last_receipt: 0,
            retry: retry(),
            paused: false,
            stopping: Stopping::No,
            counts_deliveries: false,
            native_dead_letters: false,
        }
    }

    async fn check_and_open(&mut self, plan: &Plan) -> Result<(), SourceError> {
        let known = check::at_start(&self.settings, plan).await?;
        self.counts_deliveries = known.counts_deliveries;
        self.native_dead_letters = known.native_dead_letters;
        self.link = State::Up(self.open().await?);
        tracing::info!(
            queue = %self.settings.queue,
            broker = %self.settings.access.broker.host(),
            prefetch = self.settings.prefetch(self.window),
            "consuming from RabbitMQ"
        );
        Ok(())
    }

    /// Starts to connect, after a delay that grows from attempt to attempt.
    fn reopen(&mut self) -> State {
        let delay = self.retry.next().unwrap_or(SLOWEST_RETRY);
        let opening = self.open();
        State::Opening(AbortOnDropHandle::new(tokio::spawn(async move {
            tokio::time::sleep(delay).await;
            opening.await
        })))
    }

    fn open(&self) -> impl Future<Output = Result<Session, SourceError>> + use<> {
        Session::open(
            self.settings.clone(),
            self.status.clone(),
            self.consumer.clone(),
            self.window,
        )
    }

    /// The session is over, and with it every receipt of it.
    fn ended(&mut self, error: Option<SourceError>) {
        if let State::Up(session) = std::mem::replace(&mut self.link, State::Down)
            && session.since.elapsed() >= WELL_AFTER
        {
            self.retry = retry();
        }
        self.lost
            .extend(self.outstanding.drain().map(|(receipt, _)| receipt));
        self.lost.sort_unstable();
        if let Some(error) = error {
            tracing::warn!(queue = %self.settings.queue, lost = self.lost.len(), %error, "connection to RabbitMQ lost, opening it anew");
        }
    }

    /// Cancels the consumer and gives back what it brought and nobody took.
    async fn give_back(&mut self) {
        let State::Up(session) = &mut self.link else {
            // Not to subscribe while nobody wants anything.
            self.link = State::Down;
            return;
        };
        let (done, cancelled) = oneshot::channel();
        session.order(Order::Cancel(done));
        // An error means that the session has ended; the next `receive` says what that lost.
        let _ = cancelled.await;
        let mut tags = Vec::new();
        while let Ok(arrival) = session.arrivals.try_recv() {
            tags.push(arrival.tag);
        }
        session.order(Order::GiveBack(tags));
    }

    fn hand_out(&mut self, first: Arrival, max: usize) -> Incoming {
        let mut deliveries = vec![self.delivery(first)];
        while deliveries.len() < max
            && let State::Up(session) = &mut self.link
            && let Ok(arrival) = session.arrivals.try_recv()
        {
            deliveries.push(self.delivery(arrival));
        }
        Incoming::Deliveries(deliveries)
    }

    fn delivery(&mut self, arrival: Arrival) -> Delivery {
        self.last_receipt += 1;
        let receipt = Receipt(self.last_receipt);
        self.outstanding.insert(receipt, arrival.tag);
        Delivery::new(receipt, arrival.event).with_redelivery(arrival.redelivery)
    }
}

/// Without end: a broker may be down for hours.
fn retry() -> ExponentialBackoff {
    ExponentialBuilder::default()
        .with_min_delay(FIRST_RETRY)
        .with_max_delay(SLOWEST_RETRY)
        .with_factor(2.0)
        .with_jitter()
        .without_max_times()
        .build()
}

#[async_trait]
impl Source for RabbitMq {
    async fn start(&mut self, plan: &Plan) -> Result<(), SourceError> {
        self.consumer.clone_from(&plan.consumer);
        self.window = plan.window;
        let started = self.check_and_open(plan).await;
        if let Err(error) = &started {
            self.status.down(error.to_string());
        }
        started
    }

    async fn receive(&mut self, max: usize) -> Result<Incoming, SourceError> {
        loop {
            if !self.lost.is_empty() {
                return Ok(Incoming::Lost(std::mem::take(&mut self.lost)));
            }
            match &mut self.link {
                State::Down if self.stopping != Stopping::No => return Ok(Incoming::Closed),
                // A pause wants no subscription, and a session begins with one.
                State::Down if self.paused && max == 0 => std::future::pending().await,
                State::Down => {
                    self.paused = false;
                    self.link = self.reopen();
                }
                State::Opening(opening) => {
                    let opened = opening.await.unwrap_or_else(|e| Err(SourceError::broken(e)));
                    self.link = State::Down;
                    match opened {
                        Ok(session) => {
                            tracing::info!(queue = %self.settings.queue, "consuming from RabbitMQ again");
                            self.link = State::Up(session);
                        }
                        Err(error) => {
                            self.status.down(error.to_string());
                            if error.is_fatal() {
                                return Err(error);
                            }
                            tracing::debug!(queue = %self.settings.queue, %error, "RabbitMQ is still away");
                        }
                    }
                }
                State::Up(session) => {
                    let stopping = self.stopping != Stopping::No;
                    if stopping && self.outstanding.is_empty() && self.stopping == Stopping::Yes {
                        session.order(Order::Finish);
                        self.stopping = Stopping::Finishing;
                    }
                    if self.paused && !stopping && max > 0 {
                        session.order(Order::Consume);
                        self.paused = false;
                    }
                    tokio::select! {
                        biased;
                        ended = &mut session.ended => {
                            let error = ended.map_or_else(|e| Some(SourceError::broken(e)), Result::err);
                            self.ended(error);
                        }
                        Some(arrival) = session.arrivals.recv(), if !stopping && max > 0 => {
                            return Ok(self.hand_out(arrival, max));
                        }
                    }
                }
            }
        }
    }

    async fn settle(&mut self, settlements: Vec<Settlement>) -> Result<(), SourceError> {
        let verdicts: Vec<_> = settlements
            .into_iter()
            // A receipt that is not there was lost or settled; either way there is nothing to tell.
            .filter_map(|s| self.outstanding.remove(&s.receipt).map(|tag| (tag, s.verdict)))
            .collect();
        if let State::Up(session) = &self.link
            && !verdicts.is_empty()
        {
            session.order(Order::Settle(verdicts));
        }
        Ok(())
    }

    async fn pause(&mut self) -> Result<(), SourceError> {
        if let State::Opening(_) = self.link {
            // It would subscribe as soon as it is open.
            self.link = State::Down;
        }
        self.give_back().await;
        self.paused = true;
        Ok(())
    }

    async fn stop(&mut self) -> Result<(), SourceError> {
        self.stopping = Stopping::Yes;
        self.give_back().await;
        Ok(())
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::of(SYSTEM);
        // Several consumers of one queue, of which each has some messages of a key, keep no order.
        capabilities.ordered = self.settings.single_active_consumer;
        capabilities.marks_redelivery = true;
        capabilities.counts_deliveries = self.counts_deliveries;
        capabilities.native_dead_letters = self.native_dead_letters;
        capabilities
    }

    fn health(&self) -> SourceHealth {
        self.status.health()
    }
}

impl fmt::Debug for RabbitMq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitMq")
            .field("broker", &self.settings.access.broker)
            .field("queue", &self.settings.queue)
            .field("outstanding", &self.outstanding.len())
            .field("health", &self.status.health())
            .finish_non_exhaustive()
    }
}
