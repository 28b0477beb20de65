use super::*;

#[tokio::test]
async fn a_held_event_stands_in_its_own_way_only_with_the_same_payload() {
    let bench = Bench::new().await;
    let mut conn = bench.store.open().await.unwrap();
    let event = Event::new("1", "a");
    bench.park(&mut conn, &event, LATER, &[failure(1)]).await;
    assert_eq!(bench.claims().await, 0, "parking gives its claim back");
    let held = |state| ClaimAnswer::Held(state);
    assert_eq!(
        bench.process(&mut conn, &event, INSERT).await,
        held(HeldState::Ready)
    );
    bench.park(&mut conn, &event, DEAD, &[failure(2)]).await;
    assert_eq!(
        bench.process(&mut conn, &event, INSERT).await,
        held(HeldState::Dead)
    );
    bench
        .park(&mut conn, &Event::new("1", "b"), DEAD, &[failure(3)])
        .await;
    assert_eq!(
        bench.process(&mut conn, &Event::new("1", "b"), INSERT).await,
        held(HeldState::Dead)
    );

    assert_eq!(
        bench.process(&mut conn, &Event::new("1", "good"), INSERT).await,
        ClaimAnswer::New
    );
    assert_eq!(bench.held().await, ("replayed".into(), 3, 3, true, true));
    assert_eq!(bench.process(&mut conn, &event, INSERT).await, duplicate(false));
}

#[tokio::test]
async fn attempts_add_up_failures_append_and_one_that_is_known_counts_once() {
    let bench = Bench::new().await;
    let mut conn = bench.store.open().await.unwrap();
    let event = Event::new("1", "a");
    bench
        .park(&mut conn, &event, LATER, &[failure(1), failure(2)])
        .await;
    bench
        .park(&mut conn, &event, LATER, &[failure(1), failure(2)])
        .await;
    assert_eq!(bench.held().await, ("ready".into(), 2, 2, false, false));
    bench
        .park(&mut conn, &event, LATER, &[failure(2), failure(3)])
        .await;
    assert_eq!(bench.held().await, ("ready".into(), 4, 4, false, false));
    let many: Vec<Attempt> = (100..130).map(failure).collect();
    bench.park(&mut conn, &event, DEAD, &many).await;
    assert_eq!(bench.held().await, ("dead".into(), 34, 20, false, true));
    let newest = bench
        .count("SELECT json_extract(failures, '$[19].at_ms') FROM onlyonce_inbox")
        .await;
    assert_eq!(newest, 129);
    // Dead stays dead, and another payload is kept as a copy.
    bench.park(&mut conn, &event, LATER, &[failure(200)]).await;
    bench
        .park(&mut conn, &Event::new("1", "b"), LATER, &[failure(201)])
        .await;
    assert_eq!(bench.held().await, ("dead".into(), 36, 20, true, true));
}

#[tokio::test]
async fn parking_what_is_processed_is_a_duplicate_unless_the_event_escaped() {
    let bench = Bench::new().await;
    let mut conn = bench.store.open().await.unwrap();
    let event = Event::new("1", "a");
    bench.process(&mut conn, &event, INSERT).await;
    let limits = Limits::default();
    let mut parked = event.parked(DEAD, &[]);
    assert_eq!(
        bench.store.park(&mut conn, &limits, &parked).await.unwrap(),
        Parking::Duplicate
    );
    assert!(conn.is_clean());
    parked.escaped = true;
    assert_eq!(
        bench.store.park(&mut conn, &limits, &parked).await.unwrap(),
        Parking::Held
    );
    assert_eq!(
        bench.claims().await,
        1,
        "the claim of the transaction that committed stays"
    );
}

#[tokio::test]
async fn events_without_an_identity_are_held_each_on_its_own() {
    let bench = Bench::new().await;
    let mut conn = bench.store.open().await.unwrap();
    let event = Event::new("1", "a");
    for _ in 0..2 {
        let parked = Parked {
            key: None,
            ..event.parked(DEAD, &[])
        };
        bench
            .store
            .park(&mut conn, &Limits::default(), &parked)
            .await
            .unwrap();
    }
    assert_eq!(bench.store.backlog("c").await.unwrap().dead, 2);
}

