//! The table of held events as a source, and as a durable queue of its own.
//!
//! Every consumer reads its held events through an [`InboxSource`]. With it as a consumer's only
//! source, and [`Queue`] to fill it, the framework runs with no broker at all.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use sqlx::Database;
use tokio::sync::Notify;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep, sleep_until};

use crate::delay::spread;
use crate::event::{EventKey, Identity, IdentityError, IdentityRules, RawEvent};
use crate::source::{
    Capabilities, Delivery, Incoming, Plan, Receipt, Redelivery, Settle, Settlement, Source, SourceError,
    SourceHealth,
};
use crate::store::{HeldEvent, Inbox, Lease, Parked, ParkedAs, StoreError};

/// How often the table is asked for due events when it had none, and at most how long it is left
/// alone when it does not answer.
const POLL: Duration = Duration::from_millis(500);
const POLL_MAX: Duration = Duration::from_secs(4);

/// Puts events into a consumer's inbox, to be run as soon as possible.
#[derive(Debug, Clone)]
pub struct Queue<S> {
    store: S,
    consumer: String,
    identity: IdentityRules,
}

/// What enqueuing did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Enqueued {
    /// It is in the queue.
    New,
    /// An event of this identity is in the queue, or dead, already; or, in a transaction of yours, it is
    /// processed.
    Held,
}

impl<S: Inbox> Queue<S> {
    /// The queue of this consumer.
    pub fn new(store: S, consumer: impl Into<String>) -> Self {
        Self {
            store,
            consumer: consumer.into(),
            identity: IdentityRules::auto(),
        }
    }

    /// How events are identified. Default: [`IdentityRules::auto`].
    pub fn identity(mut self, rules: IdentityRules) -> Self {
        self.identity = rules;
        self
    }

    /// Enqueues an event, durably. Repeating it is harmless: an event that is held is not added
    /// again, and one that was processed is found out when it is its turn.
    pub async fn enqueue(&self, event: RawEvent) -> Result<Enqueued, QueueError> {
        let identity = self.identity.identify(&event).map_err(QueueError::Identity)?;
        let parked = self.parked(&event, &identity);
        self.store
            .enqueue(&parked)
            .await
            .map(Enqueued::from_new)
            .map_err(QueueError::Store)
    }

    /// Enqueues an event in a transaction of yours: it is there if and only if that commits.
    pub async fn enqueue_in(
        &self,
        conn: &mut <S::Db as Database>::Connection,
        event: RawEvent,
    ) -> Result<Enqueued, QueueError> {
        let identity = self.identity.identify(&event).map_err(QueueError::Identity)?;
        let parked = self.parked(&event, &identity);
        self.store
            .enqueue_in(conn, &parked)
            .await
            .map(Enqueued::from_new)
            .map_err(QueueError::Store)
    }

    fn parked<'a>(&'a self, event: &'a RawEvent, identity: &'a Identity) -> Parked<'a> {
        Parked {
            consumer: &self.consumer,
            key: Some((
                EventKey::of_event(&self.consumer, &identity.source, &identity.id),
                identity,
            )),
            event,
            becomes: ParkedAs::Ready {
                after: Duration::ZERO,
            },
            failures: &[],
            escaped: false,
        }
    }
}

impl Enqueued {
    fn from_new(new: bool) -> Self {
        if new { Self::New } else { Self::Held }
    }
}

