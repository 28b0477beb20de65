//! How fast events go from Kafka to PostgreSQL, one insert each, beside the same loop written by hand
//! with rdkafka and sqlx (BEGIN with limits, claim, insert, COMMIT, offset; no guard, no retries).
//!
//! ```sh
//! scripts/services up && eval "$(scripts/services env)"
//! cargo run --release -p onlyonce-kafka --example throughput -- --events 40000 --rounds 3
//! ```
//!
//! Every variant runs once per round, in turn, and the medians are compared: on a busy machine the
//! ratios mean something, the rates do not. `--keys` instead shows what lanes are worth in one partition:
//! a handler of 5 ms, one lane against 64, the keys' order looked at.
#![allow(clippy::print_stdout)]

use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use onlyonce::store::postgres::PostgresOptions;
use onlyonce::store::{Operations, PostgresStore};
use onlyonce::{
    BatchContext, BatchHandler, Bytes, Consumer, Context, Event, Handler, HandlerError, async_trait,
};
use onlyonce_kafka::{Kafka, StartAt};
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{Consumer as _, StreamConsumer};
use rdkafka::message::{Header, Headers as _, OwnedHeaders, OwnedMessage};
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::{ClientConfig, Message};
use sqlx::{Connection as _, PgConnection, PgPool, Postgres};
use tokio::sync::mpsc;

type BoxError = Box<dyn Error + Send + Sync>;

const PARTITIONS: i32 = 4;
const KEYS: u64 = 1000;
const BODY: &str = r#"{"account":"acc-17","cents":4711,"currency":"EUR","note":"a body of ordinary size"}"#;

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let bench = Bench::from_args().await?;
    if bench.keys {
        return bench.keys().await;
    }
    let variants = [
        Variant::ByHand { lanes: 8, batch: 1 },
        Variant::Single { lanes: 8 },
        Variant::ByHand { lanes: 32, batch: 1 },
        Variant::Single { lanes: 32 },
        Variant::ByHand { lanes: 8, batch: 100 },
        Variant::BatchHandler { lanes: 8 },
    ];
    let mut rates: Vec<Vec<f64>> = vec![Vec::new(); variants.len()];
    for round in 1..=bench.rounds {
        for (variant, rates) in variants.iter().zip(&mut rates) {
            if !variant.name().contains(&bench.only) {
                rates.push(f64::NAN);
                continue;
            }
            let cpu = cpu_time()?;
            let rate = bench.run(variant).await?;
            // The filling of the topic is in it, the same for all variants.
            let cpu = (cpu_time()? - cpu).as_secs_f64() * 1e6 / bench.events as f64;
            println!(
                "round {round}  {:<34} {rate:>8.0}/s  {cpu:>5.0} us of this process's CPU an event",
                variant.name()
            );
            rates.push(rate);
        }
    }
    let median = |index: usize| {
        let mut sorted = rates[index].clone();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    };
    println!();
    for (index, variant) in variants.iter().enumerate() {
        println!("median   {:<34} {:>8.0}/s", variant.name(), median(index));
    }
    println!("single / by hand,  8 lanes     {:.2}", median(1) / median(0));
    println!("single / by hand, 32 lanes     {:.2}", median(3) / median(2));
    println!("batch handler / by hand(100)   {:.2}", median(5) / median(4));
    Ok(())
}

enum Variant {
    ByHand { lanes: usize, batch: usize },
    Single { lanes: usize },
    BatchHandler { lanes: usize },
}

impl Variant {
    fn name(&self) -> String {
        match self {
            Self::ByHand { lanes, batch: 1 } => format!("by hand, {lanes} lanes"),
            Self::ByHand { lanes, batch } => format!("by hand, {lanes} lanes, batch({batch})"),
            Self::Single { lanes } => format!("onlyonce, {lanes} lanes"),
            Self::BatchHandler { lanes } => format!("onlyonce, {lanes} lanes, batch handler"),
        }
    }
}

struct Bench {
    brokers: String,
    postgres: String,
    pool: PgPool,
    admin: AdminClient<DefaultClientContext>,
    events: u64,
    rounds: usize,
    keys: bool,
    /// Only variants whose name has this in it.
    only: String,
}

