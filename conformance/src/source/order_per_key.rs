use onlyonce::source::Delivery;

use super::SourceHarness;
use super::tap::{Tap, ids, keyed};
use crate::Result;
use crate::broken::{ensure, not_promised, promise};

/// Events of one key arrive in the order in which they were published, also after a death. For sources
/// that promise order.
pub async fn order_per_key<H: SourceHarness>(harness: &H) -> Result {
    promise("order_per_key", async {
        if !harness.expected().ordered {
            return not_promised("order");
        }
        let all = interleaved();
        harness
            .publish(all.iter().map(|(id, key)| keyed(id, key)).collect())
            .await?;
        let mut tap = Tap::open(harness, all.len()).await?;
        let taken = tap.take_by(7, 3).await?;
        in_order(&taken)?;
        drop((tap, taken));

        let mut tap = Tap::open(harness, all.len()).await?;
        let taken = tap.take_by(all.len(), 4).await?;
        in_order(&taken)?;
        tap.ack(taken).await?;
        tap.finish().await
    })
    .await
}

/// Six events of each of three keys; ids are key and number.
pub(super) fn interleaved() -> Vec<(String, &'static str)> {
    (1..=6)
        .flat_map(|n| ["a", "b", "c"].map(|key| (format!("{key}{n}"), key)))
        .collect()
}

/// The deliveries of each key are the first of that key, without a gap.
pub(super) fn in_order(deliveries: &[Delivery]) -> Result {
    for key in ["a", "b", "c"] {
        let came: Vec<String> = ids(deliveries)
            .into_iter()
            .filter(|id| id.starts_with(key))
            .collect();
        let due: Vec<String> = (1..=came.len()).map(|n| format!("{key}{n}")).collect();
        ensure!(came == due, "the events of a key came as {came:?}");
    }
    Ok(())
}
