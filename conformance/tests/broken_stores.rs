//! The suite rejects stores that are broken on purpose, each by the promise that names its fault. They
//! wrap the real ones: proofs such as `Claims` can be had from nobody else.

mod support;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use onlyonce::async_trait;
use onlyonce::event::{EventKey, Identity, PayloadHash};
use onlyonce::store::{
    Backlog, ClaimAnswer, ClaimRequest, ClaimedAhead, Claims, CommitError, Connection, DueRequest, DueRow,
    HeldEvent, HeldLane, Inbox, Lease, Limits, Listener, Next, Operations, Outcome, Outgoing,
    OutgoingBacklog, OutgoingRow, Owner, Parked, ParkedRow, Parking, PurgeCursor, Purged, Reach, Refusal,
    Relaying, Signal, Store, StoreError, Tx, Unread, UnreadableRow, Waking,
};
use onlyonce_conformance::{Conn, Result, Sqlite, StoreHarness, block_on, store};
use sqlx::Database;
use support::Postgres;

/// What is wrong with a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    KeepsClaimsOfRollbacks,
    PassesWhatTheGuardRefuses,
    TakesNeighboursForDuplicates,
    ForgetsPayloads,
    SaysCommittedAndRollsBack,
    CommitsWhatFailed,
    GivesClaimsAheadToAnybody,
    SeesCommitsEverywhere,
    WaitsForEver,
    ParksWhatWasProcessed,
    LeasesTwice,
    IgnoresTokens,
    RenewsNothing,
    GivesBackAtOnce,
    EnqueuesTwice,
    PurgesEverything,
    ChecksNothing,
    ForgetsBusinessClaims,
    LosesWhatIsSent,
    SendsWithoutTheWork,
    SendsInAnyOrder,
    SharesEveryLane,
    KeepsFences,
    IgnoresFences,
    OvertakesWhatWaits,
    ForgetsWhatIsInHand,
    ReplaysNothing,
    DiscardsNothing,
    ForgetsWhatWasSent,
    PurgesWhatIsKept,
}

#[derive(Clone)]
struct Faulty<S> {
    inner: S,
    fault: Fault,
    claimed: Arc<Mutex<HashSet<EventKey>>>,
    newest: Arc<Mutex<Option<Lease>>>,
    /// The lanes, as their last owner got them.
    lanes: Arc<Mutex<HashMap<u8, HeldLane>>>,
    /// What was claimed ahead last.
    ahead: Arc<Mutex<Option<(Identity, PayloadHash)>>>,
}

impl<S: Inbox> Faulty<S> {
    fn is(&self, fault: Fault) -> bool {
        self.fault == fault
    }

    /// A lease with the newest token of all.
    fn with_newest_token(&self, lease: &Lease) -> Lease {
        let newest = self.newest.lock().expect("unpoisoned").clone();
        newest.unwrap_or_else(|| lease.clone())
    }
}

#[async_trait]
impl<S: Inbox> Store for Faulty<S> {
    type Db = S::Db;

    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn max_connections(&self) -> u32 {
        self.inner.max_connections()
    }

    fn pool_id(&self) -> usize {
        self.inner.pool_id()
    }

    fn max_useful_lanes(&self) -> Option<usize> {
        self.inner.max_useful_lanes()
    }

    async fn open(&self) -> std::result::Result<Connection<Self::Db>, StoreError> {
        self.inner.open().await
    }

