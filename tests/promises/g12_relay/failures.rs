//! Whose fault a failure is, and who has to wait for it.

use std::time::Duration;

use onlyonce::publisher::PublishErrorKind;
use onlyonce::store::Relaying;
use onlyonce::testing::{MemoryPublisher, Reply};

use super::{firsts, quick, row, start};
use crate::running::until;
use crate::stage::{Stage, TestStore, soon};

on_each_store!(
    a_row_that_is_always_refused_is_parked_and_holds_its_key,
    rows_may_overtake_a_parked_one_by_choice,
    a_row_that_is_invalid_is_parked_at_once,
    an_outage_counts_for_nobody_and_everything_goes_out_after_it,
    a_destination_that_fails_pauses_alone,
    rows_for_a_publisher_that_is_not_there_wait_and_are_named,
    a_row_that_kills_its_connection_costs_its_own_attempts,
    a_row_that_cannot_be_read_is_parked,
);

/// Refuses what has this id.
fn refusing(id: &'static str, kind: PublishErrorKind) -> MemoryPublisher {
    let publisher = MemoryPublisher::new();
    publisher.replies(move |message, _| {
        if message.event_id == id {
            Reply::fail(kind)
        } else {
            Reply::confirm()
        }
    });
    publisher
}

async fn a_row_that_is_always_refused_is_parked_and_holds_its_key<S: TestStore + Relaying>(stage: Stage<S>) {
    let publisher = refusing("a-1", PublishErrorKind::Refused);
    let ids = ["a-0", "a-1", "a-2", "b-0", "b-1"];
    stage.write_rows(ids.map(|id| row(id, Some(&id[..1])))).await;
    let relay = start(quick(stage.store.clone(), &publisher).attempts(3));
    until("the row to be parked", async || {
        stage.rows("parked_at IS NOT NULL").await == 1
    })
    .await;
    until("the marks", async || stage.rows("true").await == 2).await;
    assert_eq!(publisher.copies("a-1"), 3);
    let parked =
        "event_id = 'a-1' AND attempts = 3 AND last_error LIKE '%Refused%' AND parked_at IS NOT NULL";
    assert_eq!(stage.rows(parked).await, 1);
    assert_eq!(stage.rows("event_id = 'a-2' AND attempts = 0").await, 1);
    assert_eq!(
        (firsts(&publisher, "a"), firsts(&publisher, "b")),
        (vec![0], vec![0, 1])
    );
    relay.stop().await;
    stage.end().await;
}

async fn rows_may_overtake_a_parked_one_by_choice<S: TestStore + Relaying>(stage: Stage<S>) {
    let publisher = refusing("a-1", PublishErrorKind::Refused);
    stage
        .write_rows(["a-0", "a-1", "a-2", "a-3"].map(|id| row(id, Some("a"))))
        .await;
    let relay = start(quick(stage.store.clone(), &publisher).attempts(2).overtake());
    until("the row to be parked", async || {
        stage.rows("parked_at IS NOT NULL").await == 1 && stage.rows("true").await == 1
    })
    .await;
    assert_eq!(firsts(&publisher, "a"), [0, 2, 3]);
    relay.stop().await;
    stage.end().await;
}

async fn a_row_that_is_invalid_is_parked_at_once<S: TestStore + Relaying>(stage: Stage<S>) {
    let publisher = refusing("too-large", PublishErrorKind::Invalid);
    let rows = (0..100).map(|n| row(format!("n{n}"), None));
    stage
        .write_rows([row("too-large", None)].into_iter().chain(rows))
        .await;
    let relay = start(quick(stage.store.clone(), &publisher));
    until("the row to be parked", async || {
        stage.rows("parked_at IS NOT NULL").await == 1 && stage.rows("true").await == 1
    })
    .await;
    assert_eq!(
        (publisher.copies("too-large"), publisher.arrived().len()),
        (1, 100)
    );
    until("the note of it", async || {
        relay.health.ready().notes == ["1 outgoing events of relay default are parked"]
    })
    .await;
    assert!(relay.health.ready().ok);
    relay.stop().await;
    stage.end().await;
}

/// A thousand rows are written while the broker is down; after it is back all of them go out by themselves.
async fn an_outage_counts_for_nobody_and_everything_goes_out_after_it<S: TestStore + Relaying>(
    stage: Stage<S>,
) {
    let publisher = MemoryPublisher::new();
    let relay = start(quick(stage.store.clone(), &publisher).attempts(1));
    publisher.go_down();
    let keys: Vec<String> = (0..50).map(|key| format!("k{key}")).collect();
    for n in 0..20 {
        stage
            .write_rows(keys.iter().map(|key| row(format!("{key}-{n}"), Some(key))))
            .await;
    }
    let tries = publisher.until(|publisher| publisher.calls() >= 50 + 3);
    soon("tries after pauses", tries).await;
    until("the reason", async || {
        relay.health.ready().to_string() == "relay default: publisher memory: the publisher is down"
    })
    .await;
    assert!(relay.health.live().ok, "no reason to restart");
    assert_eq!(
        stage
            .rows("attempts = 0 AND parked_at IS NULL AND next_attempt_at IS NULL")
            .await,
        1000
    );
    publisher.recover();
    stage.all_sent().await;
    for key in &keys {
        assert!(firsts(&publisher, key).into_iter().eq(0..20), "{key}");
    }
    assert_eq!(publisher.arrived().len(), 1000);
    until("health", async || relay.health.ready().ok).await;
    relay.stop().await;
    stage.end().await;
}

