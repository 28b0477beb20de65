//! Copies of this program as processes that are killed and started again.

use std::fs::{File, OpenOptions};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::process::{Child, Command};
use tokio::time::timeout;
use tracing_subscriber::EnvFilter;

/// How long an orderly stop may take.
const STOP_PATIENCE: Duration = Duration::from_secs(40);
const SIGABRT: i32 = 6;

/// Several processes of this program, each in a place of its own. They end with whoever started them, if they
/// call [`end_with_the_runner`].
pub struct Processes {
    prepare: Box<Prepare>,
    logs: PathBuf,
    places: Vec<tokio::sync::Mutex<Place>>,
    ends: Mutex<Ends>,
}

type Prepare = dyn Fn(usize, &mut Command) + Send + Sync;

struct Place {
    child: Child,
    /// Which the process watches.
    _leash: Option<tokio::process::ChildStdin>,
}

/// How processes have ended.
#[derive(Debug, Default, Clone)]
pub struct Ends {
    /// By our SIGKILL.
    pub killed: usize,
    /// By a SIGABRT of their own: at a crash point.
    pub crashed: usize,
    /// In any other way, in words.
    pub wrong: Vec<String>,
}

impl Processes {
    /// Starts so many. `prepare` adds arguments and environment to each start in the place that it is told.
    pub fn start(
        count: usize,
        logs: PathBuf,
        prepare: impl Fn(usize, &mut Command) + Send + Sync + 'static,
    ) -> anyhow::Result<Self> {
        std::fs::create_dir_all(&logs).with_context(|| format!("{}", logs.display()))?;
        let mut all = Self {
            prepare: Box::new(prepare),
            logs,
            places: Vec::new(),
            ends: Mutex::default(),
        };
        for place in 0..count {
            let child = all.spawn(place)?;
            all.places.push(tokio::sync::Mutex::new(child));
        }
        Ok(all)
    }

    /// Where they write what they have to say.
    pub fn logs(&self) -> &Path {
        &self.logs
    }

    /// How many there are at any time.
    pub fn count(&self) -> usize {
        self.places.len()
    }

    /// Ends the process in this place by SIGKILL, whatever it is at, and starts another.
    pub async fn kill(&self, place: usize) -> anyhow::Result<()> {
        let mut there = self.places[place].lock().await;
        there.child.start_kill().context("SIGKILL")?;
        let status = there.child.wait().await?;
        self.bury(place, status);
        *there = self.spawn(place)?;
        Ok(())
    }

    /// Starts another where one has ended by itself. An end other than at a crash point is an error.
    pub async fn replace_the_dead(&self) -> anyhow::Result<()> {
        for (place, there) in self.places.iter().enumerate() {
            let mut there = there.lock().await;
            if let Some(status) = there.child.try_wait()? {
                self.bury(place, status);
                *there = self.spawn(place)?;
            }
        }
        match self.ends().wrong.first() {
            None => Ok(()),
            Some(wrong) => bail!("{wrong}"),
        }
    }

    /// Stops all in good order, or says which did not.
    pub async fn stop(&self) -> anyhow::Result<()> {
        for place in &self.places {
            signal("TERM", place.lock().await.child.id()).await?;
        }
        for (place, there) in self.places.iter().enumerate() {
            let mut there = there.lock().await;
            match timeout(STOP_PATIENCE, there.child.wait()).await {
                Ok(status) => {
                    let status = status?;
                    if !status.success() {
                        self.lock()
                            .wrong
                            .push(format!("process {place} stopped with {status}"));
                    }
                }
                Err(_) => {
                    let late = format!("process {place} did not stop within {STOP_PATIENCE:?}");
                    self.lock().wrong.push(late);
                    there.child.kill().await?;
                }
            }
        }
        Ok(())
    }

    /// Ends all of them, for good.
    pub async fn kill_all(&self) -> anyhow::Result<()> {
        for place in &self.places {
            place.lock().await.child.kill().await?;
        }
        Ok(())
    }

    /// How they have ended so far.
    pub fn ends(&self) -> Ends {
        self.lock().clone()
    }

    fn spawn(&self, place: usize) -> anyhow::Result<Place> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(self.log(place)?)
            .kill_on_drop(true);
        (self.prepare)(place, &mut command);
        let mut child = command.spawn().context("starting a process")?;
        // Taken out, as waiting for the child would close it.
        let leash = child.stdin.take();
        Ok(Place { child, _leash: leash })
    }

    fn log(&self, place: usize) -> anyhow::Result<File> {
        let path = self.logs.join(format!("process-{place}.txt"));
        Ok(OpenOptions::new().create(true).append(true).open(path)?)
    }

    fn bury(&self, place: usize, status: ExitStatus) {
        let mut ends = self.lock();
        match status.signal() {
            Some(9) => ends.killed += 1,
            Some(SIGABRT) => ends.crashed += 1,
            _ => ends
                .wrong
                .push(format!("process {place} ended by itself with {status}")),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Ends> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends a signal by name.
pub async fn signal(name: &str, pid: Option<u32>) -> anyhow::Result<()> {
    if let Some(pid) = pid {
        // It fails if the process has just ended, which is what was wanted or comes to the same.
        Command::new("kill")
            .arg(format!("-{name}"))
            .arg(pid.to_string())
            .output()
            .await?;
    }
    Ok(())
}

/// The runner holds the other end of stdin, and lets go of it when it ends, however it ends.
pub fn end_with_the_runner() {
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(3);
    });
}

/// Where the processes of the run of this name write: under `CHAOS_LOGS`, which `scripts/chaos` sets.
pub fn logs_of(name: &str) -> PathBuf {
    std::env::var_os("CHAOS_LOGS")
        .map_or_else(std::env::temp_dir, PathBuf::from)
        .join(name)
}

/// What a process of ours has to say, and the libraries below it.
pub fn logs_to_stderr() {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_env_filter(EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info")))
        .init();
}
