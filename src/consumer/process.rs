//! What happens to the deliveries that a lane has taken: identify, claim, handle, record, commit, settle.
//!
//! This file knows nothing of concurrency, and each step takes what the one before it gave. Read it
//! first; `run.rs` says how many lanes there are, `recover.rs` what becomes of an event that failed.

use std::panic::AssertUnwindSafe;
use std::time::Instant;

use futures_util::FutureExt as _;
use tracing::Instrument as _;

use super::decide::Failure;
use super::lane::{Identified, Lane, Shared};
use super::policy::{OnMismatch, Ordering};
use super::recover::{self, Recovery, Tally};
use crate::crash::CrashPoint;
use crate::handler::{Item, Progress};
use crate::outbox::Collector;
use crate::reason::Reason;
use crate::source::{Delivery, Settlement};
use crate::store::{ClaimAnswer, CommitError, Connection, Inbox, Outcome, Tx};
use crate::telemetry::{self, Outcome as Became};

/// Takes deliveries through to their settlements: all in one transaction if that succeeds, one by
/// one if it does not, so that only the bad one pays.
pub(crate) async fn process<S: Inbox>(lane: &mut Lane<S>, deliveries: Vec<Delivery>) -> Vec<Settlement> {
    let span = lane.span(&deliveries);
    async {
        lane.shared.reached(CrashPoint::Received).await;
        let (events, mut settlements) = identify(lane, deliveries).await;
        if let [event] = events.as_slice() {
            tracing::Span::current().record("messaging.message.id", event.named.identity.id.as_str());
        }
        settlements.extend(match events.len() {
            0 | 1 => one_by_one(lane, events, None).await,
            _ => match attempt(lane, &events, Outcome::Processed).await {
                Ok(answers) => conclude_all(lane, events, answers).await,
                Err(failure) => one_by_one(lane, events, Some(failure)).await,
            },
        });
        lane.shared.reached(CrashPoint::Settling).await;
        settlements
    }
    .instrument(span)
    .await
}

/// Finds out who each event is. One without a usable identity is a dead letter; nothing can be
/// remembered about it.
async fn identify<S: Inbox>(
    lane: &mut Lane<S>,
    deliveries: Vec<Delivery>,
) -> (Vec<Identified>, Vec<Settlement>) {
    let (mut events, mut settlements) = (Vec::with_capacity(deliveries.len()), Vec::new());
    for delivery in deliveries {
        let found = match lane.upcoming.take(delivery.receipt) {
            Some(named) => Ok(named),
            None => lane.shared.name_of(&delivery.event, delivery.held.as_deref()),
        };
        match found {
            Ok(named) => {
                let failed = delivery.held.as_ref().map_or(0, |lease| lease.attempts);
                events.push(Identified {
                    delivery,
                    named,
                    failed,
                });
            }
            Err(error) => settlements.push(recover::unidentified(lane, delivery, &error).await),
        }
    }
    (events, settlements)
}

/// One transaction over these events. `Ok` says what became of each and that it is durable; `Err`
/// that nothing was kept, or (after a COMMIT without an answer) that running them again will tell.
pub(super) async fn attempt<S: Inbox>(
    lane: &mut Lane<S>,
    events: &[Identified],
    outcome: Outcome,
) -> Result<Vec<ClaimAnswer>, Failure> {
    let result = transaction(lane, events, outcome).await;
    if result.is_ok() && lane.conn.as_ref().is_some_and(Connection::is_in_doubt) {
        lane.recycle(true).await;
    }
    if let Err(failure) = &result {
        // Nothing of the attempt may outlive it: no lock, no open transaction, no running statement.
        lane.recycle(failure.spoils_connection()).await;
        lane.seat.unreserve();
        lane.shared.reached(CrashPoint::RolledBack).await;
    }
    result
}

