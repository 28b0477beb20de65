//! Consumers and relays that run beside the test, processes that die, and how their effects are waited for.

use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use onlyonce::Health;
use onlyonce::consumer::{ConsumerBuilder, RunError};
use onlyonce::store::{Inbox, Operations, Outgoing};
use onlyonce::testing::CrashPoint;
use onlyonce::{Consumer, Supervisor};
use tokio::runtime::Runtime;
use tokio::sync::Notify;
use tokio::task::{JoinHandle, block_in_place};
use tokio_util::sync::CancellationToken;

use crate::stage::soon;

/// A consumer at work, with its supervisor.
pub(crate) struct Running {
    pub(crate) health: Health,
    stop: CancellationToken,
    task: JoinHandle<Result<(), RunError>>,
}

impl Running {
    pub(crate) fn start<S: Inbox + Outgoing + Operations>(consumer: ConsumerBuilder<S>) -> Self {
        Self::of(Supervisor::builder().consumer(built(consumer)).build().unwrap())
    }

    pub(crate) fn of(supervisor: Supervisor) -> Self {
        // `RUST_LOG=onlyonce=debug` and `--nocapture` show what a test's consumers did.
        let filter = tracing_subscriber::EnvFilter::from_default_env();
        let _ = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_test_writer()
            .try_init();
        let (health, stop) = (supervisor.health(), CancellationToken::new());
        let told = stop.clone();
        let task = tokio::spawn(supervisor.run_until(async move { told.cancelled().await }));
        Self { health, stop, task }
    }

    /// Tells it to stop and does not wait.
    pub(crate) fn tell(&self) {
        self.stop.cancel();
    }

    /// Stops it in good order.
    pub(crate) async fn stop(self) {
        self.stop.cancel();
        self.ended().await.unwrap();
    }

    /// Waits until it has ended, told or not.
    pub(crate) async fn ended(self) -> Result<(), RunError> {
        soon("the end of the consumer", self.task).await.unwrap()
    }

    /// Drops the future of `run_until`.
    pub(crate) async fn drop_it(self) {
        self.task.abort();
        let _ = self.task.await;
    }
}

pub(crate) fn built<S: Inbox + Outgoing + Operations>(consumer: ConsumerBuilder<S>) -> Consumer<S> {
    consumer.build().unwrap()
}

/// A process of its own, as far as a test can tell: it shares nothing, and it can die.
pub(crate) struct Process(Option<Runtime>);

impl Process {
    /// Starts the consumer that `opens` makes; its store has to be opened there as well.
    pub(crate) fn start<S: Inbox + Outgoing + Operations>(
        opens: impl Future<Output = ConsumerBuilder<S>> + Send + 'static,
    ) -> Self {
        Self::of(async move {
            let consumer = built(opens.await);
            let _ = consumer.run_until(std::future::pending()).await;
        })
    }

    /// Starts one whose life this is.
    pub(crate) fn of(life: impl Future<Output = ()> + Send + 'static) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        runtime.spawn(life);
        Self(Some(runtime))
    }

    /// Ends it between two instructions: nothing is finished, nothing is given back.
    pub(crate) fn die(mut self) {
        self.0.take().unwrap().shutdown_background();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// Waits until a condition holds for which there is no signal: what another connection sees.
pub(crate) async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    soon(what, async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}

/// A crash plan that strikes at this point, and the signal that it has.
pub(crate) fn crash_at(
    point: CrashPoint,
) -> (impl Fn(CrashPoint) -> bool + Send + Sync + 'static, Arc<Notify>) {
    let crashed = Arc::new(Notify::new());
    let signal = crashed.clone();
    let plan = move |reached| {
        let now = reached == point;
        if now {
            signal.notify_one();
        }
        now
    };
    (plan, crashed)
}

/// A crash plan that kills nothing: the lane stands still the first time that it comes to this point,
/// until the test lets it go on.
pub(crate) fn halt_at(point: CrashPoint) -> (impl Fn(CrashPoint) -> bool + Send + Sync + 'static, Halt) {
    let (reached, (go_on, wait)) = (Arc::new(Notify::new()), mpsc::channel());
    let signal = reached.clone();
    let wait = Mutex::new(Some(wait));
    let plan = move |at| {
        if at == point
            && let Some(wait) = wait.lock().unwrap().take()
        {
            signal.notify_one();
            let _ = block_in_place(|| wait.recv());
        }
        false
    };
    (plan, Halt { reached, go_on })
}

/// A lane that stands still, or will.
pub(crate) struct Halt {
    reached: Arc<Notify>,
    go_on: mpsc::Sender<()>,
}

impl Halt {
    pub(crate) async fn reached(&self) {
        soon("the halt", self.reached.notified()).await;
    }

    pub(crate) fn go_on(&self) {
        let _ = self.go_on.send(());
    }
}
