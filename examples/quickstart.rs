//! Start here: `cargo run --example quickstart`. Nothing has to be installed.
//!
//! 1,000 payments come from a broker in memory that is as unkind as brokers can be: each is delivered
//! one to four times, out of order, sometimes again while the first delivery is still running, and one
//! ack in ten is lost. The consumer is killed at a random step and started again, over and over. In
//! the end the ledger (an SQLite file) is compared with what was sent.
//!
//! Options: `--seed N` (another course of events), `--events N`.
#![allow(clippy::print_stdout)]

use std::collections::HashMap;
use std::error::Error;
use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use onlyonce::store::{Operations, SqliteStore};
use onlyonce::testing::{Broker, CrashPoint, event};
use onlyonce::{Consumer, Context, Event, Handler, HandlerError, Json, async_trait};
use serde::Deserialize;
use sqlx::Sqlite;

#[derive(Deserialize)]
struct Payment {
    account: String,
    cents: i64,
}

/// What a user writes: one insert, in the transaction that the framework lends.
struct Ledger {
    runs: Arc<AtomicU64>,
}

#[async_trait]
impl Handler<Sqlite> for Ledger {
    type Payload = Json<Payment>;

    async fn handle(
        &self,
        cx: &mut Context<'_, Sqlite>,
        event: Event<Json<Payment>>,
    ) -> Result<(), HandlerError> {
        self.runs.fetch_add(1, Relaxed);
        let Json(payment) = event.payload;
        let first_run_of_some = cx.attempt() == 1 && payment.cents % 50 == 0;
        sqlx::query("INSERT INTO ledger (event_id, account, cents) VALUES (?, ?, ?)")
            .bind(event.identity.id)
            .bind(payment.account)
            .bind(payment.cents)
            .execute(cx.tx())
            .await?;
        // One in fifty fails after its write, which is rolled back; it is tried again.
        if first_run_of_some {
            Err("the fraud check timed out".into())
        } else {
            Ok(())
        }
    }
}

/// Where a life of the process may end.
const STEPS: [CrashPoint; 6] = [
    CrashPoint::Received,
    CrashPoint::Claimed,
    CrashPoint::Handled,
    CrashPoint::Committed,
    CrashPoint::Settling,
    CrashPoint::RolledBack,
];

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let options = Options::from_args()?;
    let mut random = fastrand::Rng::with_seed(options.seed);
    let dir = tempfile::tempdir()?;
    let database = dir.path().join("ledger.db").display().to_string();
    create_ledger(&database)?;

    let broker = Broker::seeded(options.seed)
        .duplicate(4)
        .reorder(50)
        .drop_acks(0.1)
        .redeliver_running(0.05);
    let mut expected = 0;
    for n in 0..options.events {
        let cents = random.i64(1..100_000);
        expected += cents;
        let body = format!(r#"{{"account":"acc-{}","cents":{cents}}}"#, random.u8(0..20));
        broker.publish(event(format!("pay-{n}"), body));
    }
    println!(
        "{} payments, seed {}, killed and restarted at random steps:",
        options.events, options.seed
    );

    let (started, runs, mut restarts) = (Instant::now(), Arc::new(AtomicU64::new(0)), 0_u64);
    loop {
        // One life of the process: until a random step, for a random number of times.
        let step = STEPS[random.usize(..STEPS.len())];
        let nth = if step == CrashPoint::RolledBack {
            1
        } else {
            random.u64(1..80)
        };
        let ended = live(&database, &broker, runs.clone(), step, nth, restarts)?;
        if ended == Ended::Drained {
            break;
        }
        restarts += 1;
    }
    report(
        &database,
        &broker,
        &Totals {
            events: options.events,
            expected,
            runs: runs.load(Relaxed),
            restarts,
            started,
        },
    )
}

#[derive(PartialEq)]
enum Ended {
    Killed,
    Drained,
}

