//! A server of the tests' own that is killed, restarted and demoted under a consumer at work.
//!
//! `ONLYONCE_SERVICES` names the script that starts it; `scripts/test` sets it.
#![allow(clippy::unwrap_used, clippy::print_stdout)]
// The stage serves other tests as well.
#![allow(dead_code, unused_macros)]

mod outbox;
#[path = "../promises/running.rs"]
mod running;
#[path = "../promises/stage.rs"]
#[macro_use]
mod stage;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use onlyonce::store::PostgresStore;
use onlyonce::testing::{Broker, event};
use onlyonce::{Consumer, RetryPolicy};
use tokio::sync::{Mutex, MutexGuard, Notify};

use running::{Running, until};
use stage::{Act, Runs, Scripted, Stage, soon};

/// One server for all tests here, one test at a time.
static SERVER: Mutex<()> = Mutex::const_new(());

struct Server {
    script: String,
    dir: PathBuf,
    url: String,
    _alone: MutexGuard<'static, ()>,
}

impl Server {
    async fn start() -> Option<Self> {
        let Ok(script) = std::env::var("ONLYONCE_SERVICES") else {
            assert!(
                std::env::var("ONLYONCE_REQUIRE_SERVICES").is_err(),
                "ONLYONCE_SERVICES is not set"
            );
            println!("skipped: ONLYONCE_SERVICES is not set (eval \"$(scripts/services env)\")");
            return None;
        };
        let mut server = Self {
            script,
            dir: Path::new(env!("CARGO_TARGET_TMPDIR")).join("outages"),
            url: String::new(),
            _alone: SERVER.lock().await,
        };
        // A test that failed leaves its server as it was: begin with a new one.
        if server.dir.exists() {
            server.services("down").await;
            std::fs::remove_dir_all(server.dir.join("postgres")).unwrap();
        }
        server.services("up").await;
        let exports = server.services("env").await;
        let url = exports
            .lines()
            .find_map(|line| line.strip_prefix("export ONLYONCE_POSTGRES_URL="));
        server.url = url.unwrap().replace(['\'', '\\'], "");
        Some(server)
    }

    /// Runs `scripts/services ACTION postgres` on our server.
    async fn services(&self, action: &'static str) -> String {
        let mut command = Command::new(&self.script);
        command
            .args([action, "postgres"])
            .env("ONLYONCE_SERVICES_DIR", &self.dir)
            .env_remove("ONLYONCE_POSTGRES_PORT");
        let output = tokio::task::spawn_blocking(move || command.output().unwrap())
            .await
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{action}: {said}");
        String::from_utf8(output.stdout).unwrap()
    }

    async fn end(self) {
        self.services("down").await;
    }
}

/// A consumer at work on twenty events, of which it has begun some. One of them is a delayed retry.
struct AtWork {
    stage: Stage<PostgresStore>,
    broker: Broker,
    runs: Arc<Runs>,
    running: Running,
    go_on: Arc<Notify>,
}

impl AtWork {
    async fn start(server: &Server) -> Self {
        let stage = Stage::at(&server.url).await;
        let broker = Broker::new();
        let go_on = Arc::new(Notify::new());
        let (handler, runs) = Scripted::new(&stage, {
            let go_on = go_on.clone();
            move |run, event| match (event.identity.id.as_str(), run) {
                ("retried", 1) => Act::Fail("no".into()),
                ("e5" | "e6", 1) => Act::Wait(go_on.clone()),
                _ => Act::Apply,
            }
        });
        let consumer = Consumer::builder("c", stage.store.clone())
            .source(broker.source())
            .handler(handler)
            .lanes(3)
            .retry(RetryPolicy::none().delays([Duration::from_secs(1)]));
        let running = Running::start(consumer);
        broker.publish(event("retried", "1"));
        for event in stage::events(20) {
            broker.publish(event);
        }
        runs.until_waiting(2).await;
        Self {
            stage,
            broker,
            runs,
            running,
            go_on,
        }
    }

    async fn not_ready(&self, because: &str) {
        until(&format!("a reason with {because:?}"), async || {
            self.running.health.ready().to_string().contains(because)
        })
        .await;
        assert!(self.running.health.live().ok);
    }

