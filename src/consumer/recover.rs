//! What becomes of an event whose run failed: acts on what `decide.rs` says.

use std::time::Duration;

use super::decide::{Counts, Decision, Failure, decide, is_attempt};
use super::gate::Passage;
use super::lane::{Identified, Lane, Shared};
use super::policy::Ordering;
use crate::crash::CrashPoint;
use crate::delay::spread;
use crate::event::IdentityError;
use crate::handler::{Fault, HandlerError};
use crate::reason::Reason;
use crate::source::{Delivery, Settlement};
use crate::store::{Attempt, Inbox, Parked, ParkedAs, Parking, StoreErrorKind};
use crate::telemetry::{self, Outcome as Became};

/// What has gone wrong with one event in this lane.
#[derive(Default)]
pub(super) struct Tally {
    /// The attempts that no row knows of yet.
    attempts: Vec<Attempt>,
    contention: u32,
    lost: u32,
}

/// What the lane does next with the event.
pub(super) enum Recovery {
    /// Run it again.
    Again,
    /// Commit its claim alone.
    Discard,
    /// It is durably held (or was committed by a copy): ack it.
    Stored(Became),
    /// It goes back to the source.
    GiveBack { after: Option<Duration> },
}

/// Decides and acts. Returns when the event may run again or has left the lane.
pub(super) async fn recover<S: Inbox>(
    lane: &mut Lane<S>,
    event: &mut Identified,
    failure: Failure,
    tally: &mut Tally,
) -> Recovery {
    let failure = ask_database(&lane.shared, failure).await;
    tally.note(&failure);
    let mut counts = Counts {
        attempts: event.failed,
        contention: tally.contention,
        lost: tally.lost,
    };
    let attempt = is_attempt(&failure, &counts, &lane.shared.policy);
    if attempt {
        event.failed += 1;
        counts.attempts = event.failed;
        tally.attempts.push(Attempt::now(failure.kind(), failure.text()));
        telemetry::attempt_failed(&lane.shared.name, failure.kind());
    }
    let decision = decide(
        &failure,
        &counts,
        &lane.shared.policy,
        order_of(&lane.shared, event),
    );
    log(lane, event, &failure, attempt, decision);
    if attempt {
        tally.contention = 0;
    }

    match decision {
        Decision::Again { after } => wait(lane, event, tally, after).await,
        Decision::Pause => {
            lane.shared.gate.close(failure.text());
            match lane.shared.gate.pass(&lane.shared.stopping).await {
                Passage::Open => Recovery::Again,
                Passage::GiveBack => Recovery::GiveBack { after: None },
            }
        }
        Decision::Later { after } => Recovery::GiveBack { after: Some(after) },
        Decision::GiveBack => give_back(lane, event, tally).await,
        Decision::Discard => Recovery::Discard,
        Decision::Hold { after } => {
            park(
                lane,
                &event.delivery,
                Some(event),
                ParkedAs::Ready { after },
                &tally.attempts,
                false,
            )
            .await
        }
        Decision::Dead { reason } => {
            let escaped = reason == Reason::TransactionEscaped;
            park(
                lane,
                &event.delivery,
                Some(event),
                ParkedAs::Dead { reason },
                &tally.attempts,
                escaped,
            )
            .await
        }
    }
}

/// A delivery that nothing can be remembered about becomes a dead letter without an identity.
pub(super) async fn unidentified<S: Inbox>(
    lane: &mut Lane<S>,
    delivery: Delivery,
    error: &IdentityError,
) -> Settlement {
    let reason = error.reason();
    tracing::warn!(consumer = lane.shared.name, %reason, %error, origin = &*delivery.event.origin.detail, "dead letter");
    let failures = [Attempt::now("identity", &error.to_string())];
    store_letter(lane, delivery, reason, &failures).await
}

/// A delivery that must not run under its identity becomes a dead letter that holds nothing.
pub(super) async fn letter<S: Inbox>(lane: &mut Lane<S>, event: Identified, reason: Reason) -> Settlement {
    tracing::warn!(consumer = lane.shared.name, %reason, event_id = event.named.identity.id, "dead letter");
    let text = format!(
        "identity {} of {}",
        event.named.identity.id, event.named.identity.source
    );
    store_letter(lane, event.delivery, reason, &[Attempt::now("identity", &text)]).await
}

