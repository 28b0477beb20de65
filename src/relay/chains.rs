//! The order of rows in hand: of each key at most one is on its way, and the next one goes as soon as that
//! is confirmed. Pure; knows ids and keys and nothing else.

use std::collections::BTreeSet;

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

/// What rows are ordered by: a digest of destination and key.
pub(crate) type Order = [u8; 16];

/// The rows in hand of every key.
#[derive(Debug, Default)]
pub(crate) struct Chains(HashMap<Order, Chain>);

/// The rows in hand of one key.
#[derive(Debug, Default)]
pub(crate) struct Chain {
    /// The row that is on its way, or whose refusal has not been written down.
    started: Option<i64>,
    waiting: BTreeSet<i64>,
}

/// Whose turn it was before a change, and whose it is now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Turn {
    pub(crate) before: Option<i64>,
    pub(crate) now: Option<i64>,
}

impl Chain {
    /// A row is in hand and waits for its turn.
    pub(crate) fn wait(&mut self, id: i64) {
        self.waiting.insert(id);
    }

    /// The row whose turn it is goes.
    pub(crate) fn start(&mut self, id: i64) {
        debug_assert_eq!(self.next(), Some(id));
        self.waiting.remove(&id);
        self.started = Some(id);
    }

    /// The row that is on its way waits again, and is the next unless an earlier one came meanwhile.
    pub(crate) fn put_back(&mut self, id: i64) {
        if self.started == Some(id) {
            self.started = None;
            self.waiting.insert(id);
        }
    }

    /// A row is not in hand any more.
    pub(crate) fn remove(&mut self, id: i64) {
        if self.started == Some(id) {
            self.started = None;
        } else {
            self.waiting.remove(&id);
        }
    }

    /// The row whose turn it is.
    fn next(&self) -> Option<i64> {
        match self.started {
            Some(_) => None,
            None => self.waiting.first().copied(),
        }
    }
}

impl Chains {
    /// Changes the chain of a key.
    pub(crate) fn change(&mut self, order: Order, change: impl FnOnce(&mut Chain)) -> Turn {
        let mut entry = match self.0.entry(order) {
            Entry::Occupied(entry) => entry,
            Entry::Vacant(entry) => entry.insert_entry(Chain::default()),
        };
        let chain = entry.get_mut();
        let before = chain.next();
        change(chain);
        let now = chain.next();
        if chain.started.is_none() && chain.waiting.is_empty() {
            entry.remove();
        }
        Turn { before, now }
    }

    /// The rows that come after this one.
    pub(crate) fn behind(&self, order: &Order, id: i64) -> Vec<i64> {
        let waiting = self.0.get(order).map(|chain| chain.waiting.range(id + 1..));
        waiting.into_iter().flatten().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Order = [1; 16];
    const B: Order = [2; 16];

    fn chains(waiting: &[(Order, i64)]) -> Chains {
        let mut chains = Chains::default();
        for (order, id) in waiting {
            chains.change(*order, |chain| chain.wait(*id));
        }
        chains
    }

    fn next(chains: &mut Chains, order: Order) -> Option<i64> {
        chains.change(order, |_| {}).now
    }

    fn turn(before: impl Into<Option<i64>>, now: impl Into<Option<i64>>) -> Turn {
        let (before, now) = (before.into(), now.into());
        Turn { before, now }
    }

    #[test]
    fn one_row_of_a_key_is_on_its_way_and_the_next_goes_when_it_is_confirmed() {
        let mut chains = chains(&[(A, 1), (A, 2), (A, 3), (B, 4)]);
        assert_eq!(chains.change(A, |chain| chain.start(1)), turn(1, None));
        assert_eq!(next(&mut chains, B), Some(4), "another key does not wait");
        assert_eq!(chains.change(A, |chain| chain.remove(1)), turn(None, 2));
    }

    #[test]
    fn a_row_that_was_committed_late_goes_before_later_ones_that_have_not_started() {
        let mut chains = chains(&[(A, 5), (A, 7)]);
        chains.change(A, |chain| chain.start(5));
        chains.change(A, |chain| chain.wait(6));
        assert_eq!(
            chains.change(A, |chain| chain.wait(3)),
            turn(None, None),
            "5 is on its way already"
        );
        chains.change(A, |chain| chain.remove(5));
        let mut gone = Vec::new();
        while let Some(id) = next(&mut chains, A) {
            chains.change(A, |chain| chain.start(id));
            gone.push(id);
            chains.change(A, |chain| chain.remove(id));
        }
        assert_eq!(gone, [3, 6, 7]);
    }

    #[test]
    fn what_was_put_back_keeps_its_place() {
        let mut chains = chains(&[(A, 1), (A, 2)]);
        chains.change(A, |chain| chain.start(1));
        assert_eq!(chains.change(A, |chain| chain.put_back(1)), turn(None, 1));
        assert_eq!(chains.change(A, |chain| chain.put_back(9)), turn(1, 1));
    }

    #[test]
    fn those_behind_a_refused_row_are_the_later_ones_of_its_key() {
        let mut chains = chains(&[(A, 2), (A, 5), (A, 7), (B, 6), (A, 4)]);
        chains.change(A, |chain| chain.start(2));
        assert_eq!(chains.behind(&A, 4), [5, 7]);
        assert_eq!(chains.behind(&A, 2), [4, 5, 7]);
        assert_eq!(chains.behind(&B, 6), [] as [i64; 0]);
        for id in [2, 4, 5, 7] {
            chains.change(A, |chain| chain.remove(id));
        }
        chains.change(B, |chain| chain.remove(6));
        assert!(chains.0.is_empty(), "keys that are done with take no memory");
    }
}
