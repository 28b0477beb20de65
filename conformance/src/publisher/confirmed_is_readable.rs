use super::arrivals::{arrivals, one};
use super::{PublisherHarness, message, publish_all};
use crate::Result;
use crate::broken::promise;

/// What a publisher says is published can be read from the broker, though its process dies the moment after.
///
/// A relay deletes the row then; there is no second try.
pub async fn confirmed_is_readable<H: PublisherHarness>(harness: &H) -> Result {
    promise("confirmed_is_readable", async {
        let messages: Vec<_> = (0..12).map(|n| message(harness, &format!("e{n}"))).collect();
        let published = tokio::task::block_in_place(|| {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()?;
            let published = runtime.block_on(async {
                let publisher = harness.publisher();
                let published = publish_all(&publisher, &messages).await;
                // Nobody cleans up after a death.
                std::mem::forget(publisher);
                published
            });
            runtime.shutdown_background();
            published
        });
        published?;
        let came = arrivals(harness, messages.iter().map(|m| &m.event_id)).await?;
        for message in &messages {
            one(&came, &message.event_id)?;
        }
        Ok(())
    })
    .await
}