/// Runs a consumer in a runtime of its own, and throws that runtime away when the step is reached:
/// open transactions, leases and unacked deliveries are left as a killed process leaves them.
fn live(
    database: &str,
    broker: &Broker,
    runs: Arc<AtomicU64>,
    step: CrashPoint,
    nth: u64,
    restarts: u64,
) -> Result<Ended, Box<dyn Error>> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let (say, hear) = channel();
    let killed = say.clone();
    let passed = AtomicU64::new(0);
    let consumer = runtime.block_on(async {
        let store = SqliteStore::connect(database).await?;
        let consumer = Consumer::builder("ledger", store)
            .source(broker.source())
            .handler(Ledger { runs: runs.clone() })
            .crash_when(move |point| {
                let dies = point == step && passed.fetch_add(1, Relaxed) + 1 == nth;
                if dies {
                    let _ = killed.send(Ok(Ended::Killed));
                }
                dies
            })
            .build()?;
        Ok::<_, Box<dyn Error>>(consumer)
    })?;
    let drained = broker.clone();
    runtime.spawn(async move {
        let result = consumer.run_until(async move { drained.drained().await }).await;
        let _ = say.send(result.map(|()| Ended::Drained).map_err(|e| e.to_string()));
    });
    let ended = watch(&hear, broker, &runs, restarts)?;
    runtime.shutdown_timeout(Duration::from_secs(1));
    broker.kill();
    Ok(ended)
}

/// Waits for the end of this life and shows how far things are.
fn watch(
    hear: &Receiver<Result<Ended, String>>,
    broker: &Broker,
    runs: &AtomicU64,
    restarts: u64,
) -> Result<Ended, Box<dyn Error>> {
    loop {
        if std::io::stderr().is_terminal() {
            let stats = broker.stats();
            eprint!(
                "\r  delivered {:>5}  handler runs {:>5}  restarts {restarts:>4}  waiting {:>5} ",
                stats.delivered,
                runs.load(Relaxed),
                broker.waiting()
            );
            std::io::stderr().flush()?;
        }
        match hear.recv_timeout(Duration::from_millis(100)) {
            Ok(ended) => return Ok(ended?),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err("the consumer's task is gone".into()),
        }
    }
}

struct Totals {
    events: usize,
    expected: i64,
    runs: u64,
    restarts: u64,
    started: Instant,
}

/// Compares the ledger with what was sent.
fn report(database: &str, broker: &Broker, totals: &Totals) -> Result<ExitCode, Box<dyn Error>> {
    let rows: Vec<(String, i64)> = block_on(async {
        let store = SqliteStore::connect(database).await?;
        Ok(sqlx::query_as("SELECT event_id, cents FROM ledger")
            .fetch_all(store.pool())
            .await?)
    })?;
    let mut applied: HashMap<&str, u64> = HashMap::new();
    for (id, _) in &rows {
        *applied.entry(id).or_default() += 1;
    }
    let total: i64 = rows.iter().map(|(_, cents)| cents).sum();
    let lost = totals.events - applied.len();
    let doubled = applied.values().filter(|times| **times > 1).count();
    let stats = broker.stats();
    let duplicates = stats.acked - applied.len() as u64;

    if std::io::stderr().is_terminal() {
        eprintln!();
    }
    println!("  deliveries          {:>10}", stats.delivered);
    println!("  acks lost           {:>10}", stats.acks_dropped);
    println!("  handler runs        {:>10}", totals.runs);
    println!("  duplicates skipped  {duplicates:>10}");
    println!("  restarts            {:>10}", totals.restarts);
    println!(
        "  ledger total        {total:>10}  (expected {})",
        totals.expected
    );
    println!("  time                {:>10.1?}", totals.started.elapsed());
    println!(
        "applied {} of {}, duplicates skipped {duplicates}, lost {lost}, doubled {doubled}",
        applied.len(),
        totals.events
    );
    let good = lost == 0 && doubled == 0 && total == totals.expected;
    Ok(if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn create_ledger(database: &str) -> Result<(), Box<dyn Error>> {
    block_on(async {
        let store = SqliteStore::connect(database).await?;
        store.migrate().await?;
        sqlx::raw_sql(
            "CREATE TABLE ledger (event_id TEXT NOT NULL, account TEXT NOT NULL, cents INTEGER NOT NULL)",
        )
        .execute(store.pool())
        .await?;
        Ok(())
    })
}

fn block_on<T>(work: impl Future<Output = Result<T, Box<dyn Error>>>) -> Result<T, Box<dyn Error>> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?
        .block_on(work)
}

struct Options {
    seed: u64,
    events: usize,
}

impl Options {
    fn from_args() -> Result<Self, Box<dyn Error>> {
        let mut options = Self {
            seed: 1,
            events: 1000,
        };
        let mut args = std::env::args().skip(1);
        while let Some(arg) = args.next() {
            let value = args
                .next()
                .ok_or_else(|| format!("{arg} needs a number (--seed N, --events N)"))?;
            match arg.as_str() {
                "--seed" => options.seed = value.parse()?,
                "--events" => options.events = value.parse()?,
                _ => return Err(format!("{arg} is not an option (--seed N, --events N)").into()),
            }
        }
        Ok(options)
    }
}
