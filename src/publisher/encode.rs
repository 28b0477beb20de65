use std::borrow::Cow;

use bytes::Bytes;

use super::structured;
use super::time::rfc3339;
use super::{CloudEventsMode, Message};
use crate::event::Headers;

/// A message as it goes on the wire, apart from how a broker writes it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Encoded {
    /// The user's headers, then ours. No name of ours is there twice.
    pub headers: Headers,
    /// The body; `None` is a null payload.
    pub body: Option<Bytes>,
    /// The body's media type, for the broker's property of that meaning or the header `content-type`. If
    /// there is one, no other is among the headers.
    pub content_type: Option<String>,
}

/// The attributes that every CloudEvent of ours has; nobody else sets them.
const OUR_ATTRIBUTES: [&str; 8] = [
    "specversion",
    "id",
    "source",
    "type",
    "time",
    "datacontenttype",
    "data",
    "data_base64",
];

/// The longest prefix that a binding of CloudEvents has, and so the largest form of a message.
const LONGEST_PREFIX: &str = "cloudEvents_";

impl Message {
    /// What goes on the wire: the headers of the user, then `onlyonce-event-id` and `onlyonce-event-source`,
    /// then the CloudEvents attributes, each behind `prefix` (`ce_` on Kafka, `ce-` elsewhere).
    ///
    /// An event without a type is no CloudEvent and has no attributes; it goes as it is in either mode.
    /// In structured mode the attributes are in the body and, for those who route by headers, there as well.
    ///
    /// A header of the user's under a name by which an event is identified (`onlyonce-event-..`,
    /// `onlyonce-ordering-key`, CloudEvents' prefixes) is left out: whatever it says, the event is (`source`,
    /// `event_id`) to every consumer.
    pub fn encode(&self, prefix: &str) -> Encoded {
        let event_type = self.event_type.as_deref();
        let attributes = event_type.map_or_else(Vec::new, |kind| self.cloud_events(kind));
        let structured = (event_type.is_some() && self.mode == CloudEventsMode::Structured)
            .then(|| structured::document(&attributes, self));
        let (body, content_type) = match structured {
            Some(document) => (Some(document), Some(structured::MEDIA_TYPE.to_owned())),
            None => (self.payload.clone(), self.content_type.clone()),
        };

        let mut headers = Vec::with_capacity(USUAL);
        for (name, value) in self.headers.iter() {
            let said_by_us = content_type.is_some() && name.eq_ignore_ascii_case("content-type");
            if !said_by_us && !is_ours(name) {
                Headers::write(&mut headers, name, value);
            }
        }
        let mut add = |name: &str, value: &str| Headers::write(&mut headers, name, Some(value.as_bytes()));
        add("onlyonce-event-id", &self.event_id);
        add("onlyonce-event-source", &self.source);
        for (name, value) in attributes {
            add(&[prefix, name].concat(), &value);
        }
        Encoded {
            headers: Headers::written(headers),
            body,
            content_type,
        }
    }

    /// How many bytes go on the wire: body, key, names and values of headers, also those that are stamped on it.
    /// Brokers add some of their own.
    pub fn size(&self) -> usize {
        let encoded = self.encode(LONGEST_PREFIX);
        encoded.body.as_ref().map_or(0, Bytes::len)
            + self.key.as_ref().map_or(0, Bytes::len)
            + encoded.content_type.as_ref().map_or(0, String::len)
            + encoded.headers.size()
    }

    /// The attributes in their order: the required ones, then those of the user, of which the last of a name counts.
    fn cloud_events<'a>(&'a self, event_type: &'a str) -> Vec<(&'a str, Cow<'a, str>)> {
        let mut all = vec![
            ("specversion", Cow::Borrowed("1.0")),
            ("id", Cow::Borrowed(&*self.event_id)),
            ("source", Cow::Borrowed(&*self.source)),
            ("type", Cow::Borrowed(event_type)),
            ("time", Cow::Owned(rfc3339(self.time))),
        ];
        for (at, (name, value)) in self.attributes.iter().enumerate() {
            let said_again = self.attributes[at + 1..].iter().any(|(later, _)| later == name);
            if !said_again && !OUR_ATTRIBUTES.contains(&name.as_str()) {
                all.push((name, Cow::Borrowed(value)));
            }
        }
        all
    }
}

/// So many bytes nearly all events' headers take.
const USUAL: usize = 512;

