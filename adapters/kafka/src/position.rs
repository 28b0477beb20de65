//! Where a partition begins, when the group's offset does not say it or says what is not there.
//!
//! librdkafka would jump by itself. It is told not to (`auto.offset.reset=error`), so that every jump
//! is somebody's decision and in the log.

use onlyonce::source::SourceError;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::{Offset, TopicPartitionList};

use crate::config::{OutOfRange, Settings, StartAt};

/// What is to be done about one partition.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    /// The group's offset is good.
    AsCommitted,
    /// Begin here.
    At(i64),
    /// The group has no offset, and nobody said where to begin.
    NeedsStart,
    /// The next record is not there, and nobody said what to do about it.
    Gone,
}

/// Says in `partitions` where each of them begins, where it is not at the group's offset. Returns the
/// places that are to be stored at once.
pub(crate) fn place<C: ConsumerContext>(
    settings: &Settings,
    consumer: &BaseConsumer<C>,
    partitions: &mut TopicPartitionList,
) -> Result<TopicPartitionList, SourceError> {
    let mut begun = TopicPartitionList::new();
    if partitions.count() == 0 {
        return Ok(begun);
    }
    let committed = consumer
        .committed_offsets(partitions.clone(), settings.connect_timeout)
        .map_err(|e| {
            SourceError::broken(format_args!("Kafka does not tell the offsets of the group: {e}"))
        })?;
    for element in committed.elements() {
        let (topic, number) = (element.topic(), element.partition());
        if let Err(error) = element.error() {
            return Err(SourceError::broken(format_args!(
                "Kafka does not tell the offset of {topic}/{number}: {error}"
            )));
        }
        let offset = match element.offset() {
            Offset::Offset(offset) => Some(offset),
            _ => None,
        };
        // One question per partition, while the group waits: not without need. librdkafka notices a
        // missing record by itself, and then nobody waits for the explanation.
        if offset.is_some() && settings.out_of_range == OutOfRange::Fail {
            continue;
        }
        let (low, high) = consumer
            .fetch_watermarks(topic, number, settings.connect_timeout)
            .map_err(|e| {
                SourceError::broken(format_args!(
                    "Kafka does not tell where {topic}/{number} begins: {e}"
                ))
            })?;
        let at = match decide(settings, offset, low, high) {
            Place::AsCommitted => continue,
            Place::At(at) => at,
            Place::NeedsStart => return Err(needs_start(settings, topic, number)),
            Place::Gone => return Err(gone(settings, topic, number, offset.unwrap_or(-1), low, high)),
        };
        match offset {
            None => {
                tracing::info!(group = %settings.group, topic, partition = number, offset = at, "the group has no offset; beginning")
            }
            Some(offset) => tracing::warn!(
                group = %settings.group, topic, partition = number, offset, begins = low, ends = high, goes_on_at = at,
                "the next record is not there any more; going on as `out_of_range` says"
            ),
        }
        partitions
            .set_partition_offset(topic, number, Offset::Offset(at))
            .and_then(|()| begun.add_partition_offset(topic, number, Offset::Offset(at)))
            .map_err(|e| {
                SourceError::broken(format_args!("the place of {topic}/{number} was not taken: {e}"))
            })?;
    }
    Ok(begun)
}

/// The group has no offset, and nobody said where to begin.
pub(crate) fn needs_start(settings: &Settings, topic: &str, number: i32) -> SourceError {
    SourceError::fatal(format_args!(
        "the group {:?} has no offset for {topic}/{number}, and nothing says where to begin \
         (`.start_at(StartAt::Earliest)` for all there is, `StartAt::Latest` for what comes from now on)",
        settings.group
    ))
}