    async fn begin<'c>(
        &self,
        conn: &'c mut Connection<Self::Db>,
        limits: &Limits,
    ) -> std::result::Result<Tx<'c, Self::Db>, StoreError> {
        let mut limits = limits.clone();
        if self.is(Fault::WaitsForEver) {
            limits.lock_timeout = Duration::from_secs(3600);
        }
        self.inner.begin(conn, &limits).await
    }

    async fn claim(
        &self,
        tx: &mut Tx<'_, Self::Db>,
        requests: &[ClaimRequest<'_>],
        outcome: Outcome,
    ) -> std::result::Result<(Vec<ClaimAnswer>, Claims), StoreError> {
        let (mut answers, claims) = self.inner.claim(tx, requests, outcome).await?;
        let duplicate = ClaimAnswer::Duplicate {
            same_payload: true,
            outcome: Outcome::Processed,
        };
        let any_duplicate = answers
            .iter()
            .any(|answer| matches!(answer, ClaimAnswer::Duplicate { .. }));
        for (request, answer) in requests.iter().zip(&mut answers) {
            let first = self.claimed.lock().expect("unpoisoned").insert(request.key);
            match (self.fault, &answer) {
                (Fault::KeepsClaimsOfRollbacks, ClaimAnswer::New) if !first => *answer = duplicate,
                (Fault::TakesNeighboursForDuplicates, _) if any_duplicate => *answer = duplicate,
                (Fault::ForgetsPayloads, ClaimAnswer::Duplicate { .. }) => *answer = duplicate,
                _ => {}
            }
        }
        Ok((answers, claims))
    }

    async fn claimed_ahead<'c>(
        &self,
        conn: &'c mut Connection<Self::Db>,
        limits: &Limits,
        requests: &[ClaimRequest<'_>],
        outcome: Outcome,
    ) -> std::result::Result<Option<ClaimedAhead<'c, Self::Db>>, StoreError> {
        let ahead = self.ahead.lock().expect("unpoisoned").take();
        match (ahead, requests) {
            (Some((identity, payload_hash)), [request, ..]) if self.is(Fault::GivesClaimsAheadToAnybody) => {
                let request = ClaimRequest {
                    key: EventKey::of_event(request.consumer, &identity.source, &identity.id),
                    identity: &identity,
                    payload_hash,
                    ..*request
                };
                self.inner
                    .claimed_ahead(conn, limits, &[request], Outcome::Processed)
                    .await
            }
            _ => self.inner.claimed_ahead(conn, limits, requests, outcome).await,
        }
    }

    async fn commit(
        &self,
        tx: Tx<'_, Self::Db>,
        claims: Claims,
        next: Next<'_>,
    ) -> std::result::Result<(), CommitError> {
        if let Next::Claim(request) = &next {
            let ahead = (request.identity.clone(), request.payload_hash);
            *self.ahead.lock().expect("unpoisoned") = Some(ahead);
        }
        if self.is(Fault::SaysCommittedAndRollsBack) {
            return Ok(());
        }
        match self.inner.commit(tx, claims, next).await {
            Err(CommitError::Aborted(_) | CommitError::Escaped(_))
                if self.is(Fault::PassesWhatTheGuardRefuses) =>
            {
                Ok(())
            }
            Err(_) if self.is(Fault::CommitsWhatFailed) => Ok(()),
            committed => committed,
        }
    }

    async fn rollback(&self, conn: &mut Connection<Self::Db>) -> std::result::Result<(), StoreError> {
        self.inner.rollback(conn).await
    }

    async fn is_committed(&self, claims: &Claims) -> bool {
        self.is(Fault::SeesCommitsEverywhere) || self.inner.is_committed(claims).await
    }

    async fn abandon(&self, conn: Connection<Self::Db>) {
        self.inner.abandon(conn).await;
    }

    async fn probe(&self) -> std::result::Result<(), StoreError> {
        self.inner.probe().await
    }

    async fn claim_once(
        &self,
        conn: &mut <Self::Db as Database>::Connection,
        consumer: &str,
        name: &str,
        id: &str,
    ) -> std::result::Result<bool, sqlx::Error> {
        let first = self.inner.claim_once(conn, consumer, name, id).await?;
        Ok(first || self.is(Fault::ForgetsBusinessClaims))
    }
}

