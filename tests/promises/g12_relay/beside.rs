//! A consumer and the relay for what its handlers send, in one process: one health, one stop.

use std::sync::Arc;
use std::time::Duration;

use onlyonce::Supervisor;
use onlyonce::outbox::OutgoingEvent;
use onlyonce::store::{PostgresStore, Relaying};
use onlyonce::testing::{Broker, MemoryPublisher, event};
use tokio::sync::Notify;

use super::{quick, row};
use crate::running::{Running, until};
use crate::stage::{Act, Scripted, Stage, TestStore, soon};

on_each_store!(
    what_handlers_send_goes_out_and_one_health_tells_of_both,
    an_error_of_the_relay_stops_the_consumer_as_well,
);

/// A handler that sends its event's id on, and waits before that where the id is `last`.
fn sends_on<S: TestStore>(stage: &Stage<S>, go_on: &Arc<Notify>) -> Scripted<S> {
    let go_on = go_on.clone();
    let (handler, _) = Scripted::new(stage, move |_, event| {
        let (id, go_on) = (event.identity.id.clone(), go_on.clone());
        Act::by(move |cx| {
            Box::pin(async move {
                if id == "last" {
                    go_on.notified().await;
                }
                cx.outbox()
                    .send(OutgoingEvent::new("memory:a", "handled", id.clone()).id(id))?;
                Ok(())
            })
        })
    });
    handler
}

fn both<S: TestStore + Relaying>(
    stage: &Stage<S>,
    broker: &Broker,
    publisher: &MemoryPublisher,
    go_on: &Arc<Notify>,
) -> Supervisor {
    let consumer = stage
        .consumer("c")
        .source(broker.source())
        .handler(sends_on(stage, go_on))
        .lanes(1)
        .build();
    Supervisor::builder()
        .relay(quick(stage.store.clone(), publisher).build().unwrap())
        .consumer(consumer.unwrap())
        .build()
        .unwrap()
}

async fn what_handlers_send_goes_out_and_one_health_tells_of_both<S: TestStore + Relaying>(stage: Stage<S>) {
    let (broker, publisher) = (Broker::new(), MemoryPublisher::new());
    let running = Running::of(both(&stage, &broker, &publisher, &Arc::default()));
    let waits = running.health.ready().to_string();
    assert!(
        waits.contains("consumer c: ") && waits.contains("relay default: "),
        "{waits}"
    );
    until("health", async || running.health.ready().ok).await;
    broker.publish(event("e0", "{}"));
    let arrived = publisher.until(|publisher| publisher.ids() == ["e0"]);
    soon("the event that it sends", arrived).await;

    publisher.go_down();
    broker.publish(event("e1", "{}"));
    until("the reason", async || {
        running.health.ready().reasons == ["relay default: publisher memory: the publisher is down"]
    })
    .await;
    assert!(running.health.live().ok, "a restart would not help");
    soon("the consumer's work", broker.drained()).await;
    publisher.recover();
    stage.all_sent().await;
    assert_eq!(publisher.ids(), ["e0", "e1"]);
    until("health", async || running.health.ready().ok).await;
    running.stop().await;
    stage.end().await;
}

/// The handler holds up the stop, in an open transaction, beside which SQLite would let nobody write.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn consumers_stop_first_and_the_relay_publishes_until_they_have() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let (broker, publisher, go_on) = (Broker::new(), MemoryPublisher::new(), Arc::new(Notify::new()));
    let running = Running::of(both(&stage, &broker, &publisher, &go_on));
    until("health", async || running.health.ready().ok).await;
    broker.publish(event("last", "{}"));
    until("the handler", async || broker.unacked() == 1).await;
    running.tell();
    // The consumer waits for its handler; the relay works as before.
    stage.write_rows([row("other", None)]).await;
    let others = publisher.until(|publisher| publisher.ids() == ["other"]);
    soon("what others have committed", others).await;
    assert!(!publisher.is_stopped());
    go_on.notify_one();
    running.stop().await;
    assert!(publisher.is_stopped());
    assert_eq!(broker.stats().acked, 1);
    // Sent, or there for the next one: the relay may have stopped before it looked.
    let left = stage.rows("event_id = 'last'").await;
    assert_eq!(left + i64::from(publisher.copies("last")), 1);
    stage.end().await;
}

async fn an_error_of_the_relay_stops_the_consumer_as_well<S: TestStore + Relaying>(stage: Stage<S>) {
    stage
        .execute(
            "DROP TABLE {s}.outbox_relays",
            "DROP TABLE onlyonce_outbox_relays",
        )
        .await;
    let (broker, publisher) = (Broker::new(), MemoryPublisher::new());
    let running = Running::of(both(&stage, &broker, &publisher, &Arc::default()));
    let ended = tokio::time::timeout(Duration::from_secs(30), running.ended()).await;
    let error = ended.expect("it ends").unwrap_err().to_string();
    assert!(
        error.starts_with("relay default: ") && error.contains("outbox_relays"),
        "{error}"
    );
    stage.end().await;
}
