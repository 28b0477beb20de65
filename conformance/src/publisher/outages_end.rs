use std::time::Duration;

use futures_util::future::join_all;
use onlyonce::publisher::{PublishErrorKind, Publisher};
use tokio::time::{Instant, sleep};

use super::arrivals::arrivals;
use super::{PublisherHarness, message, publish, publish_all};
use crate::broken::{ensure, not_promised, promise};
use crate::{Broken, Result};

/// While the broker is away nothing is confirmed and nothing is the message's own fault; when it is back the same
/// publisher publishes, and what was confirmed before is there.
pub async fn outages_end<H: PublisherHarness>(harness: &H) -> Result {
    promise("outages_end", async {
        if !harness.capabilities().outages {
            return not_promised("the harness cannot cut the publisher off");
        }
        let publisher = harness.publisher();
        publish_all(&publisher, &[message(harness, "before")]).await?;
        harness.cut().await?;
        let during: Vec<_> = (0..20)
            .map(|n| message(harness, &format!("during {n}")))
            .collect();
        for told in join_all(during.iter().map(|message| publish(&publisher, message))).await {
            away(told?)?;
        }
        let health = publisher.health();
        ensure!(
            health.problem.is_some(),
            "the broker is away, and the publisher says {health:?}"
        );
        harness.mend().await?;
        works_again(harness, &publisher, "after").await?;
        publisher.stop().await;
        arrivals(harness, ["before", "after"]).await?;
        Ok(())
    })
    .await
}

/// What may be said of a message while the broker cannot be reached.
pub(super) fn away(told: std::result::Result<(), onlyonce::publisher::PublishError>) -> Result {
    match told {
        Ok(()) => Err(Broken::new(
            "a message was confirmed while the broker could not be reached",
        )),
        Err(error)
            if matches!(
                error.kind(),
                PublishErrorKind::Unavailable | PublishErrorKind::Interrupted
            ) =>
        {
            Ok(())
        }
        Err(error) => Err(Broken::new(format!(
            "the broker could not be reached, and the publisher says {:?}: {error}",
            error.kind()
        ))),
    }
}

/// Publishes this one, again and again as a relay does, until it is confirmed.
pub(super) async fn works_again<H: PublisherHarness>(
    harness: &H,
    publisher: &impl Publisher,
    id: &str,
) -> Result {
    let until = Instant::now() + harness.capabilities().patience;
    let message = message(harness, id);
    while let Err(error) = publish(publisher, &message).await? {
        ensure!(
            Instant::now() < until,
            "the broker is back, and the publisher still says {error} ({:?})",
            error.kind()
        );
        sleep(Duration::from_millis(50)).await;
    }
    let health = publisher.health();
    ensure!(
        health.problem.is_none(),
        "it works again, and the publisher says {health:?}"
    );
    Ok(())
}