#[async_trait]
impl<S: Inbox> Inbox for Faulty<S> {
    async fn park(
        &self,
        conn: &mut Connection<Self::Db>,
        limits: &Limits,
        parked: &Parked<'_>,
    ) -> std::result::Result<Parking, StoreError> {
        let mut parked = parked.clone();
        parked.escaped |= self.is(Fault::ParksWhatWasProcessed);
        self.inner.park(conn, limits, &parked).await
    }

    async fn fail_leased(&self, lease: &Lease, parked: &Parked<'_>) -> std::result::Result<bool, StoreError> {
        let lease = if self.is(Fault::IgnoresTokens) {
            self.with_newest_token(lease)
        } else {
            lease.clone()
        };
        self.inner.fail_leased(&lease, parked).await
    }

    async fn close_leased(&self, lease: &Lease) -> std::result::Result<bool, StoreError> {
        self.inner.close_leased(lease).await
    }

    async fn enqueue(&self, parked: &Parked<'_>) -> std::result::Result<bool, StoreError> {
        let added = self.inner.enqueue(parked).await?;
        Ok(added || self.is(Fault::EnqueuesTwice))
    }

    async fn enqueue_in(
        &self,
        conn: &mut <Self::Db as Database>::Connection,
        parked: &Parked<'_>,
    ) -> std::result::Result<bool, StoreError> {
        self.inner.enqueue_in(conn, parked).await
    }

    async fn lease(
        &self,
        consumer: &str,
        max: usize,
        lease: Duration,
    ) -> std::result::Result<Vec<HeldEvent>, StoreError> {
        let lease = if self.is(Fault::LeasesTwice) {
            Duration::ZERO
        } else {
            lease
        };
        let held = self.inner.lease(consumer, max, lease).await?;
        if let Some(last) = held.last() {
            *self.newest.lock().expect("unpoisoned") = Some(last.lease.clone());
        }
        Ok(held)
    }

    async fn renew(&self, leases: &[Lease], lease: Duration) -> std::result::Result<Vec<i64>, StoreError> {
        if self.is(Fault::RenewsNothing) {
            return Ok(leases.iter().map(|lease| lease.id).collect());
        }
        self.inner.renew(leases, lease).await
    }

    async fn release_leased(&self, leases: &[Lease], after: Duration) -> std::result::Result<(), StoreError> {
        let after = if self.is(Fault::GivesBackAtOnce) {
            Duration::ZERO
        } else {
            after
        };
        self.inner.release_leased(leases, after).await
    }

    async fn backlog(&self, consumer: &str) -> std::result::Result<Backlog, StoreError> {
        self.inner.backlog(consumer).await
    }
}

#[async_trait]
impl<S: Inbox + Waking> Waking for Faulty<S> {
    fn signal(&self, relay: &str) -> Arc<Signal> {
        self.inner.signal(relay)
    }

    fn reach(&self) -> Reach {
        self.inner.reach()
    }

    async fn tell(&self, relay: &str) -> std::result::Result<(), StoreError> {
        self.inner.tell(relay).await
    }

    async fn listen(&self, relay: &str) -> std::result::Result<Box<dyn Listener>, StoreError> {
        self.inner.listen(relay).await
    }
}

#[async_trait]
impl<S: Inbox + Outgoing> Outgoing for Faulty<S> {
    async fn write_outgoing(
        &self,
        conn: &mut <Self::Db as Database>::Connection,
        rows: &[OutgoingRow],
    ) -> std::result::Result<(), sqlx::Error> {
        let mut rows = rows.to_vec();
        if self.is(Fault::SendsInAnyOrder) {
            rows.reverse();
        }
        self.inner.write_outgoing(conn, &rows).await
    }

    async fn record_outgoing(
        &self,
        tx: &mut Tx<'_, Self::Db>,
        claims: Claims,
        rows: &[OutgoingRow],
    ) -> std::result::Result<Claims, CommitError> {
        match self.fault {
            Fault::LosesWhatIsSent => Ok(claims),
            // Outside of a transaction the databases themselves refuse it, and nobody hears of that.
            Fault::SendsWithoutTheWork => {
                let _ = self.inner.write_outgoing(tx, rows).await;
                Ok(claims)
            }
            _ => self.inner.record_outgoing(tx, claims, rows).await,
        }
    }

