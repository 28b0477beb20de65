//! What is set wrong is said before anything runs; what runs beside consumers counts its connections.

use std::time::Duration;

use onlyonce::consumer::BuildError;
use onlyonce::relay::RelayBuilder;
use onlyonce::store::{PostgresStore, Relaying};
use onlyonce::testing::{Broker, MemoryPublisher};
use onlyonce::{Relay, Supervisor};

use super::{quick, start};
use crate::stage::{Scripted, Stage, TestStore};

on_each_store!(
    every_message_names_the_field_the_value_and_the_bound,
    one_name_twice_in_a_process_is_refused,
    tables_that_are_missing_are_named_before_anything_is_sent,
);

fn problems<T>(built: Result<T, BuildError>) -> Vec<String> {
    built.err().map_or(Vec::new(), |error| error.problems().to_vec())
}

async fn every_message_names_the_field_the_value_and_the_bound<S: TestStore + Relaying>(stage: Stage<S>) {
    type Set<S> = fn(RelayBuilder<S>) -> RelayBuilder<S>;
    let cases: &[(Set<S>, &str)] = &[
        // The names that an outbox writes to, and no others.
        (|r| r.name(""), r#"name is "" (1 to 64 of a-z, 0-9, - and _)"#),
        (
            |r| r.name("Default"),
            r#"name is "Default" (1 to 64 of a-z, 0-9, - and _)"#,
        ),
        (
            |r| r.publisher("Kafka", MemoryPublisher::new()),
            r#"publisher is "Kafka" (1 to 64 of a-z, 0-9, - and _)"#,
        ),
        (
            |r| r.publisher("memory", MemoryPublisher::new()),
            "publisher memory is there twice (one for each name)",
        ),
        (
            |r| r.lease(Duration::from_millis(299)),
            "lease is 299ms (at least 300ms)",
        ),
        (|r| r.poll(Duration::ZERO), "poll is 0ns (at least 10ms)"),
        (|r| r.in_flight(0), "in_flight is 0 (at least 1)"),
        (|r| r.in_flight(100_001), "in_flight is 100001 (at most 100000)"),
        (|r| r.in_flight_bytes(10), "in_flight_bytes is 10 (at least 1024)"),
        (|r| r.attempts(0), "attempts is 0 (at least 1)"),
        (
            |r| r.delays(Duration::ZERO, Duration::from_secs(1)),
            "delays.first is 0ns (at least 1ms)",
        ),
        (
            |r| r.delays(Duration::from_secs(2), Duration::from_secs(1)),
            "delays.longest is 1s (at least 2s)",
        ),
        (|r| r.keep_sent(Duration::ZERO), "keep_sent is 0ns (at least 1s)"),
        (
            |r| r.stop_timeout(Duration::from_secs(86_401)),
            "stop_timeout is 86401s (at most 86400s)",
        ),
    ];
    for (set, problem) in cases {
        let relay = set(quick(stage.store.clone(), &MemoryPublisher::new()));
        assert_eq!(problems(relay.build()), [*problem]);
    }
    assert_eq!(
        problems(Relay::builder(stage.store.clone()).in_flight(0).build()),
        [
            "publisher is not set (where the events go)",
            "in_flight is 0 (at least 1)"
        ],
        "all that is wrong is said at once"
    );
    stage.end().await;
}

async fn one_name_twice_in_a_process_is_refused<S: TestStore + Relaying>(stage: Stage<S>) {
    let relay = |name: &str| {
        quick(stage.store.clone(), &MemoryPublisher::new())
            .name(name)
            .build()
            .unwrap()
    };
    let twice = Supervisor::builder().relay(relay("a")).relay(relay("a")).build();
    assert_eq!(
        problems(twice),
        ["relay a is there twice (two subscribers with one name would starve each other)"]
    );
    let consumer = stage
        .consumer("a")
        .source(Broker::new().source())
        .handler(Scripted::applies(&stage).0)
        .lanes(1);
    let both = Supervisor::builder()
        .consumer(consumer.build().unwrap())
        .relay(relay("a"))
        .relay(relay("b"));
    assert_eq!(problems(both.build()), [] as [&str; 0]);
    stage.end().await;
}

async fn tables_that_are_missing_are_named_before_anything_is_sent<S: TestStore + Relaying>(stage: Stage<S>) {
    stage
        .execute(
            "ALTER TABLE {s}.outbox DROP COLUMN last_error",
            "ALTER TABLE onlyonce_outbox DROP COLUMN last_error",
        )
        .await;
    let relay = start(quick(stage.store.clone(), &MemoryPublisher::new()));
    let error = relay.ended().await.unwrap_err().to_string();
    assert!(
        error.starts_with("relay default: ") && error.contains("outbox.last_error"),
        "{error}"
    );
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_relays_connection_is_part_of_the_sum() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let build = |max| {
        let store = stage.options().max_connections(max).connect().unwrap();
        let consumer = stage
            .consumer_of("c", store.clone())
            .source(Broker::new().source())
            .handler(Scripted::applies(&stage).0)
            .lanes(4);
        let relay = quick(store, &MemoryPublisher::new()).build().unwrap();
        Supervisor::builder()
            .consumer(consumer.build().unwrap())
            .relay(relay)
            .build()
    };
    assert_eq!(
        problems(build(7)),
        ["max_connections is 7 (at least 8: 4 lanes, 1 held lanes, 1 relay, 2 in reserve)"]
    );
    assert_eq!(problems(build(8)), [] as [&str; 0]);
    stage.end().await;
}
