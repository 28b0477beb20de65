//! The worker processes: how they are started, killed and started again.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use anyhow::{Context as _, bail};
use fastrand::Rng;
use onlyonce::testing::CrashPoint;
use tokio::process::{Child, Command};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::link::Link;
use crate::options::Options;
use crate::servers::Servers;

/// A worker that has not come to its crash point by then is killed where it is.
const CRASH_PATIENCE: Duration = Duration::from_secs(15);
/// A worker that has not begun to work by then has nothing to do, or is cut off.
const WORK_PATIENCE: Duration = Duration::from_secs(6);
/// How long an orderly stop may take.
const STOP_PATIENCE: Duration = Duration::from_secs(40);
const SIGABRT: i32 = 6;

pub(crate) struct Crew {
    options: Arc<Options>,
    pub(crate) places: Vec<Place>,
    logs: PathBuf,
    state: Mutex<State>,
    most_memory: AtomicU64,
    stopping: CancellationToken,
    killed: AtomicBool,
}

/// Where one worker after the other lives.
pub(crate) struct Place {
    pub(crate) postgres: Link,
    pub(crate) rabbitmq: Link,
    pub(crate) pid: Mutex<Option<u32>>,
    /// The connections to the database before this worker's first.
    connections_before: AtomicU64,
    /// Held while the process must not be killed.
    pub(crate) hands_off: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct State {
    begun: usize,
    random_kills: usize,
    /// Lives that are on their way to this crash point, and those that ended there.
    crashes: HashMap<CrashPoint, (usize, usize)>,
    last_lives: usize,
    problems: Vec<String>,
}

/// How a worker's life is to end.
#[derive(Debug, Clone, Copy)]
enum Life {
    /// So long after it has begun to work, or after it was started.
    KilledAfter {
        at_work: bool,
        after: Duration,
    },
    CrashesAt(CrashPoint, u32),
    /// It works until all is done.
    Last,
}

impl Place {
    /// Waits until the worker has begun to work: of its connections two are the framework's reserve.
    /// It may be that there is nothing to do for it.
    pub(crate) async fn at_work(&self) {
        let begun = async {
            while self.postgres.connections() < self.connections_before.load(Relaxed) + 4 {
                sleep(Duration::from_millis(10)).await;
            }
        };
        let _ = timeout(WORK_PATIENCE, begun).await;
    }
}

impl Crew {
    pub(crate) async fn hire(options: Arc<Options>, servers: &Servers) -> anyhow::Result<Self> {
        let logs = std::env::var_os("CHAOS_LOGS")
            .map_or_else(std::env::temp_dir, PathBuf::from)
            .join(&options.name);
        std::fs::create_dir_all(&logs).with_context(|| format!("{}", logs.display()))?;
        let mut places = Vec::new();
        for _ in 0..options.workers {
            places.push(Place {
                postgres: Link::before(&servers.postgres).await?,
                rabbitmq: Link::before(&servers.rabbitmq).await?,
                pid: Mutex::default(),
                connections_before: AtomicU64::new(0),
                hands_off: tokio::sync::Mutex::default(),
            });
        }
        Ok(Self {
            options,
            places,
            logs,
            state: Mutex::default(),
            most_memory: AtomicU64::new(0),
            stopping: CancellationToken::new(),
            killed: AtomicBool::new(false),
        })
    }

    /// All lives of all workers, until [`stop`](Self::stop).
    pub(crate) async fn work(self: Arc<Self>) -> anyhow::Result<()> {
        let mut places = JoinSet::new();
        for place in 0..self.places.len() {
            places.spawn(self.clone().live_on(place));
        }
        while let Some(ended) = places.join_next().await {
            ended??;
        }
        Ok(())
    }

    async fn live_on(self: Arc<Self>, place: usize) -> anyhow::Result<()> {
        let mut random = Rng::with_seed(self.options.seed.wrapping_mul(31).wrapping_add(place as u64));
        loop {
            let life = self.next_life(&mut random);
            let mut child = self.start(place, life)?;
            // Taken out, as waiting for the child would close it.
            let _leash = child.stdin.take();
            let status = self.live(place, life, &mut child).await?;
            *lock(&self.places[place].pid) = None;
            if self.bury(place, life, status) {
                return Ok(());
            }
        }
    }

