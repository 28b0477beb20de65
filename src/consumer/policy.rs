use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::delay::spread;

/// How often and when a failed event is tried again.
///
/// An event is tried once, then `immediate` times in place (its lane waits 50 ms to 1 s between, with
/// jitter, holding no transaction), then it is held in `inbox` and tried once after each of `delays`,
/// then it is dead. So there are 1 + `immediate` + `delays.len()` attempts in all; 8 by default.
///
/// Infrastructure that is down, contention between transactions and a stop are not attempts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RetryPolicy {
    immediate: u32,
    delays_ms: Vec<u64>,
    contention: u32,
}

/// How long an in-place retry waits: exponential between these two, with jitter.
const IMMEDIATE_MIN: Duration = Duration::from_millis(50);
const IMMEDIATE_MAX: Duration = Duration::from_secs(1);

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            immediate: 3,
            delays_ms: vec![10_000, 60_000, 600_000, 3_600_000],
            contention: 10,
        }
    }
}

impl RetryPolicy {
    /// The default: 3 retries in place, then after 10 s, 1 min, 10 min and 1 h.
    pub fn new() -> Self {
        Self::default()
    }

    /// No retry: the first failure is a dead letter.
    pub fn none() -> Self {
        Self {
            immediate: 0,
            delays_ms: Vec::new(),
            ..Self::default()
        }
    }

    /// How often to try again in place. Default 3. More of them keep a lane busy for longer; with
    /// per-key order they are the only retries of an event that has a key.
    pub fn immediate(mut self, times: u32) -> Self {
        self.immediate = times;
        self
    }

    /// The delays of the retries from `inbox`. Default 10 s, 1 min, 10 min, 1 h; each is lengthened
    /// by up to a tenth at random.
    pub fn delays(mut self, delays: impl IntoIterator<Item = Duration>) -> Self {
        self.delays_ms = delays
            .into_iter()
            .map(|d| d.as_millis().min(u128::from(u64::MAX)) as u64)
            .collect();
        self
    }

    /// How many times in a row the handler may lose against other transactions (deadlock,
    /// serialization failure, lock timeout) before it counts as one attempt. Default 10.
    pub fn contention(mut self, times: u32) -> Self {
        self.contention = times;
        self
    }

    /// How many attempts there are in all.
    pub fn max_attempts(&self) -> u32 {
        1 + self.immediate + self.delays_ms.len() as u32
    }

    /// How many of them come one after the other in the lane that has the delivery.
    pub(crate) fn attempts_in_place(&self) -> u32 {
        1 + self.immediate
    }

    pub(crate) fn contention_limit(&self) -> u32 {
        self.contention
    }

    /// What comes after the `failed`-th failure of an event (1 for the first).
    pub(crate) fn after(&self, failed: u32) -> Retry {
        if failed <= self.immediate {
            return Retry::InPlace {
                after: spread(IMMEDIATE_MIN, IMMEDIATE_MAX, failed),
            };
        }
        match self.delays_ms.get((failed - self.immediate - 1) as usize) {
            Some(&ms) => Retry::Delayed {
                after: jittered(Duration::from_millis(ms)),
            },
            None => Retry::Never,
        }
    }

    /// The longest that one delivery stays with its lane by this policy, handler time apart.
    pub(crate) fn longest_in_place(&self) -> Duration {
        IMMEDIATE_MAX * 2 * self.immediate
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        if self.immediate > 1000 {
            return Err(format!(
                "retry.immediate is {} (at most 1000: a lane is busy all the while)",
                self.immediate
            ));
        }
        if self.delays_ms.len() > 1000 {
            return Err(format!(
                "retry.delays has {} entries (at most 1000)",
                self.delays_ms.len()
            ));
        }
        let year = 366 * 86_400_000;
        if let Some(long) = self.delays_ms.iter().find(|ms| **ms > year) {
            return Err(format!("retry.delays holds {long} ms (at most one year)"));
        }
        if self.contention == 0 {
            return Err("retry.contention is 0 (at least 1: losing once is nobody's fault)".into());
        }
        Ok(())
    }
}

