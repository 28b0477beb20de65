//! The source: one session after the other, each opened anew when the last one ended.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use hashbrown::HashMap;
use onlyonce::source::{
    Capabilities, Delivery, Incoming, Plan, Receipt, Settle, Settlement, Source, SourceError, SourceHealth,
};
use tokio::time::{Instant, sleep_until};
use tokio_util::task::AbortOnDropHandle;

use crate::buffer::{Buffer, Record};
use crate::check;
use crate::config::{ConfigError, KafkaBuilder, Settings};
use crate::identity::{SYSTEM, WEAK_IDS};
use crate::session::{News, Order, Session};
use crate::settle::{Generation, Ticket};
use crate::status::Status;

const FIRST_RETRY: Duration = Duration::from_millis(100);
const SLOWEST_RETRY: Duration = Duration::from_secs(10);
/// A session that lived this long shows that the brokers are well; after it, retries start fast again.
const WELL_AFTER: Duration = SLOWEST_RETRY;
/// How long the last commit and the goodbye to the group may take.
const FINISH_LIMIT: Duration = Duration::from_secs(8);

/// Kafka topics, read as a member of a consumer group, as a source of deliveries.
///
/// Made by [`Kafka::group`]. It owns one client, makes it anew for as long as it takes when it is
/// lost, and says so in its [health](Source::health); see the [crate's documentation](crate) for what
/// it promises.
pub struct Kafka {
    settings: Arc<Settings>,
    status: Arc<Status>,
    plan: Plan,
    link: State,
    buffer: Buffer,
    /// What was handed out and is not settled, with what is needed to hand it out again.
    outstanding: HashMap<Receipt, (Ticket, Record)>,
    /// What was handed out of assignments that are ending. It may still be told as done, and by it
    /// the session knows when nothing of them runs any more.
    leaving: HashMap<Receipt, Ticket>,
    /// Receipts that are void, to be reported before anything else.
    lost: Vec<Receipt>,
    last_receipt: u64,
    retry: ExponentialBackoff,
    /// Nothing is fetched until somebody asks for deliveries.
    paused: bool,
    stopping: Stopping,
}

enum State {
    /// There is no client.
    Down,
    /// A task makes one; a caller that stops waiting for it loses nothing.
    Opening(AbortOnDropHandle<Result<Session, SourceError>>),
    Up(Session),
}

#[derive(Debug, PartialEq, Eq, Clone, Copy)]
enum Stopping {
    No,
    /// No more is taken; what was handed out can be settled.
    Yes,
    /// Everything is settled and the session was told to finish, within this time.
    Finishing(Instant),
}

impl KafkaBuilder {
    /// Checks the settings together and makes the source. Nothing is connected yet.
    ///
    /// # Errors
    ///
    /// All settings that cannot work, in one error.
    pub fn build(self) -> Result<Kafka, ConfigError> {
        Ok(Kafka::new(Arc::new(self.settings()?)))
    }
}

impl Kafka {
    /// A member of this consumer group at these brokers, such as `kafka-1:9092,kafka-2:9092`. Say which
    /// topics by [`topic`](KafkaBuilder::topic) or [`topic_pattern`](KafkaBuilder::topic_pattern).
    ///
    /// The group is the name under which Kafka keeps how far it was read; processes of one group share
    /// the partitions. Use the consumer's name unless something else has that group already.
    pub fn group(brokers: impl Into<String>, group: impl Into<String>) -> KafkaBuilder {
        KafkaBuilder::new(brokers, group)
    }

    pub(crate) fn new(settings: Arc<Settings>) -> Self {
        Self {
            settings,
            status: Arc::new(Status::new()),
            plan: Plan::for_window("", 1),
            link: State::Down,
            buffer: Buffer::default(),
            outstanding: HashMap::new(),
            leaving: HashMap::new(),
            lost: Vec::new(),
            last_receipt: 0,
            retry: retry(),
            paused: false,
            stopping: Stopping::No,
        }
    }

    /// How often the client was made anew because nothing came although records waited.
    pub fn rebuilds(&self) -> u64 {
        self.status.rebuilds()
    }

    async fn check_and_open(&mut self) -> Result<(), SourceError> {
        check::at_start(&self.settings, &self.plan).await?;
        self.link = State::Up(self.open().await?);
        tracing::info!(
            brokers = %self.settings.brokers, group = %self.settings.group, topics = ?self.settings.topics,
            "consuming from Kafka"
        );
        Ok(())
    }

