//! How fast a relay empties the outbox, beside the same events published by hand without a database.

mod latency;

use std::collections::HashMap;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::{self, StreamExt as _};
use onlyonce::outbox::OutgoingEvent;
use onlyonce::publisher::{Message, PublishError, Publisher, PublisherHealth};
use onlyonce::source::Source;
use onlyonce::store::postgres::PostgresOptions;
use onlyonce::store::{Operations, PostgresStore};
use onlyonce::{Outbox, Relay};
use sqlx::PgPool;
use tokio_util::sync::CancellationToken;

use super::report::median;
use super::{BODY, BoxError, Done, cpu_time, environment, event_id};

/// How many keys the events have: so many may be under way at once.
const KEYS: u64 = 10_000;

/// The source of every event.
pub const SOURCE: &str = "bench";

/// The type of every event.
pub const EVENT_TYPE: &str = "benched";

/// When events that are published by hand were written: a text already, which costs that loop nothing.
pub const TIME: &str = "2026-01-02T03:04:05.678901Z";

/// What a benchmark wants of a broker.
#[async_trait]
pub trait Broker: Sync {
    /// The publisher under test.
    type Publisher: Publisher;

    /// Reads what has arrived.
    type Source: Source;

    /// How many messages are under way at once, by hand and by relay.
    const IN_FLIGHT: usize;

    /// A new queue or topic: its address.
    async fn fresh(&self) -> Result<String, BoxError>;

    /// The publisher, made for [`IN_FLIGHT`](Self::IN_FLIGHT) messages.
    fn publisher(&self) -> Result<Self::Publisher, BoxError>;

    /// A source that reads this address from its beginning.
    fn source(&self, address: &str) -> Result<Self::Source, BoxError>;

    /// The loop one would write without a framework: publishes so many events, durably, up to
    /// [`IN_FLIGHT`](Self::IN_FLIGHT) unconfirmed, and counts the confirmed ones. Each has all that the publisher under
    /// test puts on it, and the same settings.
    async fn by_hand(&self, address: &str, events: u64, done: &Done) -> Result<(), BoxError>;

    /// Removes it.
    async fn delete(&self, address: &str) -> Result<(), BoxError>;
}

/// The `n`th event's key.
pub fn key(n: u64) -> String {
    format!("acc-{}", n % KEYS)
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Variant {
    /// The broker's client, by hand.
    ByHand,
    /// The publisher alone: what is between the two is the relay's, and the database's.
    Publisher,
    Relay,
}

impl Variant {
    const ALL: [Self; 3] = [Self::ByHand, Self::Publisher, Self::Relay];

    fn name(self) -> &'static str {
        match self {
            Self::ByHand => "by hand",
            Self::Publisher => "publisher alone",
            Self::Relay => "relay",
        }
    }
}

/// Carries out what the arguments say: `--events N`, `--rounds N`, `--only NAME` (a variant, or `latency`).
pub async fn run<B: Broker>(broker: B) -> Result<(), BoxError> {
    let (mut events, mut rounds, mut only) = (50_000, 3, String::new());
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value"));
        match arg.as_str() {
            "--events" => events = value()?.parse()?,
            "--rounds" => rounds = value()?.parse()?,
            "--only" => only = value()?,
            _ => return Err(format!("{arg} is not an option (--events N, --rounds N, --only NAME)").into()),
        }
    }
    let bench = Bench {
        broker,
        postgres: environment("ONLYONCE_POSTGRES_URL")?,
    };
    if "latency".contains(&only) {
        bench.latency("within one process", false).await?;
        bench.latency("from another process", true).await?;
    }
    bench.compare(events, rounds, &only).await
}

struct Bench<B> {
    broker: B,
    postgres: String,
}

impl<B: Broker> Bench<B> {
    /// Each variant once per round, the order turned round by round; each ratio is the median of the rounds' own.
    async fn compare(&self, events: u64, rounds: usize, only: &str) -> Result<(), BoxError> {
        let mut variants = Variant::ALL;
        let mut rates: HashMap<&str, Vec<f64>> = HashMap::new();
        for round in 1..=rounds {
            for variant in variants
                .into_iter()
                .filter(|variant| variant.name().contains(only))
            {
                let (rate, cpu) = self.measure(variant, events).await?;
                println!(
                    "round {round}  {:<16} {rate:>8.0}/s  {cpu:>5.0} us of this process's CPU an event",
                    variant.name()
                );
                rates.entry(variant.name()).or_default().push(rate);
            }
            variants.rotate_left(1);
        }
        println!();
        for variant in Variant::ALL {
            let Some(own) = rates.get(variant.name()) else {
                continue;
            };
            println!("median   {:<16} {:>8.0}/s", variant.name(), median(own.clone()));
            if let Some(by_hand) = rates.get(Variant::ByHand.name()) {
                let ratios: Vec<f64> = own.iter().zip(by_hand).map(|(one, other)| one / other).collect();
                println!(
                    "ratio    {:<16} {:>8.2} to by hand",
                    variant.name(),
                    median(ratios)
                );
            }
        }
        Ok(())
    }

