//! How long an event takes from its commit to a consumer, while there is little to do.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use onlyonce::source::{Delivery, Incoming, Plan, Source};
use onlyonce::store::PostgresStore;
use onlyonce::{Outbox, Relay};
use sqlx::PgPool;
use tokio_util::sync::CancellationToken;

use super::{Bench, Broker, SOURCE, event};
use crate::throughput::{BoxError, event_id};

/// Events per second, and for how long.
const PACE: u64 = 50;
const LASTS: Duration = Duration::from_secs(30);

impl<B: Broker> Bench<B> {
    /// From the commit of an event to its arrival at a consumer, while a relay has little to do. Another process is
    /// another store: it tells by the database.
    pub(super) async fn latency(&self, name: &str, another: bool) -> Result<(), BoxError> {
        let (address, pool) = (self.broker.fresh().await?, self.fresh_tables().await?);
        let store = self.store().await?;
        let writer = if another {
            self.store().await?
        } else {
            store.clone()
        };
        let outbox = Outbox::new(writer).source(SOURCE);
        let relay = Relay::builder(store)
            .publisher("bench", self.broker.publisher()?)
            .build()?;
        let over = CancellationToken::new();
        let stop = over.clone();
        let relaying = tokio::spawn(relay.run_until(async move { stop.cancelled().await }));
        let mut source = self.broker.source(&address)?;
        source.start(&Plan::for_window("bench", 1000)).await?;
        // The first one finds everything connected and subscribed.
        commit(&pool, &outbox, &address, 0).await?;
        arrivals(&mut source, 1).await?;

        let events = PACE * LASTS.as_secs();
        let writing = async {
            let mut committed = HashMap::new();
            let mut every = tokio::time::interval(Duration::from_millis(1000 / PACE));
            for n in 1..=events {
                every.tick().await;
                committed.insert(event_id(n), commit(&pool, &outbox, &address, n).await?);
            }
            Ok::<_, BoxError>(committed)
        };
        let (committed, arrived) = tokio::try_join!(writing, arrivals(&mut source, events as usize))?;
        let mut took: Vec<f64> = arrived
            .iter()
            .filter_map(|(id, at)| Some(at.saturating_duration_since(*committed.get(id)?).as_secs_f64()))
            .collect();
        took.sort_by(f64::total_cmp);
        let part = |percent: usize| took[(took.len() * percent / 100).min(took.len() - 1)] * 1e3;
        println!(
            "latency  {name:<22} p50 {:.1} ms, p95 {:.1} ms, p99 {:.1} ms, most {:.1} ms ({} events, {PACE} a second)",
            part(50),
            part(95),
            part(99),
            part(100),
            took.len()
        );
        source.stop().await?;
        over.cancel();
        relaying.await??;
        self.broker.delete(&address).await
    }
}

/// Writes an event as an endpoint would, and says when it was committed.
async fn commit(
    pool: &PgPool,
    outbox: &Outbox<PostgresStore>,
    address: &str,
    n: u64,
) -> Result<Instant, BoxError> {
    let mut tx = pool.begin().await?;
    outbox.send_in(&mut tx, event(address, n)).await?;
    tx.commit().await?;
    let committed = Instant::now();
    outbox.wake();
    Ok(committed)
}

/// When each of so many events has arrived, by its id.
async fn arrivals(source: &mut impl Source, events: usize) -> Result<HashMap<String, Instant>, BoxError> {
    let mut arrived = HashMap::new();
    while arrived.len() < events {
        let deliveries = match source.receive(100).await? {
            Incoming::Deliveries(deliveries) => deliveries,
            Incoming::Closed => return Err("the source is closed".into()),
            _ => continue,
        };
        let now = Instant::now();
        for delivery in &deliveries {
            let id = delivery
                .event
                .headers
                .get("onlyonce-event-id")
                .unwrap_or_default();
            arrived
                .entry(String::from_utf8_lossy(id).into_owned())
                .or_insert(now);
        }
        source
            .settle(deliveries.into_iter().map(Delivery::ack).collect())
            .await?;
    }
    Ok(arrived)
}
