use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use serde_json::Value;

use super::{Headers, RawEvent};
use crate::reason::Reason;

/// The longest event id or source, in bytes.
const MAX_BYTES: usize = 512;

const OUR_ID: &str = "onlyonce-event-id";
const OUR_SOURCE: &str = "onlyonce-event-source";

/// The prefixes under which the broker bindings of CloudEvents write their attributes; the RabbitMQ
/// and HTTP form, the Kafka form, and both AMQP 1.0 forms.
const CLOUD_EVENTS_PREFIXES: [&str; 4] = ["ce-", "ce_", "cloudEvents_", "cloudEvents:"];

/// Who an event is: deduplication compares exactly this pair, byte for byte, within one consumer.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Identity {
    /// Whose ids these are: a CloudEvents source, an exchange, a configured name. 1 to 512 bytes.
    pub source: String,
    /// The id, unique within the source. 1 to 512 bytes, no control characters.
    pub id: String,
    /// How far the pair can be trusted to be the same on every delivery, and only then.
    pub strength: Strength,
}

/// How far an identity can be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Strength {
    /// The producer named the event.
    Strong,
    /// It was derived from what a delivery happens to look like; two events may share it, or one
    /// event may get two.
    Weak,
}

impl Identity {
    /// An identity that the producer gave.
    pub fn strong(source: impl Into<String>, id: impl Into<String>) -> Result<Self, IdentityError> {
        Self::checked(source.into(), id.into(), Strength::Strong)
    }

    fn checked(source: String, id: String, strength: Strength) -> Result<Self, IdentityError> {
        check("event id", &id)?;
        check("event source", &source)?;
        Ok(Self { source, id, strength })
    }
}

fn check(what: &str, text: &str) -> Result<(), IdentityError> {
    if text.trim().is_empty() {
        return Err(IdentityError::missing(format!("the {what} is present but blank")));
    }
    // `String(undefined)` in a producer: one shared key for every event that lacks an id.
    if matches!(text, "null" | "undefined" | "None" | "nil") {
        return Err(IdentityError::missing(format!(
            "the {what} is the text {text:?}, not an id"
        )));
    }
    if text.len() > MAX_BYTES {
        return Err(IdentityError::invalid(format!(
            "the {what} is {} bytes long, the most is {MAX_BYTES}",
            text.len()
        )));
    }
    if text.chars().any(char::is_control) {
        return Err(IdentityError::invalid(format!(
            "the {what} holds control characters"
        )));
    }
    Ok(())
}

/// Why an event has no usable identity. It becomes a dead letter with this reason, never a shared key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdentityError {
    reason: Reason,
    message: String,
}

impl IdentityError {
    /// There is none, or it is blank.
    pub fn missing(message: impl Into<String>) -> Self {
        Self {
            reason: Reason::MissingEventId,
            message: message.into(),
        }
    }

    /// There is one, but it cannot be used.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self {
            reason: Reason::InvalidEventId,
            message: message.into(),
        }
    }

    /// The dead letter's reason: `missing_event_id` or `invalid_event_id`.
    pub fn reason(&self) -> Reason {
        self.reason
    }
}

impl fmt::Display for IdentityError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for IdentityError {}

type Extract = dyn Fn(&RawEvent) -> Result<Option<Identity>, IdentityError> + Send + Sync;

/// How a consumer finds the identity of its events.
///
/// The first level that is present decides; a value that is present but invalid is an error and
/// never falls through to a weaker level, because that would give one event two identities.
///
/// 1. a rule of yours: [`header`](Self::header), [`json_pointer`](Self::json_pointer),
///    [`with`](Self::with) (alone, unless [`or_auto`](Self::or_auto) is added);
/// 2. the headers `onlyonce-event-id` and `onlyonce-event-source`, which every republish by this
///    framework carries ([`ignore_own_headers`](Self::ignore_own_headers) for queues that strangers write to);
/// 3. CloudEvents, structured mode, then binary mode;
/// 4. the broker's message property: AMQP `message_id`, with `app_id` or the exchange as its source;
/// 5. by choice only, a hash of the body ([`or_content_hash`](Self::or_content_hash)), which is weak;
/// 6. what the broker itself calls the message, where it names messages (SQS, Kafka): weak.
///
/// Otherwise the event is a dead letter, reason `missing_event_id`.
#[derive(Clone)]
pub struct IdentityRules {
    rule: Option<Arc<Extract>>,
    auto: bool,
    own_headers: bool,
    content_hash: bool,
}

