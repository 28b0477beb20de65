//! How many at a time: lanes, back-pressure, pause and stop. What happens to one delivery is in
//! `process.rs`.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};

use super::error::RunError;
use super::health::LoopHealth;
use super::lane::{Done, Lane, Seat, Shared};
use super::policy::Ordering;
use super::process::process;
use super::window::{Window, locked};
use crate::delay::spread;
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

impl Shape {
    fn window(&self, ordering: Ordering) -> Window {
        let Plan {
            window, window_bytes, ..
        } = self.plan;
        Window::new(ordering, self.lanes, self.batch, window, window_bytes)
    }
}

/// How often the loop looks at what has no signal of its own, and says that it is alive.
const TICK: Duration = Duration::from_secs(1);

/// How long a broken source is left alone, at first and at most.
const REBUILD_MIN: Duration = Duration::from_millis(100);
const REBUILD_MAX: Duration = Duration::from_secs(5);

/// How long the last settlements may take to reach the broker after the last lane is done.
const FLUSH: Duration = Duration::from_secs(10);

/// Takes deliveries from one source through lanes until the consumer stops.
///
/// A stop, step by step: the source takes no more; what was not started goes back; the lanes end what
/// they have (at the deadline their handlers are cut off and rolled back); the last settlements are
/// flushed; the lanes' connections are given up.
pub(crate) async fn run<S: Inbox>(
    shared: Arc<Shared<S>>,
    mut source: Box<dyn Source>,
    shape: Shape,
    health: Arc<LoopHealth>,
) -> Result<(), RunError> {
    if !start(&shared, source.as_mut(), &shape.plan, &health).await? {
        return Ok(());
    }
    let window = Arc::new(Mutex::new(shape.window(shared.ordering)));
    let mut lanes = Lanes::spawn(&shared, &window, shape.lanes);
    let mut intake = Intake::new(&shared, source, window, shape.stop_when_idle, &health);
    let mut gate = shared.gate.watch();
    let mut tick = interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);

    while !intake.is_over() {
        health.beat();
        intake.hand_out(&lanes);
        tokio::select! {
            biased;
            // Settle before anything new is taken.
            Some(done) = lanes.done.recv() => intake.settle_all(done, &mut lanes).await,
            Some(ended) = lanes.tasks.join_next() => {
                intake.stop().await;
                return Err(RunError::lane_died(&shared.name, ended.err()));
            }
            () = shared.stopping.cancelled(), if !intake.stopping => intake.stop().await,
            _ = gate.changed() => {}
            incoming = intake.source.receive(intake.room()), if intake.listens() => intake.take(incoming).await,
            () = sleep_until(intake.breaks.until), if intake.breaks.waiting() => {}
            _ = tick.tick() => intake.look_around().await,
        }
    }
    lanes.join().await;
    Ok(())
}

/// The source's side of the loop: what comes in, what goes back, and how far a stop has come.
struct Intake<'a, S: Inbox> {
    shared: &'a Shared<S>,
    health: &'a LoopHealth,
    source: Box<dyn Source>,
    /// Shared with the lanes, for a moment at a time.
    window: Arc<Mutex<Window>>,
    breaks: Breaks,
    /// Everything was given back because a pause went on for too long.
    given_back: bool,
    stopping: bool,
    /// The source has nothing more to say.
    closed: bool,
    /// Since when a stop waits for the source alone.
    drained: Option<Instant>,
    last_arrival: Instant,
    stop_when_idle: Option<Duration>,
}

impl<'a, S: Inbox> Intake<'a, S> {
    fn new(
        shared: &'a Shared<S>,
        source: Box<dyn Source>,
        window: Arc<Mutex<Window>>,
        stop_when_idle: Option<Duration>,
        health: &'a LoopHealth,
    ) -> Self {
        Self {
            shared,
            health,
            source,
            window,
            breaks: Breaks {
                in_a_row: 0,
                until: Instant::now(),
            },
            given_back: false,
            stopping: false,
            closed: false,
            drained: None,
            last_arrival: Instant::now(),
            stop_when_idle,
        }
    }

