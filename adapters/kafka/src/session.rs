//! One life of a client, from joining the group until it leaves, however that happens.
//!
//! A session is a thread that owns the consumer and is the only one to speak to it: it polls, stores
//! offsets, pauses and resumes. The source speaks to it by [`Order`]s and hears of it by [`News`], and
//! neither ever waits for the other, except where a partition is about to move on: then this thread
//! waits, inside of the rebalance, for what runs here.
//!
//! When the thread ends, whatever it delivered and did not store comes again.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use onlyonce::source::{Plan, SourceError};
use rdkafka::client::ClientContext;
use rdkafka::config::{FromClientConfigAndContext, RDKafkaLogLevel};
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer, ConsumerContext, RebalanceProtocol};
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::message::BorrowedMessage;
use rdkafka::types::{RDKafkaErrorCode, RDKafkaRespErr};
use rdkafka::{Message, Offset, Statistics, TopicPartitionList};
use tokio::sync::{mpsc as tokio_mpsc, oneshot};

use crate::buffer::Record;
use crate::check::{self, GLANCE};
use crate::config::Settings;
use crate::explain::{self, Judgement};
use crate::identity::{raw_event, weight};
use crate::position;
use crate::settle::{Generation, Ledger, Partition, Ticket};
use crate::status::Status;

/// How long a poll waits while work is out, whose completions want to be stored.
const BUSY_POLL: Duration = Duration::from_millis(10);
/// How long it waits while nothing is out; a stop is heard this late.
const IDLE_POLL: Duration = Duration::from_millis(50);
/// How long it takes part in the group while everything is paused. Given no time it would take one event
/// from a queue in which a rebalance may stand behind a thousand log lines.
const SERVING: Duration = Duration::from_millis(1);
/// So long a full buffer is only waited for. A pause throws away what the client has fetched ahead.
const FULL_FOR: Duration = Duration::from_millis(200);
/// How long a full buffer is left alone at a time. It holds several windows, so that no lane runs dry, and
/// a thousand completions wake this thread a few times instead of a thousand times.
const FULL_REST: Duration = Duration::from_millis(4);
/// How often offsets are stored; they are committed once a second, and when a partition leaves.
const STORE_EVERY: Duration = Duration::from_millis(20);
/// The most records that are handed on at once.
const BATCH: usize = 256;
/// A buffer of this many windows keeps the lanes busy between two polls.
const WINDOWS: usize = 4;
const LEAST_BUFFER: usize = 500;
/// How often it is asked whether records wait, while none came after a client was rebuilt for that.
const LOOK_AGAIN: Duration = Duration::from_secs(5);
/// How often it is made sure that a topic of which nothing is assigned to us is still there.
const TOPICS_EVERY: Duration = Duration::from_secs(5);

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
    Records(Vec<(Ticket, Box<Record>)>),
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

/// What the polling and the callbacks that happen inside of it share. Nobody else has it, and it is
/// never locked across a poll.
struct Desk {
    ledger: Ledger,
    orders: mpsc::Receiver<Order>,
    /// Assignments that end as soon as nothing of them runs.
    draining: HashSet<Generation>,
    /// The source wants records.
    flows: bool,
    /// Everything is paused: the source wants none, or its buffer is full.
    paused: bool,
    /// Partitions that are paused because too much of them is unfinished.
    capped: HashSet<Partition>,
    finishing: bool,
    /// The source is gone.
    orphaned: bool,
    /// Found inside of a callback; ends the session.
    failure: Option<SourceError>,
}

impl Desk {
    fn new(orders: mpsc::Receiver<Order>, flows: bool) -> Self {
        Self {
            ledger: Ledger::default(),
            orders,
            draining: HashSet::new(),
            flows,
            paused: !flows,
            capped: HashSet::new(),
            finishing: false,
            orphaned: false,
            failure: None,
        }
    }

    fn carry_out(&mut self, order: Order) {
        match order {
            Order::Done(tickets) => {
                for ticket in tickets {
                    // A void one is of an assignment that is over: its record comes again, elsewhere.
                    self.ledger.finish(ticket);
                }
            }
            Order::Drained(generation) => {
                self.draining.remove(&generation);
            }
            Order::Flow(flows) => self.flows = flows,
            Order::Finish => self.finishing = true,
        }
    }

