//! What RabbitMQ in particular does with what is published.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use lapin::types::AMQPValue;
use lapin::{BasicProperties, ExchangeKind};
use onlyonce::publisher::{Message, PublishError, PublishErrorKind, Publisher};
use onlyonce_rabbitmq::RabbitMqPublisher;

use super::harness::*;
use super::proxy::Proxy;

fn publisher(url: &str) -> RabbitMqPublisher {
    RabbitMqPublisher::to(url)
        .patience(Duration::from_secs(10))
        .build()
        .unwrap()
}

fn message(address: &str, id: &str) -> Message {
    Message::new(address, "shop", id, id.to_owned())
}

fn refusal(told: Result<(), PublishError>) -> (PublishErrorKind, String) {
    let error = told.unwrap_err();
    (error.kind(), error.to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_persistent_and_says_what_it_is() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let publisher = publisher(&queue.url);
    let mut sent = message(&format!("/{}", queue.name), "evt-1");
    sent.event_type = Some("payment.captured".to_owned());
    sent.content_type = Some("application/json".to_owned());
    sent.key = Some("account-7".into());
    publisher.publish(&sent).await.unwrap();

    let came = queue.get().await.unwrap();
    let properties = &came.properties;
    assert_eq!(*properties.delivery_mode(), Some(2));
    let text = |text: &Option<lapin::types::ShortString>| text.as_ref().map(ToString::to_string);
    assert_eq!(text(properties.message_id()).as_deref(), Some("evt-1"));
    assert_eq!(text(properties.app_id()).as_deref(), Some("shop"));
    assert_eq!(text(properties.kind()).as_deref(), Some("payment.captured"));
    assert_eq!(
        text(properties.content_type()).as_deref(),
        Some("application/json")
    );
    assert!(properties.timestamp().is_some());
    let headers = properties.headers().as_ref().unwrap().inner();
    assert_eq!(headers.get("ce-id"), Some(&AMQPValue::LongString("evt-1".into())));
    publisher.stop().await;
}

/// The client library hands a returned message to whichever confirm comes next.
#[tokio::test(flavor = "multi_thread")]
async fn unroutable_ones_among_routed_ones_are_told_apart() {
    let Some(queue) = Queue::quorum().await else {
        return;
    };
    let exchange = queue.exchange(ExchangeKind::Direct, Some("bound")).await;
    let publisher = publisher(&queue.url);
    let messages: Vec<_> = (0..400)
        .map(|n| {
            let key = if n % 3 == 0 { "unbound" } else { "bound" };
            message(&format!("{exchange}/{key}"), &n.to_string())
        })
        .collect();
    let told = join_all(messages.iter().map(|message| publisher.publish(message))).await;
    let mut routed = 0;
    for (message, told) in messages.iter().zip(told) {
        if message.address.ends_with("unbound") {
            let (kind, text) = refusal(told);
            assert_eq!(kind, PublishErrorKind::Refused);
            assert!(
                text.contains("unroutable") && text.contains("312 NO_ROUTE"),
                "{text}"
            );
        } else {
            told.unwrap();
            routed += 1;
        }
    }
    queue.becomes_ready(routed).await;
    publisher.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unroutable_is_accepted_where_it_was_chosen() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let exchange = queue.exchange(ExchangeKind::Direct, Some("bound")).await;
    let chosen = format!("{exchange}/note");
    let publisher = RabbitMqPublisher::to(&queue.url)
        .accept_unroutable(&chosen)
        .build()
        .unwrap();
    publisher.publish(&message(&chosen, "1")).await.unwrap();
    let other = publisher
        .publish(&message(&format!("{exchange}/paid"), "2"))
        .await;
    assert_eq!(refusal(other).0, PublishErrorKind::Refused);
    publisher.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_refuses_until_there_is_room() {
    let full = [
        ("x-max-length", AMQPValue::LongInt(2)),
        ("x-overflow", AMQPValue::LongString("reject-publish".into())),
    ];
    let Some(queue) = Queue::declare(&full).await else {
        return;
    };
    let publisher = publisher(&queue.url);
    let address = format!("/{}", queue.name);
    for id in ["1", "2"] {
        publisher.publish(&message(&address, id)).await.unwrap();
    }
    let (kind, text) = refusal(publisher.publish(&message(&address, "3")).await);
    assert_eq!(kind, PublishErrorKind::Refused);
    assert!(text.contains("nack") && text.contains("full"), "{text}");
    assert_eq!(publisher.health().problem, None, "the broker is well");
    queue.get().await.unwrap();
    publisher.publish(&message(&address, "3")).await.unwrap();
    publisher.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_exchange_is_found_when_it_is_there() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let publisher = publisher(&queue.url);
    let exchange = queue.exchange(ExchangeKind::Direct, Some("k")).await;
    let missing = format!("{exchange}-later/k");
    let good = format!("{exchange}/k");
    let both: Vec<_> = (0..40)
        .map(|n| message(if n % 2 == 0 { &good } else { &missing }, &n.to_string()))
        .collect();
    let told = join_all(both.iter().map(|message| publisher.publish(message))).await;
    for (message, told) in both.iter().zip(told) {
        if message.address == good {
            told.unwrap();
        } else {
            let (kind, text) = refusal(told);
            assert_eq!(kind, PublishErrorKind::Destination);
            assert!(
                text.contains("no exchange") && text.contains("declare the exchange"),
                "{text}"
            );
        }
    }
    queue.becomes_ready(20).await;
    queue
        .exchange_named(&format!("{exchange}-later"), ExchangeKind::Direct)
        .await;
    queue.bind(&format!("{exchange}-later"), "k").await;
    publisher.publish(&message(&missing, "found")).await.unwrap();
    publisher.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_right_that_is_missing_is_the_destination_s_trouble() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let allowed = queue.exchange(ExchangeKind::Topic, Some("#")).await;
    let forbidden = queue.exchange(ExchangeKind::Topic, Some("#")).await;
    let user = unique("user");
    let steps: [&[&str]; 3] = [
        &["add_user", &user, "pw"],
        &["set_permissions", &user, "^$", &format!("^{allowed}$"), "^$"],
        &["set_topic_permissions", &user, &allowed, "^paid", "^$"],
    ];
    for step in steps {
        if ctl(step).await.is_none() {
            return;
        }
    }
    let address = queue.url.split_once('@').unwrap().1;
    let publisher = publisher(&format!("amqp://{user}:pw@{address}"));
    publisher
        .publish(&message(&format!("{allowed}/paid.eu"), "1"))
        .await
        .unwrap();
    for to in [format!("{forbidden}/paid.eu"), format!("{allowed}/refunded.eu")] {
        let (kind, text) = refusal(publisher.publish(&message(&to, "2")).await);
        assert_eq!(kind, PublishErrorKind::Destination, "{text}");
        assert!(text.contains("ACCESS_REFUSED"), "{text}");
    }
    publisher
        .publish(&message(&format!("{allowed}/paid.eu"), "3"))
        .await
        .unwrap();
    queue.becomes_ready(2).await;
    publisher.stop().await;
    ctl(&["delete_user", &user]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_on_its_way_when_the_connection_broke_is_interrupted() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let proxy = Proxy::before(&queue.url).await;
    let publisher = publisher(&proxy.url);
    let address = format!("/{}", queue.name);
    publisher.publish(&message(&address, "before")).await.unwrap();
    proxy.freeze();
    let under_way = message(&address, "under way");
    let publishing = publisher.publish(&under_way);
    let cutting = async {
        // Long enough for the frames to be written; the answer cannot come.
        tokio::time::sleep(Duration::from_millis(200)).await;
        proxy.cut();
    };
    let (told, ()) = futures_util::future::join(publishing, cutting).await;
    assert_eq!(refusal(told).0, PublishErrorKind::Interrupted);
    let (kind, _) = refusal(publisher.publish(&message(&address, "later")).await);
    assert_eq!(kind, PublishErrorKind::Unavailable, "this one was never sent");
    proxy.mend();
    publisher.publish(&message(&address, "after")).await.unwrap();
    publisher.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publisher_that_is_dropped_in_the_middle_of_a_message_confuses_no_later_one() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let exchange = queue.exchange(ExchangeKind::Direct, Some("bound")).await;
    // One channel: a later message would have to share it.
    let publisher = RabbitMqPublisher::to(&queue.url).channels(1).build().unwrap();
    publisher
        .publish(&message(&format!("{exchange}/bound"), "0"))
        .await
        .unwrap();
    for n in 0..50 {
        let lost = message(&format!("{exchange}/unbound"), "lost");
        let wait = Duration::from_micros(n * 37);
        drop(tokio::time::timeout(wait, publisher.publish(&lost)).await);
        publisher
            .publish(&message(&format!("{exchange}/bound"), &n.to_string()))
            .await
            .unwrap();
    }
    queue.becomes_ready(51).await;
    publisher.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn properties_up_to_the_frame_are_published_and_beyond_it_refused_alone() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let publisher = publisher(&queue.url);
    let address = format!("/{}", queue.name);
    let with = |bytes: usize| {
        let mut large = message(&address, "large");
        large.headers.push("large", vec![b'x'; bytes]);
        large
    };
    // The refusal counts; what is left to the limit is then filled up.
    let (kind, text) = refusal(publisher.publish(&with(200_000)).await);
    assert_eq!(kind, PublishErrorKind::Invalid, "{text}");
    let numbers: Vec<usize> = text
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|part| part.parse().ok())
        .collect();
    let (takes, most) = (numbers[0], numbers[1]);
    let longest = 200_000 - (takes - most);
    publisher.publish(&with(longest)).await.unwrap();
    assert_eq!(
        refusal(publisher.publish(&with(longest + 1)).await).0,
        PublishErrorKind::Invalid
    );
    publisher.publish(&message(&address, "good")).await.unwrap();
    queue.becomes_ready(2).await;
    publisher.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_header_that_routes_is_refused_because_the_broker_would_close_the_channel() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    // What RabbitMQ does with it.
    let mut table = lapin::types::FieldTable::default();
    table.insert("CC".into(), AMQPValue::LongString("elsewhere".into()));
    let properties = BasicProperties::default().with_headers(table);
    let error = queue.try_publish(b"x", properties).await.unwrap_err();
    assert!(error.is_amqp_soft_error(), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_are_opened_once_and_closed_at_the_stop() {
    let Some(queue) = Queue::classic().await else {
        return;
    };
    let publisher = publisher(&queue.url);
    let address = format!("/{}", queue.name);
    let messages: Vec<_> = (0..100).map(|n| message(&address, &n.to_string())).collect();
    let since = Instant::now();
    let told = join_all(messages.iter().map(|message| publisher.publish(message))).await;
    told.into_iter().for_each(Result::unwrap);
    println!("100 at once took {:?}", since.elapsed());
    let shown = format!("{publisher:?}");
    assert!(
        shown.contains("***") && !shown.contains("onlyonce:onlyonce"),
        "{shown}"
    );
    publisher.stop().await;
    let late = publisher.publish(&message(&address, "late")).await;
    assert_eq!(refusal(late).0, PublishErrorKind::Unavailable);
}
