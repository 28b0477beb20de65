//! The suite that every source passes, on standard and on FIFO queues.

use std::time::{Duration, Instant};

use onlyonce::async_trait;
use onlyonce::event::RawEvent;
use onlyonce::source::Capabilities;
use onlyonce_conformance::{Depth, HarnessCapabilities, Result, SourceHarness, Sqlite, StoreHarness};
use onlyonce_sqs::Sqs;

use super::harness::{Queue, SOON, VISIBILITY};
use super::proxy::Proxy;

mod standard {
    onlyonce_conformance::source_suite!(super::Standard);
}

mod fifo {
    onlyonce_conformance::source_suite!(super::Fifo);
}

/// A queue behind a proxy that can be cut.
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

    fn source(&self) -> Sqs {
        self.queue.source_at(&self.proxy.url).build().unwrap()
    }

    async fn publish(&self, events: Vec<RawEvent>) {
        for event in events {
            let mut headers = event.headers;
            if let Some(kind) = event.event_type {
                headers.push("onlyonce-event-type", kind);
            }
            let key = event.key.map(|key| String::from_utf8(key.to_vec()).unwrap());
            if let (Some(key), false) = (&key, self.queue.is_fifo()) {
                headers.push("onlyonce-ordering-key", key.clone());
            }
            let body = String::from_utf8(event.payload.unwrap().to_vec()).unwrap();
            self.queue.send(&body, &headers, key.as_deref()).await;
        }
    }

    /// Returns when SQS has taken back what was in hand, which nobody can renew.
    async fn cut(&self) {
        self.proxy.cut();
        let until = Instant::now() + SOON;
        while self.queue.depth().await.unacked > 0 {
            assert!(Instant::now() < until, "the visibility does not end");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        self.proxy.mend();
    }
}

fn expected(ordered: bool) -> Capabilities {
    let mut expected = Capabilities::of("aws_sqs");
    expected.per_call = 10;
    expected.ordered = ordered;
    expected.marks_redelivery = true;
    expected.counts_deliveries = true;
    expected.delays_release = true;
    expected.weak_ids = Some(
        "an SQS MessageId is new whenever a producer sends again and whenever a message is moved out of a dead-letter queue",
    );
    expected
}

fn sqs() -> HarnessCapabilities {
    let mut can = HarnessCapabilities::default();
    can.cuts = true;
    can.delay = Duration::from_secs(1);
    can.redelivered_after = VISIBILITY + Duration::from_secs(1);
    // A body is text, never empty and never null. Attributes are a map, and none is empty.
    can.binary_payload = false;
    can.empty_payload = false;
    can.null_payload = false;
    can.repeated_headers = false;
    can.null_headers = false;
    can.empty_headers = false;
    can.ordered_headers = false;
    can
}

macro_rules! harness {
    ($name:ident, $queue:expr, $ordered:expr) => {
        #[async_trait]
        impl SourceHarness for $name {
            type Source = Sqs;
            type Stage = Sqlite;

            async fn empty() -> Result<Option<Self>> {
                Ok(Behind::of($queue.await).await.map(Self))
            }

            fn expected(&self) -> Capabilities {
                expected($ordered)
            }

            fn capabilities(&self) -> HarnessCapabilities {
                let mut can = sqs();
                // A MessageGroupId is ASCII.
                can.keys = !$ordered;
                can.withholds_keys = $ordered;
                can
            }

            fn source(&self) -> Sqs {
                self.0.source()
            }

            async fn publish(&self, events: Vec<RawEvent>) -> Result {
                self.0.publish(events).await;
                Ok(())
            }

            async fn depth(&self) -> Result<Option<Depth>> {
                Ok(Some(self.0.queue.depth().await))
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

harness!(Standard, Queue::standard(), false);
harness!(Fifo, Queue::fifo(), true);
