//! What columns of the outbox hold, the same on every database.

use std::time::{Duration, SystemTime};

use crate::event::Headers;
use crate::publisher::CloudEventsMode;

/// The most that is kept of a broker's words.
pub(crate) const ERROR_BYTES: usize = 1024;

/// The column `mode`.
pub(crate) fn mode_of(stored: &str) -> Option<CloudEventsMode> {
    match stored {
        "binary" => Some(CloudEventsMode::Binary),
        "structured" => Some(CloudEventsMode::Structured),
        _ => None,
    }
}

/// The column `attributes`: names and values in the form of headers.
pub(crate) fn attributes_of(stored: &[u8]) -> Option<Vec<(String, String)>> {
    let text = |(name, value): (&str, Option<&[u8]>)| {
        let value = String::from_utf8(value?.to_vec()).ok()?;
        Some((name.to_owned(), value))
    };
    Headers::decode(stored)?.iter().map(text).collect()
}

/// Microseconds since 1970, by the database's clock.
pub(crate) fn written_at(micros: i64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_micros(micros.max(0) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_in_a_known_form_is_nothing() {
        let attributes: Headers = [("subject", "s"), ("dataref", "d")].into_iter().collect();
        let expected = [("subject", "s"), ("dataref", "d")].map(|(k, v)| (k.to_owned(), v.to_owned()));
        assert_eq!(attributes_of(&attributes.encode()), Some(expected.to_vec()));
        let mut null = Headers::new();
        null.push_null("subject");
        assert_eq!(attributes_of(&null.encode()), None);
        let binary: Headers = [("subject", &b"\xff"[..])].into_iter().collect();
        assert_eq!(attributes_of(&binary.encode()), None);
        assert_eq!(attributes_of(b"{}"), None);
        assert_eq!(
            (mode_of("structured"), mode_of("batch")),
            (Some(CloudEventsMode::Structured), None)
        );
    }
}
