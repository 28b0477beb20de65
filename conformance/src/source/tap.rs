//! A source in the hand of a promise: takes from it with a deadline and notices what no source may do.

use std::collections::{BTreeMap, HashSet};
use std::task::Poll;
use std::time::Duration;

use onlyonce::event::{Headers, RawEvent};
use onlyonce::source::{Delivery, Incoming, Receipt, Settlement, Source as _, SourceError};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::{HarnessCapabilities, SourceHarness};
use crate::broken::ensure;
use crate::{Broken, Result};

/// The window of most promises.
pub(super) const WINDOW: usize = 16;

/// How long a source that broke is left alone.
const REBUILD: Duration = Duration::from_millis(100);

pub(super) struct Tap<'h, H: SourceHarness> {
    pub(super) source: H::Source,
    pub(super) can: HarnessCapabilities,
    harness: &'h H,
    given_out: HashSet<Receipt>,
    /// What the source said when it broke last.
    complaint: Option<String>,
}

impl<'h, H: SourceHarness> Tap<'h, H> {
    /// A started source on the harness's queue.
    pub(super) async fn open(harness: &'h H, window: usize) -> Result<Self> {
        let mut tap = Self {
            source: harness.source(),
            can: harness.capabilities(),
            harness,
            given_out: HashSet::new(),
            complaint: None,
        };
        let plan = harness.plan(window);
        let until = tap.deadline();
        loop {
            match timeout_at(until, tap.source.start(&plan)).await {
                Ok(Ok(())) => return Ok(tap),
                Ok(Err(error)) => tap.broke(&error, "start").await?,
                Err(_) => {
                    return Err(Broken::new(format!(
                        "the source did not start{}",
                        tap.complaint()
                    )));
                }
            }
        }
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.can.patience + self.can.redelivered_after
    }

    /// Takes exactly `count` deliveries, as many at once as the source likes.
    pub(super) async fn take(&mut self, count: usize) -> Result<Vec<Delivery>> {
        self.take_by(count, count).await
    }

    /// Takes exactly `count` deliveries, at most `max` at once.
    pub(super) async fn take_by(&mut self, count: usize, max: usize) -> Result<Vec<Delivery>> {
        let until = self.deadline();
        let mut taken: Vec<Delivery> = Vec::new();
        while taken.len() < count {
            let max = max.min(count - taken.len());
            let Ok(incoming) = timeout_at(until, self.source.receive(max)).await else {
                return Err(Broken::new(format!(
                    "{} of {count} deliveries came within {:?}: {:?}{}",
                    taken.len(),
                    self.can.patience + self.can.redelivered_after,
                    ids(&taken),
                    self.complaint()
                )));
            };
            match incoming {
                Ok(Incoming::Deliveries(deliveries)) => {
                    self.look_at(&deliveries, max)?;
                    taken.extend(deliveries);
                }
                Ok(Incoming::Lost(lost)) => taken.retain(|delivery| !lost.contains(&delivery.receipt)),
                Ok(other) => {
                    return Err(Broken::new(format!(
                        "receive said {other:?} where {count} deliveries were due"
                    )));
                }
                // All that it gave out is void.
                Err(error) => {
                    taken.clear();
                    self.broke(&error, "receive").await?;
                }
            }
        }
        Ok(taken)
    }

    /// One call of `receive`, not awaited to its end but dropped after `polls` polls or a while.
    pub(super) async fn receive_and_drop(
        &mut self,
        max: usize,
        polls: usize,
        while_: Duration,
    ) -> Result<Vec<Delivery>> {
        let mut left = polls;
        let polled = {
            let receiving = self.source.receive(max);
            tokio::pin!(receiving);
            let polled = std::future::poll_fn(|cx| {
                let polled = receiving.as_mut().poll(cx);
                left -= 1;
                if left == 0 || polled.is_ready() {
                    Poll::Ready(polled)
                } else {
                    Poll::Pending
                }
            });
            timeout(while_, polled).await.unwrap_or(Poll::Pending)
        };
        match polled {
            Poll::Pending | Poll::Ready(Ok(Incoming::Lost(_))) => Ok(Vec::new()),
            Poll::Ready(Ok(Incoming::Deliveries(deliveries))) => {
                self.look_at(&deliveries, max)?;
                Ok(deliveries)
            }
            Poll::Ready(Ok(other)) => Err(Broken::new(format!("receive said {other:?} unasked"))),
            Poll::Ready(Err(error)) => Err(Broken::new(format!("the source broke without a cause: {error}"))),
        }
    }

    /// What holds of every batch of deliveries.
    pub(super) fn look_at(&mut self, deliveries: &[Delivery], max: usize) -> Result {
        ensure!(!deliveries.is_empty(), "receive returned without a delivery");
        ensure!(
            deliveries.len() <= max,
            "receive({max}) returned {} deliveries",
            deliveries.len()
        );
        for delivery in deliveries {
            ensure!(
                self.given_out.insert(delivery.receipt),
                "{:?} was given out twice, the second time for {}",
                delivery.receipt,
                id(delivery)
            );
        }
        Ok(())
    }

    /// Nothing is delivered for a while.
    pub(super) async fn quiet(&mut self, because: &str) -> Result {
        self.quiet_for(self.can.quiet, because).await
    }

