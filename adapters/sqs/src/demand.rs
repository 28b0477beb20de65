//! How many calls for messages to have under way, and how many messages to ask each for.

use crate::settle::BATCH;

/// What the consumer has room for, against what was asked for already.
///
/// What is under way and what waits here never exceed the room, so that nothing is taken from the queue
/// that has to wait long. On an empty queue one call is enough; each that brings much of what it asked for
/// lets one more go out beside it, as a call for a few messages costs as much as one for ten.
#[derive(Debug)]
pub(crate) struct Demand {
    room: usize,
    asked: usize,
    under_way: usize,
    /// How many calls may be under way now, and at most.
    breadth: usize,
    most: usize,
    /// Less room than this is not worth another call while one is under way.
    worth_it: usize,
}

impl Demand {
    /// For a consumer with this window.
    pub(crate) fn new(most: usize, window: usize) -> Self {
        Self {
            room: 0,
            asked: 0,
            under_way: 0,
            breadth: 1,
            most,
            worth_it: (window / 4).clamp(1, BATCH),
        }
    }

    /// The consumer has room for this many deliveries.
    pub(crate) fn room(&mut self, room: usize) {
        self.room = room;
    }

    /// This many were handed to it.
    pub(crate) fn took(&mut self, deliveries: usize) {
        self.room = self.room.saturating_sub(deliveries);
    }

    /// Nothing waits here, nothing is under way, and the room is too little to be worth a call.
    pub(crate) fn is_little(&self, waiting: usize) -> bool {
        let idle = self.under_way == 0 && waiting == 0;
        idle && (1..self.worth_it).contains(&self.room)
    }

    /// Whether [`next`](Self::next) has something to say, or will have after a while.
    pub(crate) fn wants(&self, waiting: usize) -> bool {
        let more = self.under_way < self.breadth && self.free(waiting) >= self.worth_it;
        more || self.is_little(waiting)
    }

    fn free(&self, waiting: usize) -> usize {
        self.room.saturating_sub(self.asked + waiting)
    }

    /// How many messages the next call should ask for, while this many deliveries wait here. With
    /// `little` a little room will do: there may never be more, as where it is bounded by bytes.
    pub(crate) fn next(&mut self, waiting: usize, little: bool) -> Option<usize> {
        let free = self.free(waiting);
        let worth_it = free >= self.worth_it || (little && self.is_little(waiting));
        if !worth_it || self.under_way >= self.breadth {
            return None;
        }
        let ask = free.min(BATCH);
        self.asked += ask;
        self.under_way += 1;
        Some(ask)
    }

    /// A call is made again whose answer was lost. There was room for what it took, and it is ours.
    pub(crate) fn again(&mut self, ask: usize) -> bool {
        let may = self.under_way < self.breadth;
        if may {
            self.asked += ask;
            self.under_way += 1;
        }
        may
    }

    /// A call that asked for `ask` brought this many.
    pub(crate) fn answered(&mut self, ask: usize, brought: usize) {
        self.asked -= ask;
        self.under_way -= 1;
        self.breadth = match brought {
            0 => 1,
            _ if brought * 2 >= ask => (self.breadth + 1).min(self.most),
            _ => self.breadth,
        };
    }

    /// How many calls are under way.
    pub(crate) fn under_way(&self) -> usize {
        self.under_way
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: [usize; 0] = [];

    fn all(demand: &mut Demand, waiting: usize) -> Vec<usize> {
        std::iter::from_fn(|| demand.next(waiting, false)).collect()
    }

    #[test]
    fn an_empty_queue_has_one_call_and_a_busy_one_as_many_as_there_is_room_for() {
        let mut demand = Demand::new(4, 64);
        assert_eq!(all(&mut demand, 0), NONE, "nobody wants any");
        demand.room(64);
        assert_eq!(all(&mut demand, 0), [10]);
        demand.answered(10, 10);
        assert_eq!(all(&mut demand, 10), [10, 10]);
        demand.answered(10, 10);
        demand.answered(10, 10);
        assert_eq!(all(&mut demand, 30), [10, 10, 10], "64 - 30 is room for three");
        demand.answered(10, 0);
        assert_eq!(all(&mut demand, 30), NONE, "it ran empty");
    }

    #[test]
    fn calls_that_bring_little_do_not_become_more() {
        let mut demand = Demand::new(4, 64);
        demand.room(64);
        assert_eq!(all(&mut demand, 0), [10]);
        demand.answered(10, 4);
        assert_eq!(all(&mut demand, 0), [10], "one at a time is enough");
        demand.answered(10, 5);
        assert_eq!(all(&mut demand, 0), [10, 10]);
    }

    #[test]
    fn a_call_that_is_made_again_needs_no_room_and_is_one_of_those_under_way() {
        let mut demand = Demand::new(4, 64);
        demand.room(10);
        assert!(demand.again(10), "what it took is ours");
        assert!(!demand.again(10), "one at a time after a failure");
        assert_eq!(all(&mut demand, 0), NONE, "and the room is for it");
        demand.answered(10, 10);
        demand.room(20);
        assert!(demand.wants(10));
        assert_eq!(all(&mut demand, 10), [10]);
    }

    #[test]
    fn what_is_under_way_and_what_waits_never_exceed_the_room() {
        let mut demand = Demand::new(8, 16);
        demand.room(16);
        demand.breadth = 8;
        assert_eq!(all(&mut demand, 0), [10, 6]);
        demand.answered(10, 10);
        demand.took(10);
        assert_eq!(all(&mut demand, 0), NONE);
    }

    #[test]
    fn a_little_room_is_asked_for_when_there_is_no_more_for_long() {
        let mut demand = Demand::new(4, 64);
        demand.breadth = 4;
        demand.room(3);
        assert!(demand.is_little(0));
        assert_eq!(all(&mut demand, 0), NONE, "more may come");
        assert_eq!(demand.next(0, true), Some(3), "or it would never be used");
        demand.room(8);
        assert!(!demand.is_little(0), "one is under way");
        assert_eq!(demand.next(0, true), None, "five more are not worth a call");
        demand.room(13);
        assert_eq!(all(&mut demand, 0), [10]);
    }
}
