use std::sync::Arc;

use tokio::sync::Notify;

/// Tells a relay of this process that there is something to publish. Many calls before it looks are one.
#[derive(Debug, Clone, Default)]
pub(crate) struct Wake(Arc<Notify>);

impl Wake {
    pub(crate) fn wake(&self) {
        self.0.notify_one();
    }

    /// Until the next call of `wake`, or at once if there was one since the last time.
    #[allow(dead_code, reason = "relays wait for it")]
    pub(crate) async fn woken(&self) {
        self.0.notified().await;
    }
}
