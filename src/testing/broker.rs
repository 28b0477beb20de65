use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::event::RawEvent;
use crate::source::{
    Capabilities, Delivery, Incoming, Plan, Receipt, Redelivery, Settle, Settlement, Source, SourceError,
    SourceHealth,
};

/// A broker in memory that can be as unkind as real ones are, by choice and repeatable by its seed.
///
/// It lives outside any runtime: a test can throw a whole runtime with its consumer away, call
/// [`kill`](Self::kill), and start another consumer on the same broker.
#[derive(Clone)]
pub struct Broker {
    state: Arc<Mutex<State>>,
    changed: Arc<Notify>,
}

/// What the broker has seen so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Messages that were published, copies included.
    pub published: u64,
    /// Times that a message was handed to a consumer.
    pub delivered: u64,
    /// Acks that arrived.
    pub acked: u64,
    /// Acks that were thrown away on purpose.
    pub acks_dropped: u64,
    /// Deliveries that were given back.
    pub released: u64,
}

struct State {
    ready: VecDeque<Message>,
    unacked: HashMap<Receipt, Message>,
    next_receipt: u64,
    last_place: u64,
    /// Counts up when all consumers' connections are lost; receipts of earlier sessions are void.
    session: u64,
    chaos: Chaos,
    stats: Stats,
    random: fastrand::Rng,
    down: bool,
}

struct Message {
    /// Its place in the queue, to which it returns when it is given back.
    place: u64,
    event: RawEvent,
    delivered: u32,
    not_before: Option<Instant>,
}

#[derive(Clone, Copy, Default)]
struct Chaos {
    max_copies: u32,
    reorder: usize,
    drop_acks: f64,
    redeliver_running: f64,
}

impl Broker {
    /// A kind broker: every message once, in order.
    pub fn new() -> Self {
        Self::seeded(0)
    }

    /// A broker whose unkindness is decided by this seed.
    pub fn seeded(seed: u64) -> Self {
        let state = State {
            ready: VecDeque::new(),
            unacked: HashMap::new(),
            next_receipt: 0,
            last_place: 0,
            session: 0,
            chaos: Chaos {
                max_copies: 1,
                ..Chaos::default()
            },
            stats: Stats::default(),
            random: fastrand::Rng::with_seed(seed),
            down: false,
        };
        Self {
            state: Arc::new(Mutex::new(state)),
            changed: Arc::new(Notify::new()),
        }
    }

    /// Publish each message up to this many times.
    pub fn duplicate(self, max_copies: u32) -> Self {
        self.lock().chaos.max_copies = max_copies.max(1);
        self
    }

    /// Deliver any of the next `window` messages instead of the first.
    pub fn reorder(self, window: usize) -> Self {
        self.lock().chaos.reorder = window;
        self
    }

    /// Throw away this share of acks (0 to 1): the message comes again.
    pub fn drop_acks(self, share: f64) -> Self {
        self.lock().chaos.drop_acks = share;
        self
    }

    /// Deliver this share of messages a second time while the first delivery is still running.
    pub fn redeliver_running(self, share: f64) -> Self {
        self.lock().chaos.redeliver_running = share;
        self
    }

    /// Publishes a message, as often as [`duplicate`](Self::duplicate) says.
    pub fn publish(&self, event: RawEvent) {
        let mut state = self.lock();
        let copies = match state.chaos.max_copies {
            1 => 1,
            max => state.random.u32(1..=max),
        };
        for _ in 0..copies {
            state.stats.published += 1;
            state.append(Message {
                place: 0,
                event: event.clone(),
                delivered: 0,
                not_before: None,
            });
        }
        drop(state);
        self.changed.notify_waiters();
    }

    /// A consumer's connection to this broker.
    pub fn source(&self) -> BrokerSource {
        let session = self.lock().session;
        BrokerSource {
            broker: self.clone(),
            session,
            outstanding: Vec::new(),
            stopped: false,
        }
    }

    /// Cuts every consumer off, as the death of its process or of the link does: whatever is unacked
    /// goes back to the front, and receipts given out before are void.
    pub fn kill(&self) {
        self.lock().cut_off();
        self.changed.notify_waiters();
    }

    /// Makes every call of a source fail, until [`recover`](Self::recover).
    pub fn go_down(&self) {
        {
            // At once: what a consumer could still take in between would be lost to it for good.
            let mut state = self.lock();
            state.cut_off();
            state.down = true;
        }
        self.changed.notify_waiters();
    }

