//! The suite that every publisher passes, to standard and to FIFO queues, by URL and by name.

use std::time::Duration;

use onlyonce::async_trait;
use onlyonce::publisher::Message;
use onlyonce_conformance::{PublisherCapabilities, PublisherHarness, Result};
use onlyonce_sqs::{Connection, Sqs, SqsPublisher};

use super::harness::{Queue, unique, variable};
use super::proxy::Proxy;

mod standard {
    onlyonce_conformance::publisher_suite!(super::Standard);
}

mod fifo {
    onlyonce_conformance::publisher_suite!(super::Fifo);
}

const SECRET: &str = "s3cr3t-m4rk3r";

/// A queue, and the publisher behind a proxy that can be cut.
struct Behind {
    queue: Queue,
    proxy: Proxy,
}

struct Standard(Behind);
struct Fifo(Behind);

impl Behind {
    async fn of(queue: Option<Queue>) -> Option<Self> {
        let queue = queue?;
        let proxy = Proxy::before(&queue.endpoint).await;
        Some(Self { queue, proxy })
    }

    fn publisher(&self) -> SqsPublisher {
        let client = Connection::new("us-east-1", "test", SECRET)
            .session_token(SECRET)
            .endpoint(&self.proxy.url)
            .client()
            .unwrap();
        SqsPublisher::to(client)
            .patience(Duration::from_secs(4))
            .call_timeout(Duration::from_secs(2))
            .build()
            .unwrap()
    }

    fn invalid(&self, address: &str) -> Vec<Message> {
        let to = |address: &str, body: Vec<u8>| {
            let mut message = Message::new(address, "conformance", "invalid", body);
            message.key = Some("k".into());
            message
        };
        let mut keyless = to("orders.fifo", b"x".to_vec());
        keyless.key = None;
        // Larger than SQS takes; it goes alone.
        let large = to(address, vec![b'x'; (1 << 20) + 1]);
        vec![
            to("no/queue", b"x".to_vec()),
            to("", b"x".to_vec()),
            keyless,
            large,
        ]
    }
}

macro_rules! harness {
    ($name:ident, $queue:expr, $address:expr, $suffix:expr) => {
        #[async_trait]
        impl PublisherHarness for $name {
            type Publisher = SqsPublisher;
            type Source = Sqs;

            async fn empty() -> Result<Option<Self>> {
                Ok(Behind::of($queue.await).await.map(Self))
            }

            fn system(&self) -> &'static str {
                "aws_sqs"
            }

            fn capabilities(&self) -> PublisherCapabilities {
                let mut can = PublisherCapabilities::default();
                can.outages = true;
                if variable("ONLYONCE_SQS_EMULATOR").as_deref() == Some("moto") {
                    // It does one call after the other.
                    can.at_once = 50;
                }
                can
            }

            fn publisher(&self) -> SqsPublisher {
                self.0.publisher()
            }

            fn source(&self) -> Sqs {
                // It is not cut off, and a busy machine needs its time.
                let source = self
                    .0
                    .queue
                    .source()
                    .visibility_timeout(Duration::from_secs(30));
                source.build().unwrap()
            }

            fn address(&self) -> String {
                ($address)(&self.0.queue.url)
            }

            fn missing(&self) -> String {
                unique("no-queue") + $suffix
            }

            fn invalid(&self) -> Vec<Message> {
                self.0.invalid(&self.address())
            }

            async fn cut(&self) -> Result {
                self.0.proxy.cut();
                Ok(())
            }

            async fn freeze(&self) -> Result {
                self.0.proxy.freeze();
                Ok(())
            }

            async fn mend(&self) -> Result {
                self.0.proxy.mend();
                Ok(())
            }

            fn secrets(&self) -> Vec<String> {
                vec![SECRET.to_owned()]
            }
        }
    };
}

harness!(Standard, Queue::standard(), |url: &str| url.to_owned(), "");
harness!(
    Fifo,
    Queue::fifo(),
    |url: &str| url.rsplit('/').next().unwrap().to_owned(),
    ".fifo"
);