    fn carry_out_all(&mut self) {
        loop {
            match self.orders.try_recv() {
                Ok(order) => self.carry_out(order),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    self.orphaned = true;
                    return;
                }
            }
        }
    }

    /// Waits for an order, and carries out all there are.
    fn wait(&mut self, time: Duration) {
        match self.orders.recv_timeout(time) {
            Ok(order) => {
                self.carry_out(order);
                self.carry_out_all();
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => self.orphaned = true,
        }
    }

    fn is_over(&self) -> bool {
        self.finishing || self.orphaned
    }

    /// Tells librdkafka what may be committed; it does so once a second, and when a partition leaves.
    fn store(&mut self, consumer: &BaseConsumer<Keeper>) {
        let advanced = self.ledger.advanced();
        if advanced.is_empty() {
            return;
        }
        let mut offsets = TopicPartitionList::with_capacity(advanced.len());
        for (partition, done) in &advanced {
            // The next one to read is what Kafka calls the offset of a group.
            if let Err(error) =
                offsets.add_partition_offset(&partition.topic, partition.number, Offset::Offset(done + 1))
            {
                tracing::debug!(topic = %partition.topic, partition = partition.number, %error, "an offset was not stored");
            }
        }
        if let Err(error) = consumer.store_offsets(&offsets) {
            // The partition has left under us: its records come again, to its new owner.
            tracing::debug!(%error, "offsets were not stored");
        }
    }
}

/// What librdkafka calls back, on the polling thread and inside of its polls.
struct Keeper {
    desk: Mutex<Desk>,
    settings: Arc<Settings>,
    status: Arc<Status>,
    news: tokio_mpsc::UnboundedSender<News>,
    /// What was said of the error that the poll at hand returns.
    words: Mutex<String>,
    /// The offset that is fetched next, by topic and partition, as of the last statistics. Marks of
    /// transactions are passed over by it, which are never delivered.
    fetched: Mutex<HashMap<String, HashMap<i32, i64>>>,
}

impl Keeper {
    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn words(&self) -> MutexGuard<'_, String> {
        self.words.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fetched(&self) -> MutexGuard<'_, HashMap<String, HashMap<i32, i64>>> {
        self.fetched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Partitions are ours from now on.
    fn assigned(&self, consumer: &BaseConsumer<Self>, partitions: &mut TopicPartitionList) {
        let mut desk = self.desk();
        let placed = position::place(&self.settings, consumer, partitions);
        for element in partitions.elements() {
            desk.ledger.assign(Partition {
                topic: element.topic().into(),
                number: element.partition(),
            });
        }
        let assigned = match consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => consumer.incremental_assign(partitions),
            _ => consumer.assign(partitions),
        };
        match (placed, assigned) {
            (Ok(begun), Ok(())) => {
                if desk.paused {
                    // A pause is forgotten with the assignment.
                    note(consumer.pause(partitions), "pause");
                }
                if begun.count() > 0 {
                    // Where a new group begins is known from now on, also if it dies before its first event.
                    note(consumer.store_offsets(&begun), "store the first offsets of");
                }
                self.status.assigned();
                tracing::info!(group = %self.settings.group, partitions = %listed(partitions), "partitions assigned");
            }
            // Nothing can come: where there is no offset, `auto.offset.reset` is an error.
            (Err(error), _) => desk.failure = Some(error),
            (_, Err(error)) => {
                desk.failure = Some(SourceError::broken(format_args!(
                    "Kafka's assignment was not taken: {error}"
                )));
            }
        }
    }

    /// Partitions leave. In good order what runs is waited for and committed; what is lost already has
    /// another owner, and nothing may be stored.
    fn revoked(&self, consumer: &BaseConsumer<Self>, partitions: &TopicPartitionList) {
        let mut desk = self.desk();
        let lost = consumer.assignment_lost();
        let leaving: Vec<Partition> = partitions
            .elements()
            .iter()
            .map(|element| Partition {
                topic: element.topic().into(),
                number: element.partition(),
            })
            .collect();
        let generations: Vec<Generation> = leaving
            .iter()
            .filter_map(|partition| desk.ledger.generation(partition))
            .collect();
        desk.carry_out_all();
        // Nobody hears it if the source is gone.
        let _ = self.news.send(News::Revoked(generations.clone()));
        if !lost {
            self.drain(&mut desk, &generations);
            desk.store(consumer);
            commit(consumer);
        }
        for partition in &leaving {
            desk.ledger.revoke(partition);
            desk.capped.remove(partition);
        }
        self.status.stuck(desk.capped.len());
        let unassigned = match consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => consumer.incremental_unassign(partitions),
            _ => consumer.unassign(),
        };
        note(unassigned, "unassign");
        if !leaving.is_empty() && !desk.is_over() {
            let partitions = listed(partitions);
            if lost {
                tracing::warn!(group = %self.settings.group, %partitions, "partitions lost before they could be left in good order; what ran comes again");
            } else {
                tracing::info!(group = %self.settings.group, %partitions, "partitions revoked");
            }
        }
    }

    /// Heartbeats go on meanwhile, on a thread of librdkafka; the group waits for this member.
    fn drain(&self, desk: &mut Desk, generations: &[Generation]) {
        let until = Instant::now() + self.settings.drain_limit;
        desk.draining.extend(generations);
        while !desk.draining.is_empty() && !desk.is_over() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::warn!(
                    group = %self.settings.group, partitions = desk.draining.len(),
                    "partitions leave while events of them still run; those come again elsewhere"
                );
                break;
            }
            desk.wait(left);
        }
        desk.draining.clear();
    }
}

