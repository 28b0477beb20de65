//! What is in hand: deliveries that wait for a lane, and those that a lane has.

use std::collections::{HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard};

use bytes::Bytes;
use hashbrown::HashMap;

use super::policy::Ordering;
use crate::source::{Delivery, Receipt, Settle, Settlement};

/// The deliveries in hand, bounded by count and by bytes, and which lane each belongs to.
///
/// Unordered, there is a common queue and any idle lane takes from it. Per key, each lane has its own, and
/// a key stays with its lane for as long as an event of it is in hand, so that its events run in their
/// order. A key of which nothing is in hand goes to the lane with the least to do: by a hash of the key
/// one lane would have half as many keys again as the others, and the whole window would wait for it.
/// Unordered, a lane's own queue holds what is reserved for it, which is at most one delivery.
pub(crate) struct Window {
    ordering: Ordering,
    /// Each lane's own, and after them the common one, which is empty where order counts.
    queues: Vec<VecDeque<Delivery>>,
    idle: Vec<bool>,
    in_hand: HashMap<Receipt, InHand>,
    /// The queue of each key that is in hand, and how many events of it are.
    seats: HashMap<Bytes, (usize, usize)>,
    /// How many deliveries of each queue are in hand, also those that run.
    loads: Vec<usize>,
    bytes: usize,
    max_count: usize,
    max_bytes: usize,
    /// How large a delivery may be, from what came before: the largest, slowly forgotten.
    expected_bytes: usize,
    batch: usize,
}

/// How large deliveries are taken to be before there were any: what most brokers allow by default.
const LARGE: usize = 1 << 20;

/// Nothing that can fail is done under this lock, and nothing is waited for.
pub(crate) fn locked(window: &Mutex<Window>) -> MutexGuard<'_, Window> {
    window.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

struct InHand {
    bytes: usize,
    key: Option<Bytes>,
    queue: usize,
}

impl Window {
    pub(crate) fn new(
        ordering: Ordering,
        lanes: usize,
        batch: usize,
        max_count: usize,
        max_bytes: usize,
    ) -> Self {
        Self {
            ordering,
            queues: (0..=lanes).map(|_| VecDeque::new()).collect(),
            idle: vec![true; lanes],
            in_hand: HashMap::new(),
            seats: HashMap::new(),
            loads: vec![0; lanes + 1],
            bytes: 0,
            max_count,
            max_bytes,
            expected_bytes: LARGE,
            batch,
        }
    }

    /// How many more deliveries may be received. Nobody knows how large they are, so no more are asked
    /// for than fit if they are like those before. An oversized one is let in alone.
    pub(crate) fn room(&self) -> usize {
        let Some(bytes) = self.max_bytes.checked_sub(self.bytes).filter(|left| *left > 0) else {
            return 0;
        };
        let count = self.max_count.saturating_sub(self.in_hand.len());
        count.min((bytes / self.expected_bytes).max(1))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.in_hand.is_empty()
    }

    pub(crate) fn admit(&mut self, deliveries: Vec<Delivery>) {
        for delivery in deliveries {
            let bytes = delivery.event.size();
            let key = delivery.event.key.clone();
            self.bytes += bytes;
            self.expected_bytes = bytes.max(self.expected_bytes - self.expected_bytes / 64).max(1);
            let queue = self.seat(key.as_ref());
            self.loads[queue] += 1;
            self.in_hand
                .insert(delivery.receipt, InHand { bytes, key, queue });
            self.queues[queue].push_back(delivery);
        }
    }

    /// The next piece of work for an idle lane, which is busy from then on.
    pub(crate) fn assign(&mut self) -> Option<(usize, Vec<Delivery>)> {
        let shared = !self.common().is_empty();
        let lane = (0..self.idle.len())
            .find(|&lane| self.idle[lane] && (shared || !self.queues[lane].is_empty()))?;
        self.take(lane).map(|work| (lane, work))
    }

    /// The next piece of work for this lane, which is busy from then on if there is one.
    pub(crate) fn take(&mut self, lane: usize) -> Option<Vec<Delivery>> {
        let batch = self.batch;
        let queue = if self.queues[lane].is_empty() {
            self.common()
        } else {
            &mut self.queues[lane]
        };
        if queue.is_empty() {
            return None;
        }
        let work = queue.drain(..queue.len().min(batch)).collect();
        self.idle[lane] = false;
        Some(work)
    }

    /// Whether a lane that is about to finish will find more. From the common queue the other lanes
    /// take as well; some of them are before it.
    pub(crate) fn has_more(&self, lane: usize) -> bool {
        !self.queues[lane].is_empty() || self.queues[self.idle.len()].len() > self.idle.len() / 4
    }

