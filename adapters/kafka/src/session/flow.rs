//! Back-pressure: what is paused and resumed, so that neither the buffer nor what is unfinished of a
//! partition grows without bound.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onlyonce::source::Plan;
use rdkafka::consumer::{BaseConsumer, Consumer};

use super::Level;
use super::desk::Desk;
use super::keeper::Keeper;
use super::partitions::{list, note};
use crate::settle::{Generation, Partition};

/// How long a poll waits while work is out, whose completions want to be stored.
const BUSY_POLL: Duration = Duration::from_millis(10);
/// How long it waits while nothing is out; a stop is heard this late.
const IDLE_POLL: Duration = Duration::from_millis(50);
/// How long it takes part in the group while everything is paused. Given no time it would take one event
/// from a queue in which a rebalance may stand behind a thousand log lines.
const SERVING: Duration = Duration::from_millis(1);
/// So long a full buffer is only waited for. A pause throws away what the client has fetched ahead.
const FULL_FOR: Duration = Duration::from_millis(200);

/// What one turn of the loop is to do.
pub(super) enum Turn {
    Poll(Duration),
    /// The buffer is full; leave it alone for a moment.
    Wait,
}

/// A buffer of this many windows keeps the lanes busy between two polls.
const WINDOWS: usize = 4;
const LEAST_BUFFER: usize = 500;

/// How much may be on its way to the lanes, and how much is.
pub(super) struct Flow {
    keeper: Arc<Keeper>,
    level: Arc<Level>,
    buffer_records: usize,
    pub(super) buffer_bytes: usize,
    /// Since when the buffer has been full.
    full_since: Option<Instant>,
}

impl Flow {
    pub(super) fn new(keeper: Arc<Keeper>, level: Arc<Level>, plan: &Plan) -> Self {
        Self {
            keeper,
            level,
            buffer_records: plan.window.saturating_mul(WINDOWS).max(LEAST_BUFFER),
            buffer_bytes: plan.window_bytes.max(1),
            full_since: None,
        }
    }

    /// So much was handed on.
    pub(super) fn add(&self, records: usize, bytes: usize) {
        self.level.add(records, bytes);
    }

    /// Pauses and resumes what the buffer or the source asks for.
    pub(super) fn balance(&mut self, consumer: &BaseConsumer<Keeper>, desk: &mut Desk) -> Turn {
        let full = self.level.reaches(self.buffer_records, self.buffer_bytes);
        let room = !self
            .level
            .reaches(self.buffer_records.div_ceil(2), self.buffer_bytes.div_ceil(2));
        if !full {
            self.full_since = None;
        }
        let full_for = full.then(|| self.full_since.get_or_insert_with(Instant::now).elapsed());
        self.uncap(consumer, desk);
        if !desk.paused && (!desk.flows || full_for.is_some_and(|time| time >= FULL_FOR)) {
            desk.paused = true;
            let all = desk.assigned(|_| true);
            note(consumer.pause(&all), "pause");
        } else if desk.paused && desk.flows && room {
            desk.paused = false;
            let all = desk.assigned(|partition| !desk.capped.contains(partition));
            note(consumer.resume(&all), "resume");
        }
        match (desk.paused, full) {
            // Paused partitions bring nothing, so this serves the group and waits for orders in between.
            (true, _) => {
                desk.wait(BUSY_POLL);
                Turn::Poll(SERVING)
            }
            (false, true) => Turn::Wait,
            (false, false) if busy(desk) => Turn::Poll(BUSY_POLL),
            (false, false) => Turn::Poll(IDLE_POLL),
        }
    }

    /// Resumes partitions of which enough is done again.
    fn uncap(&self, consumer: &BaseConsumer<Keeper>, desk: &mut Desk) {
        if desk.capped.is_empty() {
            return;
        }
        let settings = &self.keeper.settings;
        let eased: Vec<Partition> = desk
            .capped
            .iter()
            .filter(|partition| {
                let span = desk
                    .ledger
                    .generation(partition)
                    .map(|generation| desk.ledger.span(generation))
                    .unwrap_or_default();
                span.records <= settings.partition_records / 2 && span.bytes <= settings.partition_bytes / 2
            })
            .cloned()
            .collect();
        for partition in &eased {
            desk.capped.remove(partition);
            tracing::info!(topic = %partition.topic, partition = partition.number, "partition resumed");
        }
        self.keeper.status.stuck(desk.capped.len());
        if !desk.paused && !eased.is_empty() {
            note(consumer.resume(&list(&eased)), "resume");
        }
    }

    pub(super) fn is_over_window(&self, desk: &Desk, generation: Generation) -> bool {
        let (span, settings) = (desk.ledger.span(generation), &self.keeper.settings);
        span.records >= settings.partition_records || span.bytes >= settings.partition_bytes
    }

    /// Pauses partitions of which too much is unfinished.
    pub(super) fn cap(&self, consumer: &BaseConsumer<Keeper>, over: &HashSet<Generation>) {
        let mut desk = self.keeper.desk();
        let over: Vec<Partition> = desk
            .ledger
            .assigned()
            .filter(|(_, generation)| over.contains(generation))
            .map(|(partition, _)| partition.clone())
            .collect();
        if over.is_empty() {
            return;
        }
        for partition in &over {
            tracing::warn!(
                topic = %partition.topic, partition = partition.number,
                "partition paused: an event of it is unfinished, and as much as allowed was delivered behind it"
            );
        }
        note(consumer.pause(&list(&over)), "pause");
        desk.capped.extend(over);
        self.keeper.status.stuck(desk.capped.len());
    }
}

fn busy(desk: &Desk) -> bool {
    desk.ledger
        .assigned()
        .any(|(_, generation)| desk.ledger.span(generation).records > 0)
}
