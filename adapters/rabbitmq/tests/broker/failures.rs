//! The ways in which a broker, or the road to it, fails.

use std::time::{Duration, Instant};

use lapin::options::QueueDeclareOptions;
use onlyonce::source::{Incoming, Redelivery, Source};
use onlyonce_rabbitmq::RabbitMq;
use tokio::net::TcpListener;

use super::harness::*;
use super::proxy::Proxy;

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_connection_is_lost_and_then_flows_again() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let proxy = Proxy::before(&queue.url).await;
    queue.fill(3).await;
    let mut source = started(RabbitMq::queue(&proxy.url, &queue.name), 3).await;
    let mut before = some(&mut source, 3).await;
    let first = before.remove(0);
    ack(&mut source, [first]).await;
    proxy.frames_until(|frames| frames.len() == 1).await;
    queue.becomes_ready(0).await;

    proxy.cut();
    assert_eq!(
        lost(&mut source).await,
        receipts(&before),
        "the settled one is not among them"
    );
    assert!(!source.health().connected);
    assert!(source.health().problem.is_some());
    nothing(&mut source, Duration::from_millis(500)).await;

    proxy.mend();
    let after = some(&mut source, 2).await;
    assert_eq!(bodies(&after), ["2", "3"]);
    assert!(after.iter().all(|d| d.redelivery == Redelivery::Yes));
    assert!(
        after.iter().all(|d| !receipts(&before).contains(&d.receipt)),
        "receipts are never used twice"
    );
    assert!(source.health().connected);
    ack(&mut source, after).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_falls_silent_is_given_up_after_two_heartbeats() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let proxy = Proxy::before(&queue.url).await;
    queue.fill(1).await;
    let builder = RabbitMq::queue(&proxy.url, &queue.name)
        .heartbeat(Duration::from_secs(1))
        .connect_timeout(Duration::from_secs(1));
    let mut source = started(builder, 1).await;
    let before = one(&mut source).await;
    proxy.freeze();
    let since = Instant::now();
    assert_eq!(lost(&mut source).await, [before.receipt]);
    assert!(since.elapsed() < Duration::from_secs(6), "{:?}", since.elapsed());
    nothing(&mut source, Duration::from_secs(2)).await;
    proxy.mend();
    let again = one(&mut source).await;
    assert_eq!(body(&again), "1");
    ack(&mut source, [again]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_closed_by_an_operator_is_opened_again() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let name = unique("consumer");
    queue.fill(1).await;
    let mut source = queue.source().build().unwrap();
    source
        .start(&onlyonce::source::Plan::for_window(&name, 1))
        .await
        .unwrap();
    let before = one(&mut source).await;
    let Some(pids) = connections(&format!("onlyonce {name}")).await else {
        return;
    };
    assert_eq!(pids.len(), 1, "one connection per source");
    ctl(&["close_connection", &pids[0], "by an operator"]).await;
    assert_eq!(lost(&mut source).await, [before.receipt]);
    assert_eq!(body(&one(&mut source).await), "1");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_queue_is_a_clear_error_until_it_is_there_again() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    queue.fill(1).await;
    let mut source = queue.started(1).await;
    let before = one(&mut source).await;
    queue.delete().await;
    assert_eq!(lost(&mut source).await, [before.receipt]);
    let error = soon(source.receive(1)).await.unwrap_err();
    assert!(error.is_fatal());
    assert!(
        error
            .to_string()
            .contains(&format!("declare the queue {:?}", queue.name)),
        "{error}"
    );
    assert_eq!(source.health().problem, Some(error.to_string()));

    let since = Instant::now();
    for _ in 0..3 {
        soon(source.receive(1)).await.unwrap_err();
    }
    assert!(
        since.elapsed() > Duration::from_millis(300),
        "it does not spin: {:?}",
        since.elapsed()
    );

    queue.create(QueueDeclareOptions::durable(), &[]).await;
    queue.fill(1).await;
    assert_eq!(body(&one(&mut source).await), "1");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_only_a_person_can_change_is_fatal_and_names_the_remedy() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let (login, rest) = queue.url.split_once('@').unwrap();
    let (address, _) = rest.split_once('/').unwrap();
    let wrong_password = format!("{login}x@{rest}");
    let missing_vhost = format!("{login}@{address}/no-such-vhost");
    for (builder, part) in [
        (
            RabbitMq::queue(&wrong_password, &queue.name),
            "check the user \"onlyonce\" and the password in the URL",
        ),
        (
            RabbitMq::queue(&missing_vhost, &queue.name),
            "create the vhost \"no-such-vhost\"",
        ),
        (
            RabbitMq::queue(&queue.url, "no-such-queue"),
            "declare the queue \"no-such-queue\" in vhost \"/\"",
        ),
    ] {
        let error = start_fails(builder).await;
        assert!(error.is_fatal(), "{error}");
        assert!(error.to_string().contains(part), "{part} in {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_is_refused_by_name() {
    let Some(queue) = Queue::stream().await else {
        return;
    };
    let error = start_fails(queue.source()).await;
    assert!(error.is_fatal(), "{error}");
    assert!(error.to_string().contains("is a stream"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exclusive_queue_of_somebody_else_is_refused() {
    let exclusive = QueueDeclareOptions {
        exclusive: true,
        ..Default::default()
    };
    let Some(queue) = Queue::declare_with(exclusive, &[]).await else {
        return;
    };
    let error = start_fails(queue.source()).await;
    assert!(error.is_fatal(), "{error}");
    assert!(
        error.to_string().contains("is exclusive to another connection"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_is_away_is_not_fatal() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let error = start_fails(RabbitMq::queue(format!("amqp://u:p@{address}/%2f"), "q")).await;
    assert!(!error.is_fatal(), "{error}");
    assert!(error.to_string().contains(&address.to_string()), "{error}");
    let error = start_fails(RabbitMq::queue("amqp://u:p@no-such-host.invalid/%2f", "q")).await;
    assert!(!error.is_fatal(), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_says_nothing_is_given_up_and_leaves_no_thread() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let accepted = tokio::spawn(async move {
        let mut silent = Vec::new();
        while let Ok((stream, _)) = listener.accept().await {
            silent.push(stream);
        }
    });
    let builder =
        RabbitMq::queue(format!("amqp://u:p@{address}/%2f"), "q").connect_timeout(Duration::from_millis(300));
    let mut source = builder.build().unwrap();
    let plan = onlyonce::source::Plan::for_window("tests", 1);
    for _ in 0..10 {
        let since = Instant::now();
        let error = soon(source.start(&plan)).await.unwrap_err();
        assert!(!error.is_fatal(), "{error}");
        assert!(
            error
                .to_string()
                .contains("did not finish the handshake within 300ms"),
            "{error}"
        );
        assert!(since.elapsed() < Duration::from_secs(3), "{:?}", since.elapsed());
    }
    // Other tests of this process have threads of their own; ten of ours would not go away.
    let until = Instant::now() + SOON;
    while silent_threads(address.port()) > 0 {
        assert!(
            Instant::now() < until,
            "{} sockets are still open",
            silent_threads(address.port())
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    accepted.abort();
}

/// Sockets of this process that are connected to this local port, as lapin's threads hold them open.
fn silent_threads(port: u16) -> usize {
    let Ok(table) = std::fs::read_to_string("/proc/self/net/tcp") else {
        return 0;
    };
    let remote = format!("0100007F:{port:04X}");
    let established =
        |fields: &[&str]| fields.get(3) == Some(&"01") && fields.get(2) == Some(&remote.as_str());
    table
        .lines()
        .filter(|line| established(&line.split_whitespace().collect::<Vec<_>>()))
        .count()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_channel_closed_for_slow_acks_is_opened_again() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    queue.fill(2).await;
    // A channel reads the timeout when it is opened, so that others can be spared. The interval at
    // which it looks is read again and again, and hurts nobody.
    let changed = SETTINGS.write().await;
    let set = async |name: &str, value: u32| {
        ctl(&["eval", &format!("application:set_env(rabbit, {name}, {value}).")]).await
    };
    if set("consumer_timeout", 2000).await.is_none() {
        return;
    }
    set("channel_tick_interval", 500).await;
    let mut source = queue.source().build().unwrap();
    let started = source
        .start(&onlyonce::source::Plan::for_window("tests", 1))
        .await;
    set("consumer_timeout", 1_800_000).await;
    drop(changed);
    started.unwrap();

    let slow = one(&mut source).await;
    assert_eq!(lost(&mut source).await, [slow.receipt]);
    set("channel_tick_interval", 60_000).await;
    ack(&mut source, [slow]).await;
    let again = one(&mut source).await;
    assert_eq!((body(&again).as_str(), again.redelivery), ("1", Redelivery::Yes));
    ack(&mut source, [again]).await;
    let next = one(&mut source).await;
    assert_eq!(body(&next), "2");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_never_stays_is_not_hammered() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let proxy = Proxy::before(&queue.url).await;
    let mut source = started(RabbitMq::queue(&proxy.url, &queue.name), 1).await;
    let mut reconnects = 0;
    let until = Instant::now() + Duration::from_secs(3);
    while Instant::now() < until {
        proxy.cut();
        queue.fill(1).await;
        tokio::time::sleep(Duration::from_millis(5)).await;
        proxy.mend();
        match tokio::time::timeout_at(until.into(), source.receive(1)).await {
            Err(_) => break,
            Ok(Ok(Incoming::Deliveries(deliveries))) => {
                reconnects += 1;
                ack(&mut source, deliveries).await;
            }
            Ok(Ok(_)) => {}
            Ok(Err(e)) => panic!("{e}"),
        }
    }
    assert!(reconnects < 12, "{reconnects} connections in three seconds");
}

#[tokio::test(flavor = "multi_thread")]
async fn ended_sessions_leave_no_threads() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let name = unique("consumer");
    let proxy = Proxy::before(&queue.url).await;
    for _ in 0..5 {
        let mut source = RabbitMq::queue(&proxy.url, &queue.name).build().unwrap();
        source
            .start(&onlyonce::source::Plan::for_window(&name, 1))
            .await
            .unwrap();
        proxy.freeze();
        drop(source);
        proxy.mend();
    }
    let until = Instant::now() + SOON;
    loop {
        match connections(&format!("onlyonce {name}")).await {
            None => return,
            Some(left) if left.is_empty() => return,
            Some(left) => assert!(
                Instant::now() < until,
                "{left:?} are still connected; {} threads",
                io_threads()
            ),
        }
    }
}