    /// Starts to make a client, after a delay that grows from attempt to attempt.
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
            self.plan.clone(),
            !self.paused,
        )
    }

    fn hear(&mut self, news: News) -> Result<(), SourceError> {
        match news {
            News::Records(records) => {
                for (ticket, record) in records {
                    self.buffer.push(ticket, record);
                }
                Ok(())
            }
            News::Revoked(generations) => {
                for generation in generations {
                    self.revoke(generation);
                }
                Ok(())
            }
            News::Ended(ended) => self.ended(ended.err()),
        }
    }

    /// What was not handed out is dropped, what was is lost; the session hears when nothing of it runs.
    fn revoke(&mut self, generation: Generation) {
        let (records, bytes) = self.buffer.forget(generation);
        let State::Up(session) = &self.link else {
            return;
        };
        session.level.take(records, bytes);
        let mut runs = false;
        self.outstanding.retain(|receipt, (ticket, _)| {
            let leaves = ticket.generation == generation;
            if leaves {
                runs = true;
                self.leaving.insert(*receipt, *ticket);
                self.lost.push(*receipt);
            }
            !leaves
        });
        self.lost.sort_unstable();
        if !runs {
            session.order(Order::Drained(generation));
        }
    }

    /// The session is over, and with it every receipt of it.
    fn ended(&mut self, error: Option<SourceError>) -> Result<(), SourceError> {
        if let State::Up(session) = std::mem::replace(&mut self.link, State::Down)
            && session.since.elapsed() >= WELL_AFTER
        {
            self.retry = retry();
        }
        self.buffer = Buffer::default();
        self.leaving.clear();
        self.lost
            .extend(self.outstanding.drain().map(|(receipt, _)| receipt));
        self.lost.sort_unstable();
        let Some(error) = error else {
            return Ok(());
        };
        self.status.down(error.to_string());
        if error.is_fatal() {
            // Whoever hears of it knows that every receipt is void.
            self.lost.clear();
            return Err(error);
        }
        tracing::warn!(group = %self.settings.group, lost = self.lost.len(), %error, "Kafka client lost, making it anew");
        Ok(())
    }

    fn hand_out(&mut self, max: usize) -> Option<Incoming> {
        let State::Up(session) = &self.link else {
            return None;
        };
        let taken = self.buffer.take(max, Instant::now());
        if taken.is_empty() {
            return None;
        }
        session
            .level
            .take(taken.len(), taken.iter().map(|(_, record)| record.bytes).sum());
        let deliveries = taken
            .into_iter()
            .map(|(ticket, record)| {
                self.last_receipt += 1;
                let receipt = Receipt(self.last_receipt);
                let delivery = Delivery::new(receipt, record.event.clone());
                self.outstanding.insert(receipt, (ticket, record));
                delivery
            })
            .collect();
        Some(Incoming::Deliveries(deliveries))
    }

    /// Kafka takes nothing back: it waits here.
    fn give_back(&mut self, ticket: Ticket, record: Record, after: Option<Duration>) {
        let State::Up(session) = &self.link else {
            return;
        };
        // A stopped source hands out nothing, so that its place in the log is all there is to keep.
        if self.stopping == Stopping::No {
            session.level.add(1, record.bytes);
            self.buffer
                .give_back(ticket, record, after.unwrap_or_default(), Instant::now());
        }
    }

    /// One of an assignment that is ending does not run any more.
    fn left(&mut self, generation: Generation) {
        if let State::Up(session) = &self.link
            && !self
                .leaving
                .values()
                .any(|ticket| ticket.generation == generation)
        {
            session.order(Order::Drained(generation));
        }
    }
}

/// Without end: brokers may be down for hours.
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
impl Source for Kafka {
    async fn start(&mut self, plan: &Plan) -> Result<(), SourceError> {
        self.plan.clone_from(plan);
        let started = self.check_and_open().await;
        if let Err(error) = &started {
            self.status.down(error.to_string());
        }
        started
    }

