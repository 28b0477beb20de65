//! The outbox on a server that somebody else makes hard work for, and what writers pay for the relay's being told.
//!
//! With `ONLYONCE_LONG=1` these take minutes, and one measures more.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use onlyonce::outbox::OutgoingEvent;
use onlyonce::store::PostgresStore;
use onlyonce::store::postgres::PostgresOptions;
use onlyonce::testing::{Broker, MemoryPublisher};
use onlyonce::{Bytes, Outbox, Relay, Supervisor, handler_fn};
use sqlx::postgres::{PgPool, PgPoolOptions};
use sqlx::{Connection as _, PgConnection};
use tokio::task::JoinSet;
use tokio::time::interval;

use super::Server;
use super::running::{Running, until};
use super::stage::{Stage, events, soon};

fn is_long() -> bool {
    std::env::var("ONLYONCE_LONG").is_ok_and(|long| long == "1")
}

/// Somebody's report, for which the server keeps every row that is deleted meanwhile. A read of the outbox passes over
/// all of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_that_stays_open_holds_up_no_outgoing_event() {
    const PER_SECOND: usize = 500;
    const TOGETHER: usize = 10;
    /// What comes in within two seconds.
    const MOST_PENDING: i64 = 2 * PER_SECOND as i64;
    let Some(server) = Server::start().await else {
        return;
    };
    let seconds = if is_long() { 120 } else { 20 };
    let stage = Stage::at(&server.url).await;
    let publisher = MemoryPublisher::new();
    let relay = relay(&another(&server, &stage), &publisher);
    let writes = pool(&server, 2).await;
    let outbox = Outbox::new(stage.store.clone()).source("test");

    let mut report = PgConnection::connect(&server.url).await.unwrap();
    let begin = "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM pg_class";
    sqlx::raw_sql(begin).execute(&mut report).await.unwrap();

    let writing = tokio::spawn(async move {
        let transactions = seconds * PER_SECOND / TOGETHER;
        // What is late is made up for.
        let mut due = interval(Duration::from_secs(TOGETHER as u64) / PER_SECOND as u32);
        for nth in 0..transactions {
            due.tick().await;
            let mut tx = writes.begin().await.unwrap();
            let sent = (0..TOGETHER).map(|n| event(nth * TOGETHER + n));
            outbox.send_all_in(&mut tx, sent).await.unwrap();
            tx.commit().await.unwrap();
            outbox.wake();
        }
        transactions * TOGETHER
    });
    let (began, mut most_pending) = (Instant::now(), 0);
    while !writing.is_finished() {
        most_pending = most_pending.max(pending(&stage).await);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let (written, took) = (writing.await.unwrap(), began.elapsed());
    until("the last row", async || pending(&stage).await == 0).await;
    println!("{written} events in {took:.1?} beside an open snapshot: {most_pending} pending at most");
    assert_eq!(publisher.arrived().len(), written);
    assert!(most_pending <= MOST_PENDING, "{most_pending} pending");
    let late = took.saturating_sub(Duration::from_secs(seconds as u64));
    assert!(
        late < Duration::from_secs(3),
        "the writer was held up for {late:?}"
    );
    report.close().await.unwrap();
    relay.stop().await;
    server.end().await;
}

