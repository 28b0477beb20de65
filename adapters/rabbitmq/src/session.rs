//! One life of a channel, from `basic.consume` until it ends, however it ends.
//!
//! A session is a task that owns the connection. It hands on what arrives, writes what was settled,
//! waits for what is to be given back later, and watches the link. The source speaks to it by
//! [`Order`]s and never waits inside of it, so that nothing is lost when a caller drops a future.
//! When the task ends, every tag it gave out is void.

use std::collections::{BTreeSet, HashMap};
use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, Consumer};
use onlyonce::source::{Settle, SourceError};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};
use tokio_util::task::AbortOnDropHandle;

use crate::config::Settings;
use crate::connect::{Link, explain, look, within};
use crate::identity::{Arrival, fingerprint};
use crate::repeats::Repeats;
use crate::settle::{Command, Ledger};
use crate::status::Status;

/// How long a finished message behind an unfinished one waits for the ack that would cover it.
const LINGER: Duration = Duration::from_millis(25);
/// The longest that a message is kept here before it is given back: half of the time after which
/// RabbitMQ, by default, closes a channel for not acknowledging.
const LONGEST_HOLD: Duration = Duration::from_secs(15 * 60);
const LIVENESS: Duration = Duration::from_secs(1);
const BACKLOG_EVERY: Duration = Duration::from_secs(10);
/// A quorum queue's client, inside of the broker, has up to 32 commands replicated at a time. What is
/// settled beyond those it keeps until they are, and loses if the channel closes first. Nothing in
/// AMQP waits for it, so a channel that wrote more than this at once is not closed before that long.
const BURST: usize = 16;
const REPLICATION: Duration = Duration::from_millis(250);
/// Deliveries of a stream carry this header; it names what the refusal at `basic.consume` did not.
const STREAM_OFFSET: &str = "x-stream-offset";

/// What the source wants of its session. Orders are carried out in the order in which they are given.
#[derive(Debug)]
pub(crate) enum Order {
    /// Verdicts on tags that were handed out.
    Settle(Vec<(u64, Settle)>),
    /// These were never handed out; they go back at once.
    GiveBack(Vec<u64>),
    /// Take no more: cancel the consumer and give back what the broker had sent until it knew. The
    /// answer comes when no more will arrive.
    Cancel(oneshot::Sender<()>),
    /// Take messages again.
    Consume,
    /// Everything is settled: tell the broker, make sure that it heard, and close.
    Finish,
}

/// The source's end of a session. Dropping it cuts the connection.
#[derive(Debug)]
pub(crate) struct Session {
    orders: mpsc::UnboundedSender<Order>,
    pub(crate) arrivals: mpsc::UnboundedReceiver<Arrival>,
    /// How it ended: in order, or why not.
    pub(crate) ended: AbortOnDropHandle<Result<(), SourceError>>,
    pub(crate) since: Instant,
}

impl Session {
    /// Connects and consumes; returns when the broker has agreed to both.
    pub(crate) async fn open(
        settings: Arc<Settings>,
        status: Arc<Status>,
        consumer: String,
        window: usize,
    ) -> Result<Self, SourceError> {
        let link = Link::open(&settings, &format!("onlyonce {consumer}")).await?;
        let (orders, received_orders) = mpsc::unbounded_channel();
        let (arrived, arrivals) = mpsc::unbounded_channel();
        let mut run = Run {
            prefetch: settings.prefetch(window),
            backlog: None,
            settings,
            status,
            name: consumer,
            link,
            consumer: None,
            consumers: 0,
            arrived,
            ledger: Ledger::default(),
            writes: FuturesUnordered::new(),
            scattered_until: None,
            held: BTreeSet::new(),
            repeats: Repeats::default(),
            fingerprints: HashMap::new(),
            acks_lost: 0,
            last_burst: None,
        };
        run.consume().await?;
        run.status.up(Some(run.link.waiting.into()));
        run.watch_backlog();
        let ended = AbortOnDropHandle::new(tokio::spawn(run.run(received_orders)));
        Ok(Self {
            orders,
            arrivals,
            ended,
            since: Instant::now(),
        })
    }

    /// Gives an order. To a session that has ended it means nothing: its tags are void, and what
    /// they stand for comes again.
    pub(crate) fn order(&self, order: Order) {
        let _ = self.orders.send(order);
    }
}

