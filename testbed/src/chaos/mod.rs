//! Chaos: worker processes, the broker, the database and the network between them fail over and over,
//! and in the end the ledger holds each event once. `scripts/chaos` starts the servers and runs this.
//!
//! An adapter's example `chaos` says what its broker is like ([`Broker`]) and calls [`run`]. The program is
//! its own worker: the runner starts copies of itself with the argument `worker`.
//! Each goes through a TCP proxy of the runner to either server, so that its link can be cut. Half of
//! the kills come at random, half at a crash point of `src/consumer/process.rs`, all of which must be
//! hit. One event in eight fails on its first attempts, and all succeed in the end: nothing may be
//! dead, held, queued, lost or doubled when it is over. Where the broker keeps the order of a key, the
//! events of each key must have taken effect in it.
//!
//! The ledger has no unique index, so that an event applied twice would show.
#![allow(clippy::print_stdout)]

mod broker;
mod crew;
mod disruptions;
mod events;
mod ledger;
mod link;
mod options;
mod producer;
pub(crate) mod servers;
mod worker;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio::sync::watch;
use tokio::time::sleep;

pub use broker::{Broker, Entrance, Seat};
pub use events::{Event, Keys};

use crew::Crew;
use ledger::{Ledger, Verdict};
use options::Options;
use producer::Producer;
use servers::Servers;

/// How often the state of things is looked at.
const LOOK: Duration = Duration::from_millis(250);

/// The whole program: a run, or with the argument `worker` one of its workers.
pub async fn run<B: Broker>() -> anyhow::Result<ExitCode> {
    let mut broker = B::from_env()?;
    if std::env::args().nth(1).as_deref() == Some("worker") {
        return worker::run(broker).await.map(|()| ExitCode::SUCCESS);
    }
    let options = Options::from_args(&mut broker)?;
    Run::prepare(options, broker).await?.carry_out().await
}

/// What `scripts/chaos` and [`Broker::from_env`] rely on.
pub fn variable(name: &str) -> anyhow::Result<String> {
    std::env::var(name).with_context(|| format!("{name} is not set (use scripts/chaos)"))
}

/// One run: everything that takes part in it.
struct Run<B> {
    options: Arc<Options>,
    broker: Arc<B>,
    servers: Arc<Servers>,
    ledger: Ledger,
    crew: Arc<Crew>,
    events: Arc<Vec<events::Event>>,
    started: Instant,
}

impl<B: Broker> Run<B> {
    async fn prepare(options: Options, broker: B) -> anyhow::Result<Self> {
        let (options, broker) = (Arc::new(options), Arc::new(broker));
        let servers = Arc::new(Servers::with(B::NEVER_RESTARTED.is_none().then_some(B::SERVICE))?);
        let ledger = Ledger::create(&servers.postgres, &options.name).await?;
        broker.declare(&options.name).await.context("the broker")?;
        let entrances: Vec<_> = (0..options.places())
            .map(|place| broker.entrance(place))
            .collect::<anyhow::Result<_>>()?;
        let crew = Arc::new(Crew::hire(options.clone(), &servers.postgres, entrances, broker.keys()).await?);
        println!(
            "chaos: {}, {} events, {} workers, {} kills, {} joins, {} rolling restarts, seed {}, queue and schema {}",
            B::SERVICE,
            options.events,
            options.workers,
            options.kills,
            options.joins,
            options.rolling,
            options.seed,
            options.name
        );
        if let Some(reason) = B::NEVER_RESTARTED {
            println!("chaos: the broker is not restarted, its links fail instead: {reason}");
        }
        println!("chaos: the workers write to {}", crew.logs().display());
        Ok(Self {
            events: Arc::new(events::all(options.seed, options.events, broker.keys())),
            started: Instant::now(),
            options,
            broker,
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
        let mut problems = self.crew.problems();
        problems.extend(self.broker.problems(&self.options.name).await);
        self.report(&verdict, &problems);
        let good = verdict.is_good() && problems.is_empty();
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
            Producer::new(self.broker.clone(), &self.options).publish_all(self.events.clone(), released),
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
            let due = self.events.len() * (self.crew.ends() + 2) / self.options.ends().max(1) + extra;
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
        let drained = self.started.elapsed();
        self.crew.stop();
        crew.await.context("the crew")??;
        println!(
            "chaos: drained after {} s, stopped after {} s",
            drained.as_secs(),
            self.started.elapsed().as_secs()
        );
        self.verdict().await
    }

    /// Waits until all that can be seen says that there is nothing left to do. What is dead by then is
    /// a failure, but nothing to wait for.
    async fn drained(&self) -> anyhow::Result<()> {
        loop {
            self.crew.check()?;
            self.crew.sample_memory();
            let ledger = &self.ledger;
            if let (Ok(applied), Ok(held), Ok(dead)) =
                (ledger.applied().await, ledger.held().await, ledger.dead().await)
            {
                self.progress(applied);
                if applied + dead >= self.options.events
                    && held == 0
                    && self
                        .broker
                        .left(&self.options.name)
                        .await
                        .is_ok_and(|left| left == 0)
                {
                    return Ok(());
                }
            }
            sleep(LOOK).await;
        }
    }

    async fn verdict(&self) -> anyhow::Result<Verdict> {
        let queued = self.broker.left(&self.options.name).await?;
        Ok(self.ledger.compare(&self.events, queued).await?)
    }

    fn progress(&self, applied: usize) {
        use std::io::IsTerminal as _;
        if std::io::stderr().is_terminal() {
            let (kills, seconds) = (self.crew.kills(), self.started.elapsed().as_secs());
            eprint!("\r  {seconds:>4} s  kills {kills:>4}  applied {applied:>6} ");
        }
    }

    fn report(&self, verdict: &Verdict, problems: &[String]) {
        println!("\n{}", self.crew.table());
        println!("{}", self.servers.table());
        println!("{verdict}");
        for problem in problems {
            println!("chaos: PROBLEM: {problem}");
        }
        println!(
            "chaos: {}: kills {}, restarts {}, joins {}, reliefs {}, sent {}, applied {}, lost {}, doubled {}, \
             out of order {}, dead {}, held {}, queue {}",
            B::SERVICE,
            self.crew.kills(),
            self.servers.restarts(),
            self.crew.visits(),
            self.crew.reliefs(),
            verdict.sent,
            verdict.applied,
            verdict.lost,
            verdict.doubled,
            verdict.out_of_order,
            verdict.dead,
            verdict.held,
            verdict.queued
        );
    }

    async fn clean_up(&self) -> anyhow::Result<()> {
        self.ledger.drop_schema().await?;
        self.broker.delete(&self.options.name).await
    }
}
