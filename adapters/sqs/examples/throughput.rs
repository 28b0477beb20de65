//! How fast events go from SQS to PostgreSQL, one insert each, beside the same loop written by hand
//! with aws-sdk-sqs and sqlx (receive ten, for each BEGIN with limits, claim, insert, COMMIT, delete
//! ten; no guard, no retries, no renewal).
//!
//! ```sh
//! scripts/services up && eval "$(scripts/services env)"
//! cargo run --release -p onlyonce-sqs --example throughput -- --events 8000 --rounds 3
//! ```
//!
//! Every variant runs once per round, in turn, and the medians are compared: on a busy machine the
//! ratios mean something, the rates do not. An emulator on the same machine takes most of its time.
#![allow(clippy::print_stdout)]

use std::error::Error;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use aws_sdk_sqs::Client;
use aws_sdk_sqs::types::{
    DeleteMessageBatchRequestEntry, MessageAttributeValue, SendMessageBatchRequestEntry,
};
use onlyonce::store::postgres::PostgresOptions;
use onlyonce::store::{Operations, PostgresStore};
use onlyonce::{
    BatchContext, BatchHandler, Bytes, Consumer, Context, Event, Handler, HandlerError, async_trait,
};
use onlyonce_sqs::{Connection as Aws, Sqs};
use sqlx::{Connection as _, PgConnection, PgPool, Postgres};
use tokio_util::sync::CancellationToken;

type BoxError = Box<dyn Error + Send + Sync>;

