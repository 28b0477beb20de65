//! The publisher against a RabbitMQ whose own settings change, or that is killed: a binary of its own, as that
//! holds for everybody.
//!
//! `ONLYONCE_RABBITMQ_URL` and `ONLYONCE_RABBITMQCTL` name the broker (`eval "$(scripts/services env)"`).
#![allow(clippy::unwrap_used, clippy::print_stdout)]

#[path = "../broker/harness.rs"]
#[allow(dead_code, unused_imports)] // the other binary uses it all
mod harness;

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use harness::{Queue, SOON, ctl, soon};
use onlyonce::publisher::{Message, PublishErrorKind, Publisher};
use onlyonce_rabbitmq::RabbitMqPublisher;
use tokio::sync::Mutex;

/// One test at a time.
static BROKER: Mutex<()> = Mutex::const_new(());

/// How long a publish waits for its answer.
const PATIENCE: Duration = Duration::from_secs(3);

fn publisher(queue: &Queue) -> RabbitMqPublisher {
    RabbitMqPublisher::to(&queue.url)
        .patience(PATIENCE)
        .connect_timeout(Duration::from_secs(3))
        .build()
        .unwrap()
}

fn message(queue: &Queue, id: &str, body: Vec<u8>) -> Message {
    Message::new(format!("/{}", queue.name), "shop", id, body)
}

async fn set_limit(bytes: usize) -> Option<String> {
    ctl(&[
        "-q",
        "eval",
        &format!("application:set_env(rabbit, max_message_size, {bytes})."),
    ])
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_beyond_the_broker_s_limit_is_invalid_and_hurts_no_other() {
    let _alone = BROKER.lock().await;
    let Some(queue) = Queue::quorum().await else {
        return;
    };
    const LIMIT: usize = 10_000;
    // RabbitMQ reads it when a channel is opened: the rows were stored under a higher one.
    if set_limit(LIMIT).await.is_none() {
        return;
    }
    let publisher = publisher(&queue);
    let mut messages: Vec<_> = (0..100)
        .map(|n| message(&queue, &format!("good {n}"), vec![b'x'; 10]))
        .collect();
    messages.insert(10, message(&queue, "limit-1", vec![b'x'; LIMIT - 1]));
    messages.insert(40, message(&queue, "limit+1", vec![b'x'; LIMIT + 1]));
    messages.insert(70, message(&queue, "limit", vec![b'x'; LIMIT]));
    let told = soon(join_all(
        messages.iter().map(|message| publisher.publish(message)),
    ))
    .await;
    set_limit(128 << 20).await;
    for (message, told) in messages.iter().zip(told) {
        if message.event_id == "limit+1" {
            let error = told.unwrap_err();
            assert_eq!(error.kind(), PublishErrorKind::Invalid, "{error}");
            assert!(error.to_string().contains("10001 is larger than"), "{error}");
        } else {
            told.unwrap_or_else(|error| panic!("{}: {error}", message.event_id));
        }
    }
    queue.becomes_ready(102).await;
    publisher.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_short_of_memory_is_waited_for() {
    let _alone = BROKER.lock().await;
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let publisher = publisher(&queue);
    publisher
        .publish(&message(&queue, "before", b"x".to_vec()))
        .await
        .unwrap();
    if ctl(&["-q", "set_vm_memory_high_watermark", "0"]).await.is_none() {
        return;
    }
    // The broker says that it is blocked to those who publish.
    let first = publisher.publish(&message(&queue, "during", b"x".to_vec())).await;
    let health = publisher.health();
    let since = Instant::now();
    let second = publisher
        .publish(&message(&queue, "during 2", b"x".to_vec()))
        .await;
    let waited = since.elapsed();
    ctl(&["-q", "set_vm_memory_high_watermark", "0.4"]).await;
    for told in [first, second] {
        let error = told.unwrap_err();
        assert_eq!(error.kind(), PublishErrorKind::Unavailable, "{error}");
        assert!(error.to_string().contains("short of memory"), "{error}");
    }
    assert!(waited < PATIENCE, "it is known to be blocked: {waited:?}");
    assert!(health.problem.unwrap().contains("connection.blocked"));

    let until = Instant::now() + SOON;
    while let Err(error) = publisher.publish(&message(&queue, "after", b"x".to_vec())).await {
        assert!(Instant::now() < until, "{error}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(publisher.health().problem, None);
    publisher.stop().await;
}

/// Runs scripts/services; `None` if these servers are not its.
async fn services(arguments: &[&str]) -> Option<()> {
    let program = harness::variable("ONLYONCE_SERVICES")?;
    let output = tokio::process::Command::new(program)
        .args(arguments)
        .output()
        .await
        .unwrap();
    assert!(
        output.status.success(),
        "{arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Some(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_is_killed_has_all_that_it_confirmed() {
    let _alone = BROKER.lock().await;
    // A quorum queue on a single node has no leader for long after that.
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let publisher = publisher(&queue);
    let messages: Vec<_> = (0..5_000)
        .map(|n| message(&queue, &n.to_string(), n.to_string().into_bytes()))
        .collect();
    let publishing = join_all(messages.iter().map(|message| publisher.publish(message)));
    let killing = async {
        // In the middle of it.
        tokio::time::sleep(Duration::from_millis(300)).await;
        services(&["kill", "rabbitmq"]).await
    };
    let (told, killed) = futures_util::future::join(publishing, killing).await;
    if killed.is_none() {
        return;
    }
    services(&["up", "rabbitmq"]).await.unwrap();
    let mut confirmed = std::collections::HashSet::new();
    for (message, told) in messages.iter().zip(told) {
        match told {
            Ok(()) => {
                confirmed.insert(message.event_id.clone());
            }
            Err(error) => assert!(
                matches!(
                    error.kind(),
                    PublishErrorKind::Interrupted | PublishErrorKind::Unavailable
                ),
                "{error}"
            ),
        }
    }
    println!(
        "{} of {} were confirmed before the kill",
        confirmed.len(),
        messages.len()
    );
    assert!(confirmed.len() < messages.len(), "killed too late");
    let until = Instant::now() + SOON;
    while let Err(error) = publisher.publish(&message(&queue, "after", b"x".to_vec())).await {
        assert!(Instant::now() < until, "{error}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    publisher.stop().await;
    let mut source = harness::started(queue.source(), 500).await;
    while !confirmed.is_empty() {
        let came = harness::some(&mut source, 1).await;
        came.iter().for_each(|delivery| {
            confirmed.remove(&harness::body(delivery));
        });
        harness::ack(&mut source, came).await;
    }
}
