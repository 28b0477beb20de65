//! One life of a client, from joining the group until it leaves, however that happens.
//!
//! A session is a thread that owns the consumer and is the only one to speak to it: it polls, stores
//! offsets, pauses and resumes. The source speaks to it by [`Order`]s and hears of it by [`News`], and
//! neither ever waits for the other, except where a partition is about to move on: then this thread
//! waits, inside of the rebalance, for what runs here.
//!
//! When the thread ends, whatever it delivered and did not store comes again.

mod desk;
mod flow;
mod keeper;
mod partitions;
mod poller;
mod watch;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Instant;

use onlyonce::source::{Plan, SourceError};
use rdkafka::config::FromClientConfigAndContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use tokio::sync::{mpsc as tokio_mpsc, oneshot};

use self::desk::Desk;
use self::keeper::Keeper;
use self::poller::Poller;
use crate::buffer::Record;
use crate::config::Settings;
use crate::explain;
use crate::settle::{Generation, Ticket};
use crate::status::Status;

/// What the source wants of its session. Orders are carried out in the order in which they are given.
#[derive(Debug)]
pub(crate) enum Order {
    /// These are done.
    Done(Vec<Ticket>),
    /// Of this assignment, which is about to end, nothing runs any more.
    Drained(Generation),
    /// Fetch, or stay a member and fetch nothing.
    Flow(bool),
    /// Everything is settled: commit, leave the group and end.
    Finish,
}

/// What a session tells its source.
#[derive(Debug)]
pub(crate) enum News {
    /// These have come.
    Records(Vec<(Ticket, Record)>),
    /// These assignments are over, or will be as soon as what runs of them is done.
    Revoked(Vec<Generation>),
    /// The session is over; without an error because it was told to finish.
    Ended(Result<(), SourceError>),
}

/// How much waits in the source's buffer. The session adds, the source takes away.
#[derive(Debug, Default)]
pub(crate) struct Level {
    records: AtomicUsize,
    bytes: AtomicUsize,
}

impl Level {
    pub(crate) fn add(&self, records: usize, bytes: usize) {
        self.records.fetch_add(records, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn take(&self, records: usize, bytes: usize) {
        self.records.fetch_sub(records, Ordering::Relaxed);
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn reaches(&self, records: usize, bytes: usize) -> bool {
        self.records.load(Ordering::Relaxed) >= records || self.bytes.load(Ordering::Relaxed) >= bytes
    }
}

/// The source's end of a session. Dropping it makes the session leave the group at once.
#[derive(Debug)]
pub(crate) struct Session {
    orders: mpsc::Sender<Order>,
    pub(crate) news: tokio_mpsc::UnboundedReceiver<News>,
    pub(crate) level: Arc<Level>,
    pub(crate) since: Instant,
}

impl Session {
    /// Makes a client and subscribes. What the group decides comes later, as does every failure of it.
    pub(crate) async fn open(
        settings: Arc<Settings>,
        status: Arc<Status>,
        plan: Plan,
        flows: bool,
    ) -> Result<Self, SourceError> {
        let (orders, ordered) = mpsc::channel();
        let (tell, news) = tokio_mpsc::unbounded_channel();
        let (opened, opens) = oneshot::channel();
        let level = Arc::new(Level::default());
        let keeper = Keeper {
            desk: Mutex::new(Desk::new(ordered, flows)),
            settings,
            status,
            news: tell.clone(),
            words: Mutex::default(),
            fetched: Mutex::default(),
        };
        let of_thread = level.clone();
        thread::Builder::new()
            .name("onlyonce-kafka".to_owned())
            .spawn(move || {
                let ended = match subscribe(keeper, &plan) {
                    Ok(consumer) => {
                        if opened.send(Ok(())).is_err() {
                            return;
                        }
                        let mut poller = Poller::new(consumer, of_thread, &plan);
                        let ended = poller.run();
                        // Closing takes part in the group once more; only then is it over.
                        drop(poller);
                        ended
                    }
                    Err(error) => {
                        let _ = opened.send(Err(error));
                        return;
                    }
                };
                let _ = tell.send(News::Ended(ended));
            })
            .map_err(|e| SourceError::broken(format_args!("no thread for the Kafka client: {e}")))?;
        opens
            .await
            .unwrap_or_else(|_| Err(SourceError::broken("the Kafka client's thread died")))?;
        Ok(Self {
            orders,
            news,
            level,
            since: Instant::now(),
        })
    }

    /// An order to a session that has ended goes nowhere; its end is among the news.
    pub(crate) fn order(&self, order: Order) {
        let _ = self.orders.send(order);
    }
}

fn subscribe(keeper: Keeper, plan: &Plan) -> Result<BaseConsumer<Keeper>, SourceError> {
    keeper.status.joining();
    let settings = keeper.settings.clone();
    let consumer = BaseConsumer::from_config_and_context(&settings.consumer(plan), keeper)
        .map_err(|e| explain::creation(&settings, &e))?;
    let topics: Vec<&str> = settings.topics.iter().map(String::as_str).collect();
    consumer
        .subscribe(&topics)
        .map_err(|e| SourceError::fatal(format_args!("cannot subscribe to {topics:?}: {e}")))?;
    Ok(consumer)
}