async fn store_letter<S: Inbox>(
    lane: &mut Lane<S>,
    delivery: Delivery,
    reason: Reason,
    failures: &[Attempt],
) -> Settlement {
    match park(lane, &delivery, None, ParkedAs::Dead { reason }, failures, false).await {
        Recovery::GiveBack { after } => lane.settle(delivery, Became::Released, after),
        _ => {
            close(&lane.shared, &delivery).await;
            lane.settle(delivery, Became::DeadLettered, None)
        }
    }
}

/// Finishes the held row that the delivery is, if it is one, where no commit does: its event was
/// processed by another delivery, or has become a letter of its own.
pub(super) async fn close<S: Inbox>(shared: &Shared<S>, delivery: &Delivery) {
    if let Some(lease) = &delivery.held
        && let Err(error) = shared.store.close_leased(lease).await
    {
        tracing::debug!(%error, "a finished held row was not closed; its lease runs out and it is found finished again");
    }
}

/// An event without a key is ordered with nothing, whatever the consumer does with the others.
fn order_of<S: Inbox>(shared: &Shared<S>, event: &Identified) -> Ordering {
    match event.delivery.event.key {
        Some(_) => shared.ordering,
        None => Ordering::Unordered,
    }
}

/// A lost connection and a statement without an answer say nothing about the database; only a probe
/// does.
async fn ask_database<S: Inbox>(shared: &Shared<S>, mut failure: Failure) -> Failure {
    let lost = match &mut failure {
        Failure::Handler {
            fault: Fault::Lost,
            error,
            ..
        } => Some(error),
        Failure::Timeout(_) => None,
        _ => return failure,
    };
    if let Err(down) = shared.store.probe().await {
        return Failure::Unavailable(down.to_string());
    }
    if let Some(error) = lost {
        error.push_str(
            " (but the database answers; a handler that takes a second connection of the pool may wait in vain)",
        );
    }
    failure
}

/// Waits before the next run in place. No transaction, claim or lock is held meanwhile.
async fn wait<S: Inbox>(lane: &mut Lane<S>, event: &Identified, tally: &Tally, after: Duration) -> Recovery {
    tokio::select! {
        biased;
        _ = lane.shared.stopping.cancelled() => {}
        _ = tokio::time::sleep(after) => return Recovery::Again,
    }
    give_back(lane, event, tally).await
}

/// Lets go of an event because of a stop. Attempts that no row knows of would be forgotten with this
/// process, so the event is held with them; where that would break the order, it goes back without.
async fn give_back<S: Inbox>(lane: &mut Lane<S>, event: &Identified, tally: &Tally) -> Recovery {
    if tally.attempts.is_empty() || order_of(&lane.shared, event) == Ordering::PerKey {
        return Recovery::GiveBack { after: None };
    }
    let now = ParkedAs::Ready {
        after: Duration::ZERO,
    };
    park(lane, &event.delivery, Some(event), now, &tally.attempts, false).await
}

/// Holds the event in `inbox`, for as long as it takes. A crash before that is done leaves the
/// delivery unacked: it comes again. A crash after it, before the ack: the redelivery is `Held`.
async fn park<S: Inbox>(
    lane: &mut Lane<S>,
    delivery: &Delivery,
    event: Option<&Identified>,
    becomes: ParkedAs,
    failures: &[Attempt],
    escaped: bool,
) -> Recovery {
    let shared = lane.shared.clone();
    let parked = Parked {
        consumer: &shared.name,
        key: event.map(|event| (event.named.key, &event.named.identity)),
        event: &delivery.event,
        becomes,
        failures,
        escaped,
    };
    for nth in 1.. {
        let error = match store(lane, delivery, event.is_some(), &parked).await {
            Ok(Parking::Held) => {
                lane.shared.reached(CrashPoint::Parked).await;
                return Recovery::Stored(match becomes {
                    ParkedAs::Ready { .. } => Became::RetryHeld,
                    ParkedAs::Dead { .. } => Became::DeadLettered,
                });
            }
            Ok(Parking::Duplicate) => return Recovery::Stored(Became::Duplicate),
            Err(error) => error,
        };
        lane.recycle(true).await;
        match error.kind() {
            StoreErrorKind::Contention | StoreErrorKind::Busy if !shared.abort.is_cancelled() => {
                tokio::time::sleep(spread(Duration::from_millis(5), Duration::from_secs(1), nth)).await;
            }
            _ => {
                shared.gate.close(&error.to_string());
                if shared.gate.pass(&shared.stopping).await == Passage::GiveBack {
                    return Recovery::GiveBack { after: None };
                }
            }
        }
    }
    Recovery::GiveBack { after: None }
}

