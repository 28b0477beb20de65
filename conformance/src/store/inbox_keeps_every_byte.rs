use onlyonce::Bytes;
use onlyonce::store::{ClaimAnswer, Parking, Store as _};

use super::StoreHarness;
use super::bench::{Bench, LONG, NOW, Sample, failure};
use crate::Result;
use crate::broken::{ensure, promise};

/// Whatever a message holds, it can be held and comes back as it was: any bytes, a null payload, repeated
/// and null headers.
pub async fn inbox_keeps_every_byte<H: StoreHarness>(harness: &H) -> Result {
    promise("inbox_keeps_every_byte", async {
        let bench = Bench::new(harness).await?;
        let every_byte: Bytes = (0..=255).collect::<Vec<u8>>().into();
        let mut full = Sample::new("full", "a")?;
        full.raw.payload = Some(every_byte.clone());
        full.raw.key = Some(every_byte.clone());
        full.raw.event_type = Some(vec![0xff, 0].into());
        full.raw.time_ms = Some(i64::MAX);
        full.raw.headers.push("a", every_byte);
        full.raw.headers.push_null("nul\0 in a name ✓");
        full.raw.headers.push("a", "");
        full.raw.origin.destination = "nul\0".into();
        let mut null = Sample::new("tombstone", "a")?;
        null.raw.payload = None;
        let mut empty = Sample::new("empty", "a")?;
        empty.raw.payload = Some(Bytes::new());
        let mut large = Sample::new("large", "a")?;
        large.raw.payload = Some(vec![7; 2_000_000].into());
        let mut conn = bench.store.open().await?;
        for sample in [full, null, empty, large] {
            let (id, sent) = (&sample.identity.id, &sample.raw);
            let parking = bench.park(&mut conn, &sample, NOW, &[failure(1)]).await?;
            ensure!(parking == Parking::Held, "{id} was parked as {parking:?}");
            let held = bench.lease_one(LONG).await?;
            let came = &held.event;
            ensure!(
                came.payload == sent.payload,
                "the body of {id} came back otherwise"
            );
            ensure!(
                came.headers == sent.headers,
                "the headers of {id} came back as {:?}",
                came.headers
            );
            ensure!(
                (&came.key, &came.event_type, came.time_ms) == (&sent.key, &sent.event_type, sent.time_ms),
                "key, type or time of {id} came back otherwise"
            );
            ensure!(
                held.lease.attempts == 1,
                "{id} failed once, and {:?} is said",
                held.lease
            );
            let mut own = sample.clone();
            own.own = Some(held.lease);
            bench
                .expect(&mut conn, &own, ClaimAnswer::New, "its own row")
                .await?;
        }
        Ok(())
    })
    .await
}
