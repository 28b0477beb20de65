//! How many at a time: lanes, back-pressure, pause and stop. What happens to one delivery is in
//! `process.rs`.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};

use super::RunError;
use super::lane::{Lane, Shared};
use super::policy::spread;
use super::process::process;
use super::window::Window;
use crate::health::LoopHealth;
use crate::source::{Delivery, Incoming, Plan, Settlement, Source, SourceError};
use crate::store::Inbox;
use crate::telemetry;

/// How a loop is laid out.
pub(crate) struct Shape {
    pub(crate) lanes: usize,
    pub(crate) batch: usize,
    pub(crate) plan: Plan,
    /// Stop when nothing has arrived for this long and nothing is in hand.
    pub(crate) stop_when_idle: Option<Duration>,
}

/// How often the loop looks at what has no signal of its own, and says that it is alive.
const TICK: Duration = Duration::from_secs(1);

/// How long a broken source is left alone, at first and at most.
const REBUILD_MIN: Duration = Duration::from_millis(100);
const REBUILD_MAX: Duration = Duration::from_secs(5);

/// How long the last settlements may take to reach the broker after the last lane is done.
const FLUSH: Duration = Duration::from_secs(10);

/// Takes deliveries from one source through lanes until the consumer stops.
pub(crate) async fn run<S: Inbox>(
    shared: Arc<Shared<S>>,
    mut source: Box<dyn Source>,
    shape: Shape,
    health: Arc<LoopHealth>,
) -> Result<(), RunError> {
    if !start(&shared, source.as_mut(), &shape.plan, &health).await? {
        return Ok(());
    }
    let mut lanes = Lanes::spawn(&shared, shape.lanes);
    let mut window = Window::new(
        shared.ordering,
        shape.lanes,
        shape.batch,
        shape.plan.window,
        shape.plan.window_bytes,
    );
    let mut gate = shared.gate.watch();
    let mut tick = interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut breaks = Breaks::default();
    let mut given_back = false;
    let mut stopping = false;
    let mut drained: Option<Instant> = None;
    let mut last_arrival = Instant::now();

    loop {
        health.beat();
        while let Some((lane, work)) = shared.gate.is_open().then(|| window.assign()).flatten() {
            lanes.give(lane, work);
        }
        if stopping && window.is_empty() && drained.is_none() {
            drained = Some(Instant::now());
        }
        let room = window.room();
        let receiving = stopping || (shared.gate.is_open() && room > 0 && !breaks.waiting());

        tokio::select! {
            biased;
            // Settle before anything new is taken.
            Some((lane, mut settlements)) = lanes.done.recv() => {
                window.finish(lane, &mut settlements);
                while let Ok((lane, mut more)) = lanes.done.try_recv() {
                    window.finish(lane, &mut more);
                    settlements.extend(more);
                }
                last_arrival = Instant::now();
                // The lanes go on while the source is told.
                while let Some((lane, work)) = shared.gate.is_open().then(|| window.assign()).flatten() {
                    lanes.give(lane, work);
                }
                settle(source.as_mut(), settlements, &mut window, &mut breaks, &shared, &health).await;
            }
            Some(ended) = lanes.tasks.join_next() => {
                let _ = source.stop().await;
                return Err(RunError::lane_died(&shared.name, ended.err()));
            }
            _ = shared.stopping.cancelled(), if !stopping => {
                stopping = true;
                if let Err(error) = source.stop().await {
                    tracing::debug!(consumer = shared.name, %error, "the source broke while it was stopped");
                }
                let unstarted = window.release_waiting();
                settle(source.as_mut(), unstarted, &mut window, &mut breaks, &shared, &health).await;
            }
            changed = gate.changed() => {
                if changed.is_ok() && shared.gate.is_open() {
                    given_back = false;
                }
            }
            incoming = source.receive(room.max(1)), if receiving => match incoming {
                Ok(Incoming::Deliveries(deliveries)) => {
                    breaks.over(&shared);
                    last_arrival = Instant::now();
                    telemetry::received(&shared.name, shared.system, deliveries.len());
                    window.admit(deliveries);
                }
                Ok(Incoming::Lost(receipts)) => {
                    let followers = window.lose(&receipts);
                    settle(source.as_mut(), followers, &mut window, &mut breaks, &shared, &health).await;
                }
                Ok(Incoming::Closed) => {
                    shared.stopping.cancel();
                    if window.is_empty() {
                        break;
                    }
                    stopping = true;
                }
                Err(error) if stopping => {
                    tracing::debug!(consumer = shared.name, %error, "the source broke while stopping; what was not acked comes again");
                    if window.is_empty() {
                        break;
                    }
                    window.lose_all();
                }
                Err(error) => breaks.note(&error, &mut window, &shared, &health),
            },
            _ = sleep_until(breaks.until()), if breaks.waiting() => {}
            _ = tick.tick() => {
                health.source(source.health());
                if shared.gate.overdue() && !given_back {
                    given_back = true;
                    let waiting = window.release_waiting();
                    tracing::warn!(consumer = shared.name, given_back = waiting.len(), "the pause is long: everything is given back");
                    settle(source.as_mut(), waiting, &mut window, &mut breaks, &shared, &health).await;
                    if let Err(error) = source.pause().await {
                        breaks.note(&error, &mut window, &shared, &health);
                    }
                }
                if let Some(limit) = shape.stop_when_idle
                    && window.is_empty() && last_arrival.elapsed() >= limit && shared.gate.is_open()
                {
                    shared.stopping.cancel();
                }
            }
        }
        if drained.is_some_and(|since| since.elapsed() >= FLUSH) {
            tracing::warn!(
                consumer = shared.name,
                "the source did not confirm the last acks in time; they come again as duplicates"
            );
            break;
        }
    }
    lanes.join().await;
    Ok(())
}