type Write = Pin<Box<dyn Future<Output = lapin::Result<()>> + Send>>;

struct Run {
    settings: Arc<Settings>,
    status: Arc<Status>,
    name: String,
    prefetch: u16,
    backlog: Option<AbortOnDropHandle<()>>,
    /// `None` while paused or stopping.
    consumer: Option<Consumer>,
    consumers: u32,
    arrived: mpsc::UnboundedSender<Arrival>,
    ledger: Ledger,
    /// Frames that lapin has, but not yet the socket. While there are any, verdicts gather in the
    /// ledger, so that a busy channel settles many by one frame and an idle one settles at once.
    writes: FuturesUnordered<Write>,
    /// When finished messages behind an unfinished one are acked on their own.
    scattered_until: Option<Instant>,
    /// What is to be given back, and when.
    held: BTreeSet<(Instant, u64)>,
    repeats: Repeats,
    /// Of the redelivered ones that are open.
    fingerprints: HashMap<u64, u64>,
    acks_lost: u64,
    /// When more than [`BURST`] frames were last written at once.
    last_burst: Option<Instant>,
    link: Link,
}

impl Run {
    async fn run(mut self, mut orders: mpsc::UnboundedReceiver<Order>) -> Result<(), SourceError> {
        let ended = self.until_the_end(&mut orders).await;
        // Whoever settles from now on finds nobody; what was settled before counts as lost, too.
        orders.close();
        while let Ok(order) = orders.try_recv() {
            if let Order::Settle(verdicts) = order {
                self.acks_lost += verdicts
                    .iter()
                    .filter(|(_, verdict)| *verdict == Settle::Ack)
                    .count() as u64;
            }
        }
        self.acks_lost += self.ledger.untold() as u64;
        if self.acks_lost > 0 {
            // Harmless: those messages come again, and their claims say that they were done.
            tracing::debug!(queue = %self.settings.queue, acks_lost = self.acks_lost, "settlements never reached the broker");
        }
        self.status.down(match &ended {
            Ok(()) => "stopped".to_owned(),
            Err(e) => e.to_string(),
        });
        ended
    }

