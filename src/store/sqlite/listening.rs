use std::sync::Arc;

use async_trait::async_trait;

use super::SqliteStore;
use crate::store::{Listener, Reach, Signal, StoreError, StoreErrorKind, Waking};

/// SQLite tells other processes nothing: relays there look by themselves.
#[async_trait]
impl Waking for SqliteStore {
    fn signal(&self, relay: &str) -> Arc<Signal> {
        self.signals.of(relay)
    }

    fn reach(&self) -> Reach {
        Reach::Nobody
    }

    async fn tell(&self, _relay: &str) -> Result<(), StoreError> {
        Ok(())
    }

    async fn listen(&self, _relay: &str) -> Result<Box<dyn Listener>, StoreError> {
        Err(StoreError::new(
            StoreErrorKind::Misconfigured,
            "on SQLite nothing can be listened for",
        ))
    }
}
