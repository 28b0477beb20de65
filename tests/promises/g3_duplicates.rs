//! G3: a duplicate never runs the handler.

use onlyonce::testing::{deliver, event};

use crate::stage::{Scripted, Stage, TestStore, events};

on_each_store!(
    copies_run_once,
    each_consumer_has_its_own_claims,
    a_batch_blames_the_right_one
);

async fn copies_run_once<S: TestStore>(stage: Stage<S>) {
    let (handler, runs) = Scripted::applies(&stage);
    let copies: Vec<_> = (0..4).flat_map(|_| events(10)).collect();
    let report = deliver(stage.consumer("c").handler(handler), copies)
        .await
        .unwrap();
    assert_eq!((report.acked, runs.total()), (40, 10));
    assert!(stage.effects().await.values().all(|n| *n == 1));
    stage.end().await;
}

async fn each_consumer_has_its_own_claims<S: TestStore>(stage: Stage<S>) {
    for consumer in ["a", "b"] {
        let (handler, runs) = Scripted::applies(&stage);
        deliver(stage.consumer(consumer).handler(handler), events(5))
            .await
            .unwrap();
        assert_eq!(runs.total(), 5, "{consumer}");
    }
    assert!(stage.effects().await.values().all(|n| *n == 2));
    stage.end().await;
}

async fn a_batch_blames_the_right_one<S: TestStore>(stage: Stage<S>) {
    for seen_at in 0..3 {
        let consumer = format!("c{seen_at}");
        let (handler, _) = Scripted::applies(&stage);
        deliver(stage.consumer(&consumer).handler(handler), [event("seen", "x")])
            .await
            .unwrap();

        let mut ids = vec!["new1", "new2"];
        ids.insert(seen_at, "seen");
        let (handler, runs) = Scripted::applies(&stage);
        let batch = stage.consumer(&consumer).handler(handler).lanes(1).batch(3);
        let report = deliver(batch, ids.into_iter().map(|id| event(id, "x")))
            .await
            .unwrap();
        assert_eq!(
            (runs.of("new1"), runs.of("seen"), runs.of("new2"), report.acked),
            (1, 0, 1, 3)
        );
        assert_eq!(stage.processed(&consumer).await.len(), 3);
    }
    stage.end().await;
}
