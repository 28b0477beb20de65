//! What librdkafka calls back: partitions that come and leave, commits, statistics, complaints.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use onlyonce::source::SourceError;
use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext, RebalanceProtocol};
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::types::RDKafkaRespErr;
use rdkafka::{Statistics, TopicPartitionList};
use tokio::sync::mpsc::UnboundedSender;

use super::News;
use super::desk::Desk;
use super::partitions::{commit, listed, note};
use crate::check::GLANCE;
use crate::config::Settings;
use crate::explain;
use crate::position;
use crate::settle::{Generation, Partition};
use crate::status::Status;

/// It is called on the polling thread, inside of its polls.
pub(super) struct Keeper {
    pub(super) desk: Mutex<Desk>,
    pub(super) settings: Arc<Settings>,
    pub(super) status: Arc<Status>,
    pub(super) news: UnboundedSender<News>,
    /// What was said of the error that the poll at hand returns.
    pub(super) words: Mutex<String>,
    /// The offset that is fetched next, by topic and partition, as of the last statistics. Marks of
    /// transactions are passed over by it, which are never delivered.
    pub(super) fetched: Mutex<HashMap<String, HashMap<i32, i64>>>,
}

impl Keeper {
    pub(super) fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn words(&self) -> MutexGuard<'_, String> {
        self.words.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn fetched(&self) -> MutexGuard<'_, HashMap<String, HashMap<i32, i64>>> {
        self.fetched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Partitions are ours from now on.
    pub(super) fn assigned(&self, consumer: &BaseConsumer<Self>, partitions: &mut TopicPartitionList) {
        let mut desk = self.desk();
        let placed = position::place(&self.settings, consumer, partitions);
        for element in partitions.elements() {
            desk.ledger.assign(Partition {
                topic: element.topic().into(),
                number: element.partition(),
            });
        }
        let assigned = match consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => consumer.incremental_assign(partitions),
            _ => consumer.assign(partitions),
        };
        match (placed, assigned) {
            (Ok(begun), Ok(())) => {
                // librdkafka keeps a pause beyond the assignment: a partition that left while it was
                // paused would be silent for ever when it comes back.
                if desk.paused {
                    note(consumer.pause(partitions), "pause");
                } else {
                    note(consumer.resume(partitions), "resume");
                }
                if begun.count() > 0 {
                    // Where a new group begins is known from now on, also if it dies before its first event.
                    note(consumer.store_offsets(&begun), "store the first offsets of");
                }
                self.status.assigned();
                tracing::info!(group = %self.settings.group, partitions = %listed(partitions), "partitions assigned");
            }
            // Nothing can come: where there is no offset, `auto.offset.reset` is an error.
            (Err(error), _) => desk.failure = Some(error),
            (_, Err(error)) => {
                desk.failure = Some(SourceError::broken(format_args!(
                    "Kafka's assignment was not taken: {error}"
                )));
            }
        }
    }

    /// Partitions leave. In good order what runs is waited for and committed; what is lost already has
    /// another owner, and nothing may be stored.
    pub(super) fn revoked(&self, consumer: &BaseConsumer<Self>, partitions: &TopicPartitionList) {
        let mut desk = self.desk();
        let lost = consumer.assignment_lost();
        let leaving: Vec<Partition> = partitions
            .elements()
            .iter()
            .map(|element| Partition {
                topic: element.topic().into(),
                number: element.partition(),
            })
            .collect();
        let generations: Vec<Generation> = leaving
            .iter()
            .filter_map(|partition| desk.ledger.generation(partition))
            .collect();
        desk.carry_out_all();
        // Nobody hears it if the source is gone.
        let _ = self.news.send(News::Revoked(generations.clone()));
        if !lost {
            self.drain(&mut desk, &generations);
            desk.store(consumer);
            self.yield_to_others(&desk, consumer, partitions);
            commit(consumer);
        }
        for partition in &leaving {
            desk.forget(partition);
        }
        self.status.stuck(desk.capped.len());
        let unassigned = match consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => consumer.incremental_unassign(partitions),
            _ => consumer.unassign(),
        };
        note(unassigned, "unassign");
        if !leaving.is_empty() && !desk.is_over() {
            let partitions = listed(partitions);
            if lost {
                tracing::warn!(group = %self.settings.group, %partitions, "partitions lost before they could be left in good order; what ran comes again");
            } else {
                tracing::info!(group = %self.settings.group, %partitions, "partitions revoked");
            }
        }
    }

    /// Never sets back what another member has committed.
    ///
    /// A member whose request to join was lost with its connection does not know that the group went on
    /// without it, and librdkafka does not say that its partitions are lost: it joins again, is told to give
    /// them up, and commits as a member in good standing what it had done, which by now may be less
    /// than what their new owner did. librdkafka commits what is stored, also of its own accord when
    /// partitions leave, so what is stored is raised to what is committed.
    fn yield_to_others(&self, desk: &Desk, consumer: &BaseConsumer<Self>, partitions: &TopicPartitionList) {
        match consumer.committed_offsets(partitions.clone(), GLANCE) {
            Ok(committed) => desk.raise(consumer, &committed),
            // Then the commit does not come through either, or sets back what comes again as duplicates.
            Err(error) => {
                tracing::debug!(group = %self.settings.group, %error, "the committed offsets were not told");
            }
        }
    }

    /// Heartbeats go on meanwhile, on a thread of librdkafka; the group waits for this member.
    pub(super) fn drain(&self, desk: &mut Desk, generations: &[Generation]) {
        let until = Instant::now() + self.settings.drain_limit;
        desk.draining.extend(generations);
        while !desk.draining.is_empty() && !desk.is_over() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::warn!(
                    group = %self.settings.group, partitions = desk.draining.len(),
                    "partitions leave while events of them still run; those come again elsewhere"
                );
                break;
            }
            desk.wait(left);
        }
        desk.draining.clear();
    }
}

