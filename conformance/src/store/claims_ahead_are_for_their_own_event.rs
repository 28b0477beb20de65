use onlyonce::store::{ClaimAnswer, HeldState, Next, Outcome, Store as _};

use super::StoreHarness;
use super::bench::{Bench, DEAD, EFFECT, Sample, duplicate, refused};
use crate::Result;
use crate::broken::{ensure, promise};

/// An event that was claimed with the commit before it is committed with its own work or not at all: a
/// claim that goes with anything else is a lost event.
pub async fn claims_ahead_are_for_their_own_event<H: StoreHarness>(harness: &H) -> Result {
    promise("claims_ahead_are_for_their_own_event", async {
        let bench = Bench::new(harness).await?;
        for way in WAYS {
            go_on(&bench, way).await?;
        }
        let (claims, effects) = bench.stands().await?;
        ensure!(
            claims == effects,
            "there are {claims} claims and {effects} effects"
        );
        Ok(())
    })
    .await
}

/// What comes after the commit that has claimed the next event.
const WAYS: [&str; 9] = [
    "it runs",
    "another event runs",
    "it is discarded",
    "another payload of it runs",
    "another event is discarded",
    "a batch runs",
    "it is parked",
    "another event is parked",
    "nothing comes",
];

async fn go_on<H: StoreHarness>(bench: &Bench<'_, H>, way: &str) -> Result {
    let sample = |name: &str, payload| Sample::new(&format!("{name} ({way})"), payload);
    let (first, next, other) = (sample("first", "a")?, sample("next", "a")?, sample("other", "a")?);
    let mut conn = bench.store.open().await?;
    let claim = Next::Claim(next.request());
    bench.process_before(&mut conn, &first, claim).await?;

    let (runs, becomes, due): (Vec<Sample>, _, _) = match way {
        "it runs" => (vec![next.clone()], Outcome::Processed, duplicate(true)),
        "it is discarded" => {
            let due = ClaimAnswer::Duplicate {
                same_payload: true,
                outcome: Outcome::Discarded,
            };
            (vec![next.clone()], Outcome::Discarded, due)
        }
        "another payload of it runs" => (vec![sample("next", "b")?], Outcome::Processed, duplicate(false)),
        "another event runs" => (vec![other], Outcome::Processed, ClaimAnswer::New),
        "another event is discarded" => (vec![other], Outcome::Discarded, ClaimAnswer::New),
        "a batch runs" => {
            let batch = vec![other, sample("third", "a")?];
            (batch, Outcome::Processed, ClaimAnswer::New)
        }
        "it is parked" => {
            bench.park(&mut conn, &next, DEAD, &[]).await?;
            (vec![], Outcome::Processed, ClaimAnswer::Held(HeldState::Dead))
        }
        "another event is parked" => {
            bench.park(&mut conn, &other, DEAD, &[]).await?;
            (vec![], Outcome::Processed, ClaimAnswer::New)
        }
        _ => {
            bench.store.rollback(&mut conn).await?;
            (vec![], Outcome::Processed, ClaimAnswer::New)
        }
    };
    if !runs.is_empty() {
        let requests: Vec<_> = runs.iter().map(Sample::request).collect();
        let ahead = bench
            .store
            .claimed_ahead(&mut conn, &bench.limits, &requests, becomes);
        let (mut tx, answers, claims) = match ahead.await? {
            Some(claimed) => claimed,
            None => {
                let mut tx = bench.store.begin(&mut conn, &bench.limits).await?;
                let (answers, claims) = bench.store.claim(&mut tx, &requests, becomes).await?;
                (tx, answers, claims)
            }
        };
        ensure!(
            answers == vec![ClaimAnswer::New; runs.len()],
            "{way}: the claim says {answers:?}"
        );
        for _ in &runs {
            bench.handle(&mut tx, EFFECT).await?;
        }
        bench
            .store
            .commit(tx, claims, Next::Rest)
            .await
            .map_err(refused)?;
    }
    ensure!(conn.is_clean(), "{way}: the connection is inside a transaction");
    // The others first: what was not theirs has gone by now, or it is committed.
    for run in &runs {
        let due = ClaimAnswer::Duplicate {
            same_payload: true,
            outcome: becomes,
        };
        bench.expect(&mut conn, run, due, way).await?;
    }
    bench.expect(&mut conn, &next, due, way).await
}
