//! An adapter's example `relay` as a process of its own, on a database of its own.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use onlyonce::Outbox;
use onlyonce::outbox::OutgoingEvent;
use onlyonce::store::postgres::PostgresOptions;
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, PgPool};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};

use crate::drive::{soon, unique};

/// A relay that runs, and the database whose outbox it publishes.
pub struct RelayExample {
    process: Child,
    /// Where it answers about its health.
    health: String,
    pool: PgPool,
    url: String,
    database: String,
    server: String,
}

impl RelayExample {
    /// Creates a database on this server, its tables by the example itself, and starts the example of the package in this
    /// directory with these variables; returns when it says that it is ready.
    ///
    /// # Panics
    ///
    /// If it does not become ready, or was not built: `cargo test` builds the examples of a package, unless it is told
    /// by name what to build.
    pub async fn start(package: &str, server: &str, variables: &[(&str, &str)]) -> Self {
        let database = unique("relay").replace('-', "_");
        let mut conn = PgConnection::connect(server).await.expect("PostgreSQL answers");
        let create = AssertSqlSafe(format!("CREATE DATABASE {database}"));
        sqlx::raw_sql(create)
            .execute(&mut conn)
            .await
            .expect("the database is created");
        let (address, _) = server.rsplit_once('/').expect("a URL that ends with a database");
        let url = format!("{address}/{database}");

        let health = free_address().await;
        let program = built_from(package);
        let example = || {
            let mut command = Command::new(&program);
            command
                .envs(variables.iter().copied())
                .env("DATABASE_URL", &url)
                .env("HEALTH_ADDR", &health)
                .stdin(Stdio::null())
                .kill_on_drop(true);
            command
        };
        let migrated = soon(example().arg("migrate").status()).await;
        assert!(migrated.expect("it starts").success(), "the tables are made");
        let relay = Self {
            process: example().spawn().expect("it starts"),
            pool: PgPool::connect_lazy(&url).expect("a URL"),
            health,
            url,
            database,
            server: server.to_owned(),
        };
        soon(relay.becomes_ready()).await;
        relay
    }

    /// Commits an event with this id, which is its body as well, for this destination.
    ///
    /// # Panics
    ///
    /// If it cannot.
    pub async fn send(&self, destination: &str, id: &str) {
        let store = PostgresOptions::new(&self.url).connect().expect("a store");
        let outbox = Outbox::new(store).source("shop");
        let event = OutgoingEvent::new(destination, "order.placed", id.to_owned()).id(id);
        let mut tx = self.pool.begin().await.expect("a transaction");
        outbox.send_in(&mut tx, event).await.expect("it is written");
        tx.commit().await.expect("it commits");
        outbox.wake();
    }

    /// Stops it by SIGTERM, and removes the database.
    ///
    /// # Panics
    ///
    /// Unless its exit code is 0 and everything was sent.
    pub async fn stop(mut self) {
        let pid = self.process.id().expect("it runs").to_string();
        let told = Command::new("kill").args(["-TERM", &pid]).status().await;
        assert!(told.expect("kill").success());
        let ended = soon(self.process.wait()).await.expect("its end");
        assert_eq!(ended.code(), Some(0), "{ended}");
        let left: i64 = sqlx::query_scalar("SELECT count(*) FROM onlyonce.outbox")
            .fetch_one(&self.pool)
            .await
            .expect("a count");
        assert_eq!(left, 0, "what was published is marked before it ends");
        self.pool.close().await;
        let drop = AssertSqlSafe(format!("DROP DATABASE {} WITH (FORCE)", self.database));
        let mut conn = PgConnection::connect(&self.server)
            .await
            .expect("PostgreSQL answers");
        sqlx::raw_sql(drop)
            .execute(&mut conn)
            .await
            .expect("the database is dropped");
    }

    async fn becomes_ready(&self) {
        while !ready(&self.health).await.unwrap_or(false) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// The newest one that was built from this package's source. Examples of all packages lie in one directory and have one
/// name there but for a hash; what belongs to which is said by the file that lists the sources.
fn built_from(package: &str) -> PathBuf {
    // Sources are listed as cargo was given them, from the workspace's root.
    let directory = Path::new(package).file_name().expect("a directory");
    let source = format!("{}/examples/relay.rs", directory.display());
    let test = std::env::current_exe().expect("a path");
    let built = test.parent().and_then(|deps| deps.parent()).expect("a directory");
    let files = std::fs::read_dir(built.join("examples")).expect("cargo test builds examples as well");
    let sources = files.map(|file| file.expect("a file").path()).filter(|path| {
        let hashed = path.file_stem().is_some_and(|name| name != "relay");
        let listed = || std::fs::read_to_string(path).is_ok_and(|listed| listed.contains(&source));
        hashed && path.extension().is_some_and(|extension| extension == "d") && listed()
    });
    let programs = sources
        .map(|sources| sources.with_extension(""))
        .filter_map(|program| {
            let changed = program.metadata().and_then(|about| about.modified()).ok()?;
            Some((changed, program))
        });
    let newest = programs.max().expect("it is built (cargo test --examples)");
    newest.1
}

async fn free_address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    listener.local_addr().expect("an address").to_string()
}

/// Whether `/ready` answers 200.
async fn ready(address: &str) -> std::io::Result<bool> {
    let mut stream = TcpStream::connect(address).await?;
    stream
        .write_all(format!("GET /ready HTTP/1.0\r\nHost: {address}\r\n\r\n").as_bytes())
        .await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer.split(' ').nth(1) == Some("200"))
}
