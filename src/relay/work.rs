//! What the relay has under way. The loop in `run.rs` says when each part of it has its turn; `table.rs` reads and
//! marks, `sending.rs` publishes.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::flight::Landed;
use super::hand::Hand;
use super::health::RelayHealth;
use super::marks::Marks;
use super::outlet::Outlet;
use super::pace::Pace;
use super::reading::Reading;
use super::settings::Settings;
use super::tenure::Tenure;
use crate::store::{DueRow, HeldLane, LANES, Owner, Relaying, StoreError, UnreadableRow};
use crate::telemetry;

/// How often the loop says that it is alive and looks at its publishers.
const TICK: Duration = Duration::from_secs(1);

/// How long a stop takes at most for each of its last steps.
const FLUSH: Duration = Duration::from_secs(5);

/// How long rows for a publisher that is not there are left alone.
pub(super) const ABSENT: Duration = Duration::from_secs(60);

/// What does not change while a relay runs.
pub(crate) struct Shared<S> {
    pub(crate) store: S,
    pub(crate) name: Arc<str>,
    pub(crate) owner: Owner,
    pub(crate) settings: Settings,
    pub(crate) health: Arc<RelayHealth>,
}

/// Everything that a relay has under way.
pub(crate) struct Work<S> {
    pub(super) shared: Arc<Shared<S>>,
    pub(super) tenure: Tenure,
    pub(super) hand: Hand,
    pub(super) marks: Marks,
    pub(super) reading: Reading,
    /// Why the last read has failed.
    pub(super) unread: Option<String>,
    pub(super) outlets: Vec<Outlet>,
    /// Destinations that failed as a whole and have not worked since.
    pub(super) destinations: HashMap<String, Pace>,
    /// Publishers that rows name and nobody gave, and until when their rows are left alone.
    pub(super) absent: HashMap<String, Instant>,
    pub(crate) flights: JoinSet<Landed>,
    /// Renews the lanes, beside everything else.
    pub(crate) renewal: Option<BoxFuture<'static, Renewed>>,
    /// Marks what was confirmed, beside a read; or what was refused, and then nothing is read.
    pub(crate) mark: Option<BoxFuture<'static, Marked>>,
    pub(crate) read: Option<BoxFuture<'static, Found>>,
    next_tick: Instant,
    /// Until when a stop waits for what is on its way.
    pub(super) stopping: Option<Instant>,
}

/// The answer to a renewal, and when it was asked.
pub(crate) struct Renewed {
    began: Instant,
    held: Result<Vec<HeldLane>, StoreError>,
}

/// The answer to a mark.
pub(crate) enum Marked {
    Sent(Result<(), StoreError>),
    Refused(Result<Vec<i64>, StoreError>),
}

/// The answer to a read.
pub(crate) struct Found {
    pub(super) read: Read,
    pub(super) rows: Result<Vec<Result<DueRow, UnreadableRow>>, StoreError>,
}

/// What was asked for.
pub(crate) struct Read {
    pub(super) lanes: Vec<HeldLane>,
    /// Rows of each lane.
    pub(super) limit: usize,
    pub(super) bytes: usize,
    /// How many rows had been forgotten until then.
    pub(super) dropped: u64,
    pub(super) began: Instant,
}

impl<S: Relaying> Work<S> {
    pub(crate) fn new(shared: Arc<Shared<S>>, outlets: Vec<Outlet>) -> Self {
        let (now, settings) = (Instant::now(), &shared.settings);
        Self {
            tenure: Tenure::new(settings.lease, now),
            hand: Hand::new(outlets.len()),
            marks: Marks::default(),
            reading: Reading::new(settings.poll),
            unread: None,
            outlets,
            destinations: HashMap::new(),
            absent: HashMap::new(),
            flights: JoinSet::new(),
            renewal: None,
            mark: None,
            read: None,
            next_tick: now,
            stopping: None,
            shared,
        }
    }

    /// Begins what may begin now.
    pub(crate) fn begin(&mut self) {
        let now = Instant::now();
        self.shared.health.beat();
        if self.next_tick <= now {
            self.next_tick = now + TICK;
            self.report();
        }
        if self.stopping.is_some_and(|deadline| deadline <= now) {
            // They may have arrived or not: their rows go out once more.
            self.flights.abort_all();
        }
        self.renew(now);
        self.publish(now);
        self.mark_and_read(now);
    }

    /// When something is to begin that nothing else tells of.
    pub(crate) fn next_time(&self, now: Instant) -> Instant {
        let mut next = self.next_tick;
        if self.renewal.is_none() {
            next = next.min(self.tenure.renew_at());
        }
        next = next.min(self.mark_at(now).unwrap_or(next));
        if self.read.is_none() {
            next = next.min(self.read_at(now).unwrap_or(next));
            let pauses = self.pauses().into_iter().filter(|end| *end > now);
            next = pauses.fold(next, Instant::min);
        }
        match self.stopping {
            Some(deadline) if deadline > now => next.min(deadline),
            _ => next,
        }
    }

