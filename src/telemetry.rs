//! Every span, event and metric name, in one place.
//!
//! Names follow the OpenTelemetry semantic conventions 1.44 for messaging where these have one;
//! `onlyonce.*` are our own. Labels never hold an id, a key or anything else that a message brings.
//!
//! | metric | kind | labels | what |
//! |---|---|---|---|
//! | `onlyonce.events` | counter | consumer, system, outcome | deliveries by what became of them |
//! | `onlyonce.attempts.failed` | counter | consumer, kind | attempts that failed, by kind of failure |
//! | `onlyonce.payload.mismatches` | counter | consumer | a known identity with another payload |
//! | `onlyonce.paused` | gauge | consumer | 1 while the database cannot be worked with |
//! | `onlyonce.source.breaks` | counter | consumer, system | times the source broke and was rebuilt |
//! | `onlyonce.source.stuck` | gauge | consumer, system | partitions that wait for an unfinished event |
//! | `onlyonce.inbox.due` | gauge | consumer | held events that are due or running |
//! | `onlyonce.inbox.dead` | gauge | consumer | held events that need a person |
//! | `onlyonce.inbox.oldest_due.seconds` | gauge | consumer | how long the oldest due one has waited |
//! | `onlyonce.purged` | counter | consumer | claims that left the dedup window |
//! | `onlyonce.purge.lag.seconds` | gauge | consumer | how far the oldest claim is past the window |
//! | `onlyonce.outbox.pending` | gauge | relay | outgoing events that are neither sent nor parked |
//! | `onlyonce.outbox.parked` | gauge | relay | outgoing events that need a person |
//! | `onlyonce.outbox.oldest.seconds` | gauge | relay | the age of the oldest event that is due |
//! | `onlyonce.outbox.failed` | counter | relay, system, kind | publishes that ended without a confirmation |
//! | `onlyonce.outbox.parkings` | counter | relay | events that were parked |
//! | `onlyonce.outbox.purged` | counter | relay | events that were sent, kept, and deleted |
//! | `onlyonce.relay.lanes` | gauge | relay | lanes that this instance holds |
//! | `onlyonce.relay.lane_changes` | counter | relay | lanes that it got or lost |
//! | `messaging.client.sent.messages` | counter | relay, system | outgoing events that were confirmed |
//! | `messaging.client.operation.duration` | histogram, s | relay, system | one publish, until the broker's answer |
//! | `messaging.client.consumed.messages` | counter | consumer, system | deliveries received |
//! | `messaging.process.duration` | histogram, s | consumer, system | one transaction, begin to commit |
//!
//! Outcomes: `processed`, `duplicate`, `held`, `discarded`, `retry_held`, `dead_lettered`, `released`.
//!
//! The span `process` carries `messaging.system`, `messaging.destination.name`,
//! `messaging.operation.name`, `messaging.operation.type`, `messaging.consumer.group.name` and, for
//! one event, `messaging.message.id`; for a batch, `messaging.batch.message_count`.
//!
//! The span `send` (`publish` on RabbitMQ) is one outgoing event until the broker's answer. It carries
//! `messaging.system`, `messaging.destination.name`, `messaging.operation.name`,
//! `messaging.operation.type`, `messaging.message.id` and `onlyonce.origin.traceparent`, the trace in
//! which the event was written.

use std::time::Duration;

use crate::publisher::PublishErrorKind;
use crate::store::{Backlog, OutgoingBacklog};

/// What became of a delivery, as the label `onlyonce.outcome` says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Processed,
    Duplicate,
    Held,
    Discarded,
    RetryHeld,
    DeadLettered,
    Released,
}

#[cfg(feature = "metrics")]
impl Outcome {
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Processed => "processed",
            Self::Duplicate => "duplicate",
            Self::Held => "held",
            Self::Discarded => "discarded",
            Self::RetryHeld => "retry_held",
            Self::DeadLettered => "dead_lettered",
            Self::Released => "released",
        }
    }
}

/// Why a publish failed, as the label `error.type` says it.
#[cfg(feature = "metrics")]
const fn kind_as_str(kind: PublishErrorKind) -> &'static str {
    match kind {
        PublishErrorKind::Invalid => "invalid",
        PublishErrorKind::Refused => "refused",
        PublishErrorKind::Interrupted => "interrupted",
        PublishErrorKind::Destination => "destination",
        PublishErrorKind::Unavailable => "unavailable",
    }
}

pub(crate) use emit::*;

#[cfg(feature = "metrics")]
mod emit {
    use metrics::{counter, gauge, histogram};

    use super::{Backlog, Duration, Outcome, OutgoingBacklog, PublishErrorKind, kind_as_str};

    const RELAY: &str = "onlyonce.relay";
    const CONSUMER: &str = "onlyonce.consumer";
    const SYSTEM: &str = "messaging.system";
    const OUTCOME: &str = "onlyonce.outcome";
    const KIND: &str = "error.type";

    pub(crate) fn settled(consumer: &str, system: &'static str, outcome: Outcome) {
        counter!("onlyonce.events", CONSUMER => consumer.to_owned(), SYSTEM => system, OUTCOME => outcome.as_str())
            .increment(1);
    }

    pub(crate) fn attempt_failed(consumer: &str, kind: &'static str) {
        counter!("onlyonce.attempts.failed", CONSUMER => consumer.to_owned(), KIND => kind).increment(1);
    }