async fn transaction<S: Inbox>(
    lane: &mut Lane<S>,
    events: &[Identified],
    outcome: Outcome,
) -> Result<Vec<ClaimAnswer>, Failure> {
    let started = Instant::now();
    let Lane {
        shared,
        conn,
        seat,
        upcoming,
    } = lane;
    let store = &shared.store;
    let conn = match conn {
        Some(conn) => conn,
        None => conn.insert(store.open().await?),
    };

    // Claim, unless the commit before this has done it. A crash from here to the commit rolls everything
    // back: the source delivers again, and the event is as new as it was.
    let requests: Vec<_> = events.iter().map(|event| event.request(&shared.name)).collect();
    let ahead = store.claimed_ahead(conn, &shared.limits, &requests, outcome);
    let (mut tx, answers, claims) = match ahead.await? {
        Some(claimed) => claimed,
        None => {
            let mut tx = shared.begin(conn).await?;
            let (answers, claims) = store.claim(&mut tx, &requests, outcome).await?;
            (tx, answers, claims)
        }
    };
    shared.reached(CrashPoint::Claimed).await;
    if claims.is_empty() {
        store.rollback(conn).await?;
        return Ok(answers);
    }

    let handling = Instant::now();
    let outgoing = Collector::new(shared.outbox.settings(), &shared.name);
    if outcome == Outcome::Processed
        && let Err(failure) = handle(shared, &mut tx, events, &answers, &outgoing).await
    {
        // It may have committed by itself before it failed.
        return Err(if store.is_committed(&claims).await {
            Failure::escaped(claims, &outgoing.take())
        } else {
            failure
        });
    }
    let handled_for = handling.elapsed();
    shared.reached(CrashPoint::Handled).await;

    // A session that a limit of ours has ended looks lost; the clock tells whose fault it was.
    let outgoing = outgoing.take();
    let failed = |error| match error {
        CommitError::Store(_) | CommitError::Unknown(_) if handled_for >= shared.limits.idle_timeout => {
            Failure::blocked(handled_for)
        }
        error => Failure::of_commit(error, &outgoing),
    };

    // Record: what the handlers have sent becomes rows of the outbox, in one statement and in their order.
    // Nothing tells a relay of them before the commit, and a crash takes them back with all the rest.
    let claims = shared
        .outbox
        .record(&mut tx, claims, &outgoing)
        .await
        .map_err(failed)?;
    shared.reached(CrashPoint::Recorded).await;

    // Commit, which proves first that this is still our transaction and finishes the held rows of its
    // events. A crash in it leaves all or nothing, and running the event again finds out which. The
    // claim of the lane's next event goes with it, in a transaction of that event's own.
    *upcoming = seat.upcoming(shared);
    store
        .commit(tx, claims, upcoming.after_commit(&shared.name))
        .await
        .map_err(failed)?;
    // Durable from here: a crash loses the acks and nothing else; the redelivery is a duplicate. Relays find
    // what was recorded, told or not.
    shared.reached(CrashPoint::Committed).await;
    if !outgoing.is_empty() {
        shared.outbox.committed();
    }
    shared.gate.proven();
    telemetry::transaction(&shared.name, shared.system, started.elapsed());
    Ok(answers)
}

/// Runs the handler over the new events. It can fail, panic, run out of time or be cut off by a
/// stop; whatever it does, it comes back as a value.
async fn handle<S: Inbox>(
    shared: &Shared<S>,
    tx: &mut Tx<'_, S::Db>,
    events: &[Identified],
    answers: &[ClaimAnswer],
    outgoing: &Collector<'_>,
) -> Result<(), Failure> {
    let new = events
        .iter()
        .zip(answers)
        .filter(|(_, answer)| **answer == ClaimAnswer::New);
    let items: Vec<_> = new
        .map(|(event, _)| Item {
            identity: &event.named.identity,
            event: &event.delivery.event,
            attempt: event.failed + 1,
        })
        .collect();
    let limit = shared.time_limit(items.len());
    let began = Instant::now();
    let deadline = began + limit;
    let progress = Progress {
        consumer: &shared.name,
        once: &shared.store,
        outgoing,
        stopping: &shared.stopping,
        deadline,
    };
    let handler = AssertUnwindSafe(shared.handler.run(tx, progress, &items)).catch_unwind();
    tokio::select! {
        biased;
        result = handler => match result {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) if began.elapsed() >= shared.limits.idle_timeout.max(limit) => {
                Err(Failure::blocked(began.elapsed()))
            }
            Ok(Err(error)) => Err(Failure::of_handler(&error)),
            Err(panic) => Err(Failure::of_panic(&*panic)),
        },
        _ = tokio::time::sleep_until(deadline.into()) => {
            Err(Failure::Timeout(format!("the handler was still running after {limit:?}")))
        }
        _ = shared.abort.cancelled() => Err(Failure::Stopped),
    }
}

