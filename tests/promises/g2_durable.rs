//! G2: nothing is acked before it is durable, and a database that is not durable is refused.

use std::time::Duration;

use onlyonce::store::postgres::PostgresOptions;
use onlyonce::store::{Operations, PostgresStore};
use onlyonce::testing::{Broker, CrashPoint, event};
use onlyonce::{Consumer, RetryPolicy};
use tokio::sync::watch;

use crate::running::{Process, Running, built};
use crate::stage::{Act, Scripted, Stage, TestStore, postgres_url, soon};

on_each_store!(
    nothing_is_acked_before_the_commit,
    a_failed_event_is_not_acked_before_it_is_held
);

/// The process stands still, and dies, at each step up to the ack.
async fn nothing_is_acked_before_the_commit<S: TestStore>(stage: Stage<S>) {
    for (point, durable) in [
        (CrashPoint::Received, 0),
        (CrashPoint::Claimed, 0),
        (CrashPoint::Handled, 0),
        (CrashPoint::Recorded, 0),
        (CrashPoint::Committed, 1),
        (CrashPoint::Settling, 1),
    ] {
        let name = format!("c-{}", point.as_str());
        let id = point.as_str();
        let broker = Broker::new();
        broker.publish(event(id, "1"));
        let (handler, _) = Scripted::applies(&stage);
        let process = dies_at(&stage, &name, &broker, handler, point).await;

        assert_eq!(broker.stats().acked, 0, "{id}");
        assert_eq!(stage.processed(&name).await.len(), durable, "{id}");
        assert_eq!(stage.effects().await.contains_key(id), durable == 1, "{id}");
        process.die();

        let (handler, runs) = Scripted::applies(&stage);
        let next = stage.consumer(&name).handler(handler).source(broker.source());
        let next = Running::start(next);
        soon("the ack", broker.drained()).await;
        assert_eq!(runs.total() as usize, 1 - durable, "{id}");
        assert_eq!(stage.effects().await.get(id), Some(&1), "{id}");
        next.stop().await;
    }
    stage.end().await;
}

async fn a_failed_event_is_not_acked_before_it_is_held<S: TestStore>(stage: Stage<S>) {
    for (point, held) in [(CrashPoint::RolledBack, 0), (CrashPoint::Parked, 1)] {
        let name = format!("c-{}", point.as_str());
        let broker = Broker::new();
        broker.publish(event(point.as_str(), "1"));
        let (handler, _) = Scripted::new(&stage, |_, _| Act::Fail("no".into()));
        let process = dies_at(&stage, &name, &broker, handler, point).await;

        assert_eq!(broker.stats().acked, 0, "{point:?}");
        assert_eq!(stage.held().await.len(), held, "{point:?}");
        assert_eq!(stage.processed(&name).await, [], "{point:?}");
        process.die();

        let (handler, runs) = Scripted::new(&stage, |_, _| Act::Fail("no".into()));
        let next = stage.consumer(&name).handler(handler).source(broker.source());
        let next = Running::start(next);
        soon("the ack", broker.drained()).await;
        assert_eq!(
            runs.total() as usize,
            1 - held,
            "{point:?}: what is held does not run"
        );
        assert_eq!(stage.held().await.len(), 1, "{point:?}");
        next.stop().await;
        stage
            .execute("DELETE FROM {s}.inbox", "DELETE FROM onlyonce_inbox")
            .await;
    }
    stage.end().await;
}

/// A consumer of its own process that has come to this point and stands there.
async fn dies_at<S: TestStore>(
    stage: &Stage<S>,
    name: &str,
    broker: &Broker,
    handler: Scripted<S>,
    at: CrashPoint,
) -> Process {
    let (reached, mut seen) = watch::channel(false);
    let process = Process::start({
        let (open, source, name) = (S::another(stage), broker.source(), name.to_owned());
        async move {
            Consumer::builder(name, open.await)
                .source(source)
                .handler(handler)
                .retry(RetryPolicy::none())
                .crash_when(move |point| {
                    if point == at {
                        reached.send_replace(true);
                    }
                    point == at
                })
        }
    });
    soon("the crash point", seen.wait_for(|seen| *seen))
        .await
        .unwrap();
    process
}