    /// Events per second, from the first confirm to the last, and for the relay to the last mark; and microseconds
    /// of CPU an event, connecting and the end included.
    async fn measure(&self, variant: Variant, events: u64) -> Result<(f64, f64), BoxError> {
        let address = self.broker.fresh().await?;
        let (done, outbox) = match variant {
            Variant::ByHand | Variant::Publisher => (Done::of(events), None),
            // And the empty table.
            Variant::Relay => (Done::of(events + 1), Some(self.filled(&address, events).await?)),
        };
        let before = cpu_time()?;
        match (variant, outbox) {
            (Variant::ByHand, _) => self.broker.by_hand(&address, events, &done).await?,
            (_, None) => self.publisher_alone(&address, events, &done).await?,
            (_, Some(outbox)) => self.relay(&outbox, events, &done).await?,
        }
        let cpu = (cpu_time()? - before).as_secs_f64() * 1e6 / events as f64;
        self.broker.delete(&address).await?;
        Ok((done.rate()?, cpu))
    }

    async fn publisher_alone(&self, address: &str, events: u64, done: &Done) -> Result<(), BoxError> {
        let publisher = self.broker.publisher()?;
        let publishing = stream::iter(0..events).map(|n| {
            let (publisher, mut message) = (&publisher, Message::new(address, SOURCE, event_id(n), BODY));
            message.event_type = Some(EVENT_TYPE.to_owned());
            message.key = Some(key(n).into());
            async move { publisher.publish(&message).await }
        });
        let mut publishing = publishing.buffer_unordered(B::IN_FLIGHT);
        while let Some(published) = publishing.next().await {
            published?;
            done.add(1);
        }
        drop(publishing);
        publisher.stop().await;
        Ok(())
    }

    async fn relay(&self, outbox: &PgPool, events: u64, done: &Done) -> Result<(), BoxError> {
        let counted = Counted {
            publisher: self.broker.publisher()?,
            done: done.clone(),
        };
        let relay = Relay::builder(self.store().await?)
            .publisher("bench", counted)
            .in_flight(B::IN_FLIGHT)
            .build()?;
        let over = CancellationToken::new();
        let stop = over.clone();
        let running = tokio::spawn(relay.run_until(async move { stop.cancelled().await }));
        // Whether the table is empty is asked last: the answer passes over all that is deleted.
        while done.count() < events || left(outbox).await? > 0 {
            if running.is_finished() {
                running.await??;
                return Err("the relay ended too early".into());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        done.add(1);
        over.cancel();
        running.await??;
        Ok(())
    }

    /// New tables with so many events in them.
    async fn filled(&self, address: &str, events: u64) -> Result<PgPool, BoxError> {
        let pool = self.fresh_tables().await?;
        let outbox = Outbox::new(self.store().await?).source(SOURCE);
        for first in (0..events).step_by(1000) {
            let some = (first..events.min(first + 1000)).map(|n| event(address, n));
            let mut tx = pool.begin().await?;
            outbox.send_all_in(&mut tx, some).await?;
            tx.commit().await?;
        }
        for statement in ["VACUUM ANALYZE bench.outbox", "CHECKPOINT"] {
            sqlx::raw_sql(statement).execute(&pool).await?;
        }
        Ok(pool)
    }

    async fn fresh_tables(&self) -> Result<PgPool, BoxError> {
        let pool = PgPool::connect(&self.postgres).await?;
        sqlx::raw_sql("DROP SCHEMA IF EXISTS bench CASCADE")
            .execute(&pool)
            .await?;
        self.store().await?.migrate().await?;
        Ok(pool)
    }

    async fn store(&self) -> Result<PostgresStore, BoxError> {
        Ok(PostgresOptions::new(&self.postgres).schema("bench").connect()?)
    }
}

fn event(address: &str, n: u64) -> OutgoingEvent {
    OutgoingEvent::new(format!("bench:{address}"), EVENT_TYPE, BODY)
        .id(event_id(n))
        .key(key(n))
}

async fn left(pool: &PgPool) -> sqlx::Result<i64> {
    sqlx::query_scalar("SELECT count(*) FROM (SELECT 1 FROM bench.outbox LIMIT 1) AS first")
        .fetch_one(pool)
        .await
}

/// Counts what is confirmed.
struct Counted<P> {
    publisher: P,
    done: Done,
}

#[async_trait]
impl<P: Publisher> Publisher for Counted<P> {
    fn system(&self) -> &'static str {
        self.publisher.system()
    }

    async fn publish(&self, message: &Message) -> Result<(), PublishError> {
        self.publisher.publish(message).await?;
        self.done.add(1);
        Ok(())
    }

    fn patience(&self) -> Duration {
        self.publisher.patience()
    }

    fn health(&self) -> PublisherHealth {
        self.publisher.health()
    }

    async fn stop(&self) {
        self.publisher.stop().await;
    }
}
