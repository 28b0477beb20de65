//! Chaos: worker processes of one group are killed, restarted in turn, and joined by one that comes and
//! goes; in the end the ledger holds each event once, each key in its order.
//!
//! ```sh
//! scripts/services up kafka postgres && eval "$(scripts/services env kafka postgres)"
//! cargo run -p onlyonce-kafka --example chaos -- --kills 200          # SIGKILL, over and over
//! cargo run -p onlyonce-kafka --example chaos -- --joins 60           # a member that comes and goes every 2 s
//! cargo run -p onlyonce-kafka --example chaos -- --rolling 3          # SIGTERM, one after another
//! cargo run -p onlyonce-kafka --example chaos -- --crashes 5          # SIGKILL for the broker
//! ```
//!
//! The program is its own worker: it starts copies of itself with the argument `worker`. The ledger has
//! no unique index, so that an event applied twice would show; each effect notes what its key had before,
//! so that one out of order would. Meanwhile the group's committed offsets are watched: none may go back.
#![allow(clippy::print_stdout)]

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use onlyonce::store::Operations;
use onlyonce::store::postgres::PostgresOptions;
use onlyonce::{Consumer, Context, Event, Handler, HandlerError, Json, async_trait};
use onlyonce_kafka::{Kafka, StartAt};
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::{ClientConfig, TopicPartitionList};
use sqlx::{PgPool, Postgres};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

