//! What is sent: events, how they fail at first, and in which order they are published.

use fastrand::Rng;
use serde::{Deserialize, Serialize};

/// How many keys there are, where events have keys.
const KEYS: usize = 60;

/// Which events have a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keys {
    /// None has: the broker keeps no order.
    None,
    /// Three in four have.
    Most,
    /// Each has: the broker takes none without.
    All,
}

/// How often a failed event is tried again in place. What has a key gets no more than that: beside the
/// one attempt that fails on purpose it needs some for connections that die under a handler.
pub(super) const fn immediate(keys: Keys) -> u32 {
    match keys {
        Keys::None => 1,
        Keys::Most | Keys::All => 4,
    }
}

/// One event. Serialized it is its payload.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Event {
    /// Its identity.
    pub id: String,
    pub(super) amount: i64,
    /// How many of its first attempts fail.
    pub(super) fails: u32,
    pub(super) how: How,
    /// The key that it is ordered by, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Its place among the events of its key, from 1.
    #[serde(default)]
    pub(super) place: i64,
}

/// How an attempt fails. Always after the write, which has to be rolled back.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) enum How {
    Error,
    Panic,
    /// A failed statement is swallowed, which leaves the transaction aborted.
    Swallow,
}

/// All events of a run. One in sixteen fails once, which is tried again in place; one in sixteen fails
/// more often than that, which puts it into `inbox`.
///
/// Those with a key fail once at most: an event whose order counts is never held while others of its key
/// go on, so it is tried again in place only.
pub(super) fn all(seed: u64, count: usize, keys: Keys) -> Vec<Event> {
    let mut random = Rng::with_seed(seed);
    let mut events: Vec<_> = (0..count)
        .map(|n| Event {
            id: format!("event-{n}"),
            amount: random.i64(1..1_000_000),
            fails: match random.u8(0..16) {
                0 => 1,
                1 => immediate(keys) + random.u32(1..=2),
                _ => 0,
            },
            how: [How::Error, How::Panic, How::Swallow][random.usize(..3)],
            key: None,
            place: 0,
        })
        .collect();
    if keys != Keys::None {
        give_keys(&mut events, seed, keys);
    }
    events
}

fn give_keys(events: &mut [Event], seed: u64, keys: Keys) {
    let mut random = Rng::with_seed(seed ^ 0x6e75);
    let mut places = [0; KEYS];
    for event in events {
        if keys == Keys::Most && random.u8(0..4) == 0 {
            continue;
        }
        let key = random.usize(..KEYS);
        places[key] += 1;
        event.key = Some(format!("key-{key}"));
        event.place = places[key];
        event.fails = event.fails.min(1);
    }
}

/// The numbers of the events in the order in which they are published: a tenth of them twice, the
/// second time up to 300 places later, and one in five out of its place unless it has a key.
pub(super) fn publications(seed: u64, events: &[Event]) -> Vec<usize> {
    let mut random = Rng::with_seed(seed ^ 0x5eed);
    let mut places: Vec<(usize, usize)> = Vec::with_capacity(events.len() + events.len() / 10);
    for (n, event) in events.iter().enumerate() {
        let place = if event.key.is_none() && random.u8(0..5) == 0 {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn every_event_is_published_and_each_key_in_its_order() {
        assert!(all(7, 100, Keys::None).iter().all(|event| event.key.is_none()));
        assert!(all(7, 100, Keys::All).iter().all(|event| event.key.is_some()));
        let events = all(7, 5_000, Keys::Most);
        let mut last: HashMap<&str, i64> = HashMap::new();
        let mut seen = vec![false; events.len()];
        for n in publications(7, &events) {
            let first = !std::mem::replace(&mut seen[n], true);
            if let (true, Some(key)) = (first, &events[n].key) {
                let before = last.insert(key, events[n].place).unwrap_or(0);
                assert_eq!(before + 1, events[n].place, "{key}");
            }
        }
        assert!(seen.into_iter().all(|seen| seen));
        assert_eq!(last.len(), KEYS);
    }
}
