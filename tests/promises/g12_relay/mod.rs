//! G12: outgoing events are sent at least once, per key in the order of their outbox ids, over several relay
//! instances; a row counts as sent only after the broker has confirmed it.

mod beside;
mod failures;
mod lanes;
mod marks;
mod order;
mod parked;
mod settings;
mod stop;
mod waking;

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::time::Duration;

use onlyonce::relay::RelayBuilder;
use onlyonce::store::{Operations, Relaying};
use onlyonce::testing::MemoryPublisher;
use onlyonce::{Relay, Supervisor};

use crate::running::{Running, until};
use crate::stage::{Eyes, Stage, TestStore};

/// A row as a committed transaction leaves it.
#[derive(Clone)]
struct Row {
    id: String,
    destination: String,
    key: Option<String>,
}

/// A row of this event id for `memory:a`, with this key.
fn row(id: impl Into<String>, key: Option<&str>) -> Row {
    Row {
        id: id.into(),
        destination: "memory:a".to_owned(),
        key: key.map(str::to_owned),
    }
}

impl Row {
    fn to(mut self, destination: &str) -> Self {
        self.destination = destination.to_owned();
        self
    }

    /// The statement that writes it, as an outbox does.
    fn insert(&self, postgres: bool) -> String {
        let hex = |bytes: &[u8]| {
            let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            if postgres {
                format!("'\\x{digits}'")
            } else {
                format!("x'{digits}'")
            }
        };
        let digest = |text: &str| {
            let mut hasher = DefaultHasher::new();
            text.hash(&mut hasher);
            hasher.finish()
        };
        let (key, hash, lane) = match &self.key {
            None => ("NULL".to_owned(), "NULL".to_owned(), fastrand::u64(..) % 64),
            Some(key) => {
                let order = digest(&format!("{} {key}", self.destination));
                let hash = [order.to_be_bytes(), order.to_be_bytes()].concat();
                (hex(key.as_bytes()), hex(&hash), digest(key) % 64)
            }
        };
        let (id, destination) = (&self.id, &self.destination);
        let (table, none, body) = (
            if postgres { "{s}.outbox" } else { "onlyonce_outbox" },
            hex(&[1]),
            hex(id.as_bytes()),
        );
        format!(
            "INSERT INTO {table} (relay, event_id, source, destination, ordering_key, key_hash, lane, payload, headers, \
             attributes, mode) VALUES ('default', '{id}', 'test', '{destination}', {key}, {hash}, {lane}, {body}, {none}, \
             {none}, 'binary')"
        )
    }
}

impl<S: TestStore + Relaying> Stage<S> {
    /// Writes rows, each in the transaction of all of them.
    async fn write_rows(&self, rows: impl IntoIterator<Item = Row>) {
        let postgres = matches!(self.eyes, Eyes::Postgres(_));
        let inserts: Vec<String> = rows.into_iter().map(|row| row.insert(postgres)).collect();
        let all = format!("BEGIN; {}; COMMIT", inserts.join("; "));
        self.execute(&all, &all).await;
    }

    /// How many rows there are of which this is true.
    async fn rows(&self, condition: &str) -> i64 {
        let postgres = format!("SELECT count(*) FROM {{s}}.outbox WHERE {condition}");
        let sqlite = format!("SELECT count(*) FROM onlyonce_outbox WHERE {condition}");
        self.number(&postgres, &sqlite).await
    }

    /// Waits until every row is marked as sent.
    async fn all_sent(&self) {
        until("the last mark", async || self.rows("sent_at IS NULL").await == 0).await;
    }
}

/// A relay that waits for nothing longer than a test can.
fn quick<S: Relaying + Operations>(store: S, publisher: &MemoryPublisher) -> RelayBuilder<S> {
    Relay::builder(store)
        .publisher("memory", publisher.clone())
        .lease(Duration::from_millis(900))
        .poll(Duration::from_millis(50))
        .delays(Duration::from_millis(10), Duration::from_millis(50))
}

fn start<S: Relaying>(relay: RelayBuilder<S>) -> Running {
    Running::of(
        Supervisor::builder()
            .relay(relay.build().unwrap())
            .build()
            .unwrap(),
    )
}

/// The numbers of the events of one key, each where it arrived first. Event ids are `key-number`.
fn firsts(publisher: &MemoryPublisher, key: &str) -> Vec<u32> {
    let mut firsts = Vec::new();
    for id in publisher.ids() {
        let Some((of, number)) = id.split_once('-') else {
            continue;
        };
        let number = number.parse().unwrap();
        if of == key && !firsts.contains(&number) {
            firsts.push(number);
        }
    }
    firsts
}
