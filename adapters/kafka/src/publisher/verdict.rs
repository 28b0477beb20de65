//! What the client library's reports say about a message, its topic and the brokers. Pure.

use onlyonce::publisher::PublishErrorKind;
use rdkafka::error::KafkaError;
use rdkafka::types::RDKafkaErrorCode as Code;

use super::config::Settings;
use PublishErrorKind::{Destination, Interrupted, Invalid, Refused, Unavailable};

/// What a report says. `alone`: no other message of the topic was under way with it.
pub(super) fn of(code: Code, alone: bool) -> PublishErrorKind {
    match code {
        // Of a whole batch, which may be too large by the number of its messages.
        Code::MessageSizeTooLarge | Code::MessageBatchTooLarge if !alone => Interrupted,
        Code::MessageSizeTooLarge | Code::MessageBatchTooLarge => Invalid,
        // A record without a key for a compacted topic, and those that were in one batch with it.
        Code::InvalidRecord if alone => Invalid,
        Code::InvalidRecord | Code::InvalidDifferentRecord => Interrupted,
        Code::UnknownTopicOrPartition
        | Code::UnknownTopic
        | Code::UnknownPartition
        | Code::InvalidTopic
        | Code::TopicAuthorizationFailed => Destination,
        // Thrown away with a producer that broke: what was sent may have arrived.
        Code::Fatal | Code::PurgeInflight => Interrupted,
        Code::PurgeQueue
        | Code::QueueFull
        | Code::MessageTimedOut
        | Code::OperationTimedOut
        | Code::RequestTimedOut
        | Code::BrokerTransportFailure
        | Code::AllBrokersDown
        | Code::Resolve
        | Code::Authentication
        | Code::SaslAuthenticationFailed
        | Code::ClusterAuthorizationFailed
        | Code::NotEnoughReplicas
        | Code::NotEnoughReplicasAfterAppend
        | Code::ThrottlingQuotaExceeded
        | Code::BrokerNotAvailable
        | Code::LeaderNotAvailable
        | Code::NotLeaderForPartition
        | Code::NetworkException
        | Code::KafkaStorageError => Unavailable,
        _ if is_of_the_producer(code) => Interrupted,
        _ => Refused,
    }
}

/// The producer's numbering of messages does not fit the broker's any more: it is of no use for others either.
fn is_of_the_producer(code: Code) -> bool {
    matches!(
        code,
        Code::OutOfOrderSequenceNumber
            | Code::DuplicateSequenceNumber
            | Code::InvalidProducerEpoch
            | Code::InvalidProducerIdMapping
            | Code::UnknownProducerId
            | Code::ProducerFenced
    )
}

/// Why a client cannot even be made, without the values of settings.
pub(super) fn creation(settings: &Settings, error: &KafkaError) -> String {
    match error {
        KafkaError::ClientConfig(_, _, name, _) => format!("the setting {name} is not possible"),
        KafkaError::ClientCreation(text) => {
            format!(
                "the Kafka client cannot be made: {}",
                settings.without_values(text)
            )
        }
        other => format!("the Kafka client cannot be made: {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_message_alone_can_be_too_large() {
        assert_eq!(of(Code::MessageSizeTooLarge, true), Invalid);
        assert_eq!(of(Code::MessageSizeTooLarge, false), Interrupted);
        assert_eq!(of(Code::InvalidRecord, true), Invalid);
        assert_eq!(of(Code::InvalidDifferentRecord, true), Interrupted);
    }

    #[test]
    fn reports_are_about_message_topic_or_brokers() {
        for (code, kind) in [
            (Code::UnknownTopicOrPartition, Destination),
            (Code::TopicAuthorizationFailed, Destination),
            (Code::MessageTimedOut, Unavailable),
            (Code::QueueFull, Unavailable),
            (Code::PurgeQueue, Unavailable),
            (Code::PurgeInflight, Interrupted),
            (Code::Fatal, Interrupted),
            (Code::OutOfOrderSequenceNumber, Interrupted),
            (Code::PolicyViolation, Refused),
        ] {
            assert_eq!(of(code, true), kind, "{code}");
        }
    }
}
