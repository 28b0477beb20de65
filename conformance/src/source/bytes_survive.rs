use onlyonce::Bytes;
use onlyonce::event::{Headers, RawEvent};
use onlyonce::source::Delivery;

use super::tap::{Tap, WINDOW, event, id};
use super::{HarnessCapabilities, SourceHarness};
use crate::Result;
use crate::broken::{ensure, promise};

/// The prefix of the suite's own headers; an adapter may add others of its own.
const PREFIX: &str = "conf-";

/// Body, key, type and headers arrive as they were sent, byte for byte, as far as the broker can
/// carry them. Deduplication hashes the body, and dead letters keep all of it.
pub async fn bytes_survive<H: SourceHarness>(harness: &H) -> Result {
    promise("bytes_survive", async {
        let can = harness.capabilities();
        let sent = samples(&can);
        harness.publish(sent.clone()).await?;
        let mut tap = Tap::open(harness, WINDOW).await?;
        let taken = tap.take(sent.len()).await?;
        for event in &sent {
            let wanted = event.headers.get("onlyonce-event-id").unwrap_or_default();
            let Some(came) = taken.iter().find(|delivery| id(delivery).as_bytes() == wanted) else {
                ensure!(false, "{:?} did not come", String::from_utf8_lossy(wanted));
                continue;
            };
            same(event, came, &can)?;
        }
        tap.ack(taken).await?;
        tap.finish().await
    })
    .await
}

/// Events that are hard to carry.
fn samples(can: &HarnessCapabilities) -> Vec<RawEvent> {
    let every_byte: Bytes = (0..=255).collect::<Vec<u8>>().into();
    let with = |id: &str, payload: Option<Bytes>| RawEvent { payload, ..event(id) };
    let mut samples = vec![
        with("text", Some("naïve ✓ {\"a\": 1}\r\n\t".into())),
        with("large", Some(vec![b'x'; can.large_payload].into())),
    ];
    if can.binary_payload {
        samples.push(with("binary", Some(every_byte.clone())));
    }
    if can.empty_payload {
        samples.push(with("empty", Some(Bytes::new())));
    }
    if can.null_payload {
        samples.push(with("tombstone", None));
    }
    if can.keys {
        samples.push(RawEvent {
            key: Some("key-ü".into()),
            ..event("key")
        });
    }
    if can.event_types {
        samples.push(RawEvent {
            event_type: Some("payment.captured".into()),
            ..event("type")
        });
    }
    let mut headers = event("headers").headers;
    headers.push("conf-text", "grün");
    headers.push("conf-Case", "Case");
    if can.binary_headers {
        headers.push("conf-binary", every_byte);
    }
    if can.empty_headers {
        headers.push("conf-empty", "");
    }
    if can.null_headers {
        headers.push_null("conf-null");
    }
    if can.repeated_headers {
        headers.push("conf-twice", "first");
        headers.push("conf-other", "between");
        headers.push("conf-twice", "second");
    }
    samples.push(RawEvent {
        headers,
        ..event("headers")
    });
    samples
}

fn same(sent: &RawEvent, came: &Delivery, can: &HarnessCapabilities) -> Result {
    let (id, came) = (id(came), &came.event);
    let short = |bytes: &Option<Bytes>| match bytes {
        None => "null".to_owned(),
        Some(bytes) => format!("{} bytes {:?}", bytes.len(), bytes.slice(..bytes.len().min(64))),
    };
    ensure!(
        came.payload == sent.payload,
        "of {id} the body was sent as {} and came as {}",
        short(&sent.payload),
        short(&came.payload)
    );
    if sent.key.is_some() {
        ensure!(
            came.key == sent.key,
            "of {id} the key was sent as {} and came as {}",
            short(&sent.key),
            short(&came.key)
        );
    }
    if sent.event_type.is_some() {
        ensure!(
            came.event_type == sent.event_type,
            "of {id} the type was sent as {} and came as {}",
            short(&sent.event_type),
            short(&came.event_type)
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
