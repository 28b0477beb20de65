//! Health: `live` and `ready`, with reasons, from progress and not from hope.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::gate::Gate;
use crate::source::{SourceError, SourceHealth};
use crate::store::{Backlog, Unread};

/// A loop beats about once a second; one that has not for this long is stuck.
const STUCK: Duration = Duration::from_secs(30);

/// A held event that is due for longer than this says that held lanes do not keep up.
const OVERDUE: Duration = Duration::from_secs(300);

/// Answers probes of a process supervisor. Cheap to clone and to ask.
#[derive(Clone, Default)]
pub struct Health {
    members: Arc<Mutex<Vec<Arc<dyn Vitals>>>>,
}

/// What a consumer or a relay says of itself.
pub(crate) trait Vitals: Send + Sync {
    /// Adds the reasons to restart it.
    fn live(&self, reasons: &mut Vec<String>);

    /// Adds what keeps it from its work.
    fn ready(&self, reasons: &mut Vec<String>);

    /// Adds what somebody should look at. What all members of one database see is there once.
    fn notes(&self, notes: &mut BTreeSet<String>);
}

/// The answer to a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Check {
    /// Whether all is well.
    pub ok: bool,
    /// What is not, in words for an operator.
    pub reasons: Vec<String>,
    /// What somebody should look at although all is well, such as held events that nobody reads.
    pub notes: Vec<String>,
}

impl Health {
    /// Whether a restart would help: false only if a loop is stuck or has died. A database or a
    /// broker that is down is no reason to restart.
    pub fn live(&self) -> Check {
        self.check(|member, reasons| member.live(reasons))
    }

    /// Whether events are being taken and sent: the sources are connected, the database answers, the loops
    /// move, held events do not pile up, publishers get through.
    pub fn ready(&self) -> Check {
        self.check(|member, reasons| member.ready(reasons))
    }

    pub(crate) fn add(&self, member: Arc<dyn Vitals>) {
        lock(&self.members).push(member);
    }

    fn check(&self, of: impl Fn(&dyn Vitals, &mut Vec<String>)) -> Check {
        let mut reasons = Vec::new();
        let members = lock(&self.members);
        if members.is_empty() {
            reasons.push("no consumer has been added".to_owned());
        }
        let mut notes = BTreeSet::new();
        for member in members.iter() {
            of(&**member, &mut reasons);
            member.notes(&mut notes);
        }
        Check {
            ok: reasons.is_empty(),
            reasons,
            notes: notes.into_iter().collect(),
        }
    }
}

impl fmt::Debug for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Health")
            .field("live", &self.live())
            .field("ready", &self.ready())
            .finish()
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.ok {
            f.write_str("ok")
        } else {
            f.write_str(&self.reasons.join("; "))
        }
    }
}

/// What one consumer's health is read from.
pub(crate) struct ConsumerHealth {
    name: String,
    gate: Arc<Gate>,
    loops: Mutex<Vec<Arc<LoopHealth>>>,
    waiting: Mutex<Option<String>>,
    ended: AtomicBool,
    backlog: Mutex<Backlog>,
    unread: Mutex<Vec<Unread>>,
}

impl ConsumerHealth {
    pub(crate) fn new(name: &str, gate: Arc<Gate>) -> Self {
        Self {
            name: name.to_owned(),
            gate,
            loops: Mutex::default(),
            waiting: Mutex::new(Some("not started".to_owned())),
            ended: AtomicBool::new(false),
            backlog: Mutex::default(),
            unread: Mutex::default(),
        }
    }

    pub(crate) fn add_loop(&self, what: &'static str) -> Arc<LoopHealth> {
        let health = Arc::new(LoopHealth::new(what));
        lock(&self.loops).push(health.clone());
        health
    }

    /// Why the consumer has not begun to receive; `None` once the database has answered.
    pub(crate) fn waiting_for(&self, reason: Option<String>) {
        *lock(&self.waiting) = reason;
    }

    pub(crate) fn set_unread(&self, unread: Vec<Unread>) {
        *lock(&self.unread) = unread;
    }

    pub(crate) fn set_backlog(&self, backlog: Backlog) {
        *lock(&self.backlog) = backlog;
    }

    /// The consumer's task is over, by a stop or by an error.
    pub(crate) fn ended(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }
}

impl Vitals for ConsumerHealth {
    fn notes(&self, notes: &mut BTreeSet<String>) {
        for Unread { consumer, held } in lock(&self.unread).iter() {
            notes.insert(format!(
                "{held} held events of consumer {consumer} have no reader"
            ));
        }
    }

