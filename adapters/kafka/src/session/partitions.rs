//! Partitions as librdkafka wants them, and calls on them that may come too late.

use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::types::RDKafkaErrorCode;

use crate::explain;
use crate::settle::Partition;

/// Commits what is stored of what is ours. Never a number of our own: a broker takes it from anybody,
/// also for a partition that somebody else has by now.
pub(super) fn commit<C: ConsumerContext>(consumer: &BaseConsumer<C>) {
    if let Err(error) = consumer.commit_consumer_state(CommitMode::Sync)
        && !explain::nothing_to_commit(&error)
    {
        tracing::warn!(%error, "the last offsets were not committed; what they cover comes again and is found to be done");
    }
}

pub(super) fn list(partitions: &[Partition]) -> TopicPartitionList {
    let mut list = TopicPartitionList::new();
    for partition in partitions {
        list.add_partition(&partition.topic, partition.number);
    }
    list
}

pub(super) fn listed(partitions: &TopicPartitionList) -> String {
    let names: Vec<String> = partitions
        .elements()
        .iter()
        .map(|element| format!("{}/{}", element.topic(), element.partition()))
        .collect();
    names.join(" ")
}

/// Local calls that fail when a partition has just left; the rebalance that follows puts it right.
pub(super) fn note(result: KafkaResult<()>, what: &str) {
    if let Err(error) = result
        && !matches!(error, KafkaError::StoreOffset(RDKafkaErrorCode::State))
    {
        tracing::debug!(%error, "could not {what} partitions");
    }
}
