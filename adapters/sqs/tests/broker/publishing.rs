//! What SQS in particular does with what is published.

use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::join_all;
use onlyonce::event::Headers;
use onlyonce::publisher::{Message, PublishError, PublishErrorKind, Publisher};
use onlyonce::source::Source as _;
use onlyonce_sqs::{MAX_MESSAGE_BYTES, SqsPublisher};

use super::harness::*;
use super::proxy::Proxy;

fn publisher(endpoint: &str) -> SqsPublisher {
    SqsPublisher::to(client(endpoint))
        .patience(Duration::from_secs(8))
        .build()
        .unwrap()
}

fn message(address: &str, id: &str) -> Message {
    let mut message = Message::new(address, "shop", id, id.to_owned());
    message.key = Some(format!("key-{id}").into());
    message
}

fn refusal(told: Result<(), PublishError>) -> (PublishErrorKind, String) {
    let error = told.unwrap_err();
    (error.kind(), error.to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_goes_in_one_call() {
    let Some(queue) = Queue::standard().await else {
        return;
    };
    let proxy = Proxy::before(&queue.endpoint).await;
    let publisher = SqsPublisher::to(client(&proxy.url)).calls(1).build().unwrap();
    let messages: Vec<_> = (0..101).map(|n| message(&queue.url, &n.to_string())).collect();
    let told = join_all(messages.iter().map(|message| publisher.publish(message))).await;
    told.into_iter().for_each(Result::unwrap);
    let calls = proxy.calls("SendMessageBatch");
    assert!((11..=13).contains(&calls), "{calls} calls for 101 messages");
    queue.becomes(101, 0).await;
    publisher.stop().await;
}

/// Copies of a row are dropped by a FIFO queue; what a person sends anew is not.
#[tokio::test(flavor = "multi_thread")]
async fn a_fifo_queue_drops_copies_and_takes_replays() {
    let Some(queue) = Queue::fifo().await else { return };
    let publisher = publisher(&queue.endpoint);
    let original = message(&queue.url, "1");
    publisher.publish(&original).await.unwrap();
    publisher.publish(&original).await.unwrap();
    queue.becomes(1, 0).await;
    let mut replay = original.clone();
    replay.replays = 1;
    publisher.publish(&replay).await.unwrap();
    queue.becomes(2, 0).await;
    let mut other = original.clone();
    other.source = "other shop".to_owned();
    publisher.publish(&other).await.unwrap();
    queue.becomes(3, 0).await;
    publisher.stop().await;
}

/// The queue itself moves what dies; sent from there again within five minutes, it must not be dropped.
#[tokio::test(flavor = "multi_thread")]
async fn a_replay_within_the_deduplication_window_is_handled() {
    let Some(queue) = Queue::fifo().await else { return };
    let publisher = publisher(&queue.endpoint);
    let mut dies = message(&queue.url, "1");
    publisher.publish(&dies).await.unwrap();
    let mut source = queue.started(4).await;
    let died = some(&mut source, 1).await;
    ack(&mut source, died).await;
    queue.becomes(0, 0).await;
    for replays in 1..=2 {
        dies.replays = replays;
        publisher.publish(&dies).await.unwrap();
        let again = some(&mut source, 1).await;
        assert_eq!(bodies(&again), ["1"]);
        ack(&mut source, again).await;
        queue.becomes(0, 0).await;
    }
    source.stop().await.unwrap();
    closes(source).await;
    publisher.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_is_in_order_and_so_is_a_key_that_no_group_can_be_called() {
    let Some(queue) = Queue::fifo().await else { return };
    let publisher = publisher(&queue.endpoint);
    let keys: [&[u8]; 3] = [b"account-7", "grün".as_bytes(), &[0xff, 0]];
    for n in 0..5 {
        for (at, key) in keys.iter().enumerate() {
            let mut next = message(&queue.url, &format!("{at}-{n}"));
            next.key = Some(key.to_vec().into());
            publisher.publish(&next).await.unwrap();
        }
    }
    let mut source = queue.started(20).await;
    let mut came = vec![Vec::new(); keys.len()];
    for _ in 0..15 {
        let next = some(&mut source, 1).await;
        let at = keys
            .iter()
            .position(|key| next[0].event.key.as_deref() == Some(*key))
            .unwrap();
        came[at].push(body(&next[0]));
        ack(&mut source, next).await;
    }
    for (at, came) in came.iter().enumerate() {
        let due: Vec<_> = (0..5).map(|n| format!("{at}-{n}")).collect();
        assert_eq!(*came, due);
    }
    source.stop().await.unwrap();
    closes(source).await;
    publisher.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_message_that_is_too_large_is_refused_and_the_others_are_sent() {
    let Some(queue) = Queue::standard().await else {
        return;
    };
    let publisher = publisher(&queue.endpoint);
    let with = |id: &str, bytes: usize| {
        let mut sized = message(&queue.url, id);
        sized.payload = Some(vec![b'x'; bytes].into());
        sized
    };
    // What the emulator takes, found out.
    let (mut limit, mut beyond) = (200_000, (1 << 20) + 1);
    while beyond - limit > 1 {
        let middle = (limit + beyond) / 2;
        match publisher.publish(&with("search", middle)).await {
            Ok(()) => limit = middle,
            Err(error) => {
                assert_eq!(error.kind(), PublishErrorKind::Invalid, "{error}");
                beyond = middle;
            }
        }
    }
    println!("the limit is {limit}");
    let mut all: Vec<_> = (0..40).map(|n| with(&n.to_string(), 10)).collect();
    for (at, bytes) in [(10, limit - 1), (20, limit + 1), (30, limit)] {
        all.insert(at, with(&bytes.to_string(), bytes));
    }
    let told = join_all(all.iter().map(|message| publisher.publish(message))).await;
    for (message, told) in all.iter().zip(told) {
        if message.event_id == (limit + 1).to_string() {
            assert_eq!(refusal(told).0, PublishErrorKind::Invalid);
        } else {
            told.unwrap_or_else(|error| panic!("{}: {error}", message.event_id));
        }
    }
    publisher.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_of_the_size_to_be_counted_on_is_published_as_text_and_as_bytes() {
    let Some(queue) = Queue::standard().await else {
        return;
    };
    let publisher = publisher(&queue.endpoint);
    for byte in [b'x', 0] {
        let mut large = message(&queue.url, "large");
        large.event_type = Some("payment.captured".to_owned());
        (0..30).for_each(|n| large.headers.push(format!("header-{n}"), "v".repeat(100)));
        let room = MAX_MESSAGE_BYTES - large.size() + "large".len();
        large.payload = Some(vec![byte; room].into());
        assert_eq!(large.size(), MAX_MESSAGE_BYTES);
        publisher.publish(&large).await.unwrap();
    }
    let mut source = queue.started(4).await;
    let came = some(&mut source, 2).await;
    assert!(
        came.iter()
            .all(|d| d.event.payload.as_ref().unwrap().len() > 170_000)
    );
    ack(&mut source, came).await;
    source.stop().await.unwrap();
    closes(source).await;
    publisher.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_is_missed_by_name_and_by_url_and_found_when_it_is_there() {
    let Some(queue) = Queue::standard().await else {
        return;
    };
    let publisher = publisher(&queue.endpoint);
    let name = unique("later");
    let url = queue.url.rsplit_once('/').unwrap().0.to_owned() + "/" + &name;
    for address in [&name, &url] {
        let (kind, text) = refusal(publisher.publish(&message(address, "1")).await);
        assert_eq!(kind, PublishErrorKind::Destination, "{text}");
        assert!(text.contains(GONE), "{text}");
    }
    queue
        .client
        .create_queue()
        .queue_name(&name)
        .send()
        .await
        .unwrap();
    for address in [&name, &url] {
        publisher.publish(&message(address, "2")).await.unwrap();
    }
    queue.client.delete_queue().queue_url(&url).send().await.unwrap();
    for address in [&name, &url] {
        let (kind, text) = refusal(publisher.publish(&message(address, "3")).await);
        assert_eq!(kind, PublishErrorKind::Destination, "{text}");
    }
    publisher.publish(&message(&queue.url, "4")).await.unwrap();
    publisher.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn throttling_is_nobody_s_fault_and_ends() {
    let Some(queue) = Queue::standard().await else {
        return;
    };
    let proxy = Proxy::before(&queue.endpoint).await;
    let publisher = publisher(&proxy.url);
    publisher.publish(&message(&queue.url, "1")).await.unwrap();
    proxy.throttle();
    // A connection that was open is closed first.
    soon(async {
        loop {
            let (kind, text) = refusal(publisher.publish(&message(&queue.url, "2")).await);
            assert_eq!(kind, PublishErrorKind::Unavailable, "{text}");
            if text.contains("RequestThrottled") {
                break;
            }
        }
    })
    .await;
    assert!(publisher.health().problem.is_some());
    proxy.mend();
    publisher.publish(&message(&queue.url, "2")).await.unwrap();
    assert_eq!(publisher.health().problem, None);
    publisher.stop().await;
}

/// SQS has taken them, and the answer is lost: a FIFO queue drops the copy, a standard one has it twice.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_is_no_success() {
    let Some(queue) = Queue::fifo().await else { return };
    let proxy = Proxy::before(&queue.endpoint).await;
    let publisher = SqsPublisher::to(client(&proxy.url))
        .patience(Duration::from_secs(2))
        .call_timeout(Duration::from_secs(1))
        .build()
        .unwrap();
    proxy.lose_answers();
    let sent = message(&queue.url, "1");
    assert_eq!(
        refusal(publisher.publish(&sent).await).0,
        PublishErrorKind::Unavailable
    );
    queue.becomes(1, 0).await;
    proxy.mend();
    publisher.publish(&sent).await.unwrap();
    queue.becomes(1, 0).await;
    publisher.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_who_goes_takes_nobody_with_it() {
    let Some(queue) = Queue::standard().await else {
        return;
    };
    let publisher = SqsPublisher::to(client(&queue.endpoint))
        .calls(1)
        .build()
        .unwrap();
    let messages: Vec<_> = (0..50).map(|n| message(&queue.url, &n.to_string())).collect();
    publisher.publish(&messages[0]).await.unwrap();
    let leaving = publisher.publish(&messages[1]);
    let staying = join_all(messages[2..].iter().map(|message| publisher.publish(message)));
    assert!(leaving.now_or_never().is_none());
    staying.await.into_iter().for_each(Result::unwrap);
    publisher.stop().await;
}

/// Others may read these queues, and some may write to them.
#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_attribute_of_our_name_changes_nothing() {
    let Some(queue) = Queue::standard().await else {
        return;
    };
    let mut headers = Headers::new();
    headers.push("onlyonce", "whatever");
    queue.send("body", &headers, None).await;
    let mut source = queue.started(4).await;
    let came = some(&mut source, 1).await;
    assert_eq!(bodies(&came), ["body"]);
    assert_eq!(came[0].event.headers.get("onlyonce"), Some(&b"whatever"[..]));
    ack(&mut source, came).await;
    source.stop().await.unwrap();
    closes(source).await;
}
