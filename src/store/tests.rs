//! What a relay asks of a store, on each of them: lanes, what is due, marks and fences, plans.

use std::time::Duration;

use sqlx::{AssertSqlSafe, PgPool, SqlitePool};
use uuid::Uuid;

use crate::outbox::Wake;

use super::{
    DueRequest, Heard, HeldLane, LANES, Operations, OutgoingBacklog, Refusal, Relaying, UnreadableRow, Waking,
};

/// A store with eyes of its own.
struct Bench<S> {
    store: S,
    eyes: Eyes,
}

enum Eyes {
    Postgres(PgPool, String),
    Sqlite(SqlitePool, tempfile::TempDir),
}
async fn postgres() -> Option<Bench<super::PostgresStore>> {
    let Ok(url) = std::env::var("ONLYONCE_POSTGRES_URL") else {
        assert!(
            std::env::var("ONLYONCE_REQUIRE_SERVICES").is_err(),
            "ONLYONCE_POSTGRES_URL is not set"
        );
        return None;
    };
    let schema = format!("t_{:016x}", fastrand::u64(..));
    let options = super::postgres::PostgresOptions::new(&url).schema(&schema);
    let store = options.connect().unwrap();
    store.migrate().await.unwrap();
    let eyes = Eyes::Postgres(PgPool::connect(&url).await.unwrap(), schema);
    Some(Bench { store, eyes })
}
async fn sqlite() -> Option<Bench<super::SqliteStore>> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("test.db");
    let store = super::SqliteStore::connect(path.to_str().unwrap()).await.unwrap();
    store.migrate().await.unwrap();
    let eyes = SqlitePool::connect(path.to_str().unwrap()).await.unwrap();
    Some(Bench {
        store,
        eyes: Eyes::Sqlite(eyes, dir),
    })
}

/// Makes one test for each store of each function.
macro_rules! on_each_store {
    ($($name:ident),* $(,)?) => {
        mod on_postgres {
            $(#[tokio::test]
            async fn $name() {
                if let Some(bench) = super::postgres().await {
                    super::$name(&bench).await;
                    bench.end().await;
                }
            })*
        }
        mod on_sqlite {
            $(#[tokio::test]
            async fn $name() {
                if let Some(bench) = super::sqlite().await {
                    super::$name(&bench).await;
                    bench.end().await;
                }
            })*
        }
    };
}

on_each_store!(
    lanes_are_shared_by_those_who_live,
    what_was_given_up_is_left_alone_for_a_while,
    a_lane_whose_lease_is_over_is_taken_with_a_higher_fence,
    what_is_due_comes_by_id_and_within_its_limits,
    what_waits_holds_the_later_rows_of_its_key,
    refusals_are_fenced_and_counted,
    sent_rows_are_deleted_or_kept,
    what_cannot_be_read_is_told,
    what_is_missing_is_named,
);

const LEASE: Duration = Duration::from_secs(60);

/// A row to be written: number, lane, key, and more columns with their values.
type Row<'a> = (i64, u8, Option<u8>, &'a str);

impl<S: Relaying + Operations> Bench<S> {
    async fn sql(&self, sql: &str) {
        match &self.eyes {
            Eyes::Postgres(pool, schema) => {
                let sql = sql
                    .replace("{t}", &format!("{schema}."))
                    .replace("{now}", "now()")
                    .replace("{second}", "interval '1 second'")
                    .replace("{x}", "'\\x");
                sqlx::raw_sql(AssertSqlSafe(sql)).execute(pool).await.unwrap();
            }
            Eyes::Sqlite(pool, _) => {
                let sql = sql
                    .replace("{t}", "onlyonce_")
                    .replace("{now}", "CAST(unixepoch('subsec') * 1000000 AS INTEGER)")
                    .replace("{second}", "1000000")
                    .replace("{x}", "x'")
                    .replace("OVERRIDING SYSTEM VALUE ", "");
                sqlx::raw_sql(AssertSqlSafe(sql)).execute(pool).await.unwrap();
            }
        }
    }

