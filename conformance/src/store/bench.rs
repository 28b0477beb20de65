//! A store in the hand of a promise: an event's way through it, step by step.

use std::time::Duration;

use onlyonce::Reason;
use onlyonce::event::{EventKey, Identity, RawEvent};
use onlyonce::store::{
    Attempt, ClaimAnswer, ClaimRequest, Claims, Connection, HeldEvent, Inbox as _, Lease, Limits, Next,
    Operations as _, Outcome, Parked, ParkedAs, Parking, Store as _, Tx,
};

use super::{Db, StoreHarness};
use crate::broken::ensure;
use crate::{Broken, CONSUMER, Result};

pub(super) const NOW: ParkedAs = ParkedAs::Ready {
    after: Duration::ZERO,
};
pub(super) const LATER: ParkedAs = ParkedAs::Ready {
    after: Duration::from_secs(3600),
};
pub(super) const DEAD: ParkedAs = ParkedAs::Dead {
    reason: Reason::RetriesExhausted,
};
/// A lease that does not run out during a promise.
pub(super) const LONG: Duration = Duration::from_secs(600);

/// What every handler of the suite writes.
pub(super) const EFFECT: &str = "INSERT INTO {effects} VALUES ('x')";

pub(super) struct Bench<'h, H: StoreHarness> {
    pub(super) harness: &'h H,
    pub(super) store: H::Store,
    pub(super) limits: Limits,
}

impl<'h, H: StoreHarness> Bench<'h, H> {
    /// A store with its tables, and one of the handler's.
    pub(super) async fn new(harness: &'h H) -> Result<Self> {
        let bench = Self {
            harness,
            store: harness.store().await?,
            limits: Limits::default(),
        };
        bench.store.migrate().await?;
        bench.sql("CREATE TABLE {effects} (id TEXT NOT NULL)").await?;
        Ok(bench)
    }

    /// SQL with the tables' real names.
    pub(super) fn with_tables(&self, sql: &str) -> String {
        [
            "effects",
            "processed_events",
            "inbox",
            "outbox",
            "parents",
            "children",
        ]
        .iter()
        .fold(sql.to_owned(), |sql, name| {
            sql.replace(&format!("{{{name}}}"), &self.harness.table(name))
        })
    }

    pub(super) async fn sql(&self, sql: &str) -> Result {
        self.harness.sql(&self.with_tables(sql)).await
    }

    pub(super) async fn number(&self, sql: &str) -> Result<i64> {
        self.harness.number(&self.with_tables(sql)).await
    }

    /// How many claims and how many effects are there, seen from outside.
    pub(super) async fn stands(&self) -> Result<(i64, i64)> {
        Ok((
            self.number("SELECT count(*) FROM {processed_events}").await?,
            self.number("SELECT count(*) FROM {effects}").await?,
        ))
    }

    /// Runs what a handler would.
    pub(super) async fn handle(
        &self,
        tx: &mut Tx<'_, Db<H>>,
        sql: &str,
    ) -> std::result::Result<(), sqlx::Error> {
        H::sql_in(tx, &self.with_tables(sql)).await
    }

