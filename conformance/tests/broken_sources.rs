//! The suite rejects sources that are broken on purpose, each by the promise that names its fault.

mod support;

use std::collections::HashMap;
use std::time::Duration;

use onlyonce::async_trait;
use onlyonce::event::RawEvent;
use onlyonce::source::{
    Capabilities, Incoming, Plan, Receipt, Redelivery, Settle, Settlement, Source, SourceError, SourceHealth,
};
use onlyonce::testing::{Broker, BrokerSource};
use onlyonce_conformance::{Depth, HarnessCapabilities, Result, SourceHarness, Sqlite, block_on, source};
use support::{memory_capabilities, memory_depth};

/// What is wrong with a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    AcksWhenDelivering,
    LosesOnStop,
    LosesOnPause,
    LosesWhenCancelled,
    NeverAcks,
    AcksWhenReleasing,
    Shuffles,
    OvertakesOnRelease,
    IgnoresMax,
    NeedsRoom,
    ReleasesAtOnce,
    RepeatsReceipts,
    ReturnsEmptyHanded,
    TakesLateAcks,
    HidesRedeliveries,
    HidesLosses,
    DeliversAfterStop,
    ClosesTooEarly,
    NeverCloses,
    MakesNullEmpty,
    PromisesTooMuch,
}

/// A source of the broker in memory, with one fault.
struct Faulty {
    inner: BrokerSource,
    fault: Fault,
    stopped: bool,
    /// Releases that are told to the broker too late.
    belated: Vec<Settlement>,
    /// By event: the receipts under which it was given out, the newest last.
    receipts: HashMap<Option<Vec<u8>>, Vec<Receipt>>,
    /// Receipts given out twice: what they mean.
    short: HashMap<Receipt, Receipt>,
}

impl Faulty {
    /// Takes what was not handed out and acks it.
    async fn lose_the_rest(&mut self) -> std::result::Result<(), SourceError> {
        let rest = tokio::time::timeout(Duration::from_millis(50), self.inner.receive(100)).await;
        if let Ok(Ok(Incoming::Deliveries(rest))) = rest {
            self.inner
                .settle(rest.into_iter().map(|delivery| delivery.ack()).collect())
                .await?;
        }
        Ok(())
    }

    fn newest(&self, receipt: Receipt) -> Receipt {
        let known = self
            .receipts
            .values()
            .find(|receipts| receipts.contains(&receipt));
        known
            .and_then(|receipts| receipts.last().copied())
            .unwrap_or(receipt)
    }
}

#[async_trait]
impl Source for Faulty {
    async fn start(&mut self, plan: &Plan) -> std::result::Result<(), SourceError> {
        self.inner.start(plan).await
    }

    async fn receive(&mut self, max: usize) -> std::result::Result<Incoming, SourceError> {
        match self.fault {
            Fault::ClosesTooEarly if self.stopped => return Ok(Incoming::Closed),
            Fault::NeverCloses if self.stopped => return std::future::pending().await,
            Fault::NeedsRoom => return self.inner.receive(max.max(1)).await,
            Fault::ReturnsEmptyHanded => {
                let received = tokio::time::timeout(Duration::from_millis(20), self.inner.receive(max)).await;
                return received.unwrap_or_else(|_| Ok(Incoming::Deliveries(Vec::new())));
            }
            _ => {}
        }
        let max = if self.fault == Fault::IgnoresMax {
            max + 5
        } else {
            max
        };
        let mut deliveries = match self.inner.receive(max).await? {
            Incoming::Deliveries(deliveries) => deliveries,
            Incoming::Lost(_) if self.fault == Fault::HidesLosses => {
                return self.receive(max).await;
            }
            other => return Ok(other),
        };
        if self.fault == Fault::LosesWhenCancelled {
            tokio::task::yield_now().await;
        }
        if self.fault == Fault::AcksWhenDelivering {
            let ack = |receipt| Settlement {
                receipt,
                verdict: Settle::Ack,
            };
            self.inner
                .settle(deliveries.iter().map(|delivery| ack(delivery.receipt)).collect())
                .await?;
        }
        if !self.belated.is_empty() {
            self.inner.settle(std::mem::take(&mut self.belated)).await?;
        }
        for delivery in &mut deliveries {
            let id = delivery
                .event
                .headers
                .get("onlyonce-event-id")
                .map(<[u8]>::to_vec);
            self.receipts.entry(id).or_default().push(delivery.receipt);
            match self.fault {
                Fault::HidesRedeliveries => delivery.redelivery = Redelivery::No,
                Fault::MakesNullEmpty => {
                    std::sync::Arc::make_mut(&mut delivery.event)
                        .payload
                        .get_or_insert_default();
                }
                Fault::RepeatsReceipts => {
                    let short = Receipt(delivery.receipt.0 % 4);
                    self.short.insert(short, delivery.receipt);
                    delivery.receipt = short;
                }
                _ => {}
            }
        }
        Ok(Incoming::Deliveries(deliveries))
    }

    async fn settle(&mut self, settlements: Vec<Settlement>) -> std::result::Result<(), SourceError> {
        let mut told = Vec::new();
        for mut settlement in settlements {
            let release = matches!(settlement.verdict, Settle::Release { .. });
            match self.fault {
                Fault::NeverAcks if !release => continue,
                Fault::AcksWhenReleasing => settlement.verdict = Settle::Ack,
                Fault::ReleasesAtOnce if release => settlement.verdict = Settle::Release { after: None },
                Fault::TakesLateAcks => settlement.receipt = self.newest(settlement.receipt),
                Fault::OvertakesOnRelease if release && self.belated.is_empty() => {
                    self.belated.push(settlement);
                    continue;
                }
                Fault::RepeatsReceipts => {
                    if let Some(receipt) = self.short.get(&settlement.receipt) {
                        settlement.receipt = *receipt;
                    }
                }
                _ => {}
            }
            told.push(settlement);
        }
        self.inner.settle(told).await
    }