fn decide(settings: &Settings, committed: Option<i64>, low: i64, high: i64) -> Place {
    match committed {
        None => match settings.start_at {
            StartAt::Earliest => Place::At(low),
            StartAt::Latest => Place::At(high),
            StartAt::Fail => Place::NeedsStart,
        },
        Some(offset) if (low..=high).contains(&offset) => Place::AsCommitted,
        Some(_) => match settings.out_of_range {
            OutOfRange::Earliest => Place::At(low),
            OutOfRange::Latest => Place::At(high),
            OutOfRange::Fail => Place::Gone,
        },
    }
}

/// After librdkafka found a record missing: which, and what to do. With a policy the next session
/// begins as it says.
pub(crate) fn explain<C: ConsumerContext>(settings: &Settings, consumer: &BaseConsumer<C>) -> SourceError {
    let broken =
        |what: &str| SourceError::broken(format_args!("the next record of a partition is not there{what}"));
    if settings.out_of_range != OutOfRange::Fail {
        return broken("; beginning anew as `out_of_range` says");
    }
    let Ok(committed) = consumer.committed(settings.connect_timeout) else {
        return broken(", and Kafka does not tell the group's offsets");
    };
    for element in committed.elements() {
        let (topic, number) = (element.topic(), element.partition());
        if let (Offset::Offset(offset), Ok((low, high))) = (
            element.offset(),
            consumer.fetch_watermarks(topic, number, settings.connect_timeout),
        ) && !(low..=high).contains(&offset)
        {
            return gone(settings, topic, number, offset, low, high);
        }
    }
    broken("")
}

fn gone(settings: &Settings, topic: &str, number: i32, offset: i64, low: i64, high: i64) -> SourceError {
    let group = &settings.group;
    if offset < low {
        SourceError::fatal(format_args!(
            "the group {group:?} would go on at {offset} of {topic}/{number}, which now begins at {low}: {} offsets were \
             deleted before they were read (raise the topic's retention; `.out_of_range(OutOfRange::Earliest)` goes on without them)",
            low - offset
        ))
    } else {
        SourceError::fatal(format_args!(
            "the group {group:?} would go on at {offset} of {topic}/{number}, which ends at {high}: the log was cut or the \
             topic created anew (reset the group's offset, or say `.out_of_range(..)`)"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::KafkaBuilder;

    fn settings(start: StartAt, range: OutOfRange) -> Settings {
        KafkaBuilder::new("b:1", "g")
            .topic("t")
            .start_at(start)
            .out_of_range(range)
            .settings()
            .unwrap()
    }

    #[test]
    fn a_jump_is_always_somebody_s_decision() {
        use {OutOfRange as Range, StartAt as Start};
        for (start, range, committed, place) in [
            (Start::Fail, Range::Fail, None, Place::NeedsStart),
            (Start::Earliest, Range::Fail, None, Place::At(10)),
            (Start::Latest, Range::Fail, None, Place::At(20)),
            (Start::Fail, Range::Fail, Some(10), Place::AsCommitted),
            (Start::Latest, Range::Fail, Some(20), Place::AsCommitted),
            (Start::Earliest, Range::Fail, Some(9), Place::Gone),
            (Start::Earliest, Range::Fail, Some(21), Place::Gone),
            (Start::Fail, Range::Earliest, Some(9), Place::At(10)),
            (Start::Fail, Range::Latest, Some(21), Place::At(20)),
        ] {
            let settings = settings(start, range);
            assert_eq!(
                decide(&settings, committed, 10, 20),
                place,
                "{start:?} {range:?} {committed:?}"
            );
        }
    }

    #[test]
    fn what_is_gone_is_explained() {
        let settings = settings(StartAt::Fail, OutOfRange::Fail);
        let deleted = gone(&settings, "t", 3, 5, 10, 20);
        assert!(deleted.is_fatal());
        assert!(
            deleted.to_string().contains("5 offsets were deleted"),
            "{deleted}"
        );
        assert!(
            gone(&settings, "t", 3, 50, 10, 20)
                .to_string()
                .contains("ends at 20")
        );
    }
}
