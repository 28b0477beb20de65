//! A publisher between the relay and the broker's own, with delays and refusals.

use std::time::Duration;

use onlyonce::async_trait;
use onlyonce::publisher::{Message, PublishError, PublishErrorKind, Publisher, PublisherHealth};
use tokio::time::sleep;

/// The most that a message is delayed before it is published, and again before the relay learns of it.
const DELAY: Duration = Duration::from_millis(8);
/// How many of a hundred messages for the one address are refused.
const REFUSED: u8 = 5;

/// Delays everything, and refuses some of what goes to one address.
pub(super) struct Rough<P> {
    pub(super) publisher: P,
    pub(super) refuses: String,
}

#[async_trait]
impl<P: Publisher> Publisher for Rough<P> {
    fn system(&self) -> &'static str {
        self.publisher.system()
    }

    async fn publish(&self, message: &Message) -> Result<(), PublishError> {
        sleep(any(DELAY)).await;
        if message.address == self.refuses && fastrand::u8(..100) < REFUSED {
            return Err(PublishError::new(PublishErrorKind::Refused, "refused on purpose"));
        }
        self.publisher.publish(message).await?;
        // Whoever is killed now has published it and has not marked it.
        sleep(any(DELAY)).await;
        Ok(())
    }

    fn patience(&self) -> Duration {
        self.publisher.patience() + 3 * DELAY
    }

    fn health(&self) -> PublisherHealth {
        self.publisher.health()
    }

    async fn stop(&self) {
        self.publisher.stop().await;
    }
}

fn any(most: Duration) -> Duration {
    most.mul_f64(fastrand::f64())
}
