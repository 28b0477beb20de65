//! What librdkafka does not tell by itself: topics that are gone, and records that wait while none comes.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onlyonce::source::SourceError;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::{Offset, TopicPartitionList};

use super::keeper::Keeper;
use crate::check::{self, GLANCE};

/// How often it is asked whether records wait, while none came after a client was rebuilt for that.
const LOOK_AGAIN: Duration = Duration::from_secs(5);
/// How often it is made sure that a topic of which nothing is assigned to us is still there.
const TOPICS_EVERY: Duration = Duration::from_secs(5);

/// How long nothing has come, and what is known of why.
pub(super) struct Watch {
    keeper: Arc<Keeper>,
    since: Instant,
    looked: Instant,
    /// When it was looked last, records waited. They may just have been published.
    suspicious: bool,
    topics_seen: Instant,
}

impl Watch {
    pub(super) fn new(keeper: Arc<Keeper>) -> Self {
        let now = Instant::now();
        Self {
            keeper,
            since: now,
            looked: now,
            suspicious: false,
            topics_seen: now,
        }
    }

    /// Something has come, or nothing could.
    pub(super) fn reset(&mut self) {
        self.since = Instant::now();
        self.looked = self.since;
        self.suspicious = false;
    }

    /// One of a pattern is not missed; a client that is made anew does not ask for it any more.
    pub(super) fn what_is_missing(&self, consumer: &BaseConsumer<Keeper>) -> SourceError {
        let settings = &self.keeper.settings;
        settings
            .named_topics()
            .find_map(|topic| check::is_there(settings, consumer, topic).err())
            .unwrap_or_else(|| SourceError::broken("a topic or partition is not there any more"))
    }

    /// A topic that is deleted leaves its group like a partition that moves elsewhere, and librdkafka says
    /// nothing of it: the consumer would wait for ever.
    pub(super) fn look_for_topics(&mut self, consumer: &BaseConsumer<Keeper>) -> Result<(), SourceError> {
        if self.topics_seen.elapsed() < TOPICS_EVERY {
            return Ok(());
        }
        self.topics_seen = Instant::now();
        let settings = &self.keeper.settings;
        let assigned: HashSet<Arc<str>> = {
            let desk = self.keeper.desk();
            let assigned = desk.ledger.assigned();
            assigned.map(|(partition, _)| partition.topic.clone()).collect()
        };
        for topic in settings.named_topics().filter(|topic| !assigned.contains(*topic)) {
            check::is_there(settings, consumer, topic)?;
        }
        Ok(())
    }

    /// Records wait and none comes, although nothing holds them up: the client is rebuilt, once.
    pub(super) fn look_for_stalls(&mut self, consumer: &BaseConsumer<Keeper>) -> Result<(), SourceError> {
        let (status, limit) = (&self.keeper.status, self.keeper.settings.stall_after);
        let pause = if status.is_rebuilt() {
            LOOK_AGAIN
        } else {
            limit / 2
        };
        if self.looked.elapsed() < pause {
            return Ok(());
        }
        self.looked = Instant::now();
        let assigned = {
            let desk = self.keeper.desk();
            if desk.paused || !desk.capped.is_empty() {
                drop(desk);
                self.reset();
                return Ok(());
            }
            desk.assigned(|_| true)
        };
        match self.waiting(consumer, assigned) {
            // The brokers do not answer; that is told elsewhere.
            None => Ok(()),
            Some(0) => {
                status.flows();
                self.reset();
                Ok(())
            }
            Some(waiting) => {
                let suspicious = std::mem::replace(&mut self.suspicious, true);
                if suspicious && self.since.elapsed() >= limit {
                    self.stalled(waiting)
                } else {
                    Ok(())
                }
            }
        }
    }

    fn stalled(&self, waiting: u64) -> Result<(), SourceError> {
        let keeper = &self.keeper;
        let problem = format!(
            "nothing was received for {} s although {waiting} records wait",
            self.since.elapsed().as_secs()
        );
        if keeper.status.stalled(problem.clone()) {
            tracing::warn!(group = %keeper.settings.group, waiting, "no record comes although some wait; rebuilding the Kafka client");
            return Err(SourceError::broken(format_args!(
                "{problem}; the client is rebuilt"
            )));
        }
        Ok(())
    }

    /// How many records of these partitions wait, as the brokers tell. What the client knows by itself
    /// it knows by fetching, which is what may not work.
    fn waiting(&self, consumer: &BaseConsumer<Keeper>, mut partitions: TopicPartitionList) -> Option<u64> {
        if partitions.count() == 0 {
            return Some(0);
        }
        partitions.set_all_offsets(Offset::End).ok()?;
        let ends = consumer.offsets_for_times(partitions, GLANCE).ok()?;
        let fetched = self.keeper.fetched();
        let mut waiting = Some(0);
        for end in ends.elements() {
            let next = fetched
                .get(end.topic())
                .and_then(|topic| topic.get(&end.partition()));
            match (next, end.offset()) {
                (Some(next), Offset::Offset(end)) if end > *next => {
                    waiting = Some(waiting.unwrap_or(0) + (end - next) as u64);
                }
                (Some(_), Offset::Offset(_)) => {}
                // That nothing waits is said only of what is known of all.
                _ => waiting = waiting.filter(|waiting| *waiting > 0),
            }
        }
        waiting
    }
}
