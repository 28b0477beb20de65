//! A TCP proxy between a store and PostgreSQL that cuts, refuses and freezes on demand.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use onlyonce::store::PostgresStore;
use onlyonce::store::postgres::PostgresOptions;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::stage::postgres_url;

/// A way to the database that a test can spoil.
#[derive(Clone)]
pub(crate) struct Proxy {
    url: String,
    address: SocketAddr,
    link: Arc<Link>,
    listening: Arc<Mutex<Option<JoinHandle<()>>>>,
}

struct Link {
    server: String,
    /// Bytes pass. While they do not, connections stand still and nothing is said about it.
    flows: watch::Sender<bool>,
    /// Connections are made and ended at once.
    hangs_up: AtomicBool,
    /// Connections before this one never carry a byte again, and are never told.
    stranded: Mutex<usize>,
    /// Counts up whenever all connections are to end.
    cuts: watch::Sender<u32>,
    commit: Mutex<Option<Cut>>,
    accepted: AtomicUsize,
    commits_cut: AtomicUsize,
}

/// Where in a COMMIT the connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cut {
    /// The server never sees the COMMIT.
    Before,
    /// The server commits, and its answer is lost.
    After,
}

impl Proxy {
    /// A proxy in front of the tests' server; `None` if there is none.
    pub(crate) async fn start() -> Option<Self> {
        Some(Self::to(&postgres_url()?).await)
    }

    /// A proxy in front of the server of this URL.
    pub(crate) async fn to(url: &str) -> Self {
        let (before, rest) = url.split_once('@').unwrap();
        let (server, database) = rest.split_once('/').unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let link = Arc::new(Link {
            server: server.to_owned(),
            flows: watch::Sender::new(true),
            hangs_up: AtomicBool::new(false),
            stranded: Mutex::new(0),
            cuts: watch::Sender::new(0),
            commit: Mutex::new(None),
            accepted: AtomicUsize::new(0),
            commits_cut: AtomicUsize::new(0),
        });
        Self {
            url: format!("{before}@{address}/{database}"),
            address,
            listening: Arc::new(Mutex::new(Some(tokio::spawn(accept(listener, link.clone()))))),
            link,
        }
    }

    /// The database's URL by way of this proxy.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// A store that goes this way.
    pub(crate) fn store(&self, schema: &str) -> PostgresStore {
        PostgresOptions::new(&self.url)
            .schema(schema)
            .acquire_timeout(Duration::from_secs(2))
            .connect()
            .unwrap()
    }

    /// Ends every connection, without a word.
    pub(crate) fn cut(&self) {
        self.link.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// Ends every connection, and refuses new ones until [`accept`](Self::accept).
    pub(crate) async fn refuse(&self) {
        let listening = self.listening.lock().unwrap().take();
        if let Some(listening) = listening {
            listening.abort();
            let _ = listening.await;
        }
        self.cut();
    }

    /// Ends [`refuse`](Self::refuse).
    pub(crate) async fn accept(&self) {
        let listener = TcpListener::bind(self.address).await.unwrap();
        let task = tokio::spawn(accept(listener, self.link.clone()));
        *self.listening.lock().unwrap() = Some(task);
    }

    /// Lets nothing through from now on; connections are made and say nothing.
    pub(crate) fn freeze(&self) {
        self.link.flows.send_replace(false);
    }

    /// Ends [`freeze`](Self::freeze).
    pub(crate) fn thaw(&self) {
        self.link.flows.send_replace(true);
    }

    /// Ends every connection, and new ones as soon as they are made, until [`answer`](Self::answer).
    pub(crate) fn hang_up(&self) {
        self.link.hangs_up.store(true, Ordering::SeqCst);
        self.cut();
    }

    /// Ends [`hang_up`](Self::hang_up).
    pub(crate) fn answer(&self) {
        self.link.hangs_up.store(false, Ordering::SeqCst);
    }

    /// The machine behind all present connections vanishes; new ones find another.
    pub(crate) fn strand(&self) {
        *self.link.stranded.lock().unwrap() = self.accepted();
    }

    /// Cuts the connection of the next COMMIT of a handler's transaction.
    pub(crate) fn cut_next_commit(&self, cut: Cut) {
        *self.link.commit.lock().unwrap() = Some(cut);
    }

    /// How many COMMITs were cut.
    pub(crate) fn commits_cut(&self) -> usize {
        self.link.commits_cut.load(Ordering::SeqCst)
    }

    /// How many connections were made, answered or not.
    pub(crate) fn accepted(&self) -> usize {
        self.link.accepted.load(Ordering::SeqCst)
    }
}

async fn accept(listener: TcpListener, link: Arc<Link>) {
    while let Ok((client, _)) = listener.accept().await {
        let number = link.accepted.fetch_add(1, Ordering::SeqCst);
        if !link.hangs_up.load(Ordering::SeqCst) {
            tokio::spawn(serve(number, client, link.clone()));
        }
    }
}

async fn serve(number: usize, client: TcpStream, link: Arc<Link>) {
    let mut cuts = link.cuts.subscribe();
    let Ok(server) = TcpStream::connect(&link.server).await else {
        return;
    };
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let lost = watch::Sender::new(false);
    tokio::select! {
        _ = cuts.changed() => {}
        _ = requests(number, from_client, to_server, &link, &lost) => {}
        _ = answers(number, from_server, to_client, &link, &lost) => {}
    }
}

/// The end of a handler's transaction, which goes in one message with its guard.
const COMMIT: &[u8] = b"EXECUTE onlyonce_guard";

async fn requests(
    number: usize,
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    link: &Link,
    lost: &watch::Sender<bool>,
) -> std::io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let read = from.read(&mut buffer).await?;
        flowing(number, link).await;
        if read == 0 {
            return Ok(());
        }
        let bytes = &buffer[..read];
        if bytes.windows(COMMIT.len()).any(|w| w == COMMIT) {
            let cut = link.commit.lock().unwrap().take();
            match cut {
                None => {}
                Some(Cut::Before) => {
                    link.commits_cut.fetch_add(1, Ordering::SeqCst);
                    return Ok(());
                }
                Some(Cut::After) => {
                    lost.send_replace(true);
                }
            }
        }
        to.write_all(bytes).await?;
    }
}

async fn answers(
    number: usize,
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    link: &Link,
    lost: &watch::Sender<bool>,
) -> std::io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let read = from.read(&mut buffer).await?;
        flowing(number, link).await;
        if read == 0 {
            return Ok(());
        }
        if *lost.borrow() {
            // The server has answered the COMMIT: it is done.
            link.commits_cut.fetch_add(1, Ordering::SeqCst);
            return Ok(());
        }
        to.write_all(&buffer[..read]).await?;
    }
}

/// Waits until bytes of this connection may pass.
async fn flowing(number: usize, link: &Link) {
    if number < *link.stranded.lock().unwrap() {
        std::future::pending::<()>().await;
    }
    let _ = link.flows.subscribe().wait_for(|flows| *flows).await;
}
