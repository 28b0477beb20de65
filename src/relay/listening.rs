//! How other processes tell a relay that there is something to publish, where the database can pass it on.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::work::Shared;
use crate::delay::spread;
use crate::store::{Heard, Listener, Reach, Relaying, StoreError};

/// How long a relay waits to hear itself.
const TEST: Duration = Duration::from_secs(3);

/// How long a listener that broke is left alone, at first and at most.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// Listens for the relay's life. It is a hint and never more: whatever happens here, the table is looked at
/// every now and then.
pub(crate) async fn listen<S: Relaying>(shared: Arc<Shared<S>>) {
    let relay = &*shared.name;
    let poll = shared.settings.poll;
    match shared.store.reach() {
        Reach::Everybody => {}
        Reach::Nobody => return,
        Reach::Blocked => {
            tracing::warn!(
                relay,
                ?poll,
                "behind a pooler nobody can be told of new events; the relay looks for them by itself"
            );
            return;
        }
    }
    let signal = shared.store.signal(relay);
    let mut failed = 0;
    loop {
        let error = match hear_self(&shared).await {
            Ok(Some(listener)) => {
                failed = 0;
                // Something may have been told before it listened.
                signal.raise();
                hear(listener, || signal.raise()).await
            }
            Ok(None) => {
                tracing::warn!(
                    relay,
                    ?poll,
                    "what is told does not arrive (is there a pooler in between?); the relay looks for events by itself"
                );
                return;
            }
            Err(error) => error,
        };
        tracing::debug!(relay, %error, "listening was interrupted");
        failed += 1;
        sleep(spread(PAUSE_MIN, PAUSE_MAX, failed)).await;
    }
}

/// A listener that hears what this process tells. A pooler may well accept both and pass nothing on.
async fn hear_self<S: Relaying>(shared: &Shared<S>) -> Result<Option<Box<dyn Listener>>, StoreError> {
    let mut listener = shared.store.listen(&shared.name).await?;
    shared.store.tell(&shared.name).await?;
    match timeout(TEST, listener.heard()).await {
        Ok(heard) => heard.map(|_| Some(listener)),
        Err(_) => Ok(None),
    }
}

/// Passes on what is heard until the listener breaks.
async fn hear(mut listener: Box<dyn Listener>, raise: impl Fn()) -> StoreError {
    loop {
        match listener.heard().await {
            Ok(Heard::Something | Heard::Gap) => raise(),
            Err(error) => return error,
        }
    }
}
