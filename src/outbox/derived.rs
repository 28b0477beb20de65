use uuid::Uuid;

use crate::event::Identity;

/// What event ids are derived within. Never to be changed.
const NAMESPACE: Uuid = Uuid::from_u128(0xcb14d99c_4cfe_49eb_9968_a43166ad2cf6);

/// The id of the nth event (from 0) that a consumer sends because of this one: the same whenever, and however
/// often, the handler runs. A UUIDv5 over consumer, source and id, each behind its length, and the number.
pub(super) fn derived_id(consumer: &str, cause: &Identity, ordinal: u32) -> Uuid {
    let mut name = Vec::new();
    for text in [consumer, &cause.source, &cause.id] {
        name.extend((text.len() as u64).to_be_bytes());
        name.extend(text.as_bytes());
    }
    name.extend(ordinal.to_be_bytes());
    Uuid::new_v5(&NAMESPACE, &name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_is_the_documented_one() {
        // Computed apart from this code.
        let cause = Identity::strong("orders", "evt_1").unwrap();
        let ids = [0, 1].map(|ordinal| derived_id("payments", &cause, ordinal).to_string());
        assert_eq!(ids, KNOWN);
    }

    const KNOWN: [&str; 2] = [
        "11ac0635-2b72-5454-b059-9e0d1eb7ebee",
        "8e9fcbb1-94f5-5ccb-8150-8ce920c51c0f",
    ];

    #[test]
    fn parts_cannot_run_together() {
        let id = |consumer, source, id| derived_id(consumer, &Identity::strong(source, id).unwrap(), 0);
        assert_ne!(id("c", "a|b", "1"), id("c", "a", "b|1"));
        assert_ne!(id("ca", "b", "1"), id("c", "ab", "1"));
    }
}
