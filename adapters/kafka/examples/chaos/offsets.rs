//! The committed offsets of a run's group, which has the name of its topic: how far they are from the
//! end, and whether one ever goes back.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};

use super::PARTITIONS;

const PATIENCE: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(50);

/// Looks at them all the time.
pub(super) struct Watch {
    over: Arc<AtomicBool>,
    thread: JoinHandle<Seen>,
}

#[derive(Default)]
struct Seen {
    last: BTreeMap<i32, i64>,
    looks: usize,
    went_back: Vec<String>,
}

impl Watch {
    pub(super) fn begin(brokers: &str, name: &str) -> anyhow::Result<Self> {
        let (client, partitions) = (client(brokers, name)?, partitions(name));
        let over = Arc::<AtomicBool>::default();
        let told = over.clone();
        let thread = std::thread::spawn(move || {
            let mut seen = Seen::default();
            while !told.load(Relaxed) {
                // While the broker is away there is no answer; the next look sees more.
                if let Ok(committed) = client.committed_offsets(partitions.clone(), PATIENCE) {
                    seen.look(&committed);
                }
                std::thread::sleep(LOOK);
            }
            seen
        });
        Ok(Self { over, thread })
    }

    /// What it saw that must not be.
    pub(super) fn end(self) -> Vec<String> {
        self.over.store(true, Relaxed);
        match self.thread.join() {
            Ok(Seen { looks: 0, .. }) => vec!["the committed offsets were never seen".to_owned()],
            Ok(seen) => {
                println!(
                    "  committed in the end, of {} looks: {:?}\n",
                    seen.looks, seen.last
                );
                seen.went_back
            }
            Err(_) => vec!["the watch over the committed offsets panicked".to_owned()],
        }
    }
}

impl Seen {
    fn look(&mut self, committed: &TopicPartitionList) {
        self.looks += 1;
        for element in committed.elements() {
            let (partition, offset) = (element.partition(), element.offset().to_raw().unwrap_or(-1));
            if let Some(before) = self.last.insert(partition, offset)
                && offset < before
            {
                self.went_back.push(format!(
                    "partition {partition}: committed {offset} after {before}"
                ));
            }
        }
    }
}

/// How many records are behind the committed offsets.
pub(super) fn lag(brokers: &str, name: &str) -> anyhow::Result<u64> {
    let client = client(brokers, name)?;
    let committed = client.committed_offsets(partitions(name), PATIENCE)?;
    let mut lag = 0;
    for element in committed.elements() {
        let (first, end) = client.fetch_watermarks(name, element.partition(), PATIENCE)?;
        let done = match element.offset() {
            Offset::Offset(done) => done,
            _ => first,
        };
        lag += u64::try_from(end - done)?;
    }
    Ok(lag)
}

fn client(brokers: &str, name: &str) -> anyhow::Result<BaseConsumer> {
    Ok(ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("group.id", name)
        .create()?)
}

fn partitions(name: &str) -> TopicPartitionList {
    let mut partitions = TopicPartitionList::new();
    partitions.add_partition_range(name, 0, PARTITIONS - 1);
    partitions
}
