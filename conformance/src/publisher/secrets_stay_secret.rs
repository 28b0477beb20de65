use onlyonce::publisher::Publisher as _;

use super::{PublisherHarness, message, publish};
use crate::Result;
use crate::broken::{ensure, promise};

/// No error, no health and no `Debug` shows a secret, whatever goes wrong.
pub async fn secrets_stay_secret<H: PublisherHarness>(harness: &H) -> Result {
    promise("secrets_stay_secret", async {
        let publisher = harness.publisher();
        let mut shown = vec![format!("{publisher:?}")];
        let mut lost = message(harness, "lost");
        lost.address = harness.missing();
        let mut all = harness.invalid();
        all.extend([lost, message(harness, "good")]);
        for message in &all {
            shown.push(format!("{:?}", publish(&publisher, message).await?));
            shown.push(format!("{publisher:#?} {:?}", publisher.health()));
        }
        if harness.capabilities().outages {
            harness.cut().await?;
            shown.push(format!(
                "{:?}",
                publish(&publisher, &message(harness, "away")).await?
            ));
            shown.push(format!("{publisher:?} {:?}", publisher.health()));
            harness.mend().await?;
        }
        publisher.stop().await;
        shown.push(format!("{publisher:?} {:?}", publisher.health()));
        for secret in harness.secrets() {
            let told = shown.iter().find(|text| text.contains(&secret));
            ensure!(
                told.is_none(),
                "a secret is told: {:?}",
                told.map(|text| text.replace(&secret, "***"))
            );
        }
        Ok(())
    })
    .await
}
