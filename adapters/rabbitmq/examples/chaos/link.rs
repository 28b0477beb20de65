//! The cable between one worker and one server: a TCP proxy that can be cut in several ways.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};

use anyhow::Context as _;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// What the cable does.
#[derive(Debug, Clone, Copy, Default)]
struct State {
    /// Connections stay, new ones are accepted, and not a byte passes.
    frozen: bool,
    /// Connections are closed, and new ones at once.
    cut: bool,
    /// Connections with a lower number never pass a byte again, as if a firewall had forgotten them;
    /// new ones do.
    forgotten: u64,
}

pub(crate) struct Link {
    /// The server's URL with this proxy's address in it.
    pub(crate) url: String,
    state: watch::Sender<State>,
    next: Arc<AtomicU64>,
    traps: Arc<Traps>,
}

/// Connections to be cut while they commit: before the server hears of it, or before the client
/// hears of the outcome.
#[derive(Default)]
struct Traps {
    before: AtomicUsize,
    after: AtomicUsize,
    sprung: AtomicUsize,
}

impl Link {
    pub(crate) async fn before(url: &str) -> anyhow::Result<Self> {
        let (head, rest) = url.split_once('@').context("the URL has no user")?;
        let (address, path) = rest.split_once('/').context("the URL has no path")?;
        let address = address.to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("{head}@{}/{path}", listener.local_addr()?);
        let (state, states) = watch::channel(State::default());
        let (next, traps) = (Arc::<AtomicU64>::default(), Arc::<Traps>::default());
        let (numbers, set) = (next.clone(), traps.clone());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let wire = Wire {
                    number: numbers.fetch_add(1, SeqCst),
                    states: states.clone(),
                    traps: set.clone(),
                    swallow: Arc::default(),
                };
                tokio::spawn(connection(client, address.clone(), wire));
            }
        });
        Ok(Self {
            url,
            state,
            next,
            traps,
        })
    }

    pub(crate) fn cut(&self) {
        self.state.send_modify(|state| state.cut = true);
    }

    pub(crate) fn freeze(&self) {
        self.state.send_modify(|state| state.frozen = true);
    }

    pub(crate) fn mend(&self) {
        self.state
            .send_modify(|state| (state.cut, state.frozen) = (false, false));
    }

    /// All connections that there are now are dead, and nobody is told.
    pub(crate) fn forget(&self) {
        let next = self.next.load(SeqCst);
        self.state.send_modify(|state| state.forgotten = next);
    }

    /// How many connections there have been.
    pub(crate) fn connections(&self) -> u64 {
        self.next.load(SeqCst)
    }

    /// Cuts this many of the next commits, before or after the server has read them.
    pub(crate) fn cut_commits(&self, before: usize, after: usize) {
        self.traps.before.store(before, SeqCst);
        self.traps.after.store(after, SeqCst);
    }

    /// How many commits were cut.
    pub(crate) fn commits_cut(&self) -> usize {
        self.traps.sprung.load(SeqCst)
    }
}

impl Traps {
    /// Takes one of these if there are any.
    fn spring(&self, trap: &AtomicUsize) -> bool {
        let sprung = trap
            .fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1))
            .is_ok();
        if sprung {
            self.sprung.fetch_add(1, SeqCst);
        }
        sprung
    }
}

/// One connection's part of the cable.
#[derive(Clone)]
struct Wire {
    number: u64,
    states: watch::Receiver<State>,
    traps: Arc<Traps>,
    /// The server's next answer is not passed on; the connection ends instead.
    swallow: Arc<AtomicBool>,
}

impl Wire {
    async fn passable(&mut self) -> bool {
        let number = self.number;
        self.states
            .wait_for(|state| !state.frozen && number >= state.forgotten)
            .await
            .is_ok()
    }

    async fn copy(mut self, mut from: OwnedReadHalf, mut to: OwnedWriteHalf, to_server: bool) {
        let mut buffer = vec![0; 64 << 10];
        while self.passable().await {
            let Ok(read @ 1..) = from.read(&mut buffer).await else {
                return;
            };
            if !self.passable().await {
                return;
            }
            let bytes = &buffer[..read];
            if to_server && is_commit(bytes) {
                if self.traps.spring(&self.traps.before) {
                    return;
                }
                if self.traps.spring(&self.traps.after) {
                    self.swallow.store(true, SeqCst);
                }
            }
            if !to_server && self.swallow.load(SeqCst) {
                return;
            }
            if to.write_all(bytes).await.is_err() {
                return;
            }
        }
    }
}

/// The end of a handler's transaction, which goes in one message with its guard.
fn is_commit(bytes: &[u8]) -> bool {
    const COMMIT: &[u8] = b"EXECUTE onlyonce_guard";
    bytes.windows(COMMIT.len()).any(|window| window == COMMIT)
}

async fn connection(client: TcpStream, address: String, mut wire: Wire) {
    if wire.states.borrow().cut || !wire.passable().await {
        return;
    }
    let Ok(server) = TcpStream::connect(address).await else {
        return;
    };
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let mut states = wire.states.clone();
    tokio::select! {
        () = wire.clone().copy(from_client, to_server, true) => {}
        () = wire.copy(from_server, to_client, false) => {}
        _ = states.wait_for(|state| state.cut) => {}
    }
}
