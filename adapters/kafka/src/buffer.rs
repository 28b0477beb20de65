//! What waits in this process to be handed out: records that have come, and those that were given back.
//!
//! Kafka can neither take a record back nor delay one, so what is given back waits here, and comes out
//! again in the order of the log. While an event waits for its time, later ones of its key wait behind
//! it; others go on. Nothing here reads a clock.

use std::collections::hash_map::Entry as MapEntry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use onlyonce::event::RawEvent;
use tokio::time::Instant;

use crate::settle::{Generation, Ticket};

/// So often in a row an event may be given back "at once" before it is slowed down.
const PATIENCE: u32 = 3;
const FIRST_SLOWDOWN: Duration = Duration::from_millis(100);
const SLOWEST: Duration = Duration::from_secs(5);

/// A record in this process. It goes through several maps on its way, so it is small.
#[derive(Debug, Clone)]
pub(crate) struct Record {
    pub(crate) event: Arc<RawEvent>,
    /// What it weighs in byte budgets.
    pub(crate) bytes: usize,
    /// How often it was given back "at once".
    pub(crate) returns: u32,
}

/// Everything that could be handed out, now or later.
#[derive(Debug, Default)]
pub(crate) struct Buffer {
    shelves: BTreeMap<Generation, Shelf>,
    /// When something on a shelf is due, and which of it.
    due: BTreeSet<(Instant, Generation, Hold)>,
    /// The shelf that is next, so that one partition does not starve another.
    next: Option<Generation>,
}

/// One assignment of one partition.
#[derive(Debug, Default)]
struct Shelf {
    ready: BTreeMap<i64, Record>,
    held: HashMap<Hold, Held>,
}

/// What waits together: all of a key, or a record that has none.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Hold {
    Key(Bytes),
    Offset(i64),
}

#[derive(Debug)]
struct Held {
    until: Instant,
    records: BTreeMap<i64, Record>,
}

impl Buffer {
    /// A record has come.
    pub(crate) fn push(&mut self, ticket: Ticket, record: Record) {
        let shelf = self.shelves.entry(ticket.generation).or_default();
        match shelf.held.get_mut(&Hold::of(ticket.offset, &record.event)) {
            Some(held) => held.records.insert(ticket.offset, record),
            None => shelf.ready.insert(ticket.offset, record),
        };
    }

    /// A record was handed out and comes back, to be handed out again not before `after`.
    pub(crate) fn give_back(&mut self, ticket: Ticket, mut record: Record, after: Duration, now: Instant) {
        let wait = if after.is_zero() {
            record.returns += 1;
            slowdown(record.returns)
        } else {
            after
        };
        if wait.is_zero() {
            return self.push(ticket, record);
        }
        self.hold(ticket, record, now + wait);
    }

    fn hold(&mut self, ticket: Ticket, record: Record, until: Instant) {
        let Ticket { generation, offset } = ticket;
        let shelf = self.shelves.entry(generation).or_default();
        let hold = Hold::of(offset, &record.event);
        let held = match shelf.held.entry(hold.clone()) {
            MapEntry::Occupied(entry) => {
                let held = entry.into_mut();
                self.due.remove(&(held.until, generation, hold.clone()));
                // For all of a key the latest time counts: none of them may come before its own.
                held.until = held.until.max(until);
                held
            }
            MapEntry::Vacant(entry) => entry.insert(Held {
                until,
                records: BTreeMap::new(),
            }),
        };
        held.records.insert(offset, record);
        self.due.insert((held.until, generation, hold.clone()));
        // What had come already would overtake it.
        if let Hold::Key(key) = &hold {
            let behind: Vec<i64> = shelf
                .ready
                .iter()
                .filter(|(_, record)| record.event.key.as_ref() == Some(key))
                .map(|(offset, _)| *offset)
                .collect();
            for offset in behind {
                if let Some(record) = shelf.ready.remove(&offset) {
                    held.records.insert(offset, record);
                }
            }
        }
    }