    /// Begins and claims.
    pub(super) async fn claim<'c>(
        &self,
        conn: &'c mut Connection<Db<H>>,
        events: &[&Sample],
    ) -> std::result::Result<(Tx<'c, Db<H>>, Vec<ClaimAnswer>, Claims), onlyonce::store::StoreError> {
        self.claim_as(conn, events, Outcome::Processed).await
    }

    pub(super) async fn claim_as<'c>(
        &self,
        conn: &'c mut Connection<Db<H>>,
        events: &[&Sample],
        outcome: Outcome,
    ) -> std::result::Result<(Tx<'c, Db<H>>, Vec<ClaimAnswer>, Claims), onlyonce::store::StoreError> {
        let mut tx = self.store.begin(conn, &self.limits).await?;
        let requests: Vec<_> = events.iter().map(|event| event.request()).collect();
        let (answers, claims) = self.store.claim(&mut tx, &requests, outcome).await?;
        Ok((tx, answers, claims))
    }

    /// Takes one event through: claim, one effect if it is new, commit.
    pub(super) async fn process(&self, conn: &mut Connection<Db<H>>, event: &Sample) -> Result<ClaimAnswer> {
        self.process_before(conn, event, Next::Rest).await
    }

    /// The same for an event that is followed by this.
    pub(super) async fn process_before(
        &self,
        conn: &mut Connection<Db<H>>,
        event: &Sample,
        next: Next<'_>,
    ) -> Result<ClaimAnswer> {
        let (mut tx, answers, claims) = self.claim(conn, &[event]).await?;
        ensure!(
            answers.len() == 1,
            "one event was claimed and {answers:?} answered"
        );
        if claims.is_empty() {
            self.store.rollback(conn).await?;
        } else {
            self.handle(&mut tx, EFFECT).await?;
            self.store.commit(tx, claims, next).await.map_err(refused)?;
        }
        ensure!(
            conn.is_clean() || !matches!(next, Next::Rest),
            "the transaction ended and its connection is inside one"
        );
        Ok(answers[0])
    }

    /// Processes, and expects this answer.
    pub(super) async fn expect(
        &self,
        conn: &mut Connection<Db<H>>,
        event: &Sample,
        due: ClaimAnswer,
        because: &str,
    ) -> Result {
        let answer = self.process(conn, event).await?;
        ensure!(
            answer == due,
            "{because}: {due:?} was due and the claim says {answer:?}"
        );
        Ok(())
    }

    pub(super) async fn park(
        &self,
        conn: &mut Connection<Db<H>>,
        event: &Sample,
        becomes: ParkedAs,
        failures: &[Attempt],
    ) -> Result<Parking> {
        let mut parked = event.parked(becomes);
        parked.failures = failures;
        let parking = self.store.park(conn, &self.limits, &parked).await?;
        ensure!(
            conn.is_clean(),
            "parking left its connection inside a transaction"
        );
        Ok(parking)
    }

    pub(super) async fn lease(&self, max: usize, lease: Duration) -> Result<Vec<HeldEvent>> {
        Ok(self.store.lease(CONSUMER, max, lease).await?)
    }

    /// Leases the only event that is due.
    pub(super) async fn lease_one(&self, lease: Duration) -> Result<HeldEvent> {
        let mut leased = self.lease(9, lease).await?;
        ensure!(
            leased.len() == 1,
            "one event is due and {} were leased",
            leased.len()
        );
        Ok(leased.remove(0))
    }
}

/// An event of the suite, with its name.
#[derive(Clone)]
pub(super) struct Sample {
    pub(super) identity: Identity,
    pub(super) raw: RawEvent,
    /// The held row that it came from.
    pub(super) own: Option<Lease>,
}

impl Sample {
    pub(super) fn new(id: &str, payload: &'static str) -> Result<Self> {
        Ok(Self {
            identity: Identity::strong("orders", id)?,
            raw: RawEvent {
                payload: Some(payload.into()),
                ..RawEvent::default()
            },
            own: None,
        })
    }

    fn key(&self) -> EventKey {
        EventKey::of_event(CONSUMER, &self.identity.source, &self.identity.id)
    }

    pub(super) fn request(&self) -> ClaimRequest<'_> {
        ClaimRequest {
            key: self.key(),
            consumer: CONSUMER,
            identity: &self.identity,
            payload_hash: onlyonce::event::PayloadHash::of(self.raw.payload.as_deref()),
            own: self.own.as_ref(),
        }
    }

    pub(super) fn parked(&self, becomes: ParkedAs) -> Parked<'_> {
        Parked::new(CONSUMER, Some((self.key(), &self.identity)), &self.raw, becomes)
    }
}

pub(super) fn duplicate(same_payload: bool) -> ClaimAnswer {
    ClaimAnswer::Duplicate {
        same_payload,
        outcome: Outcome::Processed,
    }
}

pub(super) fn failure(n: i64) -> Attempt {
    let mut failure = Attempt::now("error", &format!("failure {n}"));
    failure.at_ms = n;
    failure
}

/// For errors of guard and commit, which are no `Error`.
pub(super) fn refused(error: impl std::fmt::Debug) -> Broken {
    Broken::new(format!("{error:?}"))
}
