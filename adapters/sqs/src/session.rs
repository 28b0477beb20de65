//! The calls: a task that has messages received, deleted, renewed and given back.
//!
//! What is to be called and what the answers mean is decided in the ledger; this task only carries it
//! out. Each call has a task and a time limit of its own. The source shares the [`Desk`] with it and
//! never waits for a call, so that nothing is lost when a caller drops a future: what a call brings is
//! on the desk before anybody could stop waiting for it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use aws_sdk_sqs::types::QueueAttributeName;
use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use onlyonce::source::SourceError;
use tokio::sync::Notify;
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, sleep_until};
use tokio_util::task::AbortOnDropHandle;

use crate::attempt::Attempts;
use crate::config::Settings;
use crate::connect::within;
use crate::demand::Demand;
use crate::request::{Kind, Polled, Settled, poll, settle};
use crate::settle::{BATCH, Ledger};
use crate::status::Status;

const FIRST_RETRY: Duration = Duration::from_millis(100);
const SLOWEST_RETRY: Duration = Duration::from_secs(10);
/// Not more often than this is an empty queue asked, also if it answers at once.
const EMPTY_PACE: Duration = Duration::from_millis(500);
/// How long a deletion waits for others.
const LINGER: Duration = Duration::from_millis(20);
/// How long after a call a little room waits to become more.
const LITTLE_ROOM: Duration = Duration::from_millis(50);
/// How many calls with settlements may be under way at once.
const SETTLING: usize = 8;
/// How long a stop waits for the calls under way. The consumer waits for ten seconds.
const LAST_POLLS: Duration = Duration::from_secs(8);
const BACKLOG_EVERY: Duration = Duration::from_secs(30);

/// What the source and its session share. Nothing is waited for under this lock.
pub(crate) struct Desk {
    pub(crate) ledger: Ledger,
    pub(crate) demand: Demand,
    /// Nothing is taken: paused, or stopped for good.
    pub(crate) closed: bool,
    pub(crate) stopped: Option<Instant>,
    /// Why receiving ended until the source is asked again.
    pub(crate) broken: Option<SourceError>,
}

impl Desk {
    fn new(settings: &Settings, window: usize) -> Self {
        Self {
            ledger: Ledger::new(settings.visibility_timeout),
            demand: Demand::new(settings.polls, window),
            closed: false,
            stopped: None,
            broken: None,
        }
    }

    fn has_news(&self) -> bool {
        self.ledger.waiting() > 0 || self.ledger.has_lost() || self.broken.is_some() || self.is_finished()
    }

    /// Whether the session would call for messages now, or soon, if it looked.
    pub(crate) fn wants_messages(&self) -> bool {
        !self.closed && self.broken.is_none() && self.demand.wants(self.ledger.waiting())
    }

    /// Stopped, and there is nothing to be told any more.
    pub(crate) fn is_finished(&self) -> bool {
        self.stopped.is_some() && self.demand.under_way() == 0 && self.ledger.is_empty()
    }
}

/// The desk and the two bells on it.
pub(crate) struct Shared {
    desk: Mutex<Desk>,
    /// Rung for the session.
    pub(crate) to_do: Notify,
    /// Rung for the source.
    pub(crate) news: Notify,
}

