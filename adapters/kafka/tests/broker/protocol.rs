//! What brokers answer when something is wrong, from librdkafka's own mock of a cluster: a real one
//! cannot be told to give an answer. No broker is needed.

use std::collections::HashSet;
use std::time::Duration;

use onlyonce::source::{Incoming, Source};
use onlyonce_kafka::{Kafka, KafkaBuilder, StartAt};
use rdkafka::ClientConfig;
use rdkafka::mocking::MockCluster;
use rdkafka::producer::{DefaultProducerContext, FutureProducer, FutureRecord};
use rdkafka::types::{RDKafkaApiKey as Api, RDKafkaRespErr as Code};

use super::harness::{QUICK, SOON, ack, body, committed, receipts, show_logs, some, soon, started, unique};

const TOPIC: &str = "orders";

struct Cluster {
    mock: MockCluster<'static, DefaultProducerContext>,
    producer: FutureProducer,
    group: String,
}

impl Cluster {
    fn new() -> Self {
        show_logs();
        let mock = MockCluster::new(1).unwrap();
        mock.create_topic(TOPIC, 1, 1).unwrap();
        let producer = ClientConfig::new()
            .set("bootstrap.servers", mock.bootstrap_servers())
            .create()
            .unwrap();
        Self {
            mock,
            producer,
            group: unique("mock"),
        }
    }

    fn source(&self) -> KafkaBuilder {
        let builder = Kafka::group(self.mock.bootstrap_servers(), &self.group)
            .topic(TOPIC)
            .start_at(StartAt::Earliest)
            // It knows nothing of configurations, and is asked for them at the start.
            .connect_timeout(Duration::from_secs(2));
        QUICK
            .into_iter()
            .fold(builder, |builder, (name, value)| builder.set(name, value))
    }

    async fn publish(&self, bodies: std::ops::RangeInclusive<usize>) {
        for body in bodies {
            let body = body.to_string();
            let record = FutureRecord::<[u8], _>::to(TOPIC).payload(&body);
            self.producer.send(record, SOON).await.unwrap();
        }
    }

    /// The next so many requests of this kind fail.
    fn fails(&self, api: Api, code: Code, times: usize) {
        self.mock.request_errors(api, &vec![code; times]);
    }

