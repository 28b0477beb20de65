//! A lane: one task, one connection, and what all lanes of a consumer share.

use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt as _;

use sqlx::Database;
use tokio_util::sync::CancellationToken;

use super::decide::Failure;
use super::gate::Gate;
use super::policy::{OnMismatch, Ordering, RetryPolicy};
use super::window::{Window, locked};
use crate::crash::CrashPoint;
use crate::event::{EventKey, Identity, IdentityError, IdentityRules, PayloadHash, RawEvent};
use crate::handler::Run;
use crate::outbox::Record;
use crate::source::{Delivery, Receipt, Settle, Settlement};
use crate::store::{ClaimRequest, Connection, Inbox, Lease, Limits, Next, Store, Tx};
use crate::telemetry::{self, Outcome as Became};

/// Runs at the start of each transaction, right after `BEGIN`.
pub(crate) type BeginHook<Db> = Arc<
    dyn for<'a> Fn(
            &'a mut <Db as Database>::Connection,
        ) -> Pin<Box<dyn Future<Output = Result<(), sqlx::Error>> + Send + 'a>>
        + Send
        + Sync,
>;

/// What the lanes of one loop share. Nothing in it changes while they run, but for the gate.
pub(crate) struct Shared<S: Store> {
    pub(crate) name: String,
    pub(crate) system: &'static str,
    pub(crate) store: S,
    pub(crate) handler: Arc<dyn Run<S::Db>>,
    pub(crate) outbox: Arc<dyn Record<S::Db>>,
    pub(crate) identity: IdentityRules,
    pub(crate) policy: RetryPolicy,
    pub(crate) ordering: Ordering,
    pub(crate) on_mismatch: OnMismatch,
    pub(crate) limits: Limits,
    pub(crate) handler_timeout: Duration,
    /// The handler takes all events at once, so the time limit is for all of them.
    pub(crate) handles_batches: bool,
    pub(crate) on_begin: Option<BeginHook<S::Db>>,
    pub(crate) gate: Arc<Gate>,
    /// Take no more.
    pub(crate) stopping: CancellationToken,
    /// The stop's deadline has passed: cut handlers off.
    pub(crate) abort: CancellationToken,
    #[cfg(feature = "testing")]
    pub(crate) crash: Option<crate::crash::Plan>,
}

impl<S: Store> Shared<S> {
    /// Whether a lane may start something new.
    pub(crate) fn takes_work(&self) -> bool {
        self.gate.is_open() && !self.stopping.is_cancelled()
    }

    /// Who this delivery's event is, and what of it is compared.
    pub(crate) fn name_of(&self, event: &RawEvent, held: Option<&Lease>) -> Result<Named, IdentityError> {
        let identity = match held {
            Some(lease) => lease.identity.clone(),
            None => self.identity.identify(event)?,
        };
        Ok(Named {
            key: EventKey::of_event(&self.name, &identity.source, &identity.id),
            hash: event.payload_hash(),
            identity,
        })
    }

    /// How long the handler may take for this many events.
    pub(crate) fn time_limit(&self, events: usize) -> Duration {
        if self.handles_batches {
            self.handler_timeout
        } else {
            self.handler_timeout * events.max(1) as u32
        }
    }

    /// Begins a transaction and runs the user's hook in it. A hook that fails or panics says nothing
    /// about an event: the consumer pauses.
    pub(crate) async fn begin<'c>(&self, conn: &'c mut Connection<S::Db>) -> Result<Tx<'c, S::Db>, Failure> {
        let mut tx = self.store.begin(conn, &self.limits).await?;
        let Some(hook) = &self.on_begin else { return Ok(tx) };
        let hook = AssertUnwindSafe(async { hook(&mut tx).await }).catch_unwind();
        let problem = match tokio::time::timeout(self.limits.patience(), hook).await {
            Ok(Ok(Ok(()))) => return Ok(tx),
            Ok(Ok(Err(error))) => error.to_string(),
            Ok(Err(_)) => "it panicked".to_owned(),
            Err(_) => "it did not end".to_owned(),
        };
        Err(Failure::Unavailable(format!(
            "the transaction hook failed: {problem}"
        )))
    }

    #[cfg(feature = "testing")]
    pub(crate) async fn reached(&self, point: CrashPoint) {
        crate::crash::reached(self.crash.as_ref(), point).await;
    }

    #[cfg(not(feature = "testing"))]
    pub(crate) async fn reached(&self, _point: CrashPoint) {}
}

/// One lane. Nobody cancels it: what it has begun it ends, within the limits of its transaction.
pub(crate) struct Lane<S: Store> {
    pub(crate) shared: Arc<Shared<S>>,
    pub(crate) conn: Option<Connection<S::Db>>,
    pub(crate) seat: Seat,
    /// What was expected when it last committed.
    pub(crate) upcoming: Upcoming,
}

/// What became of the work that a lane had.
pub(crate) struct Done {
    /// The lane, if the window has not been told yet.
    pub(crate) lane: Option<usize>,
    pub(crate) settlements: Vec<Settlement>,
}

/// A lane's place at the window, where its work waits.
pub(crate) struct Seat {
    pub(crate) index: usize,
    pub(crate) window: Arc<Mutex<Window>>,
}

