//! The suite that every source passes, in groups of the eager and of the cooperative protocol.

use std::time::Duration;

use onlyonce::async_trait;
use onlyonce::event::RawEvent;
use onlyonce::source::Capabilities;
use onlyonce_conformance::{HarnessCapabilities, Result, SourceHarness, Sqlite, StoreHarness};
use onlyonce_kafka::Kafka;

use super::harness::Topic;

mod eager {
    onlyonce_conformance::source_suite!(super::Eager);
}

mod cooperative {
    onlyonce_conformance::source_suite!(super::Cooperative);
}

/// One partition, which every rebalance takes away from everybody.
struct Eager(Topic);
/// Several partitions, which stay where they are if they can.
struct Cooperative(Topic);

/// What runs is not waited for longer than this when a partition leaves.
const DRAIN: Duration = Duration::from_millis(300);

fn expected() -> Capabilities {
    let mut expected = Capabilities::of("kafka");
    expected.ordered = true;
    expected.weak_ids = Some(
        "events without an id are identified by topic, partition, offset and timestamp: an event that its producer sends twice counts as two",
    );
    expected
}

fn kafka() -> HarnessCapabilities {
    let mut can = HarnessCapabilities::default();
    can.acks_singly = false;
    // What a dead member had goes to the next one when the group has noticed, and has come together again.
    can.redelivered_after = Duration::from_secs(2);
    can
}

macro_rules! harness {
    ($name:ident, $partitions:expr, $strategy:expr, $cuts:expr) => {
        #[async_trait]
        impl SourceHarness for $name {
            type Source = Kafka;
            type Stage = Sqlite;

            async fn empty() -> Result<Option<Self>> {
                Ok(Topic::of($partitions).await.map(Self))
            }

            fn expected(&self) -> Capabilities {
                expected()
            }

            fn capabilities(&self) -> HarnessCapabilities {
                let mut can = kafka();
                can.cuts = $cuts;
                can
            }

            fn source(&self) -> Kafka {
                self.0
                    .source()
                    .set("partition.assignment.strategy", $strategy)
                    .drain_limit(DRAIN)
                    .build()
                    .unwrap()
            }

            async fn publish(&self, events: Vec<RawEvent>) -> Result {
                self.0.publish(events).await;
                Ok(())
            }

            /// A member that comes and goes: each time the partition leaves its owner, and what it had comes again.
            async fn cut(&self) -> Result {
                self.0.rival($strategy).await.leave().await;
                Ok(())
            }

            async fn stage(&self) -> Result<Sqlite> {
                Ok(<Sqlite as StoreHarness>::empty().await?.unwrap())
            }
        }
    };
}

harness!(Eager, 1, "range", true);
// Where nothing has to move, a member that comes and goes takes nothing away.
harness!(Cooperative, 3, "cooperative-sticky", false);
