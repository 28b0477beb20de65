//! What a run is asked to do.

use std::time::Duration;

use anyhow::{Context as _, bail};

const USAGE: &str = "--keys K --events N --poison P --relays R --seed S --short";

#[derive(Debug, Clone)]
pub(super) struct Options {
    pub(super) keys: usize,
    /// Of each key.
    pub(super) events: usize,
    pub(super) poison: usize,
    pub(super) relays: usize,
    pub(super) seed: u64,
    pub(super) short: bool,
    /// The name of this run's schema, and the beginning of what it has on the broker.
    pub(super) name: String,
}

impl Options {
    pub(super) fn from_args() -> anyhow::Result<Self> {
        let args: Vec<String> = std::env::args().skip(1).collect();
        let short = args.iter().any(|arg| arg == "--short");
        let mut options = Self {
            keys: if short { 20 } else { 50 },
            events: if short { 200 } else { 2_000 },
            poison: if short { 4 } else { 25 },
            relays: 4,
            seed: fastrand::u64(1..100_000),
            short,
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
                "--keys" => options.keys = number()?,
                "--events" => options.events = number()?,
                "--poison" => options.poison = number()?,
                "--relays" => options.relays = number()?,
                "--seed" => options.seed = number()? as u64,
                "--short" => {}
                _ => bail!("{arg} is not known ({USAGE})"),
            }
        }
        if options.keys == 0 || options.events == 0 || options.relays == 0 {
            bail!("there have to be keys, events and relays");
        }
        options.name = format!("outbox_chaos_{}_{}", options.seed, std::process::id());
        Ok(options)
    }

    /// How the broker is restarted, one time after the other.
    pub(super) fn restarts(&self) -> &'static [&'static str] {
        if self.short {
            &["kill"]
        } else {
            &["restart", "kill"]
        }
    }

    /// The arguments that make such a run.
    pub(super) fn form(&self) -> String {
        let Self {
            keys,
            events,
            poison,
            relays,
            ..
        } = self;
        let short = if self.short { "--short " } else { "" };
        format!("{short}--keys {keys} --events {events} --poison {poison} --relays {relays}")
    }

    /// Far more than a run takes: past it, something hangs.
    pub(super) fn time_limit(&self) -> Duration {
        let base = if self.short { 180 } else { 600 };
        Duration::from_secs(base + (self.keys * self.events / 50) as u64)
    }
}