impl Shared {
    pub(crate) fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The source's end of it. Dropping it drops all calls.
pub(crate) struct Session {
    pub(crate) shared: Arc<Shared>,
    pub(crate) ended: AbortOnDropHandle<()>,
}

impl Session {
    pub(crate) fn start(
        settings: Arc<Settings>,
        status: Arc<Status>,
        window: usize,
        watch_backlog: bool,
    ) -> Self {
        let shared = Arc::new(Shared {
            desk: Mutex::new(Desk::new(&settings, window)),
            to_do: Notify::new(),
            news: Notify::new(),
        });
        let run = Run {
            _backlog: watch_backlog.then(|| watch(settings.clone(), status.clone())),
            attempts: Attempts::new(settings.fifo, settings.visibility_timeout),
            settings,
            status,
            shared: shared.clone(),
            polls: JoinSet::new(),
            settling: JoinSet::new(),
            retry: retry(),
            failing: false,
            poll_again: None,
            little_from: Instant::now(),
            linger: None,
            acks_lost: 0,
        };
        Self {
            shared,
            ended: AbortOnDropHandle::new(tokio::spawn(run.run())),
        }
    }
}

struct Run {
    settings: Arc<Settings>,
    status: Arc<Status>,
    shared: Arc<Shared>,
    polls: JoinSet<Polled>,
    attempts: Attempts,
    settling: JoinSet<Settled>,
    retry: ExponentialBackoff,
    failing: bool,
    /// Until then nothing is received, as the last call failed or brought nothing.
    poll_again: Option<Instant>,
    /// From then on a little room is worth a call.
    little_from: Instant,
    /// When deletions that wait for company go without.
    linger: Option<Instant>,
    acks_lost: u64,
    _backlog: Option<AbortOnDropHandle<()>>,
}

impl Run {
    /// Runs until it is dropped with the source.
    async fn run(mut self) {
        loop {
            let wake_at = self.call_what_is_due();
            tokio::select! {
                biased;
                Some(settled) = self.settling.join_next(), if !self.settling.is_empty() => {
                    self.note(unpanicked(settled));
                }
                Some(polled) = self.polls.join_next(), if !self.polls.is_empty() => {
                    self.arrive(unpanicked(polled));
                }
                () = self.shared.to_do.notified() => {}
                () = sleep_until_some(wake_at) => {}
            }
        }
    }

    /// Starts every call whose time has come, and says when the next one's does.
    fn call_what_is_due(&mut self) -> Option<Instant> {
        let shared = self.shared.clone();
        let mut desk = shared.desk();
        let now = Instant::now();
        desk.ledger.tick(now);
        self.give_up_polls(&mut desk, now);
        self.settle(&mut desk, now);
        self.poll(&mut desk, now);
        self.report_lost_acks(&desk);
        if desk.has_news() {
            shared.news.notify_one();
        }
        let little = desk
            .demand
            .is_little(desk.ledger.waiting())
            .then_some(self.little_from)
            .filter(|&at| at > now);
        let last_polls = desk
            .stopped
            .filter(|_| desk.demand.under_way() > 0)
            .map(|at| at + LAST_POLLS);
        [
            desk.ledger.wake_at(),
            self.poll_again.filter(|&at| at > now),
            self.linger,
            little,
            last_polls,
        ]
        .into_iter()
        .flatten()
        .min()
    }

    fn settle(&mut self, desk: &mut Desk, now: Instant) {
        loop {
            let entries = desk.ledger.next_changes(now);
            if entries.is_empty() {
                break;
            }
            self.settling
                .spawn(settle(self.settings.clone(), Kind::Change, entries));
        }
        // A FIFO queue hands out no more of a group until what it has is deleted, and a stop waits for all.
        let urgent = desk.closed || (self.settings.fifo && self.settling.is_empty());
        let waited = urgent || self.linger.is_some_and(|at| at <= now);
        while self.settling.len() < SETTLING && (desk.ledger.deletions() >= BATCH || waited) {
            let entries = desk.ledger.next_deletions();
            if entries.is_empty() {
                break;
            }
            self.settling
                .spawn(settle(self.settings.clone(), Kind::Delete, entries));
        }
        self.linger = match desk.ledger.deletions() {
            0 => None,
            // All calls are busy: the next answer looks again.
            _ if self.settling.len() >= SETTLING => None,
            _ => self.linger.filter(|&at| at > now).or(Some(now + LINGER)),
        };
    }

    fn poll(&mut self, desk: &mut Desk, now: Instant) {
        if desk.closed || desk.broken.is_some() || self.poll_again.is_some_and(|at| at > now) {
            return;
        }
        while self
            .attempts
            .next(now)
            .is_some_and(|attempt| desk.demand.again(attempt.ask))
            && let Some(attempt) = self.attempts.take()
        {
            self.polls.spawn(poll(self.settings.clone(), attempt));
        }
        let little = self.little_from <= now || desk.ledger.outstanding() == 0;
        while let Some(ask) = desk.demand.next(desk.ledger.waiting(), little) {
            let attempt = self.attempts.begin(now, ask);
            self.polls.spawn(poll(self.settings.clone(), attempt));
            self.little_from = now + LITTLE_ROOM;
        }
    }

