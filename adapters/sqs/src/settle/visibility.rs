//! Until when messages are ours: renewals, and what runs out.

use std::collections::HashSet;

use tokio::time::Instant;

use super::Ledger;
use super::message::Verdict;

impl Ledger {
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

    pub(super) fn look_again(&mut self, number: u64, at: Instant) {
        if let Some(message) = self.messages.get_mut(&number) {
            self.timers.remove(&(message.look_at, number));
            message.look_at = at;
            self.timers.insert((at, number));
        }
    }

    /// Its visibility is over, or its handle void: somebody else may have it by now.
    pub(super) fn ran_out(&mut self, number: u64, now: Instant) {
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

    /// When [`tick`](Self::tick) has something to do.
    pub(crate) fn wake_at(&self) -> Option<Instant> {
        self.timers.first().map(|&(at, _)| at)
    }
}
