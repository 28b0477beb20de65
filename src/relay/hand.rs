//! The rows in hand: read from the table, and neither confirmed nor forgotten yet.

use std::collections::BTreeSet;
use std::sync::Arc;

use hashbrown::HashMap;

use super::chains::{Chain, Chains, Order};
use crate::store::{DueRow, HeldLane, LANES};

/// Rows in hand, and which of them may go now. A row that is forgotten is none the worse for it: it is as
/// due in the table as before.
pub(crate) struct Hand {
    rows: HashMap<i64, InHand>,
    chains: Chains,
    /// Per publisher.
    startable: Vec<BTreeSet<i64>>,
    per_lane: [usize; LANES as usize],
    bytes: usize,
    dropped: u64,
}

/// One row in hand.
pub(crate) struct InHand {
    pub(crate) row: Arc<DueRow>,
    /// The lane, with the fence under which the row was read.
    pub(crate) lane: HeldLane,
    /// Which of the publishers.
    pub(crate) publisher: usize,
    /// It is on its way, or was refused and that has not been written down.
    started: bool,
}

impl InHand {
    /// A row without a key waits for nothing.
    fn order(&self) -> Option<Order> {
        self.row.order
    }

    fn bytes(&self) -> usize {
        let message = &self.row.message;
        message.payload.as_ref().map_or(0, |body| body.len()) + message.headers.size()
    }
}

impl Hand {
    pub(crate) fn new(publishers: usize) -> Self {
        Self {
            rows: HashMap::new(),
            chains: Chains::default(),
            startable: vec![BTreeSet::new(); publishers],
            per_lane: [0; LANES as usize],
            bytes: 0,
            dropped: 0,
        }
    }

    /// Takes a row that is due. Its message has the trace context in which it was written, unless it brings its own.
    pub(crate) fn take(&mut self, mut row: DueRow, lane: HeldLane, publisher: usize) {
        if let Some(traceparent) = &row.traceparent
            && row.message.headers.get("traceparent").is_none()
        {
            row.message.headers.push("traceparent", traceparent.clone());
        }
        let id = row.id;
        let taken = InHand {
            row: Arc::new(row),
            lane,
            publisher,
            started: false,
        };
        let order = taken.order();
        self.per_lane[usize::from(lane.lane)] += 1;
        self.bytes += taken.bytes();
        self.rows.insert(id, taken);
        match order {
            Some(order) => self.rechain(order, |chain| chain.wait(id)),
            None => self.offer(id, true),
        }
    }

    /// The rows of this publisher that may go now.
    pub(crate) fn startable(&self, publisher: usize) -> &BTreeSet<i64> {
        &self.startable[publisher]
    }

    pub(crate) fn get(&self, id: i64) -> Option<&InHand> {
        self.rows.get(&id)
    }

    /// A row that may go does so.
    pub(crate) fn start(&mut self, id: i64) -> Option<&InHand> {
        let row = self.rows.get_mut(&id)?;
        row.started = true;
        match row.order() {
            Some(order) => self.rechain(order, |chain| chain.start(id)),
            None => self.offer(id, false),
        }
        self.rows.get(&id)
    }

    /// A row that was on its way waits again.
    pub(crate) fn put_back(&mut self, id: i64) {
        let Some(row) = self.rows.get_mut(&id) else { return };
        row.started = false;
        match row.order() {
            Some(order) => self.rechain(order, |chain| chain.put_back(id)),
            None => self.offer(id, true),
        }
    }

    /// A row is confirmed: the next of its key may go.
    pub(crate) fn confirmed(&mut self, id: i64) {
        self.remove(id);
    }

    /// A row's refusal is written down. The later ones of its key are not due any more, unless they may overtake it.
    pub(crate) fn refused(&mut self, id: i64, overtake: bool) {
        let Some(order) = self.rows.get(&id).map(InHand::order) else {
            return;
        };
        if let Some(order) = order
            && !overtake
        {
            for behind in self.chains.behind(&order, id) {
                self.remove(behind);
                self.dropped += 1;
            }
        }
        self.remove(id);
    }

    /// Forgets the rows that wait and of which this is true.
    pub(crate) fn forget(&mut self, unwanted: impl Fn(&InHand) -> bool) -> Vec<i64> {
        let waiting = self.rows.iter().filter(|(_, row)| !row.started && unwanted(row));
        let ids: Vec<i64> = waiting.map(|(id, _)| *id).collect();
        for id in &ids {
            self.remove(*id);
        }
        self.dropped += ids.len() as u64;
        ids
    }

    /// Forgets this row, if it waits.
    pub(crate) fn forget_one(&mut self, id: i64) {
        if self.rows.get(&id).is_some_and(|row| !row.started) {
            self.remove(id);
            self.dropped += 1;
        }
    }