    /// What a call still brings after this comes again when its visibility is over.
    fn give_up_polls(&mut self, desk: &mut Desk, now: Instant) {
        if desk.stopped.is_some_and(|at| at + LAST_POLLS <= now) && !self.polls.is_empty() {
            tracing::debug!(queue = %self.settings.name, calls = self.polls.len(), "calls for messages were abandoned at the stop");
            self.polls = JoinSet::new();
            desk.demand = Demand::new(self.settings.polls, 1);
        }
    }

    fn arrive(&mut self, polled: Polled) {
        let mut desk = self.shared.desk();
        let brought = polled.messages.as_ref().map_or(0, Vec::len);
        desk.demand.answered(polled.attempt.ask, brought);
        match polled.messages {
            Ok(arrivals) => {
                if std::mem::take(&mut self.failing) {
                    self.retry = retry();
                    tracing::info!(queue = %self.settings.name, "SQS answers again");
                }
                self.poll_again = (brought == 0).then_some(polled.sent + EMPTY_PACE);
                self.status.up(None);
                desk.ledger.arrived(polled.sent, arrivals);
                if desk.closed {
                    desk.ledger.give_back_waiting(Instant::now());
                }
            }
            Err(trouble) => {
                if trouble.unanswered {
                    self.attempts.unanswered(polled.attempt);
                }
                let error = trouble.explain(&self.settings, "receive from");
                if !std::mem::replace(&mut self.failing, true) {
                    tracing::warn!(queue = %self.settings.name, %error, "SQS gives no messages, trying again");
                }
                self.status.down(error.to_string());
                self.poll_again = Some(Instant::now() + self.retry.next().unwrap_or(SLOWEST_RETRY));
                if error.is_fatal() && !desk.closed {
                    desk.ledger.lose_all();
                    desk.demand.room(0);
                    desk.broken = Some(error);
                }
            }
        }
    }

    fn note(&mut self, settled: Settled) {
        if let Some(trouble) = &settled.trouble {
            let error = trouble.explain(&self.settings, "settle messages of");
            tracing::debug!(queue = %self.settings.name, %error, "a call failed and is repeated");
        }
        let mut desk = self.shared.desk();
        let now = Instant::now();
        for (entry, answer) in settled.answers {
            match settled.kind {
                Kind::Delete => desk.ledger.deleted(now, entry.number, answer),
                Kind::Change => desk.ledger.changed(now, settled.sent, &entry, answer),
            }
        }
    }

    fn report_lost_acks(&mut self, desk: &Desk) {
        let acks_lost = desk.ledger.acks_lost();
        if acks_lost > self.acks_lost {
            // Harmless: those messages come again, and their claims say that they were done.
            tracing::debug!(queue = %self.settings.name, acks_lost = acks_lost - self.acks_lost, "deletions were not confirmed");
            self.acks_lost = acks_lost;
        }
    }
}

/// Keeps the number of waiting messages fresh.
fn watch(settings: Arc<Settings>, status: Arc<Status>) -> AbortOnDropHandle<()> {
    AbortOnDropHandle::new(tokio::spawn(async move {
        loop {
            tokio::time::sleep(BACKLOG_EVERY).await;
            let call = settings
                .client
                .get_queue_attributes()
                .queue_url(&settings.url)
                .attribute_names(QueueAttributeName::ApproximateNumberOfMessages)
                .send();
            let backlog = within(settings.call_timeout, call).await.ok().and_then(|answer| {
                let attributes = answer.attributes?;
                attributes
                    .get(&QueueAttributeName::ApproximateNumberOfMessages)?
                    .parse()
                    .ok()
            });
            status.backlog(backlog);
        }
    }))
}

/// No call is cancelled while its answer is waited for. One that panics ends the session, which the
/// source notices.
fn unpanicked<T>(ended: Result<T, JoinError>) -> T {
    ended.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
}

/// Without end: SQS may be away for hours.
fn retry() -> ExponentialBackoff {
    ExponentialBuilder::default()
        .with_min_delay(FIRST_RETRY)
        .with_max_delay(SLOWEST_RETRY)
        .with_factor(2.0)
        .with_jitter()
        .without_max_times()
        .build()
}

async fn sleep_until_some(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}
