//! Notices messages that are given back at once, arrive at once, and are given back again.
//!
//! A broker that gets a message back delivers it in the same millisecond. If whoever gave it back
//! still cannot take it, the two would pass it to and fro thousands of times a second. From the
//! fourth time in a row on, such a message is kept for a moment before it is given back.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// How often in a row a message may be given back at once.
const FREE: u32 = 3;
const FIRST_DELAY: Duration = Duration::from_millis(50);
const LONGEST_DELAY: Duration = Duration::from_secs(5);
/// A message that stayed away this long starts anew.
const FORGET_AFTER: Duration = Duration::from_secs(60);
/// No more messages than this are remembered.
const CAPACITY: usize = 1024;

/// The messages that were given back lately, by fingerprint.
#[derive(Debug, Default)]
pub(crate) struct Repeats {
    seen: HashMap<u64, Seen>,
}

#[derive(Debug)]
struct Seen {
    times: u32,
    last: Instant,
}

impl Repeats {
    /// A redelivered message with this fingerprint is to be given back at once: how long to keep it first.
    pub(crate) fn delay(&mut self, fingerprint: u64, now: Instant) -> Option<Duration> {
        if self.seen.len() >= CAPACITY && !self.seen.contains_key(&fingerprint) {
            self.seen
                .retain(|_, seen| now.duration_since(seen.last) < FORGET_AFTER);
            if self.seen.len() >= CAPACITY {
                // So many messages at once are not one message going round: this queue is being
                // given back as a whole, and forgetting costs a few more rounds.
                self.seen.clear();
            }
        }
        let seen = self
            .seen
            .entry(fingerprint)
            .or_insert(Seen { times: 0, last: now });
        if now.duration_since(seen.last) >= FORGET_AFTER {
            seen.times = 0;
        }
        seen.times = seen.times.saturating_add(1);
        seen.last = now;
        let over = seen.times.checked_sub(FREE + 1)?;
        Some(FIRST_DELAY.saturating_mul(1 << over.min(16)).min(LONGEST_DELAY))
    }

    /// The message with this fingerprint was taken after all.
    pub(crate) fn forget(&mut self, fingerprint: u64) {
        self.seen.remove(&fingerprint);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_that_goes_round_slows_down() {
        let (mut repeats, now) = (Repeats::default(), Instant::now());
        let delays: Vec<_> = (0..12)
            .map(|_| repeats.delay(1, now).map(|d| d.as_millis()))
            .collect();
        assert_eq!(delays[..3], [None; 3], "a few times are free");
        assert_eq!(delays[3..8], [50, 100, 200, 400, 800].map(Some));
        assert_eq!(delays[11], Some(5000), "there is a longest delay");
        assert_eq!(repeats.delay(2, now), None, "others are not slowed down");
    }

    #[test]
    fn one_that_was_taken_or_stayed_away_starts_anew() {
        let (mut repeats, now) = (Repeats::default(), Instant::now());
        for _ in 0..10 {
            repeats.delay(1, now);
        }
        repeats.forget(1);
        assert_eq!(repeats.delay(1, now), None);
        for _ in 0..10 {
            repeats.delay(1, now);
        }
        assert_eq!(repeats.delay(1, now + FORGET_AFTER), None);
    }

    #[test]
    fn memory_is_bounded() {
        let (mut repeats, now) = (Repeats::default(), Instant::now());
        for fingerprint in 0..10_000 {
            repeats.delay(fingerprint, now);
            assert!(repeats.seen.len() <= CAPACITY);
        }
    }
}
