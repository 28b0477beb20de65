//! What a relay's health is read from.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::consumer::Vitals;
use crate::store::OutgoingBacklog;

/// The loop beats about once a second; one that has not for this long is stuck.
const STUCK: Duration = Duration::from_secs(30);

/// A row that is due for longer than this says that the relay does not keep up.
const OVERDUE: Duration = Duration::from_secs(300);

/// What a relay says of itself.
pub(crate) struct RelayHealth {
    name: String,
    began: Instant,
    beat_ms: AtomicU64,
    ended: AtomicBool,
    waiting: Mutex<Option<String>>,
    problems: Mutex<Vec<String>>,
    backlog: Mutex<OutgoingBacklog>,
}

impl RelayHealth {
    pub(crate) fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            began: Instant::now(),
            beat_ms: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            waiting: Mutex::new(Some("not started".to_owned())),
            problems: Mutex::default(),
            backlog: Mutex::default(),
        }
    }

    pub(crate) fn beat(&self) {
        let now = self.began.elapsed().as_millis() as u64;
        self.beat_ms.store(now, Ordering::Relaxed);
    }

    /// Why the relay has not begun; `None` once the database has answered.
    pub(crate) fn waiting_for(&self, reason: Option<String>) {
        self.beat();
        *lock(&self.waiting) = reason;
    }

    /// What is wrong, in words for an operator; told about once a second.
    pub(crate) fn set_problems(&self, problems: Vec<String>) {
        *lock(&self.problems) = problems;
    }

    pub(crate) fn set_backlog(&self, backlog: OutgoingBacklog) {
        *lock(&self.backlog) = backlog;
    }

    /// The relay is over, by a stop or by an error.
    pub(crate) fn ended(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }

    fn age(&self) -> Duration {
        let beat = Duration::from_millis(self.beat_ms.load(Ordering::Relaxed));
        self.began.elapsed().saturating_sub(beat)
    }
}

impl Vitals for RelayHealth {
    fn live(&self, reasons: &mut Vec<String>) {
        if self.ended.load(Ordering::Relaxed) {
            reasons.push(format!("relay {} has ended", self.name));
        } else if lock(&self.waiting).is_none() && self.age() > STUCK {
            reasons.push(format!(
                "relay {}: the loop has not moved for {} s",
                self.name,
                self.age().as_secs()
            ));
        }
    }

    fn ready(&self, reasons: &mut Vec<String>) {
        self.live(reasons);
        if let Some(waiting) = &*lock(&self.waiting) {
            reasons.push(format!("relay {}: {waiting}", self.name));
            return;
        }
        for problem in &*lock(&self.problems) {
            reasons.push(format!("relay {}: {problem}", self.name));
        }
        let backlog = lock(&self.backlog);
        if let Some(oldest) = backlog.oldest.filter(|age| *age > OVERDUE) {
            reasons.push(format!(
                "relay {}: {} events are pending, the oldest for {} s",
                self.name,
                backlog.pending,
                oldest.as_secs()
            ));
        }
    }

    fn notes(&self, notes: &mut BTreeSet<String>) {
        let parked = lock(&self.backlog).parked;
        if parked > 0 {
            notes.insert(format!(
                "{parked} outgoing events of relay {} are parked",
                self.name
            ));
        }
    }
}

/// Health must be readable after a panic elsewhere: the values are replaced whole, never half.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready(health: &RelayHealth) -> Vec<String> {
        let mut reasons = Vec::new();
        health.ready(&mut reasons);
        reasons
    }

    #[tokio::test(start_paused = true)]
    async fn it_says_what_is_wrong_and_not_more() {
        let health = RelayHealth::new("default");
        assert_eq!(ready(&health), ["relay default: not started"]);
        health.waiting_for(None);
        assert_eq!(ready(&health), [] as [&str; 0]);
        health.set_problems(vec!["publisher kafka is paused: down".into()]);
        assert_eq!(ready(&health), ["relay default: publisher kafka is paused: down"]);
        health.set_problems(Vec::new());
        health.set_backlog(OutgoingBacklog {
            pending: 4,
            oldest: Some(OVERDUE + Duration::from_secs(1)),
            parked: 2,
        });
        assert_eq!(
            ready(&health),
            ["relay default: 4 events are pending, the oldest for 301 s"]
        );
        let mut notes = BTreeSet::new();
        health.notes(&mut notes);
        assert_eq!(
            notes.into_iter().collect::<Vec<_>>(),
            ["2 outgoing events of relay default are parked"]
        );
        tokio::time::advance(STUCK + Duration::from_secs(1)).await;
        let mut live = Vec::new();
        health.live(&mut live);
        assert_eq!(live, ["relay default: the loop has not moved for 31 s"]);
    }
}