    /// Runs until a `Finish` was carried out, the source is gone, or the link is.
    async fn until_the_end(
        &mut self,
        orders: &mut mpsc::UnboundedReceiver<Order>,
    ) -> Result<(), SourceError> {
        let mut liveness = interval(LIVENESS);
        liveness.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let wake_at = self.wake_at();
            tokio::select! {
                biased;
                order = orders.recv() => {
                    let mut next = order;
                    loop {
                        match next {
                            Some(Order::Finish) => return self.finish().await,
                            Some(order) => self.carry_out(order).await?,
                            None => return Ok(()),
                        }
                        // All orders that wait are one batch of frames.
                        match orders.try_recv() {
                            Ok(order) => next = Some(order),
                            Err(_) => break,
                        }
                    }
                    self.flush();
                }
                Some(written) = self.writes.next(), if !self.writes.is_empty() => {
                    self.count(written);
                    self.flush();
                }
                () = sleep_until_some(wake_at) => {
                    self.give_back_due(Instant::now());
                    self.flush();
                }
                _ = liveness.tick() => {
                    // The stream ought to have said so. It is not trusted alone.
                    if !self.link.is_up() {
                        return Err(self.broken("the channel is closed"));
                    }
                }
                item = next_delivery(&mut self.consumer) => match item {
                    Some(Ok(delivery)) => self.arrive(delivery)?,
                    Some(Err(e)) => return Err(explain(&self.settings, "consume", &e)),
                    // The queue was deleted, or its node is gone. Opening anew finds out which.
                    None => return Err(self.broken("the broker cancelled the consumer")),
                },
            }
        }
    }

    fn arrive(&mut self, delivery: Delivery) -> Result<(), SourceError> {
        let headers = delivery.properties.headers();
        if headers
            .as_ref()
            .is_some_and(|headers| headers.contains_key(STREAM_OFFSET))
        {
            return Err(SourceError::fatal(format_args!(
                "{:?} is a stream, which keeps what was acked and cannot take back what was not (use a quorum or classic queue)",
                self.settings.queue
            )));
        }
        self.ledger.delivered(delivery.delivery_tag);
        if delivery.redelivered {
            self.fingerprints
                .insert(delivery.delivery_tag, fingerprint(&delivery));
        }
        // It fails if the source is gone, and then so is this session at the next order.
        let _ = self.arrived.send(Arrival::new(
            delivery,
            &self.settings.queue,
            &self.settings.ordering_key,
        ));
        Ok(())
    }

    async fn carry_out(&mut self, order: Order) -> Result<(), SourceError> {
        match order {
            Order::Settle(verdicts) => {
                for (tag, verdict) in verdicts {
                    match verdict {
                        Settle::Ack => self.ack(tag),
                        Settle::Release { after } => self.release(tag, after.unwrap_or_default()),
                    }
                }
            }
            Order::GiveBack(tags) => {
                for tag in tags {
                    self.fingerprints.remove(&tag);
                    self.ledger.give_back(tag);
                }
            }
            Order::Cancel(done) => {
                self.cancel().await?;
                // Nobody listens if the caller gave up waiting; the consumer is cancelled all the same.
                let _ = done.send(());
            }
            Order::Consume if self.consumer.is_none() => {
                self.consume().await?;
                self.status.up(None);
            }
            Order::Consume | Order::Finish => {}
        }
        Ok(())
    }

    fn ack(&mut self, tag: u64) {
        if let Some(fingerprint) = self.fingerprints.remove(&tag) {
            self.repeats.forget(fingerprint);
        }
        self.ledger.finish(tag);
    }

    fn release(&mut self, tag: u64, after: Duration) {
        let now = Instant::now();
        let mut wait = after.min(LONGEST_HOLD);
        if let Some(fingerprint) = self.fingerprints.remove(&tag)
            && after.is_zero()
        {
            wait = self
                .repeats
                .delay(fingerprint, now.into_std())
                .unwrap_or_default();
        }
        if wait.is_zero() {
            self.ledger.give_back(tag);
        } else {
            self.held.insert((now + wait, tag));
        }
    }

    fn give_back_due(&mut self, now: Instant) {
        while let Some(&(due, tag)) = self.held.first()
            && due <= now
        {
            self.held.pop_first();
            self.ledger.give_back(tag);
        }
    }

    fn wake_at(&self) -> Option<Instant> {
        let due = self.held.first().map(|&(due, _)| due);
        // While frames are on their way nothing is flushed, so there is nothing to wake up for.
        match (due, self.scattered_until.filter(|_| self.writes.is_empty())) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// Writes what the ledger has to say, unless frames are still on their way: they flush when they are written.
    fn flush(&mut self) {
        if !self.writes.is_empty() {
            return;
        }
        let now = Instant::now();
        let waited = self.scattered_until.is_some_and(|at| at <= now);
        // Finished, but behind an unfinished one, they still use up the prefetch.
        let crowded = self.ledger.untold() > usize::from(self.prefetch / 2);
        let commands = if waited || crowded {
            self.ledger.flush_all()
        } else {
            self.ledger.flush()
        };
        self.scattered_until = match self.ledger.untold() {
            0 => None,
            _ => self.scattered_until.filter(|&at| at > now).or(Some(now + LINGER)),
        };
        self.write(commands);
    }

    /// Hands the frames to lapin in this order. Each is polled once here, which queues it.
    fn write(&mut self, commands: Vec<Command>) {
        if commands.len() > BURST {
            self.last_burst = Some(Instant::now());
        }
        for command in commands {
            let mut write = write(self.link.channel.clone(), command);
            let mut context = Context::from_waker(Waker::noop());
            match write.as_mut().poll(&mut context) {
                Poll::Ready(written) => self.count(written),
                Poll::Pending => self.writes.push(write),
            }
        }
    }

    fn count(&mut self, written: lapin::Result<()>) {
        if let Err(error) = written {
            self.acks_lost += 1;
            tracing::debug!(queue = %self.settings.queue, %error, "a settlement was not written");
        }
    }

    async fn consume(&mut self) -> Result<(), SourceError> {
        self.consumers += 1;
        let channel = &self.link.channel;
        let tag = format!("{}.{}", self.name, self.consumers);
        let mut arguments = FieldTable::default();
        // Also where it is the default: streams, which AMQP does not name, refuse this argument by name.
        arguments.insert(
            "x-priority".into(),
            AMQPValue::LongInt(self.settings.consumer_priority),
        );
        let consuming = async {
            // Per consumer and before it exists: it is all that bounds lapin's buffer.
            channel
                .basic_qos(self.prefetch, BasicQosOptions { global: false })
                .await?;
            let queue = self.settings.queue.as_str().into();
            channel
                .basic_consume(
                    queue,
                    tag.as_str().into(),
                    BasicConsumeOptions::default(),
                    arguments,
                )
                .await
        };
        let consumer = within(&self.settings.access, "did not answer", consuming)
            .await?
            .map_err(|e| explain(&self.settings, "consume", &e))?;
        self.consumer = Some(consumer);
        Ok(())
    }

    async fn cancel(&mut self) -> Result<(), SourceError> {
        let Some(mut consumer) = self.consumer.take() else {
            return Ok(());
        };
        let settings = self.settings.clone();
        let cancelling = async {
            self.link
                .channel
                .basic_cancel(consumer.tag(), BasicCancelOptions::default())
                .await?;
            // What the broker sent before it knew; the stream ends behind it.
            while let Some(delivery) = consumer.next().await {
                let tag = delivery?.delivery_tag;
                self.ledger.delivered(tag);
                self.ledger.give_back(tag);
            }
            Ok(())
        };
        within(&settings.access, "did not answer", cancelling)
            .await?
            .map_err(|e| explain(&settings, "cancel", &e))?;
        self.flush();
        Ok(())
    }

    async fn finish(&mut self) -> Result<(), SourceError> {
        self.cancel().await?;
        for (_, tag) in std::mem::take(&mut self.held) {
            self.ledger.give_back(tag);
        }
        let settings = self.settings.clone();
        let finishing = async {
            self.written().await;
            let commands = self.ledger.flush_all();
            self.write(commands);
            self.written().await;
            if let Some(burst) = self.last_burst {
                sleep_until(burst + REPLICATION).await;
            }
            let channel = &self.link.channel;
            // An ack has no answer. The broker reads one frame after the other, so the answer to
            // this one says that it has read them all.
            channel
                .basic_qos(self.prefetch, BasicQosOptions { global: false })
                .await?;
            channel.close(200, "OK".into()).await?;
            self.link.connection.close(200, "OK".into()).await
        };
        within(&settings.access, "did not answer", finishing)
            .await?
            .map_err(|e| explain(&settings, "close", &e))
    }

    /// Waits until lapin has written all that it was given.
    async fn written(&mut self) {
        while let Some(written) = self.writes.next().await {
            self.count(written);
        }
    }

    /// Keeps the number of waiting messages fresh, on a channel of its own: if the queue is gone the
    /// broker closes the channel that asks, and this must not be the one that holds our deliveries.
    fn watch_backlog(&mut self) {
        let (settings, status) = (self.settings.clone(), self.status.clone());
        let channel = self.link.watching.clone();
        self.backlog = Some(AbortOnDropHandle::new(tokio::spawn(async move {
            loop {
                tokio::time::sleep(BACKLOG_EVERY).await;
                match look(&settings, &channel).await {
                    Ok(waiting) => status.backlog(Some(waiting.into())),
                    Err(_) => return status.backlog(None),
                }
            }
        })));
    }

    fn broken(&self, what: &str) -> SourceError {
        let (queue, host) = (&self.settings.queue, self.settings.access.broker.host());
        SourceError::broken(format_args!(
            "lost the queue {queue:?} on RabbitMQ at {host}: {what}"
        ))
    }
}

fn write(channel: Channel, command: Command) -> Write {
    Box::pin(async move {
        match command {
            Command::Ack { tag, multiple } => channel.basic_ack(tag, BasicAckOptions { multiple }).await,
            Command::Nack { tag, multiple } => {
                channel
                    .basic_nack(
                        tag,
                        BasicNackOptions {
                            multiple,
                            requeue: true,
                        },
                    )
                    .await
            }
        }
    })
}

async fn next_delivery(consumer: &mut Option<Consumer>) -> Option<lapin::Result<Delivery>> {
    match consumer {
        Some(consumer) => consumer.next().await,
        None => pending().await,
    }
}

async fn sleep_until_some(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => pending().await,
    }
}
