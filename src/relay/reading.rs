//! When the table is read, and of which lanes: pure.

use std::time::Duration;

use tokio::time::Instant;

use crate::store::LANES;

/// Signals that come closer together than this are answered by one read.
const GAP: Duration = Duration::from_millis(5);

/// How long the table is left alone at most after a read that took long. One that a lost link or a frozen server held
/// up for a minute says nothing about the next.
const LONGEST_REST: Duration = Duration::from_secs(5);

/// How long a read for a few lanes waits for others to join it. It passes over what is in hand as one for all of them
/// does, and the lanes are read again long before they are empty.
const COMPANY: Duration = Duration::from_millis(20);

/// What is known of the rows that are not in hand.
///
/// There is no cursor: ids become visible in another order than they are given out in, and a transaction
/// that commits late would be passed over for ever. Each read asks for the first rows that are due.
pub(crate) struct Reading {
    poll: Duration,
    /// Something may be there that was not at the last read.
    wanted: bool,
    /// When the last read began.
    last: Option<Instant>,
    /// How long it took. Where much is passed over, such as the rows of a broker that is down, it takes long, and is
    /// not repeated before the database had as much time for others.
    took: Duration,
    /// When a read was answered last.
    answered: Option<Instant>,
    /// Lanes of which the last read did not give everything.
    more: [bool; LANES as usize],
}

impl Reading {
    pub(crate) fn new(poll: Duration) -> Self {
        Self {
            poll,
            wanted: true,
            last: None,
            took: Duration::ZERO,
            answered: None,
            more: [false; LANES as usize],
        }
    }

    /// There may be something new.
    pub(crate) fn wake(&mut self) {
        self.wanted = true;
    }

    /// When the next read begins. `lanes` are those with room; what is paused is due again when its pause ends.
    pub(crate) fn at(&self, lanes: &[u8], pauses: &[Instant], now: Instant) -> Instant {
        let all = self.all_at(pauses).unwrap_or(now);
        let known = self.more.iter().filter(|more| **more).count();
        match lanes.iter().filter(|&&lane| self.more[usize::from(lane)]).count() {
            0 => all,
            few if few * 2 < known => all.min(self.answered.map_or(now, |at| at + COMPANY)),
            _ => now,
        }
    }

    /// Of which of these lanes a read that begins now asks: of all if there might be something new, or else of
    /// those that are known to have more.
    pub(crate) fn begin(&mut self, mut lanes: Vec<u8>, pauses: &[Instant], now: Instant) -> Vec<u8> {
        if self.all_at(pauses).is_none_or(|at| at <= now) {
            self.wanted = false;
            self.last = Some(now);
        } else {
            lanes.retain(|&lane| self.more[usize::from(lane)]);
        }
        lanes
    }

    /// When all lanes are to be read; `None` before the first time.
    fn all_at(&self, pauses: &[Instant]) -> Option<Instant> {
        let last = self.last?;
        let soonest = last + GAP.max(self.took + self.took.min(LONGEST_REST));
        let regular = if self.wanted { soonest } else { last + self.poll };
        // One read for each pause.
        let ends = pauses.iter().copied().filter(|end| *end > last);
        Some(ends.fold(regular, Instant::min).max(soonest))
    }

    /// A read that began then has been answered now.
    pub(crate) fn answered(&mut self, began: Instant, now: Instant) {
        self.took = now - began;
        self.answered = Some(now);
    }

    /// A read has failed: all lanes again, but not before the next poll.
    pub(crate) fn failed(&mut self) {
        self.more = [false; LANES as usize];
    }

    /// Whether there is more of this lane than was read.
    pub(crate) fn has_more(&mut self, lane: u8, more: bool) {
        self.more[usize::from(lane)] = more;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_reads_at_once_when_there_is_more_soon_when_woken_and_else_at_times() {
        let now = Instant::now();
        let mut reading = Reading::new(Duration::from_millis(500));
        assert_eq!(reading.at(&[1, 2], &[], now), now);
        assert_eq!(reading.begin(vec![1, 2], &[], now), [1, 2]);
        assert_eq!(reading.at(&[1, 2], &[], now), now + Duration::from_millis(500));

        reading.has_more(2, true);
        assert_eq!(reading.at(&[1, 2], &[], now), now);
        assert_eq!(
            reading.begin(vec![1, 2], &[], now),
            [2],
            "the others were read to their end"
        );
        assert_eq!(
            reading.at(&[1], &[], now),
            now + Duration::from_millis(500),
            "2 has no room"
        );
        reading.has_more(2, false);

        reading.wake();
        assert_eq!(reading.at(&[1, 2], &[], now), now + GAP);
        assert_eq!(reading.begin(vec![1, 2], &[], now + GAP), [1, 2]);
        let last = now + GAP;
        let end = last + Duration::from_millis(100);
        assert_eq!(reading.at(&[1], &[last, end], last), end);
        assert_eq!(reading.begin(vec![1], &[end], end), [1]);
        assert_eq!(
            reading.at(&[1], &[end], end),
            end + Duration::from_millis(500),
            "one read for one pause"
        );

        reading.has_more(1, true);
        reading.failed();
        assert_eq!(
            reading.at(&[1], &[], end),
            end + Duration::from_millis(500),
            "a database that is down is not asked all the time"
        );

        reading.answered(end, end + Duration::from_secs(2));
        reading.wake();
        let rested = end + Duration::from_secs(4);
        assert_eq!(
            reading.at(&[1], &[], end),
            rested,
            "what takes long is not done all the time"
        );

        reading.answered(end, end + Duration::from_secs(60));
        assert_eq!(
            reading.at(&[1], &[], end),
            end + Duration::from_secs(65),
            "what was held up once is not waited for as long again"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_few_lanes_wait_for_company_and_not_for_long() {
        let now = Instant::now();
        let mut reading = Reading::new(Duration::from_millis(500));
        reading.begin((0..LANES).collect(), &[], now);
        reading.answered(now, now);
        (0..8).for_each(|lane| reading.has_more(lane, true));
        assert_eq!(
            reading.at(&[0, 1, 2, 3], &[], now),
            now,
            "half of those that have more"
        );
        assert_eq!(reading.at(&[0, 1, 2, 9], &[], now), now + COMPANY);
        assert_eq!(reading.begin(vec![0, 1, 2, 9], &[], now + COMPANY), [0, 1, 2]);
        (1..8).for_each(|lane| reading.has_more(lane, false));
        assert_eq!(
            reading.at(&[0, 1, 2], &[], now),
            now,
            "it is the only one that has more"
        );
    }
}