    async fn parked(
        &self,
        relay: &str,
        after: i64,
        limit: usize,
    ) -> std::result::Result<Vec<ParkedRow>, StoreError> {
        self.inner.parked(relay, after, limit).await
    }

    async fn replay_parked(&self, relay: &str, ids: &[i64]) -> std::result::Result<Vec<i64>, StoreError> {
        if self.is(Fault::ReplaysNothing) {
            let parked = self.inner.parked(relay, 0, 100).await?;
            let parked = parked.iter().map(|row| row.id);
            return Ok(parked.filter(|id| ids.contains(id)).collect());
        }
        self.inner.replay_parked(relay, ids).await
    }

    async fn discard_parked(&self, relay: &str, ids: &[i64]) -> std::result::Result<Vec<i64>, StoreError> {
        if self.is(Fault::DiscardsNothing) {
            return self.inner.replay_parked(relay, ids).await;
        }
        self.inner.discard_parked(relay, ids).await
    }
}

#[async_trait]
impl<S: Inbox + Relaying> Relaying for Faulty<S> {
    async fn check_outgoing(&self) -> std::result::Result<(), StoreError> {
        self.inner.check_outgoing().await
    }

    async fn hold_lanes(
        &self,
        relay: &str,
        owner: Owner,
        lease: Duration,
    ) -> std::result::Result<Vec<HeldLane>, StoreError> {
        let mut held = self.inner.hold_lanes(relay, owner, lease).await?;
        let mut known = self.lanes.lock().expect("unpoisoned");
        if self.is(Fault::KeepsFences) {
            held.iter_mut().for_each(|lane| lane.fence = 1);
        }
        known.extend(held.iter().map(|lane| (lane.lane, *lane)));
        if self.is(Fault::SharesEveryLane) {
            held = known.values().copied().collect();
            held.sort_unstable_by_key(|lane| lane.lane);
        }
        Ok(held)
    }

    async fn give_up_lanes(&self, relay: &str, owner: Owner) -> std::result::Result<(), StoreError> {
        self.inner.give_up_lanes(relay, owner).await
    }

    async fn due(
        &self,
        request: &DueRequest<'_>,
    ) -> std::result::Result<Vec<std::result::Result<DueRow, UnreadableRow>>, StoreError> {
        let mut request = request.clone();
        request.overtake |= self.is(Fault::OvertakesWhatWaits);
        if self.is(Fault::ForgetsWhatIsInHand) {
            request.except = &[];
        }
        self.inner.due(&request).await
    }

    async fn mark_sent(&self, ids: &[i64], keep: bool) -> std::result::Result<(), StoreError> {
        if self.is(Fault::ForgetsWhatWasSent) && keep {
            return Ok(());
        }
        self.inner.mark_sent(ids, keep).await
    }

    async fn mark_refused(&self, refusals: &[Refusal<'_>]) -> std::result::Result<Vec<i64>, StoreError> {
        let mut refusals = refusals.to_vec();
        if self.is(Fault::IgnoresFences) {
            let known = self.lanes.lock().expect("unpoisoned").clone();
            for refusal in &mut refusals {
                refusal.lane = known[&refusal.lane.lane];
            }
        }
        self.inner.mark_refused(&refusals).await
    }

    async fn outgoing(&self, relay: &str) -> std::result::Result<OutgoingBacklog, StoreError> {
        self.inner.outgoing(relay).await
    }

    async fn purge_sent(
        &self,
        relay: &str,
        kept: Duration,
        limit: u32,
    ) -> std::result::Result<u64, StoreError> {
        let kept = if self.is(Fault::PurgesWhatIsKept) {
            Duration::ZERO
        } else {
            kept
        };
        self.inner.purge_sent(relay, kept, limit).await
    }
}

#[async_trait]
impl<S: Inbox + Operations> Operations for Faulty<S> {
    async fn migrate(&self) -> std::result::Result<(), StoreError> {
        self.inner.migrate().await
    }