    async fn rows(&self, rows: &[Row<'_>]) {
        for (id, lane, key, more) in rows {
            let hash = key.map_or("NULL".to_owned(), |key| {
                format!("{{x}}{}'", format!("{key:02x}").repeat(16))
            });
            let (columns, values) = more
                .split_once('=')
                .map_or((String::new(), String::new()), |(c, v)| {
                    (format!(", {c}"), format!(", {v}"))
                });
            self.sql(&format!(
                "INSERT INTO {{t}}outbox (id, relay, event_id, source, destination, key_hash, lane, payload, headers, \
                 attributes, mode{columns}) OVERRIDING SYSTEM VALUE VALUES ({id}, 'r', 'e{id}', 's', 'memory:a', {hash}, \
                 {lane}, {{x}}00112233445566778899', {{x}}01', {{x}}01', 'binary'{values})"
            ))
            .await;
        }
    }

    async fn hold(&self, owner: Uuid) -> Vec<HeldLane> {
        self.store.hold_lanes("r", owner, LEASE).await.unwrap()
    }

    async fn due(&self, request: DueRequest<'_>) -> Vec<i64> {
        let rows = self.store.due(&request).await.unwrap();
        rows.into_iter().map(|row| row.unwrap().id).collect()
    }

    /// Every lease is over.
    async fn time_passes(&self) {
        self.sql("UPDATE {t}outbox_lanes SET leased_until = {now} - {second}")
            .await;
    }

    async fn end(self) {
        match self.eyes {
            Eyes::Postgres(pool, schema) => {
                let drop = format!("DROP SCHEMA {schema} CASCADE");
                sqlx::raw_sql(AssertSqlSafe(drop)).execute(&pool).await.unwrap();
            }
            Eyes::Sqlite(pool, dir) => {
                pool.close().await;
                dir.close().unwrap();
            }
        }
    }
}

fn owner() -> Uuid {
    Uuid::from_u128(fastrand::u128(..))
}

fn request<'a>(lanes: &'a [u8]) -> DueRequest<'a> {
    DueRequest {
        relay: "r",
        lanes,
        except: &[],
        paused: &[],
        down: &[],
        overtake: false,
        limit: 100,
        bytes: usize::MAX >> 1,
    }
}

async fn lanes_are_shared_by_those_who_live<S: Relaying + Operations>(bench: &Bench<S>) {
    let owners: Vec<Uuid> = (0..65).map(|_| owner()).collect();
    for (living, shares) in [
        (1, vec![64]),
        (2, vec![32, 32]),
        (3, vec![22, 22, 20]),
        (64, vec![1; 64]),
    ] {
        // Two rounds: in the first all see each other and give up, in the second they take.
        for round in 0..3 {
            let mut counts = Vec::new();
            let mut lanes = Vec::new();
            for &owner in &owners[..living] {
                let held = bench.hold(owner).await;
                counts.push(held.len());
                lanes.extend(held.iter().map(|held| held.lane));
            }
            if round == 2 {
                counts.sort_unstable_by(|a, b| b.cmp(a));
                assert_eq!(counts, shares);
                lanes.sort_unstable();
                assert!(lanes.iter().copied().eq(0..LANES), "each lane has one owner");
            }
            // What was given up is free.
            bench
                .sql("UPDATE {t}outbox_lanes SET leased_until = {now} - {second} WHERE owner IS NULL")
                .await;
        }
    }
    let mut counts = Vec::new();
    for &owner in &owners {
        counts.push(bench.hold(owner).await.len());
    }
    assert_eq!(counts[64], 0, "the 65th has nothing and takes nothing away");
    assert_eq!(counts.iter().sum::<usize>(), 64);

    bench.store.give_up_lanes("r", owners[3]).await.unwrap();
    assert_eq!(
        bench.hold(owners[64]).await.len(),
        1,
        "what one leaves another takes, at once"
    );
    for owner in &owners[1..] {
        bench.store.give_up_lanes("r", *owner).await.unwrap();
    }
    assert_eq!(bench.hold(owners[0]).await.len(), 64);
}

