use sha2::{Digest, Sha256};
use uuid::Uuid;

/// The primary key of `processed_events`: a digest of (kind, consumer, source, event id).
///
/// The first 16 bytes of SHA-256 over the four texts, each behind its length (so that no two
/// different quadruples run together), shaped as a UUIDv8. A digest has no collation and no length
/// limit and is the same on every database. On a conflict the stored texts are compared, so a
/// collision is noticed and never taken for a duplicate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EventKey(Uuid);

impl EventKey {
    /// The key under which `consumer` deduplicates the event (`source`, `event_id`).
    pub fn of_event(consumer: &str, source: &str, event_id: &str) -> Self {
        Self::digest("event", consumer, source, event_id)
    }

    /// The key of a business-level claim; its kind is its own, so that nothing a producer sends can name it.
    pub fn of_once(consumer: &str, name: &str, id: &str) -> Self {
        Self::digest("once", consumer, name, id)
    }

    /// The key that a table holds as this UUID.
    pub fn from_uuid(uuid: Uuid) -> Self {
        Self(uuid)
    }

    /// The key as the UUID that the tables hold.
    pub fn as_uuid(&self) -> Uuid {
        self.0
    }

    fn digest(kind: &str, consumer: &str, source: &str, event_id: &str) -> Self {
        let mut hash = Sha256::new();
        for text in [kind, consumer, source, event_id] {
            hash.update((text.len() as u64).to_be_bytes());
            hash.update(text.as_bytes());
        }
        Self(uuid::Builder::from_custom_bytes(first_16(hash.finalize().as_slice())).into_uuid())
    }
}

/// The first 16 bytes of SHA-256 of the raw body: tells a copy from another payload under the same id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PayloadHash(pub(crate) [u8; 16]);

impl PayloadHash {
    /// The hash of this body; a null payload has one of its own.
    pub fn of(payload: Option<&[u8]>) -> Self {
        match payload {
            Some(body) => Self(first_16(Sha256::digest(body).as_slice())),
            // A tombstone is not an empty body: it hashes as nothing else can.
            None => Self([0; 16]),
        }
    }

    #[cfg_attr(not(feature = "postgres"), allow(dead_code))]
    pub(crate) fn from_stored(stored: &[u8]) -> Option<Self> {
        stored.try_into().map(Self).ok()
    }

    /// The 16 bytes that the tables hold.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

fn first_16(digest: &[u8]) -> [u8; 16] {
    let mut out = [0; 16];
    out.copy_from_slice(&digest[..16]);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cannot_run_together() {
        let joined = EventKey::of_event("c", "a|b", "1");
        assert_ne!(joined, EventKey::of_event("c", "a", "b|1"));
        assert_ne!(
            EventKey::of_event("c", "s", "i"),
            EventKey::of_once("c", "s", "i")
        );
        assert_ne!(
            EventKey::of_event("c", "s", "i"),
            EventKey::of_event("d", "s", "i")
        );
    }

    #[test]
    fn the_digest_is_the_documented_one() {
        // SHA-256 over four length-prefixed texts, computed apart from this code; version 8, variant 10.
        let key = EventKey::of_event("payments", "orders", "evt_1").as_uuid();
        assert_eq!(key.get_version_num(), 8);
        assert_eq!(key.to_string(), KNOWN);
    }

    const KNOWN: &str = "a2caa62c-1be1-81d8-ac65-54fc3dd88114";

    #[test]
    fn a_tombstone_is_not_an_empty_body() {
        assert_ne!(PayloadHash::of(None), PayloadHash::of(Some(b"")));
    }
}