impl ConsumerContext for Keeper {
    fn rebalance(
        &self,
        consumer: &BaseConsumer<Self>,
        error: RDKafkaRespErr,
        partitions: &mut TopicPartitionList,
    ) {
        if error == RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS {
            self.assigned(consumer, partitions);
        } else {
            self.revoked(consumer, partitions);
        }
    }

    fn commit_callback(&self, result: KafkaResult<()>, _offsets: &TopicPartitionList) {
        match result {
            // The stored offsets stay, and go with the next commit: never an old number after a new one.
            Err(error) if !explain::nothing_to_commit(&error) => {
                tracing::debug!(group = %self.settings.group, %error, "a commit failed, the next one covers it");
            }
            _ => {}
        }
    }
}

impl ClientContext for Keeper {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        explain::log(level, facility, message);
    }

    fn stats(&self, statistics: Statistics) {
        let broker_up = statistics.brokers.values().any(|broker| broker.state == "UP");
        let lags = statistics
            .topics
            .values()
            .flat_map(|topic| topic.partitions.values())
            // The group's lag counts what is not committed. Here counts what was not fetched: marks of
            // transactions are never delivered, and would be a lag for ever.
            .filter(|partition| partition.next_offset >= 0 && partition.ls_offset >= 0)
            .map(|partition| {
                (partition.ls_offset - partition.next_offset).max(0) as u64
                    + partition.fetchq_cnt.max(0) as u64
            });
        let backlog = lags.fold(None, |sum: Option<u64>, lag| Some(sum.unwrap_or(0) + lag));
        self.status.observed(broker_up, backlog);
        *self.fetched() = statistics
            .topics
            .into_iter()
            .map(|(name, topic)| {
                let next = topic.partitions.into_iter();
                let known = next.filter(|(_, partition)| partition.next_offset >= 0);
                (name, known.map(|(number, p)| (number, p.next_offset)).collect())
            })
            .collect();
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(group = %self.settings.group, %error, reason, "Kafka client");
        *self.words() = self.settings.without_values(reason);
        if explain::all_away(&error) {
            self.status
                .down(format!("no Kafka broker can be reached: {reason}"));
        }
    }
}

/// The thread itself.
struct Poller {
    consumer: BaseConsumer<Keeper>,
    keeper: Arc<Keeper>,
    level: Arc<Level>,
    buffer_records: usize,
    buffer_bytes: usize,
    /// Since when the buffer has been full.
    full_since: Option<Instant>,
    quiet: Quiet,
    last_topic: Option<Arc<str>>,
    topics_seen: Instant,
    stored: Instant,
}

/// How long nothing has come, and what is known of why.
struct Quiet {
    since: Instant,
    looked: Instant,
    /// When it was looked last, records waited. They may just have been published.
    suspicious: bool,
}

impl Default for Quiet {
    fn default() -> Self {
        let now = Instant::now();
        Self {
            since: now,
            looked: now,
            suspicious: false,
        }
    }
}

/// What one turn of the loop is to do.
enum Turn {
    Poll(Duration),
    /// The buffer is full; leave it alone for a moment.
    Wait,
}

