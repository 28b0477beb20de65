//! From the table to the hand, and back to the table what has become of it.

use std::collections::HashSet;

use tokio::time::Instant;

use super::marks::Refused;
use super::pace::{Admits, Pace};
use super::work::{ABSENT, Found, Marked, Read, Work};
use crate::store::{DueRequest, DueRow, LANES, Refusal, Relaying, UnreadableRow};
use crate::telemetry;

/// How many shares of a lane one read brings. A read passes over what is in hand, so that one that brings little passes
/// over more than it brings. One that brings much lets a long chain of a single key keep the lane's other keys
/// from theirs for longer.
const AHEAD: usize = 4;

/// With how many shares of a lane in hand it is read again: one is on its way, the other goes while it is read.
const LOW: usize = 2;

impl<S: Relaying> Work<S> {
    /// Begins a mark and a read, beside each other. A read leaves out what is in hand or not marked when it begins, so
    /// that it does not matter when a row is marked as sent. When a refusal is written does: a read that is older
    /// than that finds the later rows of the key due. So refusals wait for the read, and reads for them.
    pub(super) fn mark_and_read(&mut self, now: Instant) {
        if self.mark_at(now).is_some_and(|at| at <= now) {
            if self.marks.has_refusals() && self.read.is_none() {
                self.mark_refused();
            } else {
                self.mark_sent();
            }
        }
        if self.read.is_none() && self.read_at(now).is_some_and(|at| at <= now) {
            self.read(now);
        }
    }

    /// When the next mark begins; `None`: not before something else has happened.
    pub(super) fn mark_at(&self, now: Instant) -> Option<Instant> {
        let refusals_too = self.read.is_none();
        self.mark
            .is_none()
            .then(|| self.marks.next_at(now, refusals_too))?
    }

    fn mark_sent(&mut self) {
        let Some(ids) = self.marks.take_sent() else { return };
        let shared = self.shared.clone();
        let keep = shared.settings.keep_sent.is_some();
        self.mark = Some(Box::pin(async move {
            Marked::Sent(shared.store.mark_sent(&ids, keep).await)
        }));
    }

    fn mark_refused(&mut self) {
        let Some(batch) = self.marks.take_refused() else {
            return;
        };
        let shared = self.shared.clone();
        self.mark = Some(Box::pin(async move {
            let refusals: Vec<_> = batch
                .iter()
                .map(|refused| Refusal {
                    id: refused.id,
                    lane: refused.lane,
                    error: &refused.error,
                    again: refused.again,
                })
                .collect();
            Marked::Refused(shared.store.mark_refused(&refusals).await)
        }));
    }

    pub(crate) fn marked(&mut self, answer: Marked) {
        match answer {
            Marked::Sent(Ok(())) => self.written(&[]),
            Marked::Refused(Ok(ours)) => self.written(&ours),
            Marked::Sent(Err(error)) | Marked::Refused(Err(error)) => {
                if self.marks.not_written(Instant::now()) {
                    tracing::warn!(
                        relay = &*self.shared.name,
                        %error,
                        "published events could not be marked; nothing more is published until they are"
                    );
                }
            }
        }
    }

    pub(crate) fn found(&mut self, Found { read, rows }: Found) {
        match rows {
            Ok(rows) => {
                if self.unread.take().is_some() {
                    tracing::info!(relay = &*self.shared.name, "outgoing events can be read again");
                }
                self.reading.answered(read.began, Instant::now());
                self.take(&read, rows);
            }
            Err(error) => {
                self.reading.failed();
                if self.unread.replace(error.to_string()).is_none() {
                    tracing::warn!(relay = &*self.shared.name, %error, "outgoing events cannot be read");
                }
            }
        }
    }

    fn written(&mut self, ours: &[i64]) {
        let (refused, recovered) = self.marks.written();
        if recovered {
            tracing::info!(relay = &*self.shared.name, "published events can be marked again");
        }
        for Refused { id, error, again, .. } in refused {
            self.hand.refused(id, self.shared.settings.overtake);
            if again.is_none() && ours.contains(&id) {
                telemetry::row_parked(&self.shared.name);
                tracing::warn!(
                    relay = &*self.shared.name,
                    row = id,
                    error,
                    "an outgoing event is parked"
                );
            }
        }
    }

    /// When the next read begins; `None`: not before something else has happened.
    pub(super) fn read_at(&self, now: Instant) -> Option<Instant> {
        let lanes = self.lanes_to_read(now);
        (!lanes.is_empty()).then(|| self.reading.at(&lanes, &self.pauses(), now))
    }

    /// The lanes that have room, if anything may be read.
    fn lanes_to_read(&self, now: Instant) -> Vec<u8> {
        let waits = self.stopping.is_some()
            || self.marks.is_failing()
            || self.marks.has_refusals()
            || !self.tenure.is_good(now)
            || self.hand.bytes() >= self.shared.settings.in_flight_bytes
            || self
                .outlets
                .iter()
                .all(|outlet| outlet.pace.admits(now) == Admits::Nothing);
        if waits {
            return Vec::new();
        }
        let low = self.share() * LOW;
        self.tenure
            .lanes()
            .filter(|&lane| self.hand.in_lane(lane) <= low)
            .collect()
    }

