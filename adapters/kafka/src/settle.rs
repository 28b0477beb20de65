//! How far each partition is done, and what may be stored as its offset.
//!
//! Nothing here talks to anyone: deliveries and completions go in, offsets come out. Kafka knows one
//! number per partition, "everything before this is done", while events are done in any order. So
//! what is stored is only ever the end of the run of finished records without a gap.
//!
//! Three rules, each of which loses events if it is broken: no offset is stored while an earlier
//! record is not done; a completion of an earlier assignment changes nothing, also if the same
//! member has the partition again; the offset that is stored never goes back.

use std::collections::BTreeMap;
use std::sync::Arc;

use hashbrown::HashMap;

/// A topic and a partition of it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Partition {
    pub(crate) topic: Arc<str>,
    pub(crate) number: i32,
}

/// One assignment of one partition; unique over the life of the ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Generation(pub(crate) u64);

/// A record that was delivered: by this its completion is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Ticket {
    pub(crate) generation: Generation,
    pub(crate) offset: i64,
}

/// Every partition that is assigned, with the records that were delivered and are not stored as done.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    assigned: HashMap<Partition, Generation>,
    progress: HashMap<Generation, Progress>,
    last_generation: u64,
}

/// What is delivered and not yet covered by the stored offset.
#[derive(Debug)]
struct Progress {
    partition: Partition,
    records: BTreeMap<i64, Record>,
    bytes: usize,
    /// The highest offset that was delivered. What comes again at or below it is not new.
    last: i64,
    /// The last record of the run that is done, once there is one.
    done: Option<i64>,
    /// `done` has moved since it was asked for.
    moved: bool,
}

#[derive(Debug)]
struct Record {
    bytes: usize,
    done: bool,
}

/// How much of a partition would come again after a death.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Span {
    pub(crate) records: usize,
    pub(crate) bytes: usize,
}

impl Ledger {
    /// The partition is ours from now on. An assignment that was there before is over.
    pub(crate) fn assign(&mut self, partition: Partition) -> Generation {
        self.revoke(&partition);
        self.last_generation += 1;
        let generation = Generation(self.last_generation);
        self.assigned.insert(partition.clone(), generation);
        self.progress.insert(
            generation,
            Progress {
                partition,
                records: BTreeMap::new(),
                bytes: 0,
                last: -1,
                done: None,
                moved: false,
            },
        );
        generation
    }

    /// The partition is not ours any more, and with it every ticket of it is void.
    pub(crate) fn revoke(&mut self, partition: &Partition) -> Option<Generation> {
        let generation = self.assigned.remove(partition)?;
        self.progress.remove(&generation);
        Some(generation)
    }

    /// The assignment under which we have this partition.
    pub(crate) fn generation(&self, partition: &Partition) -> Option<Generation> {
        self.assigned.get(partition).copied()
    }

    /// Every partition that we have.
    pub(crate) fn assigned(&self) -> impl Iterator<Item = (&Partition, Generation)> {
        self.assigned
            .iter()
            .map(|(partition, generation)| (partition, *generation))
    }

    /// A record has come. `None`: it is not to be handed on, since the partition is not ours or it has
    /// come before.
    pub(crate) fn delivered(&mut self, partition: &Partition, offset: i64, bytes: usize) -> Option<Ticket> {
        let generation = *self.assigned.get(partition)?;
        let progress = self.progress.get_mut(&generation)?;
        if offset <= progress.last {
            return None;
        }
        progress.last = offset;
        progress.bytes += bytes;
        progress.records.insert(offset, Record { bytes, done: false });
        Some(Ticket { generation, offset })
    }

    /// The event of this record is done. False if the ticket is void, or told before.
    pub(crate) fn finish(&mut self, ticket: Ticket) -> bool {
        let Some(progress) = self.progress.get_mut(&ticket.generation) else {
            return false;
        };
        match progress.records.get_mut(&ticket.offset) {
            Some(record) if !record.done => record.done = true,
            _ => return false,
        }
        progress.advance();
        true
    }

    /// The partitions whose run of finished records has grown since the last call, each with the last
    /// offset of that run. Offsets between records (of transactions, of compaction) are passed over:
    /// nobody delivered them.
    pub(crate) fn advanced(&mut self) -> Vec<(Partition, i64)> {
        let mut advanced = Vec::new();
        for progress in self.progress.values_mut() {
            if let (true, Some(done)) = (progress.moved, progress.done) {
                progress.moved = false;
                advanced.push((progress.partition.clone(), done));
            }
        }
        advanced
    }

    /// What was delivered of this assignment and is not covered by an offset.
    pub(crate) fn span(&self, generation: Generation) -> Span {
        self.progress
            .get(&generation)
            .map_or_else(Span::default, |progress| Span {
                records: progress.records.len(),
                bytes: progress.bytes,
            })
    }
}