/// Whether a header of this name could be taken for one of ours.
fn is_ours(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    name.starts_with("onlyonce-event-")
        || name == "onlyonce-ordering-key"
        || ["ce-", "ce_", "cloudevents_", "cloudevents:"]
            .iter()
            .any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use serde_json::{Value, json};

    use super::*;
    use crate::event::{IdentityRules, RawEvent};

    const PREFIXES: [&str; 4] = ["ce-", "ce_", "cloudEvents_", "cloudEvents:"];

    fn message(body: &str) -> Message {
        Message {
            event_type: Some("payment.captured".to_owned()),
            content_type: Some("application/json".to_owned()),
            time: UNIX_EPOCH + Duration::from_millis(1_700_000_000_123),
            ..Message::new("anywhere", "ledger", "evt-1", body.to_owned())
        }
    }

    /// As a source hands it over.
    fn arrives(encoded: &Encoded) -> RawEvent {
        let mut headers = encoded.headers.clone();
        if let Some(media_type) = &encoded.content_type {
            headers.push("content-type", media_type.clone());
        }
        RawEvent {
            headers,
            payload: encoded.body.clone(),
            ..RawEvent::default()
        }
    }

    fn identity(rules: &IdentityRules, encoded: &Encoded) -> (String, String) {
        let found = rules.identify(&arrives(encoded)).unwrap();
        (found.source, found.id)
    }

    fn names(encoded: &Encoded) -> Vec<&str> {
        encoded.headers.iter().map(|(name, _)| name).collect()
    }

    fn document(encoded: &Encoded) -> Value {
        serde_json::from_slice(encoded.body.as_ref().unwrap()).unwrap()
    }

    #[test]
    fn every_consumer_of_ours_finds_the_identity_that_was_published() {
        let due = ("ledger".to_owned(), "evt-1".to_owned());
        for prefix in PREFIXES {
            for mode in [CloudEventsMode::Binary, CloudEventsMode::Structured] {
                let typed = Message {
                    mode,
                    ..message("{}")
                };
                let untyped = Message {
                    event_type: None,
                    ..typed.clone()
                };
                let auto = IdentityRules::auto();
                assert_eq!(identity(&auto, &typed.encode(prefix)), due);
                assert_eq!(identity(&auto, &untyped.encode(prefix)), due);
                let foreign = IdentityRules::auto().ignore_own_headers();
                assert_eq!(identity(&foreign, &typed.encode(prefix)), due, "as a CloudEvent");
            }
        }
    }

    #[test]
    fn headers_of_the_user_never_say_who_the_event_is() {
        let mut forged = message("{}");
        for name in [
            "onlyonce-event-id",
            "Onlyonce-Event-Source",
            "onlyonce-event-type",
            "onlyonce-ordering-key",
        ] {
            forged.headers.push(name, "forged");
        }
        for prefix in PREFIXES {
            for name in ["id", "source", "specversion", "type", "anything"] {
                forged.headers.push(format!("{prefix}{name}"), "forged");
            }
        }
        forged
            .headers
            .push("Content-Type", "application/cloudevents+json");
        forged.headers.push("own", "1");
        forged.headers.push_null("own");
        forged.attributes = [
            ("id", "forged"),
            ("source", "forged"),
            ("specversion", "0.3"),
            ("subject", "a"),
            ("subject", "b"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into();
        let encoded = forged.encode("ce_");
        assert_eq!(
            names(&encoded),
            [
                "own",
                "own",
                "onlyonce-event-id",
                "onlyonce-event-source",
                "ce_specversion",
                "ce_id",
                "ce_source",
                "ce_type",
                "ce_time",
                "ce_subject"
            ]
        );
        assert_eq!(encoded.headers.get("ce_subject"), Some(&b"b"[..]));
        assert_eq!(
            encoded.headers.get("ce_time"),
            Some(&b"2023-11-14T22:13:20.123000Z"[..])
        );
        assert_eq!(encoded.content_type.as_deref(), Some("application/json"));
        assert!(encoded.headers.iter().all(|(_, value)| value != Some(b"forged")));
    }

    #[test]
    fn a_media_type_that_only_a_header_names_stays_there() {
        let mut message = message("{}");
        message.content_type = None;
        message.headers.push("Content-Type", "text/plain");
        let encoded = message.encode("ce-");
        assert_eq!(encoded.content_type, None);
        assert_eq!(encoded.headers.get("Content-Type"), Some(&b"text/plain"[..]));
    }

    #[test]
    fn an_event_without_a_type_goes_as_it_is() {
        let tombstone = Message {
            event_type: None,
            payload: None,
            mode: CloudEventsMode::Structured,
            ..message("")
        };
        let encoded = tombstone.encode("ce_");
        assert_eq!(encoded.body, None);
        assert_eq!(names(&encoded), ["onlyonce-event-id", "onlyonce-event-source"]);
    }

    #[test]
    fn a_structured_event_is_one_document_with_its_data_untouched() {
        let mut message = message(r#" {"cents": 1.50, "n": 9007199254740993} "#);
        message.mode = CloudEventsMode::Structured;
        message
            .attributes
            .push(("subject".to_owned(), "say \"pay\"\u{7}".to_owned()));
        let encoded = message.encode("ce_");
        assert_eq!(
            encoded.content_type.as_deref(),
            Some("application/cloudevents+json")
        );
        let text = String::from_utf8(encoded.body.clone().unwrap().to_vec()).unwrap();
        assert!(
            text.contains(r#""data": {"cents": 1.50, "n": 9007199254740993} }"#),
            "{text}"
        );
        let mut due = json!({
            "specversion": "1.0",
            "id": "evt-1",
            "source": "ledger",
            "type": "payment.captured",
            "time": "2023-11-14T22:13:20.123000Z",
            "subject": "say \"pay\"\u{7}",
            "datacontenttype": "application/json",
        });
        due["data"] = serde_json::from_slice(message.payload.as_ref().unwrap()).unwrap();
        assert_eq!(document(&encoded), due);
        assert_eq!(
            encoded.headers.get("ce_type"),
            Some(&b"payment.captured"[..]),
            "for routers"
        );
    }

    #[test]
    fn data_that_is_no_json_is_base64_and_the_document_stays_readable() {
        let deep = |levels| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
        for (media_type, body) in [
            (Some("text/plain"), Bytes::from("{}")),
            (None, Bytes::from("{}")),
            (Some("application/json"), Bytes::from("{} , \"id\": \"forged\"")),
            (Some("application/json"), Bytes::from("{")),
            (Some("application/json"), Bytes::new()),
            (Some("application/json"), Bytes::from(&b"\"\xff\""[..])),
            (Some("application/json"), Bytes::from(r#""\ud800""#)),
            (Some("application/json"), deep(127).into()),
            (Some("application/json"), deep(500).into()),
        ] {
            let message = Message {
                mode: CloudEventsMode::Structured,
                content_type: media_type.map(str::to_owned),
                payload: Some(body.clone()),
                ..message("")
            };
            let document = document(&message.encode("ce_"));
            let data = document["data_base64"]
                .as_str()
                .unwrap_or_else(|| panic!("{body:?}"));
            use base64::Engine as _;
            let decoded = base64::engine::general_purpose::STANDARD.decode(data).unwrap();
            assert_eq!((decoded, document["id"].as_str()), (body.to_vec(), Some("evt-1")));
        }
        for media_type in ["application/vnd.api+JSON; charset=utf-8", "text/json"] {
            let message = Message {
                mode: CloudEventsMode::Structured,
                content_type: Some(media_type.to_owned()),
                ..message("[1]")
            };
            assert_eq!(document(&message.encode("ce_"))["data"], json!([1]));
        }
        let nothing = Message {
            mode: CloudEventsMode::Structured,
            payload: None,
            ..message("")
        };
        let document = document(&nothing.encode("ce_"));
        assert!(document.get("data").is_none() && document.get("data_base64").is_none());
    }

    #[test]
    fn the_size_counts_all_that_is_stamped_on_a_message() {
        let bare = Message {
            event_type: None,
            content_type: None,
            ..message("12345")
        };
        let stamped =
            "onlyonce-event-id".len() + "evt-1".len() + "onlyonce-event-source".len() + "ledger".len();
        assert_eq!(bare.size(), 5 + stamped);
        let keyed = Message {
            key: Some("key".into()),
            content_type: Some("text/plain".to_owned()),
            ..bare.clone()
        };
        assert_eq!(keyed.size(), bare.size() + 3 + 10);
        let typed = Message {
            event_type: Some("t".to_owned()),
            ..bare.clone()
        };
        assert!(typed.size() > bare.size() + 5 * LONGEST_PREFIX.len());
    }
}