/// What a lane will take next: nearly always right, never relied upon.
pub(crate) enum Upcoming {
    Nothing,
    Something,
    /// This delivery. Who its event is, is known already.
    Event(Receipt, Named),
}

impl Upcoming {
    /// For the commit before it.
    pub(crate) fn after_commit<'a>(&'a self, consumer: &'a str) -> Next<'a> {
        match self {
            Self::Nothing => Next::Rest,
            Self::Something => Next::Begin,
            Self::Event(_, named) => Next::Claim(named.request(consumer, None)),
        }
    }

    /// Who the event of this delivery is, if it is the one that was foreseen.
    pub(crate) fn take(&mut self, receipt: Receipt) -> Option<Named> {
        match std::mem::replace(self, Self::Nothing) {
            Self::Event(foreseen, named) if foreseen == receipt => Some(named),
            _ => None,
        }
    }
}

impl Seat {
    /// What there will be after this. The next event is looked at without the window's lock: a rule for
    /// identities may be code of the user's. One that has no usable identity is not claimed, nor is a
    /// held one, whose lease may be another's by then, nor anything before the user's hook has run.
    pub(crate) fn upcoming<S: Store>(&self, shared: &Shared<S>) -> Upcoming {
        if !shared.takes_work() {
            return Upcoming::Nothing;
        }
        let (receipt, event) = {
            let mut window = locked(&self.window);
            if !window.has_more(self.index) {
                return Upcoming::Nothing;
            }
            let next = match shared.on_begin {
                None => window.reserve(self.index),
                Some(_) => None,
            };
            match next {
                Some(next) if next.held.is_none() => (next.receipt, next.event.clone()),
                _ => return Upcoming::Something,
            }
        };
        match shared.name_of(&event, None) {
            Ok(named) => Upcoming::Event(receipt, named),
            Err(_) => Upcoming::Something,
        }
    }

    /// What there is now is not over.
    pub(crate) fn unreserve(&self) {
        locked(&self.window).unreserve(self.index);
    }
}

impl<S: Inbox> Lane<S> {
    pub(crate) fn new(shared: Arc<Shared<S>>, seat: Seat) -> Self {
        Self {
            shared,
            conn: None,
            seat,
            upcoming: Upcoming::Nothing,
        }
    }

    /// Is done with some work, and takes the next if there is any. What was given back is for the loop to
    /// finish: it alone knows what has come of the same key meanwhile and has to go back as well.
    pub(crate) fn finish(&self, mut settlements: Vec<Settlement>) -> (Done, Option<Vec<Delivery>>) {
        let acked = settlements.iter().all(|done| done.verdict == Settle::Ack);
        if !acked {
            let lane = Some(self.seat.index);
            return (Done { lane, settlements }, None);
        }
        let mut window = locked(&self.seat.window);
        window.finish(self.seat.index, &mut settlements);
        let next = if self.shared.takes_work() {
            window.take(self.seat.index)
        } else {
            None
        };
        let lane = None;
        (Done { lane, settlements }, next)
    }

    /// Has nothing to do: no transaction stays open for it.
    pub(crate) async fn rest(&mut self) {
        self.recycle(false).await;
    }

    /// Ends a failed transaction for good. A connection in doubt is closed instead.
    pub(crate) async fn recycle(&mut self, spoiled: bool) {
        let Some(mut conn) = self.conn.take() else { return };
        if !spoiled && self.shared.store.rollback(&mut conn).await.is_ok() {
            self.conn = Some(conn);
        } else {
            self.shared.store.abandon(conn).await;
        }
    }

    /// The one way back to the source.
    pub(crate) fn settle(&self, delivery: Delivery, became: Became, after: Option<Duration>) -> Settlement {
        telemetry::settled(&self.shared.name, self.shared.system, became);
        if became == Became::Released {
            delivery.release(after)
        } else {
            delivery.ack()
        }
    }

    pub(crate) fn span(&self, deliveries: &[Delivery]) -> tracing::Span {
        let destination = deliveries.first().map_or("", |d| &*d.event.origin.destination);
        tracing::info_span!(
            "process",
            messaging.system = self.shared.system,
            messaging.destination.name = destination,
            messaging.operation.name = "process",
            messaging.operation.r#type = "process",
            messaging.consumer.group.name = self.shared.name,
            messaging.message.id = tracing::field::Empty,
            messaging.batch.message_count = (deliveries.len() > 1).then_some(deliveries.len()),
        )
    }
}

/// Who an event is, and what it says.
pub(crate) struct Named {
    pub(crate) identity: Identity,
    pub(crate) key: EventKey,
    pub(crate) hash: PayloadHash,
}

impl Named {
    pub(crate) fn request<'a>(&'a self, consumer: &'a str, own: Option<&'a Lease>) -> ClaimRequest<'a> {
        ClaimRequest {
            key: self.key,
            consumer,
            identity: &self.identity,
            payload_hash: self.hash,
            own,
        }
    }
}

/// A delivery whose event has a name.
pub(crate) struct Identified {
    pub(crate) delivery: Delivery,
    pub(crate) named: Named,
    /// How often it has failed so far, in this lane and before.
    pub(crate) failed: u32,
}

impl Identified {
    pub(crate) fn request<'a>(&'a self, consumer: &'a str) -> ClaimRequest<'a> {
        self.named.request(consumer, self.delivery.held.as_deref())
    }
}
