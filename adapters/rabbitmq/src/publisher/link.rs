//! The publisher's connection and its channels: made when they are needed, thrown away when they broke.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use lapin::options::ConfirmSelectOptions;
use lapin::{Channel, Connection};

use crate::config::Access;
use crate::connect::{CutOnDrop, dial, within};

/// The one connection, for all who publish.
#[derive(Debug)]
pub(super) struct Links {
    state: tokio::sync::Mutex<State>,
    /// The same link, for those who only look.
    shown: Mutex<Option<Arc<Link>>>,
}

#[derive(Debug)]
enum State {
    /// Nobody has asked for it, or it broke.
    Down,
    Up(Arc<Link>),
    /// The last attempt ended then.
    Failed(Instant, String),
    Stopped,
}

/// An open connection.
#[derive(Debug)]
pub(super) struct Link {
    /// Open channels on which nothing is under way.
    idle: Mutex<Vec<Channel>>,
    connection: Connection,
    // Fields drop in this order: lapin gets to queue its polite close, then the socket goes.
    _cut: CutOnDrop,
}

impl Links {
    pub(super) fn new() -> Self {
        Self {
            state: tokio::sync::Mutex::new(State::Down),
            shown: Mutex::new(None),
        }
    }

    /// The connection, opened anew if it has to be. Those who come while somebody opens it wait, and share what
    /// becomes of that one attempt.
    pub(super) async fn link(&self, access: &Access) -> Result<Arc<Link>, String> {
        let since = Instant::now();
        let mut state = self.state.lock().await;
        match &*state {
            State::Up(link) if link.is_up() => return Ok(link.clone()),
            State::Failed(at, problem) if *at >= since => return Err(problem.clone()),
            State::Stopped => return Err("the publisher is stopped".to_owned()),
            State::Down | State::Up(_) | State::Failed(..) => {}
        }
        // Dropped halfway, the attempt leaves no connection behind, and the next caller tries again.
        *state = State::Down;
        match dial(access, "onlyonce publisher").await {
            Ok((connection, cut)) => {
                let link = Arc::new(Link {
                    idle: Mutex::default(),
                    connection,
                    _cut: cut,
                });
                *state = State::Up(link.clone());
                *self.shown() = Some(link.clone());
                tracing::info!(broker = %access.broker.host(), "publishing to RabbitMQ");
                Ok(link)
            }
            Err(error) => {
                let problem = error.to_string();
                *state = State::Failed(Instant::now(), problem.clone());
                Err(problem)
            }
        }
    }

    /// Closes the connection for good, politely if the broker listens.
    pub(super) async fn stop(&self, access: &Access) {
        let mut state = self.state.lock().await;
        if let State::Up(link) = std::mem::replace(&mut *state, State::Stopped) {
            let closing = link.connection.close(200, "the publisher stops".into());
            // Whatever comes of it: what was confirmed is safe, and the rest was never said to be.
            drop(within(access, "did not answer", closing).await);
        }
        *self.shown() = None;
    }

    /// Whether the broker takes nothing from this connection for now.
    pub(super) fn is_blocked(&self) -> bool {
        self.shown().as_ref().is_some_and(|link| link.is_blocked())
    }

    fn shown(&self) -> MutexGuard<'_, Option<Arc<Link>>> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Link {
    fn is_up(&self) -> bool {
        self.connection.status().connected()
    }

    /// The broker is short of memory or disk and reads nothing from those who publish.
    pub(super) fn is_blocked(&self) -> bool {
        self.is_up() && self.connection.status().blocked()
    }

    pub(super) fn frame_max(&self) -> u32 {
        self.connection.configuration().frame_max()
    }

    /// A channel in confirm mode for one message.
    pub(super) async fn channel(&self, access: &Access) -> Result<Channel, String> {
        loop {
            let Some(channel) = self.idle().pop() else { break };
            if channel.status().connected() {
                return Ok(channel);
            }
        }
        let opening = async {
            let channel = self.connection.create_channel().await?;
            channel.confirm_select(ConfirmSelectOptions::default()).await?;
            Ok(channel)
        };
        match within(access, "opened no channel", opening).await {
            Ok(opened) => opened.map_err(|e: lapin::Error| {
                format!(
                    "cannot open a channel on RabbitMQ at {}: {e}",
                    access.broker.host()
                )
            }),
            Err(late) => Err(late.to_string()),
        }
    }

    /// The message that was on it was answered.
    pub(super) fn give_back(&self, channel: Channel) {
        self.idle().push(channel);
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Channel>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