async fn what_was_given_up_is_left_alone_for_a_while<S: Relaying + Operations>(bench: &Bench<S>) {
    let (first, second) = (owner(), owner());
    assert_eq!(bench.hold(first).await.len(), 64);
    assert_eq!(bench.hold(second).await.len(), 0);
    let kept = bench.hold(first).await;
    assert_eq!(kept.len(), 32);
    assert_eq!(
        bench.hold(second).await.len(),
        0,
        "what is on its way of them ends first, and may be marked"
    );
    bench
        .sql("UPDATE {t}outbox_lanes SET leased_until = leased_until - 20 * {second} WHERE owner IS NULL")
        .await;
    let taken = bench.hold(second).await;
    assert_eq!(taken.len(), 32);
    assert!(taken.iter().all(|lane| lane.fence == 2 && !kept.contains(lane)));
}

async fn a_lane_whose_lease_is_over_is_taken_with_a_higher_fence<S: Relaying + Operations>(bench: &Bench<S>) {
    let (dead, next) = (owner(), owner());
    let before = bench.hold(dead).await;
    assert!(before.iter().all(|lane| lane.fence == 1));
    assert_eq!(bench.hold(next).await.len(), 0, "they are leased");
    bench.time_passes().await;
    assert_eq!(bench.hold(next).await.len(), 32, "it may live and only be slow");
    bench
        .sql("UPDATE {t}outbox_relays SET alive_until = {now} - {second}")
        .await;
    bench.time_passes().await;
    let after = bench.hold(next).await;
    assert_eq!(after.len(), 64);
    assert!(after.iter().all(|lane| lane.fence == 2));
    assert_eq!(bench.hold(dead).await.len(), 0);
    bench
        .sql("UPDATE {t}outbox_relays SET alive_until = {now} - {second}")
        .await;
    bench.time_passes().await;
    let same = bench.hold(next).await;
    assert_eq!(same, after, "a lease that ran out and that nobody took goes on");
}

async fn what_is_due_comes_by_id_and_within_its_limits<S: Relaying + Operations>(bench: &Bench<S>) {
    bench
        .rows(&[
            (1, 5, Some(1), ""),
            (2, 7, None, ""),
            (3, 5, Some(1), ""),
            (4, 9, None, ""),
            (5, 5, None, "send_at={now} + 60 * {second}"),
            (6, 5, None, "send_at={now} - 60 * {second}"),
            (7, 5, None, "next_attempt_at={now} + 60 * {second}"),
            (8, 5, None, "next_attempt_at={now} - 60 * {second}"),
            (9, 5, None, "parked_at={now}"),
            (10, 5, None, "sent_at={now}"),
        ])
        .await;
    bench
        .sql("UPDATE {t}outbox SET destination = 'kafka:b' WHERE id = 2")
        .await;
    bench
        .sql("UPDATE {t}outbox SET relay = 'another' WHERE id = 3")
        .await;

    assert_eq!(bench.due(request(&[5, 7])).await, [1, 2, 6, 8]);
    assert_eq!(bench.due(request(&[5, 7, 9])).await, [1, 2, 4, 6, 8]);
    for (what, request, due) in [
        (
            "in hand",
            DueRequest {
                except: &[1, 8],
                ..request(&[5, 7])
            },
            vec![2, 6],
        ),
        (
            "paused",
            DueRequest {
                paused: &["memory:a", "memory:c"],
                ..request(&[5, 7])
            },
            vec![2],
        ),
        (
            "down",
            DueRequest {
                down: &["kafka", "mem"],
                ..request(&[5, 7])
            },
            vec![1, 6, 8],
        ),
        (
            "of each lane",
            DueRequest {
                limit: 2,
                ..request(&[5, 7])
            },
            vec![1, 2, 6],
        ),
        (
            "bytes",
            DueRequest {
                bytes: 12,
                ..request(&[5, 7])
            },
            vec![1, 2],
        ),
        (
            "at least one",
            DueRequest {
                bytes: 1,
                ..request(&[5, 7])
            },
            vec![1],
        ),
    ] {
        assert_eq!(bench.due(request).await, due, "{what}");
    }
    let backlog = bench.store.outgoing("r").await.unwrap();
    assert_eq!((backlog.pending, backlog.parked), (7, 1));
    assert!(backlog.oldest.unwrap() < Duration::from_secs(50), "{backlog:?}");
    assert_eq!(
        bench.store.outgoing("nobody").await.unwrap(),
        OutgoingBacklog::default()
    );
}