    /// Half of the kills are at crash points, the least visited first.
    fn next_life(&self, random: &mut Rng) -> Life {
        let mut state = self.state();
        let mut points = CrashPoint::ALL;
        random.shuffle(&mut points);
        let visits = |point: &CrashPoint| state.crashes.get(point).copied().unwrap_or_default();
        let rarest = points.into_iter().min_by_key(|point| {
            let (on_their_way, there) = visits(point);
            on_their_way + there
        });
        let missing = points.into_iter().find(|point| visits(point) == (0, 0));
        let point = if state.begun < self.options.kills {
            state.begun += 1;
            rarest.filter(|_| state.begun.is_multiple_of(2))
        } else if let Some(missing) = missing.filter(|_| self.options.kills > 0) {
            state.begun += 1;
            Some(missing)
        } else {
            state.last_lives += 1;
            return Life::Last;
        };
        match point {
            None => Life::KilledAfter {
                at_work: random.u8(0..4) > 0,
                after: Duration::from_millis(random.u64(20..1500)),
            },
            Some(point) => {
                state.crashes.entry(point).or_default().0 += 1;
                let nth = match point {
                    CrashPoint::Parked => random.u32(1..=2),
                    CrashPoint::RolledBack => random.u32(1..=4),
                    _ => random.u32(1..=25),
                };
                Life::CrashesAt(point, nth)
            }
        }
    }

    fn start(&self, place: usize, life: Life) -> anyhow::Result<Child> {
        let Place {
            postgres,
            rabbitmq,
            pid,
            ..
        } = &self.places[place];
        let mut command = Command::new(std::env::current_exe()?);
        command
            .arg("worker")
            .env("CHAOS_NAME", &self.options.name)
            .env("CHAOS_POSTGRES_URL", &postgres.url)
            .env("CHAOS_RABBITMQ_URL", &rabbitmq.url)
            .env("RUST_BACKTRACE", "0") // panics on purpose are no news
            .env_remove("ONLYONCE_CRASH")
            .stdin(Stdio::piped()) // which it watches: it ends when we do
            .stdout(Stdio::null())
            .stderr(self.log(place)?)
            .kill_on_drop(true);
        if let Life::CrashesAt(point, nth) = life {
            command.env("ONLYONCE_CRASH", format!("{}:{nth}", point.as_str()));
        }
        self.places[place]
            .connections_before
            .store(postgres.connections(), Relaxed);
        let child = command.spawn().context("starting a worker")?;
        *lock(pid) = child.id();
        Ok(child)
    }

    fn log(&self, place: usize) -> anyhow::Result<File> {
        let path = self.logs.join(format!("worker-{place}.txt"));
        Ok(OpenOptions::new().create(true).append(true).open(path)?)
    }

    /// Waits for the end of this life, and brings it about where that is asked for.
    async fn live(&self, place: usize, life: Life, child: &mut Child) -> anyhow::Result<ExitStatus> {
        let stop = matches!(life, Life::Last);
        let kill = async {
            match life {
                Life::KilledAfter { at_work, after } => {
                    if at_work {
                        self.places[place].at_work().await;
                    }
                    sleep(after).await;
                }
                Life::CrashesAt(..) => sleep(CRASH_PATIENCE).await,
                Life::Last => std::future::pending().await,
            }
        };
        tokio::select! {
            status = child.wait() => return Ok(status?),
            () = kill => {}
            () = self.stopping.cancelled(), if stop => {
                signal("TERM", child.id()).await?;
                if let Ok(status) = timeout(STOP_PATIENCE, child.wait()).await {
                    return Ok(status?);
                }
                self.problem(format!("worker {place} did not stop within {STOP_PATIENCE:?}"));
            }
        }
        let _hands = self.places[place].hands_off.lock().await;
        child.start_kill()?;
        Ok(child.wait().await?)
    }

