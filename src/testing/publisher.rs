use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{Notify, watch};

use crate::publisher::{Message, PublishError, PublishErrorKind, Publisher, PublisherHealth};

/// A publisher to nowhere: it keeps what it gets, and fails as the test wants. Clones share everything.
///
/// ```
/// use onlyonce::publisher::PublishErrorKind;
/// use onlyonce::testing::{MemoryPublisher, Reply};
///
/// let publisher = MemoryPublisher::new();
/// // The first two copies of each event are refused.
/// publisher.replies(|_message, copy| match copy {
///     1 | 2 => Reply::fail(PublishErrorKind::Refused),
///     _ => Reply::confirm(),
/// });
/// ```
#[derive(Clone, Default)]
pub struct MemoryPublisher(Arc<Inner>);

#[derive(Default)]
struct Inner {
    state: Mutex<State>,
    changed: Notify,
    /// Counts connections: who waits for an answer on an earlier one does so in vain.
    connection: watch::Sender<u64>,
}

#[derive(Default)]
struct State {
    script: Option<Arc<Script>>,
    down: bool,
    stopped: bool,
    in_flight: usize,
    most_at_once: usize,
    copies: HashMap<String, u32>,
    arrived: Vec<Message>,
    calls: usize,
}

type Script = dyn Fn(&Message, u32) -> Reply + Send + Sync;

/// What a [`MemoryPublisher`] answers to one message.
#[derive(Debug, Clone)]
pub struct Reply {
    end: End,
    after: Duration,
    signal: Option<Arc<Notify>>,
}

#[derive(Debug, Clone, Copy)]
enum End {
    Confirm,
    Fail(PublishErrorKind),
    Cut,
}

impl Reply {
    /// The message has arrived.
    pub fn confirm() -> Self {
        Self::of(End::Confirm)
    }

    /// The message has not arrived, for this reason.
    pub fn fail(kind: PublishErrorKind) -> Self {
        Self::of(End::Fail(kind))
    }

    /// The connection dies of this message, and with it everything else that is on its way.
    pub fn cut() -> Self {
        Self::of(End::Cut)
    }

    /// The same, this much later.
    pub fn after(mut self, delay: Duration) -> Self {
        self.after = delay;
        self
    }

    /// The same, once the test gives the signal.
    pub fn once(mut self, signal: Arc<Notify>) -> Self {
        self.signal = Some(signal);
        self
    }

    fn of(end: End) -> Self {
        Self {
            end,
            after: Duration::ZERO,
            signal: None,
        }
    }
}

impl MemoryPublisher {
    /// A publisher that confirms everything at once.
    pub fn new() -> Self {
        Self::default()
    }

    /// Decides the answer to each message from now on; told which copy of its event it is, from 1 on.
    pub fn replies(&self, script: impl Fn(&Message, u32) -> Reply + Send + Sync + 'static) {
        self.lock().script = Some(Arc::new(script));
    }

    /// Answers nothing but that it is down, until [`recover`](Self::recover).
    pub fn go_down(&self) {
        self.lock().down = true;
    }

    /// Ends [`go_down`](Self::go_down).
    pub fn recover(&self) {
        self.lock().down = false;
    }

    /// What has arrived, in order, copies included.
    pub fn arrived(&self) -> Vec<Message> {
        self.lock().arrived.clone()
    }

    /// The event ids of what has arrived, in order, copies included.
    pub fn ids(&self) -> Vec<String> {
        let state = self.lock();
        state
            .arrived
            .iter()
            .map(|message| message.event_id.clone())
            .collect()
    }

    /// How often it was asked to publish anything.
    pub fn calls(&self) -> usize {
        self.lock().calls
    }

    /// How often it was asked to publish this event.
    pub fn copies(&self, event_id: &str) -> u32 {
        self.lock().copies.get(event_id).copied().unwrap_or(0)
    }

    /// How many messages are on their way.
    pub fn in_flight(&self) -> usize {
        self.lock().in_flight
    }

    /// The most that were on their way at once.
    pub fn most_at_once(&self) -> usize {
        self.lock().most_at_once
    }

    /// Whether it was stopped.
    pub fn is_stopped(&self) -> bool {
        self.lock().stopped
    }

    /// Waits until this is true; asked again whenever a message comes, arrives or fails.
    pub async fn until(&self, condition: impl Fn(&Self) -> bool) {
        loop {
            let changed = self.0.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if condition(self) {
                return;
            }
            changed.await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A message comes: what is answered to it, or why nothing is.
    fn come(&self, message: &Message) -> Result<Reply, PublishError> {
        let mut state = self.lock();
        state.calls += 1;
        let copy = state.copies.entry(message.event_id.clone()).or_default();
        *copy += 1;
        let copy = *copy;
        let (down, script) = (state.down, state.script.clone());
        drop(state);
        if down {
            self.0.changed.notify_waiters();
            return Err(PublishError::new(
                PublishErrorKind::Unavailable,
                "the publisher is down",
            ));
        }
        Ok(script.map_or_else(Reply::confirm, |script| script(message, copy)))
    }
}

/// One message on its way; it is not, when this is gone.
struct OnItsWay<'a>(&'a MemoryPublisher);

impl<'a> OnItsWay<'a> {
    fn new(publisher: &'a MemoryPublisher) -> Self {
        let mut state = publisher.lock();
        state.in_flight += 1;
        state.most_at_once = state.most_at_once.max(state.in_flight);
        drop(state);
        publisher.0.changed.notify_waiters();
        Self(publisher)
    }
}

impl Drop for OnItsWay<'_> {
    fn drop(&mut self) {
        self.0.lock().in_flight -= 1;
        self.0.0.changed.notify_waiters();
    }
}

#[async_trait]
impl Publisher for MemoryPublisher {
    fn system(&self) -> &'static str {
        "memory"
    }

    async fn publish(&self, message: &Message) -> Result<(), PublishError> {
        let mut connection = self.0.connection.subscribe();
        let reply = self.come(message)?;
        let waits = reply.signal.is_some();
        let signal = reply.signal.unwrap_or_default();
        let signalled = signal.notified();
        tokio::pin!(signalled);
        // Who sees it on its way may give the signal at once.
        signalled.as_mut().enable();
        let _on_its_way = OnItsWay::new(self);
        let cut = || {
            PublishError::new(
                PublishErrorKind::Interrupted,
                "the connection died while the message was on its way",
            )
        };
        let due = async {
            if waits {
                signalled.await;
            }
            if !reply.after.is_zero() {
                tokio::time::sleep(reply.after).await;
            }
        };
        tokio::select! {
            biased;
            _ = connection.changed() => return Err(cut()),
            () = due => {}
        }
        match reply.end {
            End::Confirm => {
                self.lock().arrived.push(message.clone());
                Ok(())
            }
            End::Fail(kind) => Err(PublishError::new(kind, format!("refused by the test: {kind:?}"))),
            End::Cut => {
                self.0.connection.send_modify(|connection| *connection += 1);
                Err(cut())
            }
        }
    }

    fn health(&self) -> PublisherHealth {
        if self.lock().down {
            PublisherHealth::down("the publisher is down")
        } else {
            PublisherHealth::up()
        }
    }

    async fn stop(&self) {
        self.lock().stopped = true;
    }
}
