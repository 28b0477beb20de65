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
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::broker::Entrance;
use super::events::Keys;
use super::link::Link;
use super::options::Options;
use crate::processes::{logs_of, signal};

/// A worker that has not come to its crash point by then is killed where it is.
const CRASH_PATIENCE: Duration = Duration::from_secs(15);
/// A worker that has not begun to work by then has nothing to do, or is cut off.
const WORK_PATIENCE: Duration = Duration::from_secs(6);
/// How long an orderly stop may take.
const STOP_PATIENCE: Duration = Duration::from_secs(40);
const SIGABRT: i32 = 6;

pub(super) struct Crew {
    options: Arc<Options>,
    /// Those of the workers, and behind them that of the guests.
    places: Vec<Place>,
    /// Where a worker can die: what has a key is never parked.
    points: Vec<CrashPoint>,
    logs: PathBuf,
    state: Mutex<State>,
    most_memory: AtomicU64,
    stopping: CancellationToken,
    killed: AtomicBool,
}

/// Where one worker after the other lives.
pub(super) struct Place {
    pub(super) postgres: Link,
    pub(super) broker: Link,
    pub(super) pid: Mutex<Option<u32>>,
    /// The connections to the database before this worker's first.
    connections_before: AtomicU64,
    /// Held while the process must not be killed.
    pub(super) hands_off: tokio::sync::Mutex<()>,
    /// Asks the process to stop in good order, so that another takes its place.
    relief: Notify,
}

#[derive(Default)]
struct State {
    begun: usize,
    random_kills: usize,
    /// Lives that are on their way to this crash point, and those that ended there.
    crashes: HashMap<CrashPoint, (usize, usize)>,
    last_lives: usize,
    /// Ends in good order with a successor, and those of guests.
    reliefs: usize,
    visits: usize,
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
    /// It works until all is done, or until it is relieved.
    Last,
    /// It is one more for a while.
    Guest,
}

impl Place {
    /// Waits until the worker has begun to work: of its connections two are the framework's reserve.
    /// It may be that there is nothing to do for it.
    pub(super) async fn at_work(&self) {
        let begun = async {
            while self.postgres.connections() < self.connections_before.load(Relaxed) + 4 {
                sleep(Duration::from_millis(10)).await;
            }
        };
        let _ = timeout(WORK_PATIENCE, begun).await;
    }
}

impl Crew {
    /// With a link to the database and one to the broker for each place.
    pub(super) async fn hire(
        options: Arc<Options>,
        postgres: &str,
        entrances: Vec<Entrance>,
        keys: Keys,
    ) -> anyhow::Result<Self> {
        let logs = logs_of(&options.name);
        std::fs::create_dir_all(&logs).with_context(|| format!("{}", logs.display()))?;
        let mut places = Vec::new();
        for entrance in entrances {
            places.push(Place {
                postgres: Link::before(postgres, 0).await?,
                broker: Link::before(&entrance.url, entrance.port).await?,
                pid: Mutex::default(),
                connections_before: AtomicU64::new(0),
                hands_off: tokio::sync::Mutex::default(),
                relief: Notify::new(),
            });
        }
        Ok(Self {
            options,
            places,
            points: CrashPoint::ALL
                .into_iter()
                .filter(|&point| point != CrashPoint::Parked || keys != Keys::All)
                .collect(),
            logs,
            state: Mutex::default(),
            most_memory: AtomicU64::new(0),
            stopping: CancellationToken::new(),
            killed: AtomicBool::new(false),
        })
    }

    /// All lives of all workers, until [`stop`](Self::stop).
    pub(super) async fn work(self: Arc<Self>) -> anyhow::Result<()> {
        let mut places = JoinSet::new();
        for place in 0..self.options.workers {
            places.spawn(self.clone().live_on(place));
        }
        while let Some(ended) = places.join_next().await {
            ended??;
        }
        Ok(())
    }

