use onlyonce::store::{ClaimAnswer, Inbox as _, Store as _};

use super::StoreHarness;
use super::bench::{Bench, DEAD, Sample, duplicate};
use crate::Result;
use crate::broken::promise;

/// What was committed wins over what is held, and the stored texts win over their digest: another
/// identity under the same digest is a collision and never a duplicate.
pub async fn answers_have_their_precedence<H: StoreHarness>(harness: &H) -> Result {
    promise("answers_have_their_precedence", async {
        let bench = Bench::new(harness).await?;
        let mut conn = bench.store.open().await?;
        let event = Sample::new("1", "a")?;
        bench.process(&mut conn, &event).await?;
        let mut letter = event.parked(DEAD);
        letter.escaped = true;
        bench.store.park(&mut conn, &bench.limits, &letter).await?;
        bench
            .expect(&mut conn, &event, duplicate(true), "committed, and held as well")
            .await?;
        bench
            .sql("UPDATE {processed_events} SET event_id = 'other'")
            .await?;
        bench
            .expect(
                &mut conn,
                &event,
                ClaimAnswer::Collision,
                "another id under this digest",
            )
            .await
    })
    .await
}
