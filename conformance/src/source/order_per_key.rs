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
        // Of a key that is withheld one can always be in hand.
        let some = if tap.can.withholds_keys { 3 } else { 7 };
        let taken = tap.take_by(some, 3).await?;
        in_order(&taken)?;
        drop((tap, taken));

        let mut tap = Tap::open(harness, all.len()).await?;
        all_come_in_order(&mut tap, all.len(), 4).await?;
        tap.finish().await
    })
    .await
}

/// Takes all events, at most `max` at once, and acks them: in the end if that many can be in hand, else
/// as they come.
pub(super) async fn all_come_in_order<H: SourceHarness>(
    tap: &mut Tap<'_, H>,
    count: usize,
    max: usize,
) -> Result {
    let portion = if tap.can.withholds_keys { 1 } else { count };
    let mut came = Vec::new();
    while came.len() < count {
        let taken = tap.take_by(portion, max).await?;
        came.extend(ids(&taken));
        tap.ack(taken).await?;
    }
    ids_in_order(&came)
}

/// Six events of each of three keys; ids are key and number.
pub(super) fn interleaved() -> Vec<(String, &'static str)> {
    (1..=6)
        .flat_map(|n| ["a", "b", "c"].map(|key| (format!("{key}{n}"), key)))
        .collect()
}

/// The deliveries of each key are the first of that key, without a gap.
pub(super) fn in_order(deliveries: &[Delivery]) -> Result {
    ids_in_order(&ids(deliveries))
}

fn ids_in_order(ids: &[String]) -> Result {
    for key in ["a", "b", "c"] {
        let came: Vec<&String> = ids.iter().filter(|id| id.starts_with(key)).collect();
        let due: Vec<String> = (1..=came.len()).map(|n| format!("{key}{n}")).collect();
        let due: Vec<&String> = due.iter().collect();
        ensure!(came == due, "the events of a key came as {came:?}");
    }
    Ok(())
}
