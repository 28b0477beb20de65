//! One publisher of a relay: what is on its way to it, what may go next, and which rows are suspects.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use tokio::time::Instant;

use super::pace::{Admits, Pace};
use crate::publisher::Publisher;

/// A publisher and what is known of it.
pub(crate) struct Outlet {
    pub(crate) name: String,
    pub(crate) publisher: Arc<dyn Publisher>,
    pub(crate) pace: Pace,
    in_flight: usize,
    /// What is on its way is on its way alone: nothing else goes.
    alone: bool,
    /// Rows that were on their way when a connection died, and how often in a row one of them was alone then.
    suspects: HashMap<i64, u32>,
}

/// A row that goes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) id: i64,
    /// Nothing else is on its way, and nothing else will be.
    pub(crate) alone: bool,
    /// It is the try after a pause.
    pub(crate) tries: bool,
}

impl Outlet {
    pub(crate) fn new(name: String, publisher: Arc<dyn Publisher>) -> Self {
        Self {
            name,
            publisher,
            pace: Pace::default(),
            in_flight: 0,
            alone: false,
            suspects: HashMap::new(),
        }
    }

    /// Which of these rows goes next, if one may.
    ///
    /// Suspects go first and one at a time, with nothing else on its way to the publisher, since a
    /// connection carries the rows of all its destinations: a row must not be blamed for another's fault.
    pub(crate) fn choose(&self, startable: &BTreeSet<i64>, now: Instant) -> Option<Choice> {
        if self.alone {
            return None;
        }
        let suspect = if self.suspects.is_empty() {
            None
        } else {
            startable
                .iter()
                .find(|id| self.suspects.contains_key(id))
                .copied()
        };
        match self.pace.admits(now) {
            Admits::Nothing => None,
            Admits::One => suspect.or(startable.first().copied()).map(|id| Choice {
                id,
                alone: self.in_flight == 0,
                tries: true,
            }),
            Admits::All => match suspect {
                Some(id) => (self.in_flight == 0).then_some(Choice {
                    id,
                    alone: true,
                    tries: false,
                }),
                None => startable.first().map(|&id| Choice {
                    id,
                    alone: false,
                    tries: false,
                }),
            },
        }
    }

    pub(crate) fn started(&mut self, choice: Choice) {
        self.in_flight += 1;
        self.alone = choice.alone;
        if choice.tries {
            self.pace.tries();
        }
    }

    pub(crate) fn landed(&mut self) {
        self.in_flight -= 1;
        self.alone = false;
    }

    /// How often in a row the connection died with this row alone.
    pub(crate) fn died_alone(&self, id: i64) -> u32 {
        self.suspects.get(&id).copied().unwrap_or(0)
    }

    /// The row goes alone from now on.
    pub(crate) fn suspect(&mut self, id: i64, died_alone: u32) {
        self.suspects.insert(id, died_alone);
    }

    pub(crate) fn clear(&mut self, id: i64) {
        self.suspects.remove(&id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::MemoryPublisher;

    fn outlet() -> Outlet {
        Outlet::new("memory".into(), Arc::new(MemoryPublisher::new()))
    }

    fn choice(id: i64, alone: bool, tries: bool) -> Option<Choice> {
        Some(Choice { id, alone, tries })
    }

    #[tokio::test]
    async fn suspects_go_first_one_at_a_time_and_nothing_goes_beside_them() {
        let now = Instant::now();
        let rows = BTreeSet::from([1, 2, 3, 4]);
        let mut outlet = outlet();
        assert_eq!(outlet.choose(&rows, now), choice(1, false, false));
        outlet.started(outlet.choose(&rows, now).unwrap());
        outlet.started(outlet.choose(&BTreeSet::from([2, 3, 4]), now).unwrap());
        for id in [1, 2] {
            outlet.landed();
            outlet.suspect(id, 0);
            if id == 1 {
                assert_eq!(outlet.choose(&rows, now), None, "2 is still on its way");
            }
        }
        for (id, rest) in [(1, BTreeSet::from([2, 3, 4])), (2, BTreeSet::from([3, 4]))] {
            let mut startable = rest.clone();
            startable.insert(id);
            let next = outlet.choose(&startable, now);
            assert_eq!(next, choice(id, true, false));
            outlet.started(next.unwrap());
            assert_eq!(outlet.choose(&rest, now), None, "beside a suspect goes nothing");
            outlet.landed();
            outlet.clear(id);
        }
        assert_eq!(
            outlet.choose(&BTreeSet::from([3, 4]), now),
            choice(3, false, false)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_pause_one_row_is_the_try_if_possible_a_suspect() {
        let mut outlet = outlet();
        let rows = BTreeSet::from([1, 2, 3]);
        outlet.suspect(2, 1);
        outlet.pace.fails(outlet.pace.era(), Instant::now(), "down");
        assert_eq!(outlet.choose(&rows, Instant::now()), None);
        let over = outlet.pace.closed_until().unwrap();
        let next = outlet.choose(&rows, over);
        assert_eq!(next, choice(2, true, true));
        outlet.started(next.unwrap());
        outlet.clear(2);
        assert_eq!(outlet.choose(&rows, over), None);
        outlet.landed();
        assert_eq!(outlet.choose(&rows, over), None, "it has not said anything yet");
        outlet.pace.works(outlet.pace.era());
        assert_eq!(outlet.choose(&rows, over), choice(1, false, false));
    }

    #[tokio::test(start_paused = true)]
    async fn a_try_beside_stragglers_is_not_alone() {
        let mut outlet = outlet();
        outlet.started(choice(1, false, false).unwrap());
        outlet.pace.fails(outlet.pace.era(), Instant::now(), "down");
        let over = outlet.pace.closed_until().unwrap();
        assert_eq!(outlet.choose(&BTreeSet::from([2]), over), choice(2, false, true));
    }
}