impl ConsumerContext for Keeper {
    fn rebalance(
        &self,
        consumer: &BaseConsumer<Self>,
        error: RDKafkaRespErr,
        partitions: &mut TopicPartitionList,
    ) {
        if error == RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS {
            self.assigned(consumer, partitions);
        } else {
            self.revoked(consumer, partitions);
        }
    }

    fn commit_callback(&self, result: KafkaResult<()>, _offsets: &TopicPartitionList) {
        match result {
            // The stored offsets stay, and go with the next commit: never an old number after a new one.
            Err(error) if !explain::nothing_to_commit(&error) => {
                tracing::debug!(group = %self.settings.group, %error, "a commit failed, the next one covers it");
            }
            _ => {}
        }
    }
}

impl ClientContext for Keeper {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        explain::log(level, facility, message);
    }

    fn stats(&self, statistics: Statistics) {
        let broker_up = statistics.brokers.values().any(|broker| broker.state == "UP");
        let lags = statistics
            .topics
            .values()
            .flat_map(|topic| topic.partitions.values())
            // The group's lag counts what is not committed. Here counts what was not fetched: marks of
            // transactions are never delivered, and would be a lag for ever.
            .filter(|partition| partition.next_offset >= 0 && partition.ls_offset >= 0)
            .map(|partition| {
                (partition.ls_offset - partition.next_offset).max(0) as u64
                    + partition.fetchq_cnt.max(0) as u64
            });
        let backlog = lags.fold(None, |sum: Option<u64>, lag| Some(sum.unwrap_or(0) + lag));
        self.status.observed(broker_up, backlog);
        *self.fetched() = statistics
            .topics
            .into_iter()
            .map(|(name, topic)| {
                let next = topic.partitions.into_iter();
                let known = next.filter(|(_, partition)| partition.next_offset >= 0);
                (name, known.map(|(number, p)| (number, p.next_offset)).collect())
            })
            .collect();
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(group = %self.settings.group, %error, reason, "Kafka client");
        *self.words() = self.settings.without_values(reason);
        if explain::all_away(&error) {
            self.status
                .down(format!("no Kafka broker can be reached: {reason}"));
        }
    }
}