    async fn pause(&mut self) -> std::result::Result<(), SourceError> {
        if self.fault == Fault::LosesOnPause {
            self.lose_the_rest().await?;
        }
        self.inner.pause().await
    }

    async fn stop(&mut self) -> std::result::Result<(), SourceError> {
        self.stopped = true;
        match self.fault {
            Fault::DeliversAfterStop => return Ok(()),
            Fault::LosesOnStop => self.lose_the_rest().await?,
            _ => {}
        }
        self.inner.stop().await
    }

    fn capabilities(&self) -> Capabilities {
        let mut said = memory_capabilities();
        said.native_dead_letters = self.fault == Fault::PromisesTooMuch;
        said
    }

    fn health(&self) -> SourceHealth {
        self.inner.health()
    }
}

struct Harness {
    broker: Broker,
    fault: Fault,
}

#[async_trait]
impl SourceHarness for Harness {
    type Source = Faulty;
    type Stage = Sqlite;

    async fn empty() -> Result<Option<Self>> {
        Ok(None)
    }

    fn expected(&self) -> Capabilities {
        memory_capabilities()
    }

    fn capabilities(&self) -> HarnessCapabilities {
        let mut can = HarnessCapabilities::default();
        can.patience = Duration::from_secs(3);
        can.cuts = true;
        can
    }

    fn source(&self) -> Faulty {
        Faulty {
            inner: self.broker.source(),
            fault: self.fault,
            stopped: false,
            belated: Vec::new(),
            receipts: HashMap::new(),
            short: HashMap::new(),
        }
    }

    async fn publish(&self, events: Vec<RawEvent>) -> Result {
        events.into_iter().for_each(|event| self.broker.publish(event));
        Ok(())
    }

    async fn depth(&self) -> Result<Option<Depth>> {
        Ok(Some(memory_depth(&self.broker)))
    }

    async fn cut(&self) -> Result {
        self.broker.kill();
        Ok(())
    }

    async fn stage(&self) -> Result<Sqlite> {
        Sqlite::open()
    }
}

/// `fault => promise: words that its message has`.
macro_rules! rejected {
    ($($test:ident: $fault:ident => $promise:ident, $says:literal;)+) => {
        $(
            #[test]
            fn $test() {
                let mut broker = Broker::seeded(7);
                if Fault::$fault == Fault::Shuffles {
                    broker = broker.reorder(9);
                }
                let harness = Harness { broker, fault: Fault::$fault };
                let broken = block_on(source::$promise(&harness)).expect_err("it passes");
                assert_eq!(broken.promise(), stringify!($promise));
                assert!(broken.to_string().contains($says), "{broken}");
            }
        )+
    };
}

rejected! {
    one_that_acks_when_delivering: AcksWhenDelivering => redelivers_what_was_not_acked, "2 of 4 deliveries came";
    one_that_acks_before_the_commit: AcksWhenDelivering => nothing_is_acked_before_its_commit, "the event was acked";
    one_that_acks_and_is_killed: AcksWhenDelivering => survives_kills, "it is lost";
    one_that_loses_on_stop: LosesOnStop => stop_gives_back, "2 of 8 deliveries came";
    one_that_loses_when_a_consumer_stops: LosesOnStop => stops_in_the_middle, "it is lost";
    one_that_loses_on_pause: LosesOnPause => pause_gives_back, "five events were not handed out";
    one_that_loses_when_cancelled: LosesWhenCancelled => receive_is_cancel_safe, "were lost in a receive";
    one_that_loses_what_a_dropped_call_took: LosesWhenCancelled => receives_at_most_max, "deliveries came within";
    one_that_never_acks: NeverAcks => delivers_everything, "did not close";
    one_that_never_acks_a_consumers_work: NeverAcks => effects_happen_once, "was not done";
    one_that_acks_when_releasing: AcksWhenReleasing => release_gives_back, "0 of 5 deliveries came";
    one_that_shuffles: Shuffles => order_per_key, "the events of a key came as";
    one_that_overtakes_on_release: OvertakesOnRelease => order_survives_release, "the events of a key came as";
    one_that_ignores_max: IgnoresMax => receives_at_most_max, "returned 6 deliveries";
    one_that_delivers_without_room: NeedsRoom => listens_without_room, "there was no room";
    one_that_spins_on_delayed_releases: ReleasesAtOnce => release_after_waits, "came at once";
    one_that_repeats_receipts: RepeatsReceipts => receipts_are_unique, "was given out twice";
    one_that_returns_empty_handed: ReturnsEmptyHanded => waits_when_there_is_nothing, "came again: the queue is empty";
    one_that_takes_late_acks: TakesLateAcks => settles_twice_and_late, "deliveries came";
    one_that_hides_redeliveries: HidesRedeliveries => redelivery_is_marked, "says No";
    one_that_hides_losses: HidesLosses => lost_receipts_are_void, "before the source said so";
    one_that_delivers_after_stop: DeliversAfterStop => stop_closes_last, "did not close";
    one_that_closes_too_early: ClosesTooEarly => stop_closes_last, "Closed";
    one_that_never_closes: NeverCloses => stop_closes_last, "did not close";
    one_that_makes_null_empty: MakesNullEmpty => bytes_survive, "of tombstone the body was sent as null";
    one_that_promises_too_much: PromisesTooMuch => says_what_it_promises, "native_dead_letters: true";
}