    async fn check(&self, limits: &Limits) -> std::result::Result<(), StoreError> {
        if self.is(Fault::ChecksNothing) {
            return Ok(());
        }
        self.inner.check(limits).await
    }

    async fn seen(
        &self,
        consumer: &str,
        instance: sqlx::types::Uuid,
    ) -> std::result::Result<Vec<Unread>, StoreError> {
        self.inner.seen(consumer, instance).await
    }

    async fn purge(
        &self,
        consumer: &str,
        window: Duration,
        limit: u32,
        after: PurgeCursor,
    ) -> std::result::Result<Purged, StoreError> {
        let window = if self.is(Fault::PurgesEverything) {
            Duration::ZERO
        } else {
            window
        };
        self.inner.purge(consumer, window, limit, after).await
    }
}

struct Broken<D> {
    database: D,
    fault: Fault,
}

#[async_trait]
impl<D: StoreHarness> StoreHarness for Broken<D> {
    type Store = Faulty<D::Store>;

    async fn empty() -> Result<Option<Self>> {
        Ok(None)
    }

    async fn store(&self) -> Result<Self::Store> {
        Ok(Faulty {
            inner: self.database.store().await?,
            fault: self.fault,
            claimed: Arc::default(),
            newest: Arc::default(),
            lanes: Arc::default(),
            ahead: Arc::default(),
        })
    }

    fn table(&self, name: &str) -> String {
        self.database.table(name)
    }

    async fn sql_in(conn: &mut Conn<Self>, sql: &str) -> std::result::Result<(), sqlx::Error> {
        D::sql_in(conn, sql).await
    }

    async fn sql(&self, sql: &str) -> Result {
        self.database.sql(sql).await
    }

    async fn number(&self, sql: &str) -> Result<i64> {
        self.database.number(sql).await
    }

    async fn age_claims(&self, by: Duration) -> Result {
        self.database.age_claims(by).await
    }

