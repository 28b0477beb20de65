//! What PostgreSQL and a client say to each other, read on the way: not even an error that the client
//! swallowed goes unseen.

use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};

/// A proxy in front of a server.
#[derive(Clone, Default)]
pub(crate) struct Wire {
    /// The SQLSTATE of every error that it has carried.
    errors: Arc<Mutex<Vec<String>>>,
    /// What was asked, one list for each connection.
    asked: Arc<Mutex<Vec<Vec<Asked>>>>,
}

/// A question, for whose answer a client waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Asked {
    /// A simple query: text, one statement or more.
    Text(String),
    /// A prepared statement with its values.
    Prepared,
    /// To prepare a statement; once for each connection.
    ToPrepare,
    /// Nothing: whether the server is there.
    Ping,
}

impl Wire {
    /// The URL of the proxy, which stands in front of the server of this one.
    pub(crate) async fn before(&self, url: &str) -> String {
        let (before, rest) = url.split_once('@').unwrap();
        let (address, database) = rest.split_once('/').unwrap();
        let server = address.to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let here = listener.local_addr().unwrap();
        let wire = self.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(&server).await.unwrap();
                // Small messages go on at once, as they came.
                client.set_nodelay(true).unwrap();
                server.set_nodelay(true).unwrap();
                let (from_client, to_client) = client.into_split();
                let (from_server, to_server) = server.into_split();
                tokio::spawn(wire.clone().questions(from_client, to_server));
                tokio::spawn(wire.clone().answers(from_server, to_client));
            }
        });
        // Encrypted, there would be nothing to read.
        format!("{before}@{here}/{database}?sslmode=disable")
    }

    pub(crate) fn errors(&self) -> Vec<String> {
        self.errors.lock().unwrap().clone()
    }

    /// What was asked on the connections of lanes, which are those that commit with a guard.
    pub(crate) fn asked_by_lanes(&self) -> Vec<Asked> {
        let commits = |asked: &Asked| match asked {
            // By its name, or behind a pooler in full.
            Asked::Text(text) => {
                text.starts_with("EXECUTE onlyonce_guard") || text.contains("'onlyonce: not ours'")
            }
            _ => false,
        };
        let all = self.asked.lock().unwrap();
        all.iter()
            .filter(|asked| asked.iter().any(commits))
            .flatten()
            .cloned()
            .collect()
    }

    /// How often a consumer looked whether the database can be had.
    pub(crate) fn probes(&self) -> usize {
        let probes = |asked: &&Asked| matches!(asked, Asked::Text(text) if text.starts_with("BEGIN READ WRITE; SELECT"));
        self.asked.lock().unwrap().iter().flatten().filter(probes).count()
    }

    /// After the first message, which has no type, each is a type byte, its length, and as many bytes.
    async fn questions(self, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
        let Some(hello) = body(&mut from, Vec::new()).await else {
            return;
        };
        if to.write_all(&hello).await.is_err() {
            return;
        }
        let number = {
            let mut all = self.asked.lock().unwrap();
            all.push(Vec::new());
            all.len() - 1
        };
        // What comes before a Sync belongs to one question.
        let mut until_sync = Asked::Ping;
        while let Some(message) = message(&mut from).await {
            let asked = match message[0] {
                b'Q' => {
                    let text = String::from_utf8_lossy(&message[5..message.len() - 1]).into_owned();
                    Some(Asked::Text(text))
                }
                b'P' => {
                    until_sync = Asked::ToPrepare;
                    None
                }
                b'B' => {
                    until_sync = Asked::Prepared;
                    None
                }
                b'S' => Some(std::mem::replace(&mut until_sync, Asked::Ping)),
                _ => None,
            };
            self.asked.lock().unwrap()[number].extend(asked);
            if to.write_all(&message).await.is_err() {
                return;
            }
        }
    }

    /// An error's fields are a letter and a text that ends with NUL, and `C` is the SQLSTATE.
    async fn answers(self, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
        while let Some(message) = message(&mut from).await {
            if message[0] == b'E' {
                let mut fields = message[5..]
                    .split(|byte| *byte == 0)
                    .filter(|field| !field.is_empty());
                let code = fields.find(|field| field[0] == b'C').map(|field| &field[1..]);
                let code = String::from_utf8_lossy(code.unwrap_or_default()).into_owned();
                self.errors.lock().unwrap().push(code);
            }
            if to.write_all(&message).await.is_err() {
                return;
            }
        }
    }
}

async fn message(from: &mut OwnedReadHalf) -> Option<Vec<u8>> {
    let mut kind = vec![0];
    from.read_exact(&mut kind).await.ok()?;
    body(from, kind).await
}

/// Reads a length, which counts itself, and what it announces.
async fn body(from: &mut OwnedReadHalf, mut message: Vec<u8>) -> Option<Vec<u8>> {
    let mut length = [0; 4];
    from.read_exact(&mut length).await.ok()?;
    message.extend(length);
    let start = message.len();
    message.resize(start + u32::from_be_bytes(length) as usize - 4, 0);
    from.read_exact(&mut message[start..]).await.ok()?;
    Some(message)
}
