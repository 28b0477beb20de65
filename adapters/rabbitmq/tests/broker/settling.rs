//! What is written for a settlement, and what the broker makes of it.

use std::time::{Duration, Instant};

use onlyonce::source::Source;
use onlyonce_rabbitmq::RabbitMq;

use super::harness::*;
use super::proxy::{Frame, Proxy};

#[tokio::test(flavor = "multi_thread")]
async fn a_finished_run_is_acked_by_one_frame() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let proxy = Proxy::before(&queue.url).await;
    queue.fill(32).await;
    let mut source = started(RabbitMq::queue(&proxy.url, &queue.name), 32).await;
    let deliveries = some(&mut source, 32).await;
    ack(&mut source, deliveries).await;
    let frames = proxy.frames_until(|frames| !frames.is_empty()).await;
    assert_eq!(
        frames,
        [Frame::Ack {
            tag: 32,
            multiple: true
        }]
    );
    source.stop().await.unwrap();
    closes(source).await;
    assert_eq!(queue.ready().await, 0);
    assert_eq!(proxy.frames().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unfinished_message_is_never_covered_and_holds_nobody_up() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let proxy = Proxy::before(&queue.url).await;
    queue.fill(10).await;
    let mut source = started(RabbitMq::queue(&proxy.url, &queue.name), 10).await;
    let mut deliveries = some(&mut source, 10).await;
    let slow = deliveries.remove(4);
    ack(&mut source, deliveries).await;
    let frames = proxy.frames_until(|frames| frames.len() == 6).await;
    assert_eq!(
        frames[0],
        Frame::Ack {
            tag: 4,
            multiple: true
        }
    );
    for (frame, tag) in frames[1..].iter().zip(6..) {
        assert_eq!(*frame, Frame::Ack { tag, multiple: false });
    }
    ack(&mut source, [slow]).await;
    let frames = proxy.frames_until(|frames| frames.len() == 7).await;
    assert_eq!(
        frames[6],
        Frame::Ack {
            tag: 5,
            multiple: false
        }
    );
    // The broker would have closed the channel for any tag named twice.
    queue.fill(1).await;
    let _last = one(&mut source).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_messages_are_settled_out_of_order_without_a_protocol_error() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let proxy = Proxy::before(&queue.url).await;
    let total = 600;
    let mut source = started(RabbitMq::queue(&proxy.url, &queue.name), 40).await;
    let filling = queue.fill(total);
    let working = async {
        let (mut held, mut done, mut released) = (Vec::new(), 0, 0);
        let mut turn = 0_usize;
        while done < total {
            held.extend(some(&mut source, 1).await);
            turn += 1;
            // Keeps up to 20, settles from the middle, gives every ninth back.
            if held.len() >= 20 || done + held.len() as u32 >= total {
                while !held.is_empty() && (held.len() >= 10 || done + held.len() as u32 >= total) {
                    let delivery = held.remove((turn * 7) % held.len());
                    turn += 1;
                    if turn.is_multiple_of(9) && released < 50 {
                        released += 1;
                        release(&mut source, delivery, None).await;
                    } else {
                        done += 1;
                        ack(&mut source, [delivery]).await;
                    }
                }
            }
        }
    };
    soon(async { tokio::join!(filling, working) }).await;
    source.stop().await.unwrap();
    closes(source).await;
    assert_eq!(queue.ready().await, 0);
    let frames = proxy.frames();
    assert!(
        frames
            .iter()
            .all(|f| !matches!(f, Frame::Reject | Frame::Nack { requeue: false, .. }))
    );
    assert!(frames.iter().any(|f| matches!(f, Frame::Nack { .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_released_comes_again_and_the_rest_does_not() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    queue.fill(3).await;
    let mut source = queue.started(3).await;
    let mut deliveries = some(&mut source, 3).await;
    let second = deliveries.remove(1);
    ack(&mut source, deliveries).await;
    release(&mut source, second, None).await;
    let again = one(&mut source).await;
    assert_eq!(body(&again), "2");
    ack(&mut source, [again]).await;
    nothing(&mut source, Duration::from_millis(200)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_after_a_while_is_kept_that_long() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    queue.fill(1).await;
    let mut source = queue.started(2).await;
    let first = one(&mut source).await;
    let since = Instant::now();
    release(&mut source, first, Some(Duration::from_millis(400))).await;
    let again = one(&mut source).await;
    assert!(
        since.elapsed() >= Duration::from_millis(400),
        "{:?}",
        since.elapsed()
    );
    assert!(since.elapsed() < Duration::from_secs(5), "{:?}", since.elapsed());
    ack(&mut source, [again]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_goes_round_does_not_spin() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    queue.fill(1).await;
    let mut source = queue.started(1).await;
    let until = Instant::now() + Duration::from_secs(2);
    let mut rounds = 0;
    while let Ok(delivery) = tokio::time::timeout_at(until.into(), one(&mut source)).await {
        rounds += 1;
        release(&mut source, delivery, None).await;
    }
    assert!((5..=12).contains(&rounds), "{rounds} deliveries in two seconds");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_goes_round_does_not_slow_down_its_neighbours() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    queue.fill(200).await;
    let mut source = queue.started(4).await;
    let since = Instant::now();
    let mut done = 0;
    while done < 199 {
        let delivery = one(&mut source).await;
        if body(&delivery) == "1" {
            release(&mut source, delivery, None).await;
        } else {
            ack(&mut source, [delivery]).await;
            done += 1;
        }
    }
    assert!(since.elapsed() < Duration::from_secs(5), "{:?}", since.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn settling_the_lost_is_no_error() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let proxy = Proxy::before(&queue.url).await;
    queue.fill(2).await;
    let mut source = started(RabbitMq::queue(&proxy.url, &queue.name), 2).await;
    let deliveries = some(&mut source, 2).await;
    proxy.cut();
    lost(&mut source).await;
    ack(&mut source, deliveries).await;
    proxy.mend();
    let again = some(&mut source, 2).await;
    assert_eq!(bodies(&again), ["1", "2"]);
    ack(&mut source, again).await;
    source.stop().await.unwrap();
    closes(source).await;
    assert_eq!(queue.ready().await, 0);
}
