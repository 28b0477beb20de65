//! Which messages of a topic were under way together.
//!
//! librdkafka sends several in one batch, and a broker that finds the batch too large says no more than that: any of
//! them may be why, or only their number. A message that had no company is certainly why.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Debug, Default, Clone)]
pub(super) struct Traffic(Arc<Mutex<HashMap<String, Lane>>>);

#[derive(Debug, Default)]
struct Lane {
    now: usize,
    started: u64,
}

/// A message under way, until it is dropped: librdkafka has it for as long as there is no report.
#[derive(Debug)]
pub(super) struct UnderWay {
    traffic: Traffic,
    topic: String,
    number: u64,
    had_company: bool,
}

impl Traffic {
    pub(super) fn sets_out(&self, topic: &str) -> UnderWay {
        let mut lanes = self.lock();
        let lane = lanes.entry(topic.to_owned()).or_default();
        lane.now += 1;
        lane.started += 1;
        UnderWay {
            traffic: self.clone(),
            topic: topic.to_owned(),
            number: lane.started,
            had_company: lane.now > 1,
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Lane>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl UnderWay {
    /// Whether no other message of its topic was under way at any time since it set out.
    pub(super) fn is_alone(&self) -> bool {
        let lanes = self.traffic.lock();
        !self.had_company
            && lanes
                .get(&self.topic)
                .is_some_and(|lane| lane.started == self.number)
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut lanes = self.traffic.lock();
        if let Some(lane) = lanes.get_mut(&self.topic) {
            lane.now -= 1;
            if lane.now == 0 {
                lanes.remove(&self.topic);
            }
        }
    }
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
        drop(elsewhere);
        assert!(traffic.lock().is_empty());
    }
}
