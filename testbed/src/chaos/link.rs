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

pub(super) struct Link {
    /// The server's URL with this proxy's address in it.
    pub(super) url: String,
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
    /// Before the server of this URL, at this port of 127.0.0.1 or, if it is 0, at any.
    pub(super) async fn before(url: &str, port: u16) -> anyhow::Result<Self> {
        let address = address_in(url).to_owned();
        let listener = TcpListener::bind(("127.0.0.1", port))
            .await
            .with_context(|| format!("a link at port {port}"))?;
        let url = url.replacen(&address, &listener.local_addr()?.to_string(), 1);
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

    pub(super) fn cut(&self) {
        self.state.send_modify(|state| state.cut = true);
    }

    pub(super) fn freeze(&self) {
        self.state.send_modify(|state| state.frozen = true);
    }

    pub(super) fn mend(&self) {
        self.state
            .send_modify(|state| (state.cut, state.frozen) = (false, false));
    }

    /// All connections that there are now are dead, and nobody is told.
    pub(super) fn forget(&self) {
        let next = self.next.load(SeqCst);
        self.state.send_modify(|state| state.forgotten = next);
    }

    /// How many connections there have been.
    pub(super) fn connections(&self) -> u64 {
        self.next.load(SeqCst)
    }

    /// Cuts this many of the next commits, before or after the server has read them.
    pub(super) fn cut_commits(&self, before: usize, after: usize) {
        self.traps.before.store(before, SeqCst);
        self.traps.after.store(after, SeqCst);
    }

    /// How many commits were cut.
    pub(super) fn commits_cut(&self) -> usize {
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

/// Host and port of a URL, or of what is nothing else.
fn address_in(url: &str) -> &str {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let rest = rest.split_once('@').map_or(rest, |(_, rest)| rest);
    rest.split_once('/').map_or(rest, |(address, _)| address)
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

#[cfg(test)]
mod tests {
    use super::address_in;

    #[test]
    fn an_address_is_found_in_every_kind_of_url() {
        for url in [
            "amqp://guest:guest@127.0.0.1:5672/%2f",
            "http://127.0.0.1:5672",
            "http://127.0.0.1:5672/000000000000/queue",
            "127.0.0.1:5672",
        ] {
            assert_eq!(address_in(url), "127.0.0.1:5672", "{url}");
        }
    }
}