    /// The next records, at most `max`, in the order of the log within each partition.
    pub(crate) fn take(&mut self, max: usize, now: Instant) -> Vec<(Ticket, Record)> {
        self.wake(now);
        let mut taken = Vec::new();
        let order: Vec<Generation> = match self.next {
            Some(next) => self
                .shelves
                .range(next..)
                .chain(self.shelves.range(..next))
                .map(|(g, _)| *g)
                .collect(),
            None => self.shelves.keys().copied().collect(),
        };
        for (at, generation) in order.iter().enumerate() {
            let Some(shelf) = self.shelves.get_mut(generation) else {
                continue;
            };
            while taken.len() < max
                && let Some((offset, record)) = shelf.ready.pop_first()
            {
                let generation = *generation;
                taken.push((Ticket { generation, offset }, record));
            }
            if taken.len() == max {
                self.next = order.get(at + 1).or(order.first()).copied();
                break;
            }
        }
        self.shelves
            .retain(|_, shelf| !shelf.ready.is_empty() || !shelf.held.is_empty());
        taken
    }

    fn wake(&mut self, now: Instant) {
        while let Some((until, _, _)) = self.due.first()
            && *until <= now
            && let Some((_, generation, hold)) = self.due.pop_first()
        {
            if let Some(shelf) = self.shelves.get_mut(&generation)
                && let Some(held) = shelf.held.remove(&hold)
            {
                shelf.ready.extend(held.records);
            }
        }
    }

    /// When something is to be handed out that waits for its time.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.due.first().map(|(until, _, _)| *until)
    }

    /// The partition has moved on: what waits of it is somebody else's. Returns how much that was.
    pub(crate) fn forget(&mut self, generation: Generation) -> (usize, usize) {
        self.due.retain(|(_, of, _)| *of != generation);
        self.shelves.remove(&generation).map_or((0, 0), |shelf| {
            shelf
                .ready
                .values()
                .chain(shelf.held.values().flat_map(|held| held.records.values()))
                .fold((0, 0), |(count, bytes), record| (count + 1, bytes + record.bytes))
        })
    }
}

impl Hold {
    fn of(offset: i64, event: &RawEvent) -> Self {
        match &event.key {
            Some(key) => Self::Key(key.clone()),
            None => Self::Offset(offset),
        }
    }
}

