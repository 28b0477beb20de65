use onlyonce::publisher::{PublishErrorKind, Publisher as _};

use super::arrivals::arrivals;
use super::{PublisherHarness, message, publish, publish_all};
use crate::broken::{ensure, promise};
use crate::{Broken, Result};

/// A destination that is not there, a message that goes nowhere, one that the broker can never take: each is
/// reported as what it is, and not as published. Others are published before, between and after.
pub async fn refusals_are_reported<H: PublisherHarness>(harness: &H) -> Result {
    promise("refusals_are_reported", async {
        let publisher = harness.publisher();
        let mut refused = vec![(harness.missing(), PublishErrorKind::Destination)];
        refused.extend(harness.unroutable().map(|to| (to, PublishErrorKind::Refused)));
        let mut bad: Vec<_> = refused
            .into_iter()
            .map(|(to, kind)| {
                let mut lost = message(harness, "refused");
                lost.address = to;
                (lost, kind)
            })
            .collect();
        bad.extend(
            harness
                .invalid()
                .into_iter()
                .map(|m| (m, PublishErrorKind::Invalid)),
        );

        let mut good = vec!["first".to_owned()];
        publish_all(&publisher, &[message(harness, "first")]).await?;
        for (n, (bad, kind)) in bad.iter().enumerate() {
            // A second time: what was learnt from the first must not change the answer.
            for _ in 0..2 {
                let Err(error) = publish(&publisher, bad).await? else {
                    return Err(Broken::new(format!(
                        "what was sent to {:?} and could go nowhere ({kind:?}) was confirmed",
                        bad.address
                    )));
                };
                ensure!(
                    error.kind() == *kind,
                    "{kind:?} was due for {:?}, and the publisher says {:?}: {error}",
                    bad.address,
                    error.kind()
                );
            }
            let next = format!("after {n}");
            publish_all(&publisher, &[message(harness, &next)]).await?;
            good.push(next);
        }
        publisher.stop().await;
        let came = arrivals(harness, good.clone()).await?;
        ensure!(
            came.len() == good.len(),
            "{} messages were good and {} came",
            good.len(),
            came.len()
        );
        Ok(())
    })
    .await
}