impl Bench {
    async fn from_args() -> Result<Self, BoxError> {
        let environment = |name: &str| {
            std::env::var(name).map_err(|_| format!("{name} is not set (eval \"$(scripts/services env)\")"))
        };
        let (brokers, postgres) = (
            environment("ONLYONCE_KAFKA_BROKERS")?,
            environment("ONLYONCE_POSTGRES_URL")?,
        );
        let mut bench = Self {
            pool: PgPool::connect(&postgres).await?,
            admin: ClientConfig::new().set("bootstrap.servers", &brokers).create()?,
            brokers,
            postgres,
            events: 40_000,
            rounds: 3,
            keys: false,
            only: String::new(),
        };
        let mut args = std::env::args().skip(1);
        while let Some(arg) = args.next() {
            let mut number = || args.next().ok_or_else(|| format!("{arg} needs a value"));
            match arg.as_str() {
                "--events" => bench.events = number()?.parse()?,
                "--rounds" => bench.rounds = number()?.parse()?,
                "--keys" => bench.keys = true,
                "--only" => bench.only = number()?,
                _ => {
                    return Err(format!(
                        "{arg} is not an option (--events N, --rounds N, --only NAME, --keys)"
                    )
                    .into());
                }
            }
        }
        Ok(bench)
    }

    /// Events per second, from the start of the consumer to the last effect.
    async fn run(&self, variant: &Variant) -> Result<f64, BoxError> {
        self.fresh_tables().await?;
        let topic = self.filled_topic(PARTITIONS, KEYS, self.events).await?;
        let done = Arc::new(AtomicU64::new(0));
        let started = Instant::now();
        let last = match variant {
            Variant::ByHand { lanes, batch } => self.by_hand(&topic, *lanes, *batch, &done).await?,
            Variant::Single { lanes } => {
                self.consumer(&topic, *lanes, 1, &done, self.events, |builder, done| {
                    builder.handler(Insert(done))
                })
                .await?
            }
            Variant::BatchHandler { lanes } => {
                self.consumer(&topic, *lanes, 100, &done, self.events, |builder, done| {
                    builder.batch_handler(Insert(done))
                })
                .await?
            }
        };
        self.check().await?;
        self.admin.delete_topics(&[&topic], &AdminOptions::new()).await?;
        Ok(self.events as f64 / (last - started).as_secs_f64())
    }

    async fn consumer(
        &self,
        topic: &str,
        lanes: usize,
        batch: usize,
        done: &Arc<AtomicU64>,
        events: u64,
        handler: impl FnOnce(
            onlyonce::consumer::ConsumerBuilder<PostgresStore>,
            Arc<AtomicU64>,
        ) -> onlyonce::consumer::ConsumerBuilder<PostgresStore>,
    ) -> Result<Instant, BoxError> {
        let store = PostgresOptions::new(&self.postgres)
            .schema("bench")
            .max_connections(96)
            .connect()?;
        let source = Kafka::group(&self.brokers, topic)
            .topic(topic)
            .start_at(StartAt::Earliest)
            .build()?;
        let builder = Consumer::builder("bench", store)
            .source(source)
            .lanes(lanes)
            .batch(batch);
        let consumer = handler(builder, done.clone()).build()?;
        let done = done.clone();
        let last = Arc::new(OnceLock::new());
        let seen = last.clone();
        consumer
            .run_until(async move {
                let _ = seen.set(until(&done, events).await);
            })
            .await?;
        last.get()
            .copied()
            .ok_or_else(|| "the consumer ended too early".into())
    }

    /// What one would write without a framework, if one were careful: keys stay in their lane, and no
    /// offset is stored before all before it are done.
    async fn by_hand(
        &self,
        topic: &str,
        lanes: usize,
        batch: usize,
        done: &Arc<AtomicU64>,
    ) -> Result<Instant, BoxError> {
        let consumer: StreamConsumer = ClientConfig::new()
            .set("bootstrap.servers", &self.brokers)
            .set("group.id", topic)
            .set("auto.offset.reset", "earliest")
            .set("enable.auto.offset.store", "false")
            .set("auto.commit.interval.ms", "1000")
            .set("partition.assignment.strategy", "cooperative-sticky")
            .create()?;
        consumer.subscribe(&[topic])?;
        let progress = Arc::new(Mutex::new(Progress::default()));
        let mut tasks = tokio::task::JoinSet::new();
        let mut senders = Vec::new();
        for _ in 0..lanes {
            // As many as the consumer takes.
            let (sender, mut work) = mpsc::channel::<OwnedMessage>(4 * batch);
            senders.push(sender);
            let (progress, done) = (progress.clone(), done.clone());
            let mut conn = PgConnection::connect(&self.postgres).await?;
            tasks.spawn(async move {
                let mut messages = Vec::new();
                while work.recv_many(&mut messages, batch).await > 0 {
                    apply(&mut conn, &messages).await?;
                    let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
                    messages.iter().for_each(|message| progress.done(message));
                    done.fetch_add(messages.len() as u64, Relaxed);
                    messages.clear();
                }
                Ok::<_, BoxError>(())
            });
        }
        let last = {
            let receiving = async {
                loop {
                    let message = consumer.recv().await?.detach();
                    let advanced = {
                        let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
                        progress.came(&message);
                        progress.advanced()
                    };
                    for (partition, offset) in advanced {
                        consumer.store_offset(topic, partition, offset)?;
                    }
                    let mut hasher = DefaultHasher::new();
                    message.key().hash(&mut hasher);
                    senders[hasher.finish() as usize % lanes].send(message).await?;
                }
            };
            tokio::select! {
                last = until(done, self.events) => last,
                ended = receiving => {
                    let ended: Result<(), BoxError> = ended;
                    return Err(ended.err().unwrap_or_else(|| "the loop ended".into()));
                }
            }
        };
        drop(senders);
        while let Some(ended) = tasks.join_next().await {
            ended??;
        }
        tokio::task::spawn_blocking(move || drop(consumer)).await?;
        Ok(last)
    }