    async fn becomes_committed(&self, offset: i64) {
        let until = tokio::time::Instant::now() + SOON;
        loop {
            let at = committed(&self.mock.bootstrap_servers(), &self.group, TOPIC, 0).await;
            if at == Some(offset) {
                return;
            }
            assert!(
                tokio::time::Instant::now() < until,
                "{at:?} is committed, not {offset}"
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// Does what comes, as a consumer would, until all of these were done.
async fn all_are_done(source: &mut Kafka, count: usize, mut done: HashSet<String>) {
    while done.len() < count {
        match soon(source.receive(16)).await.unwrap() {
            Incoming::Deliveries(deliveries) => {
                done.extend(deliveries.iter().map(body));
                ack(source, deliveries).await;
            }
            Incoming::Lost(_) => {}
            other => panic!("{other:?}"),
        }
    }
}

/// Whatever a coordinator answers to a commit: what is done becomes committed, also if nothing more comes.
async fn a_commit_fails(code: Code) {
    let cluster = Cluster::new();
    cluster.publish(1..=4).await;
    let mut source = started(cluster.source(), 8).await;
    let first = some(&mut source, 4).await;
    let done = first.iter().map(body).collect();
    cluster.fails(Api::OffsetCommit, code, 2);
    ack(&mut source, first).await;
    cluster.publish(5..=6).await;
    let working = async {
        all_are_done(&mut source, 6, done).await;
        loop {
            // What comes again after the member was thrown out is done again.
            match source.receive(16).await.unwrap() {
                Incoming::Deliveries(again) => ack(&mut source, again).await,
                Incoming::Lost(_) => {}
                other => panic!("{other:?}"),
            }
        }
    };
    tokio::select! {
        () = working => {}
        () = cluster.becomes_committed(6) => {}
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_meets_a_loading_coordinator_is_repeated() {
    a_commit_fails(Code::RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_meets_the_wrong_coordinator_is_repeated() {
    a_commit_fails(Code::RD_KAFKA_RESP_ERR_NOT_COORDINATOR).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_meets_a_rebalance_is_repeated() {
    a_commit_fails(Code::RD_KAFKA_RESP_ERR_REBALANCE_IN_PROGRESS).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_of_a_member_that_is_unknown_is_covered_by_a_later_one() {
    a_commit_fails(Code::RD_KAFKA_RESP_ERR_UNKNOWN_MEMBER_ID).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_of_an_old_generation_is_covered_by_a_later_one() {
    a_commit_fails(Code::RD_KAFKA_RESP_ERR_ILLEGAL_GENERATION).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_was_thrown_out_of_the_group_stores_nothing_and_begins_anew() {
    let cluster = Cluster::new();
    cluster.publish(1..=2).await;
    let mut source = started(cluster.source(), 8).await;
    let held = some(&mut source, 2).await;
    cluster.fails(Api::Heartbeat, Code::RD_KAFKA_RESP_ERR_UNKNOWN_MEMBER_ID, 1);
    assert_eq!(super::harness::lost(&mut source).await, receipts(&held));
    ack(&mut source, held).await;
    let again = some(&mut source, 2).await;
    assert_eq!(again.iter().map(body).collect::<Vec<_>>(), ["1", "2"]);
    let brokers = cluster.mock.bootstrap_servers();
    let at = committed(&brokers, &cluster.group, TOPIC, 0).await;
    assert_eq!(
        at.unwrap_or(0),
        0,
        "what was acked late is another member's to tell"
    );
    ack(&mut source, again).await;
    cluster.becomes_committed(2).await;
}

async fn a_request_fails(api: Api, code: Code, times: usize) {
    let cluster = Cluster::new();
    cluster.publish(1..=2).await;
    let mut source = started(cluster.source(), 8).await;
    cluster.fails(api, code, times);
    all_are_done(&mut source, 2, HashSet::new()).await;
    cluster.fails(api, code, times);
    cluster.publish(3..=4).await;
    let done = HashSet::from(["1".to_owned(), "2".to_owned()]);
    all_are_done(&mut source, 4, done).await;
    cluster.becomes_committed(4).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_that_meets_the_wrong_leader_goes_on() {
    a_request_fails(Api::Fetch, Code::RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION, 3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_that_fails_for_no_known_reason_goes_on() {
    a_request_fails(Api::Fetch, Code::RD_KAFKA_RESP_ERR_UNKNOWN, 3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_is_wrong_about_a_missing_record_loses_nothing() {
    // Each time a client is made anew, and the group's first member waits for others.
    a_request_fails(Api::Fetch, Code::RD_KAFKA_RESP_ERR_OFFSET_OUT_OF_RANGE, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_coordinator_that_does_not_tell_the_offsets_at_first_is_asked_again() {
    a_request_fails(
        Api::OffsetFetch,
        Code::RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS,
        3,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_may_not_use_the_group_is_told_so() {
    let cluster = Cluster::new();
    let mut source = started(cluster.source(), 8).await;
    cluster.fails(
        Api::JoinGroup,
        Code::RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED,
        9,
    );
    let error = soon(source.receive(1)).await.unwrap_err();
    assert!(error.is_fatal(), "{error}");
    assert!(
        error.to_string().contains("use the group (it needs READ"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stall_is_told_and_answered_by_one_new_client() {
    let cluster = Cluster::new();
    cluster.publish(1..=1).await;
    let mut source = started(cluster.source().stall_after(Duration::from_secs(10)), 8).await;
    let first = some(&mut source, 1).await;
    ack(&mut source, first).await;
    assert!(source.health().connected);

    // Nobody leads the partition, say the fetches, while it grows.
    let code = Code::RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION;
    cluster.fails(Api::Fetch, code, 100_000);
    let (mut rebuilt, mut told) = (None, None);
    let mut published = 1;
    soon_enough(async {
        while told.is_none() {
            published += 1;
            cluster.publish(published..=published).await;
            works_a_moment(&mut source).await;
            let health = source.health();
            let stalled = health
                .problem
                .as_deref()
                .is_some_and(|p| p.contains("nothing was received"));
            match source.rebuilds() {
                0 => assert!(health.connected, "{health:?}"),
                1 => {
                    assert!(!health.connected, "{health:?}");
                    let since = *rebuilt.get_or_insert_with(tokio::time::Instant::now);
                    // It stalled again, and no third client is made.
                    told = (stalled && since.elapsed() > Duration::from_secs(10)).then_some(health);
                }
                more => panic!("{more} clients were made"),
            }
        }
    })
    .await;

    cluster.mock.clear_request_errors(Api::Fetch);
    soon_enough(async {
        while !source.health().connected {
            works_a_moment(&mut source).await;
        }
    })
    .await;
    assert_eq!((source.health().problem, source.rebuilds()), (None, 1));
    let working = async {
        loop {
            works_a_moment(&mut source).await;
        }
    };
    tokio::select! {
        () = working => {}
        () = cluster.becomes_committed(published as i64) => {}
    }
}

/// Two stalls and two generations of a group.
async fn soon_enough<F: Future>(what: F) -> F::Output {
    tokio::time::timeout(4 * SOON, what)
        .await
        .expect("it takes too long")
}

/// Takes what comes within a moment, and does it.
async fn works_a_moment(source: &mut Kafka) {
    let moment = Duration::from_millis(100);
    match tokio::time::timeout(moment, source.receive(64)).await {
        Ok(Ok(Incoming::Deliveries(deliveries))) => ack(source, deliveries).await,
        Ok(Err(error)) => panic!("{error}"),
        _ => {}
    }
}
