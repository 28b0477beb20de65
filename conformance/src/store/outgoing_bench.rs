//! What the promises of the outbox have in hand beside a [`Bench`].

use std::time::Duration;

use onlyonce::publisher::Message;
use onlyonce::store::{
    DueRequest, DueRow, HeldLane, LANES, Next, Outgoing as _, OutgoingRow, Owner, Relaying as _, Store as _,
};

use super::StoreHarness;
use super::bench::{Bench, LONG, Sample, refused};
use crate::broken::ensure;
use crate::{Broken, Result};

/// The relay of the suite.
pub(super) const RELAY: &str = "default";

/// The number of every lane.
const ALL: [u8; LANES as usize] = {
    let mut lanes = [0; LANES as usize];
    let mut lane = 0;
    while lane < LANES {
        lanes[lane as usize] = lane;
        lane += 1;
    }
    lanes
};

pub(super) const ONE: Owner = Owner::from_u128(1);
pub(super) const OTHER: Owner = Owner::from_u128(2);

/// A row with this event id and key, for a destination of everybody's.
pub(super) fn row(id: &str, key: Option<&'static str>) -> Result<OutgoingRow> {
    let mut message = Message::new("a", "shop", id, "body");
    message.key = key.map(Into::into);
    Ok(OutgoingRow::new(RELAY, "memory:a".parse()?, message))
}

/// Rows with these event ids, each with the key before its hyphen, if it has one.
pub(super) fn rows(ids: &[&'static str]) -> Result<Vec<OutgoingRow>> {
    ids.iter()
        .map(|id| row(id, id.split_once('-').map(|(key, _)| key)))
        .collect()
}

impl<H: StoreHarness> Bench<'_, H> {
    /// Commits rows, as the work of an event of its own.
    pub(super) async fn write(&self, rows: &[OutgoingRow]) -> Result {
        let mut conn = self.store.open().await?;
        let event = Sample::new(&format!("writes-{}", fastrand::u64(..)), "a")?;
        let (mut tx, _, claims) = self.claim(&mut conn, &[&event]).await?;
        self.store.write_outgoing(&mut tx, rows).await?;
        self.store.commit(tx, claims, Next::Rest).await.map_err(refused)
    }

    pub(super) async fn outgoing(&self) -> Result<i64> {
        self.number("SELECT count(*) FROM {outbox}").await
    }

    /// All lanes, held by this owner for long.
    pub(super) async fn all_lanes(&self, owner: Owner) -> Result<Vec<HeldLane>> {
        let held = self.store.hold_lanes(RELAY, owner, LONG).await?;
        ensure!(
            held.len() == usize::from(LANES),
            "a relay that is alone holds {} lanes of {LANES}",
            held.len()
        );
        Ok(held)
    }

    /// What is due in all lanes, as this changes the request.
    pub(super) async fn due<'a>(&self, change: impl FnOnce(&mut DueRequest<'a>)) -> Result<Vec<DueRow>> {
        let mut request = DueRequest::new(RELAY, &ALL);
        change(&mut request);
        let due = self.store.due(&request).await?;
        due.into_iter()
            .map(|row| {
                row.map_err(|row| Broken::new(format!("a row of its own cannot be read: {}", row.why)))
            })
            .collect()
    }

    /// The row of this event, which is due.
    pub(super) async fn due_row(&self, event_id: &str) -> Result<DueRow> {
        let due = self.due(|request| request.overtake = true).await?;
        let found = due.into_iter().find(|row| row.message.event_id == event_id);
        found.ok_or_else(|| Broken::new(format!("{event_id} is not due")))
    }
}

/// The event ids, in order.
pub(super) fn ids(rows: &[DueRow]) -> Vec<&str> {
    rows.iter().map(|row| row.message.event_id.as_str()).collect()
}

/// The lane of this row, as its owner holds it.
pub(super) fn lane_of(row: &DueRow, held: &[HeldLane]) -> Result<HeldLane> {
    let lane = held.iter().find(|held| held.lane == row.lane);
    lane.copied()
        .ok_or_else(|| Broken::new(format!("lane {} is not held", row.lane)))
}

/// A time for which a row that waits is not due during a promise.
pub(super) const LATER: Option<Duration> = Some(LONG);
