//! A network cable with scissors: a TCP proxy that can be cut or frozen, and that counts the calls that pass.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// In the header of every call, before its name.
const TARGET: &[u8] = b"x-amz-target: AmazonSQS.";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Flowing,
    /// Connections stay, new ones are accepted, and not a byte passes.
    Frozen,
    /// Connections are closed, and new ones at once.
    Cut,
    /// Calls pass, and their answers do not.
    Mute,
    /// Connections are closed, and on new ones every call is refused for being one too many.
    Throttling,
}

type Calls = Arc<Mutex<BTreeMap<String, u32>>>;

pub(crate) struct Proxy {
    /// The endpoint with this proxy's address in it.
    pub(crate) url: String,
    mode: watch::Sender<Mode>,
    calls: Calls,
}

impl Proxy {
    pub(crate) async fn before(url: &str) -> Self {
        let address = url
            .strip_prefix("http://")
            .unwrap()
            .trim_end_matches('/')
            .to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (mode, modes) = watch::channel(Mode::Flowing);
        let calls = Calls::default();
        let seen = calls.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(connection(client, address.clone(), modes.clone(), seen.clone()));
            }
        });
        Self { url, mode, calls }
    }

    /// Closes all connections, and new ones until `mend`.
    pub(crate) fn cut(&self) {
        self.mode.send_replace(Mode::Cut);
    }

    pub(crate) fn freeze(&self) {
        self.mode.send_replace(Mode::Frozen);
    }

    /// What is called for is done, and nobody hears of it.
    pub(crate) fn lose_answers(&self) {
        self.mode.send_replace(Mode::Mute);
    }

    pub(crate) fn throttle(&self) {
        self.mode.send_replace(Mode::Throttling);
    }

    pub(crate) fn mend(&self) {
        self.mode.send_replace(Mode::Flowing);
    }

    /// How many calls of this name came here.
    pub(crate) fn calls(&self, name: &str) -> u32 {
        self.calls.lock().unwrap().get(name).copied().unwrap_or_default()
    }
}

async fn connection(client: TcpStream, address: String, mut modes: watch::Receiver<Mode>, calls: Calls) {
    let mode = *modes.borrow();
    match mode {
        Mode::Cut => return,
        Mode::Throttling => {
            tokio::select! {
                () = refuse(client, calls) => {}
                _ = modes.wait_for(|mode| *mode != Mode::Throttling) => {}
            }
            return;
        }
        Mode::Flowing | Mode::Frozen | Mode::Mute => {}
    }
    let Ok(server) = TcpStream::connect(address).await else {
        return;
    };
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    tokio::select! {
        () = copy(from_client, to_server, modes.clone(), Some(calls)) => {}
        () = copy(from_server, to_client, modes.clone(), None) => {}
        _ = modes.wait_for(|mode| matches!(mode, Mode::Cut | Mode::Throttling)) => {}
    }
}

async fn copy(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut modes: watch::Receiver<Mode>,
    calls: Option<Calls>,
) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let Ok(read @ 1..) = from.read(&mut buffer).await else {
            return;
        };
        if let Some(name) = calls.as_ref().and_then(|_| call(&buffer[..read])) {
            *calls.as_ref().unwrap().lock().unwrap().entry(name).or_default() += 1;
        }
        let stuck = |mode: &Mode| *mode == Mode::Frozen || (*mode == Mode::Mute && calls.is_none());
        if modes.wait_for(|mode| !stuck(mode)).await.is_err() {
            return;
        }
        if to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}

/// Answers every call as SQS does when there are too many.
async fn refuse(mut client: TcpStream, calls: Calls) {
    const BODY: &str = r#"{"__type":"com.amazonaws.sqs#RequestThrottled","message":"slow down"}"#;
    let answer = format!(
        "HTTP/1.1 403 Forbidden\r\nContent-Type: application/x-amz-json-1.0\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{BODY}",
        BODY.len()
    );
    let mut buffer = vec![0; 64 << 10];
    let Ok(read @ 1..) = client.read(&mut buffer).await else {
        return;
    };
    if let Some(name) = call(&buffer[..read]) {
        *calls.lock().unwrap().entry(name).or_default() += 1;
    }
    client.write_all(answer.as_bytes()).await.ok();
}

/// The name of the call whose header this is: a client sends it in one piece.
fn call(bytes: &[u8]) -> Option<String> {
    let at = bytes.windows(TARGET.len()).position(|window| window == TARGET)?;
    let name = bytes[at + TARGET.len()..]
        .iter()
        .take_while(|byte| byte.is_ascii_alphabetic());
    Some(name.map(|byte| char::from(*byte)).collect())
}