    /// How many rows of a lane may be on their way if all lanes are busy.
    fn share(&self) -> usize {
        self.shared
            .settings
            .in_flight
            .div_ceil(self.tenure.lanes().len().max(1))
            .max(2)
    }

    /// When each of the present pauses ends.
    pub(super) fn pauses(&self) -> Vec<Instant> {
        let publishers = self.outlets.iter().map(|outlet| &outlet.pace);
        let paces = self.destinations.values().chain(publishers);
        paces
            .filter_map(Pace::closed_until)
            .chain(self.absent.values().copied())
            .collect()
    }

    fn read(&mut self, now: Instant) {
        let lanes = self.lanes_to_read(now);
        let lanes = self.reading.begin(lanes, &self.pauses(), now);
        let closed = |pace: &Pace| pace.admits(now) == Admits::Nothing;
        let paused = self.destinations.iter().filter(|(_, pace)| closed(pace));
        let paused: Vec<String> = paused.map(|(to, _)| to.clone()).collect();
        let down = self.outlets.iter().filter(|outlet| closed(&outlet.pace));
        let absent = self.absent.iter().filter(|(_, until)| **until > now);
        let down: Vec<String> = down
            .map(|outlet| outlet.name.clone())
            .chain(absent.map(|(name, _)| name.clone()))
            .collect();
        let except: Vec<i64> = self.hand.ids().chain(self.marks.ids()).collect();
        let read = Read {
            lanes: lanes.iter().filter_map(|&lane| self.tenure.lane(lane)).collect(),
            limit: self.share() * AHEAD,
            bytes: self.shared.settings.in_flight_bytes - self.hand.bytes(),
            dropped: self.hand.dropped(),
            began: now,
        };
        let shared = self.shared.clone();
        self.read = Some(Box::pin(async move {
            let rows = shared
                .store
                .due(&DueRequest {
                    relay: &shared.name,
                    lanes: &lanes,
                    except: &except,
                    paused: &paused.iter().map(String::as_str).collect::<Vec<_>>(),
                    down: &down.iter().map(String::as_str).collect::<Vec<_>>(),
                    overtake: shared.settings.overtake,
                    limit: read.limit,
                    bytes: read.bytes,
                })
                .await;
            Found { read, rows }
        }));
    }

    fn take(&mut self, read: &Read, rows: Vec<Result<DueRow, UnreadableRow>>) {
        if self.hand.dropped() != read.dropped {
            // Rows were forgotten while it was read, as if they had been in hand. Later ones of their keys
            // must not be taken without them.
            return self.reading.wake();
        }
        let mut per_lane = [0; LANES as usize];
        let mut unreadable = HashSet::new();
        let before = self.hand.bytes();
        self.absent.retain(|_, until| *until > read.began);
        for row in rows {
            match row {
                Ok(row) => {
                    per_lane[usize::from(row.lane)] += 1;
                    if row.order.is_none_or(|order| !unreadable.contains(&order)) {
                        self.admit(row, read);
                    }
                }
                Err(row) => {
                    per_lane[usize::from(row.lane)] += 1;
                    unreadable.extend(row.order);
                    self.park_unread(row, read);
                }
            }
        }
        let cut = self.hand.bytes() - before >= read.bytes;
        for lane in &read.lanes {
            let full = per_lane[usize::from(lane.lane)] >= read.limit;
            self.reading.has_more(lane.lane, full || cut);
        }
    }

    /// Takes a row in hand, unless something has changed since it was asked for.
    fn admit(&mut self, row: DueRow, read: &Read) {
        let now = Instant::now();
        let lane = self
            .tenure
            .lane(row.lane)
            .filter(|lane| read.lanes.contains(lane));
        let Some(lane) = lane else { return };
        let name = row.destination.publisher();
        let Some(outlet) = self.outlets.iter().position(|outlet| outlet.name == name) else {
            let known = self.absent.insert(name.to_owned(), now + ABSENT);
            if known.is_none() {
                tracing::error!(
                    relay = &*self.shared.name,
                    publisher = name,
                    destination = row.destination.as_str(),
                    "no publisher of this name was given to the relay; its events wait and nothing is counted"
                );
            }
            return;
        };
        if !self.is_paused(outlet, row.destination.as_str(), now) && self.hand.get(row.id).is_none() {
            self.hand.take(row, lane, outlet);
        }
    }

    /// A row that this version cannot read is parked, for a person to see. Later ones of its key wait behind it.
    fn park_unread(&mut self, row: UnreadableRow, read: &Read) {
        let lane = self
            .tenure
            .lane(row.lane)
            .filter(|lane| read.lanes.contains(lane));
        if let Some(lane) = lane {
            self.marks.refused(Refused {
                id: row.id,
                lane,
                error: row.why,
                again: None,
            });
        }
    }
}
