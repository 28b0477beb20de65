//! What PostgreSQL says to a client, read on the way: not even an error that the client swallowed
//! goes unseen.

use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};

/// The URL of a proxy in front of this server, which notes the SQLSTATE of every error it carries.
pub(crate) async fn watch_errors(url: &str, errors: Arc<Mutex<Vec<String>>>) -> String {
    let (before, rest) = url.split_once('@').unwrap();
    let (address, database) = rest.split_once('/').unwrap();
    let server = address.to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let here = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let server = TcpStream::connect(&server).await.unwrap();
            // Small messages go on at once, as they came.
            client.set_nodelay(true).unwrap();
            server.set_nodelay(true).unwrap();
            let (mut from_client, to_client) = client.into_split();
            let (from_server, mut to_server) = server.into_split();
            tokio::spawn(async move { tokio::io::copy(&mut from_client, &mut to_server).await });
            tokio::spawn(carry(from_server, to_client, errors.clone()));
        }
    });
    // Encrypted, there would be nothing to read.
    format!("{before}@{here}/{database}?sslmode=disable")
}

/// Messages are a type byte, their length, and as many bytes; an error's fields are a letter and a
/// text that ends with NUL, and `C` is the SQLSTATE.
async fn carry(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, errors: Arc<Mutex<Vec<String>>>) {
    loop {
        let mut message = vec![0; 5];
        if from.read_exact(&mut message).await.is_err() {
            return;
        }
        let length = u32::from_be_bytes([message[1], message[2], message[3], message[4]]);
        message.resize(1 + length as usize, 0);
        if from.read_exact(&mut message[5..]).await.is_err() {
            return;
        }
        if message[0] == b'E' {
            let mut fields = message[5..]
                .split(|byte| *byte == 0)
                .filter(|field| !field.is_empty());
            let code = fields.find(|field| field[0] == b'C').map(|field| &field[1..]);
            let code = String::from_utf8_lossy(code.unwrap_or_default()).into_owned();
            errors.lock().unwrap().push(code);
        }
        if to.write_all(&message).await.is_err() {
            return;
        }
    }
}