/// Why an event was not enqueued. Nothing was stored.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// It has no usable identity, so it could not be told from a repeat.
    #[error("the event was not enqueued: {0}")]
    Identity(#[source] IdentityError),
    /// The database refused or does not answer.
    #[error("the event was not enqueued: {0}")]
    Store(#[source] StoreError),
}

/// Reads a consumer's held events: delayed retries, replayed letters, the embedded queue.
///
/// An event is leased while it runs, and the lease is renewed every third of its time, by the
/// database's clock; when a process dies, its leases run out and others take over.
pub struct InboxSource<S> {
    store: S,
    consumer: String,
    lease: Duration,
    leased: Arc<Mutex<Leased>>,
    /// Something was lost.
    changed: Arc<Notify>,
    next_poll: Instant,
    /// Queries that failed in a row.
    failures: u32,
    /// The query for due events runs in a task of its own: a `receive` that is dropped while it runs
    /// would otherwise leave rows leased to nobody.
    leasing: Option<JoinHandle<Result<Vec<HeldEvent>, StoreError>>>,
    /// Leases that are on their way back.
    giving_back: JoinSet<()>,
    /// Leased by a dropped call that had room for more than the one after it.
    leftover: VecDeque<Delivery>,
    renewal: Option<JoinHandle<()>>,
    stopped: bool,
    problem: Arc<Mutex<Option<String>>>,
}

#[derive(Default)]
struct Leased {
    next_receipt: u64,
    held: HashMap<Receipt, Lease>,
    /// Leases that a renewal found to be somebody else's.
    lost: Vec<Receipt>,
}

impl<S: Inbox> InboxSource<S> {
    /// The held events of this consumer.
    pub fn new(store: S, consumer: impl Into<String>) -> Self {
        Self {
            store,
            consumer: consumer.into(),
            lease: Duration::from_secs(30),
            leased: Arc::default(),
            changed: Arc::default(),
            next_poll: Instant::now(),
            failures: 0,
            leasing: None,
            giving_back: JoinSet::new(),
            leftover: VecDeque::new(),
            renewal: None,
            stopped: false,
            problem: Arc::default(),
        }
    }

    /// How long an event stays leased to a process that has died. Default 30 s.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    fn deliver(&mut self, held: Vec<HeldEvent>) -> Vec<Delivery> {
        let mut leased = lock(&self.leased);
        let leased = &mut *leased;
        held.into_iter()
            .map(|held| {
                // A row that comes again while we had it was lost meanwhile, before a renewal could
                // notice; from now on a renewal would take the new lease for the old one.
                let old = leased.held.extract_if(|_, lease| lease.id == held.lease.id);
                leased.lost.extend(old.map(|(receipt, _)| receipt));
                leased.next_receipt += 1;
                let receipt = Receipt(leased.next_receipt);
                leased.held.insert(receipt, held.lease.clone());
                let redelivery = if held.released_by_timeout {
                    Redelivery::Yes
                } else {
                    Redelivery::No
                };
                let mut delivery = Delivery::new(receipt, held.event).with_redelivery(redelivery);
                delivery.held = Some(held.lease.into());
                delivery
            })
            .collect()
    }

    /// Up to `max` of what was leased and is still ours.
    fn hand_out(&mut self, max: usize) -> Vec<Delivery> {
        let leased = lock(&self.leased);
        self.leftover
            .retain(|delivery| leased.held.contains_key(&delivery.receipt));
        let count = self.leftover.len().min(max);
        self.leftover.drain(..count).collect()
    }

    /// Leases due events, or takes what the query begun by a dropped call has leased. Cancel-safe.
    ///
    /// A query that fails leaves the leases that we have as they are, so it does not break the source:
    /// the next one is later, and health says why.
    async fn due(&mut self, max: usize) -> Vec<HeldEvent> {
        let leasing = self.leasing.get_or_insert_with(|| {
            let (store, consumer, lease) = (self.store.clone(), self.consumer.clone(), self.lease);
            tokio::spawn(async move { store.lease(&consumer, max, lease).await })
        });
        let leased = leasing.await;
        self.leasing = None;
        let problem = match leased {
            Ok(Ok(held)) => {
                *lock(&self.problem) = None;
                self.failures = 0;
                if held.is_empty() {
                    self.next_poll = Instant::now() + POLL;
                }
                return held;
            }
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        self.failures += 1;
        if self.failures == 1 {
            tracing::warn!(
                consumer = self.consumer,
                problem,
                "held events cannot be read; trying until they can"
            );
        }
        *lock(&self.problem) = Some(problem);
        self.next_poll = Instant::now() + spread(POLL, POLL_MAX, self.failures);
        Vec::new()
    }

    /// In a task of its own: the loop goes on while a database that is down does not answer.
    fn give_back(&mut self, leases: impl Future<Output = Vec<Lease>> + Send + 'static, after: Duration) {
        let (store, consumer) = (self.store.clone(), self.consumer.clone());
        while self.giving_back.try_join_next().is_some() {}
        self.giving_back.spawn(async move {
            let leases = leases.await;
            if !leases.is_empty()
                && let Err(error) = store.release_leased(&leases, after).await
            {
                tracing::debug!(consumer, %error, "held events were not given back; their leases run out");
            }
        });
    }
}

#[async_trait]
impl<S: Inbox> Source for InboxSource<S> {
    async fn start(&mut self, _plan: &Plan) -> Result<(), SourceError> {
        let renewal = Renewal {
            store: self.store.clone(),
            leased: self.leased.clone(),
            lease: self.lease,
            changed: self.changed.clone(),
            problem: self.problem.clone(),
        };
        if let Some(old) = self.renewal.replace(tokio::spawn(renewal.run())) {
            old.abort();
        }
        Ok(())
    }

    async fn receive(&mut self, max: usize) -> Result<Incoming, SourceError> {
        loop {
            let changed = self.changed.clone();
            let changed = changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let nothing_leased = {
                let mut leased = lock(&self.leased);
                if !leased.lost.is_empty() {
                    return Ok(Incoming::Lost(std::mem::take(&mut leased.lost)));
                }
                leased.held.is_empty()
            };
            if self.stopped && nothing_leased {
                while self.giving_back.join_next().await.is_some() {}
                return Ok(Incoming::Closed);
            }
            if max == 0 || self.stopped {
                changed.await;
                continue;
            }
            let deliveries = self.hand_out(max);
            if !deliveries.is_empty() {
                return Ok(Incoming::Deliveries(deliveries));
            }
            tokio::select! {
                () = changed => continue,
                () = sleep_until(self.next_poll) => {}
            }
            let held = self.due(max).await;
            if held.is_empty() {
                continue;
            }
            let deliveries = self.deliver(held);
            self.leftover.extend(deliveries);
        }
    }

    async fn settle(&mut self, settlements: Vec<Settlement>) -> Result<(), SourceError> {
        // What was done was finished by its own transaction: an ack has nothing left to do.
        let mut back: HashMap<Duration, Vec<Lease>> = HashMap::new();
        for settlement in settlements {
            let Some(lease) = lock(&self.leased).held.remove(&settlement.receipt) else {
                continue;
            };
            if let Settle::Release { after } = settlement.verdict {
                back.entry(after.unwrap_or_default()).or_default().push(lease);
            }
        }
        for (after, leases) in back {
            self.give_back(std::future::ready(leases), after);
        }
        Ok(())
    }

    async fn pause(&mut self) -> Result<(), SourceError> {
        // There is no database to tell; what was leased and not handed out stays leased until it is.
        Ok(())
    }

    async fn stop(&mut self) -> Result<(), SourceError> {
        self.stopped = true;
        // What was leased and not handed out goes back at once.
        let mut leases: Vec<Lease> = {
            let mut leased = lock(&self.leased);
            let left = self.leftover.drain(..);
            left.filter_map(|delivery| leased.held.remove(&delivery.receipt))
                .collect()
        };
        let leasing = self.leasing.take();
        let leases = async move {
            if let Some(leasing) = leasing {
                let held = leasing.await.ok().and_then(Result::ok).unwrap_or_default();
                leases.extend(held.into_iter().map(|held| held.lease));
            }
            leases
        };
        self.give_back(leases, Duration::ZERO);
        Ok(())
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            marks_redelivery: true,
            delays_release: true,
            reads_inbox: true,
            ..Capabilities::of("onlyonce")
        }
    }

    fn health(&self) -> SourceHealth {
        match &*lock(&self.problem) {
            None => SourceHealth::up(),
            Some(problem) => SourceHealth::down(problem.clone()),
        }
    }
}