    /// All is applied once, and no failure was counted but the one of the handler's own.
    async fn finish(self) {
        soon("the acks", self.broker.drained()).await;
        until("the retry", async || self.stage.held().await.is_empty()).await;
        let effects = self.stage.effects().await;
        assert_eq!(effects.len(), 21);
        assert!(effects.values().all(|n| *n == 1), "{effects:?}");
        for n in 0..20 {
            let attempts = self.runs.attempts_of(&format!("e{n}"));
            assert!(attempts.iter().all(|attempt| *attempt == 1), "e{n}: {attempts:?}");
        }
        let retried = self.runs.attempts_of("retried");
        assert!(
            retried[0] == 1 && retried[1..].iter().all(|n| *n == 2),
            "{retried:?}"
        );
        assert_eq!(self.broker.stats().released, 0, "what is in hand is kept");
        until("readiness", async || self.running.health.ready().ok).await;
        self.running.stop().await;
        self.stage.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_of_the_server_loses_nothing_and_counts_for_nobody() {
    let Some(server) = Server::start().await else {
        return;
    };
    let work = AtWork::start(&server).await;
    server.services("kill").await;
    work.go_on.notify_waiters();
    work.not_ready("paused").await;
    server.services("up").await;
    work.finish().await;
    server.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_of_the_server_loses_nothing_and_counts_for_nobody() {
    let Some(server) = Server::start().await else {
        return;
    };
    let work = AtWork::start(&server).await;
    server.services("restart").await;
    work.go_on.notify_waiters();
    work.finish().await;
    server.end().await;
}

/// The primary comes back as a standby: it answers, and takes no writes until it is promoted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_became_a_standby_is_waited_for() {
    let Some(server) = Server::start().await else {
        return;
    };
    let work = AtWork::start(&server).await;
    server.services("down").await;
    std::fs::write(server.dir.join("postgres/data/standby.signal"), "").unwrap();
    server.services("up").await;
    work.go_on.notify_waiters();
    work.not_ready("recovery").await;

    // A consumer that starts meanwhile waits as well.
    let (handler, late) = Scripted::applies(&work.stage);
    let broker = Broker::new();
    broker.publish(event("late", "1"));
    let starting = work
        .stage
        .consumer("late")
        .source(broker.source())
        .handler(handler);
    let starting = Running::start(starting);
    until("its reason", async || {
        starting.health.ready().to_string().contains("recovery")
    })
    .await;
    assert_eq!(broker.stats().delivered, 0);

    work.stage.execute("SELECT pg_promote()", "").await;
    soon("the late ack", broker.drained()).await;
    assert_eq!(late.attempts_of("late"), [1]);
    starting.stop().await;
    work.stage
        .execute("DELETE FROM {s}.effects WHERE id = 'late'", "")
        .await;
    work.finish().await;
    server.end().await;
}

/// How much the server writes ahead for one event whose handler inserts a row: the claim, the row, both
/// with their indexes, and the commit. It was 519 bytes when this was written.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_costs_less_than_a_kilobyte_of_wal() {
    const EVENTS: usize = 2000;
    let Some(server) = Server::start().await else {
        return;
    };
    let stage = Stage::at(&server.url).await;
    let mut eyes = <sqlx::PgConnection as sqlx::Connection>::connect(&server.url)
        .await
        .unwrap();
    // Without whole pages after the next checkpoint, which say more of the clock than of the events.
    sqlx::raw_sql("ALTER SYSTEM SET full_page_writes = off")
        .execute(&mut eyes)
        .await
        .unwrap();
    sqlx::raw_sql("ALTER SYSTEM SET autovacuum = off")
        .execute(&mut eyes)
        .await
        .unwrap();
    sqlx::raw_sql("SELECT pg_reload_conf()")
        .execute(&mut eyes)
        .await
        .unwrap();
    sqlx::raw_sql("CHECKPOINT").execute(&mut eyes).await.unwrap();
    let mut written = async || -> i64 {
        sqlx::query_scalar("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint")
            .fetch_one(&mut eyes)
            .await
            .unwrap()
    };
    let (handler, _) = Scripted::applies(&stage);
    let broker = Broker::new();
    for event in stage::events(EVENTS) {
        broker.publish(event);
    }
    let before = written().await;
    let consumer = Consumer::builder("c", stage.store.clone())
        .source(broker.source())
        .handler(handler)
        .lanes(4);
    let running = Running::start(consumer);
    soon("the acks", broker.drained()).await;
    let each = (written().await - before) / EVENTS as i64;
    running.stop().await;
    assert_eq!(stage.effects().await.len(), EVENTS);
    println!("{each} bytes of WAL an event");
    assert!((300..1000).contains(&each), "{each} bytes of WAL an event");
    server.end().await;
}
