//! G1: the claim and the handler's writes commit in one transaction, or none of them does.

use onlyonce::testing::deliver;

use crate::stage::{Act, Scripted, Stage, TestStore, events};

on_each_store!(effects_and_claims_are_there_together, a_failed_run_leaves_neither);

async fn effects_and_claims_are_there_together<S: TestStore>(stage: Stage<S>) {
    let (handler, runs) = Scripted::applies(&stage);
    let report = deliver(stage.consumer("c").handler(handler), events(20))
        .await
        .unwrap();
    assert_eq!(report.acked, 20);
    assert_eq!(runs.total(), 20);
    assert_eq!(stage.effects().await.len(), 20);
    assert_eq!(stage.processed("c").await.len(), 20);
    assert_eq!(stage.held().await, []);
    stage.end().await;
}

async fn a_failed_run_leaves_neither<S: TestStore>(stage: Stage<S>) {
    let (handler, _) = Scripted::new(&stage, |_, _| Act::Fail("no".into()));
    deliver(stage.consumer("c").handler(handler), events(3))
        .await
        .unwrap();
    assert_eq!(stage.effects().await.len(), 0);
    assert_eq!(stage.processed("c").await, []);
    assert_eq!(stage.held().await.len(), 3, "each is a dead letter");
    stage.end().await;
}
