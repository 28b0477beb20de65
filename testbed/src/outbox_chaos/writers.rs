//! Who writes the events: transactions that wait for each other at their key, and of which some roll back.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fastrand::Rng;
use onlyonce::outbox::OutgoingEvent;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::broker::Broker;
use super::ledger::Ledger;
use super::options::Options;
use super::route::Route;
use super::verdict::{Committed, body};

const WRITERS: usize = 12;
/// The most events of one transaction.
const TOGETHER: usize = 8;
/// While so many events wait in the outbox nothing more is written, so that it all happens under load.
const BACKLOG: u64 = 1_500;

pub(super) struct Writers {
    options: Arc<Options>,
    ledger: Arc<Ledger>,
    addresses: HashMap<Route, String>,
    plan: Mutex<Plan>,
    progress: Arc<Progress>,
    /// How many events wait in the outbox. Changes all the time.
    backlog: watch::Receiver<u64>,
}

/// How far the writers are, and how far they may go.
#[derive(Default)]
pub(super) struct Progress {
    committed: [AtomicU64; Route::ALL.len()],
    released: AtomicU64,
}

/// What is still to be written.
struct Plan {
    /// Keys, and how many events of each.
    left: Vec<(String, usize)>,
    taken: u64,
    /// Events whose transaction has not ended.
    open: usize,
}

impl Progress {
    /// What was committed for each route, at least.
    pub(super) fn of_each(&self) -> [u64; Route::ALL.len()] {
        std::array::from_fn(|route| self.committed[route].load(SeqCst))
    }

    pub(super) fn sum(&self) -> u64 {
        self.of_each().iter().sum()
    }

    /// So many may be written in all.
    pub(super) fn release(&self, events: u64) {
        self.released.store(events, SeqCst);
    }

    fn committed(&self, events: &[Committed]) {
        for event in events {
            self.committed[event.route as usize].fetch_add(1, SeqCst);
        }
    }
}

impl Plan {
    fn new(options: &Options) -> Self {
        Self {
            left: (0..options.keys)
                .map(|key| (format!("key-{key}"), options.events))
                .collect(),
            taken: 0,
            open: 0,
        }
    }

    /// Some events of one key, as far as may be written.
    fn take(&mut self, random: &mut Rng, released: u64) -> Option<(String, usize)> {
        let room = released.saturating_sub(self.taken) as usize;
        if room == 0 || self.left.is_empty() {
            return None;
        }
        let at = random.usize(..self.left.len());
        let (key, left) = &mut self.left[at];
        let count = random.usize(1..=TOGETHER).min(*left).min(room);
        let key = key.clone();
        *left -= count;
        if *left == 0 {
            self.left.swap_remove(at);
        }
        self.taken += count as u64;
        self.open += count;
        Some((key, count))
    }

    fn done(&mut self, count: usize) {
        self.open -= count;
    }

    fn give_back(&mut self, key: String, count: usize) {
        self.open -= count;
        self.taken -= count as u64;
        match self.left.iter_mut().find(|(other, _)| *other == key) {
            Some((_, left)) => *left += count,
            None => self.left.push((key, count)),
        }
    }

    fn is_over(&self) -> bool {
        self.left.is_empty() && self.open == 0
    }
}

impl Writers {
    pub(super) fn new(
        options: &Arc<Options>,
        ledger: &Arc<Ledger>,
        addresses: HashMap<Route, String>,
        backlog: watch::Receiver<u64>,
    ) -> Self {
        Self {
            plan: Mutex::new(Plan::new(options)),
            options: options.clone(),
            ledger: ledger.clone(),
            addresses,
            progress: Arc::default(),
            backlog,
        }
    }

    pub(super) fn progress(&self) -> Arc<Progress> {
        self.progress.clone()
    }

    /// All events of all keys, and the poison in between.
    pub(super) async fn write_all<B: Broker>(self, broker: Arc<B>) -> anyhow::Result<()> {
        let this = Arc::new(self);
        let mut tasks = JoinSet::new();
        for writer in 0..WRITERS {
            tasks.spawn(this.clone().write(writer as u64));
        }
        tasks.spawn(this.clone().plant(broker));
        while let Some(ended) = tasks.join_next().await {
            ended??;
        }
        Ok(())
    }

