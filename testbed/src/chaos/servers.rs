//! The database and the broker as services, and how they are restarted.

use std::fmt::Write as _;
use std::process::Stdio;
use std::sync::{Mutex, MutexGuard};

use anyhow::bail;
use tokio::process::Command;

use super::variable;

pub(crate) struct Servers {
    pub(crate) postgres: String,
    /// The broker's name in `scripts/services`, if it may be restarted.
    pub(crate) broker: Option<&'static str>,
    services: String,
    /// What was done to them, in order.
    done: Mutex<Vec<String>>,
}

impl Servers {
    pub(crate) fn with(broker: Option<&'static str>) -> anyhow::Result<Self> {
        Ok(Self {
            postgres: variable("ONLYONCE_POSTGRES_URL")?,
            broker,
            services: variable("ONLYONCE_SERVICES")?,
            done: Mutex::default(),
        })
    }

    /// `restart` is an orderly one; `kill` a SIGKILL with a start after it.
    pub(crate) async fn restart(&self, how: &str, service: &str) -> anyhow::Result<()> {
        self.services(&[how, service]).await?;
        if how == "kill" {
            self.services(&["up", service]).await?;
        }
        self.note(format!("{how} {service}"));
        Ok(())
    }

    pub(crate) async fn restart_broker(&self, how: &str) -> anyhow::Result<()> {
        match self.broker {
            Some(service) => self.restart(how, service).await,
            None => bail!("this broker is never restarted"),
        }
    }

    async fn services(&self, arguments: &[&str]) -> anyhow::Result<()> {
        let output = Command::new(&self.services)
            .args(arguments)
            .stdin(Stdio::null())
            .output()
            .await?;
        if !output.status.success() {
            bail!(
                "scripts/services {arguments:?}: {}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(())
    }

    pub(crate) fn note(&self, what: String) {
        self.done().push(what);
    }

    pub(crate) fn restarts(&self) -> usize {
        self.done()
            .iter()
            .filter(|what| what.starts_with("restart") || what.starts_with("kill"))
            .count()
    }

    pub(crate) fn table(&self) -> String {
        let done = self.done();
        let mut kinds = std::collections::BTreeMap::<&str, usize>::new();
        done.iter().for_each(|what| *kinds.entry(what).or_default() += 1);
        let mut table = String::from("  disruption                       times\n");
        for (kind, times) in kinds {
            let _ = writeln!(table, "  {kind:<32} {times:>5}");
        }
        table
    }

    fn done(&self) -> MutexGuard<'_, Vec<String>> {
        self.done.lock().unwrap_or_else(|e| e.into_inner())
    }
}
