//! Whole consumers on the source under test: one life of a process, from start to stop or death.

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use onlyonce::store::Operations as _;
use onlyonce::testing::CrashPoint;
use onlyonce::{Bytes, Consumer, Context, Event, Handler, HandlerError, RetryPolicy, async_trait};
use tokio::sync::Notify;

use super::SourceHarness;
use super::tap::{Tap, WINDOW};
use crate::broken::ensure;
use crate::store::{Db, StoreHarness};
use crate::{Broken, CONSUMER, Result};

/// How a life ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    /// At its crash point: nothing was cleaned up.
    Died,
    /// Because nothing came for a while.
    Idle,
}

/// The database of the effects, and the consumer's lives on it.
pub(super) struct Lives<'h, H: SourceHarness> {
    harness: &'h H,
    pub(super) stage: H::Stage,
}

impl<'h, H: SourceHarness> Lives<'h, H> {
    pub(super) async fn new(harness: &'h H) -> Result<Self> {
        let stage = harness.stage().await?;
        stage.store().await?.migrate().await?;
        let effects = stage.table("effects");
        stage
            .sql(&format!("CREATE TABLE {effects} (id TEXT NOT NULL)"))
            .await?;
        Ok(Self { harness, stage })
    }

    /// The handler: one effect per run.
    pub(super) fn handler(&self) -> Applies<H::Stage> {
        Applies {
            effects: self.stage.table("effects"),
            entered: None,
            stage: PhantomData,
        }
    }

    /// How long nothing has to come before a consumer believes that there is no more.
    fn idle(&self) -> Duration {
        let can = self.harness.capabilities();
        can.quiet.max(Duration::from_millis(500)) + can.redelivered_after
    }

    /// Runs a consumer in a runtime of its own until it is idle, or until it reaches `crash` for the
    /// given time. Then the runtime is thrown away with all that was open, as by a killed process;
    /// `at_death` is asked first, while the process stands still.
    pub(super) fn live(
        &self,
        crash: Option<(CrashPoint, u64)>,
        at_death: impl AsyncFnOnce() -> Result,
    ) -> Result<Ended> {
        let limit = self.harness.capabilities().patience * 2 + self.idle();
        tokio::task::block_in_place(|| {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()?;
            let ended = runtime.block_on(async {
                let (died, passed) = (Arc::new(Notify::new()), AtomicU64::new(0));
                let dies = died.clone();
                let consumer = Consumer::builder(CONSUMER, self.stage.store().await?)
                    .source(self.harness.source())
                    .handler(self.handler())
                    .retry(RetryPolicy::none())
                    .window(WINDOW)
                    .stop_when_idle(self.idle())
                    .crash_when(move |point| {
                        let here = crash.is_some_and(|(at, nth)| {
                            point == at && passed.fetch_add(1, Ordering::SeqCst) + 1 == nth
                        });
                        if here {
                            dies.notify_one();
                        }
                        here
                    })
                    .build()?;
                tokio::select! {
                    biased;
                    () = died.notified() => {
                        at_death().await?;
                        Ok(Ended::Died)
                    }
                    ended = consumer.run_until(std::future::pending()) => {
                        ended?;
                        Ok(Ended::Idle)
                    }
                    () = tokio::time::sleep(limit) => {
                        Err(Broken::new(format!("a consumer was not done after {limit:?}")))
                    }
                }
            });
            runtime.shutdown_timeout(Duration::from_secs(1));
            ended
        })
    }

    /// Runs consumers that nothing happens to until all is done.
    pub(super) fn live_on(&self) -> Result {
        match self.live(None, async || Ok(()))? {
            Ended::Idle => Ok(()),
            Ended::Died => Err(Broken::new("a consumer died without a cause")),
        }
    }

    /// Every event was applied once, nothing failed, and nothing is left with the broker.
    pub(super) async fn all_applied_once(&self, ids: &[String]) -> Result {
        let effects = self.stage.table("effects");
        for id in ids {
            let times = self
                .stage
                .number(&format!("SELECT count(*) FROM {effects} WHERE id = '{id}'"))
                .await?;
            ensure!(times > 0, "{id} was acked and not applied: it is lost");
            ensure!(times == 1, "{id} was applied {times} times");
        }
        let inbox = self.stage.table("inbox");
        let failed = self
            .stage
            .number(&format!(
                "SELECT count(*) FROM {inbox} WHERE attempts > 0 OR state = 'dead'"
            ))
            .await?;
        ensure!(failed == 0, "{failed} events count as failed, and none did");
        Tap::open(self.harness, WINDOW)
            .await?
            .quiet("it was applied and should have been acked")
            .await
    }
}

/// A handler that writes the event's id.
pub(super) struct Applies<D> {
    effects: String,
    entered: Option<Entered>,
    stage: PhantomData<fn() -> D>,
}

/// Stops the handler in the middle of one run.
struct Entered {
    nth: u64,
    runs: AtomicU64,
    here: Arc<Notify>,
    go_on: Arc<Notify>,
}

impl<D> Applies<D> {
    /// At its `nth` run the handler says that it is there, and waits until it may go on.
    pub(super) fn pausing(mut self, nth: u64, here: Arc<Notify>, go_on: Arc<Notify>) -> Self {
        let runs = AtomicU64::new(0);
        self.entered = Some(Entered {
            nth,
            runs,
            here,
            go_on,
        });
        self
    }
}

#[async_trait]
impl<D: StoreHarness> Handler<Db<D>> for Applies<D> {
    type Payload = Bytes;

    async fn handle(
        &self,
        cx: &mut Context<'_, Db<D>>,
        event: Event<Bytes>,
    ) -> std::result::Result<(), HandlerError> {
        // The ids are the suite's own: nothing in them needs quoting.
        let sql = format!("INSERT INTO {} VALUES ('{}')", self.effects, event.identity.id);
        D::sql_in(cx.tx(), &sql).await?;
        if let Some(entered) = &self.entered
            && entered.runs.fetch_add(1, Ordering::SeqCst) + 1 == entered.nth
        {
            entered.here.notify_one();
            entered.go_on.notified().await;
        }
        Ok(())
    }
}
