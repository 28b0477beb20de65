//! What a run is asked to do.

use std::time::Duration;

use anyhow::{Context as _, bail};

const USAGE: &str = "--events N --kills K --workers W --seed S --classic --short";

#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) events: usize,
    pub(crate) kills: usize,
    pub(crate) workers: usize,
    pub(crate) seed: u64,
    /// A classic queue; else a quorum queue.
    pub(crate) classic: bool,
    /// The form for CI: each kind of failure once.
    pub(crate) short: bool,
    /// The name of this run's queue and schema.
    pub(crate) name: String,
}

impl Options {
    pub(crate) fn from_args() -> anyhow::Result<Self> {
        let args: Vec<String> = std::env::args().skip(1).collect();
        let short = args.iter().any(|arg| arg == "--short");
        let mut options = Self {
            events: if short { 2_000 } else { 20_000 },
            kills: if short { 20 } else { 200 },
            workers: 3,
            seed: fastrand::u64(1..100_000),
            classic: false,
            short,
            name: String::new(),
        };
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            let mut number = || -> anyhow::Result<u64> {
                let value = args
                    .next()
                    .with_context(|| format!("{arg} wants a number ({USAGE})"))?;
                value
                    .parse()
                    .with_context(|| format!("{arg} is {value:?} (a number)"))
            };
            match arg.as_str() {
                "--events" => options.events = number()? as usize,
                "--kills" => options.kills = number()? as usize,
                "--workers" => options.workers = number()? as usize,
                "--seed" => options.seed = number()?,
                "--classic" => options.classic = true,
                "--short" => {}
                _ => bail!("{arg} is not known ({USAGE})"),
            }
        }
        if options.events == 0 || options.workers == 0 {
            bail!("there have to be events and workers");
        }
        options.name = format!("chaos_{}_{}", options.seed, std::process::id());
        Ok(options)
    }

    /// Far more than a run takes: past it, something hangs.
    pub(crate) fn time_limit(&self) -> Duration {
        let base = if self.short { 240 } else { 480 };
        Duration::from_secs(base + 3 * self.kills as u64 + self.events as u64 / 50)
    }
}