/// A broker's delivery gets a row; a leased row is written back under its token. When the token is
/// void the row has another owner by now, and what becomes of it is theirs to say.
async fn store<S: Inbox>(
    lane: &mut Lane<S>,
    delivery: &Delivery,
    identified: bool,
    parked: &Parked<'_>,
) -> Result<Parking, crate::store::StoreError> {
    let Lane { shared, conn, .. } = lane;
    if let (Some(lease), true) = (&delivery.held, identified) {
        shared.store.fail_leased(lease, parked).await?;
        return Ok(Parking::Held);
    }
    let conn = match conn {
        Some(conn) => conn,
        None => conn.insert(shared.store.open().await?),
    };
    shared.store.park(conn, &shared.limits, parked).await
}

/// One line per failure that somebody may want to see: a failed attempt is a warning with its error,
/// contention and pauses are not (the gate speaks for the latter).
fn log<S: Inbox>(lane: &Lane<S>, event: &Identified, failure: &Failure, attempt: bool, decision: Decision) {
    let (consumer, kind, error) = (&lane.shared.name, failure.kind(), failure.text());
    let (source, event_id, failed) = (
        &event.named.identity.source,
        &event.named.identity.id,
        event.failed,
    );
    match decision {
        Decision::Dead { reason } => {
            tracing::error!(consumer, source, event_id, failed, kind, error, %reason, "dead letter");
        }
        Decision::Hold { after } => {
            tracing::warn!(
                consumer,
                source,
                event_id,
                failed,
                kind,
                error,
                ?after,
                "attempt failed, held for a retry"
            );
        }
        Decision::Again { after } if !attempt => {
            tracing::debug!(consumer, source, event_id, kind, error, ?after, "again");
        }
        Decision::Again { after } => {
            tracing::warn!(
                consumer,
                source,
                event_id,
                failed,
                kind,
                error,
                ?after,
                "attempt failed, again in place"
            );
        }
        Decision::Pause | Decision::Later { .. } | Decision::Discard | Decision::GiveBack => {
            tracing::debug!(
                consumer,
                source,
                event_id,
                kind,
                error,
                ?decision,
                "not processed"
            );
        }
    }
}

impl Tally {
    /// Keeps what is counted in a row.
    fn note(&mut self, failure: &Failure) {
        match failure {
            Failure::Contention(_)
            | Failure::Handler {
                fault: Fault::Contention,
                ..
            } => {
                self.contention += 1;
                self.lost = 0;
            }
            Failure::Handler {
                fault: Fault::Lost, ..
            } => {
                self.lost += 1;
                self.contention = 0;
            }
            // An outage in between says nothing about the event, one way or the other.
            Failure::Unavailable(_) | Failure::UnknownCommit(_) | Failure::Busy(_) | Failure::Stopped => {}
            _ => (self.contention, self.lost) = (0, 0),
        }
    }
}

impl Failure {
    pub(super) fn of_handler(error: &HandlerError) -> Self {
        Self::Handler {
            kind: error.kind(),
            fault: error.fault(),
            error: error.to_string(),
        }
    }

    /// The handler kept its thread for so long that nobody could cut it off, but for the server.
    pub(super) fn blocked(for_how_long: Duration) -> Self {
        Self::Timeout(format!("the handler blocked for {for_how_long:?}"))
    }

    pub(super) fn of_panic(panic: &(dyn std::any::Any + Send)) -> Self {
        let text = panic
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "the handler panicked with something that is not text".to_owned());
        Self::Panic(text)
    }
}