    /// The one delivery that this lane will take next, which no other lane takes from now on. It is still
    /// not started: it can be lost and given back like all that waits. `None` if lanes take batches, and if
    /// so little waits that another lane may be idle sooner than this one.
    pub(crate) fn reserve(&mut self, lane: usize) -> Option<&Delivery> {
        if self.batch > 1 || !self.has_more(lane) {
            return None;
        }
        if self.queues[lane].is_empty() {
            let first = self.common().pop_front()?;
            self.queues[lane].push_back(first);
        }
        self.queues[lane].front()
    }

    /// The lane is not about to finish after all: what was reserved for it is anybody's again. Lanes that
    /// are idle by now find it when the loop next looks.
    pub(crate) fn unreserve(&mut self, lane: usize) {
        if self.ordering == Ordering::Unordered
            && let Some(reserved) = self.queues[lane].pop_front()
        {
            self.common().push_front(reserved);
        }
    }

    fn common(&mut self) -> &mut VecDeque<Delivery> {
        let last = self.idle.len();
        &mut self.queues[last]
    }

    /// A lane is done with what it had. Per key, what waits behind an event that was given back goes
    /// back as well: it would overtake it otherwise.
    pub(crate) fn finish(&mut self, lane: usize, settlements: &mut Vec<Settlement>) {
        self.idle[lane] = true;
        let mut given_back = HashSet::new();
        for settlement in settlements.iter() {
            let Some(done) = self.remove(settlement.receipt) else {
                continue;
            };
            if let (Settle::Release { .. }, Some(key)) = (settlement.verdict, done.key) {
                given_back.insert(key);
            }
        }
        if self.ordering == Ordering::PerKey && !given_back.is_empty() {
            settlements.extend(self.release_where(|key| key.is_some_and(|key| given_back.contains(key))));
        }
    }

    /// These receipts are void. What was not started is dropped, and takes what waits behind it with
    /// it: both are returned as given back. What runs is left to finish. So each lost receipt is
    /// settled once, and a source can tell when nothing of what it lost runs any more.
    pub(crate) fn lose(&mut self, receipts: &[Receipt]) -> Vec<Settlement> {
        let lost: HashSet<_> = receipts.iter().copied().collect();
        let mut keys = HashSet::new();
        let mut dropped = Vec::new();
        for index in 0..self.queues.len() {
            let (out, kept): (VecDeque<_>, VecDeque<_>) = self.queues[index]
                .drain(..)
                .partition(|delivery| lost.contains(&delivery.receipt));
            self.queues[index] = kept;
            for delivery in out {
                keys.extend(delivery.event.key.clone());
                self.remove(delivery.receipt);
                dropped.push(delivery.release(None));
            }
        }
        if self.ordering == Ordering::PerKey && !keys.is_empty() {
            dropped.extend(self.release_where(|key| key.is_some_and(|key| keys.contains(key))));
        }
        dropped
    }

    /// Every receipt is void: the source broke.
    pub(crate) fn lose_all(&mut self) {
        for index in 0..self.queues.len() {
            for delivery in std::mem::take(&mut self.queues[index]) {
                self.remove(delivery.receipt);
            }
        }
    }

    /// Gives back everything that no lane has started.
    pub(crate) fn release_waiting(&mut self) -> Vec<Settlement> {
        self.release_where(|_| true)
    }

    fn release_where(&mut self, condition: impl Fn(Option<&Bytes>) -> bool) -> Vec<Settlement> {
        let mut released = Vec::new();
        for index in 0..self.queues.len() {
            let (out, kept): (VecDeque<_>, VecDeque<_>) = self.queues[index]
                .drain(..)
                .partition(|delivery| condition(delivery.event.key.as_ref()));
            self.queues[index] = kept;
            for delivery in out {
                self.remove(delivery.receipt);
                released.push(delivery.release(None));
            }
        }
        released
    }

    fn remove(&mut self, receipt: Receipt) -> Option<InHand> {
        let gone = self.in_hand.remove(&receipt)?;
        self.bytes -= gone.bytes;
        self.loads[gone.queue] -= 1;
        if let Some(key) = &gone.key
            && let Some((_, count)) = self.seats.get_mut(key)
        {
            *count -= 1;
            if *count == 0 {
                self.seats.remove(key);
            }
        }
        Some(gone)
    }

