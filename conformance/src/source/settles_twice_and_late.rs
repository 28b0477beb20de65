use onlyonce::source::{Receipt, Settle, Settlement};

use super::SourceHarness;
use super::tap::{Tap, WINDOW, events, numbered};
use crate::Result;
use crate::broken::promise;

/// A settlement that is repeated, late or of an unknown receipt changes nothing and is no error.
pub async fn settles_twice_and_late<H: SourceHarness>(harness: &H) -> Result {
    promise("settles_twice_and_late", async {
        let ids = numbered(2);
        harness.publish(events(&ids)).await?;
        let mut tap = Tap::open(harness, WINDOW).await?;
        let settlement = |receipt, verdict| Settlement { receipt, verdict };
        tap.settle([]).await?;
        tap.settle([settlement(Receipt(u64::MAX), Settle::Ack)]).await?;

        let first = tap.take(2).await?;
        let old: Vec<Receipt> = first.iter().map(|delivery| delivery.receipt).collect();
        tap.release(first).await?;
        // Late: these receipts are no longer anybody's, and must not ack what comes again.
        tap.settle(old.iter().map(|receipt| settlement(*receipt, Settle::Ack)))
            .await?;
        let second = tap.take(2).await?;
        tap.expect(&second, &ids)?;
        tap.settle(old.iter().map(|receipt| settlement(*receipt, Settle::Ack)))
            .await?;
        // Dead with both in hand: the late acks have not reached them.
        drop((tap, second));
        let mut tap = Tap::open(harness, WINDOW).await?;
        let third = tap.take(2).await?;
        tap.expect(&third, &ids)?;

        let receipts: Vec<Receipt> = third.iter().map(|delivery| delivery.receipt).collect();
        tap.ack(third).await?;
        for verdict in [Settle::Ack, Settle::Release { after: None }] {
            tap.settle(receipts.iter().map(|receipt| settlement(*receipt, verdict)))
                .await?;
        }
        tap.quiet("it had been acked before it was released").await?;
        tap.finish().await
    })
    .await
}