    /// Counts how it ended. True if the place is given up.
    fn bury(&self, place: usize, life: Life, status: ExitStatus) -> bool {
        let mut state = self.state();
        if let Life::CrashesAt(point, _) = life {
            let visits = state.crashes.entry(point).or_default();
            visits.0 -= 1;
            if status.signal() == Some(SIGABRT) {
                visits.1 += 1;
                return false;
            }
        }
        let killed = self.killed.load(Relaxed);
        match (life, status.signal()) {
            (Life::Last, None) if status.success() => return true,
            (Life::Last, _) if killed => return true,
            (Life::KilledAfter { .. } | Life::CrashesAt(..), Some(9)) => state.random_kills += 1,
            _ => state
                .problems
                .push(format!("worker {place} ended by itself with {status} ({life:?})")),
        }
        if matches!(life, Life::Last) {
            state.last_lives -= 1;
        }
        killed
    }

    pub(crate) fn stop(&self) {
        self.stopping.cancel();
    }

    /// Ends all processes, whatever they are at.
    pub(crate) fn kill_all(&self) {
        self.killed.store(true, Relaxed);
        for place in &self.places {
            if let Some(pid) = *lock(&place.pid) {
                let _ = std::process::Command::new("kill")
                    .arg("-KILL")
                    .arg(pid.to_string())
                    .status();
            }
        }
    }

    pub(crate) fn kills(&self) -> usize {
        let state = self.state();
        state.random_kills + state.crashes.values().map(|(_, there)| there).sum::<usize>()
    }

    /// No worker is going to be killed any more.
    pub(crate) fn last_lives_begun(&self) -> bool {
        self.state().last_lives == self.places.len()
    }

    /// Fails as soon as something happened that must not.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        match self.state().problems.first() {
            None => Ok(()),
            Some(problem) => bail!("{problem}"),
        }
    }

    fn problem(&self, problem: String) {
        self.state().problems.push(problem);
    }

    /// What a run must not show, even if the ledger is right.
    pub(crate) fn problems(&self) -> Vec<String> {
        let state = self.state();
        let mut problems = state.problems.clone();
        for point in CrashPoint::ALL {
            if self.options.kills > 0 && state.crashes.get(&point).is_none_or(|(_, there)| *there == 0) {
                problems.push(format!("nobody died at the crash point {}", point.as_str()));
            }
        }
        problems
    }

    pub(crate) fn logs(&self) -> &Path {
        &self.logs
    }

    /// Resident memory of each worker, as Linux tells it.
    pub(crate) fn sample_memory(&self) {
        for place in &self.places {
            let Some(pid) = *lock(&place.pid) else { continue };
            let Ok(status) = std::fs::read_to_string(format!("/proc/{pid}/status")) else {
                continue;
            };
            let resident = status.lines().find_map(|line| {
                line.strip_prefix("VmRSS:")?
                    .trim()
                    .strip_suffix(" kB")?
                    .trim()
                    .parse()
                    .ok()
            });
            self.most_memory.fetch_max(resident.unwrap_or(0), Relaxed);
        }
    }

    pub(crate) fn table(&self) -> String {
        let state = self.state();
        let mut table = format!(
            "  killed                           times\n  at random                        {:>5}\n",
            state.random_kills
        );
        for point in CrashPoint::ALL {
            let times = state.crashes.get(&point).map_or(0, |(_, there)| *there);
            let _ = writeln!(table, "  at {:<29} {times:>5}", point.as_str());
        }
        let cut: usize = self.places.iter().map(|place| place.postgres.commits_cut()).sum();
        let _ = writeln!(table, "  commits cut off                  {cut:>5}");
        let most = self.most_memory.load(Relaxed) / 1024;
        let _ = writeln!(table, "  most memory of a worker, MiB     {most:>5}");
        table
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

/// Sends a signal by name.
pub(crate) async fn signal(name: &str, pid: Option<u32>) -> anyhow::Result<()> {
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

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}
