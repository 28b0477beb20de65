//! From lapin's delivery to an event: bytes, headers and coordinates, nothing judged.

use std::fmt::Write;
use std::hash::{DefaultHasher, Hash, Hasher};

use bytes::Bytes;
use lapin::message::Delivery;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use onlyonce::event::{Headers, Origin, PropertyId, RawEvent};
use onlyonce::source::Redelivery;
use serde_json::Value;

use crate::config::OrderingKey;

pub(crate) const SYSTEM: &str = "rabbitmq";

const OWN_KEY_HEADER: &str = "onlyonce-ordering-key";
const CLOUD_EVENTS_TYPE: &str = "ce-type";
/// The name that management tools show for the exchange that has none.
const DEFAULT_EXCHANGE: &str = "amq.default";
const LONGEST_DETAIL: usize = 1024;

/// A delivery as the session hands it to the source.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) tag: u64,
    pub(crate) event: RawEvent,
    pub(crate) redelivery: Redelivery,
}

impl Arrival {
    pub(crate) fn new(delivery: Delivery, queue: &str, key: &OrderingKey) -> Self {
        Self {
            tag: delivery.delivery_tag,
            redelivery: redelivery(&delivery, queue),
            event: raw_event(delivery, queue, key),
        }
    }
}

fn raw_event(delivery: Delivery, queue: &str, key: &OrderingKey) -> RawEvent {
    let properties = &delivery.properties;
    let headers = headers(&delivery);
    let key = match key {
        OrderingKey::RoutingKey => Some(bytes(&delivery.routing_key)),
        OrderingKey::OwnHeader => headers.get(OWN_KEY_HEADER).map(Bytes::copy_from_slice),
        OrderingKey::Header(name) => headers.get(name).map(Bytes::copy_from_slice),
    };
    RawEvent {
        event_type: match properties.kind() {
            Some(kind) => Some(bytes(kind)),
            None => headers.get(CLOUD_EVENTS_TYPE).map(Bytes::copy_from_slice),
        },
        key,
        time_ms: properties
            .timestamp()
            .and_then(|seconds| i64::try_from(seconds).ok())
            .and_then(|seconds| seconds.checked_mul(1000)),
        property: property(&delivery, &headers),
        // AMQP has no id that the broker gives.
        native: None,
        origin: Origin {
            system: SYSTEM,
            destination: queue.into(),
            detail: detail(&delivery).into(),
        },
        headers,
        payload: Some(Bytes::from(delivery.data)),
    }
}

/// The `message_id`, even an empty one: whoever judges it must not take it for absent.
///
/// Ids are their publisher's: `app_id` names it. Without one the exchange stands for it, and for a
/// message that went through a dead-letter exchange the one it was first published to, so that it
/// keeps its identity on the way back.
fn property(delivery: &Delivery, headers: &Headers) -> Option<PropertyId> {
    let id = delivery.properties.message_id().as_ref()?;
    let app = delivery
        .properties
        .app_id()
        .as_ref()
        .map(ShortString::as_str)
        .filter(|app| !app.is_empty());
    let first_exchange = || {
        headers
            .get("x-first-death-exchange")
            .and_then(|name| std::str::from_utf8(name).ok())
    };
    let source = match app.or_else(first_exchange).unwrap_or(delivery.exchange.as_str()) {
        "" => DEFAULT_EXCHANGE,
        name => name,
    };
    Some(PropertyId {
        source: source.into(),
        id: bytes(id),
    })
}

