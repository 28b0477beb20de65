//! Chaos: worker processes, the broker, the database and the network between them fail over and over,
//! and in the end the ledger holds each event once. `scripts/chaos` starts the servers and runs this.
//!
//! The program is its own worker: the runner starts copies of itself with the argument `worker`.
//! Each goes through a TCP proxy of the runner to either server, so that its link can be cut. Half of
//! the kills come at random, half at a crash point of `src/consumer/process.rs`, all of which must be
//! hit. One event in eight fails on its first attempts, and all succeed in the end: nothing may be
//! dead, held, queued, lost or doubled when it is over.
//!
//! The ledger has no unique index, so that an event applied twice would show.
#![allow(clippy::print_stdout)]

mod crew;
mod disruptions;
mod events;
mod ledger;
mod link;
mod options;
mod producer;
mod servers;
mod worker;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio::sync::watch;
use tokio::time::sleep;

use crew::Crew;
use ledger::{Ledger, Verdict};
use options::Options;
use producer::Producer;
use servers::Servers;

/// How often the state of things is looked at.
const LOOK: Duration = Duration::from_millis(250);

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    if std::env::args().nth(1).as_deref() == Some("worker") {
        return worker::run().await.map(|()| ExitCode::SUCCESS);
    }
    let options = Options::from_args()?;
    let servers = Servers::from_env()?;
    let run = Run::prepare(options, servers).await?;
    run.carry_out().await
}

/// One run: everything that takes part in it.
struct Run {
    options: Arc<Options>,
    servers: Arc<Servers>,
    ledger: Ledger,
    crew: Arc<Crew>,
    events: Arc<Vec<events::Event>>,
    started: Instant,
}

impl Run {
    async fn prepare(options: Options, servers: Servers) -> anyhow::Result<Self> {
        let (options, servers) = (Arc::new(options), Arc::new(servers));
        let ledger = Ledger::create(&servers.postgres, &options.name).await?;
        producer::declare(&servers.rabbitmq, &options).await?;
        let crew = Arc::new(Crew::hire(options.clone(), &servers).await?);
        println!(
            "chaos: {} events, {} workers, {} kills, seed {}, queue and schema {}",
            options.events, options.workers, options.kills, options.seed, options.name
        );
        println!("chaos: the workers write to {}", crew.logs().display());
        Ok(Self {
            events: Arc::new(events::all(options.seed, options.events)),
            started: Instant::now(),
            options,
            servers,
            ledger,
            crew,
        })
    }

    /// Within the time limit, or what is left.
    async fn carry_out(self) -> anyhow::Result<ExitCode> {
        let ended = tokio::time::timeout(self.options.time_limit(), self.course()).await;
        let verdict = match ended {
            Ok(Ok(verdict)) => verdict,
            Ok(Err(error)) => {
                println!("chaos: FAILED: {error:#}");
                self.crew.kill_all();
                self.verdict().await?
            }
            Err(_) => {
                println!(
                    "chaos: FAILED: not over after {:?}; this is left:",
                    self.options.time_limit()
                );
                self.crew.kill_all();
                println!("{}", self.ledger.held_rows().await?);
                self.verdict().await?.of_a_hung_run()
            }
        };
        self.report(&verdict);
        let good = verdict.is_good() && self.crew.problems().is_empty();
        if good {
            self.clean_up().await?;
        }
        Ok(if good {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }

    async fn course(&self) -> anyhow::Result<Verdict> {
        let (release, released) = watch::channel(0);
        let producing = tokio::spawn(
            Producer::new(&self.servers, &self.options).publish_all(self.events.clone(), released),
        );
        let crew = tokio::spawn(self.crew.clone().work());
        let mut disrupting = tokio::spawn(disruptions::all(
            self.options.clone(),
            self.servers.clone(),
            self.crew.clone(),
        ));

        // Events are let go as the kills proceed, so that there is always work to interrupt; where a
        // crash point waits for more of it, a little earlier.
        let mut disrupted = false;
        let (mut extra, mut last) = (0, (0, Instant::now()));
        while !(self.crew.last_lives_begun() && disrupted) {
            let applied = self.ledger.applied().await.unwrap_or(last.0);
            if applied != last.0 {
                last = (applied, Instant::now());
            } else if last.1.elapsed() > Duration::from_secs(1) {
                extra += 20;
                last.1 = Instant::now();
            }
            let due = self.events.len() * (self.crew.kills() + 2) / self.options.kills.max(1) + extra;
            // A tenth is kept for what is done when nobody is killed any more.
            let kept = if self.crew.last_lives_begun() {
                0
            } else {
                self.events.len() / 10
            };
            release.send_replace(due.min(self.events.len() - kept));
            self.crew.check()?;
            self.crew.sample_memory();
            self.progress(applied);
            tokio::select! {
                done = &mut disrupting, if !disrupted => {
                    done.context("the disruptions")??;
                    disrupted = true;
                }
                () = sleep(LOOK) => {}
            }
        }
        release.send_replace(self.events.len());
        producing.await.context("the producer")??;
        println!(
            "chaos: no more failures after {} s, with {} applied; draining",
            self.started.elapsed().as_secs(),
            self.ledger.applied().await?
        );
        self.drained().await?;
        self.crew.stop();
        crew.await.context("the crew")??;
        self.verdict().await
    }

    /// Waits until all that can be seen says that there is nothing left to do.
    async fn drained(&self) -> anyhow::Result<()> {
        loop {
            self.crew.check()?;
            self.crew.sample_memory();
            if let (Ok(applied), Ok(held)) = (self.ledger.applied().await, self.ledger.held().await) {
                self.progress(applied);
                if applied >= self.options.events
                    && held == 0
                    && self
                        .servers
                        .queued(&self.options.name)
                        .await
                        .is_ok_and(|queued| queued == 0)
                {
                    return Ok(());
                }
            }
            sleep(LOOK).await;
        }
    }

    async fn verdict(&self) -> anyhow::Result<Verdict> {
        let queued = self.servers.queued(&self.options.name).await?;
        Ok(self.ledger.compare(&self.events, queued).await?)
    }

    fn progress(&self, applied: usize) {
        use std::io::IsTerminal as _;
        if std::io::stderr().is_terminal() {
            let (kills, seconds) = (self.crew.kills(), self.started.elapsed().as_secs());
            eprint!("\r  {seconds:>4} s  kills {kills:>4}  applied {applied:>6} ");
        }
    }

    fn report(&self, verdict: &Verdict) {
        println!("\n{}", self.crew.table());
        println!("{}", self.servers.table());
        println!("{verdict}");
        for problem in self.crew.problems() {
            println!("chaos: PROBLEM: {problem}");
        }
        println!(
            "chaos: kills {}, restarts {}, sent {}, applied {}, lost {}, doubled {}, dead {}, held {}, queue {}",
            self.crew.kills(),
            self.servers.restarts(),
            verdict.sent,
            verdict.applied,
            verdict.lost,
            verdict.doubled,
            verdict.dead,
            verdict.held,
            verdict.queued
        );
    }

    async fn clean_up(&self) -> anyhow::Result<()> {
        self.ledger.drop_schema().await?;
        producer::delete(&self.servers.rabbitmq, &self.options.name).await
    }
}
