//! G4: a failed attempt leaves no claim behind.

use std::time::Duration;

use onlyonce::RetryPolicy;
use onlyonce::testing::{deliver, event};

use crate::stage::{Act, Scripted, Stage, TestStore};

on_each_store!(every_way_to_fail_is_followed_by_another_run);

async fn every_way_to_fail_is_followed_by_another_run<S: TestStore>(stage: Stage<S>) {
    let (handler, runs) = Scripted::new(&stage, |run, event| match (run, event.identity.id.as_str()) {
        (1, "error") => Act::Fail("no".into()),
        (1, "panic") => Act::Panic,
        (1, "timeout") => Act::Hang,
        _ => Act::Apply,
    });
    let consumer = stage
        .consumer("c")
        .handler(handler)
        .handler_timeout(Duration::from_millis(300))
        .retry(RetryPolicy::new().immediate(1));
    let ids = ["error", "panic", "timeout", "fine"];
    deliver(consumer, ids.map(|id| event(id, "x"))).await.unwrap();
    for id in ids {
        assert_eq!(stage.effects().await.get(id), Some(&1), "{id}");
        assert_eq!(runs.of(id), if id == "fine" { 1 } else { 2 }, "{id}");
    }
    assert_eq!(stage.held().await, []);
    stage.end().await;
}
