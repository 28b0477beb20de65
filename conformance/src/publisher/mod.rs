//! The promises of a publisher, one per file, and what an adapter brings for them.

mod arrivals;
mod bytes_arrive;
mod confirmed_is_readable;
mod identity_arrives;
mod many_at_once;
mod one_bad_message_costs_itself;
mod outages_end;
mod refusals_are_reported;
mod says_who_it_is;
mod secrets_stay_secret;
mod silence_is_bounded;
mod stop_flushes;

use std::fmt;
use std::time::Duration;

use onlyonce::async_trait;
use onlyonce::publisher::{Message, PublishError, Publisher};
use onlyonce::source::Source;

pub use bytes_arrive::bytes_arrive;
pub use confirmed_is_readable::confirmed_is_readable;
pub use identity_arrives::identity_arrives;
pub use many_at_once::many_at_once;
pub use one_bad_message_costs_itself::one_bad_message_costs_itself;
pub use outages_end::outages_end;
pub use refusals_are_reported::refusals_are_reported;
pub use says_who_it_is::says_who_it_is;
pub use secrets_stay_secret::secrets_stay_secret;
pub use silence_is_bounded::silence_is_bounded;
pub use stop_flushes::stop_flushes;

use crate::{Broken, Result};

/// What an adapter's test brings: a destination of its own for each promise, a source that reads it, and
/// hands on the broker.
#[async_trait]
pub trait PublisherHarness: Sized + Send + Sync + 'static {
    /// The publisher that is put to the test.
    type Publisher: Publisher + fmt::Debug;

    /// What reads the destination; one that passes the suite of sources.
    type Source: Source;

    /// An empty destination that nobody else uses. `None`: there is no broker to be had; say why.
    async fn empty() -> Result<Option<Self>>;

    /// What the publisher must say of its system.
    fn system(&self) -> &'static str;

    /// What this broker, and this harness, can do.
    fn capabilities(&self) -> PublisherCapabilities {
        PublisherCapabilities::default()
    }

    /// A new publisher, whose patience is a few seconds.
    fn publisher(&self) -> Self::Publisher;

    /// A source on the destination, not started. There is one at a time.
    fn source(&self) -> Self::Source;

    /// The destination's address.
    fn address(&self) -> String;

    /// An address of the same broker behind which there is nothing, and never was.
    fn missing(&self) -> String;

    /// An address that exists, and from which nothing goes anywhere. `None`: this broker has no such thing.
    fn unroutable(&self) -> Option<String> {
        None
    }

    /// Messages to the destination that this broker can never take, whatever the suite itself can think of.
    fn invalid(&self) -> Vec<Message> {
        Vec::new()
    }

    /// Cuts the publisher off from the broker until [`mend`](Self::mend): its connections end, and no new one comes about.
    /// The source is not cut off. Called where [`PublisherCapabilities::outages`] says so.
    async fn cut(&self) -> Result {
        Ok(())
    }

    /// From now on until [`mend`](Self::mend) not a byte passes between publisher and broker, and connections stay.
    async fn freeze(&self) -> Result {
        Ok(())
    }

    /// Ends `cut` and `freeze`.
    async fn mend(&self) -> Result {
        Ok(())
    }

    /// Passwords and tokens that the publisher knows, and shows to nobody.
    fn secrets(&self) -> Vec<String> {
        Vec::new()
    }

    /// Removes the destination. Also called after a failure.
    async fn end(self) -> Result {
        Ok(())
    }
}

/// What a broker, and the harness around it, can do. Start from the default, which is a kind broker
/// that carries everything, and take away.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PublisherCapabilities {
    /// How long to wait for what must happen. Default 30 s: test machines are busy.
    pub patience: Duration,
    /// How long to wait before believing that nothing more arrives. Default 400 ms.
    pub quiet: Duration,
    /// [`PublisherHarness::cut`] and [`PublisherHarness::freeze`] work. Default false.
    pub outages: bool,
    /// A key that is any bytes arrives. Default true.
    pub binary_keys: bool,
    /// A body may be null, which is not empty. Default true.
    pub null_payload: bool,
    /// A header's name may stand there twice. Default true.
    pub repeated_headers: bool,
    /// The order of headers is kept. Default true.
    pub ordered_headers: bool,
    /// The largest body that is tried. Default 100,000 bytes.
    pub large_payload: usize,
    /// How many messages may be under way at once and still be confirmed within the publisher's patience. Default 1000.
    pub at_once: usize,
}

impl Default for PublisherCapabilities {
    fn default() -> Self {
        Self {
            patience: Duration::from_secs(30),
            quiet: Duration::from_millis(400),
            outages: false,
            binary_keys: true,
            null_payload: true,
            repeated_headers: true,
            ordered_headers: true,
            large_payload: 100_000,
            at_once: 1000,
        }
    }
}

/// The identity source of the suite's messages.
const SOURCE: &str = "conformance";

/// A message to the harness's destination. Where the broker orders by keys, it has one of its own.
fn message<H: PublisherHarness>(harness: &H, id: &str) -> Message {
    let mut message = Message::new(harness.address(), SOURCE, id, format!("body of {id}"));
    message.key = Some(format!("key-{id}").into());
    message
}

/// Publishes it, and holds the publisher to its own patience.
async fn publish(
    publisher: &impl Publisher,
    message: &Message,
) -> Result<std::result::Result<(), PublishError>> {
    // What a busy machine takes to come round to it.
    let limit = publisher.patience() + Duration::from_secs(5);
    tokio::time::timeout(limit, publisher.publish(message))
        .await
        .map_err(|_| {
            Broken::new(format!(
                "publishing {} gave no answer within {limit:?}",
                message.event_id
            ))
        })
}

/// Publishes what has to arrive.
async fn publish_all(publisher: &impl Publisher, messages: &[Message]) -> Result {
    for message in messages {
        if let Err(error) = publish(publisher, message).await? {
            return Err(Broken::new(format!(
                "{} was not published: {error} ({:?})",
                message.event_id,
                error.kind()
            )));
        }
    }
    Ok(())
}
