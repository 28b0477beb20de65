//! Delays between tries: one series for everything that tries again.

use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBuilder};

/// The `nth` delay (1 for the first) of an exponential series from `min` to `max`, with jitter.
pub(crate) fn spread(min: Duration, max: Duration, nth: u32) -> Duration {
    ExponentialBuilder::default()
        .with_min_delay(min)
        .with_max_delay(max)
        .with_factor(2.0)
        .with_jitter()
        .without_max_times()
        .build()
        // Past thirty doublings every series of ours stands at its maximum.
        .nth(nth.clamp(1, 30) as usize - 1)
        .unwrap_or(max)
        .min(max * 2)
}