async fn what_waits_holds_the_later_rows_of_its_key<S: Relaying + Operations>(bench: &Bench<S>) {
    for waits in [
        "parked_at={now}",
        "next_attempt_at={now} + 60 * {second}",
        "send_at={now} + 60 * {second}",
    ] {
        bench
            .rows(&[
                (1, 5, Some(1), ""),
                (2, 5, Some(1), waits),
                (3, 5, Some(1), ""),
                (4, 5, Some(2), ""),
                (5, 5, None, ""),
            ])
            .await;
        assert_eq!(bench.due(request(&[5])).await, [1, 4, 5], "{waits}");
        let overtake = DueRequest {
            overtake: true,
            ..request(&[5])
        };
        assert_eq!(bench.due(overtake).await, [1, 3, 4, 5], "{waits}");
        bench
            .sql("UPDATE {t}outbox SET relay = 'another' WHERE id = 2")
            .await;
        assert_eq!(
            bench.due(request(&[5])).await,
            [1, 3, 4, 5],
            "another relay's rows are another order"
        );
        bench.sql("DELETE FROM {t}outbox").await;
    }
}

async fn refusals_are_fenced_and_counted<S: Relaying + Operations>(bench: &Bench<S>) {
    let (old, new) = (owner(), owner());
    bench
        .rows(&[(1, 5, Some(1), ""), (2, 5, Some(1), ""), (3, 6, None, "")])
        .await;
    let lane = |held: &[HeldLane], lane| *held.iter().find(|held| held.lane == lane).unwrap();
    let held = bench.hold(old).await;
    let refusal = |id, lane, again| Refusal {
        id,
        lane,
        error: "no\0 room",
        again,
    };
    let ours = bench
        .store
        .mark_refused(&[
            refusal(1, lane(&held, 5), Some(Duration::from_secs(60))),
            refusal(3, lane(&held, 6), None),
            refusal(9, lane(&held, 6), None),
        ])
        .await
        .unwrap();
    assert_eq!(ours, [1, 3]);
    assert_eq!(
        bench.due(request(&[5, 6])).await,
        [] as [i64; 0],
        "1 waits, and 2 behind it; 3 is parked"
    );
    let backlog = bench.store.outgoing("r").await.unwrap();
    assert_eq!(
        (backlog.pending, backlog.parked, backlog.oldest.is_some()),
        (2, 1, true)
    );

    bench
        .sql("UPDATE {t}outbox SET next_attempt_at = {now} - {second} WHERE id = 1")
        .await;
    let first = bench.store.due(&request(&[5])).await.unwrap().remove(0).unwrap();
    assert_eq!((first.id, first.attempts), (1, 1));

    bench
        .sql("UPDATE {t}outbox_relays SET alive_until = {now} - {second}")
        .await;
    bench.time_passes().await;
    bench.hold(new).await;
    let late = bench
        .store
        .mark_refused(&[refusal(1, lane(&held, 5), None)])
        .await
        .unwrap();
    assert_eq!(late, [] as [i64; 0], "the lane has another owner, who decides");
    assert_eq!(bench.due(request(&[5])).await, [1, 2]);
}

