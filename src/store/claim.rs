use std::collections::{HashMap, HashSet};

use crate::event::{EventKey, Identity, PayloadHash};

use super::Lease;

/// One event to be claimed.
#[derive(Debug, Clone, Copy)]
pub struct ClaimRequest<'a> {
    /// The digest that the tables are keyed by.
    pub key: EventKey,
    /// The consumer that claims.
    pub consumer: &'a str,
    /// The event's identity.
    pub identity: &'a Identity,
    /// The hash of its raw body.
    pub payload_hash: PayloadHash,
    /// The held row that this delivery is, if it came from `inbox`: a row does not stand in its own way.
    pub own: Option<&'a Lease>,
}

/// What a claim found, in the order in which the answers win.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ClaimAnswer {
    /// It is ours: run the handler.
    New,
    /// It was committed before.
    Duplicate {
        /// The payload has the same hash as the one that was processed.
        same_payload: bool,
        /// What became of the first.
        outcome: Outcome,
    },
    /// The stored identity differs although the digest is the same.
    Collision,
    /// The same identity with the same payload is held in `inbox`.
    Held(HeldState),
}

/// What became of a claimed event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// The handler ran and its work was committed.
    Processed,
    /// The handler or a person said that there is nothing to do.
    Discarded,
}

impl Outcome {
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Processed => "processed",
            Self::Discarded => "discarded",
        }
    }

    /// The final state of a held row that was dead once and whose event has come to this.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) const fn held_state(self) -> &'static str {
        match self {
            Self::Processed => "replayed",
            Self::Discarded => "discarded",
        }
    }
}

/// The state of a held event that is not finished.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum HeldState {
    /// It runs at `run_at`.
    Ready,
    /// A lane has leased it.
    Running,
    /// It needs a person.
    Dead,
}

/// Proof of what a transaction has claimed. Only `claim` makes one, and the commit consumes it.
#[derive(Debug)]
pub struct Claims {
    /// The keys that this transaction inserted.
    pub(crate) keys: Vec<EventKey>,
    /// What marks the transaction as the claim's own: its xid on PostgreSQL, a claim token on SQLite.
    pub(crate) mark: Option<String>,
    /// What becomes of the claims when this commits.
    pub(crate) outcome: Outcome,
    /// Whether `inbox` has a row of one of them, which the commit finishes.
    #[cfg_attr(
        not(feature = "postgres"),
        allow(dead_code, reason = "on SQLite a look costs no round trip")
    )]
    pub(crate) held: bool,
}

impl Claims {
    /// Whether nothing was claimed, so that there is nothing to run and nothing to commit.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }
}

/// What the second statement of a claim read about a key that was not inserted.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    /// The claim's row: source, event id, payload hash, outcome.
    pub processed: Option<(String, String, Vec<u8>, Outcome)>,
    /// A held row that is not finished and has this payload, and is not the delivery's own.
    pub held: Option<HeldState>,
}

impl Found {
    /// Which answer wins; `None` if nothing was found, because it moved under us: claim again.
    pub(crate) fn answer(&self, request: &ClaimRequest<'_>) -> Option<ClaimAnswer> {
        if let Some((source, event_id, hash, outcome)) = &self.processed {
            if *source != request.identity.source || *event_id != request.identity.id {
                return Some(ClaimAnswer::Collision);
            }
            return Some(ClaimAnswer::Duplicate {
                same_payload: hash.as_slice() == request.payload_hash.as_bytes(),
                outcome: *outcome,
            });
        }
        self.held.map(ClaimAnswer::Held)
    }
}

/// The answers so far of one claim. Another payload under the same key is another question: what
/// holds the one does not hold the other.
pub(crate) type Answers = HashMap<(EventKey, PayloadHash), ClaimAnswer>;

impl ClaimRequest<'_> {
    pub(crate) fn question(&self) -> (EventKey, PayloadHash) {
        (self.key, self.payload_hash)
    }
}

/// The answers as they were asked for. An event that stands twice in one batch is new the first time
/// and a duplicate of itself from then on.
pub(crate) fn in_request_order(
    requests: &[ClaimRequest<'_>],
    answers: &Answers,
    outcome: Outcome,
) -> Vec<ClaimAnswer> {
    let mut new = HashSet::new();
    requests
        .iter()
        .map(|request| match answers[&request.question()] {
            ClaimAnswer::New if !new.insert(request.key) => ClaimAnswer::Duplicate {
                same_payload: true,
                outcome,
            },
            answer => answer,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_committed_claim_wins_over_a_held_row_and_texts_over_the_digest() {
        let identity = Identity::strong("orders", "1").unwrap();
        let hash = PayloadHash::of(Some(b"x"));
        let request = ClaimRequest {
            key: EventKey::of_event("c", "orders", "1"),
            consumer: "c",
            identity: &identity,
            payload_hash: hash,
            own: None,
        };
        let row = |id: &str, body: &[u8]| {
            Some((
                "orders".to_owned(),
                id.to_owned(),
                PayloadHash::of(Some(body)).as_bytes().to_vec(),
                Outcome::Processed,
            ))
        };
        let answer = |processed, held| Found { processed, held }.answer(&request);

        let duplicate = |same_payload| ClaimAnswer::Duplicate {
            same_payload,
            outcome: Outcome::Processed,
        };
        assert_eq!(
            answer(row("1", b"x"), Some(HeldState::Dead)),
            Some(duplicate(true))
        );
        assert_eq!(answer(row("1", b"y"), None), Some(duplicate(false)));
        assert_eq!(
            answer(row("2", b"x"), Some(HeldState::Dead)),
            Some(ClaimAnswer::Collision)
        );
        assert_eq!(
            answer(None, Some(HeldState::Ready)),
            Some(ClaimAnswer::Held(HeldState::Ready))
        );
        assert_eq!(answer(None, None), None);
    }
}
