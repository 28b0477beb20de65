//! Which lanes are ours, and until when by our own clock: pure.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::store::HeldLane;

/// The lanes that this instance holds.
#[derive(Debug)]
pub(crate) struct Tenure {
    lease: Duration,
    lanes: BTreeMap<u8, HeldLane>,
    /// When the last renewal that succeeded was begun: the database counted the lease from no earlier.
    since: Option<Instant>,
    /// When the next renewal is due.
    next: Instant,
}

impl Tenure {
    pub(crate) fn new(lease: Duration, now: Instant) -> Self {
        Self {
            lease,
            lanes: BTreeMap::new(),
            since: None,
            next: now,
        }
    }

    /// When the next renewal is due: every third of the lease.
    pub(crate) fn renew_at(&self) -> Instant {
        self.next
    }

    /// Until when rows may be published: with less than a third of the lease left, a row might still be on
    /// its way when the lane is another's.
    pub(crate) fn good_until(&self) -> Option<Instant> {
        self.since.map(|since| since + self.lease * 2 / 3)
    }

    pub(crate) fn is_good(&self, now: Instant) -> bool {
        self.good_until().is_some_and(|until| now < until)
    }

    /// A renewal is under way; however long it takes, there is no second one.
    pub(crate) fn renewing(&mut self, now: Instant) {
        self.next = now + self.lease / 3;
    }

    /// A renewal that was begun then has failed: soon again, while there is time.
    pub(crate) fn not_renewed(&mut self, now: Instant) {
        self.next = self.next.min(now + self.lease / 12);
    }

    /// A renewal that was begun then has given these lanes. Returns those that were lost, also those
    /// that somebody else has had meanwhile, and whether there are new ones.
    pub(crate) fn renewed(&mut self, began: Instant, held: &[HeldLane]) -> Changes {
        let now: BTreeMap<u8, HeldLane> = held.iter().map(|lane| (lane.lane, *lane)).collect();
        let lost = self.lanes.values().filter(|old| now.get(&old.lane) != Some(old));
        let lost: Vec<u8> = lost.map(|old| old.lane).collect();
        let gained = now
            .values()
            .filter(|new| self.lanes.get(&new.lane) != Some(new))
            .count();
        self.lanes = now;
        self.since = Some(began);
        Changes { lost, gained }
    }

    pub(crate) fn lane(&self, lane: u8) -> Option<HeldLane> {
        self.lanes.get(&lane).copied()
    }

    pub(crate) fn lanes(&self) -> impl ExactSizeIterator<Item = u8> + '_ {
        self.lanes.keys().copied()
    }
}

/// What a renewal has changed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Changes {
    pub(crate) lost: Vec<u8>,
    pub(crate) gained: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(lanes: &[(u8, i64)]) -> Vec<HeldLane> {
        lanes
            .iter()
            .map(|&(lane, fence)| HeldLane { lane, fence })
            .collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_third_of_the_lease_is_left_unused() {
        let began = Instant::now();
        let mut tenure = Tenure::new(Duration::from_secs(6), began);
        assert_eq!((tenure.renew_at(), tenure.is_good(began)), (began, false));

        tenure.renewing(began);
        let answered = began + Duration::from_secs(1);
        tenure.renewed(began, &held(&[(7, 1)]));
        assert_eq!(
            tenure.renew_at(),
            began + Duration::from_secs(2),
            "counted from when it was asked"
        );
        assert!(tenure.is_good(answered));
        assert!(tenure.is_good(began + Duration::from_millis(3999)));
        assert!(!tenure.is_good(began + Duration::from_secs(4)));

        let again = tenure.renew_at();
        tenure.renewing(again);
        tenure.not_renewed(again + Duration::from_millis(10));
        assert_eq!(tenure.renew_at(), again + Duration::from_millis(510));
        assert!(
            !tenure.is_good(began + Duration::from_secs(4)),
            "a failure lengthens nothing"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_lane_that_another_has_had_meanwhile_is_lost() {
        let now = Instant::now();
        let mut tenure = Tenure::new(Duration::from_secs(6), now);
        for (lanes, lost, gained) in [
            (&[(1, 1), (2, 1), (3, 4)][..], &[][..], 3),
            (&[(1, 1), (2, 1), (3, 4)], &[], 0),
            (&[(1, 1), (3, 5)], &[2, 3], 1),
            (&[], &[1, 3], 0),
        ] {
            let changes = tenure.renewed(now, &held(lanes));
            let lost = lost.to_vec();
            assert_eq!(changes, Changes { lost, gained }, "{lanes:?}");
        }
    }
}
