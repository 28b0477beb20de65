//! What was committed against what has arrived: pure.

use std::collections::{HashMap, HashSet};
use std::fmt;

use super::broker::Arrival;
use super::route::Route;

/// An event of the ledger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Committed {
    pub(super) event_id: String,
    pub(super) key: String,
    /// Its place among the events of its key, from 1.
    pub(super) place: i64,
    pub(super) route: Route,
    /// It must not arrive.
    pub(super) poison: bool,
}

/// The end of a run in numbers.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) committed: usize,
    pub(super) poison: usize,
    /// Of the committed events, poison apart.
    pub(super) arrived: usize,
    pub(super) lost: usize,
    /// Second and later arrivals.
    pub(super) copies: usize,
    /// Arrivals of events whose transaction was rolled back.
    pub(super) rolled_back: usize,
    /// First arrivals behind a later one of their key and route.
    pub(super) out_of_order: usize,
    /// Arrivals of what nobody committed, of poison, elsewhere than committed or with another key or body.
    pub(super) wrong: usize,
    /// The first few that are not as they should be.
    examples: Vec<String>,
}

/// The body of an event: its key and its place.
pub(super) fn body(key: &str, place: i64) -> String {
    format!("{key} {place}")
}

pub(super) fn compare(
    committed: &[Committed],
    rolled_back: &HashSet<String>,
    arrived: &HashMap<Route, Vec<Arrival>>,
) -> Verdict {
    let mut verdict = Verdict::default();
    let by_id: HashMap<&str, &Committed> = committed.iter().map(|c| (c.event_id.as_str(), c)).collect();
    let mut seen = HashSet::new();
    for route in Route::ALL {
        let mut last: HashMap<&str, i64> = HashMap::new();
        for arrival in arrived.get(&route).into_iter().flatten() {
            let id = arrival.event_id.as_str();
            let Some(event) = by_id.get(id) else {
                if rolled_back.contains(id) {
                    verdict.rolled_back += 1;
                    verdict.example(format!("of a transaction that was rolled back: {arrival:?}"));
                } else {
                    verdict.wrong += 1;
                    verdict.example(format!("nobody wrote it: {arrival:?}"));
                }
                continue;
            };
            let meant = (
                &event.key,
                body(&event.key, event.place),
                event.route,
                event.poison,
            );
            if meant != (&arrival.key, arrival.body.clone(), route, false) {
                verdict.wrong += 1;
                verdict.example(format!("by {route:?} came {arrival:?}, which was {event:?}"));
                continue;
            }
            if !seen.insert(id) {
                verdict.copies += 1;
                continue;
            }
            verdict.arrived += 1;
            let last = last.entry(&event.key).or_default();
            if event.place < *last {
                verdict.out_of_order += 1;
                verdict.example(format!("behind place {last} of its key: {event:?}"));
            }
            *last = event.place.max(*last);
        }
    }
    for event in committed {
        verdict.committed += 1;
        if event.poison {
            verdict.poison += 1;
        } else if !seen.contains(event.event_id.as_str()) {
            verdict.lost += 1;
            verdict.example(format!("lost: {event:?}"));
        }
    }
    verdict
}

impl Verdict {
    pub(super) fn is_good(&self) -> bool {
        let bad = [self.lost, self.rolled_back, self.out_of_order, self.wrong];
        bad == [0; 4] && self.arrived + self.poison == self.committed
    }

    fn example(&mut self, example: String) {
        if self.examples.len() < 10 {
            self.examples.push(example);
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.examples
            .iter()
            .try_for_each(|example| writeln!(f, "  {example}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(id: &str, place: i64, route: Route) -> Committed {
        Committed {
            event_id: id.to_owned(),
            key: "k".to_owned(),
            place,
            route,
            poison: id == "poison",
        }
    }

    fn came(id: &str, place: i64) -> Arrival {
        Arrival {
            event_id: id.to_owned(),
            key: "k".to_owned(),
            body: body("k", place),
        }
    }

    fn verdict(rough: &[Arrival], calm: &[Arrival]) -> Verdict {
        let committed = [
            event("a", 1, Route::Rough),
            event("b", 2, Route::Calm),
            event("c", 3, Route::Rough),
            event("poison", 4, Route::Rough),
        ];
        let arrived = [(Route::Rough, rough.to_vec()), (Route::Calm, calm.to_vec())];
        compare(&committed, &HashSet::from(["gone".to_owned()]), &arrived.into())
    }

    #[test]
    fn copies_are_no_fault_and_routes_have_orders_of_their_own() {
        let good = verdict(
            &[came("a", 1), came("c", 3), came("a", 1), came("c", 3)],
            &[came("b", 2)],
        );
        assert!(good.is_good(), "{good:?}");
        assert_eq!((good.arrived, good.copies, good.poison), (3, 2, 1));
    }

    #[test]
    fn each_fault_is_found_and_named() {
        let mut altered = came("c", 3);
        altered.body.push('!');
        let good = || (vec![came("a", 1), came("c", 3)], vec![came("b", 2)]);
        type Change = fn(&mut Vec<Arrival>, &mut Vec<Arrival>, Arrival);
        type Count = fn(&Verdict) -> usize;
        let faults: [(Change, Count, &str); 7] = [
            (|rough, _, _| drop(rough.pop()), |v| v.lost, "lost"),
            (
                |rough, _, _| rough.reverse(),
                |v| v.out_of_order,
                "behind place 3",
            ),
            (
                |rough, _, _| rough.push(came("gone", 9)),
                |v| v.rolled_back,
                "rolled back",
            ),
            (|rough, _, _| rough.push(came("new", 9)), |v| v.wrong, "nobody"),
            (|rough, _, _| rough.push(came("poison", 4)), |v| v.wrong, "poison"),
            (|_, calm, _| calm.push(came("a", 1)), |v| v.wrong, "Calm"),
            (|rough, _, altered| rough.push(altered), |v| v.wrong, "3!"),
        ];
        for (change, count, named) in faults {
            let (mut rough, mut calm) = good();
            change(&mut rough, &mut calm, altered.clone());
            let bad = verdict(&rough, &calm);
            assert!(!bad.is_good() && count(&bad) == 1, "{named}: {bad:?}");
            assert!(bad.to_string().contains(named), "{named}: {bad}");
        }
    }
}
