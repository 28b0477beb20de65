//! What has to be true of an event before it may become a row: what is refused here was neither
//! stored nor sent, and whoever made it learns of it inside of the transaction.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use serde::de::IgnoredAny;

use super::OutgoingEvent;
use crate::event::Headers;
use crate::publisher::{CloudEventsMode, Message};

/// The longest type, content type or name of a header, in bytes: what AMQP can carry.
const MAX_NAME: usize = 255;

/// The longest name of a CloudEvents attribute.
const MAX_ATTRIBUTE: usize = 20;

/// The longest wait.
const MAX_DELAY: Duration = Duration::from_secs(3660 * 86_400);

/// The last second of the year 9999, the last that every database and broker can write down.
const LAST_SECOND: Duration = Duration::from_secs(253_402_300_799);

/// What a publisher writes by itself: the names of its headers and attributes, time and version.
const STAMPS: usize = 256;

/// What a broker puts around a header or an attribute.
const FRAME: usize = 16;

/// The attributes that every CloudEvent has from other parts of the event.
const GIVEN: [&str; 7] = [
    "id",
    "source",
    "type",
    "time",
    "specversion",
    "datacontenttype",
    "data",
];

/// The headers that publishers write. A second one of the name would give the event another identity, or none.
const STAMPED: [&str; 5] = ["onlyonce-", "ce-", "ce_", "cloudevents:", "cloudevents_"];

/// The part of an event that cannot be used, what it is, and what it may be.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Unusable {
    pub(super) field: &'static str,
    pub(super) value: String,
    pub(super) bound: String,
}

impl Unusable {
    pub(super) fn new(field: &'static str, value: &str, bound: impl Into<String>) -> Self {
        Self {
            field,
            value: shortened(value),
            bound: bound.into(),
        }
    }
}

type Checked = Result<(), Unusable>;

/// Everything but destination, identity and size.
pub(super) fn check(event: &OutgoingEvent) -> Checked {
    if let Some(event_type) = &event.event_type {
        text("type", event_type)?;
    }
    if event.key.as_ref().is_some_and(Bytes::is_empty) {
        return Err(Unusable::new(
            "key",
            "",
            "at least one byte; without a key it is ordered with nothing",
        ));
    }
    if let Some(content_type) = &event.content_type {
        check_content_type(content_type)?;
    }
    check_headers(&event.headers)?;
    check_attributes(&event.attributes)?;
    if event.mode == CloudEventsMode::Structured {
        check_structured(event)?;
    }
    check_times(event)
}

fn text(field: &'static str, text: &str) -> Checked {
    let usable = !text.trim().is_empty() && text.len() <= MAX_NAME && !text.chars().any(char::is_control);
    if usable {
        return Ok(());
    }
    Err(Unusable::new(
        field,
        text,
        format!(
            "{} bytes: 1 to {MAX_NAME}, not blank, no control characters",
            text.len()
        ),
    ))
}

fn check_content_type(content_type: &str) -> Checked {
    text("content type", content_type)?;
    // Consumers would read the body as a CloudEvent, with an identity of its own.
    if media_type(content_type).starts_with("application/cloudevents") {
        return Err(Unusable::new(
            "content type",
            content_type,
            "the body's own; for a CloudEvent in one document use CloudEventsMode::Structured",
        ));
    }
    Ok(())
}

fn check_headers(headers: &Headers) -> Checked {
    for (name, _) in headers.iter() {
        text("header", name)?;
        let lower = name.to_ascii_lowercase();
        if lower == "content-type" || STAMPED.iter().any(|prefix| lower.starts_with(prefix)) {
            return Err(Unusable::new(
                "header",
                name,
                "a publisher writes it: use id, content_type and attribute",
            ));
        }
    }
    Ok(())
}

