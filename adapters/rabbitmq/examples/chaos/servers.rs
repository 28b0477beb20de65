//! The broker and the database, and how they are restarted and asked.

use std::fmt::Write as _;
use std::process::Stdio;
use std::sync::Mutex;

use anyhow::{Context as _, bail};
use tokio::process::Command;

pub(crate) struct Servers {
    pub(crate) postgres: String,
    pub(crate) rabbitmq: String,
    services: String,
    rabbitmqctl: String,
    /// What was done to them, in order.
    done: Mutex<Vec<String>>,
}

impl Servers {
    pub(crate) fn from_env() -> anyhow::Result<Self> {
        let variable = |name: &str| {
            std::env::var(name).with_context(|| format!("{name} is not set (use scripts/chaos)"))
        };
        Ok(Self {
            postgres: variable("ONLYONCE_POSTGRES_URL")?,
            rabbitmq: variable("ONLYONCE_RABBITMQ_URL")?,
            services: variable("ONLYONCE_SERVICES")?,
            rabbitmqctl: variable("ONLYONCE_RABBITMQCTL")?,
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

    /// How many messages are in the queue, delivered ones included.
    pub(crate) async fn queued(&self, queue: &str) -> anyhow::Result<u64> {
        let arguments = [
            "--quiet",
            "list_queues",
            "--no-table-headers",
            "name",
            "messages_ready",
            "messages_unacknowledged",
        ];
        let output = Command::new(&self.rabbitmqctl).args(arguments).output().await?;
        let list = String::from_utf8_lossy(&output.stdout);
        let mut line = list
            .lines()
            .map(|line| line.split('\t'))
            .find_map(|mut fields| (fields.next() == Some(queue)).then_some(fields))
            .with_context(|| format!("rabbitmqctl does not list the queue {queue}: {list}"))?;
        let mut number =
            || -> anyhow::Result<u64> { Ok(line.next().context("a column is missing")?.trim().parse()?) };
        Ok(number()? + number()?)
    }

    pub(crate) fn note(&self, what: String) {
        self.done.lock().unwrap_or_else(|e| e.into_inner()).push(what);
    }

    pub(crate) fn restarts(&self) -> usize {
        let done = self.done.lock().unwrap_or_else(|e| e.into_inner());
        done.iter()
            .filter(|what| what.starts_with("restart") || what.starts_with("kill"))
            .count()
    }

    pub(crate) fn table(&self) -> String {
        let done = self.done.lock().unwrap_or_else(|e| e.into_inner());
        let mut kinds = std::collections::BTreeMap::<&str, usize>::new();
        done.iter().for_each(|what| *kinds.entry(what).or_default() += 1);
        let mut table = String::from("  disruption                       times\n");
        for (kind, times) in kinds {
            let _ = writeln!(table, "  {kind:<32} {times:>5}");
        }
        table
    }
}
