//! The relay's loop: hold lanes, read what is due, publish it, write down what came of it, until the stop.
//! What each of these does is in `work.rs`.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::outlet::Outlet;
use super::work::{Shared, Work};
use crate::store::Relaying;

/// Publishes rows until the relay stops.
///
/// A stop, step by step: nothing more is read or published; what is on its way is waited for, up to
/// a deadline; what it came to is written down; the lanes are given up; the publishers are stopped.
///
/// A crash at any moment leaves every row that is not marked in the table, and its lane free when the
/// lease is over. What had been published and not been marked goes out once more, under the same event id.
pub(crate) async fn run<S: Relaying>(shared: Arc<Shared<S>>, outlets: Vec<Outlet>, stop: CancellationToken) {
    let mut signal = shared.store.signal(&shared.name).watch();
    let mut work = Work::new(shared, outlets);
    while !work.is_over() {
        work.begin();
        let next = work.next_time(Instant::now());
        tokio::select! {
            biased;
            // First of all what decides whether anything may be published.
            renewed = answer(&mut work.renewal) => work.renewed(renewed),
            Some(landed) = work.flights.join_next() => work.land_all(landed),
            marked = answer(&mut work.mark) => work.marked(marked),
            found = answer(&mut work.read) => work.found(found),
            () = stop.cancelled(), if !work.is_stopping() => work.stop(),
            _ = signal.changed() => work.wake(),
            () = sleep_until(next) => {}
        }
    }
    work.leave().await;
}

/// Waits for what is under way, if something is.
async fn answer<T>(under_way: &mut Option<BoxFuture<'static, T>>) -> T {
    let Some(future) = under_way else {
        return std::future::pending().await;
    };
    let answer = future.await;
    *under_way = None;
    answer
}