const BODY: &str = r#"{"account":"acc-17","cents":4711,"currency":"EUR","note":"a body of ordinary size"}"#;
const ID: &str = "onlyonce-event-id";
const SOURCE: &str = "onlyonce-event-source";

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let bench = Bench::from_args().await?;
    let variants = [
        Variant::ByHand { lanes: 8 },
        Variant::Single { lanes: 8 },
        Variant::ByHand { lanes: 32 },
        Variant::Single { lanes: 32 },
        Variant::Batch { lanes: 8 },
        Variant::BatchHandler { lanes: 8 },
    ];
    let mut rates: Vec<Vec<f64>> = vec![Vec::new(); variants.len()];
    for round in 1..=bench.rounds {
        for (variant, rates) in variants.iter().zip(&mut rates) {
            let cpu = cpu_time()?;
            let rate = bench.run(variant).await?;
            // The filling of the queue is in it, the same for all variants.
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
    println!("single / by hand,  8 lanes  {:.2}", median(1) / median(0));
    println!("single / by hand, 32 lanes  {:.2}", median(3) / median(2));
    println!("batch(100) / single         {:.2}", median(4) / median(1));
    println!("batch handler / single      {:.2}", median(5) / median(1));
    Ok(())
}

enum Variant {
    ByHand { lanes: usize },
    Single { lanes: usize },
    Batch { lanes: usize },
    BatchHandler { lanes: usize },
}

impl Variant {
    fn name(&self) -> String {
        match self {
            Self::ByHand { lanes } => format!("by hand, {lanes} lanes"),
            Self::Single { lanes } => format!("onlyonce, {lanes} lanes"),
            Self::Batch { lanes } => format!("onlyonce, {lanes} lanes, batch(100)"),
            Self::BatchHandler { lanes } => format!("onlyonce, {lanes} lanes, batch handler"),
        }
    }
}

struct Bench {
    sqs: Client,
    postgres: String,
    pool: PgPool,
    events: u64,
    rounds: usize,
}

impl Bench {
    async fn from_args() -> Result<Self, BoxError> {
        let environment = |name: &str| {
            std::env::var(name).map_err(|_| format!("{name} is not set (eval \"$(scripts/services env)\")"))
        };
        let endpoint = environment("ONLYONCE_SQS_URL")?;
        let postgres = environment("ONLYONCE_POSTGRES_URL")?;
        let pool = PgPool::connect(&postgres).await?;
        let mut bench = Self {
            sqs: Aws::new("us-east-1", "test", "test")
                .endpoint(endpoint)
                .client()?,
            postgres,
            pool,
            events: 8000,
            rounds: 3,
        };
        let mut args = std::env::args().skip(1);
        while let Some(arg) = args.next() {
            let mut number = || args.next().ok_or_else(|| format!("{arg} needs a number"));
            match arg.as_str() {
                "--events" => bench.events = number()?.parse()?,
                "--rounds" => bench.rounds = number()?.parse()?,
                _ => return Err(format!("{arg} is not an option (--events N, --rounds N)").into()),
            }
        }
        Ok(bench)
    }

    /// Events per second, from the start of the consumer to the last effect.
    async fn run(&self, variant: &Variant) -> Result<f64, BoxError> {
        self.fresh_tables().await?;
        let queue = self.filled_queue().await?;
        let done = Arc::new(AtomicU64::new(0));
        let started = Instant::now();
        let last = match variant {
            Variant::ByHand { lanes } => self.by_hand(&queue, *lanes, &done).await?,
            Variant::Single { lanes } => {
                self.consumer(&queue, *lanes, 1, &done, |builder, done| {
                    builder.handler(Insert(done))
                })
                .await?
            }
            Variant::Batch { lanes } => {
                self.consumer(&queue, *lanes, 100, &done, |builder, done| {
                    builder.handler(Insert(done))
                })
                .await?
            }
            Variant::BatchHandler { lanes } => {
                self.consumer(&queue, *lanes, 100, &done, |builder, done| {
                    builder.batch_handler(Insert(done))
                })
                .await?
            }
        };
        self.check().await?;
        self.sqs.delete_queue().queue_url(queue).send().await?;
        Ok(self.events as f64 / (last - started).as_secs_f64())
    }

    async fn consumer(
        &self,
        queue: &str,
        lanes: usize,
        batch: usize,
        done: &Arc<AtomicU64>,
        handler: impl FnOnce(
            onlyonce::consumer::ConsumerBuilder<PostgresStore>,
            Arc<AtomicU64>,
        ) -> onlyonce::consumer::ConsumerBuilder<PostgresStore>,
    ) -> Result<Instant, BoxError> {
        let store = PostgresOptions::new(&self.postgres)
            .schema("bench")
            .max_connections(64)
            .connect()?;
        let source = Sqs::queue(self.sqs.clone(), queue).build()?;
        let builder = Consumer::builder("bench", store)
            .source(source)
            .lanes(lanes)
            .batch(batch)
            .window(lanes.max(1) * batch.max(10));
        let consumer = handler(builder, done.clone()).build()?;
        let (done, events) = (done.clone(), self.events);
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

    /// What one would write without a framework, if one were careful.
    async fn by_hand(&self, queue: &str, lanes: usize, done: &Arc<AtomicU64>) -> Result<Instant, BoxError> {
        let stop = CancellationToken::new();
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..lanes {
            let (sqs, queue, stop, done) = (self.sqs.clone(), queue.to_owned(), stop.clone(), done.clone());
            let mut conn = PgConnection::connect(&self.postgres).await?;
            tasks.spawn(async move {
                loop {
                    let call = sqs
                        .receive_message()
                        .queue_url(&queue)
                        .max_number_of_messages(10)
                        .wait_time_seconds(1)
                        .message_attribute_names("All")
                        .send();
                    let received = tokio::select! {
                        () = stop.cancelled() => return Ok::<_, BoxError>(()),
                        received = call => received?,
                    };
                    let mut deletions = Vec::new();
                    for (n, message) in received.messages.unwrap_or_default().into_iter().enumerate() {
                        let attribute = |name: &str| {
                            let value = message.message_attributes.as_ref()?.get(name)?;
                            value.string_value.clone()
                        };
                        let id = attribute(ID).unwrap_or_default();
                        let mut tx = conn
                            .begin_with(
                                "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL lock_timeout = 2000; \
                                 SET LOCAL statement_timeout = 30000; \
                                 SET LOCAL idle_in_transaction_session_timeout = 35000",
                            )
                            .await?;
                        let claimed = sqlx::query(
                            "INSERT INTO bench.by_hand (consumer, source, event_id) VALUES ($1, $2, $3) \
                             ON CONFLICT DO NOTHING",
                        )
                        .bind("bench")
                        .bind(attribute(SOURCE))
                        .bind(&id)
                        .execute(&mut *tx)
                        .await?;
                        if claimed.rows_affected() == 1 {
                            insert(&mut tx, &id, message.body.unwrap_or_default().as_bytes()).await?;
                        }
                        tx.commit().await?;
                        done.fetch_add(1, Relaxed);
                        let deletion = DeleteMessageBatchRequestEntry::builder()
                            .id(n.to_string())
                            .set_receipt_handle(message.receipt_handle)
                            .build()?;
                        deletions.push(deletion);
                    }
                    if !deletions.is_empty() {
                        let call = sqs.delete_message_batch().queue_url(&queue);
                        call.set_entries(Some(deletions)).send().await?;
                    }
                }
            });
        }
        let last = until(done, self.events).await;
        stop.cancel();
        while let Some(ended) = tasks.join_next().await {
            ended??;
        }
        Ok(last)
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

    async fn filled_queue(&self) -> Result<String, BoxError> {
        let name = format!("bench-{:08x}", std::process::id());
        let created = self.sqs.create_queue().queue_name(name).send().await?;
        let queue = created.queue_url.ok_or("a queue without a URL")?;
        let numbers: Vec<u64> = (0..self.events).collect();
        let mut sending = tokio::task::JoinSet::new();
        for ten in numbers.chunks(10) {
            let entries: Result<Vec<_>, BoxError> = ten.iter().map(|n| entry(*n)).collect();
            let call = self.sqs.send_message_batch().queue_url(&queue);
            let call = call.set_entries(Some(entries?));
            sending.spawn(async move { call.send().await });
            if sending.len() >= 8
                && let Some(sent) = sending.join_next().await
            {
                all_sent(&sent??)?;
            }
        }
        while let Some(sent) = sending.join_next().await {
            all_sent(&sent??)?;
        }
        Ok(queue)
    }
}

fn entry(n: u64) -> Result<SendMessageBatchRequestEntry, BoxError> {
    // Spread over the index as random ids are; an odd factor gives each number once.
    let id = format!("evt_{:016x}", n.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let text = |value: &str| {
        MessageAttributeValue::builder()
            .data_type("String")
            .string_value(value)
            .build()
    };
    Ok(SendMessageBatchRequestEntry::builder()
        .id((n % 10).to_string())
        .message_body(BODY)
        .message_attributes(ID, text(&id)?)
        .message_attributes(SOURCE, text("bench")?)
        .build()?)
}

fn all_sent(
    sent: &aws_sdk_sqs::operation::send_message_batch::SendMessageBatchOutput,
) -> Result<(), BoxError> {
    match sent.failed.first() {
        None => Ok(()),
        Some(failed) => Err(format!("a message was not sent: {}", failed.code).into()),
    }
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

#[async_trait]
impl BatchHandler<Postgres> for Insert {
    type Payload = Bytes;

    async fn handle(
        &self,
        cx: &mut BatchContext<'_, Postgres>,
        events: Vec<Event<Bytes>>,
    ) -> Result<(), HandlerError> {
        let ids: Vec<&str> = events.iter().map(|event| event.identity.id.as_str()).collect();
        let bodies: Vec<&[u8]> = events.iter().map(|event| event.payload.as_ref()).collect();
        sqlx::query(
            "INSERT INTO bench.effects (event_id, body) SELECT * FROM unnest($1::text[], $2::bytea[])",
        )
        .bind(ids)
        .bind(bodies)
        .execute(cx.tx())
        .await?;
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