    /// Ends [`go_down`](Self::go_down).
    pub fn recover(&self) {
        self.lock().down = false;
        self.changed.notify_waiters();
    }

    /// Waits until every message is acked.
    pub async fn drained(&self) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.waiting() == 0 && self.unacked() == 0 {
                return;
            }
            changed.await;
        }
    }

    /// Waits until a condition on the counters holds.
    pub async fn until(&self, condition: impl Fn(&Stats) -> bool) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if condition(&self.stats()) {
                return;
            }
            changed.await;
        }
    }

    /// Messages that no consumer has.
    pub fn waiting(&self) -> usize {
        self.lock().ready.len()
    }

    /// Messages that a consumer has and has not settled.
    pub fn unacked(&self) -> usize {
        self.lock().unacked.len()
    }

    /// The counters.
    pub fn stats(&self) -> Stats {
        self.lock().stats
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Broker {
    fn default() -> Self {
        Self::new()
    }
}

impl State {
    fn cut_off(&mut self) {
        self.session += 1;
        let back: Vec<Message> = self.unacked.drain().map(|(_, message)| message).collect();
        for message in back {
            self.put_back(message);
        }
    }

    fn append(&mut self, message: Message) {
        self.last_place += 1;
        let place = self.last_place;
        self.ready.push_back(Message { place, ..message });
    }

    /// As brokers do where they can: several that are given back at once keep their order.
    fn put_back(&mut self, message: Message) {
        let index = self.ready.partition_point(|other| other.place < message.place);
        self.ready.insert(index, message);
    }

    fn keeps_order(&self) -> bool {
        self.chaos.reorder <= 1 && self.chaos.drop_acks == 0.0 && self.chaos.redeliver_running == 0.0
    }

    /// Which messages may be delivered next. Where order is kept, one that waits for its time holds
    /// the later ones of its key.
    fn due(&self, now: Instant) -> Vec<usize> {
        let mut held: HashSet<&[u8]> = HashSet::new();
        let mut due = Vec::new();
        for (index, message) in self.ready.iter().enumerate() {
            let key = message.event.key.as_deref().filter(|_| self.keeps_order());
            if message.not_before.is_some_and(|time| time > now) {
                held.extend(key);
            } else if key.is_none_or(|key| !held.contains(key)) {
                due.push(index);
                if due.len() >= self.chaos.reorder.max(1) {
                    break;
                }
            }
        }
        due
    }

    /// The next deliveries, or when one will be due.
    fn take(&mut self, max: usize) -> Result<Vec<Delivery>, Option<Instant>> {
        if max == 0 {
            return Err(None);
        }
        let now = Instant::now();
        let mut out = Vec::new();
        while out.len() < max {
            let due = self.due(now);
            let Some(&index) = due.get(self.random.usize(..due.len().max(1))) else {
                break;
            };
            let Some(mut message) = self.ready.remove(index) else {
                break;
            };
            if self.random.f64() < self.chaos.redeliver_running {
                let copy = Message {
                    event: message.event.clone(),
                    delivered: message.delivered + 1,
                    ..message
                };
                self.append(copy);
            }
            self.next_receipt += 1;
            self.stats.delivered += 1;
            let receipt = Receipt(self.next_receipt);
            let redelivery = if message.delivered == 0 {
                Redelivery::No
            } else {
                Redelivery::Times(message.delivered)
            };
            out.push(Delivery::new(receipt, message.event.clone()).with_redelivery(redelivery));
            message.delivered += 1;
            self.unacked.insert(receipt, message);
        }
        if out.is_empty() {
            Err(self.ready.iter().filter_map(|m| m.not_before).min())
        } else {
            Ok(out)
        }
    }

    fn settle(&mut self, settlement: &Settlement) {
        let Some(mut message) = self.unacked.remove(&settlement.receipt) else {
            return;
        };
        match settlement.verdict {
            Settle::Ack if self.random.f64() < self.chaos.drop_acks => {
                self.stats.acks_dropped += 1;
                self.append(message);
            }
            Settle::Ack => self.stats.acked += 1,
            Settle::Release { after } => {
                self.stats.released += 1;
                message.not_before = after.map(|after| Instant::now() + after);
                self.put_back(message);
            }
        }
    }
}

/// A consumer's connection to a [`Broker`].
pub struct BrokerSource {
    broker: Broker,
    session: u64,
    outstanding: Vec<Receipt>,
    stopped: bool,
}

impl BrokerSource {
    /// What the broker says, or the instant at which it will have something to say.
    fn poll(&mut self, max: usize) -> Result<Result<Incoming, Option<Instant>>, SourceError> {
        let mut state = self.broker.lock();
        if state.session != self.session {
            self.session = state.session;
            let lost = std::mem::take(&mut self.outstanding);
            if !lost.is_empty() {
                return Ok(Ok(Incoming::Lost(lost)));
            }
        }
        if state.down {
            return Err(SourceError::broken("the in-memory broker is down"));
        }
        if self.stopped {
            return Ok(if self.outstanding.is_empty() {
                Ok(Incoming::Closed)
            } else {
                Err(None)
            });
        }
        Ok(state.take(max).map(|deliveries| {
            self.outstanding.extend(deliveries.iter().map(|d| d.receipt));
            Incoming::Deliveries(deliveries)
        }))
    }
}

#[async_trait]
impl Source for BrokerSource {
    async fn start(&mut self, _plan: &Plan) -> Result<(), SourceError> {
        let state = self.broker.lock();
        self.session = state.session;
        if state.down {
            Err(SourceError::broken("the in-memory broker is down"))
        } else {
            Ok(())
        }
    }

    async fn receive(&mut self, max: usize) -> Result<Incoming, SourceError> {
        let broker = self.broker.clone();
        loop {
            let changed = broker.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            match self.poll(max)? {
                Ok(incoming) => {
                    // Somebody may wait for a number of deliveries.
                    broker.changed.notify_waiters();
                    return Ok(incoming);
                }
                Err(None) => changed.await,
                Err(Some(due)) => tokio::select! {
                    () = changed => {}
                    () = sleep_until(due) => {}
                },
            }
        }
    }

    async fn settle(&mut self, settlements: Vec<Settlement>) -> Result<(), SourceError> {
        {
            let mut state = self.broker.lock();
            if state.down {
                return Err(SourceError::broken("the in-memory broker is down"));
            }
            for settlement in &settlements {
                self.outstanding.retain(|receipt| *receipt != settlement.receipt);
                state.settle(settlement);
            }
        }
        self.broker.changed.notify_waiters();
        Ok(())
    }

    async fn pause(&mut self) -> Result<(), SourceError> {
        Ok(())
    }

    async fn stop(&mut self) -> Result<(), SourceError> {
        self.stopped = true;
        self.broker.changed.notify_waiters();
        Ok(())
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            ordered: self.broker.lock().keeps_order(),
            marks_redelivery: true,
            counts_deliveries: true,
            delays_release: true,
            ..Capabilities::of("memory")
        }
    }

    fn health(&self) -> SourceHealth {
        if self.broker.lock().down {
            SourceHealth::down("the in-memory broker is down")
        } else {
            SourceHealth::up()
        }
    }
}