impl IdentityRules {
    /// The levels that need no configuration: our headers, CloudEvents, the message property, the broker.
    pub fn auto() -> Self {
        Self {
            rule: None,
            auto: true,
            own_headers: true,
            content_hash: false,
        }
    }

    /// The id is the value of this header (the last one, if the name repeats); `source` says whose ids these are.
    pub fn header(name: impl Into<String>, source: impl Into<String>) -> Self {
        let (name, source) = (name.into(), source.into());
        Self::with(move |event| match event.headers.all(&name).last() {
            None => Ok(None),
            Some(None) => Err(IdentityError::missing(format!("the header {name} is null"))),
            Some(Some(value)) => Identity::strong(source.clone(), text("event id", value)?).map(Some),
        })
    }

    /// The id is the text or the whole number at this JSON pointer (RFC 6901) of the body.
    pub fn json_pointer(pointer: impl Into<String>, source: impl Into<String>) -> Self {
        let (pointer, source) = (pointer.into(), source.into());
        Self::with(move |event| {
            let body = event.payload.as_deref().unwrap_or_default();
            let json: Value = serde_json::from_slice(body).map_err(|e| {
                IdentityError::missing(format!("no event id at {pointer}: the body is not JSON: {e}"))
            })?;
            let id = match json.pointer(&pointer) {
                None | Some(Value::Null) => {
                    return Err(IdentityError::missing(format!("no event id at {pointer}")));
                }
                Some(Value::String(id)) => id.clone(),
                Some(Value::Number(id)) if id.is_i64() || id.is_u64() => id.to_string(),
                Some(_) => {
                    return Err(IdentityError::invalid(format!(
                        "the value at {pointer} is neither a text nor a whole number"
                    )));
                }
            };
            Identity::strong(source.clone(), id).map(Some)
        })
    }

    /// A rule of your own. `Ok(None)` means there is none; `Err` is a dead letter. It may be called
    /// more than once for one event and must give the same answer each time.
    pub fn with(
        rule: impl Fn(&RawEvent) -> Result<Option<Identity>, IdentityError> + Send + Sync + 'static,
    ) -> Self {
        Self {
            rule: Some(Arc::new(rule)),
            auto: false,
            own_headers: true,
            content_hash: false,
        }
    }

    /// Where the rule finds nothing, go on with the automatic levels.
    pub fn or_auto(mut self) -> Self {
        self.auto = true;
        self
    }

    /// Do not trust `onlyonce-event-id`: others can write to this queue.
    pub fn ignore_own_headers(mut self) -> Self {
        self.own_headers = false;
        self
    }

    /// Where nothing else is found, identify an event by its body. Two events that happen to look
    /// alike (the same amount, twice) are then one: choose it only where that cannot be.
    pub fn or_content_hash(mut self) -> Self {
        self.content_hash = true;
        self
    }

    /// What to say at start-up about identities that may be weak.
    /// `native` is what its source says of the ids that its broker gives.
    pub(crate) fn weakness(&self, native: Option<&'static str>) -> Option<&'static str> {
        if self.content_hash {
            return Some(
                "events without an id are identified by their body: two different events with equal bodies count as one",
            );
        }
        native.filter(|_| self.auto)
    }

    /// The identity of this event.
    pub fn identify(&self, event: &RawEvent) -> Result<Identity, IdentityError> {
        if let Some(rule) = &self.rule
            && let Some(found) = guarded(rule, event)?
        {
            return Identity::checked(found.source, found.id, found.strength);
        }
        if self.auto
            && let Some(found) = self.automatic(event)?
        {
            return Ok(found);
        }
        if self.content_hash {
            return content_hash(event);
        }
        if self.auto
            && let Some(native) = &event.native
        {
            let id = text("broker's id", &native.id)?;
            return Identity::checked(native.source.to_string(), id, Strength::Weak);
        }
        Err(IdentityError::missing(
            "the event carries no id (publish with a message id or a CloudEvents id, or configure an identity rule)",
        ))
    }

    fn automatic(&self, event: &RawEvent) -> Result<Option<Identity>, IdentityError> {
        if self.own_headers
            && let Some(found) = own_headers(event)?
        {
            return Ok(Some(found));
        }
        if let Some(found) = cloud_events_structured(event)? {
            return Ok(Some(found));
        }
        if let Some(found) = cloud_events_binary(event)? {
            return Ok(Some(found));
        }
        match &event.property {
            None => Ok(None),
            Some(property) => {
                Identity::strong(&*property.source, text("message id", &property.id)?).map(Some)
            }
        }
    }
}

/// A rule is code of the user's: a message that makes it panic is that message's trouble alone.
fn guarded(rule: &Arc<Extract>, event: &RawEvent) -> Result<Option<Identity>, IdentityError> {
    catch_unwind(AssertUnwindSafe(|| rule(event)))
        .unwrap_or_else(|_| Err(IdentityError::invalid("the identity rule panicked")))
}

impl Default for IdentityRules {
    fn default() -> Self {
        Self::auto()
    }
}

impl fmt::Debug for IdentityRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdentityRules")
            .field("rule", &self.rule.is_some())
            .field("auto", &self.auto)
            .field("own_headers", &self.own_headers)
            .field("content_hash", &self.content_hash)
            .finish()
    }
}