/// In which order events run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ordering {
    /// In any order, as many at once as there are lanes.
    Unordered,
    /// Events of one key in the order in which the source delivers them; keys beside each other. An
    /// event without a key is ordered with nothing. A failed event with a key is tried again in place
    /// only: the later ones of its key wait, and when those attempts are used up the event is dead and
    /// the key goes on.
    PerKey,
}

/// What to do with an event whose identity was processed before with another payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnMismatch {
    /// It is a duplicate; warn and count it.
    #[default]
    Warn,
    /// Keep it as a dead letter, reason `identity_mismatch`.
    DeadLetter,
    /// It is a duplicate like any other.
    Ignore,
}

/// What a policy says about a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Retry {
    InPlace { after: Duration },
    Delayed { after: Duration },
    Never,
}

fn jittered(delay: Duration) -> Duration {
    delay + delay.mul_f64(fastrand::f64() / 10.0)
}

/// Expands the backoff to the delays that it would give until its `max_elapsed_time`.
#[cfg(feature = "backoff")]
impl TryFrom<backoff::ExponentialBackoff> for RetryPolicy {
    type Error = String;

    fn try_from(mut backoff: backoff::ExponentialBackoff) -> Result<Self, String> {
        use backoff::backoff::Backoff as _;

        let limit = backoff.max_elapsed_time.ok_or_else(|| {
            "the backoff's max_elapsed_time is None, which would retry for ever (set it: it decides when an event is dead)"
                .to_owned()
        })?;
        // Its own clock runs in real time; the sum of the delays is what counts here.
        backoff.max_elapsed_time = None;
        backoff.randomization_factor = 0.0;
        backoff.reset();
        let mut delays = Vec::new();
        let mut sum = Duration::ZERO;
        while let Some(delay) = backoff.next_backoff() {
            sum += delay;
            if sum > limit {
                break;
            }
            if delay.is_zero() || delays.len() == 1000 {
                return Err("the backoff gives more than 1000 delays until its max_elapsed_time".into());
            }
            delays.push(delay);
        }
        Ok(Self::default().immediate(0).delays(delays))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_one_then_three_in_place_then_four_delayed() {
        let policy = RetryPolicy::default();
        assert_eq!((policy.max_attempts(), policy.attempts_in_place()), (8, 4));
        for failed in 1..=3 {
            assert!(
                matches!(policy.after(failed), Retry::InPlace { after } if after >= IMMEDIATE_MIN && after <= IMMEDIATE_MAX * 2)
            );
        }
        for (failed, seconds) in [(4, 10), (5, 60), (6, 600), (7, 3600)] {
            let Retry::Delayed { after } = policy.after(failed) else {
                panic!("{failed} is not delayed")
            };
            let delay = Duration::from_secs(seconds);
            assert!(
                after >= delay && after <= delay.mul_f64(1.1),
                "{failed}: {after:?}"
            );
        }
        assert_eq!(policy.after(8), Retry::Never);
        assert_eq!(RetryPolicy::none().after(1), Retry::Never);
    }

    #[test]
    fn it_is_read_from_configuration() {
        let policy: RetryPolicy = serde_json::from_str(r#"{"immediate":1,"delays_ms":[5,6]}"#).unwrap();
        assert_eq!(
            policy,
            RetryPolicy::new()
                .immediate(1)
                .delays([5, 6].map(Duration::from_millis))
        );
        assert!(
            serde_json::from_str::<RetryPolicy>(r#"{"imediate":1}"#).is_err(),
            "a misspelt field is an error"
        );
    }

    #[cfg(feature = "backoff")]
    #[test]
    fn a_backoff_is_expanded_until_its_limit() {
        let backoff = |limit| backoff::ExponentialBackoff {
            initial_interval: Duration::from_secs(1),
            current_interval: Duration::from_secs(1),
            multiplier: 2.0,
            max_interval: Duration::from_secs(8),
            max_elapsed_time: limit,
            ..Default::default()
        };
        let policy = RetryPolicy::try_from(backoff(Some(Duration::from_secs(30)))).unwrap();
        assert_eq!(policy.delays_ms, [1000, 2000, 4000, 8000, 8000]);
        assert!(
            RetryPolicy::try_from(backoff(None))
                .unwrap_err()
                .contains("max_elapsed_time")
        );
    }
}
