//! Outbox chaos: relay processes die and brokers fail over and over, and in the end the brokers have what was
//! committed, in order, and nothing else. `scripts/chaos outbox-BROKER` starts the servers and runs this.
//!
//! An adapter's example `outbox_chaos` says what its broker is like ([`Broker`]) and calls [`run`]. The program is its
//! own relay: the runner starts four copies of itself with the argument `relay`, and kills one of them each second.
//! Writers commit events in transactions that wait for each other at their key; some roll back, some stand still
//! for a while. There are three destinations ([`Route`]): one is refused, delayed and disturbed in the broker's own
//! way, one is on the same broker and left alone, and one is a table, which no broker's trouble reaches. The latter two
//! must keep flowing. Poison is planted: events that the broker refuses for good, each with one of its key before
//! it and one behind it.
#![allow(clippy::print_stdout)]

mod broker;
mod flow;
mod ledger;
mod options;
mod relay;
mod rough;
mod route;
mod table;
mod verdict;
mod writers;

use std::collections::HashMap;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

pub use broker::{Arrival, Broker};
pub use route::Route;

use crate::chaos::servers::Servers;
use crate::processes::{Processes, logs_of};
use flow::Flow;
use ledger::Ledger;
use options::Options;
use verdict::Verdict;
use writers::{Progress, Writers};

/// How often the outbox is looked at.
const LOOK: Duration = Duration::from_millis(100);
/// One relay is killed so often.
const KILL_EVERY: Duration = Duration::from_secs(1);

/// The whole program: a run, or with the argument `relay` one of its relays.
pub async fn run<B: Broker>() -> anyhow::Result<ExitCode> {
    let broker = B::from_env()?;
    if std::env::args().nth(1).as_deref() == Some("relay") {
        return relay::run(&broker).await.map(|()| ExitCode::SUCCESS);
    }
    Run::prepare(Options::from_args()?, broker)
        .await?
        .carry_out()
        .await
}

/// One run: everything that takes part in it.
struct Run<B> {
    options: Arc<Options>,
    broker: Arc<B>,
    servers: Arc<Servers>,
    ledger: Arc<Ledger>,
    relays: Arc<Processes>,
    flows: [Flow; 2],
    started: Instant,
}

impl<B: Broker> Run<B> {
    async fn prepare(options: Options, broker: B) -> anyhow::Result<Self> {
        let servers = Servers::with(Some(B::SERVICE))?;
        println!(
            "outbox chaos: {}, {} keys x {} events, {} poison, {} relays, seed {}, schema {}",
            B::SERVICE,
            options.keys,
            options.events,
            options.poison,
            options.relays,
            options.seed,
            options.name
        );
        let ledger = Ledger::create(&servers.postgres, &options.name).await?;
        broker.declare(&options.name).await.context("the broker")?;
        let name = options.name.clone();
        let relays = Processes::start(options.relays, logs_of(&name), move |_, command| {
            command.arg("relay").env("CHAOS_NAME", &name);
        })?;
        println!("outbox chaos: the relays write to {}", relays.logs().display());
        Ok(Self {
            flows: [Flow::of(Route::Calm), Flow::of(Route::Table)],
            options: Arc::new(options),
            broker: Arc::new(broker),
            servers: Arc::new(servers),
            ledger: Arc::new(ledger),
            relays: Arc::new(relays),
            started: Instant::now(),
        })
    }

    async fn carry_out(mut self) -> anyhow::Result<ExitCode> {
        let limit = self.options.time_limit();
        let ended = match timeout(limit, self.course()).await {
            Ok(ended) => ended,
            Err(_) => Err(anyhow::anyhow!("it is not over after {limit:?}")),
        };
        let mut problems = match ended {
            Ok(problems) => problems,
            Err(error) => {
                let left = self.ledger.left().await?;
                self.relays.kill_all().await?;
                vec![format!("{error:#}; the outbox holds:\n{left}")]
            }
        };
        problems.extend(self.relays.ends().wrong);
        problems.extend(self.flows.iter().filter_map(Flow::problem));
        let verdict = self.verdict().await?;
        self.report(&verdict, &problems);
        if !verdict.is_good() || !problems.is_empty() {
            println!(
                "outbox chaos: FAILED; the same again: scripts/chaos outbox-{} {} --seed {}",
                B::SERVICE,
                self.options.form(),
                self.options.seed
            );
            return Ok(ExitCode::FAILURE);
        }
        self.ledger.drop_schema().await?;
        self.broker.delete(&self.options.name).await?;
        Ok(ExitCode::SUCCESS)
    }

