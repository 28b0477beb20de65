//! A network cable with scissors: a TCP proxy at one of the addresses that the broker tells to those who come that
//! way.

use std::io::ErrorKind;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, SemaphorePermit, watch};
use tokio::time::sleep;

use super::harness::{soon, variable};

/// Those that are free; the broker knows only so many.
static LINKS: Mutex<Option<Vec<Link>>> = Mutex::new(None);
static FREE: Semaphore = Semaphore::const_new(4);

/// Where a proxy's way ends, and the port that it has to have.
#[derive(Debug, Clone)]
struct Link {
    broker: String,
    port: u16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Flowing,
    /// Connections stay, new ones are accepted, and not a byte passes.
    Frozen,
    /// Connections are closed, and new ones at once.
    Cut,
}

pub(crate) struct Proxy {
    /// The broker by way of this proxy.
    pub(crate) brokers: String,
    mode: watch::Sender<Mode>,
    link: Link,
    _free: SemaphorePermit<'static>,
}

impl Proxy {
    pub(crate) async fn free() -> Option<Self> {
        let links = variable("ONLYONCE_KAFKA_LINKS")?;
        let free = FREE.acquire().await.unwrap();
        let link = {
            let mut all = LINKS.lock().unwrap_or_else(PoisonError::into_inner);
            all.get_or_insert_with(|| links.split(',').map(read).collect())
                .pop()
                .unwrap()
        };
        let listener = soon(listen(link.port)).await;
        let (mode, modes) = watch::channel(Mode::Flowing);
        let broker = link.broker.clone();
        tokio::spawn(async move {
            loop {
                let accepted = tokio::select! {
                    accepted = listener.accept() => accepted,
                    // The proxy is gone, and the port is the next one's.
                    () = gone(modes.clone()) => return,
                };
                if let Ok((client, _)) = accepted {
                    tokio::spawn(connection(client, broker.clone(), modes.clone()));
                }
            }
        });
        Some(Self {
            brokers: format!("127.0.0.1:{}", link.port),
            mode,
            link,
            _free: free,
        })
    }

    /// Closes all connections, and new ones until `mend`.
    pub(crate) fn cut(&self) {
        self.mode.send_replace(Mode::Cut);
    }

    pub(crate) fn freeze(&self) {
        self.mode.send_replace(Mode::Frozen);
    }

    pub(crate) fn mend(&self) {
        self.mode.send_replace(Mode::Flowing);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let mut all = LINKS.lock().unwrap_or_else(PoisonError::into_inner);
        all.get_or_insert_default().push(self.link.clone());
    }
}

/// The proxy before this one may not have let go of the port yet.
async fn listen(port: u16) -> TcpListener {
    loop {
        match TcpListener::bind(("127.0.0.1", port)).await {
            Ok(listener) => return listener,
            Err(error) if error.kind() == ErrorKind::AddrInUse => sleep(Duration::from_millis(10)).await,
            Err(error) => panic!("{error}"),
        }
    }
}

fn read(link: &str) -> Link {
    let (broker, port) = link.split_once('=').unwrap();
    Link {
        broker: broker.to_owned(),
        port: port.parse().unwrap(),
    }
}

async fn gone(mut modes: watch::Receiver<Mode>) {
    while modes.changed().await.is_ok() {}
}

async fn connection(client: TcpStream, broker: String, mut modes: watch::Receiver<Mode>) {
    if *modes.borrow() == Mode::Cut {
        return;
    }
    let Ok(server) = TcpStream::connect(broker).await else {
        return;
    };
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    tokio::select! {
        () = copy(from_client, to_server, modes.clone()) => {}
        () = copy(from_server, to_client, modes.clone()) => {}
        _ = modes.wait_for(|mode| *mode == Mode::Cut) => {}
    }
}

async fn copy(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut modes: watch::Receiver<Mode>) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let Ok(read @ 1..) = from.read(&mut buffer).await else {
            return;
        };
        if modes.wait_for(|mode| *mode != Mode::Frozen).await.is_err() {
            return;
        }
        if to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}
