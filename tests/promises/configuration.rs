//! What is set wrong is said before anything runs: the field, its value and its bound.

use std::time::Duration;

use onlyonce::consumer::{BuildError, ConsumerBuilder};
use onlyonce::testing::Broker;
use onlyonce::{Consumer, RetryPolicy, Supervisor};

use crate::ahead::Hand;
use crate::running::Running;
use crate::stage::{Scripted, Stage, TestStore};

on_each_store!(
    a_name_is_required_and_taken_as_it_is,
    one_name_twice_in_a_process_is_refused,
    every_message_names_the_field_the_value_and_the_bound,
    all_that_is_wrong_is_said_at_once,
    a_source_is_told_the_window_that_fits_its_calls,
);

/// A consumer that lacks nothing.
fn complete<S: TestStore>(stage: &Stage<S>, name: &str) -> ConsumerBuilder<S> {
    let (handler, _) = Scripted::applies(stage);
    stage
        .consumer(name)
        .source(Broker::new().source())
        .handler(handler)
}

fn problems<T>(built: Result<T, BuildError>) -> Vec<String> {
    built.err().map_or(Vec::new(), |error| error.problems().to_vec())
}

async fn a_name_is_required_and_taken_as_it_is<S: TestStore>(stage: Stage<S>) {
    for (name, problem) in [
        (
            "",
            "name is 0 bytes long (1 to 128: it is part of every deduplication key)",
        ),
        (
            "a ",
            r#"name is "a " (no blanks around it, no control characters)"#,
        ),
        (
            " a",
            r#"name is " a" (no blanks around it, no control characters)"#,
        ),
        (
            "a\u{a0}",
            r#"name is "a\u{a0}" (no blanks around it, no control characters)"#,
        ),
        (
            "a\0b",
            r#"name is "a\0b" (no blanks around it, no control characters)"#,
        ),
    ] {
        assert_eq!(problems(complete(&stage, name).build()), [problem]);
    }
    let long = "x".repeat(129);
    assert!(problems(complete(&stage, &long).build())[0].starts_with("name is 129 bytes long"));
    for name in ["a", "a b", "\u{fc}ber", &long[..128]] {
        assert_eq!(complete(&stage, name).build().unwrap().name(), name);
    }
    stage.end().await;
}

async fn one_name_twice_in_a_process_is_refused<S: TestStore>(stage: Stage<S>) {
    let consumer = |name| complete(&stage, name).lanes(1).build().unwrap();
    let twice = Supervisor::builder()
        .consumer(consumer("a"))
        .consumer(consumer("a"))
        .build();
    assert_eq!(
        problems(twice),
        ["consumer a is there twice (two subscribers with one name would starve each other)"]
    );
    let two = Supervisor::builder()
        .consumer(consumer("a"))
        .consumer(consumer("A"))
        .build();
    assert_eq!(problems(two), [] as [&str; 0], "names are compared byte for byte");
    assert_eq!(
        problems(Supervisor::builder().build()),
        ["consumers is 0 (at least 1)"]
    );
    stage.end().await;
}

