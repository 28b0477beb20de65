//! A network cable with scissors: a TCP proxy that can be cut or frozen, and that reads the acks that pass.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::harness::SOON;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Flowing,
    /// Connections stay, new ones are accepted, and not a byte passes.
    Frozen,
    /// Connections are closed, and new ones at once.
    Cut,
}

/// A settlement as it passed on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Frame {
    Ack { tag: u64, multiple: bool },
    Nack { tag: u64, multiple: bool, requeue: bool },
    Reject,
}

pub(crate) struct Proxy {
    /// The broker's URL with this proxy's address in it.
    pub(crate) url: String,
    mode: watch::Sender<Mode>,
    frames: Arc<Mutex<Vec<Frame>>>,
}

impl Proxy {
    pub(crate) async fn before(url: &str) -> Self {
        let (head, rest) = url.split_once('@').unwrap();
        let (address, path) = rest.split_once('/').unwrap();
        let address = address.to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("{head}@{}/{path}", listener.local_addr().unwrap());
        let (mode, modes) = watch::channel(Mode::Flowing);
        let frames = Arc::new(Mutex::new(Vec::new()));
        let seen = frames.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(connection(client, address.clone(), modes.clone(), seen.clone()));
            }
        });
        Self { url, mode, frames }
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

    /// Everything that was settled so far, on all connections.
    pub(crate) fn frames(&self) -> Vec<Frame> {
        self.frames.lock().unwrap().clone()
    }

    /// Waits until the frames are such.
    pub(crate) async fn frames_until(&self, enough: impl Fn(&[Frame]) -> bool) -> Vec<Frame> {
        let until = Instant::now() + SOON;
        loop {
            let frames = self.frames();
            if enough(&frames) {
                return frames;
            }
            assert!(Instant::now() < until, "only {frames:?}");
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    }
}

async fn connection(
    client: TcpStream,
    address: String,
    mut modes: watch::Receiver<Mode>,
    frames: Arc<Mutex<Vec<Frame>>>,
) {
    if *modes.borrow() == Mode::Cut {
        return;
    }
    modes.wait_for(|mode| *mode != Mode::Frozen).await.ok();
    let Ok(server) = TcpStream::connect(address).await else {
        return;
    };
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let reader = Some(FrameReader::new(frames));
    tokio::select! {
        () = copy(from_client, to_server, modes.clone(), reader) => {}
        () = copy(from_server, to_client, modes.clone(), None) => {}
        _ = modes.wait_for(|mode| *mode == Mode::Cut) => {}
    }
}

async fn copy(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut modes: watch::Receiver<Mode>,
    mut reader: Option<FrameReader>,
) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        if modes.wait_for(|mode| *mode != Mode::Frozen).await.is_err() {
            return;
        }
        let Ok(read @ 1..) = from.read(&mut buffer).await else {
            return;
        };
        if modes.wait_for(|mode| *mode != Mode::Frozen).await.is_err() {
            return;
        }
        if let Some(reader) = &mut reader {
            reader.read(&buffer[..read]);
        }
        if to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}

/// Picks the settlements out of what a client writes.
struct FrameReader {
    pending: Vec<u8>,
    greeted: bool,
    frames: Arc<Mutex<Vec<Frame>>>,
}

impl FrameReader {
    fn new(frames: Arc<Mutex<Vec<Frame>>>) -> Self {
        Self {
            pending: Vec::new(),
            greeted: false,
            frames,
        }
    }

    fn read(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
        if !self.greeted {
            if self.pending.len() < 8 {
                return;
            }
            self.pending.drain(..8);
            self.greeted = true;
        }
        // type (1), channel (2), size (4), payload, end (1)
        while let Some(header) = self.pending.first_chunk::<7>() {
            let size = u32::from_be_bytes([header[3], header[4], header[5], header[6]]) as usize;
            if self.pending.len() < size + 8 {
                return;
            }
            if header[0] == 1
                && let Some(frame) = settlement(&self.pending[7..7 + size])
            {
                self.frames.lock().unwrap().push(frame);
            }
            self.pending.drain(..size + 8);
        }
    }
}

fn settlement(method: &[u8]) -> Option<Frame> {
    let (id, arguments) = method.split_first_chunk::<4>()?;
    let tag = || Some(u64::from_be_bytes(*arguments.first_chunk()?));
    let bits = || arguments.get(8).copied();
    match id {
        [0, 60, 0, 80] => Some(Frame::Ack {
            tag: tag()?,
            multiple: bits()? & 1 != 0,
        }),
        [0, 60, 0, 120] => Some(Frame::Nack {
            tag: tag()?,
            multiple: bits()? & 1 != 0,
            requeue: bits()? & 2 != 0,
        }),
        [0, 60, 0, 90] => Some(Frame::Reject),
        _ => None,
    }
}