fn check_attributes(attributes: &[(String, String)]) -> Checked {
    for (n, (name, value)) in attributes.iter().enumerate() {
        let named = (1..=MAX_ATTRIBUTE).contains(&name.len())
            && name
                .bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
        if !named {
            let bound = format!("its name has 1 to {MAX_ATTRIBUTE} of a-z and 0-9");
            return Err(Unusable::new("attribute", name, bound));
        }
        if GIVEN.contains(&name.as_str()) {
            return Err(Unusable::new(
                "attribute",
                name,
                "every event has it from elsewhere",
            ));
        }
        if attributes[..n].iter().any(|(other, _)| other == name) {
            return Err(Unusable::new("attribute", name, "it is there once"));
        }
        if value.is_empty() || value.chars().any(char::is_control) {
            let bound = format!("the value of {name} is not empty and has no control characters");
            return Err(Unusable::new("attribute", value, bound));
        }
    }
    Ok(())
}

/// What a CloudEvent of one JSON document cannot be without.
fn check_structured(event: &OutgoingEvent) -> Checked {
    if event.event_type.is_none() {
        return Err(Unusable::new("type", "", "a structured CloudEvent has a type"));
    }
    let Some(payload) = &event.payload else {
        return Err(Unusable::new(
            "payload",
            "",
            "a structured CloudEvent has a payload",
        ));
    };
    let json = event.content_type.as_deref().is_some_and(is_json);
    if json && let Err(error) = serde_json::from_slice::<IgnoredAny>(payload) {
        // Bodies are not for letters and logs.
        let bound = format!("JSON, as its content type says: {error}");
        return Err(Unusable::new(
            "payload",
            &format!("{} bytes", payload.len()),
            bound,
        ));
    }
    Ok(())
}

fn check_times(event: &OutgoingEvent) -> Checked {
    if let Some(delay) = event.delay.filter(|delay| *delay > MAX_DELAY) {
        let bound = format!("at most {MAX_DELAY:?}");
        return Err(Unusable::new("delay", &format!("{delay:?}"), bound));
    }
    let Some(send_at) = event.send_at else {
        return Ok(());
    };
    let since = send_at.duration_since(SystemTime::UNIX_EPOCH);
    match since {
        Ok(since) if since <= LAST_SECOND => Ok(()),
        Ok(since) => Err(out_of_range(&format!("{} s after 1970", since.as_secs()))),
        Err(before) => Err(out_of_range(&format!(
            "{} s before 1970",
            before.duration().as_secs()
        ))),
    }
}

fn out_of_range(send_at: &str) -> Unusable {
    Unusable::new("send_at", send_at, "from 1970 to the end of the year 9999")
}

/// What an event counts as against the limit of its publisher; [`Outbox::limit`](super::Outbox::limit)
/// describes it.
pub(crate) fn size(message: &Message) -> usize {
    let text = |text: &Option<String>| text.as_ref().map_or(0, String::len);
    let payload = message.payload.as_ref().map_or(0, Bytes::len);
    let body = match message.mode {
        CloudEventsMode::Structured if !message.content_type.as_deref().is_some_and(is_json) => {
            payload.div_ceil(3) * 4
        }
        _ => payload,
    };
    // Both under our own names and under those of CloudEvents.
    let identity = 2 * (message.event_id.len() + message.source.len());
    let attributes = message.attributes.iter();
    body + message.key.as_ref().map_or(0, Bytes::len)
        + identity
        + text(&message.event_type)
        + text(&message.content_type)
        + message.headers.size()
        + message.headers.len() * FRAME
        + attributes
            .map(|(name, value)| name.len() + value.len() + FRAME)
            .sum::<usize>()
        + STAMPS
}

fn is_json(content_type: &str) -> bool {
    let media_type = media_type(content_type);
    media_type == "application/json" || media_type == "text/json" || media_type.ends_with("+json")
}

/// Without parameters, in lower case.
fn media_type(content_type: &str) -> String {
    let end = content_type.find(';').unwrap_or(content_type.len());
    content_type[..end].trim().to_ascii_lowercase()
}