    /// One partition, 100 keys, a handler of 5 ms: the lanes' worth, and the order within each key.
    async fn keys(&self) -> Result<(), BoxError> {
        let mut rates = Vec::new();
        for (lanes, events) in [(1, 200), (64, 10_000)] {
            self.fresh_tables().await?;
            let topic = self.filled_topic(1, 100, events).await?;
            let done = Arc::new(AtomicU64::new(0));
            let slow = Slow::default();
            let (last_of, out_of_order) = (slow.last.clone(), slow.out_of_order.clone());
            let started = Instant::now();
            let last = self
                .consumer(&topic, lanes, 1, &done, events, |builder, done| {
                    builder.handler(Slow {
                        done,
                        last: last_of,
                        out_of_order,
                    })
                })
                .await?;
            let rate = events as f64 / (last - started).as_secs_f64();
            println!(
                "{lanes:>2} lanes {rate:>8.0}/s, {} out of order",
                slow.out_of_order.load(Relaxed)
            );
            rates.push(rate);
            self.admin.delete_topics(&[&topic], &AdminOptions::new()).await?;
        }
        println!("64 lanes / 1 lane {:.1}", rates[1] / rates[0]);
        Ok(())
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

    async fn check(&self) -> Result<(), BoxError> {
        let (rows, ids): (i64, i64) =
            sqlx::query_as("SELECT count(*), count(DISTINCT event_id) FROM bench.effects")
                .fetch_one(&self.pool)
                .await?;
        if (rows as u64, ids as u64) != (self.events, self.events) {
            return Err(format!("{rows} effects of {ids} events, expected {}", self.events).into());
        }
        Ok(())
    }

    async fn filled_topic(&self, partitions: i32, keys: u64, events: u64) -> Result<String, BoxError> {
        let unique = std::time::UNIX_EPOCH.elapsed()?.as_micros();
        let topic = format!("bench-{unique}");
        let new = NewTopic::new(&topic, partitions, TopicReplication::Fixed(1));
        for created in self.admin.create_topics([&new], &AdminOptions::new()).await? {
            created.map_err(|(topic, code)| format!("{topic}: {code}"))?;
        }
        let producer: FutureProducer = ClientConfig::new()
            .set("bootstrap.servers", &self.brokers)
            .set("linger.ms", "5")
            .create()?;
        let mut sent = Vec::new();
        for n in 0..events {
            // Spread over the index as random ids are; an odd factor gives each number once.
            let id = format!("evt_{:016x}", n.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let key = format!("acc-{}", n % keys);
            let headers = OwnedHeaders::new()
                .insert(Header {
                    key: "onlyonce-event-id",
                    value: Some(&id),
                })
                .insert(Header {
                    key: "onlyonce-event-source",
                    value: Some("bench"),
                });
            let record = FutureRecord::to(&topic).key(&key).payload(BODY).headers(headers);
            sent.push(producer.send_result(record).map_err(|(error, _)| error)?);
            if sent.len() == 5000 {
                for delivery in sent.drain(..) {
                    delivery.await?.map_err(|(error, _)| error)?;
                }
            }
        }
        for delivery in sent {
            delivery.await?.map_err(|(error, _)| error)?;
        }
        Ok(topic)
    }
}

/// What came of each partition and is not done, and how far each is done.
#[derive(Default)]
struct Progress(HashMap<i32, (BTreeMap<i64, bool>, Option<i64>)>);

impl Progress {
    fn came(&mut self, message: &OwnedMessage) {
        let (open, _) = self.0.entry(message.partition()).or_default();
        open.insert(message.offset(), false);
    }

    fn done(&mut self, message: &OwnedMessage) {
        let (open, advanced) = self.0.entry(message.partition()).or_default();
        open.insert(message.offset(), true);
        while let Some(first) = open.first_entry()
            && *first.get()
        {
            *advanced = Some(first.remove_entry().0);
        }
    }

    fn advanced(&mut self) -> Vec<(i32, i64)> {
        self.0
            .iter_mut()
            .filter_map(|(partition, (_, advanced))| advanced.take().map(|offset| (*partition, offset)))
            .collect()
    }
}

async fn apply(conn: &mut PgConnection, messages: &[OwnedMessage]) -> Result<(), BoxError> {
    let id = |message: &OwnedMessage| {
        message
            .headers()
            .and_then(|headers| headers.iter().find(|header| header.key == "onlyonce-event-id"))
            .and_then(|header| header.value)
            .map(|value| String::from_utf8_lossy(value).into_owned())
            .unwrap_or_default()
    };
    let mut tx = conn
        .begin_with(
            "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL lock_timeout = 2000; \
             SET LOCAL statement_timeout = 30000; \
             SET LOCAL idle_in_transaction_session_timeout = 35000",
        )
        .await?;
    if let [message] = messages {
        let id = id(message);
        let claimed = sqlx::query(
            "INSERT INTO bench.by_hand (consumer, source, event_id) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING",
        )
        .bind("bench")
        .bind("bench")
        .bind(&id)
        .execute(&mut *tx)
        .await?;
        if claimed.rows_affected() == 1 {
            insert(&mut tx, &id, message.payload().unwrap_or_default()).await?;
        }
    } else {
        let ids: Vec<String> = messages.iter().map(id).collect();
        let claimed: Vec<String> = sqlx::query_scalar(
            "INSERT INTO bench.by_hand (consumer, source, event_id) SELECT 'bench', 'bench', * FROM unnest($1::text[]) \
             ON CONFLICT DO NOTHING RETURNING event_id",
        )
        .bind(&ids)
        .fetch_all(&mut *tx)
        .await?;
        let claimed: std::collections::HashSet<String> = claimed.into_iter().collect();
        let (ids, bodies): (Vec<&str>, Vec<&[u8]>) = ids
            .iter()
            .zip(messages)
            .filter(|(id, _)| claimed.contains(*id))
            .map(|(id, message)| (id.as_str(), message.payload().unwrap_or_default()))
            .unzip();
        insert_all(&mut tx, ids, bodies).await?;
    }
    tx.commit().await?;
    Ok(())
}

/// When the last event was applied.
async fn until(done: &AtomicU64, events: u64) -> Instant {
    while done.load(Relaxed) < events {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    Instant::now()
}

async fn insert(conn: &mut PgConnection, id: &str, body: &[u8]) -> sqlx::Result<()> {
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

struct Insert(Arc<AtomicU64>);

#[async_trait]
impl Handler<Postgres> for Insert {
    type Payload = Bytes;

    async fn handle(&self, cx: &mut Context<'_, Postgres>, event: Event<Bytes>) -> Result<(), HandlerError> {
        insert(cx.tx(), &event.identity.id, &event.payload).await?;
        self.0.fetch_add(1, Relaxed);
        Ok(())
    }
}

/// Takes its time, and looks whether its events of a key come in the order of the log.
#[derive(Default)]
struct Slow {
    done: Arc<AtomicU64>,
    last: Arc<Mutex<HashMap<Bytes, i64>>>,
    out_of_order: Arc<AtomicU64>,
}

#[async_trait]
impl Handler<Postgres> for Slow {
    type Payload = Bytes;

    async fn handle(&self, cx: &mut Context<'_, Postgres>, event: Event<Bytes>) -> Result<(), HandlerError> {
        let offset = event
            .origin
            .detail
            .rsplit('=')
            .next()
            .unwrap_or_default()
            .parse()?;
        let before = self
            .last
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(event.key.unwrap_or_default(), offset);
        if before.is_some_and(|before: i64| before >= offset) {
            self.out_of_order.fetch_add(1, Relaxed);
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
        insert(cx.tx(), &event.identity.id, &event.payload).await?;
        self.done.fetch_add(1, Relaxed);
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
        self.0.fetch_add(events.len() as u64, Relaxed);
        Ok(())
    }
}

/// User and system time of this process, from the scheduler's ticks of 10 ms.
fn cpu_time() -> Result<Duration, BoxError> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let fields = stat.rsplit_once(')').ok_or("no name in /proc/self/stat")?.1;
    let ticks = |n: usize| {
        fields
            .split_whitespace()
            .nth(n)
            .and_then(|t| t.parse::<u64>().ok())
            .unwrap_or(0)
    };
    Ok(Duration::from_millis(10 * (ticks(11) + ticks(12))))
}
