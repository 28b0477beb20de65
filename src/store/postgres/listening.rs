use std::sync::Arc;

use async_trait::async_trait;
use sqlx::postgres::{PgListener, PgPoolOptions};

use super::PostgresStore;
use super::classify::classify;
use super::sql::CHANNEL;
use crate::store::{Heard, Listener, Reach, Signal, StoreError, StoreErrorKind, Waking};

#[async_trait]
impl Waking for PostgresStore {
    fn signal(&self, relay: &str) -> Arc<Signal> {
        self.signals.of(relay)
    }

    fn reach(&self) -> Reach {
        // A session that listens is the pooler's, which does not pass on what it hears.
        if self.pooler {
            Reach::Blocked
        } else {
            Reach::Everybody
        }
    }

    async fn tell(&self, relay: &str) -> Result<(), StoreError> {
        let tell = sqlx::query(self.sql.tell.clone())
            .bind(CHANNEL)
            .bind(self.audience(relay));
        self.execute("telling of outgoing events", tell).await?;
        Ok(())
    }

    async fn listen(&self, relay: &str) -> Result<Box<dyn Listener>, StoreError> {
        let listening = |e| classify("listening for outgoing events", e);
        if self.pooler {
            return Err(StoreError::new(
                StoreErrorKind::Misconfigured,
                "behind a pooler nothing can be listened for",
            ));
        }
        // One connection, which the listener takes for good and makes anew when it is lost.
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .max_lifetime(None)
            .idle_timeout(None)
            .connect_lazy_with((*self.reserve.connect_options()).clone());
        let mut listener = PgListener::connect_with(&pool).await.map_err(listening)?;
        listener.listen(CHANNEL).await.map_err(listening)?;
        Ok(Box::new(Ear {
            listener,
            audience: self.audience(relay),
        }))
    }
}

impl PostgresStore {
    /// Who is meant: the channel is one for all schemas, since a schema's name may fill a channel's.
    fn audience(&self, relay: &str) -> String {
        format!("{} {relay}", self.schema.as_str())
    }
}

struct Ear {
    listener: PgListener,
    audience: String,
}

#[async_trait]
impl Listener for Ear {
    async fn heard(&mut self) -> Result<Heard, StoreError> {
        loop {
            match self.listener.try_recv().await {
                Ok(Some(told)) if told.payload() == self.audience => return Ok(Heard::Something),
                Ok(Some(_)) => {}
                Ok(None) => return Ok(Heard::Gap),
                Err(e) => return Err(classify("listening for outgoing events", e)),
            }
        }
    }
}
