use std::time::Duration;

use anyhow::{Context as _, bail};

const USAGE: &str = "--payments N --kills K --workers W --seed S --short";

/// What a run is asked to do.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) payments: usize,
    pub(crate) kills: usize,
    pub(crate) workers: usize,
    pub(crate) seed: u64,
    /// The name of the run's queue, topic and schema.
    pub(crate) name: String,
}

impl Options {
    pub(crate) fn from_args() -> anyhow::Result<Self> {
        let args: Vec<String> = std::env::args().skip(1).collect();
        let short = args.iter().any(|arg| arg == "--short");
        let mut options = Self {
            payments: if short { 1_000 } else { 10_000 },
            kills: if short { 12 } else { 120 },
            workers: 3,
            seed: fastrand::u64(1..100_000),
            name: String::new(),
        };
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            let mut number = || -> anyhow::Result<usize> {
                let value = args
                    .next()
                    .with_context(|| format!("{arg} wants a number ({USAGE})"))?;
                value
                    .parse()
                    .with_context(|| format!("{arg} is {value:?} (a number)"))
            };
            match arg.as_str() {
                "--payments" => options.payments = number()?,
                "--kills" => options.kills = number()?,
                "--workers" => options.workers = number()?,
                "--seed" => options.seed = number()? as u64,
                "--short" => {}
                _ => bail!("{arg} is not known ({USAGE})"),
            }
        }
        if options.payments == 0 || options.workers == 0 || options.kills == 0 {
            bail!("there have to be payments, workers and kills");
        }
        options.name = format!("e2e_{}_{}", options.seed, std::process::id());
        Ok(options)
    }

    /// The arguments that make a run of this size.
    pub(crate) fn form(&self) -> String {
        let Self {
            payments,
            kills,
            workers,
            ..
        } = self;
        format!("--payments {payments} --kills {kills} --workers {workers}")
    }

    /// Far more than a run takes: past it, something hangs.
    pub(crate) fn time_limit(&self) -> Duration {
        Duration::from_secs(180 + 4 * self.kills as u64 + self.payments as u64 / 50)
    }
}