fn text(what: &str, value: &[u8]) -> Result<String, IdentityError> {
    std::str::from_utf8(value)
        .map(str::to_owned)
        .map_err(|_| IdentityError::invalid(format!("the {what} is not valid UTF-8")))
}

fn own_headers(event: &RawEvent) -> Result<Option<Identity>, IdentityError> {
    let Some(id) = event.headers.all(OUR_ID).last() else {
        return Ok(None);
    };
    let id = id.ok_or_else(|| IdentityError::missing(format!("the header {OUR_ID} is null")))?;
    let source = match event.headers.all(OUR_SOURCE).last().flatten() {
        Some(source) => text("event source", source)?,
        None => event.origin.destination.to_string(),
    };
    Identity::strong(source, text("event id", id)?).map(Some)
}

fn cloud_events_structured(event: &RawEvent) -> Result<Option<Identity>, IdentityError> {
    const MEDIA_TYPE: &[u8] = b"application/cloudevents";
    let structured = event.content_type().is_some_and(|given| {
        given.len() >= MEDIA_TYPE.len() && given[..MEDIA_TYPE.len()].eq_ignore_ascii_case(MEDIA_TYPE)
    });
    if !structured {
        return Ok(None);
    }
    let body: Value = serde_json::from_slice(event.payload.as_deref().unwrap_or_default()).map_err(|e| {
        IdentityError::missing(format!("a structured CloudEvent whose body is not JSON: {e}"))
    })?;
    let attribute = |name: &str| match body.get(name) {
        Some(Value::String(value)) => Ok(value.clone()),
        None | Some(Value::Null) => Err(IdentityError::missing(format!(
            "the structured CloudEvent has no {name}"
        ))),
        Some(_) => Err(IdentityError::invalid(format!(
            "the CloudEvent's {name} is not a text"
        ))),
    };
    Identity::strong(attribute("source")?, attribute("id")?).map(Some)
}

/// Binary mode counts only with `id`, `source` and `specversion` of one family; a bare `ce-id` says
/// nothing about whose id it is.
fn cloud_events_binary(event: &RawEvent) -> Result<Option<Identity>, IdentityError> {
    for prefix in CLOUD_EVENTS_PREFIXES {
        let attribute = |name: &str| one_attribute(&event.headers, &format!("{prefix}{name}"));
        let (id, source, version) = (attribute("id")?, attribute("source")?, attribute("specversion")?);
        if let (Some(id), Some(source), Some(_)) = (id, source, version) {
            return Identity::strong(source, id).map(Some);
        }
    }
    Ok(None)
}

fn one_attribute(headers: &Headers, name: &str) -> Result<Option<String>, IdentityError> {
    let mut values = headers.all(name);
    let first = values.next();
    if values.next().is_some() {
        return Err(IdentityError::invalid(format!(
            "the CloudEvents header {name} is there more than once"
        )));
    }
    match first {
        None => Ok(None),
        Some(None) => Err(IdentityError::missing(format!(
            "the CloudEvents header {name} is null"
        ))),
        Some(Some(value)) => text(name, value).map(Some),
    }
}

