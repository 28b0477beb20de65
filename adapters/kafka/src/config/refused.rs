//! Which of librdkafka's settings cannot be passed through, and why.

/// Settings that would break a promise, or are said elsewhere, and why.
pub(super) const REFUSED: [(&str, &str); 18] = [
    ("bootstrap.servers", "is the first argument of `Kafka::group`"),
    ("metadata.broker.list", "is the first argument of `Kafka::group`"),
    ("group.id", "is the second argument of `Kafka::group`"),
    ("group.instance.id", "is said by `static_member`"),
    (
        "auto.offset.reset",
        "is said by `start_at` and `out_of_range`: it would jump over records in silence",
    ),
    (
        "enable.auto.offset.store",
        "would store offsets of events that are not done: they would be lost by a death",
    ),
    (
        "enable.auto.commit",
        "is what commits the stored offsets; without it everything comes again",
    ),
    (
        "auto.commit.enable",
        "is what commits the stored offsets; without it everything comes again",
    ),
    (
        "offset.store.method",
        "would keep offsets where other members do not find them",
    ),
    (
        "offset.store.path",
        "would keep offsets where other members do not find them",
    ),
    (
        "enable.partition.eof",
        "reports the end of a partition as an error, which nobody waits for",
    ),
    (
        "group.protocol",
        "is the classic one: the callbacks of the new one are not what this source relies on",
    ),
    (
        "allow.auto.create.topics",
        "would create a misspelt topic, and wait for its events for ever",
    ),
    (
        "statistics.interval.ms",
        "is what health and backlog are read from",
    ),
    (
        "consume.callback.max.messages",
        "concerns an interface that this source does not use",
    ),
    (
        "topic.metadata.refresh.sparse",
        "would hide new topics from a pattern",
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
        if let Some(why) = refused_value(name, value) {
            problems.push(format!("{name} {why}"));
        }
    }
    if logs_in_by_tokens(set) {
        problems.push(
            "sasl.mechanism cannot be OAUTHBEARER without `sasl.oauthbearer.method=oidc`: this source has no tokens to give"
                .to_owned(),
        );
    }
}

/// Why a setting that is passed through cannot have this value.
fn refused_value(name: &str, value: &str) -> Option<&'static str> {
    match name {
        "isolation.level" if value != "read_committed" => {
            Some("can only be read_committed: events of aborted transactions would have effects")
        }
        "auto.commit.interval.ms" if value.trim().parse() == Ok(0) => Some(
            "cannot be 0: nothing would be committed before the partition leaves, and a death would repeat everything",
        ),
        _ => None,
    }
}

/// librdkafka would ask the application for tokens, and wait for ever.
pub(crate) fn logs_in_by_tokens(set: &[(String, String)]) -> bool {
    let last = |names: [&str; 2]| set.iter().rfind(|(name, _)| names.contains(&name.as_str()));
    let says = |names, what: &str| last(names).is_some_and(|(_, value)| value.eq_ignore_ascii_case(what));
    says(["sasl.mechanism", "sasl.mechanisms"], "OAUTHBEARER")
        && !says(["sasl.oauthbearer.method"; 2], "oidc")
        && !says(["enable.sasl.oauthbearer.unsecure.jwt"; 2], "true")
}
