//! What is held of the queue's messages, until when, and what SQS still has to be told about each.
//!
//! Nothing here calls anyone and nothing reads a clock: arrivals, verdicts and answers go in, calls
//! come out. The rules:
//!
//! - A message is told about by one call at a time. A renewal that overtakes the release behind it
//!   would hide the message for another visibility timeout.
//! - A message is ours until `expires`, counted from the moment at which a call was sent, as nobody
//!   knows when in it SQS looked at its clock. After that its deliveries are lost, and not started.
//! - A message may carry several events. It is deleted when all of them are done, and given back when
//!   all have a verdict and one of them is to come again.
//! - What comes after a lost or released message of its group is given back, too: it would overtake it.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::time::Duration;

use onlyonce::event::RawEvent;
use onlyonce::source::{Delivery, Receipt, Redelivery, Settle, Settlement};
use tokio::time::Instant;

/// Nothing stays invisible for longer than this after it was received.
const LONGEST_HOLD: Duration = Duration::from_secs(12 * 3600);
/// More entries SQS does not take in one call.
pub(crate) const BATCH: usize = 10;
/// How long after a failed call the same is tried again, at first and at most.
const AGAIN: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// A message as it was received: one delivery for each event in it.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) handle: String,
    /// Of a FIFO queue: what SQS keeps in order.
    pub(crate) group: Option<String>,
    pub(crate) redelivery: Redelivery,
    pub(crate) events: Vec<RawEvent>,
}

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

#[derive(Debug)]
struct Message {
    handle: String,
    group: Option<String>,
    /// Its deliveries that have no verdict, whether handed out or not.
    open: usize,
    /// One of its deliveries is to come again, and not before this.
    released: Option<Instant>,
    /// Ours until then.
    expires: Instant,
    /// Twelve hours after it was received; not to be moved.
    ends: Instant,
    /// When it is to be looked at: a renewal, another try, or the end. It stands under this in `timers`.
    look_at: Instant,
    calling: bool,
    failures: u32,
}

impl Message {
    /// Not so at the end of the twelve hours.
    fn is_renewable(&self) -> bool {
        self.open > 0 && !self.calling && self.ends >= self.expires + Duration::from_secs(1)
    }

