use std::collections::HashMap;
use std::time::SystemTime;

use super::admission::{self, Unusable};
use super::destination::is_publisher_name;
use super::{Destination, OutboxError, OutgoingEvent, trace};
use crate::event::{Headers, Identity};
use crate::publisher::Message;
use crate::store::OutgoingRow;

/// What a broker with its defaults takes, and some room: Kafka's limit is 1,048,588 bytes.
const LIMIT: usize = 1_000_000;

/// The highest limit: no broker that we know takes more in one message.
const MAX_LIMIT: usize = 128 << 20;

/// What the events of one transaction may count as together: they travel in one statement.
pub(super) const MAX_TOGETHER: usize = 256 << 20;

/// What an outbox is set to.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(super) relay: String,
    /// `None`: not said yet.
    pub(super) source: Option<String>,
    pub(super) limits: HashMap<String, usize>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            relay: "default".to_owned(),
            source: None,
            limits: HashMap::new(),
        }
    }
}

impl Settings {
    /// What is wrong with them.
    pub(crate) fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if !is_publisher_name(&self.relay) {
            let relay = admission::shortened(&self.relay);
            problems.push(format!("relay is {relay} (1 to 64 of a-z, 0-9, - and _)"));
        }
        match &self.source {
            None => {
                problems.push("source is not set (whose ids its events carry: Outbox::source)".to_owned())
            }
            Some(source) => {
                if let Err(error) = Identity::strong(source, "id") {
                    let source = admission::shortened(source);
                    problems.push(format!("source is {source} ({error})"));
                }
            }
        }
        for (publisher, limit) in &self.limits {
            if !is_publisher_name(publisher) {
                let publisher = admission::shortened(publisher);
                problems.push(format!(
                    "limit is for publisher {publisher} (1 to 64 of a-z, 0-9, - and _)"
                ));
            }
            if !(1..=MAX_LIMIT).contains(limit) {
                problems.push(format!(
                    "limit for publisher {publisher} is {limit} (1 to {MAX_LIMIT} bytes)"
                ));
            }
        }
        problems
    }

    /// The row that this event becomes, and what it counts as. `id` makes its id if it has none; `cause` are
    /// the headers of the event that has caused it.
    pub(super) fn row(
        &self,
        event: OutgoingEvent,
        id: impl FnOnce() -> String,
        cause: Option<&Headers>,
    ) -> Result<(OutgoingRow, usize), OutboxError> {
        let destination: Destination = event.destination.parse()?;
        let unusable = |part: Unusable| OutboxError::Unusable {
            destination: destination.to_string(),
            field: part.field,
            value: part.value,
            bound: part.bound,
        };
        admission::check(&event).map_err(unusable)?;
        let source = self.source.clone().unwrap_or_default();
        let event_id = event.id.unwrap_or_else(id);
        Identity::strong(&source, &event_id)
            .map_err(|error| unusable(Unusable::new("id", &event_id, error.to_string())))?;
        let message = Message {
            event_id,
            source,
            event_type: event.event_type,
            address: destination.address().to_owned(),
            key: event.key,
            payload: event.payload,
            content_type: event.content_type,
            headers: trace::carried_on(event.headers, cause),
            attributes: event.attributes,
            mode: event.mode,
            // The database's own is stored.
            time: SystemTime::now(),
            replays: 0,
        };
        let size = self.within_limit(&destination, &message)?;
        let row = OutgoingRow {
            relay: self.relay.clone(),
            destination,
            message,
            delay: event.delay,
            send_at: event.send_at,
        };
        Ok((row, size))
    }

    fn within_limit(&self, destination: &Destination, message: &Message) -> Result<usize, OutboxError> {
        let publisher = destination.publisher();
        let limit = self.limits.get(publisher).copied().unwrap_or(LIMIT);
        let size = admission::size(message);
        if size <= limit {
            return Ok(size);
        }
        Err(OutboxError::TooLarge {
            destination: destination.to_string(),
            publisher: publisher.to_owned(),
            size,
            limit,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        Settings {
            source: Some("shop".into()),
            ..Settings::default()
        }
    }

    fn sized(settings: &Settings, event: OutgoingEvent) -> Result<usize, OutboxError> {
        settings.row(event, || "id".into(), None).map(|(_, size)| size)
    }

    fn full() -> OutgoingEvent {
        OutgoingEvent::new("kafka:t", "paid", "12345")
            .key("key")
            .content_type("text/plain")
            .header("a", "bc")
            .attribute("subject", "x")
    }

    #[test]
    fn everything_that_travels_counts() {
        // Body, key, twice id and source, type, content type, a header, an attribute, and what is stamped.
        let size = 5 + 3 + 2 * (2 + 4) + 4 + 10 + (1 + 2 + 16) + (7 + 1 + 16) + 256;
        assert_eq!(sized(&settings(), full()).unwrap(), size);
        let structured = full().mode(crate::publisher::CloudEventsMode::Structured);
        assert_eq!(sized(&settings(), structured).unwrap(), size - 5 + 8, "in base64");
    }

    #[test]
    fn a_limit_is_met_and_not_passed() {
        let size = sized(&settings(), full()).unwrap();
        for (limit, taken) in [(size - 1, false), (size, true), (size + 1, true)] {
            let mut settings = settings();
            settings.limits.insert("kafka".into(), limit);
            match sized(&settings, full()) {
                Ok(_) => assert!(taken, "{limit}"),
                Err(OutboxError::TooLarge {
                    publisher,
                    size: counted,
                    limit: named,
                    ..
                }) => {
                    assert!(!taken, "{limit}");
                    assert_eq!((publisher.as_str(), counted, named), ("kafka", size, limit));
                }
                Err(other) => panic!("{other}"),
            }
        }
        let overhead = size - 5;
        let body = |len: usize| OutgoingEvent {
            payload: Some(vec![b'x'; len].into()),
            ..full()
        };
        assert!(sized(&settings(), body(1_000_000 - overhead)).is_ok());
        let error = sized(&settings(), body(1_000_001 - overhead))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("counts 1000001 bytes, and publisher kafka takes 1000000"),
            "{error}"
        );
    }

    #[test]
    fn an_id_is_one_that_consumers_take() {
        for id in ["", " ", "null", "a\0b", &"x".repeat(513)] {
            let error = sized(&settings(), full().id(id)).unwrap_err();
            assert!(
                matches!(error, OutboxError::Unusable { field: "id", .. }),
                "{error}"
            );
            assert!(error.is_permanent());
        }
        assert!(sized(&settings(), full().id("x".repeat(512))).is_ok());
    }

    #[test]
    fn settings_that_cannot_be_are_named() {
        assert_eq!(settings().problems(), Vec::<String>::new());
        for (settings, says) in [
            (Settings::default(), "source is not set"),
            (
                Settings {
                    source: Some("a\nb".into()),
                    ..settings()
                },
                "source is \"a\\nb\"",
            ),
            (
                Settings {
                    relay: "Default".into(),
                    ..settings()
                },
                "relay is \"Default\"",
            ),
            (
                Settings {
                    limits: HashMap::from([("kafka".to_owned(), 0)]),
                    ..settings()
                },
                "limit for publisher kafka is 0 (1 to 134217728 bytes)",
            ),
            (
                Settings {
                    limits: HashMap::from([("kafka:".to_owned(), 1)]),
                    ..settings()
                },
                "limit is for publisher \"kafka:\"",
            ),
        ] {
            let problems = settings.problems();
            assert!(
                problems.len() == 1 && problems[0].starts_with(says),
                "{problems:?}"
            );
        }
    }
}