/// The header table, and as headers the properties that say how to read the body and what it answers.
fn headers(delivery: &Delivery) -> Headers {
    let mut headers = Headers::new();
    if let Some(table) = delivery.properties.headers() {
        for (name, value) in table.inner() {
            match text(value) {
                Some(value) => headers.push(name.as_str(), value),
                None => headers.push_null(name.as_str()),
            }
        }
    }
    let properties = &delivery.properties;
    for (name, value) in [
        ("content-type", properties.content_type()),
        ("content-encoding", properties.content_encoding()),
        ("correlation-id", properties.correlation_id()),
        ("reply-to", properties.reply_to()),
    ] {
        if let Some(value) = value
            && !headers.iter().any(|(known, _)| known.eq_ignore_ascii_case(name))
        {
            headers.push(name, bytes(value));
        }
    }
    headers
}

/// A header's value as bytes: texts and byte arrays as they are, numbers in decimal, tables and
/// arrays as JSON.
fn text(value: &AMQPValue) -> Option<Bytes> {
    Some(match value {
        AMQPValue::LongString(text) => Bytes::copy_from_slice(text.as_bytes()),
        AMQPValue::ShortString(text) => bytes(text),
        AMQPValue::ByteArray(bytes) => Bytes::copy_from_slice(bytes.as_slice()),
        AMQPValue::Void => return None,
        AMQPValue::FieldArray(_) | AMQPValue::FieldTable(_) => json(value).to_string().into(),
        scalar => match json(scalar) {
            Value::String(text) => text.into(),
            other => other.to_string().into(),
        },
    })
}

fn json(value: &AMQPValue) -> Value {
    match value {
        AMQPValue::Boolean(v) => Value::from(*v),
        AMQPValue::ShortShortInt(v) => Value::from(*v),
        AMQPValue::ShortShortUInt(v) => Value::from(*v),
        AMQPValue::ShortInt(v) => Value::from(*v),
        AMQPValue::ShortUInt(v) => Value::from(*v),
        AMQPValue::LongInt(v) => Value::from(*v),
        AMQPValue::LongUInt(v) => Value::from(*v),
        AMQPValue::LongLongInt(v) => Value::from(*v),
        AMQPValue::Timestamp(v) => Value::from(*v),
        // JSON has no NaN and no infinity; as text they survive.
        AMQPValue::Float(v) if v.is_finite() => Value::from(*v),
        AMQPValue::Float(v) => Value::from(v.to_string()),
        AMQPValue::Double(v) if v.is_finite() => Value::from(*v),
        AMQPValue::Double(v) => Value::from(v.to_string()),
        AMQPValue::DecimalValue(v) => Value::from(decimal(v.value, v.scale)),
        AMQPValue::ShortString(v) => Value::from(v.as_str()),
        AMQPValue::LongString(v) => Value::from(String::from_utf8_lossy(v.as_bytes())),
        AMQPValue::ByteArray(v) => Value::from(String::from_utf8_lossy(v.as_slice())),
        AMQPValue::FieldArray(v) => v.as_slice().iter().map(json).collect(),
        AMQPValue::FieldTable(v) => v
            .inner()
            .iter()
            .map(|(name, value)| (name.as_str().to_owned(), json(value)))
            .collect(),
        AMQPValue::Void => Value::Null,
    }
}

fn decimal(value: u32, scale: u8) -> String {
    let scale = usize::from(scale);
    if scale == 0 {
        return value.to_string();
    }
    let digits = format!("{value:0>width$}", width = scale + 1);
    let (whole, fraction) = digits.split_at(digits.len() - scale);
    format!("{whole}.{fraction}")
}

/// What the broker says about earlier deliveries, the most precise statement first.
fn redelivery(delivery: &Delivery, queue: &str) -> Redelivery {
    let headers = delivery.properties.headers().as_ref();
    let counted = headers
        .and_then(|h| h.inner().get("x-delivery-count"))
        .and_then(whole)
        .unwrap_or(0);
    if counted > 0 {
        return Redelivery::Times(saturating(counted));
    }
    if delivery.redelivered {
        return Redelivery::Yes;
    }
    match headers.map_or(0, |headers| deaths(headers, queue)) {
        0 => Redelivery::No,
        times => Redelivery::Times(saturating(times)),
    }
}

