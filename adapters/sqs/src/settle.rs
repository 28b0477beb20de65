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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const VISIBILITY: Duration = Duration::from_secs(30);

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn arrivals(names: &[&str]) -> Vec<Arrival> {
        names
            .iter()
            .map(|name| Arrival {
                handle: (*name).to_owned(),
                // a1, a2: of the group a. A name without a number has none.
                group: (name.len() > 1).then(|| name[..1].to_owned()),
                redelivery: Redelivery::No,
                events: vec![RawEvent::default()],
            })
            .collect()
    }

    /// All of these, received and handed out at `now`.
    fn in_hand(now: Instant, names: &[&str]) -> (Ledger, Vec<Delivery>) {
        let mut ledger = Ledger::new(VISIBILITY);
        ledger.arrived(now, arrivals(names));
        let deliveries = ledger.hand_out(names.len());
        (ledger, deliveries)
    }

    fn changes(ledger: &mut Ledger, now: Instant) -> Vec<(String, i32)> {
        ledger.tick(now);
        let entries = ledger.next_changes(now);
        entries.into_iter().map(|e| (e.handle, e.seconds)).collect()
    }

    fn deletions(ledger: &mut Ledger) -> Vec<String> {
        let entries = ledger.next_deletions();
        entries.into_iter().map(|e| e.handle).collect()
    }

    fn of(handle: &str, seconds: i32) -> (String, i32) {
        (handle.to_owned(), seconds)
    }

    #[test]
    fn what_is_in_hand_is_renewed_from_the_moment_of_the_call() {
        let now = Instant::now();
        let mut ledger = Ledger::new(VISIBILITY);
        ledger.arrived(now, arrivals(&["x", "y"]));
        assert_eq!(ledger.wake_at(), Some(now + seconds(10)), "also while it waits");
        assert_eq!(changes(&mut ledger, now + seconds(9)), []);
        ledger.tick(now + seconds(12));
        let entries = ledger.next_changes(now + seconds(12));
        assert_eq!(entries.len(), 2);
        // Sent at 12, answered at 17: good until 42.
        for entry in &entries {
            ledger.changed(now + seconds(17), now + seconds(12), entry, Answer::Done);
        }
        assert_eq!(ledger.wake_at(), Some(now + seconds(22)));
        ledger.tick(now + seconds(22));
        assert_eq!(ledger.next_changes(now + seconds(22)).len(), 2);
        ledger.tick(now + seconds(41));
        assert_eq!(ledger.waiting(), 2);
        ledger.tick(now + seconds(42));
        assert_eq!((ledger.waiting(), ledger.is_empty()), (0, true), "no answer came");
        assert_eq!(ledger.take_lost(), [], "nobody had them");
    }

    #[test]
    fn a_renewal_that_is_due_takes_along_what_is_due_soon() {
        let now = Instant::now();
        let mut ledger = Ledger::new(VISIBILITY);
        ledger.arrived(now, arrivals(&["x"]));
        ledger.arrived(now + seconds(2), arrivals(&["y"]));
        ledger.arrived(now + seconds(5), arrivals(&["z"]));
        assert_eq!(
            changes(&mut ledger, now + seconds(10)),
            [of("x", 30), of("y", 30)]
        );
    }

    #[test]
    fn a_void_handle_is_lost_at_once_and_its_group_with_it() {
        let now = Instant::now();
        let (mut ledger, _deliveries) = in_hand(now, &["a1", "b1", "a2"]);
        ledger.arrived(now + seconds(1), arrivals(&["a3", "b2"]));
        ledger.tick(now + seconds(10));
        let renewals = ledger.next_changes(now + seconds(10));
        assert_eq!(renewals.len(), 5);
        for entry in &renewals {
            let answer = match entry.handle.as_str() {
                "a1" => Answer::Gone,
                _ => Answer::Done,
            };
            ledger.changed(now + seconds(10), now + seconds(10), entry, answer);
        }
        assert_eq!(ledger.take_lost(), [Receipt(1), Receipt(3)], "a1 and a2");
        assert_eq!(
            changes(&mut ledger, now + seconds(10)),
            [of("a2", 0), of("a3", 0)]
        );
        assert_eq!(ledger.hand_out(9).len(), 1, "b goes on");
    }

    #[test]
    fn what_follows_a_released_message_of_its_group_goes_back_with_it() {
        let now = Instant::now();
        let (mut ledger, mut deliveries) = in_hand(now, &["a1", "a2", "b1", "a3", "x"]);
        ledger.arrived(now, arrivals(&["a4", "b2"]));
        // The consumer gives a2 back by itself, in the same call as a1.
        let (a1, a2) = (deliveries.remove(0), deliveries.remove(0));
        ledger.settle(now, vec![a1.release(Some(seconds(7))), a2.release(None)]);
        assert_eq!(ledger.take_lost(), [Receipt(4)], "a3, and not what was settled");
        let told = [of("a1", 7), of("a2", 0), of("a3", 0), of("a4", 0)];
        assert_eq!(changes(&mut ledger, now), told);
        let waiting = ledger.hand_out(9);
        assert_eq!(waiting.len(), 1);
        assert_eq!(waiting[0].receipt, Receipt(7), "b2");
        let a3 = deliveries.remove(1);
        ledger.settle(now, vec![a3.ack()]);
        assert_eq!(deletions(&mut ledger), Vec::<String>::new(), "it was lost");
    }

    #[test]
    fn what_has_no_group_is_released_alone() {
        let now = Instant::now();
        let (mut ledger, mut deliveries) = in_hand(now, &["x", "y"]);
        ledger.settle(
            now,
            vec![deliveries.remove(0).release(Some(Duration::from_millis(1500)))],
        );
        assert_eq!(changes(&mut ledger, now), [of("x", 2)], "rounded up");
        assert_eq!(ledger.take_lost(), []);
        assert_eq!(ledger.outstanding(), 1);
    }

    #[test]
    fn a_verdict_waits_for_the_call_under_way() {
        let now = Instant::now();
        let (mut ledger, mut deliveries) = in_hand(now, &["x", "y"]);
        let at = now + seconds(10);
        ledger.tick(at);
        let renewals = ledger.next_changes(at);
        let (x, y) = (deliveries.remove(0), deliveries.remove(0));
        ledger.settle(at, vec![x.release(None), y.ack()]);
        assert_eq!(changes(&mut ledger, at), [], "a renewal behind it would hide it");
        assert_eq!(deletions(&mut ledger), Vec::<String>::new());
        for entry in &renewals {
            ledger.changed(at, at, entry, Answer::Done);
        }
        assert_eq!(changes(&mut ledger, at), [of("x", 0)]);
        assert_eq!(deletions(&mut ledger), ["y"]);
    }

    #[test]
    fn failed_entries_are_repeated_alone_and_slower_until_the_visibility_ends() {
        let now = Instant::now();
        let (mut ledger, deliveries) = in_hand(now, &["x", "y"]);
        ledger.settle(now, deliveries.into_iter().map(Delivery::ack).collect());
        let entries = ledger.next_deletions();
        ledger.deleted(now, entries[0].number, Answer::Done);
        ledger.deleted(now, entries[1].number, Answer::Again);
        let mut at = now;
        let mut tries = 0;
        while let Some(next) = ledger.wake_at() {
            assert!(next >= at, "time goes on");
            at = next;
            ledger.tick(at);
            for entry in ledger.next_deletions() {
                assert_eq!(entry.handle, "y");
                tries += 1;
                ledger.deleted(at, entry.number, Answer::Again);
            }
        }
        assert!((8..20).contains(&tries), "{tries} tries");
        assert_eq!(at, now + VISIBILITY);
        assert_eq!((ledger.acks_lost(), ledger.is_empty()), (1, true));
    }

    #[test]
    fn nothing_is_held_for_more_than_twelve_hours() {
        let now = Instant::now();
        let (mut ledger, mut deliveries) = in_hand(now, &["x", "y"]);
        let mut renewals = 0;
        let mut at = now;
        while at < now + LONGEST_HOLD - seconds(60) {
            at = ledger.wake_at().unwrap();
            ledger.tick(at);
            for entry in ledger.next_changes(at) {
                renewals += 1;
                assert!(at + seconds(entry.seconds as u64) <= now + LONGEST_HOLD);
                ledger.changed(at, at, &entry, Answer::Done);
            }
        }
        assert!(renewals > 8000, "{renewals}");
        ledger.settle(at, vec![deliveries.remove(1).release(Some(seconds(3600)))]);
        let entry = ledger.next_changes(at).remove(0);
        assert!((1..=60).contains(&entry.seconds), "{entry:?}");
        while let Some(next) = ledger.wake_at() {
            at = next;
            ledger.tick(at);
            for entry in ledger.next_changes(at) {
                assert!(
                    (1..=30).contains(&entry.seconds),
                    "0 would give it away: {entry:?}"
                );
                assert!(!entry.gives_back);
                ledger.changed(at, at, &entry, Answer::Done);
            }
        }
        assert_eq!(ledger.take_lost(), [Receipt(1)]);
        assert!(at <= now + LONGEST_HOLD && at > now + LONGEST_HOLD - seconds(2));
    }

    #[test]
    fn a_message_with_several_events_is_told_of_once_when_all_have_a_verdict() {
        let now = Instant::now();
        let three = |name: &str| Arrival {
            events: vec![RawEvent::default(); 3],
            ..arrivals(&[name]).remove(0)
        };
        let mut ledger = Ledger::new(VISIBILITY);
        ledger.arrived(now, vec![three("x"), three("y")]);
        let mut deliveries = ledger.hand_out(5);
        for _ in 0..2 {
            ledger.settle(now, vec![deliveries.remove(0).ack()]);
            assert_eq!(deletions(&mut ledger), Vec::<String>::new());
        }
        ledger.settle(now, vec![deliveries.remove(0).ack()]);
        assert_eq!(deletions(&mut ledger), ["x"]);

        let (first, second) = (deliveries.remove(0), deliveries.remove(0));
        ledger.settle(now, vec![first.release(Some(seconds(3))), second.ack()]);
        assert_eq!(changes(&mut ledger, now), [], "the third is not handed out yet");
        ledger.give_back_waiting(now);
        assert_eq!(changes(&mut ledger, now), [of("y", 3)], "the longest delay holds");
    }

    #[test]
    fn a_message_without_events_is_deleted() {
        let now = Instant::now();
        let mut ledger = Ledger::new(VISIBILITY);
        let arrival = arrivals(&["x"]).remove(0);
        ledger.arrived(
            now,
            vec![Arrival {
                events: vec![],
                ..arrival
            }],
        );
        assert_eq!(deletions(&mut ledger), ["x"]);
    }

    #[derive(Debug, Clone)]
    enum Step {
        Arrive(u8),
        HandOut(usize),
        Ack(usize),
        Release(usize, u64),
        Pass(u64),
        /// Which calls are answered and how.
        Answer(Vec<u8>),
        GiveBack,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            3 => (1_u8..8).prop_map(Step::Arrive),
            3 => (1_usize..6).prop_map(Step::HandOut),
            5 => any::<usize>().prop_map(Step::Ack),
            2 => (any::<usize>(), 0_u64..5).prop_map(|(at, after)| Step::Release(at, after)),
            3 => (0_u64..12).prop_map(Step::Pass),
            4 => prop::collection::vec(0_u8..8, 0..12).prop_map(Step::Answer),
            1 => Just(Step::GiveBack),
        ];
        prop::collection::vec(step, 0..150)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]
        /// Whatever happens: only what was acked is deleted; each message has one call at a time; what
        /// is handed out is settled or reported as lost, once; nothing is handed out after one of its
        /// group was lost or released; and in the end nothing is left.
        #[test]
        fn nothing_is_deleted_unasked_or_kept_for_ever(steps in steps()) {
            let start = Instant::now();
            let mut now = start;
            let mut ledger = Ledger::new(VISIBILITY);
            let (mut sent, mut held): (u64, Vec<Delivery>) = (0, Vec::new());
            let mut acked: HashSet<u64> = HashSet::new();
            let mut calls: Vec<(bool, Instant, Entry)> = Vec::new();
            let mut named: HashMap<Receipt, u64> = HashMap::new();
            let mut next_named = 0_u64;
            for step in steps {
                match step {
                    Step::Arrive(count) => {
                        let names: Vec<String> = (0..count).map(|_| {
                            sent += 1;
                            format!("{}{sent}", ["a", "b", "c"][(sent % 3) as usize])
                        }).collect();
                        let names: Vec<&str> = names.iter().map(String::as_str).collect();
                        ledger.arrived(now, arrivals(&names));
                    }
                    Step::HandOut(max) => {
                        ledger.tick(now);
                        for delivery in ledger.hand_out(max) {
                            let number = delivery.receipt.0;
                            prop_assert!(number > next_named, "receipts grow");
                            next_named = number;
                            named.insert(delivery.receipt, number);
                            held.push(delivery);
                        }
                    }
                    Step::Ack(at) if !held.is_empty() => {
                        let delivery = held.remove(at % held.len());
                        if ledger.outstanding.contains_key(&delivery.receipt) {
                            acked.insert(named[&delivery.receipt]);
                        }
                        ledger.settle(now, vec![delivery.ack()]);
                    }
                    Step::Release(at, after) if !held.is_empty() => {
                        let delivery = held.remove(at % held.len());
                        ledger.settle(now, vec![delivery.release(Some(seconds(after)))]);
                    }
                    Step::Ack(_) | Step::Release(..) => {}
                    Step::Pass(time) => now += seconds(time),
                    Step::Answer(how) => for answer in how {
                        if calls.is_empty() { break; }
                        let (deletes, at, entry) = calls.remove(usize::from(answer) % calls.len());
                        let answer = match answer { 0 => Answer::Gone, 1 | 2 => Answer::Again, _ => Answer::Done };
                        if deletes {
                            ledger.deleted(now, entry.number, answer);
                        } else {
                            ledger.changed(now, at, &entry, answer);
                        }
                    },
                    Step::GiveBack => ledger.give_back_waiting(now),
                }
                ledger.tick(now);
                for receipt in ledger.take_lost() {
                    let at = held.iter().position(|delivery| delivery.receipt == receipt);
                    prop_assert!(at.is_some(), "{receipt:?} is lost, and nobody had it");
                    drop(held.remove(at.unwrap()));
                }
                prop_assert_eq!(held.len(), ledger.outstanding());
                let deletions = ledger.next_deletions();
                let changes = ledger.next_changes(now);
                prop_assert!(deletions.len() <= BATCH && changes.len() <= BATCH);
                for (deletes, entry) in deletions.into_iter().map(|e| (true, e)).chain(changes.into_iter().map(|e| (false, e))) {
                    prop_assert!(!calls.iter().any(|(_, _, other)| other.number == entry.number && ledger.messages.contains_key(&entry.number)), "two calls about one message");
                    // One event a message: their numbers are the same.
                    prop_assert!(!deletes || acked.contains(&entry.number), "deleted, though not acked");
                    calls.push((deletes, now, entry));
                }
                for message in ledger.messages.values() {
                    prop_assert!(message.calling || message.look_at > now, "nobody will look at it again");
                }
            }
            // No answer to anything any more: all of it runs out by itself, but for deletions under way.
            now += LONGEST_HOLD;
            ledger.tick(now);
            for (deletes, _, entry) in calls {
                if deletes {
                    ledger.deleted(now, entry.number, Answer::Again);
                }
            }
            ledger.tick(now);
            prop_assert!(ledger.is_empty() && ledger.outstanding() == 0 && ledger.waiting() == 0);
        }
    }
}
