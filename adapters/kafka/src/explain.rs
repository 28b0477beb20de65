//! What the client library's errors mean here, and how its words are told without a secret.

use onlyonce::source::SourceError;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::KafkaError;
use rdkafka::types::RDKafkaErrorCode as Code;

use crate::config::Settings;

/// What an error of a poll asks for.
#[derive(Debug)]
pub(crate) enum Judgement {
    /// Nothing: librdkafka deals with it, or a callback did.
    Passing,
    /// Nothing either, but it is a reason not to be ready.
    Trouble(String),
    /// A partition's next record is not there.
    OutOfRange,
    /// A topic or a partition is not there.
    Missing,
    /// The session is over.
    Over(SourceError),
}

/// What is to be done about an error. `reason` is what the client said of it, without secrets.
pub(crate) fn judge(error: &KafkaError, reason: &str) -> Judgement {
    match error {
        KafkaError::MessageConsumptionFatal(code) => Judgement::Over(fatal(*code)),
        KafkaError::MessageConsumption(code) | KafkaError::Global(code) => judge_code(*code, reason),
        KafkaError::PartitionEOF(_) => Judgement::Passing,
        other => Judgement::Trouble(format!("Kafka: {other}")),
    }
}

fn judge_code(code: Code, reason: &str) -> Judgement {
    match code {
        Code::Authentication if is_cut_off(reason) => Judgement::Trouble(format!(
            "the connection to a Kafka broker broke during the login: {reason}"
        )),
        Code::AutoOffsetReset | Code::OffsetOutOfRange => Judgement::OutOfRange,
        // The revocation that follows says what is lost.
        Code::PollExceeded => Judgement::Trouble(
            "the process stood still for longer than max.poll.interval.ms and left the group".to_owned(),
        ),
        Code::UnknownTopicOrPartition | Code::UnknownTopic | Code::UnknownPartition => Judgement::Missing,
        Code::TopicAuthorizationFailed => refused("read the topic (it needs READ and DESCRIBE on it)"),
        Code::GroupAuthorizationFailed => refused("use the group (it needs READ on it)"),
        Code::ClusterAuthorizationFailed => refused("use the cluster"),
        Code::SaslAuthenticationFailed | Code::Authentication => {
            refused(&format!("log in (check user, password and mechanism): {reason}"))
        }
        Code::FencedInstanceId => Judgement::Over(fatal(code)),
        Code::AllBrokersDown | Code::BrokerTransportFailure | Code::Resolve => {
            Judgement::Trouble(format!("no Kafka broker can be reached: {code}"))
        }
        // Rebalances, coordinators that move, leaders that change: all of daily life.
        _ => Judgement::Passing,
    }
}

/// A broker that goes away during a login is no answer, though librdkafka calls it a failed login.
fn is_cut_off(reason: &str) -> bool {
    ["Broker transport failure", "Timed out", "Disconnected"]
        .iter()
        .any(|how| reason.contains(how))
}

fn refused(what: &str) -> Judgement {
    Judgement::Over(SourceError::fatal(format_args!(
        "Kafka does not let this user {what}"
    )))
}

fn fatal(code: Code) -> SourceError {
    match code {
        Code::FencedInstanceId => SourceError::fatal(
            "another process is the same static member (give each process a `static_member` id of its own)",
        ),
        code => SourceError::fatal(format_args!("the Kafka client gave up: {code}")),
    }
}

/// No broker answers; the client goes on trying by itself.
pub(crate) fn all_away(error: &KafkaError) -> bool {
    matches!(error.rdkafka_error_code(), Some(Code::AllBrokersDown))
}

/// A commit with nothing to say is no failure.
pub(crate) fn nothing_to_commit(error: &KafkaError) -> bool {
    matches!(error.rdkafka_error_code(), Some(Code::NoOffset))
}

/// A client that cannot even be made. The library's text may hold a value; that is struck out.
pub(crate) fn creation(settings: &Settings, error: &KafkaError) -> SourceError {
    match error {
        KafkaError::ClientConfig(_, _, name, _) => {
            SourceError::fatal(format_args!("the setting {name} is not possible"))
        }
        KafkaError::ClientCreation(text) => {
            let text = settings.without_values(text);
            SourceError::fatal(format_args!("the Kafka client cannot be made: {text}"))
        }
        other => SourceError::broken(format_args!("the Kafka client cannot be made: {other}")),
    }
}

/// librdkafka calls an error what it repairs itself, such as each attempt to connect; what it cannot
/// repair is reported by the source.
pub(crate) fn log(level: RDKafkaLogLevel, facility: &str, message: &str) {
    match level {
        RDKafkaLogLevel::Emerg | RDKafkaLogLevel::Alert | RDKafkaLogLevel::Critical => {
            tracing::warn!(target: "librdkafka", facility, "{message}");
        }
        _ => tracing::debug!(target: "librdkafka", facility, "{message}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_breaks_during_a_login_is_no_wrong_password() {
        let error = KafkaError::Global(Code::Authentication);
        let cut = "SASL PLAIN mechanism handshake failed: Local: Broker transport failure: broker's supported mechanisms: ";
        assert!(matches!(judge(&error, cut), Judgement::Trouble(_)));
        for refusal in [
            "SASL authentication error: Authentication failed: Invalid username or password",
            "SASL OTHER mechanism handshake failed: Broker: Unsupported SASL mechanism: broker's supported mechanisms: PLAIN",
        ] {
            let Judgement::Over(error) = judge(&error, refusal) else {
                panic!("{refusal} passes");
            };
            assert!(error.is_fatal() && error.to_string().contains(refusal), "{error}");
        }
    }
}
