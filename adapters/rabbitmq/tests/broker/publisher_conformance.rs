//! The suite that every publisher passes, to classic and to quorum queues.

use std::time::Duration;

use lapin::ExchangeKind;
use onlyonce::async_trait;
use onlyonce::publisher::Message;
use onlyonce_conformance::{PublisherCapabilities, PublisherHarness, Result};
use onlyonce_rabbitmq::{RabbitMq, RabbitMqPublisher};

use super::harness::{Queue, unique};
use super::proxy::Proxy;

mod classic {
    onlyonce_conformance::publisher_suite!(super::Classic);
}

mod quorum {
    onlyonce_conformance::publisher_suite!(super::Quorum);
}

/// A queue behind an exchange, and the publisher behind a proxy that can be cut.
struct Exchange {
    queue: Queue,
    proxy: Proxy,
    bound: String,
    unbound: String,
}

struct Classic(Exchange);
struct Quorum(Exchange);

impl Exchange {
    async fn before(queue: Option<Queue>) -> Option<Self> {
        let queue = queue?;
        let proxy = Proxy::before(&queue.url).await;
        let bound = queue.exchange(ExchangeKind::Topic, Some("paid.#")).await;
        let unbound = queue.exchange(ExchangeKind::Direct, None).await;
        // One that nobody was ever bound to stays.
        Some(Self {
            queue,
            proxy,
            bound,
            unbound,
        })
    }

    fn address(&self) -> String {
        format!("{}/paid.eu", self.bound)
    }

    fn invalid(&self) -> Vec<Message> {
        let message = || Message::new(self.address(), "conformance", "invalid", "x");
        let mut changes: Vec<fn(&mut Message)> = vec![
            |m| m.address.push_str(&"x".repeat(256)),
            |m| m.event_id = "x".repeat(256),
            |m| m.headers.push("x".repeat(256), "x"),
            |m| m.headers.push("CC", "elsewhere"),
            // More than the connection carries in the one frame that it may be in.
            |m| m.headers.push("large", vec![b'x'; 200_000]),
        ];
        changes
            .drain(..)
            .map(|change| {
                let mut message = message();
                change(&mut message);
                message
            })
            .collect()
    }
}

macro_rules! harness {
    ($name:ident, $queue:expr) => {
        #[async_trait]
        impl PublisherHarness for $name {
            type Publisher = RabbitMqPublisher;
            type Source = RabbitMq;

            async fn empty() -> Result<Option<Self>> {
                Ok(Exchange::before($queue.await).await.map(Self))
            }

            fn system(&self) -> &'static str {
                "rabbitmq"
            }

            fn capabilities(&self) -> PublisherCapabilities {
                let mut can = PublisherCapabilities::default();
                can.outages = true;
                // A header table has each name once and says nothing about its order; a body is never null.
                can.repeated_headers = false;
                can.ordered_headers = false;
                can.null_payload = false;
                can
            }

            fn publisher(&self) -> RabbitMqPublisher {
                RabbitMqPublisher::to(&self.0.proxy.url)
                    .patience(Duration::from_secs(5))
                    .connect_timeout(Duration::from_secs(3))
                    .heartbeat(Duration::from_secs(1))
                    .build()
                    .unwrap()
            }

            fn source(&self) -> RabbitMq {
                self.0.queue.source().build().unwrap()
            }

            fn address(&self) -> String {
                self.0.address()
            }

            fn missing(&self) -> String {
                format!("{}/paid.eu", unique("no-exchange"))
            }

            fn unroutable(&self) -> Option<String> {
                Some(format!("{}/paid.eu", self.0.unbound))
            }

            fn invalid(&self) -> Vec<Message> {
                self.0.invalid()
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
                // User and password are one word with these servers: it stands where the password does.
                vec![format!(
                    ":{}@",
                    self.0.queue.url.split(['/', ':', '@']).nth(4).unwrap()
                )]
            }
        }
    };
}

harness!(Classic, Queue::classic());
harness!(Quorum, Queue::quorum());