async fn a_destination_that_fails_pauses_alone<S: TestStore + Relaying>(stage: Stage<S>) {
    let publisher = MemoryPublisher::new();
    publisher.replies(|message, _| {
        if message.address == "gone" {
            Reply::fail(PublishErrorKind::Destination)
        } else {
            Reply::confirm()
        }
    });
    // More of it than there is room for.
    let gone =
        (0..200).map(|n| row(format!("gone-{n}"), [Some("x"), Some("y"), None][n % 3]).to("memory:gone"));
    stage.write_rows(gone).await;
    stage
        .write_rows((0..100).map(|n| row(format!("a-{n}"), Some("a"))))
        .await;
    let relay = start(quick(stage.store.clone(), &publisher).in_flight(10).attempts(1));
    let others = publisher.until(|publisher| publisher.arrived().len() == 100);
    soon("the other destination's rows", others).await;
    assert!(firsts(&publisher, "a").into_iter().eq(0..100));
    let tries = publisher.calls() - 100;
    assert!(
        tries <= 25,
        "{tries}: at most ten at first, then one for each pause"
    );
    until("the reason", async || {
        let ready = relay.health.ready().to_string();
        ready.starts_with("relay default: destination memory:gone is paused: ")
    })
    .await;
    assert_eq!(
        stage
            .rows("attempts = 0 AND parked_at IS NULL AND destination = 'memory:gone'")
            .await,
        200
    );

    publisher.replies(|_, _| Reply::confirm());
    stage.all_sent().await;
    let of_key = |key: usize| {
        let ids = publisher
            .ids()
            .into_iter()
            .filter_map(|id| id.strip_prefix("gone-")?.parse().ok());
        ids.filter(move |n: &usize| n % 3 == key).collect::<Vec<_>>()
    };
    for key in 0..2 {
        assert!(of_key(key).is_sorted() && of_key(key).len() == 67);
    }
    relay.stop().await;
    stage.end().await;
}

async fn rows_for_a_publisher_that_is_not_there_wait_and_are_named<S: TestStore + Relaying>(stage: Stage<S>) {
    let publisher = MemoryPublisher::new();
    stage
        .write_rows((0..200).map(|n| row(format!("n{n}"), None).to("elsewhere:q")))
        .await;
    stage
        .write_rows((0..50).map(|n| row(format!("m{n}"), None)))
        .await;
    let relay = start(quick(stage.store.clone(), &publisher).in_flight(10));
    let others = publisher.until(|publisher| publisher.arrived().len() == 50);
    soon("the other rows", others).await;
    until("the reason", async || {
        relay.health.ready().reasons
            == ["relay default: no publisher elsewhere was given to it, and events wait for one"]
    })
    .await;
    until("the marks", async || stage.rows("true").await == 200).await;
    assert_eq!(stage.rows("attempts = 0 AND parked_at IS NULL").await, 200);
    relay.stop().await;

    let both = quick(stage.store.clone(), &publisher).publisher("elsewhere", publisher.clone());
    let relay = start(both);
    stage.all_sent().await;
    relay.stop().await;
    stage.end().await;
}

async fn a_row_that_kills_its_connection_costs_its_own_attempts<S: TestStore + Relaying>(stage: Stage<S>) {
    let publisher = MemoryPublisher::new();
    publisher.replies(|message, _| {
        if message.event_id == "poison" {
            Reply::cut().after(Duration::from_millis(5))
        } else {
            Reply::confirm().after(Duration::from_millis(fastrand::u64(0..10)))
        }
    });
    let rows = (0..150).map(|n| row(format!("k{}-{}", n % 30, n / 30), Some(&format!("k{}", n % 30))));
    let mut rows: Vec<_> = rows.collect();
    rows.insert(20, row("poison", None));
    stage.write_rows(rows).await;
    let relay = start(quick(stage.store.clone(), &publisher).attempts(2).in_flight(40));
    until("the poison to be parked", async || {
        stage.rows("parked_at IS NOT NULL").await == 1 && stage.rows("true").await == 1
    })
    .await;
    assert_eq!(stage.rows("event_id = 'poison' AND attempts = 2").await, 1);
    for key in 0..30 {
        assert_eq!(firsts(&publisher, &format!("k{key}")), [0, 1, 2, 3, 4]);
    }
    // Once or more with others, then twice alone for each attempt.
    assert!(publisher.copies("poison") >= 5, "{}", publisher.copies("poison"));
    relay.stop().await;
    stage.end().await;
}

async fn a_row_that_cannot_be_read_is_parked<S: TestStore + Relaying>(stage: Stage<S>) {
    let publisher = MemoryPublisher::new();
    stage
        .write_rows(["a-0", "a-1", "a-2", "b-0"].map(|id| row(id, Some(&id[..1]))))
        .await;
    stage
        .execute(
            "UPDATE {s}.outbox SET mode = 'of a later version' WHERE event_id = 'a-1'",
            "UPDATE onlyonce_outbox SET headers = x'99' WHERE event_id = 'a-1'",
        )
        .await;
    let relay = start(quick(stage.store.clone(), &publisher));
    until("the row to be parked", async || {
        stage
            .rows("parked_at IS NOT NULL AND last_error LIKE '%cannot read%'")
            .await
            == 1
            && stage.rows("true").await == 2
    })
    .await;
    assert_eq!(
        (firsts(&publisher, "a"), firsts(&publisher, "b")),
        (vec![0], vec![0])
    );
    relay.stop().await;
    stage.end().await;
}