/// Starts a consumer and lets it end by itself, as it does when it may not start or has nothing to do.
async fn start_up<S: onlyonce::store::Inbox + onlyonce::store::Outgoing + Operations>(
    store: S,
    allow: bool,
    handler: impl onlyonce::Handler<S::Db>,
) -> Result<(), String> {
    let mut consumer = Consumer::builder("c", store)
        .source(Broker::new().source())
        .handler(handler)
        .stop_when_idle(Duration::ZERO);
    if allow {
        consumer = consumer.allow_async_commit();
    }
    soon("start-up", built(consumer).run_until(std::future::pending()))
        .await
        .map_err(|e| e.to_string())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn start_up_refuses_a_role_with_asynchronous_commits() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let (role, url) = stage.role().await;
    let setting = async |value: &str| {
        let sql = format!("ALTER ROLE {role} SET synchronous_commit = {value}");
        stage.execute(&sql, "").await;
        PostgresOptions::new(&url)
            .schema(&stage.schema)
            .connect()
            .unwrap()
    };
    let store = setting("off").await;
    let refused = start_up(store.clone(), false, Scripted::applies(&stage).0)
        .await
        .unwrap_err();
    assert!(refused.contains("synchronous_commit is off"), "{refused}");
    assert!(refused.contains("allow_async_commit"), "{refused}");
    assert_eq!(start_up(store, true, Scripted::applies(&stage).0).await, Ok(()));

    // `local` and the like are durable on this server: they are nobody's business but the operator's.
    for fine in ["local", "on"] {
        let store = setting(fine).await;
        assert_eq!(
            start_up(store, false, Scripted::applies(&stage).0).await,
            Ok(()),
            "{fine}"
        );
    }
    stage.drop_role().await;
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn start_up_refuses_a_database_with_asynchronous_commits() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let url = postgres_url().unwrap();
    let database = format!("{}_db", stage.schema);
    stage.execute(&format!("CREATE DATABASE {database}"), "").await;
    stage
        .execute(
            &format!("ALTER DATABASE {database} SET synchronous_commit = off"),
            "",
        )
        .await;
    let (server, _) = url.rsplit_once('/').unwrap();
    let store = PostgresStore::connect(&format!("{server}/{database}"))
        .await
        .unwrap();
    store.migrate().await.unwrap();
    let refused = start_up(store.clone(), false, Scripted::applies(&stage).0)
        .await
        .unwrap_err();
    assert!(refused.contains("synchronous_commit is off"), "{refused}");
    assert_eq!(start_up(store, true, Scripted::applies(&stage).0).await, Ok(()));
    stage
        .execute(&format!("DROP DATABASE {database} WITH (FORCE)"), "")
        .await;
    stage.end().await;
}

/// A pool of the application's own may switch it off by a hook, where no catalogue shows it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn start_up_looks_at_the_sessions_that_handlers_get() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let url = postgres_url().unwrap();
    let database = format!("{}_db", stage.schema);
    stage.execute(&format!("CREATE DATABASE {database}"), "").await;
    let (server, _) = url.rsplit_once('/').unwrap();
    let pool = sqlx::postgres::PgPoolOptions::new()
        .after_connect(|conn, _| {
            Box::pin(async move {
                sqlx::query("SET synchronous_commit = off").execute(conn).await?;
                Ok(())
            })
        })
        .connect_lazy(&format!("{server}/{database}"))
        .unwrap();
    let store = PostgresStore::from_pool(pool);
    store.migrate().await.unwrap();
    let refused = start_up(store, false, Scripted::applies(&stage).0)
        .await
        .unwrap_err();
    assert!(refused.contains("synchronous_commit is off"), "{refused}");
    stage
        .execute(&format!("DROP DATABASE {database} WITH (FORCE)"), "")
        .await;
    stage.end().await;
}

#[cfg(feature = "sqlite")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn start_up_refuses_a_file_that_is_not_synced() {
    use onlyonce::store::SqliteStore;
    use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};

    let stage = SqliteStore::fresh().await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    for (synchronous, durable) in [
        (SqliteSynchronous::Off, false),
        (SqliteSynchronous::Normal, false),
        (SqliteSynchronous::Full, true),
        (SqliteSynchronous::Extra, true),
    ] {
        let options = SqliteConnectOptions::new()
            .filename(dir.path().join("own.db"))
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(synchronous);
        let store = SqliteStore::from_pool(SqlitePoolOptions::new().connect_lazy_with(options));
        store.migrate().await.unwrap();
        let started = start_up(store.clone(), false, Scripted::applies(&stage).0).await;
        assert_eq!(started.is_ok(), durable, "{started:?}");
        if let Err(refused) = started {
            assert!(refused.contains("synchronous is"), "{refused}");
        }
        assert_eq!(start_up(store, true, Scripted::applies(&stage).0).await, Ok(()));
    }
}
