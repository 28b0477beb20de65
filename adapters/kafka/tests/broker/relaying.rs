//! The relay to copy, as a process.

use onlyonce_testbed::example::RelayExample;

use super::harness::*;

#[tokio::test(flavor = "multi_thread")]
async fn the_relay_to_copy_publishes_and_stops_in_good_order() {
    let (Some(postgres), Some(topic)) = (variable("ONLYONCE_POSTGRES_URL"), Topic::of(1).await) else {
        return;
    };
    let variables = &[("KAFKA_BROKERS", topic.brokers.as_str())];
    let relay = RelayExample::start(env!("CARGO_MANIFEST_DIR"), &postgres, variables).await;
    relay.send(&format!("kafka:{}", topic.name), "evt-1").await;
    let mut source = started(topic.source(), 10).await;
    assert_eq!(bodies(&some(&mut source, 1).await), ["evt-1"]);
    relay.stop().await;
}
