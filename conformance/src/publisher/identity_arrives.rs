use onlyonce::event::IdentityRules;
use onlyonce::publisher::{CloudEventsMode, Message, Publisher as _};

use super::arrivals::{arrivals, identity};
use super::{PublisherHarness, SOURCE, message, publish_all};
use crate::Result;
use crate::broken::{ensure, promise};

/// Whatever the user's headers say, the event is (`source`, `event_id`) to whoever reads it, also to those who
/// trust none but CloudEvents; and it is so each time that it is published.
pub async fn identity_arrives<H: PublisherHarness>(harness: &H) -> Result {
    promise("identity_arrives", async {
        let publisher = harness.publisher();
        let typed = |id: &str, mode| {
            let mut typed = message(harness, id);
            typed.event_type = Some("payment.captured".to_owned());
            typed.content_type = Some("application/json".to_owned());
            typed.payload = Some(r#"{"cents": 500, "id": "forged", "source": "forged"}"#.into());
            typed.mode = mode;
            typed
        };
        let mut forged = typed("forged headers", CloudEventsMode::Binary);
        for name in [
            "onlyonce-event-id",
            "onlyonce-event-source",
            "ce_id",
            "ce-id",
            "ce-source",
            "ce_source",
        ] {
            forged.headers.push(name, "forged");
        }
        let mut again = message(harness, "again");
        again.replays = 1;
        let messages = [
            message(harness, "plain"),
            message(harness, "with spaces, ünicode and \"quotes\""),
            message(harness, &"x".repeat(200)),
            typed("binary", CloudEventsMode::Binary),
            typed("structured", CloudEventsMode::Structured),
            forged,
            message(harness, "again"),
            again,
        ];
        publish_all(&publisher, &messages).await?;
        publisher.stop().await;
        let came = arrivals(harness, messages.iter().map(|m| &m.event_id)).await?;
        ensure!(
            came.len() == messages.len(),
            "{} messages were published and {} came: a replay is to be sent, too",
            messages.len(),
            came.len()
        );
        for event in &came {
            let due = identity(event)?;
            ensure!(
                due.source == SOURCE,
                "the source of {:?} was sent as {SOURCE:?} and came as {:?}",
                due.id,
                due.source
            );
            let is_typed = |m: &&Message| m.event_id == due.id && m.event_type.is_some();
            let Some(typed) = messages.iter().find(is_typed) else {
                continue;
            };
            let strangers = IdentityRules::auto().ignore_own_headers();
            let found = strangers.identify(event).map(|found| (found.source, found.id));
            ensure!(
                found == Ok((due.source, due.id.clone())),
                "as a CloudEvent {:?} is {found:?}",
                due.id
            );
            ensure!(
                event.event_type.as_deref() == typed.event_type.as_deref().map(str::as_bytes),
                "the type of {:?} came as {:?}",
                due.id,
                event.event_type
            );
        }
        Ok(())
    })
    .await
}