    fn window(&self) -> MutexGuard<'_, Window> {
        locked(&self.window)
    }

    /// Gives work to idle lanes. A lane that ends its work takes the next by itself.
    fn hand_out(&mut self, lanes: &Lanes) {
        if self.shared.takes_work() {
            let mut window = self.window();
            while let Some((lane, work)) = window.assign() {
                lanes.give(lane, work);
            }
        }
    }

    /// Without room the loop still listens: what is lost must not be started.
    fn room(&self) -> usize {
        if self.stopping || !self.shared.gate.is_open() {
            0
        } else {
            self.window().room()
        }
    }

    fn listens(&self) -> bool {
        !self.closed && !self.breaks.waiting()
    }

    /// Whether a stop is complete, or has waited long enough for the source.
    fn is_over(&mut self) -> bool {
        if !self.stopping || !self.window().is_empty() {
            return false;
        }
        let waited = self.drained.get_or_insert_with(Instant::now).elapsed();
        if !self.closed && waited >= FLUSH {
            tracing::warn!(
                consumer = self.shared.name,
                "the source did not confirm the last acks in time; they come again as duplicates"
            );
        }
        self.closed || waited >= FLUSH
    }

    async fn settle_all(&mut self, first: Done, lanes: &mut Lanes) {
        self.last_arrival = Instant::now();
        let mut settlements = self.done(first);
        while let Ok(more) = lanes.done.try_recv() {
            settlements.extend(self.done(more));
        }
        // The lanes go on while the source is told.
        self.hand_out(lanes);
        self.settle(settlements).await;
    }

    fn done(&mut self, done: Done) -> Vec<Settlement> {
        let Done {
            lane,
            mut settlements,
        } = done;
        if let Some(lane) = lane {
            self.window().finish(lane, &mut settlements);
        }
        settlements
    }

    async fn take(&mut self, incoming: Result<Incoming, SourceError>) {
        match incoming {
            Ok(Incoming::Deliveries(deliveries)) => {
                self.last_arrival = Instant::now();
                self.given_back = false;
                self.breaks.over(&self.shared.name);
                telemetry::received(&self.shared.name, self.shared.system, deliveries.len());
                self.window().admit(deliveries);
            }
            Ok(Incoming::Lost(receipts)) => {
                let unstarted = self.window().lose(&receipts);
                self.settle(unstarted).await;
            }
            Ok(Incoming::Closed) => {
                self.closed = true;
                self.shared.stopping.cancel();
            }
            Err(error) if self.stopping => {
                tracing::debug!(
                    consumer = self.shared.name, %error,
                    "the source broke while it stopped; what was not acked comes again"
                );
                self.window().lose_all();
                self.closed = true;
            }
            Err(error) => self.broke(&error),
        }
    }

    async fn settle(&mut self, settlements: Vec<Settlement>) {
        if !settlements.is_empty()
            && let Err(error) = self.source.settle(settlements).await
        {
            self.broke(&error);
        }
    }

    /// Every receipt is void: what was not started must not start, it comes again.
    fn broke(&mut self, error: &SourceError) {
        self.window().lose_all();
        self.health.broken(error);
        telemetry::source_broke(&self.shared.name, self.shared.system);
        self.breaks.note(error, &self.shared.name);
    }

    async fn stop(&mut self) {
        self.stopping = true;
        if let Err(error) = self.source.stop().await {
            tracing::debug!(consumer = self.shared.name, %error, "the source broke while it was stopped");
        }
        let unstarted = self.window().release_waiting();
        self.settle(unstarted).await;
    }

    /// Looks at what has no signal of its own.
    async fn look_around(&mut self) {
        let source = self.source.health();
        telemetry::stuck(&self.shared.name, self.shared.system, source.stuck);
        self.health.source(source);
        if self.shared.gate.overdue() && !self.given_back {
            self.given_back = true;
            let waiting = self.window().release_waiting();
            tracing::warn!(
                consumer = self.shared.name,
                given_back = waiting.len(),
                "the pause is long: everything is given back"
            );
            self.settle(waiting).await;
            if let Err(error) = self.source.pause().await {
                self.broke(&error);
            }
        }
        if let Some(limit) = self.stop_when_idle
            && self.window().is_empty()
            && self.shared.gate.is_open()
            && self.last_arrival.elapsed() >= limit
        {
            self.shared.stopping.cancel();
        }
    }
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

/// How often in a row the source broke, and until when it is left alone.
struct Breaks {
    in_a_row: u32,
    until: Instant,
}

impl Breaks {
    fn waiting(&self) -> bool {
        self.in_a_row > 0 && Instant::now() < self.until
    }

    fn note(&mut self, error: &SourceError, consumer: &str) {
        self.in_a_row += 1;
        let pace = if error.is_fatal() {
            REBUILD_MAX
        } else {
            spread(REBUILD_MIN, REBUILD_MAX, self.in_a_row)
        };
        self.until = Instant::now() + pace;
        if self.in_a_row == 1 {
            tracing::warn!(consumer, %error, "the source broke; it is rebuilt until it works");
        }
    }

    fn over(&mut self, consumer: &str) {
        if self.in_a_row > 0 {
            tracing::info!(consumer, breaks = self.in_a_row, "the source works again");
            self.in_a_row = 0;
        }
    }
}

/// The lanes' tasks and the two channels by which they are spoken to.
struct Lanes {
    work: Vec<mpsc::Sender<Vec<Delivery>>>,
    done: mpsc::UnboundedReceiver<Done>,
    tasks: JoinSet<()>,
}

impl Lanes {
    fn spawn<S: Inbox>(shared: &Arc<Shared<S>>, window: &Arc<Mutex<Window>>, count: usize) -> Self {
        let (report, done) = mpsc::unbounded_channel();
        let mut tasks = JoinSet::new();
        let work = (0..count)
            .map(|index| {
                let (give, mut take) = mpsc::channel(1);
                let report = report.clone();
                let window = window.clone();
                let mut lane = Lane::new(shared.clone(), Seat { index, window });
                tasks.spawn(async move {
                    while let Some(mut deliveries) = take.recv().await {
                        loop {
                            let settlements = process(&mut lane, deliveries).await;
                            let (done, next) = lane.finish(settlements);
                            if report.send(done).is_err() {
                                return;
                            }
                            match next {
                                Some(work) => deliveries = work,
                                None => break,
                            }
                        }
                        lane.rest().await;
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
