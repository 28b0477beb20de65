//! How fast events go from a broker to PostgreSQL, one insert each, beside the same loop written by
//! hand: BEGIN with limits, claim, insert, COMMIT, ack; no guard, no retries.
//!
//! Every variant runs once per round, the order turned round by round, and each ratio is the median of
//! the rounds' own: on a busy machine the ratios mean something, the rates do not. Rates are from the
//! first effect to the last. The tests' dependencies of an adapter compile crash points into its examples;
//! nobody arms them here, and each costs the look at an empty `Option`.
#![allow(clippy::print_stdout)]

pub mod relay;
mod report;
mod twin;

use std::error::Error;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use onlyonce::source::Source;
use onlyonce::store::postgres::PostgresOptions;
use onlyonce::store::{Operations, PostgresStore};
use onlyonce::{BatchContext, BatchHandler, Bytes, Consumer, Context, Event, Handler, HandlerError};
use sqlx::{PgConnection, PgPool, Postgres};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub use report::{cpu_time, resident};
pub use twin::{Twin, TwinLane};

/// Whatever went wrong.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// The body of every event.
pub const BODY: &str =
    r#"{"account":"acc-17","cents":4711,"currency":"EUR","note":"a body of ordinary size"}"#;

/// The `n`th event's id, spread over the index as random ids are: an odd factor gives each number once.
pub fn event_id(n: u64) -> String {
    format!("evt_{:016x}", n.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// What a benchmark wants of a broker.
#[async_trait]
pub trait Broker: Sync {
    /// The source under test.
    type Source: Source;

    /// How many events a batch has.
    const BATCH: usize;

    /// On how many tasks the loop without a database is quickest.
    const BARE_LANES: usize = 8;

    /// Puts so many events, with [`event_id`] and [`BODY`], into a new queue or topic, and names it.
    async fn filled(&self, events: u64) -> Result<String, BoxError>;

    /// A source that reads it from its beginning.
    fn source(&self, queue: &str) -> Result<Self::Source, BoxError>;

    /// The loop one would write without a framework, if one were careful, on `twin.lanes` tasks and up
    /// to `twin.batch` events a transaction, until `stop`.
    async fn by_hand(&self, queue: &str, twin: Twin, stop: CancellationToken) -> Result<(), BoxError>;

    /// Removes it.
    async fn delete(&self, queue: &str) -> Result<(), BoxError>;
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Variant {
    /// The hand-written loop without a database: what the broker and its client can do.
    Bare {
        lanes: usize,
        batch: usize,
    },
    ByHand {
        lanes: usize,
        batch: usize,
    },
    /// As `ByHand`, but the effects of a batch go into the table by one statement.
    ByHandAtOnce {
        lanes: usize,
        batch: usize,
    },
    Onlyonce {
        lanes: usize,
        batch: usize,
    },
    BatchHandler {
        lanes: usize,
        batch: usize,
    },
}

impl Variant {
    fn name(self) -> String {
        match self {
            Self::Bare { lanes, batch } => named("bare", lanes, batch),
            Self::ByHand { lanes, batch } => named("by hand", lanes, batch),
            Self::ByHandAtOnce { lanes, batch } => named("by hand, one insert", lanes, batch),
            Self::Onlyonce { lanes, batch } => named("onlyonce", lanes, batch),
            Self::BatchHandler { lanes, batch } => named("batch handler", lanes, batch),
        }
    }
}

fn named(what: &str, lanes: usize, batch: usize) -> String {
    match batch {
        1 => format!("{what}, {lanes} lanes"),
        _ => format!("{what}, {lanes} lanes, batch({batch})"),
    }
}

/// Carries out what the arguments say: `--events N`, `--rounds N`, `--only NAME`, `--memory`.
pub async fn run<B: Broker>(broker: B) -> Result<(), BoxError> {
    let options = Options::from_args()?;
    let bench = Bench::new(broker).await?;
    if options.memory {
        bench.memory(options.events).await
    } else {
        bench.compare(options).await
    }
}

/// A broker and a database to measure on.
pub struct Bench<B> {
    broker: B,
    postgres: String,
    pool: PgPool,
}

struct Options {
    events: u64,
    rounds: usize,
    /// Only variants whose name has this in it.
    only: String,
    /// Instead: how much memory a consumer takes whose queue is full.
    memory: bool,
}

impl Options {
    fn from_args() -> Result<Self, BoxError> {
        let mut options = Self {
            events: 40_000,
            rounds: 3,
            only: String::new(),
            memory: false,
        };
        let mut args = std::env::args().skip(1);
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value"));
            match arg.as_str() {
                "--events" => options.events = value()?.parse()?,
                "--rounds" => options.rounds = value()?.parse()?,
                "--only" => options.only = value()?,
                "--memory" => options.memory = true,
                _ => {
                    return Err(format!(
                        "{arg} is not an option (--events N, --rounds N, --only NAME, --memory)"
                    )
                    .into());
                }
            }
        }
        Ok(options)
    }
}

impl<B: Broker> Bench<B> {
    /// Measures on this broker and on the database of `scripts/services`.
    pub async fn new(broker: B) -> Result<Self, BoxError> {
        let postgres = environment("ONLYONCE_POSTGRES_URL")?;
        let pool = PgPool::connect(&postgres).await?;
        Ok(Self {
            broker,
            postgres,
            pool,
        })
    }

    async fn compare(&self, options: Options) -> Result<(), BoxError> {
        let batch = B::BATCH;
        let mut variants = vec![
            Variant::Bare {
                lanes: B::BARE_LANES,
                batch,
            },
            Variant::ByHand { lanes: 8, batch: 1 },
            Variant::Onlyonce { lanes: 8, batch: 1 },
            Variant::ByHand { lanes: 32, batch: 1 },
            Variant::Onlyonce { lanes: 32, batch: 1 },
            Variant::ByHand { lanes: 8, batch },
            Variant::Onlyonce { lanes: 8, batch },
            Variant::ByHandAtOnce { lanes: 8, batch },
            Variant::BatchHandler { lanes: 8, batch },
        ];
        variants.retain(|variant| variant.name().contains(&options.only));
        let mut report = report::Report::default();
        for round in 1..=options.rounds {
            for &variant in &variants {
                let cpu = cpu_time()?;
                let rate = self.measure(variant, options.events).await?;
                // The filling of the queue is in it, the same for all variants.
                let cpu = (cpu_time()? - cpu).as_secs_f64() * 1e6 / options.events as f64;
                println!(
                    "round {round}  {:<34} {rate:>8.0}/s  {cpu:>5.0} us of this process's CPU an event",
                    variant.name()
                );
                report.add(variant, rate);
            }
            // So that none always comes after the same one.
            variants.rotate_left(1);
        }
        report.print::<B>();
        Ok(())
    }

    /// Events per second.
    async fn measure(&self, variant: Variant, events: u64) -> Result<f64, BoxError> {
        let done = Done::of(events);
        let queue = self.prepare(events).await?;
        match variant {
            Variant::Bare { lanes, batch } => self.by_hand(&queue, Twin::bare(lanes, batch, &done)).await?,
            Variant::ByHand { lanes, batch } => {
                self.by_hand(&queue, Twin::new(&self.postgres, lanes, batch, &done))
                    .await?;
            }
            Variant::ByHandAtOnce { lanes, batch } => {
                let twin = Twin::new(&self.postgres, lanes, batch, &done);
                self.by_hand(&queue, twin.at_once()).await?;
            }
            Variant::Onlyonce { lanes, batch } => {
                let builder = self.consumer(&queue, lanes, batch)?;
                run_out(builder.handler(Insert(done.clone())), &done).await?;
            }
            Variant::BatchHandler { lanes, batch } => {
                let builder = self.consumer(&queue, lanes, batch)?;
                run_out(builder.batch_handler(Insert(done.clone())), &done).await?;
            }
        }
        let applied = match variant {
            Variant::Bare { .. } => 0,
            _ => events,
        };
        self.finish(&queue, applied).await?;
        done.rate()
    }

    async fn by_hand(&self, queue: &str, twin: Twin) -> Result<(), BoxError> {
        let (done, stop) = (twin.done.clone(), CancellationToken::new());
        let loops = self.broker.by_hand(queue, twin, stop.clone());
        tokio::pin!(loops);
        tokio::select! {
            ended = &mut loops => {
                ended?;
                Err("the loop written by hand ended too early".into())
            }
            () = done.wait() => {
                stop.cancel();
                loops.await
            }
        }
    }

    /// New tables, and a queue with so many events, which it names.
    pub async fn prepare(&self, events: u64) -> Result<String, BoxError> {
        self.fresh_tables().await?;
        self.broker.filled(events).await
    }

    /// A consumer of that queue, but for its handler.
    pub fn consumer(
        &self,
        queue: &str,
        lanes: usize,
        batch: usize,
    ) -> Result<onlyonce::consumer::ConsumerBuilder<PostgresStore>, BoxError> {
        let store = PostgresOptions::new(&self.postgres)
            .schema("bench")
            .max_connections(2 * lanes as u32 + 16)
            .connect()?;
        Ok(Consumer::builder("bench", store)
            .source(self.broker.source(queue)?)
            .lanes(lanes)
            .batch(batch))
    }

    /// Resident memory of a consumer with the default settings while the queue is full.
    async fn memory(&self, events: u64) -> Result<(), BoxError> {
        let queue = self.prepare(events).await?;
        println!("{events} messages wait; resident before {} KiB", resident()?);
        let store = PostgresOptions::new(&self.postgres).schema("bench").connect()?;
        let done = Done::of(events / 10);
        let consumer = Consumer::builder("bench", store)
            .source(self.broker.source(&queue)?)
            .handler(Insert(done.clone()))
            .build()?;
        let most = Arc::new(AtomicU64::new(0));
        let (seen, counted) = (most.clone(), done.clone());
        consumer
            .run_until(async move {
                let watching = async {
                    loop {
                        seen.fetch_max(resident().unwrap_or(0), Relaxed);
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                };
                tokio::select! {
                    () = watching => {}
                    () = counted.wait() => {}
                }
            })
            .await?;
        println!(
            "resident at most {} KiB while {} events were applied",
            most.load(Relaxed),
            events / 10
        );
        self.broker.delete(&queue).await
    }

    async fn fresh_tables(&self) -> Result<(), BoxError> {
        sqlx::raw_sql("DROP SCHEMA IF EXISTS bench CASCADE")
            .execute(&self.pool)
            .await?;
        PostgresOptions::new(&self.postgres)
            .schema("bench")
            .connect()?
            .migrate()
            .await?;
        sqlx::raw_sql(
            "CREATE TABLE bench.effects (event_id text NOT NULL, body bytea NOT NULL);
             CREATE TABLE bench.by_hand (consumer text, source text, event_id text, processed_at timestamptz
                 NOT NULL DEFAULT now(), PRIMARY KEY (consumer, source, event_id));
             CREATE INDEX ON bench.by_hand (processed_at)",
        )
        .execute(&self.pool)
        .await?;
        sqlx::raw_sql("CHECKPOINT").execute(&self.pool).await?;
        Ok(())
    }

    /// Fails unless so many events had their effect once, and removes the queue.
    pub async fn finish(&self, queue: &str, events: u64) -> Result<(), BoxError> {
        let (rows, ids): (i64, i64) =
            sqlx::query_as("SELECT count(*), count(DISTINCT event_id) FROM bench.effects")
                .fetch_one(&self.pool)
                .await?;
        if (rows as u64, ids as u64) != (events, events) {
            return Err(format!("{rows} effects of {ids} events, expected {events}").into());
        }
        self.broker.delete(queue).await
    }
}

/// Runs the consumer until the last effect.
pub async fn run_out(
    builder: onlyonce::consumer::ConsumerBuilder<PostgresStore>,
    done: &Done,
) -> Result<(), BoxError> {
    let done = done.clone();
    Ok(builder
        .build()?
        .run_until(async move { done.wait().await })
        .await?)
}

/// The value of an environment variable that `scripts/services env` sets.
pub fn environment(name: &str) -> Result<String, BoxError> {
    std::env::var(name).map_err(|_| format!("{name} is not set (eval \"$(scripts/services env)\")").into())
}

/// Counts effects, and tells when the first and the last one happened.
#[derive(Debug, Clone)]
pub struct Done {
    count: Arc<AtomicU64>,
    of: u64,
    /// When the first ones happened, and how many those were.
    first: Arc<OnceLock<(Instant, u64)>>,
    last: Arc<watch::Sender<Option<Instant>>>,
}

impl Done {
    /// Of so many.
    pub fn of(events: u64) -> Self {
        Self {
            count: Arc::default(),
            of: events,
            first: Arc::default(),
            last: Arc::new(watch::Sender::new(None)),
        }
    }

    /// So many more happened.
    pub fn add(&self, events: usize) {
        self.first.get_or_init(|| (Instant::now(), events as u64));
        if self.count.fetch_add(events as u64, Relaxed) + events as u64 >= self.of {
            self.last.send_replace(Some(Instant::now()));
        }
    }

    /// How many have happened.
    pub fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }

    /// Until the last one.
    pub async fn wait(&self) {
        let mut last = self.last.subscribe();
        // The sender is here.
        let _ = last.wait_for(Option::is_some).await;
    }

    /// Events per second, from the first effect to the last: connecting and subscribing are not in it.
    pub fn rate(&self) -> Result<f64, BoxError> {
        let last = *self.last.borrow();
        match (self.first.get(), last) {
            (Some((first, events)), Some(last)) if last > *first => {
                Ok((self.of - events) as f64 / (last - *first).as_secs_f64())
            }
            _ => Err("it ended before its last effect".into()),
        }
    }
}

/// The effect of one event.
pub async fn insert(conn: &mut PgConnection, id: &str, body: &[u8]) -> sqlx::Result<()> {
    sqlx::query("INSERT INTO bench.effects (event_id, body) VALUES ($1, $2)")
        .bind(id)
        .bind(body)
        .execute(conn)
        .await?;
    Ok(())
}

async fn insert_all(conn: &mut PgConnection, ids: Vec<&str>, bodies: Vec<&[u8]>) -> sqlx::Result<()> {
    sqlx::query("INSERT INTO bench.effects (event_id, body) SELECT * FROM unnest($1::text[], $2::bytea[])")
        .bind(ids)
        .bind(bodies)
        .execute(conn)
        .await?;
    Ok(())
}

struct Insert(Done);

#[async_trait]
impl Handler<Postgres> for Insert {
    type Payload = Bytes;

    async fn handle(&self, cx: &mut Context<'_, Postgres>, event: Event<Bytes>) -> Result<(), HandlerError> {
        insert(cx.tx(), &event.identity.id, &event.payload).await?;
        self.0.add(1);
        Ok(())
    }
}

#[async_trait]
impl BatchHandler<Postgres> for Insert {
    type Payload = Bytes;

    async fn handle(
        &self,
        cx: &mut BatchContext<'_, Postgres>,
        events: Vec<Event<Bytes>>,
    ) -> Result<(), HandlerError> {
        let ids = events.iter().map(|event| event.identity.id.as_str()).collect();
        let bodies = events.iter().map(|event| event.payload.as_ref()).collect();
        insert_all(cx.tx(), ids, bodies).await?;
        self.0.add(events.len());
        Ok(())
    }
}
