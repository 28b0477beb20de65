use onlyonce::source::Plan;

use super::refused::REFUSED;
use super::*;

const MARKER: &str = "s3cr3t-m4rk3r";

fn builder() -> KafkaBuilder {
    KafkaBuilder::new("localhost:9092", "g").topic("t")
}

fn problems(builder: KafkaBuilder) -> String {
    builder.settings().unwrap_err().to_string()
}

fn problems_or_none(builder: KafkaBuilder) -> String {
    builder
        .settings()
        .map_or_else(|e| e.to_string(), |_| String::new())
}

#[test]
fn every_problem_is_told_at_once() {
    let text = problems(
        KafkaBuilder::new(" ", "")
            .connect_timeout(Duration::ZERO)
            .partition_window(0, 1)
            .ordering_key(OrderingKey::Header(String::new())),
    );
    for what in [
        "brokers is empty",
        "group is empty",
        "no topic",
        "connect_timeout is 0ns",
        "partition_window",
        "ordering_key",
    ] {
        assert!(text.contains(what), "{what}: {text}");
    }
}

#[test]
fn what_would_break_a_promise_is_refused_with_its_reason() {
    for (name, why) in REFUSED {
        let text = problems(builder().set(name, "true"));
        assert!(text.contains(name) && text.contains(why), "{text}");
    }
    let text = problems(builder().set("isolation.level", "read_uncommitted"));
    assert!(text.contains("aborted transactions"), "{text}");
    builder()
        .set("isolation.level", "read_committed")
        .settings()
        .unwrap();
}

#[test]
fn values_that_would_break_a_promise_are_refused() {
    let text = problems(builder().set("auto.commit.interval.ms", "0"));
    assert!(text.contains("nothing would be committed"), "{text}");
    let tokens = || builder().set("sasl.mechanism", "OAUTHBEARER");
    let text = problems(tokens());
    assert!(text.contains("no tokens to give"), "{text}");
    let oidc = problems_or_none(tokens().set("sasl.oauthbearer.method", "oidc"));
    assert!(!oidc.contains("no tokens to give"), "{oidc}");
}

#[test]
fn a_drain_ends_before_the_poll_interval_does() {
    let text = problems(builder().set(POLL_INTERVAL, "10000"));
    assert!(text.contains("drain_limit is 10s"), "{text}");
    builder()
        .set(POLL_INTERVAL, "10000")
        .drain_limit(Duration::from_secs(5))
        .settings()
        .unwrap();
}

#[test]
fn a_lost_member_is_missed_after_a_minute_unless_told_otherwise() {
    let interval = |builder: KafkaBuilder| builder.settings().unwrap().poll_interval.as_secs();
    assert_eq!(interval(builder()), 60);
    assert_eq!(interval(builder().set(POLL_INTERVAL, "300000")), 300);
    // librdkafka wants it to be no less than the session's timeout.
    assert_eq!(interval(builder().set(SESSION_TIMEOUT, "90000")), 90);
}

#[test]
fn no_value_is_shown() {
    let secret = builder()
        .set("client.id", MARKER)
        .set("no.such.setting", MARKER)
        .set("session.timeout.ms", MARKER);
    assert!(!format!("{secret:?} {secret:#?}").contains(MARKER));
    let text = problems(secret);
    assert!(
        text.contains("no.such.setting") && text.contains("session.timeout.ms"),
        "{text}"
    );
    assert!(!text.contains(MARKER), "{text}");
    let settings = builder().set("client.id", MARKER).settings().unwrap();
    assert!(!format!("{settings:?} {settings:#?}").contains(MARKER));
}

#[test]
fn a_password_of_digits_is_struck_out_and_other_numbers_are_not() {
    let settings = builder()
        .set("sasl.password", "271828")
        .set("session.timeout.ms", "6000")
        .settings()
        .unwrap();
    assert_eq!(
        settings.without_values("271828 refused after 6000 ms"),
        "*** refused after 6000 ms"
    );
}

#[test]
fn a_pattern_is_marked_as_one() {
    let settings = builder()
        .topic_pattern("orders-.*")
        .topic_pattern("^x")
        .settings()
        .unwrap();
    assert_eq!(settings.topics, ["t", "^orders-.*", "^x"]);
    assert_eq!(settings.named_topics().collect::<Vec<_>>(), ["t"]);
}

#[test]
fn what_is_set_wins_over_defaults_and_never_over_the_rules() {
    let settings = builder()
        .set("auto.commit.interval.ms", "250")
        .set("partition.assignment.strategy", "range")
        .settings()
        .unwrap();
    let config = settings.consumer(&Plan::for_window("c", 8));
    for (name, value) in [
        ("auto.commit.interval.ms", "250"),
        ("partition.assignment.strategy", "range"),
        ("enable.auto.offset.store", "false"),
        ("auto.offset.reset", "error"),
    ] {
        assert_eq!(config.get(name), Some(value), "{name}");
    }
}