/// A `NOTIFY` in a transaction takes a lock over all commits of the server. The server's own log says which
/// statements were in a transaction together.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn relays_are_told_outside_of_the_transactions_that_write() {
    let Some(server) = Server::start().await else {
        return;
    };
    let stage = Stage::at(&server.url).await;
    let publisher = MemoryPublisher::new();
    let relay = relay(&another(&server, &stage), &publisher);
    if is_long() {
        measure_wake_up(&server, &stage).await;
        until("the last row", async || pending(&stage).await == 0).await;
    }
    for setting in ["log_statement = 'all'", "log_line_prefix = 'transaction=%v '"] {
        stage.execute(&format!("ALTER SYSTEM SET {setting}"), "").await;
    }
    stage.number("SELECT pg_reload_conf()::int::bigint", "").await;
    let logs = "SELECT (setting = 'all')::int::bigint FROM pg_settings WHERE name = 'log_statement'";
    until("the setting", async || stage.number(logs, "").await == 1).await;

    // By a handler, and by whatever else has a transaction.
    let broker = Broker::new();
    for event in events(50) {
        broker.publish(event);
    }
    let consumer = stage
        .consumer("c")
        .source(broker.source())
        .handler(handler_fn::<_, Bytes, _>(|cx, event| {
            Box::pin(async move {
                let id = event.identity.id;
                cx.outbox().send(OutgoingEvent::new("memory:a", "t", id))?;
                Ok(())
            })
        }))
        .lanes(4);
    let consumer = Running::start(consumer);
    write(&server, &stage, 8, true, Duration::from_secs(1)).await;
    soon("the acks", broker.drained()).await;
    consumer.stop().await;
    relay.stop().await;

    let log = std::fs::read_to_string(server.dir.join("postgres/output.log")).unwrap();
    let transactions = transactions(&log);
    let notifies = |statement: &&&str| statement.contains("pg_notify") || statement.contains("NOTIFY ");
    let writes = |statement: &&&str| statement.contains("INSERT INTO") && statement.contains("outbox");
    let told = transactions.iter().filter(|all| all.iter().any(|s| notifies(&s)));
    let told: Vec<_> = told.collect();
    let written = transactions.iter().filter(|all| all.iter().any(|s| writes(&s)));
    let committed = written
        .filter(|all| all.iter().any(|s| s.contains("COMMIT")))
        .count();
    assert!(!told.is_empty(), "nobody was told");
    assert!(
        committed > 50,
        "{committed} transactions that wrote are known as such"
    );
    for statements in told {
        assert_eq!(statements.len(), 1, "told within a transaction: {statements:?}");
    }
    server.end().await;
}

/// How much 64 writers commit with wake-up and without it, in turns.
async fn measure_wake_up(server: &Server, stage: &Stage<PostgresStore>) {
    const WRITERS: usize = 64;
    let mut counts = [0, 0];
    for round in 0..6 {
        let wakes = round % 2 == 0;
        counts[usize::from(wakes)] += write(server, stage, WRITERS, wakes, Duration::from_secs(10)).await;
    }
    let [off, on] = counts.map(|count| count as f64 / 30.0);
    println!(
        "{WRITERS} writers: {off:.0} commits/s without wake-up, {on:.0} with it: {:.2}",
        on / off
    );
}

/// So many writers commit an event each, over and over. Returns how many there were.
async fn write(
    server: &Server,
    stage: &Stage<PostgresStore>,
    writers: usize,
    wakes: bool,
    time: Duration,
) -> usize {
    let pool = pool(server, writers as u32).await;
    let until = Instant::now() + time;
    let mut tasks = JoinSet::new();
    for writer in 0..writers {
        let (pool, outbox) = (pool.clone(), Outbox::new(stage.store.clone()).source("test"));
        tasks.spawn(async move {
            let mut written = 0;
            while Instant::now() < until {
                let mut tx = pool.begin().await.unwrap();
                outbox.send_in(&mut tx, event(writer)).await.unwrap();
                tx.commit().await.unwrap();
                if wakes {
                    outbox.wake();
                }
                written += 1;
            }
            written
        });
    }
    tasks.join_all().await.into_iter().sum()
}

fn event(n: usize) -> OutgoingEvent {
    OutgoingEvent::new("memory:a", "t", vec![b'x'; 200]).key(format!("key-{}", n % 100))
}

/// Another process's store on the same tables.
fn another(server: &Server, stage: &Stage<PostgresStore>) -> PostgresStore {
    let options = PostgresOptions::new(&server.url).schema(&stage.schema);
    options.connect().unwrap()
}

fn relay(store: &PostgresStore, publisher: &MemoryPublisher) -> Running {
    let relay = Relay::builder(store.clone()).publisher("memory", publisher.clone());
    let supervisor = Supervisor::builder().relay(relay.build().unwrap());
    Running::of(supervisor.build().unwrap())
}

async fn pool(server: &Server, connections: u32) -> PgPool {
    let options = PgPoolOptions::new().min_connections(connections);
    options
        .max_connections(connections)
        .connect(&server.url)
        .await
        .unwrap()
}

async fn pending(stage: &Stage<PostgresStore>) -> i64 {
    stage.number("SELECT count(*) FROM {s}.outbox", "").await
}

/// The statements of each transaction in a log of `transaction=NUMBER LOG: statement: ..`.
fn transactions(log: &str) -> Vec<Vec<&str>> {
    let mut all: HashMap<&str, Vec<&str>> = HashMap::new();
    let mut parts = log.split("transaction=");
    parts.next();
    for part in parts {
        let Some((number, line)) = part.split_once(' ') else {
            continue;
        };
        if line.contains("statement:") || line.contains("execute ") {
            all.entry(number).or_default().push(line);
        }
    }
    all.into_values().collect()
}