    async fn end(self) -> Result {
        self.database.end().await
    }
}

/// On SQLite, and where the fault needs a server's transactions, on PostgreSQL.
macro_rules! rejected {
    ($($test:ident: $fault:ident on $database:ident => $promise:ident, $says:literal;)+) => {
        $(
            #[test]
            fn $test() {
                let result = block_on(async {
                    let Some(database) = $database::empty().await? else {
                        return Ok(None);
                    };
                    let harness = Broken { database, fault: Fault::$fault };
                    let result = store::$promise(&harness).await;
                    harness.end().await?;
                    Ok::<_, onlyonce_conformance::Broken>(Some(result))
                });
                let Some(result) = result.expect("a database") else {
                    return;
                };
                let broken = result.expect_err("it passes");
                assert_eq!(broken.promise(), stringify!($promise));
                assert!(broken.to_string().contains($says), "{broken}");
            }
        )+
    };
}

rejected! {
    one_that_keeps_claims_of_rollbacks: KeepsClaimsOfRollbacks on Sqlite => rollback_leaves_no_claim, "the event was not new";
    one_that_keeps_claims_of_failed_commits: KeepsClaimsOfRollbacks on Sqlite => deferred_constraints_are_refused, "New was due";
    one_whose_guard_passes_what_escaped: PassesWhatTheGuardRefuses on Sqlite => guard_lets_nothing_half_done_pass, "(claims, effects)";
    one_whose_guard_passes_what_is_aborted: PassesWhatTheGuardRefuses on Postgres => guard_lets_nothing_half_done_pass, "was committed, and (claims, effects) are (0, 0)";
    one_that_takes_neighbours_for_duplicates: TakesNeighboursForDuplicates on Sqlite => batches_are_answered_in_order, "the batch was answered";
    one_that_forgets_payloads: ForgetsPayloads on Sqlite => claims_tell_what_they_found, "another payload";
    one_that_says_committed_and_rolls_back: SaysCommittedAndRollsBack on Sqlite => commit_is_durable, "after the commit others see (claims, effects) (0, 0)";
    one_that_commits_what_failed: CommitsWhatFailed on Sqlite => deferred_constraints_are_refused, "the commit says Ok";
    one_that_gives_claims_ahead_to_anybody: GivesClaimsAheadToAnybody on Postgres => claims_ahead_are_for_their_own_event, "another event runs";
    one_that_sees_commits_everywhere: SeesCommitsEverywhere on Sqlite => commits_by_the_handler_are_found, "nothing is committed";
    one_that_waits_for_ever: WaitsForEver on Sqlite => busy_is_bounded, "still waits";
    one_that_waits_for_ever_on_a_server: WaitsForEver on Postgres => busy_is_bounded, "still waits";
    one_that_parks_what_was_processed: ParksWhatWasProcessed on Sqlite => parking_gives_the_claim_back, "a processed event was parked as Held";
    one_that_leases_twice: LeasesTwice on Sqlite => leases_are_exclusive, "two have leased one event";
    one_that_ignores_tokens: IgnoresTokens on Sqlite => tokens_fence, "the old owner's failure was recorded";
    one_that_renews_nothing: RenewsNothing on Sqlite => leases_are_exclusive, "0 were leased";
    one_that_renews_for_everybody: RenewsNothing on Sqlite => tokens_fence, "renewed as well";
    one_that_gives_back_at_once: GivesBackAtOnce on Sqlite => leases_are_exclusive, "leased at once";
    one_that_enqueues_twice: EnqueuesTwice on Sqlite => enqueues_once, "enqueued twice";
    one_that_purges_everything: PurgesEverything on Sqlite => purge_respects_the_window, "inside the window";
    one_that_checks_nothing: ChecksNothing on Sqlite => check_names_what_is_missing, "check finds nothing wrong";
    one_that_forgets_business_claims: ForgetsBusinessClaims on Sqlite => business_claims_go_with_their_transaction, "(true, true, true)";
    one_that_loses_what_is_sent: LosesWhatIsSent on Sqlite => outgoing_goes_with_its_transaction, "3 rows were committed, and 0 are there";
    one_that_sends_without_the_work: SendsWithoutTheWork on Sqlite => outgoing_goes_with_its_transaction, "counts as written";
    one_that_sends_in_any_order: SendsInAnyOrder on Sqlite => outgoing_keeps_order_and_bytes, "another order";
    one_that_shares_every_lane: SharesEveryLane on Sqlite => lanes_are_shared_and_fenced, "two hold 64 lanes";
    one_that_keeps_fences: KeepsFences on Sqlite => lanes_are_shared_and_fenced, "no higher fence";
    one_that_ignores_fences: IgnoresFences on Sqlite => refusals_are_fenced, "the old owner's refusal was written down";
    one_that_overtakes_what_waits: OvertakesWhatWaits on Sqlite => due_rows_wait_for_their_key, "a-1 waits";
    one_that_forgets_what_is_in_hand: ForgetsWhatIsInHand on Sqlite => due_rows_wait_for_their_key, "b-2 is in hand";
    one_that_replays_nothing: ReplaysNothing on Sqlite => parked_rows_are_replayed_or_discarded, "a-1 was replayed, and";
    one_that_discards_nothing: DiscardsNothing on Sqlite => parked_rows_are_replayed_or_discarded, "b-1 was discarded, and";
    one_that_forgets_what_was_sent: ForgetsWhatWasSent on Sqlite => sent_rows_are_never_due, "three of four were sent";
    one_that_purges_what_is_kept: PurgesWhatIsKept on Sqlite => sent_rows_are_never_due, "before their time";
}