async fn sent_rows_are_deleted_or_kept<S: Relaying + Operations>(bench: &Bench<S>) {
    bench
        .rows(&[
            (1, 5, None, ""),
            (2, 5, None, ""),
            (3, 5, None, "parked_at={now}"),
        ])
        .await;
    bench.store.mark_sent(&[1, 77], false).await.unwrap();
    bench.store.mark_sent(&[2, 3], true).await.unwrap();
    bench.store.mark_sent(&[2, 3], true).await.unwrap();
    assert_eq!(
        bench.store.outgoing("r").await.unwrap(),
        OutgoingBacklog::default()
    );
    assert_eq!(bench.due(request(&[5])).await, [] as [i64; 0]);
    let hour = Duration::from_secs(3600);
    assert_eq!(bench.store.purge_sent("r", hour, 10).await.unwrap(), 0);
    bench
        .sql("UPDATE {t}outbox SET sent_at = sent_at - 3601 * {second}")
        .await;
    assert_eq!(
        bench.store.purge_sent("r", hour * 24 * 3660, 10).await.unwrap(),
        0
    );
    assert_eq!(bench.store.purge_sent("another", hour, 10).await.unwrap(), 0);
    assert_eq!(bench.store.purge_sent("r", hour, 1).await.unwrap(), 1);
    assert_eq!(bench.store.purge_sent("r", hour, 10).await.unwrap(), 1);
}

async fn what_cannot_be_read_is_told<S: Relaying + Operations>(bench: &Bench<S>) {
    bench
        .rows(&[(1, 5, Some(1), ""), (2, 5, None, ""), (3, 5, None, "")])
        .await;
    bench
        .sql("UPDATE {t}outbox SET headers = {x}ff' WHERE id = 1")
        .await;
    bench
        .sql("UPDATE {t}outbox SET destination = 'nowhere' WHERE id = 2")
        .await;
    let mut rows = bench.store.due(&request(&[5])).await.unwrap().into_iter();
    let UnreadableRow { id, lane, order, why } = rows.next().unwrap().unwrap_err();
    assert_eq!((id, lane, order), (1, 5, Some([1; 16])));
    assert!(why.contains("outbox.headers"), "{why}");
    let second = rows.next().unwrap().unwrap_err();
    assert!(second.id == 2 && second.why.contains("no colon"), "{second:?}");
    assert_eq!(rows.next().unwrap().unwrap().id, 3);
}

async fn what_is_missing_is_named<S: Relaying + Operations>(bench: &Bench<S>) {
    bench.store.check_outgoing().await.unwrap();
    bench.sql("ALTER TABLE {t}outbox_lanes DROP COLUMN fence").await;
    let error = bench.store.check_outgoing().await.unwrap_err().to_string();
    assert!(error.contains("outbox_lanes.fence"), "{error}");
}

/// What one process tells another hears, also after the connection was lost.
/// One of the tests that listen cuts all listeners of the server off.
static LISTENERS: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

#[tokio::test]
async fn listeners_hear_what_is_meant_for_them() {
    let _alone = LISTENERS.lock().await;
    let Some(bench) = postgres().await else { return };
    let mut listener = bench.store.listen("r").await.unwrap();
    bench.store.tell("another").await.unwrap();
    bench.store.tell("r").await.unwrap();
    assert_eq!(listener.heard().await.unwrap(), Heard::Something);

    let cut =
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%onlyonce_outbox%'";
    bench.sql(cut).await;
    // Lost without a word, or with the server's last one: there is a gap, or the listener has to be made anew.
    match listener.heard().await {
        Ok(heard) => assert_eq!(heard, Heard::Gap),
        Err(_) => listener = bench.store.listen("r").await.unwrap(),
    }
    bench.store.tell("r").await.unwrap();
    assert_eq!(listener.heard().await.unwrap(), Heard::Something);
    bench.end().await;
}