/// Giving back "at once" again and again is not a hot loop.
fn slowdown(returns: u32) -> Duration {
    match returns.checked_sub(PATIENCE + 1) {
        None => Duration::ZERO,
        Some(more) => FIRST_SLOWDOWN.saturating_mul(1 << more.min(10)).min(SLOWEST),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Generation = Generation(1);
    const B: Generation = Generation(2);
    const SECOND: Duration = Duration::from_secs(1);

    fn record(key: &'static str) -> Record {
        let key = (!key.is_empty()).then(|| Bytes::from_static(key.as_bytes()));
        let event = RawEvent {
            key,
            ..RawEvent::default()
        };
        Record {
            event: event.into(),
            bytes: 1,
            returns: 0,
        }
    }

    fn ticket(generation: Generation, offset: i64) -> Ticket {
        Ticket { generation, offset }
    }

    fn filled(keys: &[&'static str]) -> Buffer {
        let mut buffer = Buffer::default();
        for (offset, key) in keys.iter().enumerate() {
            buffer.push(ticket(A, offset as i64), record(key));
        }
        buffer
    }

    fn offsets(taken: &[(Ticket, Record)]) -> Vec<i64> {
        taken.iter().map(|(ticket, _)| ticket.offset).collect()
    }

    #[test]
    fn what_comes_back_comes_out_in_the_order_of_the_log() {
        let mut buffer = filled(&["a", "b", "a", "b"]);
        let now = Instant::now();
        let taken = buffer.take(3, now);
        assert_eq!(offsets(&taken), [0, 1, 2]);
        for (ticket, record) in taken.into_iter().rev() {
            buffer.give_back(ticket, record, Duration::ZERO, now);
        }
        assert_eq!(offsets(&buffer.take(9, now)), [0, 1, 2, 3]);
        assert!(buffer.take(9, now).is_empty());
    }

    #[test]
    fn a_key_waits_behind_its_first_and_others_go_on() {
        let mut buffer = filled(&["a", "b", "a", "b", "a", ""]);
        let now = Instant::now();
        let mut taken = buffer.take(3, now);
        let third = taken.pop().unwrap();
        let (first, second) = (taken.remove(0), taken.remove(0));
        buffer.give_back(first.0, first.1, SECOND, now);
        buffer.give_back(third.0, third.1, Duration::ZERO, now);
        buffer.push(ticket(A, 6), record("a"));
        buffer.give_back(second.0, second.1, Duration::ZERO, now);
        assert_eq!(offsets(&buffer.take(9, now)), [1, 3, 5]);
        assert_eq!(buffer.next_due(), Some(now + SECOND));
        assert!(buffer.take(9, now + SECOND / 2).is_empty());
        assert_eq!(offsets(&buffer.take(9, now + SECOND)), [0, 2, 4, 6]);
        assert_eq!(buffer.next_due(), None);
    }

    #[test]
    fn records_without_a_key_wait_for_nobody() {
        let mut buffer = filled(&["", "", ""]);
        let now = Instant::now();
        let mut taken = buffer.take(2, now);
        let (ticket, record) = taken.remove(0);
        buffer.give_back(ticket, record, SECOND, now);
        assert_eq!(offsets(&buffer.take(9, now)), [2]);
        assert_eq!(offsets(&buffer.take(9, now + SECOND)), [0]);
    }

    #[test]
    fn of_two_times_of_a_key_the_later_one_counts() {
        let mut buffer = filled(&["a", "a"]);
        let now = Instant::now();
        let mut taken = buffer.take(2, now);
        let (ticket, record) = taken.remove(1);
        buffer.give_back(ticket, record, 2 * SECOND, now);
        let (ticket, record) = taken.remove(0);
        buffer.give_back(ticket, record, SECOND, now);
        assert!(buffer.take(9, now + SECOND).is_empty());
        assert_eq!(offsets(&buffer.take(9, now + 2 * SECOND)), [0, 1]);
    }

    #[test]
    fn giving_back_at_once_for_ever_is_slowed_down() {
        let mut buffer = filled(&["a"]);
        let start = Instant::now();
        let mut now = start;
        for _ in 0..20 {
            let (ticket, record) = buffer.take(1, now).remove(0);
            buffer.give_back(ticket, record, Duration::ZERO, now);
            now = buffer.next_due().unwrap_or(now);
        }
        assert!(now - start > Duration::from_secs(30), "{:?}", now - start);
    }

    #[test]
    fn partitions_take_turns() {
        let mut buffer = filled(&["a", "a", "a", "a"]);
        (0..4).for_each(|offset| buffer.push(ticket(B, offset), record("b")));
        let now = Instant::now();
        let turns: Vec<_> = (0..4).map(|_| buffer.take(2, now)[0].0.generation).collect();
        assert_eq!(turns, [A, B, A, B]);
    }

    #[test]
    fn what_moves_on_is_forgotten_whole() {
        let mut buffer = filled(&["a", "b", "a"]);
        buffer.push(ticket(B, 0), record("a"));
        let now = Instant::now();
        let (first, record) = buffer.take(1, now).remove(0);
        buffer.give_back(first, record, SECOND, now);
        assert_eq!(buffer.forget(A), (3, 3));
        assert_eq!(buffer.next_due(), None);
        assert_eq!(buffer.take(9, now + SECOND)[0].0, ticket(B, 0));
    }
}