    fn renew(&mut self, now: Instant) {
        if self.renewal.is_some() || self.tenure.renew_at() > now {
            return;
        }
        self.tenure.renewing(now);
        let shared = self.shared.clone();
        self.renewal = Some(Box::pin(async move {
            let Settings { lease, .. } = shared.settings;
            let held = shared.store.hold_lanes(&shared.name, shared.owner, lease).await;
            Renewed { began: now, held }
        }));
    }

    pub(crate) fn renewed(&mut self, Renewed { began, held }: Renewed) {
        let held = match held {
            Ok(held) => held,
            Err(error) => {
                tracing::debug!(relay = &*self.shared.name, %error, "lanes could not be renewed");
                return self.tenure.not_renewed(Instant::now());
            }
        };
        let changes = self.tenure.renewed(began, &held);
        let signal = self.shared.store.signal(&self.shared.name);
        signal.has_all_lanes(held.len() == usize::from(LANES));
        telemetry::lanes(&self.shared.name, held.len(), changes.lost.len() + changes.gained);
        if changes.gained > 0 {
            self.reading.wake();
        }
        if !changes.lost.is_empty() || changes.gained > 0 {
            let (lost, gained) = (changes.lost.len(), changes.gained);
            tracing::info!(
                relay = &*self.shared.name,
                lanes = held.len(),
                lost,
                gained,
                "lanes changed hands"
            );
        }
        self.report();
        for lane in &changes.lost {
            self.reading.has_more(*lane, false);
        }
        // Another instance reads them by now. What is on its way ends, and may be marked.
        for id in self.hand.forget(|row| changes.lost.contains(&row.lane.lane)) {
            self.outlets.iter_mut().for_each(|outlet| outlet.clear(id));
        }
    }

    /// There is something to publish, says who wrote it.
    pub(crate) fn wake(&mut self) {
        self.reading.wake();
    }

    /// Says how it is doing.
    fn report(&self) {
        let mut problems = Vec::new();
        let now = Instant::now();
        if self.marks.is_failing() {
            let unmarked = self.marks.len();
            problems.push(format!(
                "{unmarked} published events could not be marked; nothing is published"
            ));
        }
        if let Some(error) = &self.unread {
            problems.push(format!("outgoing events cannot be read: {error}"));
        }
        match self.tenure.good_until() {
            None => problems.push("it has not been given lanes yet".to_owned()),
            Some(until) if until <= now => {
                problems.push("its lanes could not be renewed in time; nothing is published".to_owned());
            }
            Some(_) => {}
        }
        for outlet in &self.outlets {
            let health = outlet.publisher.health();
            let closed = outlet.pace.closed_because();
            if let Some(reason) = closed.map(str::to_owned).or(health.problem) {
                problems.push(format!("publisher {}: {reason}", outlet.name));
            }
        }
        let mut paused: Vec<_> = self.destinations.iter().collect();
        paused.sort_unstable_by_key(|(to, _)| *to);
        for (to, pace) in paused {
            let reason = pace.closed_because().unwrap_or_default();
            problems.push(format!("destination {to} is paused: {reason}"));
        }
        let mut absent: Vec<_> = self.absent.keys().collect();
        absent.sort_unstable();
        for name in absent {
            problems.push(format!(
                "no publisher {name} was given to it, and events wait for one"
            ));
        }
        self.shared.health.set_problems(problems);
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.is_some()
    }

    pub(crate) fn stop(&mut self) {
        self.stopping = Some(Instant::now() + self.shared.settings.stop_timeout);
    }

    /// Whether a stop has done what it can.
    pub(crate) fn is_over(&self) -> bool {
        let Some(deadline) = self.stopping else {
            return false;
        };
        let done = self.flights.is_empty() && self.marks.is_empty() && self.read.is_none();
        done || Instant::now() >= deadline + FLUSH
    }

    /// Gives up the lanes, so that others need not wait for the end of the lease, and stops the publishers.
    pub(crate) async fn leave(mut self) {
        let relay = &*self.shared.name;
        self.flights.shutdown().await;
        if !self.marks.is_empty() {
            tracing::warn!(
                relay,
                rows = self.marks.len(),
                "published events could not be marked in time; they go out again"
            );
        }
        // It might take lanes after they were given up.
        if let Some(renewal) = self.renewal.take() {
            let _ = timeout(self.shared.settings.lease, renewal).await;
        }
        self.shared.store.signal(relay).has_all_lanes(false);
        let given_up = timeout(FLUSH, self.shared.store.give_up_lanes(relay, self.shared.owner));
        if !matches!(given_up.await, Ok(Ok(()))) {
            tracing::debug!(
                relay,
                "lanes could not be given up; they are free when their lease is over"
            );
        }
        let stops = self.outlets.iter().map(|outlet| async {
            let _ = timeout(outlet.publisher.patience(), outlet.publisher.stop()).await;
        });
        join_all(stops).await;
        telemetry::lanes(relay, 0, 0);
    }
}
