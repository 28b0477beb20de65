//! What the brokers have said and the table does not know yet: pure.

use std::time::Duration;

use tokio::time::Instant;

use crate::delay::spread;
use crate::store::HeldLane;

/// How long a mark that failed is left alone, at first and at most.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// How many rows one statement marks at most.
const BATCH: usize = 1000;

/// Rows whose end has to be written down. They are published and must not be again: if writing fails,
/// only the writing is tried again, and nothing else is published until it succeeds.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    sent: Vec<i64>,
    refused: Vec<Refused>,
    /// What is being written.
    writing: Writing,
    /// Failures in a row.
    failed: u32,
    not_before: Option<Instant>,
}

/// A refusal to be written down.
#[derive(Debug, Clone)]
pub(crate) struct Refused {
    pub(crate) id: i64,
    pub(crate) lane: HeldLane,
    pub(crate) error: String,
    /// `None`: park it.
    pub(crate) again: Option<Duration>,
}

#[derive(Debug, Default)]
enum Writing {
    #[default]
    Nothing,
    Sent(Vec<i64>),
    Refused(Vec<Refused>),
}

impl Marks {
    pub(crate) fn sent(&mut self, id: i64) {
        self.sent.push(id);
    }

    pub(crate) fn refused(&mut self, refused: Refused) {
        self.refused.push(refused);
    }

    /// How many rows the table does not know of yet.
    pub(crate) fn len(&self) -> usize {
        self.ids().count()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = i64> + '_ {
        let (sent, refused): (&[i64], &[Refused]) = match &self.writing {
            Writing::Nothing => (&[], &[]),
            Writing::Sent(ids) => (ids, &[]),
            Writing::Refused(refused) => (&[], refused),
        };
        let refused = refused.iter().chain(&self.refused).map(|r| r.id);
        sent.iter().chain(&self.sent).copied().chain(refused)
    }

    /// The last writing has failed, so nothing may be published.
    pub(crate) fn is_failing(&self) -> bool {
        self.failed > 0
    }

    /// When the next writing may begin, if there is something to write.
    pub(crate) fn next_at(&self, now: Instant, refusals_too: bool) -> Option<Instant> {
        let something = !self.sent.is_empty() || refusals_too && !self.refused.is_empty();
        something.then(|| self.not_before.unwrap_or(now))
    }

    /// Whether there are refusals that are not known to be written, behind which their keys wait.
    pub(crate) fn has_refusals(&self) -> bool {
        !self.refused.is_empty() || matches!(self.writing, Writing::Refused(_))
    }

    /// The refusals to be written now, if there are any.
    pub(crate) fn take_refused(&mut self) -> Option<Vec<Refused>> {
        if self.refused.is_empty() {
            return None;
        }
        let batch: Vec<_> = self.refused.drain(..self.refused.len().min(BATCH)).collect();
        self.writing = Writing::Refused(batch.clone());
        Some(batch)
    }

    /// The confirmed rows to be marked now, if there are any.
    pub(crate) fn take_sent(&mut self) -> Option<Vec<i64>> {
        if self.sent.is_empty() {
            return None;
        }
        let batch: Vec<_> = self.sent.drain(..self.sent.len().min(BATCH)).collect();
        self.writing = Writing::Sent(batch.clone());
        Some(batch)
    }

    /// What was being written is written. Returns the refusals among it. Says whether that ends a failure.
    pub(crate) fn written(&mut self) -> (Vec<Refused>, bool) {
        self.not_before = None;
        let recovered = std::mem::take(&mut self.failed) > 0;
        match std::mem::take(&mut self.writing) {
            Writing::Refused(refused) => (refused, recovered),
            Writing::Sent(_) | Writing::Nothing => (Vec::new(), recovered),
        }
    }

    /// What was being written may be written or not: it will be again. True if this is the first failure.
    pub(crate) fn not_written(&mut self, now: Instant) -> bool {
        match std::mem::take(&mut self.writing) {
            Writing::Sent(ids) => self.sent.extend(ids),
            Writing::Refused(refused) => self.refused.extend(refused),
            Writing::Nothing => {}
        }
        self.failed += 1;
        self.not_before = Some(now + spread(PAUSE_MIN, PAUSE_MAX, self.failed));
        self.failed == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_could_not_be_written_is_kept_and_tried_again_later() {
        let mut marks = Marks::default();
        let now = Instant::now();
        assert_eq!(marks.next_at(now, true), None);
        for id in 0..1500 {
            marks.sent(id);
        }
        assert_eq!(marks.take_sent().unwrap().len(), BATCH);
        marks.sent(1500);
        assert_eq!(marks.len(), 1501, "what is being written is not known to be");
        assert!(marks.not_written(now));
        assert_eq!((marks.len(), marks.is_failing()), (1501, true));
        let later = marks.next_at(now, true).unwrap();
        assert!(later >= now + PAUSE_MIN);
        marks.take_sent();
        assert!(!marks.not_written(later), "one outage is one warning");
        marks.take_sent();
        assert!(marks.written().1);
        assert_eq!((marks.len(), marks.is_failing()), (501, false));
        let mut left: Vec<i64> = marks.ids().collect();
        left.extend(marks.take_sent().unwrap());
        left.sort_unstable();
        left.dedup();
        assert_eq!(left.len(), 501, "each id is there once");
        marks.written();
        assert!(marks.is_empty());
    }

    #[tokio::test]
    async fn refusals_come_back_when_they_are_written() {
        let mut marks = Marks::default();
        marks.refused(Refused {
            id: 7,
            lane: HeldLane { lane: 1, fence: 1 },
            error: "too large".into(),
            again: None,
        });
        let now = Instant::now();
        assert_eq!(
            (marks.next_at(now, true), marks.next_at(now, false)),
            (Some(now), None)
        );
        assert!(marks.has_refusals());
        assert_eq!(marks.take_refused().unwrap().len(), 1);
        assert!(marks.has_refusals(), "what is being written is not known to be");
        assert_eq!(marks.ids().collect::<Vec<_>>(), [7]);
        let (refused, recovered) = marks.written();
        assert_eq!((refused[0].id, recovered, marks.is_empty()), (7, false, true));
        assert!(!marks.has_refusals());
    }
}