    async fn receive(&mut self, max: usize) -> Result<Incoming, SourceError> {
        loop {
            // What has been revoked must not be handed out any more.
            while let State::Up(session) = &mut self.link
                && let Ok(news) = session.news.try_recv()
            {
                self.hear(news)?;
            }
            if !self.lost.is_empty() {
                return Ok(Incoming::Lost(std::mem::take(&mut self.lost)));
            }
            let stopping = self.stopping != Stopping::No;
            let takes = max > 0 && !stopping;
            if takes && let Some(incoming) = self.hand_out(max) {
                return Ok(incoming);
            }
            match &mut self.link {
                State::Down if stopping => return Ok(Incoming::Closed),
                State::Down => self.link = self.reopen(),
                State::Opening(opening) => {
                    let opened = opening.await.unwrap_or_else(|e| Err(SourceError::broken(e)));
                    self.link = State::Down;
                    match opened {
                        Ok(session) => {
                            session.order(Order::Flow(!self.paused));
                            self.link = State::Up(session);
                        }
                        Err(error) => {
                            self.status.down(error.to_string());
                            if error.is_fatal() {
                                return Err(error);
                            }
                            tracing::debug!(group = %self.settings.group, %error, "Kafka is still away");
                        }
                    }
                }
                State::Up(session) => {
                    if self.stopping == Stopping::Yes && self.outstanding.is_empty() {
                        session.order(Order::Finish);
                        self.stopping = Stopping::Finishing(Instant::now() + FINISH_LIMIT);
                    }
                    if self.paused && takes {
                        session.order(Order::Flow(true));
                        self.paused = false;
                    }
                    let limit = match self.stopping {
                        Stopping::Finishing(limit) => Some(limit),
                        _ => None,
                    };
                    let due = self.buffer.next_due().filter(|_| takes);
                    tokio::select! {
                        biased;
                        news = session.news.recv() => {
                            let news = news.unwrap_or_else(|| {
                                News::Ended(Err(SourceError::broken("the Kafka client's thread died")))
                            });
                            self.hear(news)?;
                        }
                        () = sleep_until_some(due) => {}
                        () = sleep_until_some(limit) => {
                            tracing::warn!(
                                group = %self.settings.group,
                                "Kafka did not confirm the last offsets in time; what they cover comes again and is found to be done"
                            );
                            return Ok(Incoming::Closed);
                        }
                    }
                }
            }
        }
    }

    async fn settle(&mut self, settlements: Vec<Settlement>) -> Result<(), SourceError> {
        let mut done = Vec::with_capacity(settlements.len());
        let mut left = Vec::new();
        for Settlement { receipt, verdict } in settlements {
            // A receipt that is in neither was lost for good, or settled: there is nothing to tell.
            if let Some((ticket, record)) = self.outstanding.remove(&receipt) {
                match verdict {
                    Settle::Ack => done.push(ticket),
                    Settle::Release { after } => self.give_back(ticket, record, after),
                }
            } else if let Some(ticket) = self.leaving.remove(&receipt) {
                left.push(ticket.generation);
                if verdict == Settle::Ack {
                    done.push(ticket);
                }
            }
        }
        if let State::Up(session) = &self.link
            && !done.is_empty()
        {
            session.order(Order::Done(done));
        }
        left.sort_unstable();
        left.dedup();
        // After what is done, so that it is stored before the partition leaves.
        left.into_iter().for_each(|generation| self.left(generation));
        Ok(())
    }

    async fn pause(&mut self) -> Result<(), SourceError> {
        // The group keeps its member: leaving it would move the partitions to processes that have the
        // same trouble. What waits here is bounded, and nobody else may have it meanwhile.
        self.paused = true;
        if let State::Up(session) = &self.link {
            session.order(Order::Flow(false));
        }
        Ok(())
    }

    async fn stop(&mut self) -> Result<(), SourceError> {
        if self.stopping == Stopping::No {
            self.stopping = Stopping::Yes;
        }
        self.buffer = Buffer::default();
        match &self.link {
            State::Up(session) => session.order(Order::Flow(false)),
            // Not to join the group for nothing.
            _ => self.link = State::Down,
        }
        Ok(())
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::of(SYSTEM);
        capabilities.ordered = true;
        capabilities.weak_ids = Some(WEAK_IDS);
        capabilities
    }

    fn health(&self) -> SourceHealth {
        self.status.health()
    }
}

async fn sleep_until_some(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

impl fmt::Debug for Kafka {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kafka")
            .field("settings", &self.settings)
            .field("outstanding", &self.outstanding.len())
            .field("health", &self.status.health())
            .finish_non_exhaustive()
    }
}
