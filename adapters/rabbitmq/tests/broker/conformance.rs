//! The suite that every source passes, on classic and on quorum queues.

use std::time::{Duration, Instant};

use lapin::BasicProperties;
use lapin::types::{AMQPValue, ByteArray, FieldTable};
use onlyonce::async_trait;
use onlyonce::event::RawEvent;
use onlyonce::source::Capabilities;
use onlyonce_conformance::{Depth, HarnessCapabilities, Result, SourceHarness, Sqlite, StoreHarness};
use onlyonce_rabbitmq::RabbitMq;

use super::harness::{self, Queue};
use super::proxy::Proxy;

mod classic {
    onlyonce_conformance::source_suite!(super::Classic);
}

mod quorum {
    onlyonce_conformance::source_suite!(super::Quorum);
}

/// A queue behind a proxy that can be cut.
struct Behind {
    queue: Queue,
    proxy: Proxy,
}

struct Classic(Behind);
struct Quorum(Behind);

impl Behind {
    async fn of(queue: Option<Queue>) -> Option<Self> {
        let queue = queue?;
        let proxy = Proxy::before(&queue.url).await;
        Some(Self { queue, proxy })
    }

    fn source(&self) -> RabbitMq {
        RabbitMq::queue(&self.proxy.url, &self.queue.name)
            .build()
            .unwrap()
    }

    async fn publish(&self, events: Vec<RawEvent>) {
        for event in events {
            let mut headers = FieldTable::default();
            for (name, value) in event.headers.iter() {
                let value = match value {
                    Some(value) => AMQPValue::ByteArray(ByteArray::from(value)),
                    None => AMQPValue::Void,
                };
                headers.insert(name.into(), value);
            }
            if let Some(key) = &event.key {
                headers.insert(
                    "onlyonce-ordering-key".into(),
                    AMQPValue::ByteArray(ByteArray::from(&key[..])),
                );
            }
            let mut properties = BasicProperties::default().with_headers(headers);
            if let Some(kind) = &event.event_type {
                properties = properties.with_type(String::from_utf8_lossy(kind).into_owned().into());
            }
            self.queue
                .publish(event.payload.as_deref().unwrap_or_default(), properties)
                .await;
        }
    }

    async fn depth(&self) -> Result<Option<Depth>> {
        let listed = harness::ctl(&[
            "-q",
            "list_queues",
            "name",
            "messages_ready",
            "messages_unacknowledged",
            "--no-table-headers",
        ])
        .await;
        let Some(listed) = listed else { return Ok(None) };
        let row = listed
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>())
            .find(|row| row.first() == Some(&self.queue.name.as_str()));
        Ok(row.map(|row| Depth {
            waiting: row[1].parse().unwrap(),
            unacked: row[2].parse().unwrap(),
        }))
    }

    /// Returns when the broker has noticed: until then it keeps what was delivered.
    async fn cut(&self) {
        self.proxy.cut();
        let until = Instant::now() + harness::SOON;
        while self.queue.consumers().await > 0 {
            assert!(Instant::now() < until, "the broker did not notice the cut");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        self.proxy.mend();
    }
}

fn rabbitmq() -> HarnessCapabilities {
    let mut can = HarnessCapabilities::default();
    can.cuts = true;
    // A header table has each name once and says nothing about its order; a body is never null.
    can.repeated_headers = false;
    can.ordered_headers = false;
    can.null_payload = false;
    can
}

macro_rules! harness {
    ($name:ident, $queue:expr, $counted:expr, $expected:expr) => {
        #[async_trait]
        impl SourceHarness for $name {
            type Source = RabbitMq;
            type Stage = Sqlite;

            async fn empty() -> Result<Option<Self>> {
                Ok(Behind::of($queue.await).await.map(Self))
            }

            fn expected(&self) -> Capabilities {
                $expected
            }

            fn capabilities(&self) -> HarnessCapabilities {
                rabbitmq()
            }

            fn source(&self) -> RabbitMq {
                self.0.source()
            }

            async fn publish(&self, events: Vec<RawEvent>) -> Result {
                self.0.publish(events).await;
                Ok(())
            }

            async fn depth(&self) -> Result<Option<Depth>> {
                if $counted {
                    self.0.depth().await
                } else {
                    Ok(None)
                }
            }

            async fn cut(&self) -> Result {
                self.0.cut().await;
                Ok(())
            }

            async fn stage(&self) -> Result<Sqlite> {
                Ok(<Sqlite as StoreHarness>::empty().await?.unwrap())
            }
        }
    };
}

harness!(Classic, Queue::classic(), true, {
    let mut expected = Capabilities::of("rabbitmq");
    expected.marks_redelivery = true;
    expected
});

// The counters of a quorum queue are told with a delay.
harness!(Quorum, Queue::quorum(), false, {
    let mut expected = Capabilities::of("rabbitmq");
    // Without the management API nobody says that the queue is one that counts.
    expected.marks_redelivery = true;
    expected
});
