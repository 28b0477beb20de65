//! What a run is asked to do.

use std::time::Duration;

use anyhow::{Context as _, bail};

use super::broker::Broker;

const USAGE: &str = "--events N --kills K --workers W --seed S --joins J --rolling R --calm --short";

#[derive(Debug, Clone)]
pub(super) struct Options {
    pub(super) events: usize,
    pub(super) kills: usize,
    pub(super) workers: usize,
    pub(super) seed: u64,
    /// How often a guest joins and leaves after two seconds.
    pub(super) joins: usize,
    /// How often all workers are restarted in good order, one after another.
    pub(super) rolling: usize,
    /// Servers and links are left alone.
    pub(super) calm: bool,
    /// The form for CI: each kind of failure once.
    pub(super) short: bool,
    /// The name of this run's queue and schema.
    pub(super) name: String,
    /// The arguments that the broker took; workers get them, too.
    pub(super) of_broker: Vec<String>,
}

impl Options {
    pub(super) fn from_args<B: Broker>(broker: &mut B) -> anyhow::Result<Self> {
        let args: Vec<String> = std::env::args().skip(1).collect();
        let usage = format!("{USAGE} {}", B::USAGE);
        let short = args.iter().any(|arg| arg == "--short");
        let mut options = Self {
            events: if short { 2_000 } else { 20_000 },
            kills: if short { 20 } else { 200 },
            workers: 3,
            seed: fastrand::u64(1..100_000),
            joins: 0,
            rolling: 0,
            calm: false,
            short,
            name: String::new(),
            of_broker: Vec::new(),
        };
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            let mut number = || -> anyhow::Result<u64> {
                let value = args
                    .next()
                    .with_context(|| format!("{arg} wants a number ({usage})"))?;
                value
                    .parse()
                    .with_context(|| format!("{arg} is {value:?} (a number)"))
            };
            match arg.as_str() {
                "--events" => options.events = number()? as usize,
                "--kills" => options.kills = number()? as usize,
                "--workers" => options.workers = number()? as usize,
                "--seed" => options.seed = number()?,
                "--joins" => options.joins = number()? as usize,
                "--rolling" => options.rolling = number()? as usize,
                "--calm" => options.calm = true,
                "--short" => {}
                _ if broker.option(&arg) => options.of_broker.push(arg),
                _ => bail!("{arg} is not known ({usage})"),
            }
        }
        if options.events == 0 || options.workers == 0 {
            bail!("there have to be events and workers");
        }
        options.name = format!("chaos_{}_{}", options.seed, std::process::id());
        Ok(options)
    }

    /// Far more than a run takes: past it, something hangs.
    pub(super) fn time_limit(&self) -> Duration {
        let base = if self.short { 240 } else { 480 };
        Duration::from_secs(base + 3 * self.ends() as u64 + self.events as u64 / 50)
    }

    /// How many processes end before the last ones begin.
    pub(super) fn ends(&self) -> usize {
        self.kills + self.joins + self.rolling * self.workers
    }

    /// Places for workers, and one for guests if there are any.
    pub(super) fn places(&self) -> usize {
        self.workers + usize::from(self.joins > 0)
    }
}
