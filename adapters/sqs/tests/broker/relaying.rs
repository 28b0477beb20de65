//! The relay to copy, as a process.

use onlyonce_testbed::example::RelayExample;

use super::harness::*;

#[tokio::test(flavor = "multi_thread")]
async fn the_relay_to_copy_publishes_and_stops_in_good_order() {
    let (Some(postgres), Some(queue)) = (variable("ONLYONCE_POSTGRES_URL"), Queue::standard().await) else {
        return;
    };
    let variables = &[
        ("AWS_REGION", "us-east-1"),
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "test"),
        ("AWS_ENDPOINT_URL", queue.endpoint.as_str()),
    ];
    let relay = RelayExample::start(env!("CARGO_MANIFEST_DIR"), &postgres, variables).await;
    relay.send(&format!("sqs:{}", queue.url), "evt-1").await;
    let mut source = started(queue.source(), 10).await;
    assert_eq!(bodies(&some(&mut source, 1).await), ["evt-1"]);
    relay.stop().await;
}
