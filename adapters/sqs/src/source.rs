//! The source: what the consumer asks for, on a desk that it shares with its session.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use aws_sdk_sqs::Client;
use onlyonce::source::{Capabilities, Incoming, Plan, Settlement, Source, SourceError, SourceHealth};
use tokio::time::Instant;

use crate::check;
use crate::config::{ConfigError, Settings, SqsBuilder};
use crate::identity::{SYSTEM, WEAK_IDS};
use crate::session::{Desk, Session};
use crate::settle::BATCH;
use crate::status::Status;

/// An SQS queue as a source of deliveries.
///
/// Made by [`Sqs::queue`]. It calls SQS for as long as it exists and says in its
/// [health](Source::health) when SQS does not answer; see the [crate's documentation](crate) for what it
/// promises.
pub struct Sqs {
    settings: Arc<Settings>,
    status: Arc<Status>,
    session: Option<Session>,
    native_dead_letters: bool,
}

impl SqsBuilder {
    /// Checks the settings together and makes the source. Nothing is called yet.
    ///
    /// # Errors
    ///
    /// All settings that cannot work, in one error.
    pub fn build(self) -> Result<Sqs, ConfigError> {
        Ok(Sqs::new(Arc::new(self.settings()?)))
    }
}

impl Sqs {
    /// Consumes the queue at `url`, such as `https://sqs.eu-central-1.amazonaws.com/123456789012/orders`.
    ///
    /// The queue has to exist. The client is made by `aws-config`, or by [`Connection`](crate::Connection)
    /// from plain keys.
    pub fn queue(client: Client, url: impl Into<String>) -> SqsBuilder {
        SqsBuilder::new(client, url)
    }

    fn new(settings: Arc<Settings>) -> Self {
        Self {
            settings,
            status: Arc::new(Status::new()),
            session: None,
            native_dead_letters: false,
        }
    }

    async fn check_and_open(&mut self, plan: &Plan) -> Result<(), SourceError> {
        let known = check::at_start(&self.settings, plan).await?;
        self.native_dead_letters = known.native_dead_letters;
        self.session = Some(Session::start(
            self.settings.clone(),
            self.status.clone(),
            plan.window,
            known.attributes,
        ));
        self.status.up(known.backlog);
        tracing::info!(queue = %self.settings.name, url = %self.settings.url, "consuming from SQS");
        Ok(())
    }

    /// Changes something on the desk, and has the session look at it.
    fn change(&mut self, change: impl FnOnce(&mut Desk)) {
        if let Some(session) = &self.session {
            change(&mut session.shared.desk());
            session.shared.to_do.notify_one();
        }
    }
}

/// What there is to say now. `None`: nothing yet.
fn look(desk: &mut Desk, max: usize) -> Option<Result<Incoming, SourceError>> {
    if let Some(error) = desk.broken.take() {
        return Some(Err(error));
    }
    // The session looks at the clock, too, but what ran out must not be handed out before it does.
    let now = Instant::now();
    desk.ledger.tick(now);
    let deliveries = if desk.closed || desk.ledger.has_lost() {
        Vec::new()
    } else {
        desk.ledger.hand_out(max)
    };
    if !deliveries.is_empty() {
        desk.demand.took(deliveries.len());
        return Some(Ok(Incoming::Deliveries(deliveries)));
    }
    let lost = desk.ledger.take_lost();
    if !lost.is_empty() {
        return Some(Ok(Incoming::Lost(lost)));
    }
    desk.is_finished().then_some(Ok(Incoming::Closed))
}

#[async_trait]
impl Source for Sqs {
    async fn start(&mut self, plan: &Plan) -> Result<(), SourceError> {
        let started = self.check_and_open(plan).await;
        if let Err(error) = &started {
            self.status.down(error.to_string());
        }
        started
    }

    async fn receive(&mut self, max: usize) -> Result<Incoming, SourceError> {
        let Some(session) = &mut self.session else {
            return Ok(Incoming::Closed); // It was never started, or stopped before it was.
        };
        {
            let mut desk = session.shared.desk();
            if desk.stopped.is_none() {
                desk.demand.room(max);
                desk.closed &= max == 0;
            }
            // A call under way will look by itself. To wake the session for each event costs more than most
            // of what it would do.
            if desk.wants_messages() || desk.stopped.is_some() {
                session.shared.to_do.notify_one();
            }
        }
        loop {
            let shared = session.shared.clone();
            if let Some(incoming) = look(&mut shared.desk(), max) {
                return incoming;
            }
            tokio::select! {
                () = shared.news.notified() => {}
                ended = &mut session.ended => {
                    let why = ended.err().map_or_else(String::new, |e| e.to_string());
                    self.session = None;
                    return Err(SourceError::broken(format_args!("the SQS session ended by itself: {why}")));
                }
            }
        }
    }

    async fn settle(&mut self, settlements: Vec<Settlement>) -> Result<(), SourceError> {
        let Some(session) = &self.session else {
            return Ok(());
        };
        let mut desk = session.shared.desk();
        let waited = desk.ledger.deletions() > 0;
        desk.ledger.settle(Instant::now(), settlements);
        // A few more deletions go with those that wait for company already.
        let company = waited && !self.settings.fifo && !desk.closed;
        if !company || desk.ledger.fills_a_call() {
            session.shared.to_do.notify_one();
        }
        Ok(())
    }

    async fn pause(&mut self) -> Result<(), SourceError> {
        self.change(|desk| {
            desk.closed = true;
            desk.demand.room(0);
            desk.ledger.give_back_waiting(Instant::now());
        });
        Ok(())
    }

    async fn stop(&mut self) -> Result<(), SourceError> {
        self.change(|desk| {
            let now = Instant::now();
            desk.closed = true;
            desk.stopped.get_or_insert(now);
            desk.demand.room(0);
            desk.ledger.give_back_waiting(now);
        });
        Ok(())
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::of(SYSTEM);
        capabilities.ordered = self.settings.fifo;
        capabilities.marks_redelivery = true;
        capabilities.counts_deliveries = true;
        capabilities.delays_release = true;
        capabilities.native_dead_letters = self.native_dead_letters;
        capabilities.per_call = BATCH;
        capabilities.weak_ids = Some(WEAK_IDS);
        capabilities
    }

    fn health(&self) -> SourceHealth {
        self.status.health()
    }
}

impl fmt::Debug for Sqs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let outstanding = self
            .session
            .as_ref()
            .map(|session| session.shared.desk().ledger.outstanding());
        f.debug_struct("Sqs")
            .field("queue", &self.settings.url)
            .field("name", &self.settings.name)
            .field("outstanding", &outstanding)
            .field("health", &self.status.health())
            .finish_non_exhaustive()
    }
}