    async fn write(self: Arc<Self>, writer: u64) -> anyhow::Result<()> {
        let mut random = Rng::with_seed(self.options.seed.wrapping_mul(31).wrapping_add(writer));
        let mut backlog = self.backlog.clone();
        loop {
            let taken = if *backlog.borrow_and_update() < BACKLOG {
                self.plan().take(&mut random, self.progress.released.load(SeqCst))
            } else {
                None
            };
            let Some((key, count)) = taken else {
                if self.plan().is_over() {
                    return Ok(());
                }
                backlog.changed().await?;
                continue;
            };
            if self.transaction(&key, count, &mut random).await? {
                self.plan().done(count);
            } else {
                self.plan().give_back(key, count);
            }
        }
    }

    /// Some events of one key. False if it was rolled back.
    async fn transaction(&self, key: &str, count: usize, random: &mut Rng) -> anyhow::Result<bool> {
        let mut tx = self.ledger.begin().await?;
        let first = self.ledger.next_places(&mut tx, key, count).await?;
        let events: Vec<_> = (first..)
            .take(count)
            .map(|place| Committed {
                // Not the same again after a rollback.
                event_id: format!("{key}-{place}-{:08x}", random.u32(..)),
                key: key.to_owned(),
                place,
                route: Route::ALL[random.usize(..Route::ALL.len())],
                poison: false,
            })
            .collect();
        let outgoing = events.iter().map(|event| self.outgoing(event));
        self.ledger.write(&mut tx, &events, outgoing.collect()).await?;
        let delay = match random.u16(0..1000) {
            // Longer than a lease.
            0..2 => 3_000,
            2..50 => random.u64(50..400),
            _ => 0,
        };
        sleep(Duration::from_millis(delay)).await;
        if random.u8(0..12) == 0 {
            tx.rollback().await?;
            self.ledger.note_rolled_back(events);
            return Ok(false);
        }
        tx.commit().await?;
        self.ledger.outbox().wake();
        self.progress.committed(&events);
        Ok(true)
    }

    fn outgoing(&self, event: &Committed) -> OutgoingEvent {
        let to = self.addresses[&event.route].as_str();
        OutgoingEvent::new(to, "chaos.happened", body(&event.key, event.place))
            .id(event.event_id.as_str())
            .key(event.key.clone())
    }

    /// Poison, spread over the run: each in a key of its own, with one event before it and one behind it.
    async fn plant<B: Broker>(self: Arc<Self>, broker: Arc<B>) -> anyhow::Result<()> {
        let all = (self.options.keys * self.options.events) as u64;
        let mut backlog = self.backlog.clone();
        for nth in 0..self.options.poison {
            let due = all * (2 * nth as u64 + 1) / (2 * self.options.poison as u64);
            while self.progress.sum() < due {
                backlog.changed().await?;
            }
            let key = format!("poison-{nth}");
            let events: Vec<_> = (1..=3)
                .map(|place| Committed {
                    event_id: format!("{key}-{place}"),
                    key: key.clone(),
                    place,
                    route: Route::Rough,
                    poison: place == 2,
                })
                .collect();
            let outgoing = events.iter().map(|event| match event.poison {
                true => broker.poisoned(self.outgoing(event)),
                false => self.outgoing(event),
            });
            let mut tx = self.ledger.begin().await?;
            self.ledger.write(&mut tx, &events, outgoing.collect()).await?;
            tx.commit().await?;
            self.ledger.outbox().wake();
        }
        Ok(())
    }

    fn plan(&self) -> MutexGuard<'_, Plan> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_taken_once_and_what_was_rolled_back_again() {
        let mut random = Rng::with_seed(7);
        let mut plan = Plan {
            left: vec![("a".into(), 100), ("b".into(), 50)],
            taken: 0,
            open: 0,
        };
        let mut done = HashMap::<String, usize>::new();
        for released in [40, 150] {
            let mut nth = 0;
            while let Some((key, count)) = plan.take(&mut random, released) {
                nth += 1;
                if nth % 3 == 0 {
                    plan.give_back(key, count);
                } else {
                    plan.done(count);
                    *done.entry(key).or_default() += count;
                }
            }
            assert_eq!(done.values().sum::<usize>() as u64, released);
        }
        assert!(plan.is_over());
        assert_eq!((done["a"], done["b"]), (100, 50));
    }
}