/// A source that is dropped without a stop is a process that died: its messages come again.
impl Drop for BrokerSource {
    fn drop(&mut self) {
        let mut state = self.broker.lock();
        if state.session == self.session {
            for receipt in std::mem::take(&mut self.outstanding) {
                if let Some(message) = state.unacked.remove(&receipt) {
                    state.put_back(message);
                }
            }
        }
        drop(state);
        self.broker.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::testing::keyed;

    async fn receive(source: &mut BrokerSource, max: usize) -> Vec<Delivery> {
        match source.receive(max).await.unwrap() {
            Incoming::Deliveries(deliveries) => deliveries,
            other => panic!("{other:?}"),
        }
    }

    fn bodies(deliveries: &[Delivery]) -> Vec<&[u8]> {
        deliveries
            .iter()
            .map(|d| d.event.payload.as_deref().unwrap())
            .collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_kind_broker_keeps_the_order_of_a_key_whatever_is_given_back() {
        let broker = Broker::new();
        for body in ["1", "2", "3", "4"] {
            broker.publish(keyed(body, "k", body));
        }
        let mut source = broker.source();
        let first = receive(&mut source, 3).await;
        source
            .settle(first.into_iter().map(|d| d.release(None)).collect())
            .await
            .unwrap();
        let mut again = receive(&mut source, 9).await;
        assert_eq!(bodies(&again), [b"1", b"2", b"3", b"4"]);

        let later = again.remove(0).release(Some(Duration::from_secs(1)));
        let rest = again.into_iter().map(|d| d.release(None));
        source.settle(rest.chain([later]).collect()).await.unwrap();
        assert_eq!(bodies(&receive(&mut source, 9).await), [b"1", b"2", b"3", b"4"]);
    }
}