/// How often this queue's consumers let the message die; expiry and overflow are nobody's delivery.
fn deaths(headers: &FieldTable, queue: &str) -> u64 {
    let Some(AMQPValue::FieldArray(deaths)) = headers.inner().get("x-death") else {
        return 0;
    };
    deaths
        .as_slice()
        .iter()
        .filter_map(|death| match death {
            AMQPValue::FieldTable(death) => Some(death.inner()),
            _ => None,
        })
        .filter(|death| {
            death
                .get("queue")
                .is_some_and(|name| text(name).as_deref() == Some(queue.as_bytes()))
                && death
                    .get("reason")
                    .and_then(text)
                    .is_some_and(|reason| matches!(&*reason, b"rejected" | b"delivery_limit"))
        })
        .filter_map(|death| death.get("count").and_then(whole))
        .fold(0, u64::saturating_add)
}

fn whole(value: &AMQPValue) -> Option<u64> {
    json(value).as_u64()
}

fn saturating(times: u64) -> u32 {
    u32::try_from(times).unwrap_or(u32::MAX)
}

fn bytes(text: &ShortString) -> Bytes {
    Bytes::copy_from_slice(text.as_str().as_bytes())
}

/// The broker's coordinates for people, on one line whatever a producer put there.
fn detail(delivery: &Delivery) -> String {
    let mut out = format!(
        "exchange={} routing-key={}",
        shown(&delivery.exchange),
        shown(&delivery.routing_key)
    );
    if let Some(id) = delivery.properties.message_id() {
        let _ = write!(out, " message-id={}", shown(id));
    }
    if out.len() > LONGEST_DETAIL {
        out.truncate(out.floor_char_boundary(LONGEST_DETAIL - '…'.len_utf8()));
        out.push('…');
    }
    out
}

fn shown(text: &ShortString) -> String {
    let plain = |c: char| !c.is_whitespace() && !c.is_control() && c != '"' && c != '\\';
    match text.as_str() {
        text if !text.is_empty() && text.chars().all(plain) => text.to_owned(),
        text => format!("{text:?}"),
    }
}

/// Recognises a message that comes again, for [`Repeats`](crate::repeats::Repeats) only: good enough
/// to slow down a loop, never an identity.
pub(crate) fn fingerprint(delivery: &Delivery) -> u64 {
    const ENOUGH: usize = 512;
    let mut hash = DefaultHasher::new();
    delivery.exchange.as_str().hash(&mut hash);
    delivery.routing_key.as_str().hash(&mut hash);
    delivery
        .properties
        .message_id()
        .as_ref()
        .map(ShortString::as_str)
        .hash(&mut hash);
    delivery.data.len().hash(&mut hash);
    delivery.data[..delivery.data.len().min(ENOUGH)].hash(&mut hash);
    hash.finish()
}

#[cfg(test)]
mod tests {
    use lapin::BasicProperties;
    use lapin::types::{DecimalValue, FieldArray};

    use super::*;

    fn delivery(properties: BasicProperties) -> Delivery {
        let mut delivery = Delivery::mock(7, "orders".into(), "paid.eu".into(), false, b"body".to_vec());
        delivery.properties = properties;
        delivery
    }

    fn table<const N: usize>(entries: [(&str, AMQPValue); N]) -> FieldTable {
        let mut table = FieldTable::default();
        for (name, value) in entries {
            table.insert(name.into(), value);
        }
        table
    }

    fn with_headers<const N: usize>(entries: [(&str, AMQPValue); N]) -> Delivery {
        delivery(BasicProperties::default().with_headers(table(entries)))
    }

    fn event(delivery: Delivery) -> RawEvent {
        raw_event(delivery, "q", &OrderingKey::OwnHeader)
    }

    fn long(text: &str) -> AMQPValue {
        AMQPValue::LongString(text.into())
    }

