//! The thread itself: polls, hands on what has come, stores what is done.

use std::collections::HashSet;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use onlyonce::source::{Plan, SourceError};
use rdkafka::Message;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::BorrowedMessage;

use super::flow::{Flow, Turn};
use super::keeper::Keeper;
use super::partitions::commit;
use super::watch::Watch;
use super::{Level, News};
use crate::buffer::Record;
use crate::explain::{self, Judgement};
use crate::identity::raw_event;
use crate::position;
use crate::settle::{Generation, Partition, Ticket};

/// How long a full buffer is left alone at a time. It holds several windows, so that no lane runs dry, and
/// a thousand completions wake this thread a few times instead of a thousand times.
const FULL_REST: Duration = Duration::from_millis(4);
/// How often offsets are stored; they are committed once a second, and when a partition leaves.
const STORE_EVERY: Duration = Duration::from_millis(20);
/// The most records that are handed on at once.
const BATCH: usize = 256;

pub(super) struct Poller {
    consumer: BaseConsumer<Keeper>,
    keeper: Arc<Keeper>,
    flow: Flow,
    watch: Watch,
    last_topic: Option<Arc<str>>,
    stored: Instant,
}

impl Poller {
    pub(super) fn new(consumer: BaseConsumer<Keeper>, level: Arc<Level>, plan: &Plan) -> Self {
        let keeper = consumer.context().clone();
        Self {
            consumer,
            flow: Flow::new(keeper.clone(), level, plan),
            watch: Watch::new(keeper.clone()),
            keeper,
            last_topic: None,
            stored: Instant::now(),
        }
    }

    pub(super) fn run(&mut self) -> Result<(), SourceError> {
        let keeper = self.keeper.clone();
        loop {
            let turn = {
                let mut desk = keeper.desk();
                desk.carry_out_all();
                if self.stored.elapsed() >= STORE_EVERY || desk.is_over() {
                    desk.store(&self.consumer);
                    self.stored = Instant::now();
                }
                if let Some(failure) = desk.failure.take() {
                    return Err(failure);
                }
                if desk.is_over() {
                    // What was stored is committed before anybody is told that this is over.
                    commit(&self.consumer);
                    return Ok(());
                }
                let was_paused = desk.paused;
                let turn = self.flow.balance(&self.consumer, &mut desk);
                if was_paused && !desk.paused {
                    self.watch.reset();
                }
                turn
            };
            match turn {
                Turn::Wait => thread::sleep(FULL_REST),
                Turn::Poll(time) => self.poll(time)?,
            }
            self.watch.look_for_stalls(&self.consumer)?;
            self.watch.look_for_topics(&self.consumer)?;
        }
    }

    /// Takes what has come, at most a batch, and hands it on.
    fn poll(&mut self, time: Duration) -> Result<(), SourceError> {
        let mut records = Vec::new();
        let (mut bytes, mut time) = (0, time);
        let mut over: HashSet<Generation> = HashSet::new();
        let ended = loop {
            match self.consumer.poll(time) {
                Some(Ok(message)) => {
                    let Some((ticket, record)) = take(&self.keeper, &mut self.last_topic, &message) else {
                        continue;
                    };
                    bytes += record.bytes;
                    records.push((ticket, record));
                    if self.flow.is_over_window(&self.keeper.desk(), ticket.generation) {
                        over.insert(ticket.generation);
                        // One more would be one too many.
                        break Ok(());
                    }
                }
                Some(Err(error)) => match explain::judge(&error, &self.keeper.words()) {
                    Judgement::Passing => tracing::debug!(%error, "Kafka client"),
                    Judgement::Trouble(problem) => self.keeper.status.down(problem),
                    Judgement::OutOfRange => {
                        break Err(position::explain(&self.keeper.settings, &self.consumer));
                    }
                    Judgement::Missing => break Err(self.watch.what_is_missing(&self.consumer)),
                    Judgement::Over(error) => break Err(error),
                },
                None => break Ok(()),
            }
            if records.len() >= BATCH || bytes >= self.flow.buffer_bytes {
                break Ok(());
            }
            time = Duration::ZERO;
        };
        if !records.is_empty() {
            self.watch.reset();
            self.keeper.status.flows();
            self.flow.add(records.len(), bytes);
            // It fails if the source is gone, and then so is this session at its next turn.
            let _ = self.keeper.news.send(News::Records(records));
            self.flow.cap(&self.consumer, &over);
        }
        ended
    }
}

/// The event of a record, unless it is one that was handed on before.
fn take(
    keeper: &Keeper,
    last_topic: &mut Option<Arc<str>>,
    message: &BorrowedMessage<'_>,
) -> Option<(Ticket, Record)> {
    let topic = match last_topic {
        Some(topic) if **topic == *message.topic() => topic.clone(),
        _ => last_topic.insert(message.topic().into()).clone(),
    };
    let settings = &keeper.settings;
    let event = raw_event(message, &topic, &settings.weak_source, &settings.ordering_key);
    let partition = Partition {
        topic,
        number: message.partition(),
    };
    let bytes = event.size();
    let ticket = keeper
        .desk()
        .ledger
        .delivered(&partition, message.offset(), bytes)?;
    let record = Record {
        event: event.into(),
        bytes,
        returns: 0,
    };
    Some((ticket, record))
}
