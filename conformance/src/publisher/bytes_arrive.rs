use onlyonce::Bytes;
use onlyonce::event::{Headers, RawEvent};
use onlyonce::publisher::{Message, Publisher as _};

use super::arrivals::{arrivals, one};
use super::{PublisherCapabilities, PublisherHarness, message, publish_all};
use crate::Result;
use crate::broken::{ensure, promise};

/// The prefix of the suite's own headers; an adapter may add others of its own.
const PREFIX: &str = "conf-";

/// Body, key, media type and headers arrive as they were published, byte for byte, as far as the broker can carry
/// them.
pub async fn bytes_arrive<H: PublisherHarness>(harness: &H) -> Result {
    promise("bytes_arrive", async {
        let can = harness.capabilities();
        let publisher = harness.publisher();
        let sent = samples(harness, &can);
        publish_all(&publisher, &sent).await?;
        publisher.stop().await;
        let came = arrivals(harness, sent.iter().map(|m| &m.event_id)).await?;
        for message in &sent {
            same(message, one(&came, &message.event_id)?, &can)?;
        }
        Ok(())
    })
    .await
}

/// Messages that are hard to carry.
fn samples<H: PublisherHarness>(harness: &H, can: &PublisherCapabilities) -> Vec<Message> {
    let every_byte: Bytes = (0..=255).collect::<Vec<u8>>().into();
    let with = |id: &str, change: &dyn Fn(&mut Message)| {
        let mut sample = message(harness, id);
        change(&mut sample);
        sample
    };
    let mut samples = vec![
        with("text", &|m| {
            m.payload = Some("naïve ✓ {\"a\": 1}\r\n\t".into());
            m.content_type = Some("text/plain; charset=utf-8".to_owned());
        }),
        with("large", &|m| {
            m.payload = Some(vec![b'x'; can.large_payload].into())
        }),
        with("binary", &|m| m.payload = Some(every_byte.clone())),
        with("control", &|m| m.payload = Some("a\u{1}\u{fffe}b".into())),
        with("empty", &|m| m.payload = Some(Bytes::new())),
        // What a reader may take for an envelope, and open.
        with("envelope", &|m| {
            m.payload = Some(
                r#"{"version":"0","id":"i","detail-type":"t","source":"s","account":"1","time":"t","region":"r","resources":[],"detail":{}}"#
                    .into(),
            );
        }),
        with("key", &|m| m.key = Some("key with spaces, ünicode".into())),
        with("long key", &|m| m.key = Some("k".repeat(200).into())),
        with("headers", &|m| {
            m.headers.push("conf-text", "grün");
            m.headers.push("conf-Case", "Case");
            m.headers.push("conf-binary", every_byte.clone());
            m.headers.push("conf-empty", "");
            m.headers.push_null("conf-null");
            if can.repeated_headers {
                m.headers.push("conf-twice", "first");
                m.headers.push("conf-other", "between");
                m.headers.push("conf-twice", "second");
            }
        }),
        with("many headers", &|m| {
            for n in 0..40 {
                m.headers.push(format!("conf-{n:02}"), n.to_string());
            }
        }),
    ];
    if can.null_payload {
        samples.push(with("tombstone", &|m| m.payload = None));
    }
    if can.binary_keys {
        samples.push(with("binary key", &|m| m.key = Some(every_byte.clone())));
    }
    samples
}

fn same(sent: &Message, came: &RawEvent, can: &PublisherCapabilities) -> Result {
    let id = &sent.event_id;
    let short = |bytes: &Option<Bytes>| match bytes {
        None => "null".to_owned(),
        Some(bytes) => format!("{} bytes {:?}", bytes.len(), bytes.slice(..bytes.len().min(64))),
    };
    for (what, sent, came) in [
        ("body", &sent.payload, &came.payload),
        ("key", &sent.key, &came.key),
    ] {
        ensure!(
            sent == came,
            "of {id} the {what} was sent as {} and came as {}",
            short(sent),
            short(came)
        );
    }
    if let Some(media_type) = &sent.content_type {
        ensure!(
            came.content_type() == Some(media_type.as_bytes()),
            "of {id} the media type was sent as {media_type:?} and came as {:?}",
            came.content_type().map(String::from_utf8_lossy)
        );
    }
    let ours = |headers: &Headers| {
        let mut ours: Vec<(String, Option<Bytes>)> = headers
            .iter()
            .filter(|(name, _)| name.starts_with(PREFIX))
            .map(|(name, value)| (name.to_owned(), value.map(Bytes::copy_from_slice)))
            .collect();
        if !can.ordered_headers {
            ours.sort();
        }
        ours
    };
    let (due, came) = (ours(&sent.headers), ours(&came.headers));
    ensure!(
        due == came,
        "of {id} the headers were sent as {due:?} and came as {came:?}"
    );
    Ok(())
}