    pub(super) async fn quiet_for(&mut self, time: Duration, because: &str) -> Result {
        let until = Instant::now() + time;
        while let Ok(incoming) = timeout_at(until, self.source.receive(WINDOW)).await {
            match incoming {
                Ok(Incoming::Deliveries(deliveries)) => {
                    return Err(Broken::new(format!(
                        "{:?} came again: {because}",
                        ids(&deliveries)
                    )));
                }
                Ok(Incoming::Lost(_)) => {}
                Ok(other) => {
                    return Err(Broken::new(format!(
                        "receive said {other:?} while it had nothing to say: {because}"
                    )));
                }
                Err(error) => {
                    return Err(Broken::new(format!("the source broke without a cause: {error}")));
                }
            }
        }
        Ok(())
    }

    pub(super) async fn settle(&mut self, settlements: impl IntoIterator<Item = Settlement>) -> Result {
        let settling = self.source.settle(settlements.into_iter().collect());
        match timeout(self.can.patience, settling).await {
            Ok(settled) => Ok(settled?),
            Err(_) => Err(Broken::new("settle did not return")),
        }
    }

    pub(super) async fn ack(&mut self, deliveries: Vec<Delivery>) -> Result {
        let done = self.done(deliveries).await?;
        self.settle(done).await
    }

    /// The acks of what was processed.
    pub(super) async fn done(&self, deliveries: Vec<Delivery>) -> Result<Vec<Settlement>> {
        for delivery in &deliveries {
            self.harness.committed(delivery).await?;
        }
        Ok(deliveries.into_iter().map(Delivery::ack).collect())
    }

    pub(super) async fn release(&mut self, deliveries: Vec<Delivery>) -> Result {
        self.settle(deliveries.into_iter().map(|delivery| delivery.release(None)))
            .await
    }

    pub(super) async fn stop(&mut self) -> Result {
        match timeout(self.can.patience, self.source.stop()).await {
            Ok(stopped) => Ok(stopped?),
            Err(_) => Err(Broken::new("stop did not return")),
        }
    }

    /// After a stop, and with nothing outstanding, the source closes.
    pub(super) async fn closed(mut self) -> Result {
        let until = self.deadline();
        loop {
            // Without room, as the loop does.
            match timeout_at(until, self.source.receive(0)).await {
                Ok(Ok(Incoming::Closed)) => return Ok(()),
                Ok(Ok(Incoming::Lost(_))) => {}
                Ok(Ok(other)) => return Err(Broken::new(format!("after stop, receive said {other:?}"))),
                Ok(Err(error)) => return Err(Broken::new(format!("after stop, the source broke: {error}"))),
                Err(_) => {
                    return Err(Broken::new(
                        "everything was settled and the source stopped, but it did not close",
                    ));
                }
            }
        }
    }

    /// Stops, closes, and looks with another source whether anything is left.
    pub(super) async fn finish(self) -> Result {
        let a_while = self.can.quiet;
        self.finish_within(a_while).await
    }

    /// The same, for as long as the broker may keep to itself what was not acked.
    pub(super) async fn finish_for_good(self) -> Result {
        let a_while = self.can.quiet + self.can.redelivered_after;
        self.finish_within(a_while).await
    }

    async fn finish_within(mut self, a_while: Duration) -> Result {
        self.stop().await?;
        let harness = self.harness;
        self.closed().await?;
        Tap::open(harness, WINDOW)
            .await?
            .quiet_for(a_while, "it had been acked before the source closed")
            .await
    }

    async fn broke(&mut self, error: &SourceError, doing: &str) -> Result {
        ensure!(!error.is_fatal(), "{doing} failed for good: {error}");
        self.complaint = Some(error.to_string());
        sleep(REBUILD).await;
        Ok(())
    }

    fn complaint(&self) -> String {
        self.complaint
            .as_ref()
            .map(|said| format!(" (the source said: {said})"))
            .unwrap_or_default()
    }

    /// These events were delivered, each once, in any order.
    pub(super) fn expect(&self, deliveries: &[Delivery], expected: &[String]) -> Result {
        let count = |ids: Vec<String>| {
            let mut counted: BTreeMap<String, usize> = BTreeMap::new();
            for id in ids {
                let times = counted.entry(id).or_default();
                *times = if self.can.may_repeat { 1 } else { *times + 1 };
            }
            counted
        };
        let (came, due) = (count(ids(deliveries)), count(expected.to_vec()));
        ensure!(came == due, "{due:?} were due and {came:?} came");
        Ok(())
    }
}

/// An event with this identity; its body is its id.
pub(super) fn event(id: &str) -> RawEvent {
    let mut headers = Headers::new();
    headers.push("onlyonce-event-id", id);
    headers.push("onlyonce-event-source", "conformance");
    RawEvent {
        payload: Some(id.to_owned().into()),
        headers,
        ..RawEvent::default()
    }
}

pub(super) fn keyed(id: &str, key: &str) -> RawEvent {
    RawEvent {
        key: Some(key.to_owned().into()),
        ..event(id)
    }
}

pub(super) fn numbered(count: usize) -> Vec<String> {
    (1..=count).map(|n| format!("e{n}")).collect()
}

pub(super) fn events(ids: &[String]) -> Vec<RawEvent> {
    ids.iter().map(|id| event(id)).collect()
}

pub(super) fn id(delivery: &Delivery) -> String {
    delivery.event.headers.get("onlyonce-event-id").map_or_else(
        || "no id".to_owned(),
        |id| String::from_utf8_lossy(id).into_owned(),
    )
}

pub(super) fn ids(deliveries: &[Delivery]) -> Vec<String> {
    deliveries.iter().map(id).collect()
}