#[tokio::test]
async fn a_leased_event_comes_back_as_it_was_and_its_success_finishes_the_row() {
    let bench = Bench::new().await;
    let mut conn = bench.store.open().await.unwrap();
    let mut event = Event::new("1", "a");
    event.raw.headers.push("h", vec![0, 0xff]);
    event.raw.key = Some("k".into());
    event.raw.time_ms = Some(7);
    assert!(bench.store.enqueue(&event.parked(NOW, &[])).await.unwrap());
    assert!(!bench.store.enqueue(&event.parked(NOW, &[])).await.unwrap());
    assert!(
        bench
            .store
            .enqueue(&Event::new("2", "a").parked(LATER, &[]))
            .await
            .unwrap()
    );
    let backlog = bench.store.backlog("c").await.unwrap();
    assert_eq!((backlog.due, backlog.delayed, backlog.dead), (1, 1, 0));

    assert!(
        bench
            .store
            .lease("other", 9, Duration::from_secs(9))
            .await
            .unwrap()
            .is_empty()
    );
    let mut leased = bench.store.lease("c", 9, Duration::from_secs(9)).await.unwrap();
    assert_eq!(leased.len(), 1);
    let held = leased.remove(0);
    assert_eq!((held.lease.attempts, held.released_by_timeout), (0, false));
    assert_eq!(held.lease.identity, event.identity);
    assert_eq!(
        (&held.event.payload, &held.event.headers),
        (&event.raw.payload, &event.raw.headers)
    );
    assert_eq!(
        (&held.event.key, held.event.time_ms),
        (&event.raw.key, event.raw.time_ms)
    );
    assert!(
        bench
            .store
            .lease("c", 9, Duration::from_secs(9))
            .await
            .unwrap()
            .is_empty()
    );

    assert_eq!(
        bench.process(&mut conn, &event, INSERT).await,
        ClaimAnswer::Held(HeldState::Running)
    );
    event.own = Some(held.lease);
    assert_eq!(bench.process(&mut conn, &event, INSERT).await, ClaimAnswer::New);
    assert_eq!(
        bench.count("SELECT count(*) FROM onlyonce_inbox").await,
        1,
        "a row never dead is deleted"
    );
}

#[tokio::test]
async fn a_lease_that_ran_out_goes_to_another_and_the_first_owner_is_fenced() {
    let bench = Bench::new().await;
    let event = Event::new("1", "a");
    bench.store.enqueue(&event.parked(NOW, &[])).await.unwrap();
    let first = bench.store.lease("c", 1, Duration::ZERO).await.unwrap().remove(0);
    let second = bench
        .store
        .lease("c", 1, Duration::from_secs(60))
        .await
        .unwrap()
        .remove(0);
    assert!(second.released_by_timeout);
    let (old, new) = (first.lease, second.lease);

    let failures = [failure(1)];
    let parked = event.parked(LATER, &failures);
    assert!(!bench.store.fail_leased(&old, &parked).await.unwrap());
    assert!(!bench.store.close_leased(&old).await.unwrap());
    bench
        .store
        .release_leased(std::slice::from_ref(&old), Duration::ZERO)
        .await
        .unwrap();
    let renewed = bench
        .store
        .renew(&[old, new.clone()], Duration::from_secs(60))
        .await
        .unwrap();
    assert_eq!(renewed, [new.id]);

    bench
        .store
        .release_leased(std::slice::from_ref(&new), Duration::ZERO)
        .await
        .unwrap();
    assert_eq!(bench.held().await.1, 0, "giving back is not an attempt");
    let third = bench
        .store
        .lease("c", 1, Duration::from_secs(60))
        .await
        .unwrap()
        .remove(0);
    assert!(!third.released_by_timeout);
    assert!(bench.store.fail_leased(&third.lease, &parked).await.unwrap());
    assert_eq!(bench.held().await, ("ready".into(), 1, 1, false, false));
    assert!(!bench.store.close_leased(&third.lease).await.unwrap());
}

#[tokio::test]
async fn closing_a_leased_row_deletes_it_or_keeps_it_as_replayed_if_it_was_dead() {
    let bench = Bench::new().await;
    let event = Event::new("1", "a");
    bench.store.enqueue(&event.parked(NOW, &[])).await.unwrap();
    let lease = bench
        .store
        .lease("c", 1, Duration::from_secs(60))
        .await
        .unwrap()
        .remove(0)
        .lease;
    assert!(bench.store.close_leased(&lease).await.unwrap());
    assert_eq!(bench.count("SELECT count(*) FROM onlyonce_inbox").await, 0);

    bench.store.enqueue(&event.parked(NOW, &[])).await.unwrap();
    bench.sql("UPDATE onlyonce_inbox SET dead_at = 1").await;
    let lease = bench
        .store
        .lease("c", 1, Duration::from_secs(60))
        .await
        .unwrap()
        .remove(0)
        .lease;
    assert!(bench.store.close_leased(&lease).await.unwrap());
    assert_eq!(bench.held().await.0, "replayed");
    assert!(
        bench.store.enqueue(&event.parked(NOW, &[])).await.unwrap(),
        "a finished row holds nothing"
    );
}

#[tokio::test]
async fn an_enqueue_in_a_handlers_transaction_goes_with_it() {
    let bench = Bench::new().await;
    let mut conn = bench.store.open().await.unwrap();
    let mut tx = bench.store.begin(&mut conn, &Limits::default()).await.unwrap();
    assert!(
        bench
            .store
            .enqueue_in(&mut tx, &Event::new("2", "a").parked(NOW, &[]))
            .await
            .unwrap()
    );
    bench.store.rollback(&mut conn).await.unwrap();
    assert_eq!(bench.store.backlog("c").await.unwrap().due, 0);
}
