//! How the source is doing, written by the session and read by whoever asks.

use std::sync::{Mutex, MutexGuard, PoisonError};

use onlyonce::source::SourceHealth;

/// Shared by the source and its sessions; every write is a change of a field or two.
#[derive(Debug)]
pub(crate) struct Status(Mutex<Known>);

#[derive(Debug)]
struct Known {
    health: SourceHealth,
    /// The group has given us our partitions, be it none.
    assigned: bool,
    /// The client was rebuilt because nothing came, and nothing has come since.
    rebuilt: bool,
    rebuilds: u64,
}

impl Status {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Known {
            health: SourceHealth::down("not started"),
            assigned: false,
            rebuilt: false,
            rebuilds: 0,
        }))
    }

    /// A client is there and waits for the group.
    pub(crate) fn joining(&self) {
        let mut known = self.lock();
        known.assigned = false;
        known.health = SourceHealth::down("waiting for the group to assign partitions");
    }

    /// The group has decided.
    pub(crate) fn assigned(&self) {
        let mut known = self.lock();
        known.assigned = true;
        known.health.connected = !known.rebuilt;
        known.health.problem = known
            .rebuilt
            .then(|| "the client was rebuilt because nothing came, and nothing has come since".to_owned());
    }

    /// A record has come, or none waits: whatever was wrong is over.
    pub(crate) fn flows(&self) {
        let mut known = self.lock();
        known.rebuilt = false;
        if known.assigned && known.health.problem.is_some() {
            known.health.connected = true;
            known.health.problem = None;
        }
    }

    /// The client has told how the brokers are doing.
    pub(crate) fn observed(&self, broker_up: bool, backlog: Option<u64>) {
        let mut known = self.lock();
        known.health.backlog = backlog;
        if broker_up && known.assigned && !known.rebuilt {
            known.health.connected = true;
            known.health.problem = None;
        }
    }

    /// Not receiving, for this reason.
    pub(crate) fn down(&self, problem: impl Into<String>) {
        let mut known = self.lock();
        let stuck = known.health.stuck;
        known.health = SourceHealth::down(problem);
        known.health.stuck = stuck;
    }

    /// So many partitions are paused because an event of theirs is unfinished.
    pub(crate) fn stuck(&self, partitions: usize) {
        self.lock().health.stuck = partitions;
    }

    /// Records wait and none comes. True once, for the client to be rebuilt; after that it is a problem
    /// that a person has to look at, until something comes.
    pub(crate) fn stalled(&self, problem: String) -> bool {
        let mut known = self.lock();
        known.health.connected = false;
        known.health.problem = Some(problem);
        let first = !std::mem::replace(&mut known.rebuilt, true);
        known.rebuilds += u64::from(first);
        first
    }

    /// The client was rebuilt because nothing came, and nothing has come since.
    pub(crate) fn is_rebuilt(&self) -> bool {
        self.lock().rebuilt
    }

    /// How often the client was rebuilt because nothing came.
    pub(crate) fn rebuilds(&self) -> u64 {
        self.lock().rebuilds
    }

    pub(crate) fn health(&self) -> SourceHealth {
        self.lock().health.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_is_answered_by_one_rebuild_until_something_comes() {
        let status = Status::new();
        status.assigned();
        assert!(status.stalled("1".to_owned()));
        status.joining();
        status.assigned();
        assert!(!status.health().connected, "partitions alone are no cure");
        assert!(!status.stalled("2".to_owned()), "it was rebuilt already");
        status.observed(true, Some(7));
        assert_eq!(
            status.health().problem.as_deref(),
            Some("2"),
            "a broker that is up is no cure"
        );
        status.flows();
        assert!(status.health().connected);
        assert!(status.stalled("3".to_owned()));
        assert_eq!(status.rebuilds(), 2);
    }

    #[test]
    fn a_broker_that_is_back_clears_the_problem() {
        let status = Status::new();
        status.joining();
        status.observed(true, None);
        assert!(!status.health().connected, "nothing is assigned yet");
        status.assigned();
        status.down("no broker answers");
        status.observed(true, Some(3));
        assert_eq!(status.health().backlog, Some(3));
        assert!(status.health().connected);
    }
}
