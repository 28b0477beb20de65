//! Driving a source by hand, for the adapters' tests: each waits for what must come, and fails if it does not.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use onlyonce::source::{Delivery, Incoming, Receipt, Source};

/// The longest a test waits for something that should happen at once.
pub const SOON: Duration = Duration::from_secs(20);

/// Fails the test when something that must happen does not.
pub async fn soon<F: Future>(what: F) -> F::Output {
    tokio::time::timeout(SOON, what).await.expect("it takes too long")
}

/// The next delivery of one.
pub async fn one(source: &mut impl Source) -> Delivery {
    some(source, 1).await.remove(0)
}

/// The next `count` deliveries.
pub async fn some(source: &mut impl Source, count: usize) -> Vec<Delivery> {
    let mut all = Vec::new();
    while all.len() < count {
        match soon(source.receive(count - all.len())).await {
            Ok(Incoming::Deliveries(deliveries)) => all.extend(deliveries),
            other => panic!("{other:?} instead of deliveries"),
        }
    }
    all
}

/// What the source says is lost, in order.
pub async fn lost(source: &mut impl Source) -> Vec<Receipt> {
    match soon(source.receive(0)).await {
        Ok(Incoming::Lost(mut receipts)) => {
            receipts.sort();
            receipts
        }
        other => panic!("{other:?} instead of a loss"),
    }
}

/// A source that was stopped has nothing more to say.
pub async fn closes(mut source: impl Source) {
    let incoming = soon(source.receive(0)).await;
    assert!(
        matches!(incoming, Ok(Incoming::Closed)),
        "{incoming:?} instead of the end"
    );
}

/// Nothing arrives for a while.
pub async fn nothing(source: &mut impl Source, during: Duration) {
    if let Ok(incoming) = tokio::time::timeout(during, source.receive(10)).await {
        panic!("{incoming:?} instead of nothing");
    }
}

/// Settles these as done.
pub async fn ack(source: &mut impl Source, deliveries: impl IntoIterator<Item = Delivery>) {
    let done = deliveries.into_iter().map(Delivery::ack).collect();
    source.settle(done).await.expect("the source settles");
}

/// Gives this one back.
pub async fn release(source: &mut impl Source, delivery: Delivery, after: Option<Duration>) {
    let back = vec![delivery.release(after)];
    source.settle(back).await.expect("the source settles");
}

/// The body as text.
pub fn body(delivery: &Delivery) -> String {
    String::from_utf8_lossy(delivery.event.payload.as_deref().unwrap_or_default()).into_owned()
}

/// The bodies as texts.
pub fn bodies(deliveries: &[Delivery]) -> Vec<String> {
    deliveries.iter().map(body).collect()
}

/// The receipts.
pub fn receipts(deliveries: &[Delivery]) -> Vec<Receipt> {
    deliveries.iter().map(|delivery| delivery.receipt).collect()
}

/// A name that no other test has, in this run or another.
pub fn unique(what: &str) -> String {
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    let since = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
    let n = COUNTER.fetch_add(1, Ordering::Relaxed);
    format!("onlyonce-{what}-{}-{}-{n}", std::process::id(), since.as_millis())
}