impl Poller {
    fn new(consumer: BaseConsumer<Keeper>, level: Arc<Level>, plan: &Plan) -> Self {
        Self {
            keeper: consumer.context().clone(),
            consumer,
            level,
            buffer_records: plan.window.saturating_mul(WINDOWS).max(LEAST_BUFFER),
            buffer_bytes: plan.window_bytes.max(1),
            full_since: None,
            quiet: Quiet::default(),
            last_topic: None,
            topics_seen: Instant::now(),
            stored: Instant::now(),
        }
    }

    fn run(&mut self) -> Result<(), SourceError> {
        let keeper = self.keeper.clone();
        loop {
            let turn = {
                let mut desk = keeper.desk();
                desk.carry_out_all();
                if self.stored.elapsed() >= STORE_EVERY || desk.is_over() {
                    desk.store(&self.consumer);
                    self.stored = Instant::now();
                }
                if let Some(failure) = desk.failure.take() {
                    return Err(failure);
                }
                if desk.is_over() {
                    // What was stored is committed before anybody is told that this is over.
                    commit(&self.consumer);
                    return Ok(());
                }
                self.balance(&mut desk)
            };
            match turn {
                Turn::Wait => thread::sleep(FULL_REST),
                Turn::Poll(time) => self.poll(time)?,
            }
            self.look_for_stalls()?;
            self.look_for_topics()?;
        }
    }

    /// Pauses and resumes, so that neither the buffer nor what is unfinished of a partition grows without bound.
    fn balance(&mut self, desk: &mut Desk) -> Turn {
        let full = self.level.reaches(self.buffer_records, self.buffer_bytes);
        let room = !self
            .level
            .reaches(self.buffer_records.div_ceil(2), self.buffer_bytes.div_ceil(2));
        if !full {
            self.full_since = None;
        }
        let full_for = full.then(|| self.full_since.get_or_insert_with(Instant::now).elapsed());
        self.uncap(desk);
        if !desk.paused && (!desk.flows || full_for.is_some_and(|time| time >= FULL_FOR)) {
            desk.paused = true;
            let all = every(desk, |_| true);
            note(self.consumer.pause(&all), "pause");
        } else if desk.paused && desk.flows && room {
            desk.paused = false;
            let all = every(desk, |partition| !desk.capped.contains(partition));
            note(self.consumer.resume(&all), "resume");
            self.quiet = Quiet::default();
        }
        match (desk.paused, full) {
            // Paused partitions bring nothing, so this serves the group and waits for orders in between.
            (true, _) => {
                desk.wait(BUSY_POLL);
                Turn::Poll(SERVING)
            }
            (false, true) => Turn::Wait,
            (false, false) if self.busy(desk) => Turn::Poll(BUSY_POLL),
            (false, false) => Turn::Poll(IDLE_POLL),
        }
    }

    fn busy(&self, desk: &Desk) -> bool {
        desk.ledger
            .assigned()
            .any(|(_, generation)| desk.ledger.span(generation).records > 0)
    }

    /// Resumes partitions of which enough is done again.
    fn uncap(&self, desk: &mut Desk) {
        if desk.capped.is_empty() {
            return;
        }
        let settings = &self.keeper.settings;
        let eased: Vec<Partition> = desk
            .capped
            .iter()
            .filter(|partition| {
                let span = desk
                    .ledger
                    .generation(partition)
                    .map(|generation| desk.ledger.span(generation))
                    .unwrap_or_default();
                span.records <= settings.partition_records / 2 && span.bytes <= settings.partition_bytes / 2
            })
            .cloned()
            .collect();
        for partition in &eased {
            desk.capped.remove(partition);
            tracing::info!(topic = %partition.topic, partition = partition.number, "partition resumed");
        }
        self.keeper.status.stuck(desk.capped.len());
        if !desk.paused && !eased.is_empty() {
            note(self.consumer.resume(&list(&eased)), "resume");
        }
    }

