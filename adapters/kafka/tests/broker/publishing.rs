//! What Kafka in particular does with what is published.

use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use futures_util::future::join_all;
use onlyonce::publisher::{Message, PublishError, PublishErrorKind, Publisher};
use onlyonce_kafka::{KafkaPublisher, MAX_MESSAGE_BYTES};
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::mocking::MockCluster;
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

use super::harness::*;

const PATIENCE: Duration = Duration::from_secs(8);

fn publisher(brokers: &str) -> KafkaPublisher {
    KafkaPublisher::to(brokers).patience(PATIENCE).build().unwrap()
}

fn message(topic: &str, id: &str, body: impl Into<onlyonce::Bytes>) -> Message {
    Message::new(topic, "shop", id, body)
}

fn refusal(told: Result<(), PublishError>) -> (PublishErrorKind, String) {
    let error = told.unwrap_err();
    (error.kind(), error.to_string())
}

/// The partition of what has just been read.
fn partition(detail: &str) -> u32 {
    let number = detail.strip_prefix("partition=").unwrap().split(' ').next();
    number.unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_land_where_java_puts_them() {
    // Of Kafka's own tests of its hash.
    const HASHES: [(&str, i32); 6] = [
        ("21", -973_932_308),
        ("foobar", -790_332_482),
        ("a-little-bit-long-string", -985_981_536),
        ("a-little-bit-longer-string", -1_486_304_829),
        ("lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58_897_971),
        ("abc", 479_470_107),
    ];
    const PARTITIONS: u32 = 7;
    let Some(topic) = Topic::of(PARTITIONS as i32).await else {
        return;
    };
    let publisher = publisher(&topic.brokers);
    for (key, _) in HASHES {
        let mut keyed = message(&topic.name, key, "x");
        keyed.key = Some(key.into());
        publisher.publish(&keyed).await.unwrap();
    }
    publisher.stop().await;
    let mut source = started(topic.source(), 10).await;
    let came = some(&mut source, HASHES.len()).await;
    for (key, hash) in HASHES {
        let found = came
            .iter()
            .find(|d| d.event.key.as_deref() == Some(key.as_bytes()))
            .unwrap();
        let due = (hash & 0x7fff_ffff) as u32 % PARTITIONS;
        assert_eq!(partition(&found.event.origin.detail), due, "{key}");
    }
    ack(&mut source, came).await;
    closes(source).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_is_found_when_it_is_there_and_missed_when_it_is_gone() {
    let Some(topic) = Topic::of(1).await else { return };
    let publisher = publisher(&topic.brokers);
    let later = format!("{}-later", topic.name);
    for _ in 0..2 {
        let since = Instant::now();
        let (kind, text) = refusal(publisher.publish(&message(&later, "1", "x")).await);
        assert_eq!(kind, PublishErrorKind::Destination, "{text}");
        assert!(text.contains("create it"), "{text}");
        assert!(since.elapsed() < Duration::from_secs(3), "{:?}", since.elapsed());
    }
    let sibling = topic.sibling("later").await;
    publisher.publish(&message(&later, "1", "x")).await.unwrap();

    drop(sibling);
    let until = Instant::now() + SOON;
    loop {
        let (kind, text) = match publisher.publish(&message(&later, "2", "x")).await {
            // The broker takes a moment to delete it.
            Ok(()) => (PublishErrorKind::Unavailable, String::new()),
            Err(error) => (error.kind(), error.to_string()),
        };
        if kind == PublishErrorKind::Destination {
            break;
        }
        assert!(Instant::now() < until, "{kind:?} {text}");
    }
    publisher.publish(&message(&topic.name, "3", "x")).await.unwrap();
    let sibling = topic.sibling("later").await;
    publisher.publish(&message(&later, "4", "x")).await.unwrap();
    publisher.stop().await;
    drop(sibling);
}

/// A broker that creates what a producer asks for, as Kafka's default is.
#[tokio::test(flavor = "multi_thread")]
async fn a_misspelt_topic_is_not_created() {
    let cluster = MockCluster::new(1).unwrap();
    cluster.create_topic("orders", 1, 1).unwrap();
    let publisher = publisher(&cluster.bootstrap_servers());
    publisher.publish(&message("orders", "1", "x")).await.unwrap();
    let (kind, _) = refusal(publisher.publish(&message("odrers", "2", "x")).await);
    assert_eq!(kind, PublishErrorKind::Destination);
    let brokers = cluster.bootstrap_servers();
    let topics: Vec<String> = tokio::task::spawn_blocking(move || {
        let client: BaseConsumer = rdkafka::ClientConfig::new()
            .set("bootstrap.servers", brokers)
            .create()
            .unwrap();
        let metadata = client.fetch_metadata(None, SOON).unwrap();
        metadata
            .topics()
            .iter()
            .map(|topic| topic.name().to_owned())
            .collect()
    })
    .await
    .unwrap();
    assert_eq!(topics, ["orders"]);
    publisher.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_of_the_size_to_be_counted_on_is_published() {
    let Some(topic) = Topic::of(1).await else { return };
    let publisher = publisher(&topic.brokers);
    let mut large = message(&topic.name, "large", "");
    large.event_type = Some("payment.captured".to_owned());
    large.key = Some("account-7".into());
    (0..50).for_each(|n| large.headers.push(format!("header-{n}"), "v".repeat(200)));
    let room = MAX_MESSAGE_BYTES - large.size();
    large.payload = Some(vec![b'x'; room].into());
    assert_eq!(large.size(), MAX_MESSAGE_BYTES);
    publisher.publish(&large).await.unwrap();
    publisher.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_at_the_client_s_limit_is_published_and_one_beyond_it_refused_alone() {
    let Some(topic) = Topic::of(1).await else { return };
    let publisher = publisher(&topic.brokers);
    let of = |bytes: usize| message(&topic.name, "x", vec![b'x'; bytes]);
    // The client counts headers, too, in a way of its own.
    let (mut limit, mut beyond) = (MAX_MESSAGE_BYTES, 1_000_001);
    while beyond - limit > 1 {
        let middle = (limit + beyond) / 2;
        match publisher.publish(&of(middle)).await {
            Ok(()) => limit = middle,
            Err(_) => beyond = middle,
        }
    }
    assert!(limit > 999_000, "{limit}");
    let sizes = [10, limit - 1, 11, limit + 1, 12, limit, 13];
    let all = sizes.map(of);
    let told = join_all(all.iter().map(|message| publisher.publish(message))).await;
    for (size, told) in sizes.iter().zip(told) {
        if *size == limit + 1 {
            assert_eq!(refusal(told).0, PublishErrorKind::Invalid);
        } else {
            told.unwrap_or_else(|error| panic!("{size}: {error}"));
        }
    }
    publisher.stop().await;
}

/// The broker refuses a whole batch for its size, and says no more than that.
#[tokio::test(flavor = "multi_thread")]
async fn a_limit_that_was_lowered_blames_only_what_is_alone() {
    let Some(topic) = Topic::of(1).await else { return };
    let publisher = KafkaPublisher::to(&topic.brokers)
        .patience(PATIENCE)
        // All that comes at once is one batch.
        .set("linger.ms", "50")
        .build()
        .unwrap();
    let large = message(&topic.name, "large", vec![b'x'; 6_000]);
    publisher.publish(&large).await.unwrap();
    topic.set("max.message.bytes", "5000").await;
    let mut all: Vec<_> = (0..40)
        .map(|n| message(&topic.name, &format!("good {n}"), vec![b'x'; 500]))
        .collect();
    all.insert(20, large);
    let told = join_all(all.iter().map(|message| publisher.publish(message))).await;
    // As a relay does: one after the other.
    let again: Vec<_> = all.iter().zip(told).filter(|(_, told)| told.is_err()).collect();
    for (message, told) in again {
        assert_eq!(
            refusal(told).0,
            PublishErrorKind::Interrupted,
            "{}",
            message.event_id
        );
        match publisher.publish(message).await {
            Ok(()) => assert_ne!(message.event_id, "large"),
            Err(error) => {
                assert_eq!(message.event_id, "large", "{error}");
                assert_eq!(error.kind(), PublishErrorKind::Invalid, "{error}");
            }
        }
    }
    publisher.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_compacted_topic_wants_a_key() {
    let Some(topic) = Topic::with(1, &[("cleanup.policy", "compact")]).await else {
        return;
    };
    let publisher = publisher(&topic.brokers);
    let (kind, text) = refusal(publisher.publish(&message(&topic.name, "1", "x")).await);
    assert_eq!(kind, PublishErrorKind::Invalid, "{text}");
    let mut keyed = message(&topic.name, "2", "x");
    keyed.key = Some("k".into());
    publisher.publish(&keyed).await.unwrap();
    publisher.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_whose_leader_is_away_is_not_the_cluster() {
    let cluster = MockCluster::new(2).unwrap();
    for (topic, leader) in [("lame", 2), ("well", 1)] {
        cluster.create_topic(topic, 1, 1).unwrap();
        cluster.partition_leader(topic, 0, Some(leader)).unwrap();
    }
    let publisher = KafkaPublisher::to(cluster.bootstrap_servers())
        .patience(Duration::from_secs(4))
        .build()
        .unwrap();
    for topic in ["lame", "well"] {
        publisher.publish(&message(topic, "0", "x")).await.unwrap();
    }
    cluster.broker_down(2).unwrap();
    let lost = message("lame", "1", "x");
    let (kind, _) = refusal(publisher.publish(&lost).await);
    assert_eq!(
        kind,
        PublishErrorKind::Unavailable,
        "nothing else was delivered meanwhile"
    );
    let goes_on = async {
        for n in 0..20 {
            tokio::time::sleep(Duration::from_millis(50)).await;
            publisher
                .publish(&message("well", &n.to_string(), "x"))
                .await
                .unwrap();
        }
    };
    let (told, ()) = futures_util::future::join(publisher.publish(&lost), goes_on).await;
    assert_eq!(refusal(told).0, PublishErrorKind::Destination);
    publisher.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_caller_left_behind_is_sent_before_the_end() {
    let Some(topic) = Topic::of(1).await else { return };
    let publisher = KafkaPublisher::to(&topic.brokers)
        .set("linger.ms", "500")
        .build()
        .unwrap();
    publisher.publish(&message(&topic.name, "0", "0")).await.unwrap();
    let left = message(&topic.name, "1", "1");
    assert!(publisher.publish(&left).now_or_never().is_none());
    publisher.stop().await;
    let mut source = started(topic.source(), 4).await;
    let came = some(&mut source, 2).await;
    assert_eq!(bodies(&came), ["0", "1"]);
    ack(&mut source, came).await;
    closes(source).await;
}

/// An idempotent producer whose broker has lost count of its messages is of no use any more.
#[tokio::test(flavor = "multi_thread")]
async fn a_producer_that_broke_for_good_is_replaced() {
    let cluster = MockCluster::new(1).unwrap();
    cluster.create_topic("orders", 1, 1).unwrap();
    let publisher = KafkaPublisher::to(cluster.bootstrap_servers())
        .patience(Duration::from_secs(5))
        .build()
        .unwrap();
    // After this one librdkafka refuses everything that comes.
    let fatal = RDKafkaRespErr::RD_KAFKA_RESP_ERR_CLUSTER_AUTHORIZATION_FAILED;
    cluster.request_errors(RDKafkaApiKey::InitProducerId, &[fatal]);
    let (kind, text) = refusal(publisher.publish(&message("orders", "0", "x")).await);
    assert_eq!(
        kind,
        PublishErrorKind::Unavailable,
        "it is nobody's message: {text}"
    );
    assert!(text.contains("broke for good"), "{text}");
    publisher.publish(&message("orders", "1", "x")).await.unwrap();
    for error in [
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_OUT_OF_ORDER_SEQUENCE_NUMBER,
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_INVALID_PRODUCER_EPOCH,
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_PRODUCER_ID,
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_CLUSTER_AUTHORIZATION_FAILED,
    ] {
        cluster.request_errors(RDKafkaApiKey::Produce, &[error; 3]);
        let told = publisher.publish(&message("orders", "2", "x")).await;
        cluster.clear_request_errors(RDKafkaApiKey::Produce);
        if let Err(failed) = &told {
            println!("{error:?}: {failed} ({:?})", failed.kind());
            assert!(
                matches!(
                    failed.kind(),
                    PublishErrorKind::Interrupted | PublishErrorKind::Unavailable
                ),
                "{failed}"
            );
        }
        let until = Instant::now() + SOON;
        while let Err(failed) = publisher.publish(&message("orders", "3", "x")).await {
            assert!(Instant::now() < until, "after {error:?}: {failed}");
        }
    }
    publisher.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_logs_in_may_publish_and_who_cannot_is_told_why() {
    let Some(topic) = Topic::of(1).await else { return };
    let (Some(brokers), Some(login)) = (
        variable("ONLYONCE_KAFKA_SASL_BROKERS"),
        variable("ONLYONCE_KAFKA_SASL_LOGIN"),
    ) else {
        return;
    };
    let (user, password) = login.split_once(':').unwrap();
    let with = |password: &str| {
        KafkaPublisher::to(&brokers)
            .patience(Duration::from_secs(4))
            .set("security.protocol", "sasl_plaintext")
            .set("sasl.mechanism", "PLAIN")
            .set("sasl.username", user)
            .set("sasl.password", password)
            .build()
            .unwrap()
    };
    let right = with(password);
    right.publish(&message(&topic.name, "1", "x")).await.unwrap();
    right.stop().await;
    let wrong = with("s3cr3t-m4rk3r");
    let (kind, text) = refusal(wrong.publish(&message(&topic.name, "2", "x")).await);
    assert_eq!(kind, PublishErrorKind::Unavailable);
    assert!(
        text.contains("Authentication failed") && !text.contains("m4rk3r"),
        "{text}"
    );
    assert_eq!(wrong.health().problem, Some(text));
    wrong.stop().await;
}

#[cfg(feature = "tls")]
#[tokio::test(flavor = "multi_thread")]
async fn it_publishes_over_tls() {
    let Some(topic) = Topic::of(1).await else { return };
    let (Some(brokers), Some(authority)) = (
        variable("ONLYONCE_KAFKA_TLS_BROKERS"),
        variable("ONLYONCE_KAFKA_TLS_CA"),
    ) else {
        return;
    };
    let publisher = KafkaPublisher::to(brokers)
        .patience(PATIENCE)
        .set("security.protocol", "ssl")
        .set("ssl.ca.location", authority)
        .build()
        .unwrap();
    publisher.publish(&message(&topic.name, "1", "x")).await.unwrap();
    publisher.stop().await;
}
