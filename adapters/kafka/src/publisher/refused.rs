//! Which of librdkafka's settings cannot be passed through, and why.

use crate::config::logs_in_by_tokens;

/// Settings that would break a promise, or are said elsewhere, and why.
const REFUSED: [(&str, &str); 17] = [
    ("bootstrap.servers", "is the argument of `KafkaPublisher::to`"),
    ("metadata.broker.list", "is the argument of `KafkaPublisher::to`"),
    (
        "enable.idempotence",
        "keeps librdkafka's own retries from writing a message again or out of order",
    ),
    (
        "acks",
        "is `all`: less would confirm what the other replicas do not have",
    ),
    (
        "request.required.acks",
        "is `all`: less would confirm what the other replicas do not have",
    ),
    ("message.timeout.ms", "is said by `patience`"),
    ("delivery.timeout.ms", "is said by `patience`"),
    (
        "delivery.report.only.error",
        "would tell nothing of what was published, which all wait for",
    ),
    (
        "transactional.id",
        "would hold back what is published until a transaction commits that nobody begins",
    ),
    (
        "enable.gapless.guarantee",
        "would end the producer for every message that is refused",
    ),
    (
        "message.send.max.retries",
        "would give up for a moment's trouble; `patience` says for how long it is tried",
    ),
    (
        "retries",
        "would give up for a moment's trouble; `patience` says for how long it is tried",
    ),
    ("group.id", "belongs to a consumer"),
    (
        "allow.auto.create.topics",
        "would create a misspelt topic, whose events nobody reads",
    ),
    (
        "topic.metadata.propagation.max.ms",
        "is of no use: a topic that is not there is asked for anew each time",
    ),
    (
        "plugin.library.paths",
        "loads foreign code that may take part in everything",
    ),
    (
        "test.mock.num.brokers",
        "replaces the brokers by a mock that forgets everything with the process",
    ),
];

/// Adds a problem for each setting that is refused.
pub(super) fn refuse(set: &[(String, String)], problems: &mut Vec<String>) {
    for (name, value) in set {
        if let Some((_, why)) = REFUSED.iter().find(|(refused, _)| refused == name) {
            problems.push(format!("{name} cannot be set: it {why}"));
        }
        if name == "partitioner" && value == "random" {
            problems.push(
                "partitioner cannot be random: events of one key would be in several partitions, and without order"
                    .to_owned(),
            );
        }
    }
    if logs_in_by_tokens(set) {
        problems.push(
            "sasl.mechanism cannot be OAUTHBEARER without `sasl.oauthbearer.method=oidc`: this publisher has no tokens to give"
                .to_owned(),
        );
    }
}
