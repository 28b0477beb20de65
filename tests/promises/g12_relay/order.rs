//! Every committed row once or more, per key in order, whoever publishes and whatever dies.

use std::collections::HashSet;
use std::time::Duration;

use onlyonce::publisher::PublishErrorKind;
use onlyonce::store::{PostgresStore, Relaying};
use onlyonce::testing::{MemoryPublisher, Reply};
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use super::{firsts, quick, row, start};
use crate::running::{Process, until};
use crate::stage::{Stage, TestStore, postgres_connection, soon};

on_each_store!(
    several_relays_keep_the_order_of_every_key,
    a_relay_that_dies_again_and_again_loses_nothing,
    keys_go_beside_each_other_and_rows_of_one_key_do_not,
    a_delayed_row_holds_its_key_until_it_is_due,
);

/// Random delays, and one publish in twenty is refused.
fn unkind() -> MemoryPublisher {
    let publisher = MemoryPublisher::new();
    publisher.replies(|_, _| {
        let reply = if fastrand::u8(0..20) == 0 {
            Reply::fail(PublishErrorKind::Refused)
        } else {
            Reply::confirm()
        };
        reply.after(Duration::from_millis(fastrand::u64(0..8)))
    });
    publisher
}

async fn several_relays_keep_the_order_of_every_key<S: TestStore + Relaying>(stage: Stage<S>) {
    let publisher = unkind();
    let keys: Vec<String> = (0..25).map(|key| format!("k{key}")).collect();
    let mut relays = Vec::new();
    for _ in 0..4 {
        let store = S::another(&stage).await;
        relays.push(start(quick(store, &publisher).attempts(100).in_flight(50)));
    }
    for from in (0..40).step_by(10) {
        let rows =
            (from..from + 10).flat_map(|n| keys.iter().map(move |key| row(format!("{key}-{n}"), Some(key))));
        stage.write_rows(rows).await;
    }
    stage.all_sent().await;
    for key in &keys {
        assert!(firsts(&publisher, key).into_iter().eq(0..40), "{key}");
    }
    for relay in relays {
        relay.stop().await;
    }
    stage.end().await;
}

async fn a_relay_that_dies_again_and_again_loses_nothing<S: TestStore + Relaying>(stage: Stage<S>) {
    let publisher = unkind();
    let keys: Vec<String> = (0..20).map(|key| format!("k{key}")).collect();
    let rows = (0..60).flat_map(|n| keys.iter().map(move |key| row(format!("{key}-{n}"), Some(key))));
    stage.write_rows(rows).await;
    let begun = 20 * 60;
    for life in 1.. {
        let arrived = publisher.arrived().len();
        let (opens, to) = (S::another(&stage), publisher.clone());
        let process = Process::of(async move {
            let relay = quick(opens.await, &to)
                .attempts(100)
                .in_flight(20)
                .build()
                .unwrap();
            let _ = relay.run_until(std::future::pending()).await;
        });
        // It gets somewhere, and dies in the middle of it; the last one lives.
        let enough = arrived + begun / 5;
        if life > 4 {
            stage.all_sent().await;
            drop(process);
            break;
        }
        let gets_on = publisher.until(|publisher| publisher.arrived().len() >= enough);
        soon("progress", gets_on).await;
        process.die();
    }
    for key in &keys {
        assert!(firsts(&publisher, key).into_iter().eq(0..60), "{key}");
    }
    let copies = publisher.arrived().len() - begun;
    assert!(
        copies <= 4 * 20,
        "{copies} came twice; at most those on their way at each death may"
    );
    stage.end().await;
}

async fn keys_go_beside_each_other_and_rows_of_one_key_do_not<S: TestStore + Relaying>(stage: Stage<S>) {
    let publisher = MemoryPublisher::new();
    let hold = std::sync::Arc::new(tokio::sync::Notify::new());
    let held = hold.clone();
    publisher.replies(move |_, _| Reply::confirm().once(held.clone()));
    let rows = (0..3).flat_map(|n| ["a", "b", "c", "d", "e"].map(|key| row(format!("{key}-{n}"), Some(key))));
    stage.write_rows(rows).await;
    let relay = start(quick(stage.store.clone(), &publisher));
    for round in 1..=3 {
        soon(
            "one row of each key",
            publisher.until(|publisher| publisher.in_flight() == 5 && publisher.calls() == round * 5),
        )
        .await;
        hold.notify_waiters();
    }
    stage.all_sent().await;
    assert_eq!(publisher.most_at_once(), 5);
    for key in ["a", "b", "c", "d", "e"] {
        assert_eq!(firsts(&publisher, key), [0, 1, 2]);
    }
    relay.stop().await;
    stage.end().await;
}

