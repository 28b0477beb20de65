//! The order of rows in hand: of each key at most one is on its way, and the next one goes as soon as that
//! is confirmed. Pure; knows ids and keys and nothing else.

use std::collections::{BTreeSet, HashMap};

/// What rows are ordered by: a digest of destination and key.
pub(crate) type Order = [u8; 16];

/// The rows in hand of every key.
#[derive(Debug, Default)]
pub(crate) struct Chains(HashMap<Order, Chain>);

#[derive(Debug, Default)]
struct Chain {
    /// The row that is on its way, or whose refusal has not been written down.
    started: Option<i64>,
    waiting: BTreeSet<i64>,
}

impl Chains {
    /// A row is in hand and waits for its turn.
    pub(crate) fn wait(&mut self, order: Order, id: i64) {
        self.0.entry(order).or_default().waiting.insert(id);
    }

    /// The row whose turn it is.
    pub(crate) fn next(&self, order: &Order) -> Option<i64> {
        let chain = self.0.get(order)?;
        match chain.started {
            Some(_) => None,
            None => chain.waiting.first().copied(),
        }
    }

    /// The row whose turn it is goes.
    pub(crate) fn start(&mut self, order: &Order, id: i64) {
        if let Some(chain) = self.0.get_mut(order) {
            debug_assert!(chain.started.is_none() && chain.waiting.first() == Some(&id));
            chain.waiting.remove(&id);
            chain.started = Some(id);
        }
    }

    /// The row that is on its way waits again, and is the next unless an earlier one came meanwhile.
    pub(crate) fn put_back(&mut self, order: &Order, id: i64) {
        if let Some(chain) = self.0.get_mut(order)
            && chain.started == Some(id)
        {
            chain.started = None;
            chain.waiting.insert(id);
        }
    }

    /// A row is not in hand any more.
    pub(crate) fn remove(&mut self, order: &Order, id: i64) {
        let Some(chain) = self.0.get_mut(order) else {
            return;
        };
        chain.waiting.remove(&id);
        if chain.started == Some(id) {
            chain.started = None;
        }
        if chain.started.is_none() && chain.waiting.is_empty() {
            self.0.remove(order);
        }
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
            chains.wait(*order, *id);
        }
        chains
    }

    #[test]
    fn one_row_of_a_key_is_on_its_way_and_the_next_goes_when_it_is_confirmed() {
        let mut chains = chains(&[(A, 1), (A, 2), (A, 3), (B, 4)]);
        assert_eq!((chains.next(&A), chains.next(&B)), (Some(1), Some(4)));
        chains.start(&A, 1);
        assert_eq!(
            (chains.next(&A), chains.next(&B)),
            (None, Some(4)),
            "another key does not wait"
        );
        chains.remove(&A, 1);
        assert_eq!(chains.next(&A), Some(2));
    }

    #[test]
    fn a_row_that_was_committed_late_goes_before_later_ones_that_have_not_started() {
        let mut chains = chains(&[(A, 5), (A, 7)]);
        chains.start(&A, 5);
        chains.wait(A, 6);
        chains.wait(A, 3);
        assert_eq!(chains.next(&A), None, "5 is on its way already");
        chains.remove(&A, 5);
        let mut gone = Vec::new();
        while let Some(id) = chains.next(&A) {
            chains.start(&A, id);
            gone.push(id);
            chains.remove(&A, id);
        }
        assert_eq!(gone, [3, 6, 7]);
    }

    #[test]
    fn what_was_put_back_keeps_its_place() {
        let mut chains = chains(&[(A, 1), (A, 2)]);
        chains.start(&A, 1);
        chains.put_back(&A, 1);
        chains.put_back(&A, 9);
        assert_eq!(chains.next(&A), Some(1));
    }

    #[test]
    fn those_behind_a_refused_row_are_the_later_ones_of_its_key() {
        let mut chains = chains(&[(A, 2), (A, 5), (A, 7), (B, 6)]);
        chains.wait(A, 4);
        chains.start(&A, 2);
        assert_eq!(chains.behind(&A, 4), [5, 7]);
        assert_eq!(chains.behind(&A, 2), [4, 5, 7]);
        assert_eq!(chains.behind(&B, 6), [] as [i64; 0]);
        for id in [2, 4, 5, 7] {
            chains.remove(&A, id);
        }
        chains.remove(&B, 6);
        assert!(chains.0.is_empty(), "keys that are done with take no memory");
    }
}
