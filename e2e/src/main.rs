//! From one broker to another, by processes that are killed everywhere.
//!
//! A payment comes from RabbitMQ; a handler captures it, that is it writes a row and sends an event; the relay publishes
//! that to Kafka; a second handler books it. Each worker process does all three, as a small service would, and the
//! runner kills one after the other: half of them at a random moment, half at a crash point. In the end each payment has
//! been captured once and booked once. `scripts/chaos e2e` starts the servers and runs this.
//!
//! One payment in eight fails on its first attempt after it has sent its event, which must not be heard of. The
//! tables have no unique index, so that what is done twice would show.
#![allow(clippy::print_stdout)]

mod brokers;
mod ledger;
mod options;
mod payment;
mod worker;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use onlyonce::testing::CrashPoint;
use onlyonce_testbed::chaos::variable;
use onlyonce_testbed::processes::{Processes, logs_of};
use tokio::process::Command;
use tokio::time::{sleep, timeout};

use brokers::Brokers;
use ledger::Ledger;
use options::Options;

/// How often the tables are looked at.
const LOOK: Duration = Duration::from_millis(200);

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    if std::env::args().nth(1).as_deref() == Some("worker") {
        return worker::run().await.map(|()| ExitCode::SUCCESS);
    }
    Run::prepare(Options::from_args()?).await?.carry_out().await
}

/// One run: everything that takes part in it.
struct Run {
    options: Options,
    brokers: Brokers,
    ledger: Ledger,
    workers: Processes,
    /// From now on workers are started to live.
    calm: Arc<AtomicBool>,
    started: Instant,
}

impl Run {
    async fn prepare(options: Options) -> anyhow::Result<Self> {
        println!(
            "e2e: {} payments, {} workers, {} kills, seed {}, schema {}",
            options.payments, options.workers, options.kills, options.seed, options.name
        );
        let ledger = Ledger::create(&variable("ONLYONCE_POSTGRES_URL")?, &options.name).await?;
        let brokers = Brokers::from_env()?;
        brokers.declare(&options.name).await?;
        let calm = Arc::<AtomicBool>::default();
        let workers = Processes::start(
            options.workers,
            logs_of(&options.name),
            starts(&options, calm.clone()),
        )?;
        println!("e2e: the workers write to {}", workers.logs().display());
        Ok(Self {
            options,
            brokers,
            ledger,
            workers,
            calm,
            started: Instant::now(),
        })
    }

    async fn carry_out(self) -> anyhow::Result<ExitCode> {
        let limit = self.options.time_limit();
        let mut problems = Vec::new();
        match timeout(limit, self.course()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => problems.push(format!("{error:#}")),
            Err(_) => problems.push(format!("it is not over after {limit:?}")),
        }
        self.workers.kill_all().await?;
        let ends = self.workers.ends();
        problems.extend(ends.wrong);
        let verdict = self.ledger.compare(&payment::all(&self.options)).await?;
        print!("{verdict}");
        for problem in &problems {
            println!("e2e: PROBLEM: {problem}");
        }
        println!(
            "e2e: kills {}, at crash points {}, {verdict:#}",
            ends.killed, ends.crashed
        );
        if !verdict.is_good() || !problems.is_empty() {
            println!(
                "e2e: FAILED; the same again: scripts/chaos e2e {} --seed {}",
                self.options.form(),
                self.options.seed
            );
            return Ok(ExitCode::FAILURE);
        }
        self.ledger.drop_schema().await?;
        self.brokers.delete(&self.options.name).await?;
        Ok(ExitCode::SUCCESS)
    }

    async fn course(&self) -> anyhow::Result<()> {
        let payments = payment::all(&self.options);
        let mut random = fastrand::Rng::with_seed(self.options.seed ^ 0x6b11);
        let kills = self.options.kills;
        // There is always work to interrupt.
        for (nth, part) in payments.chunks(payments.len().div_ceil(kills)).enumerate() {
            self.brokers.publish(&self.options.name, part).await?;
            sleep(Duration::from_millis(random.u64(200..1_500))).await;
            self.workers.replace_the_dead().await?;
            self.workers.kill(nth % self.workers.count()).await?;
        }
        self.calm.store(true, Relaxed);
        for place in 0..self.workers.count() {
            self.workers.kill(place).await?;
        }
        println!(
            "e2e: no more kills after {} s, draining",
            self.started.elapsed().as_secs()
        );
        while !self.ledger.is_done(payments.len()).await?
            || !self.brokers.are_empty(&self.options.name).await?
        {
            self.workers.replace_the_dead().await?;
            sleep(LOOK).await;
        }
        self.workers.stop().await.context("the stop")?;
        println!(
            "e2e: drained and stopped after {} s",
            self.started.elapsed().as_secs()
        );
        Ok(())
    }
}

/// How a worker is started: half of them to die at a crash point, each of which has its turn.
fn starts(options: &Options, calm: Arc<AtomicBool>) -> impl Fn(usize, &mut Command) + Send + Sync + use<> {
    let (name, started) = (options.name.clone(), AtomicU64::new(options.seed));
    move |place, command| {
        command
            .arg("worker")
            .env("E2E_NAME", &name)
            .env("E2E_MEMBER", format!("worker-{place}"))
            .env_remove("ONLYONCE_CRASH");
        let nth = started.fetch_add(1, Relaxed) as usize;
        if !calm.load(Relaxed) && nth.is_multiple_of(2) {
            let point = CrashPoint::ALL[nth / 2 % CrashPoint::ALL.len()];
            let pass = if point == CrashPoint::RolledBack {
                1
            } else {
                1 + nth % 20
            };
            command.env("ONLYONCE_CRASH", format!("{}:{pass}", point.as_str()));
        }
    }
}