async fn a_delayed_row_holds_its_key_until_it_is_due<S: TestStore + Relaying>(stage: Stage<S>) {
    let publisher = MemoryPublisher::new();
    let rows = ["a-0", "a-1", "a-2", "b-0"];
    stage.write_rows(rows.map(|id| row(id, Some(&id[..1])))).await;
    stage
        .execute(
            "UPDATE {s}.outbox SET send_at = now() + interval '1 hour' WHERE event_id = 'a-1'",
            "UPDATE onlyonce_outbox SET send_at = CAST(unixepoch('subsec') * 1000000 AS INTEGER) + 3600000000
              WHERE event_id = 'a-1'",
        )
        .await;
    let relay = start(quick(stage.store.clone(), &publisher));
    until("the marks of what is due", async || stage.rows("true").await == 2).await;
    assert_eq!(
        (firsts(&publisher, "a"), firsts(&publisher, "b")),
        (vec![0], vec![0])
    );
    stage
        .execute(
            "UPDATE {s}.outbox SET send_at = now() WHERE event_id = 'a-1'",
            "UPDATE onlyonce_outbox SET send_at = 1 WHERE event_id = 'a-1'",
        )
        .await;
    stage.all_sent().await;
    assert_eq!(firsts(&publisher, "a"), [0, 1, 2]);
    relay.stop().await;
    stage.end().await;
}

/// Ids are given out in one order and become visible in another; rolled back ones leave gaps for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_interleaving_of_transactions_hides_a_row() {
    let Some(stage) = PostgresStore::fresh().await else {
        return;
    };
    let publisher = MemoryPublisher::new();
    let relay = start(quick(stage.store.clone(), &publisher));
    let mut connections: Vec<PgConnection> = Vec::new();
    for _ in 0..4 {
        connections.push(postgres_connection().await.unwrap());
    }
    let seed = fastrand::u64(..);
    let mut random = fastrand::Rng::with_seed(seed);
    let mut committed = HashSet::new();
    for round in 0..200 {
        // Every connection has three steps: begin and insert, insert again or wait, end. In any order.
        let mut steps: Vec<usize> = (0..connections.len()).flat_map(|conn| [conn; 3]).collect();
        random.shuffle(&mut steps);
        let mut progress = vec![0; connections.len()];
        let mut written = vec![Vec::new(); connections.len()];
        for conn in steps {
            let step = progress[conn];
            progress[conn] += 1;
            let sql = match step {
                0 | 1 => {
                    let id = format!("r{round}c{conn}s{step}");
                    let key = random.bool().then(|| format!("k{}", random.u8(0..5)));
                    written[conn].push(id.clone());
                    let insert = row(id, key.as_deref()).insert(true).replace("{s}", &stage.schema);
                    if step == 0 {
                        format!("BEGIN; {insert}")
                    } else {
                        insert
                    }
                }
                _ if random.u8(0..4) == 0 => "ROLLBACK".to_owned(),
                _ => {
                    committed.extend(written[conn].drain(..));
                    "COMMIT".to_owned()
                }
            };
            sqlx::raw_sql(AssertSqlSafe(sql))
                .execute(&mut connections[conn])
                .await
                .unwrap();
        }
        if random.u8(0..4) == 0 {
            tokio::task::yield_now().await;
        }
    }
    for connection in connections {
        connection.close().await.unwrap();
    }
    stage.all_sent().await;
    let arrived = publisher.ids();
    let distinct: HashSet<String> = arrived.iter().cloned().collect();
    assert_eq!(distinct, committed, "seed {seed}");
    assert_eq!(arrived.len(), distinct.len(), "each of them once; seed {seed}");
    relay.stop().await;
    stage.end().await;
}
