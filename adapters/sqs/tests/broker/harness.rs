//! A queue of its own per test, and what SQS says about it.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use aws_sdk_sqs::Client;
use aws_sdk_sqs::primitives::Blob;
use aws_sdk_sqs::types::{MessageAttributeValue, QueueAttributeName};
use onlyonce::event::Headers;
use onlyonce::source::{Plan, Source};
use onlyonce_conformance::Depth;
use onlyonce_sqs::{Connection, Sqs, SqsBuilder};
pub(crate) use onlyonce_testbed::drive::{
    SOON, ack, bodies, body, closes, lost, nothing, receipts, release, some, soon, unique,
};

/// What SQS says of a queue that does not exist, in the words of either of its protocols.
pub(crate) const GONE: &str = "does not exist";
/// Short, as tests wait for its end, and long enough for a busy machine to renew it.
pub(crate) const VISIBILITY: Duration = Duration::from_secs(3);

/// The emulator's endpoint, or `None` and a line that says so.
pub(crate) fn endpoint() -> Option<String> {
    variable("ONLYONCE_SQS_URL")
}

pub(crate) fn variable(name: &str) -> Option<String> {
    match std::env::var(name) {
        Ok(value) if !value.is_empty() => Some(value),
        _ if std::env::var("ONLYONCE_REQUIRE_SERVICES").is_ok_and(|v| v == "1") => {
            panic!("{name} is not set")
        }
        _ => {
            println!("skipped: no {name}");
            None
        }
    }
}

pub(crate) fn client(endpoint: &str) -> Client {
    Connection::new("us-east-1", "test", "test")
        .endpoint(endpoint)
        .client()
        .unwrap()
}

/// A queue that exists until this is dropped, and a client to fill and watch it.
pub(crate) struct Queue {
    pub(crate) url: String,
    pub(crate) endpoint: String,
    pub(crate) client: Client,
}

impl Queue {
    /// `None` if there is no emulator to test against.
    pub(crate) async fn standard() -> Option<Self> {
        Self::create("", &[]).await
    }

    pub(crate) async fn fifo() -> Option<Self> {
        Self::create(".fifo", &[(QueueAttributeName::FifoQueue, "true".to_owned())]).await
    }

    pub(crate) async fn create(suffix: &str, attributes: &[(QueueAttributeName, String)]) -> Option<Self> {
        let endpoint = endpoint()?;
        let client = client(&endpoint);
        let mut create = client.create_queue().queue_name(unique("test") + suffix);
        for (name, value) in attributes {
            create = create.attributes(name.clone(), value);
        }
        let url = create.send().await.unwrap().queue_url.unwrap();
        Some(Self {
            url,
            endpoint,
            client,
        })
    }

    /// After so many receives a message goes to that queue.
    pub(crate) async fn redrives_to(&self, dead: &Queue, most: u32) {
        let dead = dead
            .attributes()
            .await
            .remove(&QueueAttributeName::QueueArn)
            .unwrap();
        let policy = format!(r#"{{"deadLetterTargetArn":"{dead}","maxReceiveCount":{most}}}"#);
        self.client
            .set_queue_attributes()
            .queue_url(&self.url)
            .attributes(QueueAttributeName::RedrivePolicy, policy)
            .send()
            .await
            .unwrap();
    }

    pub(crate) fn is_fifo(&self) -> bool {
        self.url.ends_with(".fifo")
    }

    /// Sends bodies `1..=count`; to a FIFO queue in this group.
    pub(crate) async fn fill(&self, group: &str, count: u32) {
        for n in 1..=count {
            self.send(&n.to_string(), &Headers::new(), Some(group)).await;
        }
    }

    /// To a FIFO queue a message without a group goes into one of its own.
    pub(crate) async fn send(&self, body: &str, headers: &Headers, group: Option<&str>) {
        let mut send = self.client.send_message().queue_url(&self.url).message_body(body);
        for (name, value) in headers.iter() {
            send = send.message_attributes(name, attribute(value.unwrap()));
        }
        if self.is_fifo() {
            send = send
                .message_group_id(group.map_or_else(|| unique("test"), str::to_owned))
                .message_deduplication_id(unique("test"));
        }
        send.send().await.unwrap();
    }

    async fn attributes(&self) -> HashMap<QueueAttributeName, String> {
        let answer = self
            .client
            .get_queue_attributes()
            .queue_url(&self.url)
            .attribute_names(QueueAttributeName::All)
            .send()
            .await
            .unwrap();
        answer.attributes.unwrap()
    }

    pub(crate) async fn depth(&self) -> Depth {
        let attributes = self.attributes().await;
        let number = |name: QueueAttributeName| attributes[&name].parse().unwrap();
        Depth {
            waiting: number(QueueAttributeName::ApproximateNumberOfMessages),
            unacked: number(QueueAttributeName::ApproximateNumberOfMessagesNotVisible),
        }
    }

    pub(crate) async fn becomes(&self, waiting: u64, unacked: u64) {
        let until = Instant::now() + SOON;
        loop {
            let depth = self.depth().await;
            if depth == (Depth { waiting, unacked }) {
                return;
            }
            assert!(
                Instant::now() < until,
                "{depth:?}, and not {waiting} waiting and {unacked} unacked"
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) fn source(&self) -> SqsBuilder {
        self.source_at(&self.endpoint)
    }

    /// The same queue, called at another address.
    pub(crate) fn source_at(&self, endpoint: &str) -> SqsBuilder {
        Sqs::queue(client(endpoint), &self.url)
            .visibility_timeout(VISIBILITY)
            .wait_time(Duration::from_secs(1))
    }

    /// Started, with room for `window` deliveries.
    pub(crate) async fn started(&self, window: usize) -> Sqs {
        started(self.source(), window).await
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let deleting = self.client.delete_queue().queue_url(&self.url).send();
        // It may be gone already.
        let deleting = async { drop(deleting.await) };
        tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(deleting));
    }
}

fn attribute(value: &[u8]) -> MessageAttributeValue {
    let value = match std::str::from_utf8(value) {
        Ok(text) => MessageAttributeValue::builder()
            .data_type("String")
            .string_value(text),
        Err(_) => MessageAttributeValue::builder()
            .data_type("Binary")
            .binary_value(Blob::new(value)),
    };
    value.build().unwrap()
}

pub(crate) async fn started(builder: SqsBuilder, window: usize) -> Sqs {
    let mut source = builder.build().unwrap();
    soon(source.start(&Plan::for_window("tests", window)))
        .await
        .unwrap();
    source
}