    pub(crate) fn payload_mismatch(consumer: &str) {
        counter!("onlyonce.payload.mismatches", CONSUMER => consumer.to_owned()).increment(1);
    }

    pub(crate) fn paused(consumer: &str, paused: bool) {
        gauge!("onlyonce.paused", CONSUMER => consumer.to_owned()).set(if paused { 1.0 } else { 0.0 });
    }

    pub(crate) fn source_broke(consumer: &str, system: &'static str) {
        counter!("onlyonce.source.breaks", CONSUMER => consumer.to_owned(), SYSTEM => system).increment(1);
    }

    pub(crate) fn stuck(consumer: &str, system: &'static str, count: usize) {
        gauge!("onlyonce.source.stuck", CONSUMER => consumer.to_owned(), SYSTEM => system).set(count as f64);
    }

    pub(crate) fn received(consumer: &str, system: &'static str, count: usize) {
        counter!("messaging.client.consumed.messages", CONSUMER => consumer.to_owned(), SYSTEM => system)
            .increment(count as u64);
    }

    pub(crate) fn transaction(consumer: &str, system: &'static str, took: Duration) {
        histogram!("messaging.process.duration", CONSUMER => consumer.to_owned(), SYSTEM => system)
            .record(took.as_secs_f64());
    }

    pub(crate) fn backlog(consumer: &str, backlog: &Backlog) {
        gauge!("onlyonce.inbox.due", CONSUMER => consumer.to_owned()).set(backlog.due as f64);
        gauge!("onlyonce.inbox.dead", CONSUMER => consumer.to_owned()).set(backlog.dead as f64);
        gauge!("onlyonce.inbox.oldest_due.seconds", CONSUMER => consumer.to_owned())
            .set(backlog.oldest_due.as_secs_f64());
    }

    pub(crate) fn purged(consumer: &str, rows: u64, lag: Duration) {
        counter!("onlyonce.purged", CONSUMER => consumer.to_owned()).increment(rows);
        gauge!("onlyonce.purge.lag.seconds", CONSUMER => consumer.to_owned()).set(lag.as_secs_f64());
    }

    pub(crate) fn published(
        relay: &str,
        system: &'static str,
        took: Duration,
        failed: Option<PublishErrorKind>,
    ) {
        histogram!("messaging.client.operation.duration", RELAY => relay.to_owned(), SYSTEM => system)
            .record(took.as_secs_f64());
        match failed {
            None => counter!("messaging.client.sent.messages", RELAY => relay.to_owned(), SYSTEM => system),
            Some(kind) => counter!(
                "onlyonce.outbox.failed", RELAY => relay.to_owned(), SYSTEM => system, KIND => kind_as_str(kind)
            ),
        }
        .increment(1);
    }

    pub(crate) fn row_parked(relay: &str) {
        counter!("onlyonce.outbox.parkings", RELAY => relay.to_owned()).increment(1);
    }

    pub(crate) fn lanes(relay: &str, held: usize, changed: usize) {
        gauge!("onlyonce.relay.lanes", RELAY => relay.to_owned()).set(held as f64);
        counter!("onlyonce.relay.lane_changes", RELAY => relay.to_owned()).increment(changed as u64);
    }

    pub(crate) fn outgoing(relay: &str, backlog: &OutgoingBacklog) {
        gauge!("onlyonce.outbox.pending", RELAY => relay.to_owned()).set(backlog.pending as f64);
        gauge!("onlyonce.outbox.parked", RELAY => relay.to_owned()).set(backlog.parked as f64);
        gauge!("onlyonce.outbox.oldest.seconds", RELAY => relay.to_owned())
            .set(backlog.oldest.unwrap_or_default().as_secs_f64());
    }

    pub(crate) fn sent_purged(relay: &str, rows: u64) {
        counter!("onlyonce.outbox.purged", RELAY => relay.to_owned()).increment(rows);
    }
}

/// Without the feature `metrics` every one of these compiles to nothing.
#[cfg(not(feature = "metrics"))]
mod emit {
    use super::{Backlog, Duration, Outcome, OutgoingBacklog, PublishErrorKind};

    pub(crate) fn settled(_consumer: &str, _system: &'static str, _outcome: Outcome) {}
    pub(crate) fn attempt_failed(_consumer: &str, _kind: &'static str) {}
    pub(crate) fn payload_mismatch(_consumer: &str) {}
    pub(crate) fn paused(_consumer: &str, _paused: bool) {}
    pub(crate) fn source_broke(_consumer: &str, _system: &'static str) {}
    pub(crate) fn stuck(_consumer: &str, _system: &'static str, _count: usize) {}
    pub(crate) fn received(_consumer: &str, _system: &'static str, _count: usize) {}
    pub(crate) fn transaction(_consumer: &str, _system: &'static str, _took: Duration) {}
    pub(crate) fn backlog(_consumer: &str, _backlog: &Backlog) {}
    pub(crate) fn purged(_consumer: &str, _rows: u64, _lag: Duration) {}
    pub(crate) fn published(
        _relay: &str,
        _system: &'static str,
        _took: Duration,
        _failed: Option<PublishErrorKind>,
    ) {
    }
    pub(crate) fn row_parked(_relay: &str) {}
    pub(crate) fn lanes(_relay: &str, _held: usize, _changed: usize) {}
    pub(crate) fn outgoing(_relay: &str, _backlog: &OutgoingBacklog) {}
    pub(crate) fn sent_purged(_relay: &str, _rows: u64) {}
}
