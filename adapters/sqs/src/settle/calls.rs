//! What goes into the next call, and what its answers mean.

use std::time::Duration;

use tokio::time::Instant;

use super::Ledger;
use super::message::Verdict;

/// More entries SQS does not take in one call.
pub(crate) const BATCH: usize = 10;
/// How long after a failed call the same is tried again, at first and at most.
const AGAIN: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// One entry of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) number: u64,
    pub(crate) handle: String,
    /// For how long the message is to be invisible from now on; not used when it is deleted.
    pub(crate) seconds: i32,
    /// It is given back, and not kept.
    pub(crate) gives_back: bool,
}

/// What SQS answered about one entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    Done,
    /// The handle is void: the message is gone, or somebody else has it.
    Gone,
    /// Nobody knows, or not now.
    Again,
}

impl Ledger {
    /// How many deletions wait for a call.
    pub(crate) fn deletions(&self) -> usize {
        self.to_delete.len()
    }

    /// Whether there is a call that does not wait for more.
    pub(crate) fn fills_a_call(&self) -> bool {
        self.to_delete.len() >= BATCH || !self.to_change.is_empty()
    }

    /// The next deletions, as many as go into one call.
    pub(crate) fn next_deletions(&mut self) -> Vec<Entry> {
        let mut entries = Vec::new();
        while entries.len() < BATCH
            && let Some(number) = self.to_delete.pop_front()
        {
            if let Some(message) = self.messages.get_mut(&number).filter(|m| !m.calling) {
                message.calling = true;
                let (handle, ends) = (message.handle.clone(), message.ends);
                // Its answer decides, also when it comes late.
                self.look_again(number, ends);
                entries.push(Entry {
                    number,
                    handle,
                    seconds: 0,
                    gives_back: false,
                });
            }
        }
        entries
    }

    /// The next changes of visibility, as many as go into one call.
    pub(crate) fn next_changes(&mut self, now: Instant) -> Vec<Entry> {
        let mut entries = Vec::new();
        while entries.len() < BATCH
            && let Some(number) = self.to_change.pop_front()
        {
            let visibility = self.visibility;
            let Some(message) = self.messages.get_mut(&number).filter(|m| !m.calling) else {
                continue;
            };
            let left = message.ends.saturating_duration_since(now).as_secs();
            let (wanted, gives_back) = match message.verdict() {
                Verdict::GiveBack(not_before) => {
                    (whole_seconds(not_before.saturating_duration_since(now)), true)
                }
                Verdict::Open => (visibility.as_secs(), false),
                Verdict::Delete => continue,
            };
            message.calling = true;
            entries.push(Entry {
                number,
                handle: message.handle.clone(),
                seconds: i32::try_from(wanted.min(left)).unwrap_or(i32::MAX),
                gives_back,
            });
        }
        entries
    }

    /// What SQS said to a deletion.
    pub(crate) fn deleted(&mut self, now: Instant, number: u64, answer: Answer) {
        match answer {
            Answer::Done => {
                self.remove(number);
            }
            // Void for a message that is done: it was deleted before, or comes again and meets its claim.
            Answer::Gone => {
                self.acks_lost += u64::from(self.remove(number).is_some());
            }
            Answer::Again => self.try_again(now, number),
        }
    }

    /// What SQS said to a change of visibility that was sent at `sent`, to this many seconds.
    pub(crate) fn changed(&mut self, now: Instant, sent: Instant, entry: &Entry, answer: Answer) {
        let number = entry.number;
        let visibility = self.visibility;
        match answer {
            Answer::Again => self.try_again(now, number),
            Answer::Gone => self.ran_out(number, now),
            Answer::Done if entry.gives_back => {
                self.remove(number);
            }
            Answer::Done => {
                let Some(message) = self.messages.get_mut(&number) else {
                    return;
                };
                message.calling = false;
                message.failures = 0;
                let seconds = Duration::from_secs(u64::try_from(entry.seconds).unwrap_or_default());
                message.expires = (sent + seconds).min(message.ends);
                let (look_at, open) = ((sent + visibility / 3).min(message.expires), message.open > 0);
                if open {
                    self.look_again(number, look_at);
                } else {
                    self.tell(number);
                }
            }
        }
    }

    fn try_again(&mut self, now: Instant, number: u64) {
        let Some(message) = self.messages.get_mut(&number) else {
            return;
        };
        message.calling = false;
        let (first, most) = AGAIN;
        let pause = (first * 2_u32.saturating_pow(message.failures)).min(most);
        message.failures = (message.failures + 1).min(16);
        let at = (now + pause).min(message.expires);
        self.look_again(number, at);
    }
}

/// Rounded up: what is given back for a while never comes before.
fn whole_seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}
