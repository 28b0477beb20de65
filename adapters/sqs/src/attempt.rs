//! Calls for messages of a FIFO queue that are made again under the same name.
//!
//! A call whose answer is lost may have taken messages, and their groups then stand still until the
//! visibility timeout is over. Called again with the same `ReceiveRequestAttemptId`, SQS gives the same
//! messages, with the timeout starting anew. Standard queues know no such thing, and nothing of theirs
//! stands still.

use std::collections::VecDeque;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::time::Duration;

use tokio::time::Instant;

/// SQS remembers a call for five minutes; this leaves time for one more.
const REMEMBERED: Duration = Duration::from_secs(4 * 60);

/// One call for messages, however often it is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Attempt {
    /// How many messages it asks for.
    pub(crate) ask: usize,
    /// Its name; on a standard queue it has none.
    pub(crate) id: Option<String>,
    first: Instant,
}

/// Names for calls, and those whose answer was lost.
#[derive(Debug)]
pub(crate) struct Attempts {
    /// Nobody else's names begin like this: SQS would give them our messages. `None`: no FIFO queue.
    ours: Option<String>,
    last: u64,
    /// From then on the messages of a call are visible again by themselves.
    good_for: Duration,
    unanswered: VecDeque<Attempt>,
}

impl Attempts {
    pub(crate) fn new(fifo: bool, visibility: Duration) -> Self {
        // The keys of a hasher are random, from the operating system.
        let random = || RandomState::new().hash_one(0);
        Self {
            ours: fifo.then(|| format!("onlyonce-{:016x}{:016x}", random(), random())),
            last: 0,
            good_for: visibility.min(REMEMBERED),
            unanswered: VecDeque::new(),
        }
    }

    /// A new call.
    pub(crate) fn begin(&mut self, now: Instant, ask: usize) -> Attempt {
        self.last += 1;
        Attempt {
            ask,
            id: self.ours.as_ref().map(|ours| format!("{ours}-{}", self.last)),
            first: now,
        }
    }

    /// Nobody knows whether this one has taken messages.
    pub(crate) fn unanswered(&mut self, attempt: Attempt) {
        if attempt.id.is_some() {
            self.unanswered.push_back(attempt);
        }
    }

    /// The next one to make again.
    pub(crate) fn next(&mut self, now: Instant) -> Option<&Attempt> {
        let good_for = self.good_for;
        self.unanswered.retain(|attempt| attempt.first + good_for > now);
        self.unanswered.front()
    }

    /// Takes what [`next`](Self::next) has shown.
    pub(crate) fn take(&mut self) -> Option<Attempt> {
        self.unanswered.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VISIBILITY: Duration = Duration::from_secs(30);

    #[test]
    fn a_call_without_an_answer_is_made_again_while_its_messages_are_away() {
        let now = Instant::now();
        let mut attempts = Attempts::new(true, VISIBILITY);
        let (first, second) = (attempts.begin(now, 10), attempts.begin(now, 3));
        assert_ne!(first.id, second.id);
        assert_eq!(attempts.next(now), None, "nothing is lost yet");
        attempts.unanswered(first.clone());
        attempts.unanswered(second.clone());
        assert_eq!(attempts.next(now + VISIBILITY / 2), Some(&first));
        assert_eq!(attempts.take(), Some(first.clone()));
        attempts.unanswered(first);
        assert_eq!(attempts.next(now + VISIBILITY / 2), Some(&second), "in turn");
        assert_eq!(attempts.next(now + VISIBILITY), None, "they are visible again");
        let mut long = Attempts::new(true, Duration::from_secs(3600));
        let call = long.begin(now, 1);
        long.unanswered(call);
        assert_eq!(long.next(now + REMEMBERED), None, "SQS has forgotten it");
    }

    #[test]
    fn nobody_else_has_the_same_names_and_a_standard_queue_has_none() {
        let now = Instant::now();
        let name = |fifo| Attempts::new(fifo, VISIBILITY).begin(now, 1).id;
        assert_ne!(name(true), name(true));
        assert!(name(true).is_some_and(|name| name.len() <= 128));
        assert_eq!(name(false), None);
        let mut attempts = Attempts::new(false, VISIBILITY);
        let call = attempts.begin(now, 1);
        attempts.unanswered(call);
        assert_eq!(attempts.next(now), None);
    }
}
