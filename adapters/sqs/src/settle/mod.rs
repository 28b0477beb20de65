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

mod calls;
mod message;
mod visibility;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::time::Duration;

use onlyonce::source::{Delivery, Receipt, Settle, Settlement};
use tokio::time::Instant;

pub(crate) use calls::{Answer, BATCH, Entry};
pub(crate) use message::{Arrival, LONGEST_HOLD};
use message::{Message, Verdict};

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
            let open = arrival.events.len();
            let message = Message::new(sent, self.visibility, arrival.handle, arrival.group, open);
            self.timers.insert((message.look_at, number));
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

    fn remove(&mut self, number: u64) -> Option<Message> {
        let message = self.messages.remove(&number)?;
        self.timers.remove(&(message.look_at, number));
        Some(message)
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
