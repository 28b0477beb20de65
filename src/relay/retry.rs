use std::time::Duration;

use crate::delay::spread;

/// How often and when a refused row is tried again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Retries {
    /// After so many refusals it is parked.
    pub(crate) attempts: u32,
    /// The first delay; it doubles with each refusal, and has jitter.
    pub(crate) min: Duration,
    /// The longest delay, jitter apart.
    pub(crate) max: Duration,
}

impl Default for Retries {
    fn default() -> Self {
        Self {
            attempts: 10,
            min: Duration::from_secs(1),
            max: Duration::from_secs(300),
        }
    }
}

impl Retries {
    /// How long to wait after the `refused`-th refusal (1 for the first); `None`: park it.
    pub(crate) fn after(&self, refused: u32) -> Option<Duration> {
        (refused < self.attempts).then(|| spread(self.min, self.max, refused))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_ten_attempts_over_about_ten_minutes() {
        let retries = Retries::default();
        for (refused, seconds) in [(1, 1), (2, 2), (3, 4), (8, 128), (9, 256)] {
            let (after, delay) = (retries.after(refused).unwrap(), Duration::from_secs(seconds));
            assert!(after >= delay && after <= delay * 2, "{refused}: {after:?}");
        }
        assert_eq!(retries.after(10), None);
        let once = Retries {
            attempts: 1,
            ..retries
        };
        assert_eq!(once.after(1), None, "one attempt has no second");
    }
}
