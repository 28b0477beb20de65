//! What the polling and the callbacks that happen inside of it share.

use std::collections::{HashMap, HashSet};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::Duration;

use onlyonce::source::SourceError;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::{Offset, TopicPartitionList};

use super::Order;
use super::partitions::{listed, note};
use crate::settle::{Generation, Ledger, Partition};

/// Nobody else has it, and it is never locked across a poll.
pub(super) struct Desk {
    pub(super) ledger: Ledger,
    pub(super) orders: Receiver<Order>,
    /// Assignments that end as soon as nothing of them runs.
    pub(super) draining: HashSet<Generation>,
    /// The source wants records.
    pub(super) flows: bool,
    /// Everything is paused: the source wants none, or its buffer is full.
    pub(super) paused: bool,
    /// Partitions that are paused because too much of them is unfinished.
    pub(super) capped: HashSet<Partition>,
    /// The offset last stored of each partition, while it is assigned.
    stored: HashMap<Partition, i64>,
    pub(super) finishing: bool,
    /// The source is gone.
    pub(super) orphaned: bool,
    /// Found inside of a callback; ends the session.
    pub(super) failure: Option<SourceError>,
}

impl Desk {
    pub(super) fn new(orders: Receiver<Order>, flows: bool) -> Self {
        Self {
            ledger: Ledger::default(),
            orders,
            draining: HashSet::new(),
            flows,
            paused: !flows,
            capped: HashSet::new(),
            stored: HashMap::new(),
            finishing: false,
            orphaned: false,
            failure: None,
        }
    }

    pub(super) fn carry_out(&mut self, order: Order) {
        match order {
            Order::Done(tickets) => {
                for ticket in tickets {
                    // A void one is of an assignment that is over: its record comes again, elsewhere.
                    self.ledger.finish(ticket);
                }
            }
            Order::Drained(generation) => {
                self.draining.remove(&generation);
            }
            Order::Flow(flows) => self.flows = flows,
            Order::Finish => self.finishing = true,
        }
    }

    pub(super) fn carry_out_all(&mut self) {
        loop {
            match self.orders.try_recv() {
                Ok(order) => self.carry_out(order),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    self.orphaned = true;
                    return;
                }
            }
        }
    }

    /// Waits for an order, and carries out all there are.
    pub(super) fn wait(&mut self, time: Duration) {
        match self.orders.recv_timeout(time) {
            Ok(order) => {
                self.carry_out(order);
                self.carry_out_all();
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => self.orphaned = true,
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.finishing || self.orphaned
    }

    /// The partition is not ours any more.
    pub(super) fn forget(&mut self, partition: &Partition) {
        self.ledger.revoke(partition);
        self.capped.remove(partition);
        self.stored.remove(partition);
    }

    /// What is assigned and meets the condition.
    pub(super) fn assigned(&self, condition: impl Fn(&Partition) -> bool) -> TopicPartitionList {
        let mut list = TopicPartitionList::new();
        for (partition, _) in self.ledger.assigned() {
            if condition(partition) {
                list.add_partition(&partition.topic, partition.number);
            }
        }
        list
    }

    /// Stores what is committed where that is more than what was stored of this assignment.
    pub(super) fn raise<C: ConsumerContext>(
        &self,
        consumer: &BaseConsumer<C>,
        committed: &TopicPartitionList,
    ) {
        let higher = higher(&self.stored, committed);
        if higher.count() > 0 {
            tracing::info!(partitions = %listed(&higher), "another member has committed more of what leaves");
            note(consumer.store_offsets(&higher), "store the committed offsets of");
        }
    }

    /// Tells librdkafka what may be committed; it does so once a second, and when a partition leaves.
    pub(super) fn store<C: ConsumerContext>(&mut self, consumer: &BaseConsumer<C>) {
        let advanced = self.ledger.advanced();
        if advanced.is_empty() {
            return;
        }
        let mut offsets = TopicPartitionList::with_capacity(advanced.len());
        for (partition, done) in &advanced {
            self.stored.insert(partition.clone(), done + 1);
            // The next one to read is what Kafka calls the offset of a group.
            if let Err(error) =
                offsets.add_partition_offset(&partition.topic, partition.number, Offset::Offset(done + 1))
            {
                tracing::debug!(topic = %partition.topic, partition = partition.number, %error, "an offset was not stored");
            }
        }
        if let Err(error) = consumer.store_offsets(&offsets) {
            // The partition has left under us: its records come again, to its new owner.
            tracing::debug!(%error, "offsets were not stored");
        }
    }
}

/// Which partitions are committed further than they were stored, and how far.
fn higher(stored: &HashMap<Partition, i64>, committed: &TopicPartitionList) -> TopicPartitionList {
    let mut higher = TopicPartitionList::new();
    for element in committed.elements() {
        let partition = Partition {
            topic: element.topic().into(),
            number: element.partition(),
        };
        if let (Some(stored), Offset::Offset(offset)) = (stored.get(&partition), element.offset())
            && offset > *stored
        {
            // It cannot fail on a number.
            let _ = higher.add_partition_offset(&partition.topic, partition.number, element.offset());
        }
    }
    higher
}

#[cfg(test)]
mod tests {
    use rdkafka::error::KafkaResult;

    use super::*;

    #[test]
    fn only_what_others_have_committed_further_is_raised() -> KafkaResult<()> {
        let partition = |number| Partition {
            topic: "orders".into(),
            number,
        };
        let stored = HashMap::from([(partition(0), 341), (partition(1), 379), (partition(2), 10)]);
        let mut committed = TopicPartitionList::new();
        committed.add_partition_offset("orders", 0, Offset::Offset(379))?; // a new owner came further
        committed.add_partition_offset("orders", 1, Offset::Offset(341))?; // ours is not committed yet
        committed.add_partition_offset("orders", 2, Offset::Invalid)?; // nobody has committed anything
        committed.add_partition_offset("orders", 3, Offset::Offset(7))?; // we have stored nothing
        let raised: Vec<_> = higher(&stored, &committed)
            .elements()
            .iter()
            .map(|element| (element.partition(), element.offset()))
            .collect();
        assert_eq!(raised, [(0, Offset::Offset(379))]);
        Ok(())
    }
}
