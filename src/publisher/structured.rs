use std::borrow::Cow;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde_json::Value;

use super::Message;

/// The media type of the document.
pub(super) const MEDIA_TYPE: &str = "application/cloudevents+json";

/// The event as one JSON document, as the JSON format of CloudEvents says.
///
/// A body that is JSON stands in it byte for byte, so that numbers stay what they were. Any other body is
/// base64, and so is one that calls itself JSON and would make the whole unreadable.
pub(super) fn document(attributes: &[(&str, Cow<'_, str>)], message: &Message) -> Bytes {
    let mut head = String::from("{");
    for (name, value) in attributes {
        member(&mut head, name, value);
    }
    if let Some(media_type) = &message.content_type {
        member(&mut head, "datacontenttype", media_type);
    }
    let Some(body) = &message.payload else {
        return (head + "}").into();
    };
    if message.content_type.as_deref().is_some_and(is_json)
        && let Ok(body) = std::str::from_utf8(body)
    {
        let document = format!(r#"{head},"data":{body}}}"#);
        // Read as the identity rules read it: alone, a body may be nested as deep as a reader goes.
        if serde_json::from_str::<Value>(body).is_ok() && serde_json::from_str::<Value>(&document).is_ok() {
            return document.into();
        }
    }
    member(&mut head, "data_base64", &STANDARD.encode(body));
    (head + "}").into()
}

fn member(document: &mut String, name: &str, value: &str) {
    if !document.ends_with('{') {
        document.push(',');
    }
    document.push_str(&Value::from(name).to_string());
    document.push(':');
    document.push_str(&Value::from(value).to_string());
}

fn is_json(media_type: &str) -> bool {
    let essence = media_type.split(';').next().unwrap_or_default().trim();
    let essence = essence.to_ascii_lowercase();
    matches!(essence.as_str(), "application/json" | "text/json") || essence.ends_with("+json")
}