    /// Takes what has come, at most a batch, and hands it on.
    fn poll(&mut self, time: Duration) -> Result<(), SourceError> {
        let mut records = Vec::new();
        let (mut bytes, mut time) = (0, time);
        let mut over: HashSet<Generation> = HashSet::new();
        let ended = loop {
            match self.consumer.poll(time) {
                Some(Ok(message)) => {
                    let Some((ticket, record)) = take(&self.keeper, &mut self.last_topic, &message) else {
                        continue;
                    };
                    bytes += record.bytes;
                    records.push((ticket, record));
                    if self.is_over_window(&self.keeper.desk(), ticket.generation) {
                        over.insert(ticket.generation);
                        // One more would be one too many.
                        break Ok(());
                    }
                }
                Some(Err(error)) => match explain::judge(&error, &self.keeper.words()) {
                    Judgement::Passing => tracing::debug!(%error, "Kafka client"),
                    Judgement::Trouble(problem) => self.keeper.status.down(problem),
                    Judgement::OutOfRange => {
                        break Err(position::explain(&self.keeper.settings, &self.consumer));
                    }
                    Judgement::Missing => break Err(self.what_is_missing()),
                    Judgement::Over(error) => break Err(error),
                },
                None => break Ok(()),
            }
            if records.len() >= BATCH || bytes >= self.buffer_bytes {
                break Ok(());
            }
            time = Duration::ZERO;
        };
        if !records.is_empty() {
            self.quiet = Quiet::default();
            self.keeper.status.flows();
            self.level.add(records.len(), bytes);
            // It fails if the source is gone, and then so is this session at its next turn.
            let _ = self.keeper.news.send(News::Records(records));
            self.cap(&over);
        }
        ended
    }

    fn is_over_window(&self, desk: &Desk, generation: Generation) -> bool {
        let (span, settings) = (desk.ledger.span(generation), &self.keeper.settings);
        span.records >= settings.partition_records || span.bytes >= settings.partition_bytes
    }

    /// Pauses partitions of which too much is unfinished.
    fn cap(&self, over: &HashSet<Generation>) {
        let mut desk = self.keeper.desk();
        let over: Vec<Partition> = desk
            .ledger
            .assigned()
            .filter(|(_, generation)| over.contains(generation))
            .map(|(partition, _)| partition.clone())
            .collect();
        if over.is_empty() {
            return;
        }
        for partition in &over {
            tracing::warn!(
                topic = %partition.topic, partition = partition.number,
                "partition paused: an event of it is unfinished, and as much as allowed was delivered behind it"
            );
        }
        note(self.consumer.pause(&list(&over)), "pause");
        desk.capped.extend(over);
        self.keeper.status.stuck(desk.capped.len());
    }

    /// One of a pattern is not missed; a client that is made anew does not ask for it any more.
    fn what_is_missing(&self) -> SourceError {
        let settings = &self.keeper.settings;
        settings
            .named_topics()
            .find_map(|topic| check::is_there(settings, &self.consumer, topic).err())
            .unwrap_or_else(|| SourceError::broken("a topic or partition is not there any more"))
    }

    /// A topic that is deleted leaves its group like a partition that moves elsewhere, and librdkafka says
    /// nothing of it: the consumer would wait for ever.
    fn look_for_topics(&mut self) -> Result<(), SourceError> {
        if self.topics_seen.elapsed() < TOPICS_EVERY {
            return Ok(());
        }
        self.topics_seen = Instant::now();
        let settings = &self.keeper.settings;
        let assigned: HashSet<Arc<str>> = {
            let desk = self.keeper.desk();
            let assigned = desk.ledger.assigned();
            assigned.map(|(partition, _)| partition.topic.clone()).collect()
        };
        for topic in settings.named_topics().filter(|topic| !assigned.contains(*topic)) {
            check::is_there(settings, &self.consumer, topic)?;
        }
        Ok(())
    }

    /// Records wait and none comes, although nothing holds them up: the client is rebuilt, once.
    fn look_for_stalls(&mut self) -> Result<(), SourceError> {
        let (status, limit) = (&self.keeper.status, self.keeper.settings.stall_after);
        let pause = if status.is_rebuilt() {
            LOOK_AGAIN
        } else {
            limit / 2
        };
        if self.quiet.looked.elapsed() < pause {
            return Ok(());
        }
        self.quiet.looked = Instant::now();
        let assigned = {
            let desk = self.keeper.desk();
            if desk.paused || !desk.capped.is_empty() {
                self.quiet = Quiet::default();
                return Ok(());
            }
            every(&desk, |_| true)
        };
        match self.waiting(assigned) {
            // The brokers do not answer; that is told elsewhere.
            None => Ok(()),
            Some(0) => {
                status.flows();
                self.quiet = Quiet::default();
                Ok(())
            }
            Some(waiting) => {
                let suspicious = std::mem::replace(&mut self.quiet.suspicious, true);
                if suspicious && self.quiet.since.elapsed() >= limit {
                    self.stalled(waiting)
                } else {
                    Ok(())
                }
            }
        }
    }

