//! A worker: two consumers and the relay between them under one supervisor, as a user would write it, with short times.

use std::time::Duration;

use onlyonce::outbox::OutgoingEvent;
use onlyonce::store::PostgresStore;
use onlyonce::store::postgres::PostgresOptions;
use onlyonce::testing::crash_from_env;
use onlyonce::{
    Consumer, Context, Event, Handler, HandlerError, Json, Relay, RetryPolicy, Supervisor, async_trait,
};
use onlyonce_kafka::{Kafka, KafkaPublisher, StartAt};
use onlyonce_rabbitmq::RabbitMq;
use onlyonce_testbed::chaos::variable;
use onlyonce_testbed::processes::{end_with_the_runner, logs_to_stderr};
use sqlx::{AssertSqlSafe, Postgres};
use tokio::signal::unix::{SignalKind, signal};

use crate::payment::{Captured, Payment};

/// What a dead process had leased is free again after this.
const LEASE: Duration = Duration::from_secs(2);
const LANES: usize = 3;

/// Takes payments from RabbitMQ.
struct Capture {
    insert: String,
    topic: String,
}

#[async_trait]
impl Handler<Postgres> for Capture {
    type Payload = Json<Payment>;

    async fn handle(
        &self,
        cx: &mut Context<'_, Postgres>,
        event: Event<Json<Payment>>,
    ) -> Result<(), HandlerError> {
        let (Json(payment), attempt) = (event.payload, cx.attempt());
        sqlx::query(AssertSqlSafe(self.insert.as_str()))
            .bind(&payment.id)
            .bind(payment.cents)
            .execute(cx.tx())
            .await?;
        let captured = Captured {
            payment: payment.id,
            cents: payment.cents,
            attempt,
        };
        let captured = OutgoingEvent::json(format!("kafka:{}", self.topic), "payment.captured", &captured)?;
        cx.outbox().send(captured.key(payment.account))?;
        pause().await;
        if payment.fails && attempt == 1 {
            return Err("fails on purpose".into());
        }
        Ok(())
    }
}

/// Takes captured payments from Kafka.
struct Book {
    insert: String,
}

#[async_trait]
impl Handler<Postgres> for Book {
    type Payload = Json<Captured>;

    async fn handle(
        &self,
        cx: &mut Context<'_, Postgres>,
        event: Event<Json<Captured>>,
    ) -> Result<(), HandlerError> {
        let Json(captured) = event.payload;
        sqlx::query(AssertSqlSafe(self.insert.as_str()))
            .bind(captured.payment)
            .bind(captured.cents)
            .bind(captured.attempt as i32)
            .execute(cx.tx())
            .await?;
        pause().await;
        Ok(())
    }
}

/// Time for something to happen in the middle of it.
async fn pause() {
    tokio::time::sleep(Duration::from_millis(fastrand::u64(0..15))).await;
}

/// Runs until SIGTERM, or until it is killed, or until a crash point named by `ONLYONCE_CRASH`.
pub(crate) async fn run() -> anyhow::Result<()> {
    logs_to_stderr();
    end_with_the_runner();
    let name = variable("E2E_NAME")?;
    let store = PostgresOptions::new(variable("ONLYONCE_POSTGRES_URL")?)
        .schema(&name)
        .max_connections(2 * (LANES as u32 + 1) + 1 + 2)
        .connect()?;
    let brokers = variable("ONLYONCE_KAFKA_BROKERS")?;

    let capture = consumer("capture", &store)
        .source(
            RabbitMq::queue(variable("ONLYONCE_RABBITMQ_URL")?, &name)
                .heartbeat(Duration::from_secs(2))
                .connect_timeout(Duration::from_secs(3))
                .build()?,
        )
        .handler(Capture {
            insert: format!("INSERT INTO {name}.captured VALUES ($1, $2)"),
            topic: name.clone(),
        })
        .build()?;
    let relay = Relay::builder(store.clone())
        .publisher(
            "kafka",
            KafkaPublisher::to(&brokers)
                .patience(Duration::from_secs(8))
                .build()?,
        )
        .lease(LEASE)
        .poll(Duration::from_millis(200))
        .build()?;
    let book = consumer("book", &store)
        .source(
            Kafka::group(&brokers, &name)
                .topic(&name)
                .start_at(StartAt::Earliest)
                .static_member(variable("E2E_MEMBER")?)
                .set("session.timeout.ms", "6000")
                .set("heartbeat.interval.ms", "500")
                .build()?,
        )
        .handler(Book {
            insert: format!("INSERT INTO {name}.booked VALUES ($1, $2, $3)"),
        })
        .build()?;

    let supervisor = Supervisor::builder()
        .consumer(capture)
        .relay(relay)
        .consumer(book)
        .build()?;
    let mut terminated = signal(SignalKind::terminate())?;
    supervisor
        .run_until(async move {
            terminated.recv().await;
        })
        .await?;
    Ok(())
}

fn consumer(name: &str, store: &PostgresStore) -> onlyonce::consumer::ConsumerBuilder<PostgresStore> {
    Consumer::builder(name, store.clone())
        .lanes(LANES)
        .held_lanes(1)
        .lease(LEASE)
        .handler_timeout(Duration::from_secs(5))
        .retry(
            RetryPolicy::new()
                .immediate(4)
                .delays([100, 400, 1600].map(Duration::from_millis)),
        )
        .crash_when(crash_from_env())
}
