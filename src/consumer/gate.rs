//! The pause: what everything that needs the database waits at while it is not well.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::delay::spread;
use crate::store::Store;
use crate::telemetry;

/// How long to wait between two probes: slow enough for a dead server, quick enough to be back
/// within seconds.
const PROBE_MIN: Duration = Duration::from_millis(100);
const PROBE_MAX: Duration = Duration::from_secs(2);

/// Open while the database works; closed by the first statement of ours that fails for a reason that
/// is not contention, and opened again by a probe. One per consumer, shared by its lanes.
pub(crate) struct Gate {
    consumer: String,
    /// How long what was received stays ours while it is closed. Then it is given back, once.
    keep: Duration,
    state: watch::Sender<State>,
    /// Times in a row that it closed without a commit in between: a database that answers probes and
    /// refuses work (a revoked grant, a full disk) is approached more and more slowly.
    trips: AtomicU32,
    reason: Mutex<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Open,
    Closed { since: Instant },
}

/// How a wait at the gate ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Passage {
    /// The database answers.
    Open,
    /// It took too long, or the consumer stops: give the event back.
    GiveBack,
}

impl Gate {
    pub(crate) fn new(consumer: &str, keep: Duration) -> Self {
        Self {
            consumer: consumer.to_owned(),
            keep,
            state: watch::Sender::new(State::Open),
            trips: AtomicU32::new(0),
            reason: Mutex::new(String::new()),
        }
    }

    /// Closes the gate. Only the first of many lanes that fail at once changes anything, so there is
    /// one line in the log for one outage.
    pub(crate) fn close(&self, reason: &str) {
        let closed = self.state.send_if_modified(|state| {
            if matches!(state, State::Closed { .. }) {
                return false;
            }
            *state = State::Closed {
                since: Instant::now(),
            };
            true
        });
        if closed {
            self.trips.fetch_add(1, Relaxed);
            *self.reason.lock().unwrap_or_else(|e| e.into_inner()) = reason.to_owned();
            telemetry::paused(&self.consumer, true);
            tracing::warn!(
                consumer = self.consumer,
                reason,
                "paused: the database cannot be worked with"
            );
        }
    }

    fn open(&self) {
        self.state.send_replace(State::Open);
        telemetry::paused(&self.consumer, false);
        tracing::info!(consumer = self.consumer, "resumed: the database answers");
    }

    /// A transaction was committed: whatever closed the gate before is over.
    pub(crate) fn proven(&self) {
        // Read first: a store on every commit would bounce the cache line between all lanes.
        if self.trips.load(Relaxed) != 0 {
            self.trips.store(0, Relaxed);
        }
    }

    /// Why the gate is closed; `None` while it is open.
    pub(crate) fn closed_because(&self) -> Option<String> {
        match *self.state.borrow() {
            State::Open => None,
            State::Closed { .. } => Some(self.reason.lock().unwrap_or_else(|e| e.into_inner()).clone()),
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        *self.state.borrow() == State::Open
    }

    /// Tells of every change; for a loop's `select!`.
    pub(crate) fn watch(&self) -> watch::Receiver<State> {
        self.state.subscribe()
    }

    /// Whether what was received is to be given back by now.
    pub(crate) fn overdue(&self) -> bool {
        matches!(*self.state.borrow(), State::Closed { since } if since.elapsed() >= self.keep)
    }

    /// Waits until the database answers, or until the event should be given back.
    pub(crate) async fn pass(&self, stopping: &CancellationToken) -> Passage {
        let mut state = self.state.subscribe();
        loop {
            let State::Closed { since } = *state.borrow_and_update() else {
                return Passage::Open;
            };
            tokio::select! {
                biased;
                _ = stopping.cancelled() => return Passage::GiveBack,
                changed = state.changed() => if changed.is_err() { return Passage::GiveBack },
                _ = tokio::time::sleep_until(since + self.keep) => return Passage::GiveBack,
            }
        }
    }

    /// Probes whenever the gate is closed, and opens it. Runs beside the loops for the consumer's life.
    pub(crate) async fn keep<S: Store>(&self, store: S) {
        let mut state = self.state.subscribe();
        loop {
            if state
                .wait_for(|s| matches!(s, State::Closed { .. }))
                .await
                .is_err()
            {
                return;
            }
            for probe in 1.. {
                let pace = probe.max(self.trips.load(Relaxed));
                tokio::time::sleep(spread(PROBE_MIN, PROBE_MAX, pace)).await;
                match store.probe().await {
                    Ok(()) => break,
                    Err(e) => {
                        *self.reason.lock().unwrap_or_else(|p| p.into_inner()) = e.to_string();
                        tracing::debug!(consumer = self.consumer, error = %e, "still paused");
                    }
                }
            }
            self.open();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_gives_back_after_a_minute_and_at_a_stop() {
        let gate = Gate::new("c", Duration::from_secs(60));
        let stop = CancellationToken::new();
        assert_eq!(gate.pass(&stop).await, Passage::Open);
        gate.close("down");
        assert_eq!(gate.closed_because().as_deref(), Some("down"));
        assert_eq!(
            gate.pass(&stop).await,
            Passage::GiveBack,
            "paused time runs to the minute"
        );
        stop.cancel();
        assert_eq!(gate.pass(&stop).await, Passage::GiveBack);
        gate.open();
        assert_eq!(gate.pass(&stop).await, Passage::Open);
    }
}