/// Starts the source, for as long as it takes. `false`: the consumer was stopped before it could.
async fn start<S: Inbox>(
    shared: &Shared<S>,
    source: &mut dyn Source,
    plan: &Plan,
    health: &LoopHealth,
) -> Result<bool, RunError> {
    for attempt in 1.. {
        health.beat();
        let started = tokio::select! {
            started = source.start(plan) => started,
            _ = shared.stopping.cancelled() => return Ok(false),
        };
        match started {
            Ok(()) => break,
            Err(error) if error.is_fatal() => return Err(RunError::source(&shared.name, error)),
            Err(error) => {
                health.broken(&error);
                if attempt == 1 {
                    tracing::warn!(consumer = shared.name, %error, "the source does not start yet; trying until it does");
                }
                tokio::select! {
                    _ = tokio::time::sleep(spread(REBUILD_MIN, REBUILD_MAX, attempt)) => {}
                    _ = shared.stopping.cancelled() => return Ok(false),
                }
            }
        }
    }
    health.started();
    health.source(source.health());
    tracing::info!(consumer = shared.name, system = shared.system, "receiving");
    Ok(true)
}

async fn settle<S: Inbox>(
    source: &mut dyn Source,
    settlements: Vec<Settlement>,
    window: &mut Window,
    breaks: &mut Breaks,
    shared: &Shared<S>,
    health: &LoopHealth,
) {
    if settlements.is_empty() {
        return;
    }
    if let Err(error) = source.settle(settlements).await {
        breaks.note(&error, window, shared, health);
    }
}

/// How often in a row the source broke, and until when it is left alone.
struct Breaks {
    in_a_row: u32,
    until: Instant,
}

impl Default for Breaks {
    fn default() -> Self {
        Self {
            in_a_row: 0,
            until: Instant::now(),
        }
    }
}

impl Breaks {
    fn waiting(&self) -> bool {
        self.in_a_row > 0 && Instant::now() < self.until
    }

    fn until(&self) -> Instant {
        self.until
    }

    fn note<S: Inbox>(
        &mut self,
        error: &SourceError,
        window: &mut Window,
        shared: &Shared<S>,
        health: &LoopHealth,
    ) {
        // Every receipt is void: what was not started must not start, it comes again.
        window.lose_all();
        self.in_a_row += 1;
        let pace = if error.is_fatal() {
            REBUILD_MAX
        } else {
            spread(REBUILD_MIN, REBUILD_MAX, self.in_a_row)
        };
        self.until = Instant::now() + pace;
        health.broken(error);
        telemetry::source_broke(&shared.name, shared.system);
        if self.in_a_row == 1 {
            tracing::warn!(consumer = shared.name, %error, "the source broke; it is rebuilt until it works");
        }
    }

    fn over<S: Inbox>(&mut self, shared: &Shared<S>) {
        if self.in_a_row > 0 {
            tracing::info!(
                consumer = shared.name,
                breaks = self.in_a_row,
                "the source works again"
            );
            self.in_a_row = 0;
        }
    }
}

/// The lanes' tasks and the two channels by which they are spoken to.
struct Lanes {
    work: Vec<mpsc::Sender<Vec<Delivery>>>,
    done: mpsc::UnboundedReceiver<(usize, Vec<Settlement>)>,
    tasks: JoinSet<()>,
}

impl Lanes {
    fn spawn<S: Inbox>(shared: &Arc<Shared<S>>, count: usize) -> Self {
        let (report, done) = mpsc::unbounded_channel();
        let mut tasks = JoinSet::new();
        let work = (0..count)
            .map(|index| {
                let (give, mut take) = mpsc::channel(1);
                let (report, mut lane) = (report.clone(), Lane::new(shared.clone()));
                tasks.spawn(async move {
                    while let Some(deliveries) = take.recv().await {
                        let settlements = process(&mut lane, deliveries).await;
                        if report.send((index, settlements)).is_err() {
                            return;
                        }
                    }
                });
                give
            })
            .collect();
        Self { work, done, tasks }
    }

    /// An idle lane has room for one piece of work; one that died is noticed by its task's end.
    fn give(&self, lane: usize, work: Vec<Delivery>) {
        let _ = self.work[lane].try_send(work);
    }

    async fn join(mut self) {
        self.work.clear();
        let all = async { while self.tasks.join_next().await.is_some() {} };
        let _ = timeout(FLUSH, all).await;
    }
}