    /// Counts the rows that were forgotten: what was read before the last of them was read without it,
    /// and might overtake it.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = i64> + '_ {
        self.rows.keys().copied()
    }

    pub(crate) fn in_lane(&self, lane: u8) -> usize {
        self.per_lane[usize::from(lane)]
    }

    /// Of payloads and headers.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    fn remove(&mut self, id: i64) {
        let Some(row) = self.rows.remove(&id) else { return };
        self.per_lane[usize::from(row.lane.lane)] -= 1;
        self.bytes -= row.bytes();
        self.startable[row.publisher].remove(&id);
        if let Some(order) = row.order() {
            self.rechain(order, |chain| chain.remove(id));
        }
    }

    /// Changes the chain of a row's key, and with it whose turn it is.
    fn rechain(&mut self, order: Order, change: impl FnOnce(&mut Chain)) {
        let turn = self.chains.change(order, change);
        if turn.before == turn.now {
            return;
        }
        if let Some(before) = turn.before {
            self.offer(before, false);
        }
        if let Some(now) = turn.now {
            self.offer(now, true);
        }
    }

    fn offer(&mut self, id: i64, now: bool) {
        let Some(row) = self.rows.get(&id) else { return };
        if now {
            self.startable[row.publisher].insert(id);
        } else {
            self.startable[row.publisher].remove(&id);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::publisher::{CloudEventsMode, Message};

    fn row(id: i64, key: Option<u8>) -> DueRow {
        DueRow {
            id,
            lane: 3,
            order: key.map(|key| [key; 16]),
            destination: "memory:a".parse().unwrap(),
            attempts: 0,
            message: Message {
                event_id: id.to_string(),
                source: "test".into(),
                event_type: None,
                address: "a".into(),
                key: None,
                payload: Some(vec![0; 10].into()),
                content_type: None,
                headers: crate::event::Headers::new(),
                attributes: Vec::new(),
                mode: CloudEventsMode::Binary,
                time: SystemTime::UNIX_EPOCH,
                replays: 0,
            },
            traceparent: None,
        }
    }

    fn hand(rows: &[(i64, Option<u8>)]) -> Hand {
        let mut hand = Hand::new(1);
        for &(id, key) in rows {
            hand.take(row(id, key), HeldLane { lane: 3, fence: 1 }, 0);
        }
        hand
    }

    fn startable(hand: &Hand) -> Vec<i64> {
        hand.startable(0).iter().copied().collect()
    }

    #[test]
    fn one_row_of_each_key_may_go_and_every_row_without_one() {
        let mut hand = hand(&[(1, Some(1)), (2, Some(1)), (3, None), (4, None), (5, Some(2))]);
        assert_eq!(startable(&hand), [1, 3, 4, 5]);
        assert_eq!((hand.in_lane(3), hand.in_lane(4), hand.bytes()), (5, 0, 50));
        for id in [1, 3, 5] {
            hand.start(id);
        }
        assert_eq!(startable(&hand), [4]);
        hand.confirmed(1);
        hand.put_back(3);
        assert_eq!(startable(&hand), [2, 3, 4], "the next of the key, at once");
        for id in [2, 3, 4, 5] {
            hand.confirmed(id);
        }
        assert_eq!((hand.in_lane(3), hand.bytes(), hand.ids().count()), (0, 0, 0));
    }

    #[test]
    fn a_refused_row_takes_the_later_ones_of_its_key_out_of_hand_once_it_is_written() {
        let rows = [(2, Some(1)), (4, Some(1)), (5, Some(1)), (6, Some(2))];
        for (overtake, left, dropped) in [(false, vec![1, 6], 2), (true, vec![1, 6], 0)] {
            let mut hand = hand(&rows);
            hand.start(2);
            hand.take(row(1, Some(1)), HeldLane { lane: 3, fence: 1 }, 0);
            assert_eq!(startable(&hand), [6], "until then nothing of the key goes");
            hand.refused(2, overtake);
            assert_eq!(
                (startable(&hand), hand.dropped()),
                (left, dropped),
                "an earlier one is not behind it"
            );
            hand.confirmed(1);
            assert_eq!(startable(&hand), if overtake { vec![4, 6] } else { vec![6] });
        }
    }

    #[test]
    fn what_is_on_its_way_is_not_forgotten() {
        let mut hand = hand(&[(1, Some(1)), (2, Some(1)), (3, None)]);
        hand.start(1);
        let mut gone = hand.forget(|_| true);
        gone.sort_unstable();
        assert_eq!((gone, hand.dropped()), (vec![2, 3], 2));
        hand.take(row(2, Some(1)), HeldLane { lane: 3, fence: 1 }, 0);
        assert_eq!(startable(&hand), [] as [i64; 0], "read again, it waits as before");
        hand.put_back(1);
        assert_eq!(startable(&hand), [1]);
    }

    #[test]
    fn an_earlier_row_that_comes_late_takes_the_turn() {
        let mut hand = hand(&[(5, Some(1))]);
        assert_eq!(startable(&hand), [5]);
        hand.take(row(4, Some(1)), HeldLane { lane: 3, fence: 1 }, 0);
        assert_eq!(startable(&hand), [4]);
    }
}
