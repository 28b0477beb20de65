use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{Mutex as AsyncMutex, watch};
use tokio::time::{Instant, sleep_until};

use super::StoreError;

/// How a relay of this process is told that there is something to publish. Many calls before it looks are one.
#[derive(Debug)]
pub struct Signal {
    changed: watch::Sender<()>,
    /// A task is about to tell other processes.
    pending: AtomicBool,
    /// When they were told last. Held while they are: one at a time.
    told: AsyncMutex<Option<Instant>>,
    /// A relay of this process holds every lane, so nobody else need be told.
    has_all_lanes: AtomicBool,
}

/// How long other processes are left alone once they were told: each time is a commit of the database's. With fifty events
/// a second none of them waits for the one before it.
const GAP: Duration = Duration::from_millis(10);

impl Signal {
    /// Wakes the relays of this process.
    pub fn raise(&self) {
        self.changed.send_replace(());
    }

    /// Tells of every [`raise`](Self::raise) from now on.
    pub fn watch(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Whether the caller is the one that has to tell other processes, of everything until then.
    pub(crate) fn is_first(&self) -> bool {
        !self.has_all_lanes.load(Ordering::Relaxed) && !self.pending.swap(true, Ordering::SeqCst)
    }

    pub(crate) fn has_all_lanes(&self, all: bool) {
        self.has_all_lanes.store(all, Ordering::Relaxed);
    }

    /// Tells other processes, after those before it and not too soon after them. What is written while
    /// they are told is told anew.
    pub(crate) async fn tell(&self, tell: impl Future<Output = Result<(), StoreError>>) {
        let mut told = self.told.lock().await;
        if let Some(at) = *told {
            sleep_until(at + GAP).await;
        }
        self.pending.store(false, Ordering::SeqCst);
        if let Err(error) = tell.await {
            tracing::debug!(
                %error,
                "other processes could not be told of outgoing events; they look by themselves"
            );
        }
        *told = Some(Instant::now());
    }
}

impl Default for Signal {
    fn default() -> Self {
        Self {
            changed: watch::Sender::new(()),
            pending: AtomicBool::new(false),
            told: AsyncMutex::new(None),
            has_all_lanes: AtomicBool::new(false),
        }
    }
}

/// The signals of one store, one for each relay. Clones share them.
#[derive(Clone, Default)]
pub struct Signals(Arc<Mutex<HashMap<String, Arc<Signal>>>>);

impl Signals {
    /// The signal of this relay.
    pub fn of(&self, relay: &str) -> Arc<Signal> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match all.get(relay) {
            Some(signal) => signal.clone(),
            None => all.entry(relay.to_owned()).or_default().clone(),
        }
    }
}

impl fmt::Debug for Signals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Signals").finish_non_exhaustive()
    }
}

/// Whom a store can tell that there is something to publish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// Relays in every process.
    Everybody,
    /// Those of this process alone: the database has nothing to tell others by.
    Nobody,
    /// Those of this process alone: a pooler stands in between.
    Blocked,
}

/// What other processes tell a relay.
#[async_trait]
pub trait Listener: Send {
    /// Waits for the next. An error means that the listener is broken.
    async fn heard(&mut self) -> Result<Heard, StoreError>;
}

/// What a listener heard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heard {
    /// There is something to publish.
    Something,
    /// The connection was lost and is there again: something may have been missed.
    Gap,
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn many_at_once_are_told_once_and_those_after_it_once_more() {
        let signal = Arc::new(Signal::default());
        let told = Arc::new(AtomicU32::new(0));
        let tell = || {
            let told = told.clone();
            async move {
                tokio::time::sleep(Duration::from_millis(5)).await;
                told.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
        };
        assert!(signal.is_first());
        assert!((0..100).all(|_| !signal.is_first()), "one of them is enough");
        let first = tokio::spawn({
            let (signal, tell) = (signal.clone(), tell());
            async move { signal.tell(tell).await }
        });
        // It is under way: what is written now may not be seen by whoever it wakes.
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert!(signal.is_first());
        assert!(!signal.is_first());
        let began = Instant::now();
        signal.tell(tell()).await;
        first.await.unwrap();
        assert_eq!(told.load(Ordering::Relaxed), 2);
        assert!(began.elapsed() >= GAP, "they are not told without a pause");
    }

    #[test]
    fn who_holds_every_lane_tells_nobody() {
        let signals = Signals::default();
        signals.of("default").has_all_lanes(true);
        assert!(!signals.clone().of("default").is_first());
        assert!(signals.of("another").is_first());
        signals.of("default").has_all_lanes(false);
        assert!(signals.of("default").is_first());
    }
}