fn content_hash(event: &RawEvent) -> Result<Identity, IdentityError> {
    let body = event
        .payload
        .as_deref()
        .ok_or_else(|| IdentityError::missing("a null payload cannot be identified by its content"))?;
    let id = sha256_hex(body);
    Identity::checked(
        event.origin.destination.to_string(),
        format!("sha256:{id}"),
        Strength::Weak,
    )
}

fn sha256_hex(body: &[u8]) -> String {
    use sha2::{Digest, Sha256};
    use std::fmt::Write as _;
    Sha256::digest(body)
        .iter()
        .fold(String::with_capacity(64), |mut out, byte| {
            let _ = write!(out, "{byte:02x}");
            out
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::PropertyId;
    use bytes::Bytes;

    fn event(headers: &[(&str, &[u8])], body: &str) -> RawEvent {
        RawEvent {
            headers: headers
                .iter()
                .map(|(n, v)| (*n, Bytes::copy_from_slice(v)))
                .collect(),
            payload: Some(Bytes::copy_from_slice(body.as_bytes())),
            origin: crate::event::Origin {
                destination: "queue".into(),
                ..Default::default()
            },
            ..Default::default()
        }
    }

    fn property(id: &[u8]) -> RawEvent {
        RawEvent {
            property: Some(PropertyId {
                source: "orders".into(),
                id: Bytes::copy_from_slice(id),
            }),
            ..event(&[], "{}")
        }
    }

    fn auto(event: &RawEvent) -> Result<(String, String), Reason> {
        IdentityRules::auto()
            .identify(event)
            .map(|i| (i.source, i.id))
            .map_err(|e| e.reason())
    }

    fn found(source: &str, id: &str) -> Result<(String, String), Reason> {
        Ok((source.into(), id.into()))
    }

    #[test]
    fn levels_win_in_their_order() {
        let all = RawEvent {
            property: Some(PropertyId {
                source: "exchange".into(),
                id: "p".into(),
            }),
            ..event(
                &[
                    ("onlyonce-event-id", b"o"),
                    ("onlyonce-event-source", b"s"),
                    ("ce-id", b"c"),
                    ("ce-source", b"cs"),
                    ("ce-specversion", b"1.0"),
                    ("content-type", b"Application/CloudEvents+json; charset=utf-8"),
                ],
                r#"{"id":"st","source":"ss"}"#,
            )
        };
        assert_eq!(auto(&all), found("s", "o"));
        let rules = IdentityRules::auto().ignore_own_headers();
        assert_eq!(rules.identify(&all).unwrap().id, "st", "structured before binary");
        assert_eq!(auto(&property(b"evt")), found("orders", "evt"));
    }

    #[test]
    fn every_cloud_events_binding_is_read_and_never_mixed() {
        for prefix in CLOUD_EVENTS_PREFIXES {
            let names = ["id", "source", "specversion"].map(|n| format!("{prefix}{n}"));
            let full = event(&[(&names[0], b"1"), (&names[1], b"a|b"), (&names[2], b"1.0")], "");
            assert_eq!(auto(&full), found("a|b", "1"));
            let half = event(&[(&names[0], b"1"), (&names[2], b"1.0")], "");
            assert_eq!(
                auto(&half),
                Err(Reason::MissingEventId),
                "an id without its source is none"
            );
        }
        let twice = event(
            &[
                ("ce-id", b"1"),
                ("ce-id", b"2"),
                ("ce-source", b"s"),
                ("ce-specversion", b"1.0"),
            ],
            "",
        );
        assert_eq!(auto(&twice), Err(Reason::InvalidEventId));
    }

    #[test]
    fn a_value_that_is_present_but_unusable_never_falls_through() {
        for (bad, reason) in [
            (&b""[..], Reason::MissingEventId),
            (b"   ", Reason::MissingEventId),
            (b"null", Reason::MissingEventId),
            (b"undefined", Reason::MissingEventId),
            (b"a\0b", Reason::InvalidEventId),
            (b"a\nb", Reason::InvalidEventId),
            (b"\xff\xfe", Reason::InvalidEventId),
            (&[b'x'; 513], Reason::InvalidEventId),
        ] {
            assert_eq!(auto(&property(bad)), Err(reason), "{bad:?} as a property");
            let mut with_fallback = property(b"good");
            with_fallback.headers.push("onlyonce-event-id", bad);
            assert_eq!(auto(&with_fallback), Err(reason), "{bad:?} as a header");
        }
        assert_eq!(auto(&property(&[b'x'; 512])), found("orders", &"x".repeat(512)));
    }

    #[test]
    fn ids_are_compared_byte_for_byte() {
        for id in ["evt_Ab", "evt_aB", "evt_Ab ", "e\u{301}", "\u{e9}", "ß", "ss"] {
            assert_eq!(auto(&property(id.as_bytes())), found("orders", id));
        }
    }

    #[test]
    fn json_pointer_takes_texts_and_whole_numbers_only() {
        let rules = IdentityRules::json_pointer("/data/id", "api");
        let at = |json: &str| {
            rules
                .identify(&event(&[], json))
                .map(|i| i.id)
                .map_err(|e| e.reason())
        };
        assert_eq!(at(r#"{"data":{"id":0}}"#), Ok("0".into()));
        assert_eq!(at(r#"{"data":{"id":"x"}}"#), Ok("x".into()));
        assert_eq!(
            at(r#"{"data":{"id":18446744073709551615}}"#),
            Ok("18446744073709551615".into())
        );
        for bad in [
            r#"{"data":{"id":{}}}"#,
            r#"{"data":{"id":[1]}}"#,
            r#"{"data":{"id":1.5}}"#,
            r#"{"data":{"id":true}}"#,
        ] {
            assert_eq!(at(bad), Err(Reason::InvalidEventId), "{bad}");
        }
        for none in [r#"{"data":{"id":null}}"#, r#"{"data":{}}"#, "not json", ""] {
            assert_eq!(at(none), Err(Reason::MissingEventId), "{none}");
        }
    }

    #[test]
    fn a_rule_stands_alone_unless_told_otherwise() {
        let mut e = property(b"evt");
        assert!(IdentityRules::header("x-id", "api").identify(&e).is_err());
        assert_eq!(
            IdentityRules::header("x-id", "api")
                .or_auto()
                .identify(&e)
                .unwrap()
                .id,
            "evt"
        );
        e.headers.push("x-id", &b"7"[..]);
        assert_eq!(
            IdentityRules::header("x-id", "api")
                .or_auto()
                .identify(&e)
                .unwrap()
                .id,
            "7"
        );
    }

    #[test]
    fn what_the_broker_calls_a_message_is_the_last_resort_and_weak() {
        let native = |e: RawEvent| RawEvent {
            native: Some(PropertyId {
                source: "kafka:orders".into(),
                id: "paid/3/77@1700000000000".into(),
            }),
            ..e
        };
        let found = IdentityRules::auto().identify(&native(event(&[], "x"))).unwrap();
        assert_eq!(
            (found.source.as_str(), found.id.as_str(), found.strength),
            ("kafka:orders", "paid/3/77@1700000000000", Strength::Weak)
        );
        assert_eq!(auto(&native(property(b"evt"))).unwrap().1, "evt");
        assert_eq!(
            auto(&native(property(b" "))),
            Err(Reason::MissingEventId),
            "a blank id does not fall through to it"
        );
        let hashed = IdentityRules::auto().or_content_hash();
        let by_hash = hashed.identify(&native(event(&[], "x"))).unwrap();
        assert!(by_hash.id.starts_with("sha256:"), "a choice wins over it");
        let rule = IdentityRules::header("x-id", "api");
        assert!(
            rule.identify(&native(event(&[], "x"))).is_err(),
            "a rule stands alone"
        );

        let said = Some("republished copies count as other events");
        assert_eq!(IdentityRules::auto().weakness(said), said);
        assert_eq!(rule.weakness(said), None);
        assert_ne!(hashed.weakness(said), said);
        assert_eq!(IdentityRules::auto().weakness(None), None);
    }

    #[test]
    fn a_content_hash_is_a_choice_and_weak() {
        let e = event(&[], "body");
        assert_eq!(auto(&e), Err(Reason::MissingEventId));
        let identity = IdentityRules::auto().or_content_hash().identify(&e).unwrap();
        assert_eq!(identity.strength, Strength::Weak);
        let tombstone = RawEvent { payload: None, ..e };
        assert!(
            IdentityRules::auto()
                .or_content_hash()
                .identify(&tombstone)
                .is_err()
        );
    }
}
