//! A password reaches no log, no error and no Debug output, whatever goes wrong with it.

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use onlyonce::store::postgres::PostgresOptions;
use onlyonce::store::{Operations, PostgresStore};
use onlyonce::testing::Broker;
use onlyonce::{Consumer, Supervisor};
use tracing_subscriber::fmt::MakeWriter;

use crate::running::built;
use crate::stage::{Scripted, TestStore, postgres_url, soon};

/// A text that stands nowhere else, and what percent-encoding makes of it.
const MARKER: &str = "hunter2&marker";
const ENCODED: &str = "hunter2%26marker";

/// All that is logged by this thread, at any level, from any crate.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// On one thread, so that the log is this test's own.
#[tokio::test]
async fn a_password_is_never_shown() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::TRACE)
        .with_writer(log.clone())
        .finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let mut said = String::new();

    let url = postgres_url().unwrap();
    let (_, rest) = url.split_once('@').unwrap();
    let (server, database) = rest.split_once('/').unwrap();
    let user = "onlyonce";
    for (what, url, because) in [
        (
            "a wrong password",
            format!("postgres://{user}:{ENCODED}@{rest}"),
            Some("password authentication failed"),
        ),
        (
            "a password in the query",
            format!("postgres://{user}@{rest}?password={ENCODED}"),
            Some("password authentication failed"),
        ),
        (
            "no such role",
            format!("postgres://nobody_{}:{ENCODED}@{rest}", stage.schema),
            Some("password authentication failed"),
        ),
        (
            "a server without TLS",
            format!("postgres://{user}:{ENCODED}@{rest}?sslmode=require"),
            None,
        ),
        (
            "nobody listens",
            format!("postgres://{user}:{ENCODED}@127.0.0.1:1/{database}"),
            None,
        ),
        (
            "no such host",
            format!("postgres://{user}:{ENCODED}@nowhere.invalid/{database}"),
            None,
        ),
    ] {
        let store = PostgresOptions::new(&url)
            .schema(&stage.schema)
            .acquire_timeout(Duration::from_millis(300))
            .connect()
            .unwrap();
        said += &format!("{store:?} {:?}", store.migrate().await);
        let supervisor = Supervisor::builder()
            .consumer(built(
                Consumer::builder("c", store)
                    .source(Broker::new().source())
                    .handler(Scripted::applies(&stage).0),
            ))
            .build()
            .unwrap();
        let health = supervisor.health();
        said += &format!("{supervisor:?}");
        // Whoever has to change something is told at once; what may pass is waited for.
        let patience = Duration::from_millis(if because.is_some() { 20_000 } else { 1500 });
        let ended = soon(
            what,
            tokio::time::timeout(patience, supervisor.run_until(std::future::pending())),
        )
        .await;
        said += &format!("{health:?} {}", health.ready());
        match (because, ended) {
            (Some(because), Ok(ended)) => {
                let error = ended.unwrap_err();
                assert!(error.to_string().contains(because), "{what}: {error}");
                said += &format!("{error} {error:?}");
            }
            (None, Err(_)) => {}
            (_, ended) => panic!("{what}: {ended:?}"),
        }
    }
    for unreadable in [
        format!("postgres://{user}:{ENCODED}@{server}:not-a-port/{database}"),
        format!("postgres//{user}:{ENCODED}@{server}"),
        format!("postgres://{user}:{ENCODED}@[::1/{database}"),
    ] {
        let error = PostgresStore::connect(&unreadable).await.unwrap_err();
        said += &format!("{error} {error:?}");
    }

    let logged = String::from_utf8_lossy(&log.0.lock().unwrap()).into_owned();
    assert!(logged.contains("does not answer yet"), "the log was on");
    for secret in [MARKER, ENCODED] {
        for (place, text) in [("the log", &logged), ("what was said", &said)] {
            let at = text.find(secret).map(|at| &text[at.saturating_sub(300)..]);
            assert_eq!(at, None, "the password is in {place}");
        }
    }
    stage.end().await;
}
