//! A password in no log, at any level, and in no error.
//!
//! In a binary of its own, because the observer has to be the whole process's: lapin writes from
//! threads of its own.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lapin::options::{QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::FieldTable;
use lapin::{Connection, ConnectionProperties};
use onlyonce::publisher::{Message, Publisher};
use onlyonce::source::{Incoming, Plan, Source};
use onlyonce_rabbitmq::{RabbitMq, RabbitMqPublisher};
use tracing_subscriber::fmt::MakeWriter;

const MARKER: &str = "s3cr3t%2Fm4rk3r";
const DECODED: &str = "s3cr3t/m4rk3r";

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

/// Every way in which the password could be written down.
fn shapes() -> Vec<String> {
    let bytes = DECODED
        .bytes()
        .map(|b| b.to_string())
        .collect::<Vec<_>>()
        .join(", ");
    // The middle of the base64 of `marker:s3cr3t/m4rk3r`, whatever stands before it.
    let base64 = "OnMzY3IzdC9tNHJrM3".to_owned();
    vec![MARKER.into(), DECODED.into(), "s3cr3t".into(), bytes, base64]
}

fn assert_clean(what: &str, text: &str) {
    for shape in shapes() {
        if let Some(at) = text.find(&shape) {
            let from = text[..at].rfind('\n').map_or(0, |n| n + 1);
            let to = text[at..].find('\n').map_or(text.len(), |n| at + n);
            panic!("{what} shows the password as {shape}: {}", &text[from..to]);
        }
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut out = format!("{error} {error:?} {error:#?}");
    let mut source = error.source();
    while let Some(error) = source {
        out += &format!(" {error} {error:?}");
        source = error.source();
    }
    out
}

#[tokio::test(flavor = "multi_thread")]
async fn a_password_is_in_no_log_and_in_no_error() {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let (Some(url), Some(ctl)) = (
        variable("ONLYONCE_RABBITMQ_URL"),
        variable("ONLYONCE_RABBITMQCTL"),
    ) else {
        let required = std::env::var("ONLYONCE_REQUIRE_SERVICES").is_ok_and(|v| v == "1");
        assert!(
            !required,
            "ONLYONCE_RABBITMQ_URL or ONLYONCE_RABBITMQCTL is not set"
        );
        println!("skipped: no ONLYONCE_RABBITMQ_URL");
        return;
    };
    let management = variable("ONLYONCE_RABBITMQ_MANAGEMENT_URL");
    let user = format!("marker-{}", std::process::id());
    let run = |arguments: &[&str]| {
        let output = std::process::Command::new(&ctl).args(arguments).output().unwrap();
        assert!(
            output.status.success(),
            "{arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    };
    run(&["add_user", &user, DECODED]);
    run(&["set_user_tags", &user, "monitoring"]);
    run(&["set_permissions", &user, ".*", ".*", ".*"]);
    let address = url.split_once('@').unwrap().1.to_owned();
    let queue = format!("onlyonce-test-secrets-{}", std::process::id());
    let admin = Connection::connect(&url, ConnectionProperties::default())
        .await
        .unwrap();
    let channel = admin.create_channel().await.unwrap();
    channel
        .queue_declare(
            queue.as_str().into(),
            QueueDeclareOptions::durable(),
            FieldTable::default(),
        )
        .await
        .unwrap();

    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_ansi(false)
        .with_writer(writer)
        .init();

    let mut errors = Vec::new();
    let mut shown = Vec::new();
    let plan = Plan::for_window("secrets", 4);
    let host = management
        .as_deref()
        .and_then(|m| m.split_once('@'))
        .map(|(_, host)| host.to_owned());
    for (what, url) in [
        ("the right password", format!("amqp://{user}:{MARKER}@{address}")),
        (
            "a wrong password",
            format!("amqp://{user}:{MARKER}-wrong@{address}"),
        ),
        (
            "a wrong host",
            format!("amqp://{user}:{MARKER}@no-such-host.invalid/%2f"),
        ),
        ("a closed port", format!("amqp://{user}:{MARKER}@127.0.0.1:1/%2f")),
        (
            "a wrong vhost",
            format!(
                "amqp://{user}:{MARKER}@{}/nope",
                address.split_once('/').unwrap().0
            ),
        ),
    ] {
        let mut builder = RabbitMq::queue(&url, &queue).connect_timeout(Duration::from_secs(3));
        if let Some(host) = &host {
            builder = builder.management_url(format!("http://{user}:{MARKER}@{host}"));
        }
        shown.push(format!("{builder:?}"));
        let mut source = builder.build().unwrap();
        shown.push(format!("{source:?} {source:#?}"));
        match source.start(&plan).await {
            Ok(()) => {
                assert_eq!(what, "the right password");
                tokio::time::timeout(Duration::from_millis(200), source.receive(1))
                    .await
                    .unwrap_err();
                source.stop().await.unwrap();
                assert!(matches!(source.receive(1).await.unwrap(), Incoming::Closed));
            }
            Err(error) => errors.push(format!("{what}: {}", chain(&error))),
        }
        shown.push(format!("{source:?} {:?}", source.health()));

        let builder = RabbitMqPublisher::to(&url).connect_timeout(Duration::from_secs(3));
        shown.push(format!("{builder:?}"));
        let publisher = builder.build().unwrap();
        // What comes back as unroutable is not shown either.
        let message = Message::new("amq.direct/nowhere", "secrets", "1", DECODED);
        let error = publisher.publish(&message).await.unwrap_err();
        shown.push(format!("{what}: {} {publisher:?} {publisher:#?}", chain(&error)));
        shown.push(format!("{:?}", publisher.health()));
        publisher.stop().await;
    }
    for url in [
        format!("amqp://{user}:{MARKER}@h:no-port/"),
        format!("ftp://{user}:{MARKER}@h"),
        MARKER.into(),
    ] {
        let error = RabbitMq::queue(&url, &queue)
            .management_url(&url)
            .build()
            .unwrap_err();
        errors.push(chain(&error));
        shown.push(chain(&RabbitMqPublisher::to(&url).build().unwrap_err()));
    }

    channel
        .queue_delete(queue.as_str().into(), QueueDeleteOptions::default())
        .await
        .unwrap();
    run(&["delete_user", &user]);

    let log = String::from_utf8_lossy(&log.0.lock().unwrap()).into_owned();
    assert!(log.contains("lapin"), "lapin's lines are captured");
    assert!(log.contains("TRACE"), "at the level TRACE");
    assert_eq!(errors.len(), 7, "{errors:#?}");
    assert_clean("the log", &log);
    errors.iter().for_each(|error| assert_clean("an error", error));
    shown.iter().for_each(|text| assert_clean("a Debug", text));
}