const PARTITIONS: i32 = 6;
const KEYS: u64 = 60;
const LANES: usize = 8;
/// A member that dies is missed after so long, unless it comes back under its own name.
const SESSION: &str = "6000";
const SCHEMA: &str = "kafka_chaos";
/// How long the last events may take when nothing disturbs any more.
const END: Duration = Duration::from_secs(120);

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    let mut args = std::env::args().skip(1);
    if let Some("worker") = args.next().as_deref() {
        worker().await?;
        return Ok(ExitCode::SUCCESS);
    }
    let options = Options::from_args()?;
    println!("{options:?}");
    let verdict = Run::prepare(options).await?.carry_out().await?;
    println!("{verdict:#?}");
    let good = verdict.is_good();
    println!(
        "{}",
        if good {
            "nothing lost, nothing doubled, nothing out of order"
        } else {
            "BROKEN"
        }
    );
    Ok(if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

#[derive(Debug, Clone)]
struct Options {
    kills: u32,
    joins: u32,
    rolling: u32,
    crashes: u32,
    /// Events a second.
    rate: u64,
    workers: usize,
    strategy: String,
    seed: u64,
}

impl Options {
    fn from_args() -> anyhow::Result<Self> {
        let mut options = Self {
            kills: 0,
            joins: 0,
            rolling: 0,
            crashes: 0,
            rate: 300,
            workers: 3,
            strategy: "cooperative-sticky".to_owned(),
            seed: std::time::UNIX_EPOCH.elapsed()?.as_secs(),
        };
        let mut args = std::env::args().skip(1);
        while let Some(arg) = args.next() {
            if arg == "--eager" {
                options.strategy = "range".to_owned();
                continue;
            }
            let number = args.next().with_context(|| format!("{arg} needs a number"))?;
            match arg.as_str() {
                "--kills" => options.kills = number.parse()?,
                "--joins" => options.joins = number.parse()?,
                "--rolling" => options.rolling = number.parse()?,
                "--crashes" => options.crashes = number.parse()?,
                "--rate" => options.rate = number.parse()?,
                "--workers" => options.workers = number.parse()?,
                "--seed" => options.seed = number.parse()?,
                _ => bail!(
                    "{arg} is not an option (--kills, --joins, --rolling, --crashes, --rate, --workers, --seed, --eager)"
                ),
            }
        }
        Ok(options)
    }
}

/// What was found in the end; all but the first have to be 0.
#[derive(Debug)]
struct Verdict {
    sent: u64,
    lost: u64,
    doubled: u64,
    out_of_order: u64,
    /// Held or dead in the inbox; no handler fails here.
    held: u64,
    /// Committed offsets that went back.
    went_back: u64,
    /// Workers that ended with an error.
    failed: u64,
}

impl Verdict {
    fn is_good(&self) -> bool {
        self.sent > 0
            && [
                self.lost,
                self.doubled,
                self.out_of_order,
                self.held,
                self.went_back,
                self.failed,
            ] == [0; 6]
    }
}

/// One run: everything that takes part in it.
struct Run {
    options: Options,
    brokers: String,
    topic: String,
    pool: PgPool,
    admin: AdminClient<DefaultClientContext>,
    logs: PathBuf,
    started: Instant,
}

impl Run {
    async fn prepare(options: Options) -> anyhow::Result<Self> {
        let (brokers, postgres) = (
            required("ONLYONCE_KAFKA_BROKERS")?,
            required("ONLYONCE_POSTGRES_URL")?,
        );
        let pool = PgPool::connect(&postgres).await?;
        sqlx::raw_sql("DROP SCHEMA IF EXISTS kafka_chaos CASCADE")
            .execute(&pool)
            .await?;
        store(&postgres)?.migrate().await?;
        sqlx::raw_sql(
            "CREATE TABLE kafka_chaos.ledger (key text NOT NULL, seq bigint NOT NULL, before bigint NOT NULL);
             CREATE INDEX ON kafka_chaos.ledger (key, seq)",
        )
        .execute(&pool)
        .await?;
        let admin: AdminClient<DefaultClientContext> =
            ClientConfig::new().set("bootstrap.servers", &brokers).create()?;
        let topic = format!("chaos-{}", std::time::UNIX_EPOCH.elapsed()?.as_millis());
        let new = NewTopic::new(&topic, PARTITIONS, TopicReplication::Fixed(1));
        for created in admin.create_topics([&new], &AdminOptions::new()).await? {
            created.map_err(|(topic, code)| anyhow::anyhow!("{topic}: {code}"))?;
        }
        let logs = std::env::temp_dir().join(&topic);
        std::fs::create_dir_all(&logs)?;
        println!("logs in {}", logs.display());
        Ok(Self {
            options,
            brokers,
            topic,
            pool,
            admin,
            logs,
            started: Instant::now(),
        })
    }

    async fn carry_out(self) -> anyhow::Result<Verdict> {
        fastrand::seed(self.options.seed);
        let quiet = CancellationToken::new();
        let over = CancellationToken::new();
        let watching = tokio::task::spawn_blocking({
            let (brokers, topic, over) = (self.brokers.clone(), self.topic.clone(), over.clone());
            move || watch_offsets(&brokers, &topic, &over)
        });
        let producing = tokio::spawn(produce(
            self.brokers.clone(),
            self.topic.clone(),
            self.options.rate,
            quiet.clone(),
        ));
        let mut crew = Vec::new();
        for number in 0..self.options.workers {
            crew.push(self.spawn(&format!("worker-{number}"), true)?);
        }
        let mut failed = self.disturb(&mut crew).await?;
        quiet.cancel();
        let sent = producing.await??;
        self.settle(sent).await?;
        for worker in &mut crew {
            failed += u64::from(!terminate(worker).await?);
        }
        // The last commits are those of the goodbyes.
        sleep(Duration::from_millis(500)).await;
        over.cancel();
        let went_back = watching.await??;
        let verdict = self.judge(sent, went_back, failed).await?;
        self.admin
            .delete_topics(&[&self.topic], &AdminOptions::new())
            .await?;
        Ok(verdict)
    }

    /// A static member is missed by nobody while it is restarted; another leaves the group when it stops.
    fn spawn(&self, name: &str, fixed: bool) -> anyhow::Result<Child> {
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(self.logs.join(format!("{name}.log")))?;
        let mut command = Command::new(std::env::current_exe()?);
        command
            .arg("worker")
            .env("CHAOS_TOPIC", &self.topic)
            .env("CHAOS_STRATEGY", &self.options.strategy)
            .env("CHAOS_MEMBER", if fixed { name } else { "" })
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .kill_on_drop(true);
        Ok(command.spawn()?)
    }

    async fn disturb(&self, crew: &mut [Child]) -> anyhow::Result<u64> {
        // Until everybody has something to lose.
        sleep(Duration::from_secs(3)).await;
        let mut failed = 0;
        for kill in 1..=self.options.kills {
            let at = fastrand::usize(..crew.len());
            crew[at].kill().await?;
            crew[at] = self.spawn(&format!("worker-{at}"), true)?;
            sleep(Duration::from_millis(fastrand::u64(100..1200))).await;
            if kill % 20 == 0 {
                println!(
                    "{:>4} s  {kill} kills, {} applied",
                    self.started.elapsed().as_secs(),
                    self.applied().await?
                );
            }
        }
        for round in 1..=self.options.rolling {
            for (at, worker) in crew.iter_mut().enumerate() {
                failed += u64::from(!terminate(worker).await?);
                *worker = self.spawn(&format!("worker-{at}"), true)?;
                sleep(Duration::from_secs(2)).await;
            }
            println!(
                "{:>4} s  {round} rolling restarts, {} applied",
                self.started.elapsed().as_secs(),
                self.applied().await?
            );
        }
        for join in 1..=self.options.joins {
            let mut guest = self.spawn("guest", false)?;
            sleep(Duration::from_secs(2)).await;
            failed += u64::from(!terminate(&mut guest).await?);
            if join % 10 == 0 {
                println!(
                    "{:>4} s  {join} joins, {} applied",
                    self.started.elapsed().as_secs(),
                    self.applied().await?
                );
            }
        }
        for crash in 1..=self.options.crashes {
            services(&["kill", "kafka"]).await?;
            services(&["up", "kafka"]).await?;
            sleep(Duration::from_secs(10)).await;
            println!(
                "{:>4} s  {crash} crashes of the broker, {} applied",
                self.started.elapsed().as_secs(),
                self.applied().await?
            );
        }
        Ok(failed)
    }

    /// Waits until everything that was sent has been applied.
    async fn settle(&self, sent: u64) -> anyhow::Result<()> {
        let until = Instant::now() + END;
        while self.applied().await? < sent && Instant::now() < until {
            sleep(Duration::from_millis(250)).await;
        }
        // What would come too often comes now.
        sleep(Duration::from_secs(2)).await;
        Ok(())
    }

    async fn applied(&self) -> anyhow::Result<u64> {
        self.number("SELECT count(*) FROM kafka_chaos.ledger").await
    }

    async fn number(&self, sql: &'static str) -> anyhow::Result<u64> {
        let number: i64 = sqlx::query_scalar(sql).fetch_one(&self.pool).await?;
        Ok(number.try_into()?)
    }

    async fn judge(&self, sent: u64, went_back: u64, failed: u64) -> anyhow::Result<Verdict> {
        let distinct = self
            .number("SELECT count(*) FROM (SELECT DISTINCT key, seq FROM kafka_chaos.ledger) AS events")
            .await?;
        Ok(Verdict {
            sent,
            lost: sent.saturating_sub(distinct),
            doubled: self.applied().await? - distinct,
            out_of_order: self
                .number("SELECT count(*) FROM kafka_chaos.ledger WHERE before <> seq - 1")
                .await?,
            held: self
                .number("SELECT count(*) FROM kafka_chaos.inbox WHERE state IN ('ready', 'running', 'dead')")
                .await?,
            went_back,
            failed,
        })
    }
}

async fn services(args: &[&str]) -> anyhow::Result<()> {
    let done = Command::new(required("ONLYONCE_SERVICES")?)
        .args(args)
        .stderr(Stdio::null())
        .status()
        .await?;
    ensure!(done.success(), "scripts/services {args:?} failed");
    Ok(())
}

/// Whether it ended in good order.
async fn terminate(worker: &mut Child) -> anyhow::Result<bool> {
    let pid = worker.id().context("a worker has ended by itself")?.to_string();
    let told = Command::new("kill").args(["-TERM", &pid]).status().await?;
    ensure!(told.success(), "SIGTERM did not reach {pid}");
    let ended = tokio::time::timeout(Duration::from_secs(60), worker.wait()).await;
    Ok(ended.context("a worker does not stop")??.success())
}

/// Numbers each key's events from 1 and publishes them at a steady rate; how many, in the end.
async fn produce(brokers: String, topic: String, rate: u64, quiet: CancellationToken) -> anyhow::Result<u64> {
    const TICK: Duration = Duration::from_millis(50);
    let producer: FutureProducer = ClientConfig::new()
        .set("bootstrap.servers", &brokers)
        .set("enable.idempotence", "true")
        .create()?;
    let mut last: HashMap<u64, u64> = HashMap::new();
    let mut sent = 0;
    let mut tick = tokio::time::interval(TICK);
    while !quiet.is_cancelled() {
        tick.tick().await;
        let mut deliveries = Vec::new();
        for _ in 0..(rate * TICK.as_millis() as u64 / 1000).max(1) {
            let key = fastrand::u64(..KEYS);
            let seq = last.entry(key).or_default();
            *seq += 1;
            let (key, id) = (format!("key-{key}"), format!("key-{key}.{seq}"));
            let body = format!(r#"{{"key":"{key}","seq":{seq}}}"#);
            let headers = OwnedHeaders::new()
                .insert(Header {
                    key: "onlyonce-event-id",
                    value: Some(&id),
                })
                .insert(Header {
                    key: "onlyonce-event-source",
                    value: Some("chaos"),
                });
            let record = FutureRecord::to(&topic).key(&key).payload(&body).headers(headers);
            deliveries.push(producer.send_result(record).map_err(|(error, _)| error)?);
            sent += 1;
        }
        for delivery in deliveries {
            delivery.await?.map_err(|(error, _)| error)?;
        }
    }
    Ok(sent)
}

/// How often a committed offset was lower than before.
fn watch_offsets(brokers: &str, topic: &str, over: &CancellationToken) -> anyhow::Result<u64> {
    let client: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("group.id", topic)
        .create()?;
    let mut partitions = TopicPartitionList::new();
    partitions.add_partition_range(topic, 0, PARTITIONS - 1);
    let (mut last, mut went_back, mut looks) = (BTreeMap::new(), 0, 0);
    while !over.is_cancelled() {
        // While the coordinator is busy it may not answer; the next look sees more.
        if let Ok(committed) = client.committed_offsets(partitions.clone(), Duration::from_secs(5)) {
            looks += 1;
            for element in committed.elements() {
                let offset = element.offset().to_raw().unwrap_or(-1);
                if let Some(before) = last.insert(element.partition(), offset)
                    && offset < before
                {
                    println!(
                        "partition {}: committed {offset} after {before}",
                        element.partition()
                    );
                    went_back += 1;
                }
            }
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    ensure!(looks > 0, "the committed offsets were never seen");
    println!("committed in the end: {last:?}, seen {looks} times");
    Ok(went_back)
}

#[derive(serde::Deserialize)]
struct Step {
    key: String,
    seq: i64,
}

struct Ledger;

#[async_trait]
impl Handler<Postgres> for Ledger {
    type Payload = Json<Step>;

    async fn handle(
        &self,
        cx: &mut Context<'_, Postgres>,
        event: Event<Json<Step>>,
    ) -> Result<(), HandlerError> {
        let Json(step) = event.payload;
        let before: i64 =
            sqlx::query_scalar("SELECT coalesce(max(seq), 0) FROM kafka_chaos.ledger WHERE key = $1")
                .bind(&step.key)
                .fetch_one(&mut *cx.tx())
                .await?;
        // Long enough to be killed in.
        sleep(Duration::from_millis(2)).await;
        sqlx::query("INSERT INTO kafka_chaos.ledger (key, seq, before) VALUES ($1, $2, $3)")
            .bind(&step.key)
            .bind(step.seq)
            .bind(before)
            .execute(cx.tx())
            .await?;
        Ok(())
    }
}

async fn worker() -> anyhow::Result<()> {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(std::env::var("RUST_LOG").unwrap_or_else(|_| "info".to_owned()))
        .init();
    let topic = required("CHAOS_TOPIC")?;
    let mut source = Kafka::group(required("ONLYONCE_KAFKA_BROKERS")?, &topic)
        .topic(&topic)
        .start_at(StartAt::Earliest)
        .set("session.timeout.ms", SESSION)
        .set("heartbeat.interval.ms", "500")
        .set("partition.assignment.strategy", required("CHAOS_STRATEGY")?);
    if let Ok(member) = required("CHAOS_MEMBER") {
        source = source.static_member(member);
    }
    let consumer = Consumer::builder("chaos", store(&required("ONLYONCE_POSTGRES_URL")?)?)
        .source(source.build()?)
        .handler(Ledger)
        .lanes(LANES)
        .build()?;
    let mut terminated = signal(SignalKind::terminate())?;
    consumer
        .run_until(async move {
            terminated.recv().await;
        })
        .await?;
    Ok(())
}

fn store(postgres: &str) -> anyhow::Result<onlyonce::store::PostgresStore> {
    Ok(PostgresOptions::new(postgres)
        .schema(SCHEMA)
        .max_connections(LANES as u32 + 8)
        .connect()?)
}

fn required(name: &str) -> anyhow::Result<String> {
    std::env::var(name)
        .ok()
        .filter(|value| !value.is_empty())
        .with_context(|| format!("{name} is not set (eval \"$(scripts/services env)\")"))
}