    fn stalled(&self, waiting: u64) -> Result<(), SourceError> {
        let keeper = &self.keeper;
        let problem = format!(
            "nothing was received for {} s although {waiting} records wait",
            self.quiet.since.elapsed().as_secs()
        );
        if keeper.status.stalled(problem.clone()) {
            tracing::warn!(group = %keeper.settings.group, waiting, "no record comes although some wait; rebuilding the Kafka client");
            return Err(SourceError::broken(format_args!(
                "{problem}; the client is rebuilt"
            )));
        }
        Ok(())
    }

    /// How many records of these partitions wait, as the brokers tell. What the client knows by itself
    /// it knows by fetching, which is what may not work.
    fn waiting(&self, mut partitions: TopicPartitionList) -> Option<u64> {
        if partitions.count() == 0 {
            return Some(0);
        }
        partitions.set_all_offsets(Offset::End).ok()?;
        let ends = self.consumer.offsets_for_times(partitions, GLANCE).ok()?;
        let fetched = self.keeper.fetched();
        let mut waiting = Some(0);
        for end in ends.elements() {
            let next = fetched
                .get(end.topic())
                .and_then(|topic| topic.get(&end.partition()));
            match (next, end.offset()) {
                (Some(next), Offset::Offset(end)) if end > *next => {
                    waiting = Some(waiting.unwrap_or(0) + (end - next) as u64);
                }
                (Some(_), Offset::Offset(_)) => {}
                // That nothing waits is said only of what is known of all.
                _ => waiting = waiting.filter(|waiting| *waiting > 0),
            }
        }
        waiting
    }
}

/// The event of a record, unless it is one that was handed on before.
fn take(
    keeper: &Keeper,
    last_topic: &mut Option<Arc<str>>,
    message: &BorrowedMessage<'_>,
) -> Option<(Ticket, Box<Record>)> {
    let topic = match last_topic {
        Some(topic) if **topic == *message.topic() => topic.clone(),
        _ => last_topic.insert(message.topic().into()).clone(),
    };
    let partition = Partition {
        topic,
        number: message.partition(),
    };
    let event = raw_event(message, &keeper.settings.cluster, &keeper.settings.ordering_key);
    let bytes = weight(&event);
    let ticket = keeper
        .desk()
        .ledger
        .delivered(&partition, message.offset(), bytes)?;
    let record = Record {
        event,
        bytes,
        returns: 0,
    };
    Some((ticket, Box::new(record)))
}

/// Commits what is stored of what is ours. Never a number of our own: a broker takes it from anybody,
/// also for a partition that somebody else has by now.
fn commit(consumer: &BaseConsumer<Keeper>) {
    if let Err(error) = consumer.commit_consumer_state(CommitMode::Sync)
        && !explain::nothing_to_commit(&error)
    {
        tracing::warn!(%error, "the last offsets were not committed; what they cover comes again and is found to be done");
    }
}

fn every(desk: &Desk, condition: impl Fn(&Partition) -> bool) -> TopicPartitionList {
    let mut list = TopicPartitionList::new();
    for (partition, _) in desk.ledger.assigned() {
        if condition(partition) {
            list.add_partition(&partition.topic, partition.number);
        }
    }
    list
}

fn list(partitions: &[Partition]) -> TopicPartitionList {
    let mut list = TopicPartitionList::new();
    for partition in partitions {
        list.add_partition(&partition.topic, partition.number);
    }
    list
}

fn listed(partitions: &TopicPartitionList) -> String {
    let names: Vec<String> = partitions
        .elements()
        .iter()
        .map(|element| format!("{}/{}", element.topic(), element.partition()))
        .collect();
    names.join(" ")
}

/// Local calls that fail when a partition has just left; the rebalance that follows puts it right.
fn note(result: KafkaResult<()>, what: &str) {
    if let Err(error) = result
        && !matches!(error, KafkaError::StoreOffset(RDKafkaErrorCode::State))
    {
        tracing::debug!(%error, "could not {what} partitions");
    }
}
