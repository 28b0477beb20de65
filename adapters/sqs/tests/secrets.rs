//! Keys and tokens in no log, at any level, and in no error.
//!
//! In a binary of its own, because the observer has to be the whole process's.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use onlyonce::publisher::{Message, Publisher};
use onlyonce::source::{Incoming, Plan, Source};
use onlyonce_sqs::{Connection, Sqs, SqsPublisher};
use tracing_subscriber::fmt::MakeWriter;

const SECRET: &str = "s3cr3t/m4rk3r";
const TOKEN: &str = "t0k3n/m4rk3r";

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// Every way in which they could be written down.
fn shapes() -> Vec<String> {
    let mut shapes = vec!["m4rk3r".to_owned()];
    for marker in [SECRET, TOKEN] {
        let bytes: Vec<String> = marker.bytes().map(|b| b.to_string()).collect();
        shapes.push(bytes.join(", "));
    }
    shapes
}

fn assert_clean(what: &str, text: &str) {
    for shape in shapes() {
        if let Some(at) = text.find(&shape) {
            let from = text[..at].rfind('\n').map_or(0, |n| n + 1);
            let to = text[at..].find('\n').map_or(text.len(), |n| at + n);
            panic!("{what} shows a secret as {shape}: {}", &text[from..to]);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_and_tokens_are_in_no_log_and_in_no_error() {
    let endpoint = match std::env::var("ONLYONCE_SQS_URL") {
        Ok(endpoint) if !endpoint.is_empty() => endpoint,
        _ => {
            let required = std::env::var("ONLYONCE_REQUIRE_SERVICES").is_ok_and(|v| v == "1");
            assert!(!required, "ONLYONCE_SQS_URL is not set");
            println!("skipped: no ONLYONCE_SQS_URL");
            return;
        }
    };
    let log = Log::default();
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_ansi(false)
        .with_writer(log.clone())
        .init();

    let connection = |endpoint: &str| {
        Connection::new("us-east-1", "AKIAKEY", SECRET)
            .session_token(TOKEN)
            .endpoint(endpoint)
    };
    let client = connection(&endpoint).client().unwrap();
    let name = format!("onlyonce-test-secrets-{}", std::process::id());
    let url = client
        .create_queue()
        .queue_name(&name)
        .send()
        .await
        .unwrap()
        .queue_url
        .unwrap();
    client
        .send_message()
        .queue_url(&url)
        .message_body("x")
        .send()
        .await
        .unwrap();

    let (mut shown, mut errors) = (Vec::new(), Vec::new());
    for (what, endpoint, url) in [
        ("a queue", endpoint.as_str(), url.clone()),
        ("no queue", &endpoint, format!("{url}-nope")),
        ("a closed port", "http://127.0.0.1:1", url.clone()),
        ("no host", "http://no-such-host.invalid", url.clone()),
    ] {
        let connection = connection(endpoint);
        let builder = SqsPublisher::to(connection.client().unwrap());
        shown.push(format!("{builder:?}"));
        let publisher = builder.build().unwrap();
        let told = publisher.publish(&Message::new(&url, "secrets", "1", "x")).await;
        assert_eq!(told.is_ok(), what == "a queue", "{told:?}");
        shown.push(format!(
            "{told:?} {publisher:?} {publisher:#?} {:?}",
            publisher.health()
        ));
        publisher.stop().await;
        let builder = Sqs::queue(connection.client().unwrap(), url).wait_time(Duration::ZERO);
        shown.push(format!("{connection:?} {builder:?} {builder:#?}"));
        let mut source = builder.build().unwrap();
        match source.start(&Plan::for_window("secrets", 4)).await {
            Ok(()) => {
                assert_eq!(what, "a queue");
                let Incoming::Deliveries(deliveries) = source.receive(4).await.unwrap() else {
                    panic!("no delivery");
                };
                let acks = deliveries.into_iter().map(|delivery| delivery.ack()).collect();
                source.settle(acks).await.unwrap();
                source.stop().await.unwrap();
                assert!(matches!(source.receive(0).await.unwrap(), Incoming::Closed));
            }
            Err(error) => errors.push(format!("{what}: {error} {error:?}")),
        }
        shown.push(format!("{source:?} {source:#?} {:?}", source.health()));
    }
    errors.push(connection(SECRET).client().unwrap_err().to_string());
    client.delete_queue().queue_url(&url).send().await.unwrap();

    let log = String::from_utf8_lossy(&log.0.lock().unwrap()).into_owned();
    assert!(
        log.contains("TRACE") && log.contains("aws_"),
        "the SDK's lines are captured"
    );
    assert_eq!(errors.len(), 4, "{errors:#?}");
    assert_clean("the log", &log);
    errors.iter().for_each(|error| assert_clean("an error", error));
    shown.iter().for_each(|text| assert_clean("a Debug", text));
}