    fn verdict(&self) -> Verdict {
        match self.released {
            _ if self.open > 0 => Verdict::Open,
            Some(not_before) => Verdict::GiveBack(not_before),
            None => Verdict::Delete,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Open,
    GiveBack(Instant),
    Delete,
}

/// A delivery that nobody has asked for yet.
#[derive(Debug)]
struct Waiting {
    number: u64,
    delivery: Delivery,
}

/// All messages that were received and not yet deleted, given back or lost.
#[derive(Debug)]
pub(crate) struct Ledger {
    visibility: Duration,
    messages: BTreeMap<u64, Message>,
    timers: BTreeSet<(Instant, u64)>,
    waiting: VecDeque<Waiting>,
    /// What was handed out and has no verdict.
    outstanding: HashMap<Receipt, u64>,
    lost: Vec<Receipt>,
    to_delete: VecDeque<u64>,
    to_change: VecDeque<u64>,
    last_number: u64,
    last_receipt: u64,
    /// Deletions that SQS never confirmed. Harmless: such a message comes again and meets its claim.
    acks_lost: u64,
}

impl Ledger {
    pub(crate) fn new(visibility: Duration) -> Self {
        Self {
            visibility,
            messages: BTreeMap::new(),
            timers: BTreeSet::new(),
            waiting: VecDeque::new(),
            outstanding: HashMap::new(),
            lost: Vec::new(),
            to_delete: VecDeque::new(),
            to_change: VecDeque::new(),
            last_number: 0,
            last_receipt: 0,
            acks_lost: 0,
        }
    }

    /// Takes in what a call brought that was sent at `sent`.
    pub(crate) fn arrived(&mut self, sent: Instant, arrivals: Vec<Arrival>) {
        for arrival in arrivals {
            self.last_number += 1;
            let number = self.last_number;
            let ends = sent + LONGEST_HOLD;
            let expires = (sent + self.visibility).min(ends);
            let look_at = sent + self.visibility / 3;
            let message = Message {
                handle: arrival.handle,
                group: arrival.group,
                open: arrival.events.len(),
                released: None,
                expires,
                ends,
                look_at,
                calling: false,
                failures: 0,
            };
            self.timers.insert((look_at, number));
            // One without events has nothing to wait for.
            if message.verdict() == Verdict::Delete {
                self.to_delete.push_back(number);
            }
            self.messages.insert(number, message);
            for event in arrival.events {
                self.last_receipt += 1;
                let delivery =
                    Delivery::new(Receipt(self.last_receipt), event).with_redelivery(arrival.redelivery);
                self.waiting.push_back(Waiting { number, delivery });
            }
        }
    }

    /// The next deliveries, in the order of their arrival.
    pub(crate) fn hand_out(&mut self, max: usize) -> Vec<Delivery> {
        let count = max.min(self.waiting.len());
        let handed_out: Vec<Waiting> = self.waiting.drain(..count).collect();
        handed_out
            .into_iter()
            .map(|Waiting { number, delivery }| {
                self.outstanding.insert(delivery.receipt, number);
                delivery
            })
            .collect()
    }

    /// Receipts that are void since the last time this was asked.
    pub(crate) fn take_lost(&mut self) -> Vec<Receipt> {
        std::mem::take(&mut self.lost)
    }

    /// Whether [`take_lost`](Self::take_lost) has something to say.
    pub(crate) fn has_lost(&self) -> bool {
        !self.lost.is_empty()
    }

    /// Notes verdicts. Of a receipt that is void or has its verdict there is nothing to note.
    pub(crate) fn settle(&mut self, now: Instant, settlements: Vec<Settlement>) {
        let mut released = Vec::new();
        // All verdicts first: what the caller releases together is not lost by its neighbours.
        for settlement in settlements {
            let Some(number) = self.outstanding.remove(&settlement.receipt) else {
                continue;
            };
            let after = match settlement.verdict {
                Settle::Ack => None,
                Settle::Release { after } => {
                    released.push(number);
                    Some(now + after.unwrap_or_default())
                }
            };
            self.close(number, 1, after);
        }
        for number in released {
            self.give_back_followers(number, now);
        }
    }

    /// Gives back everything that was not handed out.
    pub(crate) fn give_back_waiting(&mut self, now: Instant) {
        for Waiting { number, .. } in std::mem::take(&mut self.waiting) {
            self.close(number, 1, Some(now));
        }
    }

    /// The source broke: every receipt is void. What has its verdict is still told.
    pub(crate) fn lose_all(&mut self) {
        self.waiting.clear();
        self.outstanding.clear();
        self.lost.clear();
        let open: Vec<u64> = self
            .messages
            .iter()
            .filter(|(_, message)| message.open > 0)
            .map(|(number, _)| *number)
            .collect();
        for number in open {
            self.remove(number);
        }
    }

    /// Notes verdicts on this many deliveries of a message, and what has to be told of it.
    fn close(&mut self, number: u64, deliveries: usize, not_before: Option<Instant>) {
        let Some(message) = self.messages.get_mut(&number) else {
            return;
        };
        message.open = message.open.saturating_sub(deliveries);
        message.released = message.released.max(not_before);
        if message.open > 0 || message.calling {
            return; // The answer to the call under way looks again.
        }
        self.tell(number);
    }

    /// Puts a message that has its verdict where the next call finds it.
    fn tell(&mut self, number: u64) {
        let Some(message) = self.messages.get(&number) else {
            return;
        };
        match message.verdict() {
            Verdict::Open => {}
            Verdict::Delete => self.to_delete.push_back(number),
            Verdict::GiveBack(_) => self.to_change.push_back(number),
        }
        // A call that has not gone out by the end of the visibility is not worth making.
        let expires = message.expires;
        self.look_again(number, expires);
    }

    /// Of the group of this message, itself and all behind it that have no verdict go back.
    fn give_back_followers(&mut self, number: u64, now: Instant) {
        let Some(group) = self.messages.get(&number).and_then(|m| m.group.clone()) else {
            return;
        };
        self.give_back_group(&group, number, now);
    }

    fn give_back_group(&mut self, group: &str, from: u64, now: Instant) {
        let followers: BTreeMap<u64, usize> = self
            .messages
            .range(from..)
            .filter(|(_, m)| m.open > 0 && m.group.as_deref() == Some(group))
            .map(|(number, m)| (*number, m.open))
            .collect();
        if followers.is_empty() {
            return;
        }
        self.withdraw(&followers.keys().copied().collect());
        for (number, open) in followers {
            self.close(number, open, Some(now));
        }
    }

    /// What of these messages waits is dropped; what was handed out is reported as lost.
    fn withdraw(&mut self, numbers: &HashSet<u64>) {
        self.waiting.retain(|waiting| !numbers.contains(&waiting.number));
        let mut lost: Vec<Receipt> = self
            .outstanding
            .extract_if(|_, number| numbers.contains(number))
            .map(|(receipt, _)| receipt)
            .collect();
        lost.sort_unstable();
        self.lost.extend(lost);
    }

    /// Looks at every message whose time has come: what ran out is lost, what is in hand is renewed.
    pub(crate) fn tick(&mut self, now: Instant) {
        let mut renewing = false;
        while let Some(&(at, number)) = self.timers.first()
            && at <= now
        {
            renewing |= self.look(number, now);
        }
        if !renewing {
            return;
        }
        // A call is under way anyway: what would be due soon goes with it.
        let soon = now + self.visibility / 12;
        let due_soon: Vec<u64> = self
            .timers
            .range(..=(soon, u64::MAX))
            .map(|(_, number)| *number)
            .filter(|number| {
                let message = &self.messages[number];
                message.is_renewable() && message.failures == 0 && message.expires > soon
            })
            .collect();
        for number in due_soon {
            self.renew(number);
        }
    }

    /// True if the message is to be renewed.
    fn look(&mut self, number: u64, now: Instant) -> bool {
        let Some(message) = self.messages.get(&number) else {
            return false;
        };
        if message.expires <= now {
            self.ran_out(number, now);
            return false;
        }
        if message.calling {
            let expires = message.expires;
            self.look_again(number, expires);
            return false;
        }
        let renewable = message.is_renewable();
        if renewable {
            self.renew(number);
        } else {
            self.tell(number);
        }
        renewable
    }

    fn renew(&mut self, number: u64) {
        self.to_change.push_back(number);
        let expires = self.messages[&number].expires;
        self.look_again(number, expires);
    }

    fn look_again(&mut self, number: u64, at: Instant) {
        if let Some(message) = self.messages.get_mut(&number) {
            self.timers.remove(&(message.look_at, number));
            message.look_at = at;
            self.timers.insert((at, number));
        }
    }

    /// Its visibility is over, or its handle void: somebody else may have it by now.
    fn ran_out(&mut self, number: u64, now: Instant) {
        let Some(message) = self.remove(number) else {
            return;
        };
        if message.verdict() == Verdict::Delete {
            self.acks_lost += 1;
        }
        self.withdraw(&HashSet::from([number]));
        if let Some(group) = message.group.filter(|_| message.open > 0) {
            self.give_back_group(&group, number, now);
        }
    }

    fn remove(&mut self, number: u64) -> Option<Message> {
        let message = self.messages.remove(&number)?;
        self.timers.remove(&(message.look_at, number));
        Some(message)
    }

    /// When [`tick`](Self::tick) has something to do.
    pub(crate) fn wake_at(&self) -> Option<Instant> {
        self.timers.first().map(|&(at, _)| at)
    }

    /// How many deletions wait for a call.
    pub(crate) fn deletions(&self) -> usize {
        self.to_delete.len()
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

    /// How many deliveries wait to be handed out.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// How many deliveries were handed out and have no verdict.
    pub(crate) fn outstanding(&self) -> usize {
        self.outstanding.len()
    }

    /// Everything was deleted, given back or lost.
    pub(crate) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    pub(crate) fn acks_lost(&self) -> u64 {
        self.acks_lost
    }
}

/// Rounded up: what is given back for a while never comes before.
fn whole_seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}