/// For an error's text.
pub(super) fn shortened(value: &str) -> String {
    const CHARS: usize = 40;
    let start: String = value.chars().take(CHARS).collect();
    let more = if start.len() < value.len() { ".." } else { "" };
    format!("{start:?}{more}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event() -> OutgoingEvent {
        OutgoingEvent::new("kafka:t", "paid", "body")
    }

    fn refused(event: OutgoingEvent) -> &'static str {
        match check(&event) {
            Ok(()) => "taken",
            Err(unusable) => unusable.field,
        }
    }

    #[test]
    fn what_brokers_can_carry_is_taken() {
        for event in [
            event(),
            event()
                .key(&b"\0\xff"[..])
                .header("a", &b"\0\xff"[..])
                .header("a", ""),
            event().attribute("subject", "pay-1").attribute("tenant2", "é"),
            event().content_type("application/json; charset=utf-8"),
            event().delay(MAX_DELAY),
            event().send_at(SystemTime::UNIX_EPOCH),
            event().send_at(SystemTime::UNIX_EPOCH + LAST_SECOND),
            OutgoingEvent::new("kafka:t", "t".repeat(MAX_NAME), Bytes::new()),
            OutgoingEvent::tombstone("kafka:t", "k"),
            event().mode(CloudEventsMode::Structured),
        ] {
            assert_eq!(refused(event.clone()), "taken", "{event:?}");
        }
    }

    #[test]
    fn each_part_that_no_broker_could_carry_is_named() {
        let typed = |event_type: &str| OutgoingEvent::new("kafka:t", event_type, "body");
        let structured = |event: OutgoingEvent| event.mode(CloudEventsMode::Structured);
        for (field, event) in [
            ("type", typed("")),
            ("type", typed(" ")),
            ("type", typed("a\0b")),
            ("type", typed(&"t".repeat(MAX_NAME + 1))),
            ("key", event().key("")),
            ("content type", event().content_type("a\r\nb")),
            (
                "content type",
                event().content_type("Application/CloudEvents+json"),
            ),
            ("header", event().header("", "x")),
            ("header", event().header("a\0", "x")),
            ("header", event().header("h".repeat(MAX_NAME + 1), "x")),
            ("header", event().header("Onlyonce-Event-Id", "x")),
            ("header", event().header("ce_id", "x")),
            ("header", event().header("cloudEvents:source", "x")),
            ("header", event().header("Content-Type", "x")),
            ("attribute", event().attribute("Subject", "x")),
            ("attribute", event().attribute("", "x")),
            ("attribute", event().attribute("a".repeat(21), "x")),
            ("attribute", event().attribute("data_base64", "x")),
            ("attribute", event().attribute("id", "x")),
            ("attribute", event().attribute("a", "x").attribute("a", "y")),
            ("attribute", event().attribute("a", "")),
            ("attribute", event().attribute("a", "x\0y")),
            ("type", structured(OutgoingEvent::tombstone("kafka:t", "k"))),
            (
                "payload",
                structured(OutgoingEvent {
                    payload: None,
                    ..event()
                }),
            ),
            ("payload", structured(event().content_type("application/json"))),
            (
                "payload",
                structured(event().content_type("application/x+JSON ; v=1")),
            ),
            ("delay", event().delay(Duration::MAX)),
            ("delay", event().delay(MAX_DELAY + Duration::from_nanos(1))),
            (
                "send_at",
                event().send_at(SystemTime::UNIX_EPOCH - Duration::from_secs(1)),
            ),
            (
                "send_at",
                event().send_at(SystemTime::UNIX_EPOCH + LAST_SECOND + Duration::from_secs(1)),
            ),
        ] {
            assert_eq!(refused(event.clone()), field, "{event:?}");
        }
    }

    #[test]
    fn a_long_value_is_shortened_and_its_length_named() {
        let unusable = check(&OutgoingEvent::new("kafka:t", "é".repeat(1000), "")).unwrap_err();
        assert_eq!(unusable.value, format!("\"{}\"..", "é".repeat(40)));
        assert!(unusable.bound.starts_with("2000 bytes: 1 to 255"));
    }
}