    fn live(&self, reasons: &mut Vec<String>) {
        if self.ended.load(Ordering::Relaxed) {
            reasons.push(format!("consumer {} has ended", self.name));
            return;
        }
        for health in lock(&self.loops).iter() {
            let age = health.age();
            if age > STUCK {
                reasons.push(format!(
                    "consumer {}: the {} loop has not moved for {} s",
                    self.name,
                    health.what,
                    age.as_secs()
                ));
            }
        }
    }

    fn ready(&self, reasons: &mut Vec<String>) {
        self.live(reasons);
        if let Some(waiting) = &*lock(&self.waiting) {
            reasons.push(format!("consumer {}: {waiting}", self.name));
            return;
        }
        if let Some(reason) = self.gate.closed_because() {
            reasons.push(format!("consumer {}: paused, {reason}", self.name));
        }
        for health in lock(&self.loops).iter() {
            if let Some(problem) = health.problem() {
                reasons.push(format!(
                    "consumer {}: {} source: {problem}",
                    self.name, health.what
                ));
            }
        }
        let backlog = *lock(&self.backlog);
        if backlog.oldest_due > OVERDUE {
            reasons.push(format!(
                "consumer {}: {} held events are due, the oldest for {} s",
                self.name,
                backlog.due,
                backlog.oldest_due.as_secs()
            ));
        }
    }
}

/// What one receive loop says of itself.
pub(crate) struct LoopHealth {
    what: &'static str,
    began: Instant,
    beat_ms: AtomicU64,
    source: Mutex<SourceHealth>,
}

impl LoopHealth {
    fn new(what: &'static str) -> Self {
        Self {
            what,
            began: Instant::now(),
            beat_ms: AtomicU64::new(0),
            source: Mutex::new(SourceHealth::down("not started")),
        }
    }

    pub(crate) fn beat(&self) {
        self.beat_ms
            .store(self.began.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    pub(crate) fn started(&self) {
        self.beat();
        self.source(SourceHealth::up());
    }

    pub(crate) fn source(&self, health: SourceHealth) {
        *lock(&self.source) = health;
    }

    pub(crate) fn broken(&self, error: &SourceError) {
        self.source(SourceHealth::down(error.to_string()));
    }

    fn age(&self) -> Duration {
        self.began
            .elapsed()
            .saturating_sub(Duration::from_millis(self.beat_ms.load(Ordering::Relaxed)))
    }

    fn problem(&self) -> Option<String> {
        let source = lock(&self.source);
        if source.connected {
            None
        } else {
            Some(source.problem.clone().unwrap_or_else(|| "not connected".into()))
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

    #[tokio::test(start_paused = true)]
    async fn a_loop_that_stands_still_is_neither_live_nor_ready() {
        let gate = Arc::new(Gate::new("orders", Duration::from_secs(60)));
        let consumer = Arc::new(ConsumerHealth::new("orders", gate.clone()));
        let health = Health::default();
        health.add(consumer.clone());
        assert!(health.live().ok, "starting is no reason to restart");
        assert_eq!(health.ready().reasons, ["consumer orders: not started"]);

        consumer.waiting_for(None);
        let main = consumer.add_loop("main");
        main.started();
        for _ in 0..100 {
            tokio::time::advance(Duration::from_secs(20)).await;
            main.beat();
            assert!(health.live().ok && health.ready().ok, "{health:?}");
        }
        tokio::time::advance(STUCK + Duration::from_secs(1)).await;
        let stuck = ["consumer orders: the main loop has not moved for 31 s"];
        assert_eq!(health.live().reasons, stuck);
        assert_eq!(health.ready().reasons, stuck);
        main.beat();
        assert!(health.live().ok && health.ready().ok);
    }

    #[tokio::test(start_paused = true)]
    async fn an_outage_is_a_reason_not_to_be_ready_and_none_to_restart() {
        let gate = Arc::new(Gate::new("orders", Duration::from_secs(60)));
        let consumer = Arc::new(ConsumerHealth::new("orders", gate.clone()));
        let health = Health::default();
        health.add(consumer.clone());
        consumer.waiting_for(None);
        let main = consumer.add_loop("main");
        main.started();
        gate.close("no route to host");
        main.source(SourceHealth::down("the queue is gone"));
        assert!(health.live().ok);
        assert_eq!(
            health.ready().reasons,
            [
                "consumer orders: paused, no route to host",
                "consumer orders: main source: the queue is gone"
            ]
        );
        consumer.set_backlog(Backlog {
            due: 3,
            oldest_due: OVERDUE + Duration::from_secs(1),
            ..Backlog::default()
        });
        assert!(health.ready().to_string().contains("3 held events are due"));
        consumer.ended();
        assert_eq!(health.live().reasons, ["consumer orders has ended"]);
    }
}
