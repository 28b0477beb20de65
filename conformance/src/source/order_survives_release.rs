use super::SourceHarness;
use super::order_per_key::{all_come_in_order, in_order, interleaved};
use super::tap::{Tap, keyed};
use crate::Result;
use crate::broken::{not_promised, promise};

/// What is given back is not overtaken by later events of its key, neither by those that were given
/// back with it nor by those that were not handed out yet, also not while it waits for its time.
/// For sources that promise order.
pub async fn order_survives_release<H: SourceHarness>(harness: &H) -> Result {
    promise("order_survives_release", async {
        if !harness.expected().ordered {
            return not_promised("order");
        }
        let all = interleaved();
        harness
            .publish(all.iter().map(|(id, key)| keyed(id, key)).collect())
            .await?;
        let mut tap = Tap::open(harness, all.len()).await?;
        // Of a key that is withheld one can always be in hand.
        let (some, many) = if tap.can.withholds_keys {
            (3, 3)
        } else {
            (8, all.len())
        };
        let taken = tap.take(some).await?;
        in_order(&taken)?;
        tap.release(taken).await?;
        let mut taken = tap.take(many).await?;
        in_order(&taken)?;

        // The consumer gives the later ones of a key back with the first, in one call.
        let first = taken.remove(0).release(Some(tap.can.delay));
        let others = taken.into_iter().map(|delivery| delivery.release(None));
        tap.settle(std::iter::once(first).chain(others)).await?;
        all_come_in_order(&mut tap, all.len(), all.len()).await?;
        tap.finish().await
    })
    .await
}