impl<S> Drop for InboxSource<S> {
    fn drop(&mut self) {
        if let Some(renewal) = &self.renewal {
            renewal.abort();
        }
    }
}

/// Renews what is leased, every third of the lease, and notes what turned out to be lost.
struct Renewal<S> {
    store: S,
    leased: Arc<Mutex<Leased>>,
    lease: Duration,
    changed: Arc<Notify>,
    problem: Arc<Mutex<Option<String>>>,
}

impl<S: Inbox> Renewal<S> {
    async fn run(self) {
        loop {
            sleep(self.lease / 3).await;
            let held: Vec<(Receipt, Lease)> = lock(&self.leased)
                .held
                .iter()
                .map(|(receipt, lease)| (*receipt, lease.clone()))
                .collect();
            if held.is_empty() {
                continue;
            }
            let leases: Vec<Lease> = held.iter().map(|(_, lease)| lease.clone()).collect();
            match self.store.renew(&leases, self.lease).await {
                Ok(ours) => self.note(&held, &ours),
                // Try again at the next third; if the lease runs out meanwhile, the token decides.
                Err(e) => *lock(&self.problem) = Some(format!("leases are not renewed: {e}")),
            }
        }
    }

    /// Rows that are not ours any more were taken over, or finished a moment ago; for the latter the
    /// settlement is on its way and changes nothing.
    fn note(&self, held: &[(Receipt, Lease)], ours: &[i64]) {
        *lock(&self.problem) = None;
        let mut leased = lock(&self.leased);
        for (receipt, lease) in held {
            if !ours.contains(&lease.id) && leased.held.remove(receipt).is_some() {
                leased.lost.push(*receipt);
            }
        }
        self.changed.notify_waiters();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // The maps are changed by single inserts and removes: a panic leaves them whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;
    use crate::store::{Operations as _, SqliteStore};

    async fn queue(dir: &tempfile::TempDir, events: u32) -> SqliteStore {
        let path = dir.path().join("test.db");
        let store = SqliteStore::connect(path.to_str().unwrap()).await.unwrap();
        store.migrate().await.unwrap();
        let queue = Queue::new(store.clone(), "c").identity(IdentityRules::header("id", "test"));
        for n in 0..events {
            let event = RawEvent {
                headers: [("id", n.to_string())].into_iter().collect(),
                ..Default::default()
            };
            assert_eq!(queue.enqueue(event).await.unwrap(), Enqueued::New);
        }
        store
    }

    async fn receive(source: &mut InboxSource<SqliteStore>, max: usize) -> Vec<Delivery> {
        match source.receive(max).await.unwrap() {
            Incoming::Deliveries(deliveries) => deliveries,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn what_a_dropped_call_has_leased_is_handed_out_within_the_next_ones_room() {
        let dir = tempfile::tempdir().unwrap();
        let store = queue(&dir, 5).await;
        let mut source = InboxSource::new(store.clone(), "c");
        while source.leasing.is_none() {
            assert!(source.receive(5).now_or_never().is_none());
            sleep(Duration::from_millis(1)).await;
        }
        let deliveries = receive(&mut source, 2).await;
        assert_eq!(deliveries.len(), 2);
        assert_eq!(store.lease("c", 9, Duration::ZERO).await.unwrap().len(), 0);
        source.stop().await.unwrap();
        source
            .settle(deliveries.into_iter().map(Delivery::ack).collect())
            .await
            .unwrap();
        assert!(matches!(source.receive(0).await, Ok(Incoming::Closed)));
        let given_back = store.lease("c", 9, Duration::from_secs(9)).await.unwrap();
        assert_eq!(given_back.len(), 3, "what was not handed out is due again");
    }

    #[tokio::test]
    async fn a_row_that_comes_again_was_lost_before() {
        let dir = tempfile::tempdir().unwrap();
        let store = queue(&dir, 1).await;
        let mut source = InboxSource::new(store.clone(), "c").lease(Duration::ZERO);
        let first = receive(&mut source, 1).await.remove(0);
        let Incoming::Lost(lost) = source.receive(1).await.unwrap() else {
            panic!("the lease ran out")
        };
        assert_eq!(lost, [first.receipt]);
        assert_ne!(receive(&mut source, 1).await[0].receipt, first.receipt);
    }
}
