//! Which messages of a topic were under way together.
//!
//! librdkafka sends several in one batch, and a broker that finds the batch too large says no more than that: any of
//! them may be why, or only their number. A message that had no company is certainly why.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One lane for each topic that was ever published to.
#[derive(Debug, Default)]
pub(super) struct Traffic(Mutex<HashMap<String, Arc<Mutex<Lane>>>>);

#[derive(Debug, Default)]
struct Lane {
    now: usize,
    started: u64,
}

/// A message under way, until it is dropped: librdkafka has it for as long as there is no report.
#[derive(Debug)]
pub(super) struct UnderWay {
    lane: Arc<Mutex<Lane>>,
    number: u64,
    had_company: bool,
}

impl Traffic {
    pub(super) fn sets_out(&self, topic: &str) -> UnderWay {
        let lane = self.lane(topic);
        let mut traffic = lock(&lane);
        traffic.now += 1;
        traffic.started += 1;
        let (number, had_company) = (traffic.started, traffic.now > 1);
        drop(traffic);
        UnderWay {
            lane,
            number,
            had_company,
        }
    }

    fn lane(&self, topic: &str) -> Arc<Mutex<Lane>> {
        let mut lanes = lock(&self.0);
        match lanes.get(topic) {
            Some(lane) => lane.clone(),
            None => lanes.entry(topic.to_owned()).or_default().clone(),
        }
    }
}

impl UnderWay {
    /// Whether no other message of its topic was under way at any time since it set out.
    pub(super) fn is_alone(&self) -> bool {
        !self.had_company && lock(&self.lane).started == self.number
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        lock(&self.lane).now -= 1;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn company_at_any_time_is_company() {
        let traffic = Traffic::default();
        let first = traffic.sets_out("t");
        let elsewhere = traffic.sets_out("other");
        assert!(first.is_alone() && elsewhere.is_alone());
        let second = traffic.sets_out("t");
        assert!(!first.is_alone() && !second.is_alone());
        drop(first);
        assert!(!second.is_alone(), "it had company when it set out");
        drop(second);
        let third = traffic.sets_out("t");
        drop(traffic.sets_out("t"));
        assert!(!third.is_alone(), "it had company for a while");
        drop(third);
        assert!(traffic.sets_out("t").is_alone());
        assert!(elsewhere.is_alone());
    }
}