#[tokio::test]
async fn a_burst_of_commits_is_told_to_this_process_at_once_and_to_others_together() {
    let _alone = LISTENERS.lock().await;
    let Some(bench) = postgres().await else { return };
    let mut listener = bench.store.listen("r").await.unwrap();
    let mut here = bench.store.signal("r").watch();
    let wake = Wake::of(&bench.store, "r");
    for _ in 0..1000 {
        wake.wake();
    }
    assert!(here.has_changed().unwrap());
    here.mark_unchanged();
    assert_eq!(listener.heard().await.unwrap(), Heard::Something);
    // What is heard after a word of one's own came before it.
    bench.store.tell("r").await.unwrap();
    wake.wake();
    let mut heard = 0;
    while heard < 2 {
        listener.heard().await.unwrap();
        heard += 1;
    }
    bench.store.signal("r").has_all_lanes(true);
    wake.wake();
    assert!(
        here.has_changed().unwrap(),
        "those of this process are told in any case"
    );
    let more = tokio::time::timeout(Duration::from_millis(300), listener.heard()).await;
    assert!(
        more.is_err(),
        "one for the thousand, one by hand, one for the last but one"
    );
    bench.end().await;
}

/// With a million rows, some of them behind parked ones, a read touches what it returns and little more.
#[tokio::test]
async fn a_long_backlog_is_read_by_its_indexes() {
    let Some(bench) = postgres().await else { return };
    let Eyes::Postgres(pool, schema) = &bench.eyes else {
        unreachable!("it is PostgreSQL")
    };
    bench
        .sql(
            "INSERT INTO {t}outbox (relay, event_id, source, destination, key_hash, lane, headers, attributes, mode)
             SELECT 'r', g, 's', 'memory:a', substr(sha256((g % 20000)::text::bytea), 1, 16), g % 20000 % 64, {x}01', {x}01',
                    'binary'
               FROM generate_series(1, 1000000) g;
             UPDATE {t}outbox SET parked_at = now() WHERE id % 20000 < 100 AND id < 20000; ANALYZE {t}outbox",
        )
        .await;
    let due = bench.store.due_statement();
    let lanes: Vec<String> = (0..LANES).map(|lane| lane.to_string()).collect();
    let mut conn = pool.acquire().await.unwrap();
    for mode in ["force_generic_plan", "force_custom_plan"] {
        let prepare = format!(
            "SET jit = off; SET plan_cache_mode = {mode}; DEALLOCATE ALL;
             PREPARE due (text, smallint[], bigint[], text[], text[], bool, bigint, bigint) AS {due}"
        );
        sqlx::raw_sql(AssertSqlSafe(prepare))
            .execute(&mut *conn)
            .await
            .unwrap();
        let explain = format!(
            "EXPLAIN (ANALYZE, BUFFERS, FORMAT TEXT) EXECUTE due ('r', '{{{}}}', '{{}}', '{{}}', '{{}}', false, 16, 1000000)",
            lanes.join(",")
        );
        let plan: Vec<String> = sqlx::raw_sql(AssertSqlSafe(explain))
            .fetch_all(&mut *conn)
            .await
            .unwrap()
            .iter()
            .map(|row| sqlx::Row::get(row, 0))
            .collect();
        let plan = plan.join("\n");
        assert!(
            plan.contains("Index Scan using outbox_due") && plan.contains("Index Scan using outbox_waiting"),
            "{plan}"
        );
        assert!(!plan.contains("Seq Scan") && plan.contains("rows=1024"), "{plan}");
        let hit = plan.split("shared hit=").nth(1).unwrap();
        let hit: u32 = hit
            .split(|c: char| !c.is_ascii_digit())
            .next()
            .unwrap()
            .parse()
            .unwrap();
        assert!(hit < 20_000, "{schema}: {plan}");
    }
    drop(conn);
    bench.end().await;
}