    /// A worker stops in good order, and its successor begins. Only for last lives.
    pub(super) async fn restart(&self, place: usize) -> anyhow::Result<()> {
        let before = self.state().reliefs;
        self.places[place].relief.notify_one();
        while self.state().reliefs == before || !self.last_lives_begun() {
            self.check()?;
            sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// A guest joins, stays for so long, and leaves in good order.
    pub(super) async fn visit(&self, stay: Duration) -> anyhow::Result<()> {
        let place = self.options.workers;
        let mut child = self.start(place, Life::Guest)?;
        let _leash = child.stdin.take();
        sleep(stay).await;
        let status = self.ask_to_stop(place, &mut child).await?;
        *lock(&self.places[place].pid) = None;
        self.state().visits += 1;
        if !status.is_some_and(|status| status.success()) && !self.killed.load(Relaxed) {
            self.problem(format!("a guest ended with {status:?}"));
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
        let mut points = self.points.clone();
        random.shuffle(&mut points);
        let visits = |point: &CrashPoint| state.crashes.get(point).copied().unwrap_or_default();
        let rarest = points.iter().copied().min_by_key(|point| {
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
            broker,
            pid,
            ..
        } = &self.places[place];
        let mut command = Command::new(std::env::current_exe()?);
        command
            .arg("worker")
            .args(&self.options.of_broker)
            .env("CHAOS_NAME", &self.options.name)
            .env("CHAOS_POSTGRES_URL", &postgres.url)
            .env("CHAOS_BROKER_URL", &broker.url)
            .env("RUST_BACKTRACE", "0") // panics on purpose are no news
            .env_remove("ONLYONCE_CRASH")
            .stdin(Stdio::piped()) // which it watches: it ends when we do
            .stdout(Stdio::null())
            .stderr(self.log(place)?)
            .kill_on_drop(true);
        if let Life::CrashesAt(point, nth) = life {
            command.env("ONLYONCE_CRASH", format!("{}:{nth}", point.as_str()));
        }
        if !matches!(life, Life::Guest) {
            command.env("CHAOS_MEMBER", format!("worker-{place}"));
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
        let last = matches!(life, Life::Last);
        let stopped = async {
            tokio::select! {
                () = self.stopping.cancelled() => {}
                () = self.places[place].relief.notified() => {}
            }
        };
        let kill = async {
            match life {
                Life::KilledAfter { at_work, after } => {
                    if at_work {
                        self.places[place].at_work().await;
                    }
                    sleep(after).await;
                }
                Life::CrashesAt(..) => sleep(CRASH_PATIENCE).await,
                Life::Last | Life::Guest => std::future::pending().await,
            }
        };
        tokio::select! {
            status = child.wait() => return Ok(status?),
            () = kill => {}
            () = stopped, if last => {
                if let Some(status) = self.ask_to_stop(place, child).await? {
                    return Ok(status);
                }
            }
        }
        let _hands = self.places[place].hands_off.lock().await;
        child.start_kill()?;
        Ok(child.wait().await?)
    }

    /// None if it does not stop within the time that it has for that; then it is killed, too.
    async fn ask_to_stop(&self, place: usize, child: &mut Child) -> anyhow::Result<Option<ExitStatus>> {
        signal("TERM", child.id()).await?;
        if let Ok(status) = timeout(STOP_PATIENCE, child.wait()).await {
            return Ok(Some(status?));
        }
        self.problem(format!("worker {place} did not stop within {STOP_PATIENCE:?}"));
        Ok(None)
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
            (Life::Last, None) if status.success() && self.stopping.is_cancelled() => return true,
            (Life::Last, None) if status.success() => state.reliefs += 1,
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

    pub(super) fn stop(&self) {
        self.stopping.cancel();
    }

    /// Ends all processes, whatever they are at.
    pub(super) fn kill_all(&self) {
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

    pub(super) fn kills(&self) -> usize {
        let state = self.state();
        state.random_kills + state.crashes.values().map(|(_, there)| there).sum::<usize>()
    }

    /// Kills and orderly ends: how much of what is to be done has been done.
    pub(super) fn ends(&self) -> usize {
        let kills = self.kills();
        let state = self.state();
        kills + state.reliefs + state.visits
    }

    pub(super) fn reliefs(&self) -> usize {
        self.state().reliefs
    }

    pub(super) fn visits(&self) -> usize {
        self.state().visits
    }

    /// No worker is going to be killed any more.
    pub(super) fn last_lives_begun(&self) -> bool {
        self.state().last_lives == self.options.workers
    }

    /// The places of those that are to be disturbed.
    pub(super) fn workers(&self) -> &[Place] {
        &self.places[..self.options.workers]
    }

    /// Fails as soon as something happened that must not.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        match self.state().problems.first() {
            None => Ok(()),
            Some(problem) => bail!("{problem}"),
        }
    }

    fn problem(&self, problem: String) {
        self.state().problems.push(problem);
    }

    /// What a run must not show, even if the ledger is right.
    pub(super) fn problems(&self) -> Vec<String> {
        let state = self.state();
        let mut problems = state.problems.clone();
        for &point in &self.points {
            if self.options.kills > 0 && state.crashes.get(&point).is_none_or(|(_, there)| *there == 0) {
                problems.push(format!("nobody died at the crash point {}", point.as_str()));
            }
        }
        problems
    }

    pub(super) fn logs(&self) -> &Path {
        &self.logs
    }

    /// Resident memory of each worker, as Linux tells it.
    pub(super) fn sample_memory(&self) {
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

    pub(super) fn table(&self) -> String {
        let state = self.state();
        let mut table = format!(
            "  killed                           times\n  at random                        {:>5}\n",
            state.random_kills
        );
        for &point in &self.points {
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

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}