    /// Returns what was not as it should be, other than what has arrived.
    async fn course(&mut self) -> anyhow::Result<Vec<String>> {
        let (backlog, seen) = watch::channel(0);
        let writers = Writers::new(&self.options, &self.ledger, self.addresses(), seen);
        let progress = writers.progress();
        let mut writing = tokio::spawn(writers.write_all::<B>(self.broker.clone()));
        let (outage, outages) = watch::channel(false);
        let mut disturbing = tokio::spawn(disturb(
            self.broker.clone(),
            self.servers.clone(),
            self.options.clone(),
            progress.clone(),
            outage,
        ));
        let peace = CancellationToken::new();
        let mut killing = tokio::spawn(kill(self.relays.clone(), self.options.seed, peace.clone()));

        let (mut written, mut disturbed) = (false, false);
        loop {
            tokio::select! {
                done = &mut writing, if !written => {
                    done.context("the writers")??;
                    written = true;
                }
                done = &mut disturbing, if !disturbed => {
                    done.context("the disturbances")??;
                    disturbed = true;
                }
                ended = &mut killing => {
                    ended.context("the kills")??;
                    bail!("nobody kills any more");
                }
                () = sleep(LOOK) => {}
            }
            let known = progress.of_each();
            let pending = self.ledger.pending().await?;
            backlog.send_replace(pending.values().sum());
            for flow in &mut self.flows {
                let route = flow.route();
                let waiting = pending.get(&route).copied().unwrap_or(0);
                let away = route == Route::Calm && *outages.borrow();
                flow.look(known[route as usize], waiting, away, Instant::now());
            }
            if written && disturbed && self.ledger.only_poison_is_left().await? {
                break;
            }
        }
        peace.cancel();
        killing.await.context("the kills")??;
        let drained = self.started.elapsed();
        let problems = self.ledger.problems_of_poison().await?;
        self.ledger.discard_poison().await?;
        while !self.ledger.is_empty().await? {
            sleep(LOOK).await;
        }
        self.relays.stop().await?;
        println!(
            "outbox chaos: drained after {} s, stopped after {} s",
            drained.as_secs(),
            self.started.elapsed().as_secs()
        );
        Ok(problems)
    }

    fn addresses(&self) -> HashMap<Route, String> {
        let address = |route| match route {
            Route::Table => "table:arrived".to_owned(),
            _ => format!("broker:{}", self.broker.address(&self.options.name, route)),
        };
        Route::ALL.map(|route| (route, address(route))).into()
    }

    async fn verdict(&self) -> anyhow::Result<Verdict> {
        let mut arrived = HashMap::new();
        for route in Route::ALL {
            let arrivals = match route {
                Route::Table => self.ledger.arrived().await?,
                _ => self
                    .broker
                    .read_all(&self.options.name, route)
                    .await
                    .with_context(|| format!("reading {route:?}"))?,
            };
            arrived.insert(route, arrivals);
        }
        Ok(verdict::compare(
            &self.ledger.committed().await?,
            &self.ledger.rolled_back(),
            &arrived,
        ))
    }

    fn report(&self, verdict: &Verdict, problems: &[String]) {
        let ends = self.relays.ends();
        println!("\n{}\n{verdict}", self.servers.table());
        for flow in &self.flows {
            println!("  {flow}");
        }
        for problem in problems {
            println!("outbox chaos: PROBLEM: {problem}");
        }
        println!(
            "outbox chaos: {}: kills {}, broker restarts {}, committed {}, arrived {}, copies {}, rolled back {}, lost {}, \
             out of order {}, wrong {}, poison {}",
            B::SERVICE,
            ends.killed,
            self.servers.restarts(),
            verdict.committed,
            verdict.arrived,
            verdict.copies,
            verdict.rolled_back,
            verdict.lost,
            verdict.out_of_order,
            verdict.wrong,
            verdict.poison,
        );
    }
}

/// Ends one relay each second, and starts another in its place.
async fn kill(relays: Arc<Processes>, seed: u64, peace: CancellationToken) -> anyhow::Result<()> {
    let mut random = fastrand::Rng::with_seed(seed ^ 0x6b11);
    while timeout(KILL_EVERY, peace.cancelled()).await.is_err() {
        relays.replace_the_dead().await?;
        relays.kill(random.usize(..relays.count())).await?;
    }
    Ok(())
}

/// Disturbs the broker in its own way until all is written, and restarts it in between.
async fn disturb<B: Broker>(
    broker: Arc<B>,
    servers: Arc<Servers>,
    options: Arc<Options>,
    progress: Arc<Progress>,
    outage: watch::Sender<bool>,
) -> anyhow::Result<()> {
    let mut random = fastrand::Rng::with_seed(options.seed ^ 0xd15c);
    let mut restarts = options.restarts().iter();
    let parts = restarts.len() as u64 + 1;
    let until = |part| (options.keys * options.events) as u64 * part / parts;
    for part in 1..=parts {
        progress.release(until(part));
        while progress.sum() < until(part) {
            let time = Duration::from_millis(random.u64(100..1_500));
            if let Some(done) = broker.disturb(&options.name, time).await? {
                servers.note(done.to_owned());
            }
            sleep(Duration::from_millis(random.u64(200..2_000))).await;
        }
        if let Some(how) = restarts.next() {
            // What comes next is written while the broker is away.
            progress.release(until(part + 1));
            outage.send_replace(true);
            servers.restart_broker(how).await?;
            outage.send_replace(false);
        }
    }
    Ok(())
}
