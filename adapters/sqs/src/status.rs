//! How the source is doing, written by the session and read by whoever asks.

use std::sync::{Mutex, MutexGuard, PoisonError};

use onlyonce::source::SourceHealth;

/// Shared by the source and its sessions; every write is a change of a field or two.
#[derive(Debug)]
pub(crate) struct Status(Mutex<SourceHealth>);

impl Status {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(SourceHealth::down("not started")))
    }

    pub(crate) fn up(&self, backlog: Option<u64>) {
        let mut health = self.lock();
        health.connected = true;
        health.problem = None;
        health.backlog = backlog.or(health.backlog);
    }

    pub(crate) fn down(&self, problem: impl Into<String>) {
        *self.lock() = SourceHealth::down(problem);
    }

    pub(crate) fn backlog(&self, backlog: Option<u64>) {
        self.lock().backlog = backlog;
    }

    pub(crate) fn health(&self) -> SourceHealth {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, SourceHealth> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