    /// The queue of a key that is in hand, else the one with the least to do. An event without a key is
    /// ordered with nothing.
    fn seat(&mut self, key: Option<&Bytes>) -> usize {
        let lanes = self.idle.len();
        if self.ordering == Ordering::Unordered {
            return lanes;
        }
        if let Some((queue, count)) = key.and_then(|key| self.seats.get_mut(key)) {
            *count += 1;
            return *queue;
        }
        let least = (0..lanes).min_by_key(|queue| self.loads[*queue]).unwrap_or(0);
        if let Some(key) = key {
            self.seats.insert(key.clone(), (least, 1));
        }
        least
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::RawEvent;

    fn delivery(receipt: u64, key: &'static str) -> Delivery {
        let key = (!key.is_empty()).then(|| Bytes::from_static(key.as_bytes()));
        Delivery::new(
            Receipt(receipt),
            RawEvent {
                key,
                payload: Some("1234567890".into()),
                ..Default::default()
            },
        )
    }

    fn sized(receipt: u64, bytes: usize) -> Delivery {
        let payload = Some(vec![0; bytes].into());
        let event = RawEvent {
            payload,
            ..Default::default()
        };
        Delivery::new(Receipt(receipt), event)
    }

    fn receipts(settlements: &[Settlement]) -> Vec<u64> {
        settlements.iter().map(|s| s.receipt.0).collect()
    }

    #[test]
    fn it_is_bounded_by_count_and_by_bytes() {
        let mut window = Window::new(Ordering::Unordered, 2, 1, 3, 25);
        window.admit(vec![delivery(1, ""), delivery(2, "")]);
        assert_eq!(window.room(), 1);
        window.admit(vec![delivery(3, "")]);
        assert_eq!(window.room(), 0);
        let (lane, mut work) = window.assign().unwrap();
        let mut done = vec![work.remove(0).ack()];
        window.finish(lane, &mut done);
        assert_eq!(
            window.room(),
            1,
            "two of three in hand, twenty of twenty-five bytes"
        );
    }

    #[test]
    fn no_more_is_asked_for_than_fits_if_it_is_like_what_came() {
        let mut window = Window::new(Ordering::Unordered, 2, 1, 1000, 3 << 20);
        assert_eq!(window.room(), 3, "it may be as large as brokers allow");
        window.admit((0..3).map(|n| sized(n, 1 << 20)).collect());
        assert_eq!(window.room(), 0);
        window.lose_all();
        window.admit((0..900).map(|n| sized(n, 1024)).collect());
        assert_eq!(window.room(), 100, "small ones are bounded by count");
        window.lose_all();
        window.admit(vec![sized(1, 2 << 20)]);
        assert_eq!(window.room(), 1, "a large one is remembered");
    }

    #[test]
    fn unordered_work_goes_to_any_idle_lane_in_batches() {
        let mut window = Window::new(Ordering::Unordered, 2, 2, 10, 1000);
        window.admit((1..=5).map(|n| delivery(n, "k")).collect());
        let sizes: Vec<_> = std::iter::from_fn(|| window.assign())
            .map(|(lane, work)| (lane, work.len()))
            .collect();
        assert_eq!(sizes, [(0, 2), (1, 2)], "both lanes are busy, one delivery waits");
    }

    #[test]
    fn a_key_stays_with_its_lane_and_runs_one_batch_at_a_time() {
        let mut window = Window::new(Ordering::PerKey, 4, 1, 10, 1000);
        window.admit((1..=3).map(|n| delivery(n, "k")).collect());
        let (lane, mut work) = window.assign().unwrap();
        assert!(window.assign().is_none(), "the key's lane is busy");
        let mut done = vec![work.remove(0).ack()];
        window.finish(lane, &mut done);
        let mut next = window.take(lane).unwrap();
        assert_eq!(next[0].receipt.0, 2, "the lane goes on with it");
        assert!(window.assign().is_none(), "and is busy");
        let mut done = vec![next.remove(0).ack()];
        window.finish(lane, &mut done);
        assert_eq!(window.assign().map(|(l, w)| (l, w[0].receipt.0)), Some((lane, 3)));
    }

    #[test]
    fn what_is_reserved_is_for_one_lane_and_not_started() {
        let mut window = Window::new(Ordering::Unordered, 2, 1, 10, 1000);
        window.admit((1..=4).map(|n| delivery(n, "")).collect());
        for lane in 0..2 {
            assert!(window.take(lane).is_some());
        }
        assert_eq!(window.reserve(0).map(|d| d.receipt.0), Some(3));
        assert_eq!(window.reserve(0).map(|d| d.receipt.0), Some(3), "once");
        assert_eq!(window.take(1).map(|w| w[0].receipt.0), Some(4));
        assert!(window.take(1).is_none());
        assert_eq!(window.take(0).map(|w| w[0].receipt.0), Some(3));

        window.admit((5..=7).map(|n| delivery(n, "")).collect());
        window.reserve(0);
        window.unreserve(0);
        assert_eq!(
            window.take(1).map(|w| w[0].receipt.0),
            Some(5),
            "in its old place"
        );
        window.reserve(0);
        assert_eq!(receipts(&window.lose(&[Receipt(6)])), [6]);
        window.reserve(0);
        assert_eq!(receipts(&window.release_waiting()), [7]);
        assert!(window.reserve(0).is_none());
        assert_eq!(window.in_hand.len(), 5, "those that lanes have");
    }

    #[test]
    fn little_work_is_reserved_for_nobody() {
        let mut window = Window::new(Ordering::Unordered, 8, 1, 10, 1000);
        window.admit((1..=3).map(|n| delivery(n, "")).collect());
        assert!(
            window.reserve(0).is_some(),
            "three wait, of eight lanes two are sooner"
        );
        assert!(window.reserve(1).is_none());
        let mut batches = Window::new(Ordering::Unordered, 1, 2, 10, 1000);
        batches.admit((1..=9).map(|n| delivery(n, "")).collect());
        assert!(batches.reserve(0).is_none(), "a batch is claimed as a whole");
        let mut per_key = Window::new(Ordering::PerKey, 1, 1, 10, 1000);
        per_key.admit(vec![delivery(1, "a"), delivery(2, "b")]);
        assert_eq!(per_key.reserve(0).map(|d| d.receipt.0), Some(1));
        per_key.unreserve(0);
        assert_eq!(
            per_key.take(0).map(|w| w[0].receipt.0),
            Some(1),
            "it was its own before"
        );
    }

    #[test]
    fn new_keys_go_where_least_is_to_do() {
        let mut window = Window::new(Ordering::PerKey, 4, 1, 100, 1 << 20);
        window.admit((0..5).map(|n| delivery(n, "hot")).collect());
        window.admit(vec![
            delivery(5, "a"),
            delivery(6, "b"),
            delivery(7, "c"),
            delivery(8, "a"),
            delivery(9, ""),
            delivery(10, "d"),
        ]);
        let lengths: Vec<_> = window.queues.iter().map(VecDeque::len).collect();
        assert_eq!(lengths, [5, 2, 2, 2, 0], "nothing waits behind the hot key");
        let (lane, mut work) = window.assign().unwrap();
        assert_eq!((lane, work[0].receipt.0), (0, 0));
        // What runs keeps its key where it is, also if all that waits is lost.
        window.lose_all();
        window.admit(vec![delivery(11, "x"), delivery(12, "hot")]);
        assert_eq!(window.queues[0].front().map(|d| d.receipt.0), Some(12));
        let mut done = vec![work.remove(0).ack()];
        window.finish(lane, &mut done);
        let mut work = window.take(0).unwrap();
        let mut done = vec![work.remove(0).ack()];
        window.finish(0, &mut done);
        assert_eq!(window.seats.len(), 1, "only x is in hand");
        assert_eq!(window.loads.iter().sum::<usize>(), 1);
    }

    #[test]
    fn what_waits_behind_a_given_back_event_goes_back_with_it() {
        let mut window = Window::new(Ordering::PerKey, 1, 1, 10, 1000);
        window.admit(vec![
            delivery(1, "a"),
            delivery(2, "b"),
            delivery(3, "a"),
            delivery(4, ""),
        ]);
        let (lane, mut work) = window.assign().unwrap();
        let mut settlements = vec![work.remove(0).release(None)];
        window.finish(lane, &mut settlements);
        assert_eq!(receipts(&settlements), [1, 3]);
        assert_eq!(window.in_hand.len(), 2);
    }

    #[test]
    fn lost_deliveries_are_not_started_and_take_their_followers_along() {
        let mut window = Window::new(Ordering::PerKey, 1, 1, 10, 1000);
        window.admit(vec![
            delivery(1, "a"),
            delivery(2, "a"),
            delivery(3, "a"),
            delivery(4, "b"),
        ]);
        let (lane, work) = window.assign().unwrap();
        assert_eq!(receipts(&window.lose(&[Receipt(1), Receipt(2)])), [2, 3]);
        assert_eq!(window.in_hand.len(), 2, "the running one and key b");
        let mut done: Vec<_> = work.into_iter().map(Delivery::ack).collect();
        window.finish(lane, &mut done);
        assert_eq!(window.assign().map(|(_, w)| w[0].receipt.0), Some(4));
        window.lose_all();
        assert_eq!(window.in_hand.len(), 1);
    }
}
