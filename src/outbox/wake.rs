use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use tokio::runtime::Handle;

use crate::store::{Reach, Signal, StoreError, Waking};

/// Tells relays that there is something to publish: those of this process by a signal, those of others by
/// the database, where it can. To be called after the commit, never before it.
#[derive(Clone)]
pub(crate) struct Wake {
    signal: Arc<Signal>,
    others: Option<Arc<Tell>>,
}

type Tell = dyn Fn() -> Pin<Box<dyn Future<Output = Result<(), StoreError>> + Send>> + Send + Sync;

impl Wake {
    /// Wakes the relays of this name that work on this store's database.
    pub(crate) fn of<S: Waking>(store: &S, relay: &str) -> Self {
        let tell = {
            let (store, relay) = (store.clone(), Arc::<str>::from(relay));
            move || {
                let (store, relay) = (store.clone(), relay.clone());
                Box::pin(async move { store.tell(&relay).await }) as Pin<Box<dyn Future<Output = _> + Send>>
            }
        };
        Self {
            signal: store.signal(relay),
            others: (store.reach() == Reach::Everybody).then(|| Arc::new(tell) as Arc<Tell>),
        }
    }

    /// Does not wait. Who calls it between two looks of a relay calls for one of them.
    pub(crate) fn wake(&self) {
        self.signal.raise();
        let Some(others) = &self.others else { return };
        // Without a runtime nobody could wait for the database. A relay looks by itself soon enough.
        if let Ok(runtime) = Handle::try_current()
            && self.signal.is_first()
        {
            let (signal, tell) = (self.signal.clone(), others());
            runtime.spawn(async move { signal.tell(tell).await });
        }
    }
}

impl fmt::Debug for Wake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wake").finish_non_exhaustive()
    }
}