/// Runs events one after the other, each with its own retries. Where order counts, an event that is
/// given back takes the later ones of its key with it.
async fn one_by_one<S: Inbox>(
    lane: &mut Lane<S>,
    events: Vec<Identified>,
    of_batch: Option<Failure>,
) -> Vec<Settlement> {
    let mut settlements = Vec::with_capacity(events.len());
    let mut given_back = Vec::new();
    for event in events {
        let key = event.delivery.event.key.clone();
        let behind = lane.shared.ordering == Ordering::PerKey && key.is_some() && given_back.contains(&key);
        if behind || lane.shared.abort.is_cancelled() {
            given_back.push(key);
            settlements.push(lane.settle(event.delivery, Became::Released, None));
            continue;
        }
        let known = of_batch
            .as_ref()
            .and_then(|failure| failure.of_one(event.named.key));
        let (settlement, released) = until_settled(lane, event, known).await;
        if released {
            given_back.push(key);
        }
        settlements.push(settlement);
    }
    settlements
}

/// Runs one event until it is done, held, or given back. `known` is how it has failed already.
async fn until_settled<S: Inbox>(
    lane: &mut Lane<S>,
    mut event: Identified,
    mut known: Option<Failure>,
) -> (Settlement, bool) {
    let mut tally = Tally::default();
    let mut outcome = Outcome::Processed;
    loop {
        let result = match known.take() {
            Some(failure) => Err(failure),
            None => attempt(lane, std::slice::from_ref(&event), outcome).await,
        };
        let failure = match result {
            Ok(answers) => return (conclude(lane, event, answers[0], outcome).await, false),
            Err(failure) => failure,
        };
        match recover::recover(lane, &mut event, failure, &mut tally).await {
            Recovery::Again => {}
            Recovery::Discard => outcome = Outcome::Discarded,
            Recovery::Stored(became) => return (lane.settle(event.delivery, became, None), false),
            Recovery::GiveBack { after } => {
                return (lane.settle(event.delivery, Became::Released, after), true);
            }
        }
    }
}

async fn conclude_all<S: Inbox>(
    lane: &mut Lane<S>,
    events: Vec<Identified>,
    answers: Vec<ClaimAnswer>,
) -> Vec<Settlement> {
    let mut settlements = Vec::with_capacity(events.len());
    for (event, answer) in events.into_iter().zip(answers) {
        settlements.push(conclude(lane, event, answer, Outcome::Processed).await);
    }
    settlements
}

/// What the claim's answer means for the delivery, now that the transaction is over.
async fn conclude<S: Inbox>(
    lane: &mut Lane<S>,
    event: Identified,
    answer: ClaimAnswer,
    outcome: Outcome,
) -> Settlement {
    let became = match answer {
        ClaimAnswer::New if outcome == Outcome::Discarded => Became::Discarded,
        ClaimAnswer::New => Became::Processed,
        ClaimAnswer::Held(_) => Became::Held,
        ClaimAnswer::Collision => return recover::letter(lane, event, Reason::DigestCollision).await,
        ClaimAnswer::Duplicate { same_payload, .. } => {
            if !same_payload && lane.shared.on_mismatch != OnMismatch::Ignore {
                telemetry::payload_mismatch(&lane.shared.name);
                tracing::warn!(
                    consumer = lane.shared.name,
                    source = event.named.identity.source,
                    event_id = event.named.identity.id,
                    "an event came again with another payload; the first one counts"
                );
                if lane.shared.on_mismatch == OnMismatch::DeadLetter {
                    return recover::letter(lane, event, Reason::IdentityMismatch).await;
                }
            }
            tracing::debug!(event_id = event.named.identity.id, "duplicate");
            Became::Duplicate
        }
    };
    if became == Became::Duplicate {
        recover::close(&lane.shared, &event.delivery).await;
    }
    lane.settle(event.delivery, became, None)
}