    #[test]
    fn every_kind_of_header_has_its_bytes() {
        let nested = table([("n", AMQPValue::LongLongInt(-1)), ("t", long("x"))]);
        let event = event(with_headers([
            (
                "array",
                AMQPValue::FieldArray(FieldArray::from(vec![
                    AMQPValue::FieldTable(nested),
                    AMQPValue::Void,
                ])),
            ),
            ("bool", AMQPValue::Boolean(true)),
            ("bytes", AMQPValue::ByteArray(vec![0, 255].into())),
            (
                "decimal",
                AMQPValue::DecimalValue(DecimalValue { scale: 2, value: 5 }),
            ),
            ("double", AMQPValue::Double(1.5)),
            ("int", AMQPValue::LongInt(-7)),
            ("long", long("grüße")),
            ("nan", AMQPValue::Double(f64::NAN)),
            ("raw", AMQPValue::LongString(vec![0xff, 0x00].into())),
            ("short", AMQPValue::ShortString("s".into())),
            ("time", AMQPValue::Timestamp(1_700_000_000)),
            ("void", AMQPValue::Void),
        ]));
        for (name, value) in [
            ("array", &br#"[{"n":-1,"t":"x"},null]"#[..]),
            ("bool", b"true"),
            ("bytes", b"\x00\xff"),
            ("decimal", b"0.05"),
            ("double", b"1.5"),
            ("int", b"-7"),
            ("long", "grüße".as_bytes()),
            ("nan", b"NaN"),
            ("raw", b"\xff\x00"),
            ("short", b"s"),
            ("time", b"1700000000"),
        ] {
            assert_eq!(event.headers.get(name), Some(value), "{name}");
        }
        assert_eq!(event.headers.all("void").collect::<Vec<_>>(), [None]);
        assert_eq!(event.headers.len(), 12);
    }

    #[test]
    fn properties_become_what_they_mean() {
        let event = event(delivery(
            BasicProperties::default()
                .with_type("payment.captured".into())
                .with_content_type("application/json".into())
                .with_content_encoding("gzip".into())
                .with_timestamp(1_700_000_000)
                .with_message_id("m-1".into()),
        ));
        assert_eq!(event.event_type.as_deref(), Some(&b"payment.captured"[..]));
        assert_eq!(event.content_type(), Some(&b"application/json"[..]));
        assert_eq!(event.headers.get("content-encoding"), Some(&b"gzip"[..]));
        assert_eq!(event.time_ms, Some(1_700_000_000_000));
        assert_eq!(event.payload.as_deref(), Some(&b"body"[..]));
        assert_eq!(&*event.origin.destination, "q");
        assert_eq!(
            &*event.origin.detail,
            "exchange=orders routing-key=paid.eu message-id=m-1"
        );
    }

    #[test]
    fn a_header_of_the_producer_is_not_repeated_by_a_property() {
        let mut delivery = with_headers([("Content-Type", long("text/plain"))]);
        delivery.properties = delivery.properties.with_content_type("application/json".into());
        let event = event(delivery);
        assert_eq!(event.content_type(), Some(&b"text/plain"[..]));
        assert_eq!(event.headers.len(), 1);
    }

    #[test]
    fn ids_belong_to_the_app_or_to_the_first_exchange() {
        let source = |delivery: Delivery| event(delivery).property.map(|p| (p.source, p.id));
        let id = BasicProperties::default().with_message_id("1".into());
        let one = Bytes::from_static(b"1");
        assert_eq!(source(delivery(BasicProperties::default())), None);
        assert_eq!(source(delivery(id.clone())), Some(("orders".into(), one.clone())));
        assert_eq!(
            source(delivery(id.clone().with_app_id("".into()))),
            Some(("orders".into(), one.clone()))
        );
        assert_eq!(
            source(delivery(id.clone().with_app_id("shop".into()))),
            Some(("shop".into(), one.clone()))
        );

        let mut unnamed = delivery(id.clone());
        unnamed.exchange = "".into();
        assert_eq!(source(unnamed), Some(("amq.default".into(), one.clone())));

        let died = id.with_headers(table([("x-first-death-exchange", long("first"))]));
        assert_eq!(
            source(delivery(died.clone())),
            Some(("first".into(), one.clone()))
        );
        assert_eq!(
            source(delivery(died.with_app_id("shop".into()))),
            Some(("shop".into(), one))
        );

        let empty = BasicProperties::default().with_message_id("".into());
        assert_eq!(
            source(delivery(empty)),
            Some(("orders".into(), Bytes::new())),
            "present, to be judged"
        );
    }

    #[test]
    fn the_ordering_key_is_where_it_was_configured_to_be() {
        let make = || {
            with_headers([
                ("onlyonce-ordering-key", long("own")),
                ("account", AMQPValue::LongInt(12)),
            ])
        };
        let key = |rule: OrderingKey| raw_event(make(), "q", &rule).key;
        assert_eq!(key(OrderingKey::OwnHeader).as_deref(), Some(&b"own"[..]));
        assert_eq!(key(OrderingKey::RoutingKey).as_deref(), Some(&b"paid.eu"[..]));
        assert_eq!(
            key(OrderingKey::Header("account".into())).as_deref(),
            Some(&b"12"[..])
        );
        assert_eq!(key(OrderingKey::Header("none".into())), None);
    }

    #[test]
    fn the_most_precise_count_of_deliveries_wins() {
        let death = |queue: &str, reason: &str, count: i64| {
            AMQPValue::FieldTable(table([
                ("queue", long(queue)),
                ("reason", long(reason)),
                ("count", AMQPValue::LongLongInt(count)),
            ]))
        };
        let of = |delivery: &Delivery| redelivery(delivery, "q");
        assert_eq!(of(&with_headers([])), Redelivery::No);

        let mut flagged = with_headers([]);
        flagged.redelivered = true;
        assert_eq!(of(&flagged), Redelivery::Yes);

        let mut counted = with_headers([("x-delivery-count", AMQPValue::LongLongInt(3))]);
        counted.redelivered = true;
        assert_eq!(of(&counted), Redelivery::Times(3));

        let deaths = vec![
            death("q", "rejected", 2),
            death("q", "expired", 50),
            death("retry", "rejected", 50),
            death("q", "delivery_limit", 1),
            AMQPValue::Void,
        ];
        assert_eq!(
            of(&with_headers([("x-death", AMQPValue::FieldArray(deaths.into()))])),
            Redelivery::Times(3)
        );
        assert_eq!(of(&with_headers([("x-death", long("nonsense"))])), Redelivery::No);
        assert_eq!(
            of(&with_headers([("x-delivery-count", AMQPValue::LongLongInt(-1))])),
            Redelivery::No
        );
        let many = with_headers([("x-delivery-count", AMQPValue::LongLongInt(i64::MAX))]);
        assert_eq!(of(&many), Redelivery::Times(u32::MAX));
    }

    #[test]
    fn coordinates_stay_on_one_short_line() {
        let mut delivery = delivery(BasicProperties::default().with_message_id("ü".repeat(120).into()));
        delivery.exchange = "a b\n".into();
        delivery.routing_key = "\u{1b}".repeat(250).into();
        let detail = event(delivery).origin.detail;
        assert!(
            detail.starts_with(r#"exchange="a b\n" routing-key="\u{1b}"#),
            "{detail}"
        );
        assert!(
            detail.len() <= LONGEST_DETAIL && detail.ends_with('…'),
            "{}",
            detail.len()
        );
        assert!(!detail.contains(char::is_control));
    }

    #[test]
    fn a_time_that_cannot_be_is_left_out() {
        let event = event(delivery(BasicProperties::default().with_timestamp(u64::MAX)));
        assert_eq!(event.time_ms, None);
    }
}