async fn every_message_names_the_field_the_value_and_the_bound<S: TestStore>(stage: Stage<S>) {
    let ms = Duration::from_millis;
    let day = Duration::from_secs(86_400);
    type Set<S> = fn(ConsumerBuilder<S>) -> ConsumerBuilder<S>;
    let cases: &[(Set<S>, &str, &str, &str)] = &[
        (|c| c.lanes(0), "lanes", "0", "at least 1"),
        (|c| c.held_lanes(0), "held_lanes", "0", "at least 1"),
        (|c| c.batch(0), "batch", "0", "at least 1"),
        (|c| c.batch(10_001), "batch", "10001", "at most 10000"),
        (|c| c.window(0), "window", "0", "at least 1"),
        (|c| c.window(70_000), "window", "70000", "at most 65535"),
        (|c| c.window_bytes(1023), "window_bytes", "1023", "at least 1024"),
        (
            |c| c.handler_timeout(Duration::ZERO),
            "handler_timeout",
            "0ns",
            "at least 1ms",
        ),
        (
            |c| c.handler_timeout(Duration::from_secs(86_401)),
            "handler_timeout",
            "86401s",
            "at most 86400s",
        ),
        (
            |c| c.lock_timeout(Duration::ZERO),
            "lock_timeout",
            "0ns",
            "at least 1ms",
        ),
        (
            |c| c.statement_timeout(Duration::from_millis(99)),
            "statement_timeout",
            "99ms",
            "at least 100ms",
        ),
        (
            |c| c.stop_timeout(Duration::from_secs(86_401)),
            "stop_timeout",
            "86401s",
            "at most 86400s",
        ),
        (
            |c| c.lease(Duration::from_millis(999)),
            "lease",
            "999ms",
            "at least 1s",
        ),
        (
            |c| c.dedup_window(Duration::ZERO),
            "dedup_window",
            "0ns",
            "at least 1s",
        ),
        (
            |c| c.retry(RetryPolicy::new().immediate(1001)),
            "retry.immediate",
            "1001",
            "at most 1000",
        ),
        (
            |c| c.retry(RetryPolicy::new().delays([Duration::from_secs(400 * 86_400)])),
            "retry.delays",
            "34560000000 ms",
            "at most one year",
        ),
        (
            |c| c.retry(RetryPolicy::new().contention(0)),
            "retry.contention",
            "0",
            "at least 1",
        ),
        (|c| c.held_lanes(1000), "max_connections", "", "at least"),
    ];
    for (set, field, value, bound) in cases {
        let problems = problems(set(complete(&stage, "c")).build());
        let [problem] = problems.as_slice() else {
            panic!("{field}: {problems:?}")
        };
        let names = problem.starts_with(&format!("{field} "));
        assert!(
            names && problem.contains(value) && problem.contains(bound),
            "{field}: {problem}"
        );
    }

    let huge = problems(
        complete(&stage, "c")
            .lanes(usize::MAX)
            .held_lanes(usize::MAX)
            .build(),
    );
    assert_eq!(huge[0], format!("lanes is {} (at most 1000)", usize::MAX));
    assert_eq!(huge[1], format!("held_lanes is {} (at most 1000)", usize::MAX));

    // The sum of connections says what it is made of.
    let lanes = stage.store.max_useful_lanes().unwrap_or(18);
    let held = 999;
    let problem = &problems(complete(&stage, "c").lanes(lanes).held_lanes(held).build())[0];
    assert_eq!(
        *problem,
        format!(
            "max_connections is {} (at least {}: {lanes} lanes, {held} held lanes, 2 in reserve)",
            stage.store.max_connections(),
            lanes + held + 2
        )
    );
    if let Some(max) = stage.store.max_useful_lanes() {
        let problem = &problems(complete(&stage, "c").lanes(max + 1).build())[0];
        assert_eq!(*problem, "lanes is 2 (at most 1 on sqlite: it has one writer)");
    }

    type SetAll = fn(onlyonce::supervisor::SupervisorBuilder) -> onlyonce::supervisor::SupervisorBuilder;
    let supervisors: &[(SetAll, &str)] = &[
        (|s| s.purge_batch(0), "purge_batch is 0 (at least 1)"),
        (
            |s| s.purge_every(Duration::from_millis(99)),
            "purge_every is 99ms (at least 100ms)",
        ),
    ];
    for (set, problem) in supervisors {
        let one = Supervisor::builder().consumer(complete(&stage, "c").lanes(1).build().unwrap());
        assert_eq!(problems(set(one).build()), [*problem]);
    }

    // The bounds themselves are fine.
    let at_the_bounds = complete(&stage, "c")
        .batch(10_000)
        .window(65_535)
        .window_bytes(1024)
        .handler_timeout(day)
        .lock_timeout(ms(1))
        .statement_timeout(ms(100))
        .stop_timeout(Duration::ZERO)
        .lease(ms(1000))
        .dedup_window(3660 * day)
        .retry(RetryPolicy::new().immediate(1000).contention(1));
    assert_eq!(problems(at_the_bounds.build()), [] as [&str; 0]);
    stage.end().await;
}

async fn all_that_is_wrong_is_said_at_once<S: TestStore>(stage: Stage<S>) {
    let nothing = Consumer::builder("", stage.store.clone())
        .batch(0)
        .lease(Duration::ZERO);
    let error = nothing.build().err().unwrap();
    let fields: Vec<_> = error
        .problems()
        .iter()
        .map(|problem| problem.split(' ').next().unwrap())
        .collect();
    assert_eq!(fields, ["name", "batch", "lease", "source", "handler"]);
    for problem in error.problems() {
        assert!(error.to_string().contains(problem.as_str()));
    }
    stage.end().await;
}

async fn a_source_is_told_the_window_that_fits_its_calls<S: TestStore>(stage: Stage<S>) {
    for (per_call, batch, window) in [(1, 1, 4), (4, 1, 4), (10, 1, 10), (10, 2, 10), (10, 100, 200)] {
        let (mut hand, played) = Hand::bringing(per_call);
        let (handler, _) = Scripted::applies(&stage);
        let consumer = stage
            .consumer("c")
            .source(played)
            .handler(handler)
            .lanes(1)
            .batch(batch);
        let running = Running::start(consumer);
        assert_eq!(
            hand.plan().await.window,
            window,
            "{per_call} a call, batches of {batch}"
        );
        running.stop().await;
    }
    stage.end().await;
}