impl Progress {
    fn advance(&mut self) {
        while let Some(first) = self.records.first_entry()
            && first.get().done
        {
            let (offset, record) = first.remove_entry();
            self.bytes -= record.bytes;
            self.done = Some(offset);
            self.moved = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn partition(number: i32) -> Partition {
        Partition {
            topic: "t".into(),
            number,
        }
    }

    fn deliver(ledger: &mut Ledger, offsets: &[i64]) -> Vec<Ticket> {
        offsets
            .iter()
            .map(|offset| ledger.delivered(&partition(0), *offset, 10).unwrap())
            .collect()
    }

    #[test]
    fn nothing_is_stored_past_what_still_runs() {
        let mut ledger = Ledger::default();
        ledger.assign(partition(0));
        let tickets = deliver(&mut ledger, &[5, 6, 7, 8]);
        for ticket in &tickets[1..] {
            assert!(ledger.finish(*ticket));
        }
        assert_eq!(ledger.advanced(), [], "5 still runs");
        assert!(ledger.finish(tickets[0]));
        assert_eq!(ledger.advanced(), [(partition(0), 8)]);
        assert_eq!(ledger.advanced(), [], "it is told once");
    }

    #[test]
    fn gaps_of_the_log_are_no_gaps_of_the_work() {
        let mut ledger = Ledger::default();
        ledger.assign(partition(0));
        for ticket in deliver(&mut ledger, &[0, 2, 9]) {
            ledger.finish(ticket);
        }
        assert_eq!(ledger.advanced(), [(partition(0), 9)]);
    }

    #[test]
    fn a_late_completion_says_nothing_about_the_next_assignment() {
        let mut ledger = Ledger::default();
        ledger.assign(partition(0));
        let old = deliver(&mut ledger, &[5, 6]);
        assert!(ledger.finish(old[0]));
        ledger.revoke(&partition(0));
        assert_eq!(ledger.advanced(), [], "it is somebody else's to tell");
        ledger.assign(partition(0));
        let new = deliver(&mut ledger, &[5, 6]);
        assert!(!ledger.finish(old[0]) && !ledger.finish(old[1]));
        assert_eq!(ledger.advanced(), []);
        assert!(ledger.finish(new[0]));
        assert_eq!(ledger.advanced(), [(partition(0), 5)]);
    }

    #[test]
    fn what_comes_twice_in_one_assignment_is_handed_on_once() {
        let mut ledger = Ledger::default();
        ledger.assign(partition(0));
        let tickets = deliver(&mut ledger, &[5, 6]);
        assert_eq!(ledger.delivered(&partition(0), 5, 10), None);
        ledger.finish(tickets[0]);
        assert_eq!(ledger.delivered(&partition(0), 5, 10), None, "also if it is done");
        assert_eq!(ledger.delivered(&partition(1), 1, 10), None, "not assigned");
    }

    #[test]
    fn a_stuck_record_makes_the_span_grow() {
        let mut ledger = Ledger::default();
        let generation = ledger.assign(partition(0));
        let tickets = deliver(&mut ledger, &[1, 2, 3]);
        ledger.finish(tickets[1]);
        ledger.finish(tickets[2]);
        assert_eq!(
            ledger.span(generation),
            Span {
                records: 3,
                bytes: 30
            }
        );
        ledger.finish(tickets[0]);
        assert_eq!(ledger.span(generation), Span::default());
    }

    /// A group coordinator and two logs, as a member sees them.
    struct World {
        ledger: Ledger,
        /// What librdkafka would commit next, by partition; gone with the assignment.
        stored: HashMap<i32, i64>,
        committed: [i64; 2],
        fetched: [i64; 2],
        /// Tickets of all times, also void ones.
        tickets: Vec<(i32, Ticket)>,
        applied: [BTreeSet<i64>; 2],
    }

    #[derive(Debug, Clone)]
    enum Step {
        Assign(i32),
        Deliver(i32, u8, bool),
        Finish(usize),
        Store,
        /// The commit reached the coordinator, or did not.
        Commit(bool),
        /// In good order: stored and committed first.
        Revoke(i32, bool),
        /// Ownership is gone; somebody else, who started at the committed offset, did so many records.
        Lose(i32, u8),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let number = 0..2_i32;
        let step = prop_oneof![
            2 => number.clone().prop_map(Step::Assign),
            6 => (number.clone(), 1..6_u8, any::<bool>()).prop_map(|(p, n, gap)| Step::Deliver(p, n, gap)),
            12 => any::<usize>().prop_map(Step::Finish),
            3 => Just(Step::Store),
            2 => any::<bool>().prop_map(Step::Commit),
            1 => (number.clone(), any::<bool>()).prop_map(|(p, ok)| Step::Revoke(p, ok)),
            1 => (number, 0..4_u8).prop_map(|(p, n)| Step::Lose(p, n)),
        ];
        prop::collection::vec(step, 0..250)
    }

    impl World {
        fn new() -> Self {
            Self {
                ledger: Ledger::default(),
                stored: HashMap::new(),
                committed: [0; 2],
                fetched: [0; 2],
                tickets: Vec::new(),
                applied: Default::default(),
            }
        }

        fn has(&self, number: i32) -> bool {
            self.ledger.generation(&partition(number)).is_some()
        }

        fn assign(&mut self, number: i32) {
            if !self.has(number) {
                self.ledger.assign(partition(number));
                self.fetched[number as usize] = self.committed[number as usize];
            }
        }

        /// Every third offset is a control record that nobody sees.
        fn deliver(&mut self, number: i32, count: u8, again: bool) {
            let at = number as usize;
            if again && self.has(number) {
                // librdkafka starts a fetch anew after some errors, from what it stored.
                self.fetched[at] = self.stored.get(&number).copied().unwrap_or(self.committed[at]);
            }
            for _ in 0..count {
                let offset = self.fetched[at];
                self.fetched[at] += 1;
                if offset % 3 != 2
                    && let Some(ticket) = self.ledger.delivered(&partition(number), offset, 1)
                {
                    self.tickets.push((number, ticket));
                }
            }
        }

        fn finish(&mut self, at: usize) {
            if self.tickets.is_empty() {
                return;
            }
            // Some are told twice, and some long after their assignment is over.
            let (number, ticket) = self.tickets[at % self.tickets.len()];
            self.applied[number as usize].insert(ticket.offset);
            let ours = self.ledger.generation(&partition(number)) == Some(ticket.generation);
            let told = self.ledger.finish(ticket);
            assert!(ours || !told, "a void ticket counted");
        }

        fn store(&mut self) {
            for (partition, done) in self.ledger.advanced() {
                let before = self.stored.insert(partition.number, done + 1);
                assert!(
                    before.is_none_or(|before| before < done + 1),
                    "the stored offset went back"
                );
            }
        }

        fn commit(&mut self, succeeds: bool) {
            if succeeds {
                for (number, offset) in &self.stored {
                    self.committed_to(*number, *offset);
                }
            }
        }

        fn committed_to(&self, number: i32, offset: i64) {
            let at = number as usize;
            assert!(
                offset >= self.committed[at],
                "the committed offset of {number} went back from {} to {offset}",
                self.committed[at]
            );
            for offset in self.committed[at]..offset {
                assert!(
                    offset % 3 == 2 || self.applied[at].contains(&offset),
                    "{offset} of {number} was committed and is not done: it is lost"
                );
            }
        }

        fn take_commit(&mut self) {
            for (number, offset) in &self.stored {
                self.committed[*number as usize] = *offset;
            }
        }

        fn revoke(&mut self, number: i32, commits: bool) {
            self.store();
            self.commit(commits);
            if commits {
                self.take_commit();
            }
            self.ledger.revoke(&partition(number));
            self.stored.remove(&number);
        }

        /// The other one finishes records and commits them; ours are not asked.
        fn lose(&mut self, number: i32, others: u8) {
            let at = number as usize;
            self.ledger.revoke(&partition(number));
            self.stored.remove(&number);
            for _ in 0..others {
                self.applied[at].insert(self.committed[at]);
                self.committed[at] += 1;
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1024))]
        #[test]
        fn nothing_unfinished_is_ever_committed_and_no_offset_goes_back(steps in steps()) {
            let mut world = World::new();
            for step in steps {
                match step {
                    Step::Assign(number) => world.assign(number),
                    Step::Deliver(number, count, again) => world.deliver(number, count, again),
                    Step::Finish(at) => world.finish(at),
                    Step::Store => world.store(),
                    Step::Commit(succeeds) => {
                        world.commit(succeeds);
                        if succeeds {
                            world.take_commit();
                        }
                    }
                    Step::Revoke(number, commits) => world.revoke(number, commits),
                    Step::Lose(number, others) => world.lose(number, others),
                }
            }
            // Whatever happened before, an assignment that is let work comes to its end.
            for number in 0..2 {
                world.lose(number, 0);
                world.assign(number);
                world.deliver(number, 9, false);
                let generation = world.ledger.generation(&partition(number)).unwrap();
                let open: Vec<_> = (0..world.tickets.len())
                    .filter(|at| world.tickets[*at].1.generation == generation)
                    .collect();
                open.iter().rev().for_each(|at| world.finish(*at));
                world.store();
                world.commit(true);
                world.take_commit();
                prop_assert_eq!(world.ledger.span(generation), Span::default());
                let last = world.fetched[number as usize];
                prop_assert!(world.committed[number as usize] + 1 >= last);
            }
        }
    }
}
