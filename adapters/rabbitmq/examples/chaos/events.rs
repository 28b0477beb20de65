//! What is sent: events, how they fail at first, and in which order they are published.

use fastrand::Rng;
use serde::{Deserialize, Serialize};

/// One event, as its payload says.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Event {
    pub(crate) id: String,
    pub(crate) amount: i64,
    /// How many of its first attempts fail.
    pub(crate) fails: u32,
    pub(crate) how: How,
}

/// How an attempt fails. Always after the write, which has to be rolled back.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) enum How {
    Error,
    Panic,
    /// A failed statement is swallowed, which leaves the transaction aborted.
    Swallow,
}

/// All events of a run. One in sixteen fails once, which is tried again in place; one in sixteen fails
/// two or three times, which puts it into `inbox`.
pub(crate) fn all(seed: u64, count: usize) -> Vec<Event> {
    let mut random = Rng::with_seed(seed);
    (0..count)
        .map(|n| Event {
            id: format!("event-{n}"),
            amount: random.i64(1..1_000_000),
            fails: match random.u8(0..16) {
                0 => 1,
                1 => random.u32(2..=3),
                _ => 0,
            },
            how: [How::Error, How::Panic, How::Swallow][random.usize(..3)],
        })
        .collect()
}

/// The numbers of the events in the order in which they are published: a tenth of them twice, the
/// second time up to 300 places later, and one in five out of its place.
pub(crate) fn publications(seed: u64, count: usize) -> Vec<usize> {
    let mut random = Rng::with_seed(seed ^ 0x5eed);
    let mut places: Vec<(usize, usize)> = Vec::with_capacity(count + count / 10);
    for n in 0..count {
        let place = if random.u8(0..5) == 0 {
            n + random.usize(0..100)
        } else {
            n
        };
        places.push((place, n));
        if random.u8(0..10) == 0 {
            places.push((place + random.usize(0..300), n));
        }
    }
    places.sort();
    places.into_iter().map(|(_, n)| n).collect()
}
