use std::marker::PhantomData;

use async_trait::async_trait;
use sqlx::Database;

use super::{Context, Handler, HandlerError, Progress};
use crate::event::{Identity, RawEvent};

/// One new event of a transaction, not yet decoded.
pub(crate) struct Item<'a> {
    pub(crate) identity: &'a Identity,
    pub(crate) event: &'a RawEvent,
    pub(crate) attempt: u32,
}

/// Runs whatever handles events (one at a time or all at once) over the new events of a transaction.
#[async_trait]
pub(crate) trait Run<Db: Database>: Send + Sync {
    async fn run(
        &self,
        conn: &mut Db::Connection,
        progress: Progress<'_, Db>,
        items: &[Item<'_>],
    ) -> Result<(), HandlerError>;
}

/// A handler with its payload type forgotten: decoding is part of running it.
#[async_trait]
pub(super) trait Erased<Db: Database>: Send + Sync {
    async fn handle_raw(&self, cx: &mut Context<'_, Db>, raw: &RawEvent) -> Result<(), HandlerError>;
}

#[async_trait]
impl<Db: Database, H: Handler<Db>> Erased<Db> for H {
    async fn handle_raw(&self, cx: &mut Context<'_, Db>, raw: &RawEvent) -> Result<(), HandlerError> {
        let event = raw
            .decode::<H::Payload>(cx.identity())
            .map_err(HandlerError::undecodable)?;
        self.handle(cx, event).await
    }
}

/// Runs a [`Handler`] over the events in order and ends at the first failure.
pub(crate) struct HandlerRunner<Db, H>(H, PhantomData<fn() -> Db>);

impl<Db: Database, H: Handler<Db>> HandlerRunner<Db, H> {
    pub(crate) fn new(handler: H) -> Self {
        Self(handler, PhantomData)
    }
}

#[async_trait]
impl<Db: Database, H: Handler<Db>> Run<Db> for HandlerRunner<Db, H> {
    async fn run(
        &self,
        conn: &mut Db::Connection,
        progress: Progress<'_, Db>,
        items: &[Item<'_>],
    ) -> Result<(), HandlerError> {
        for item in items {
            let mut cx = Context {
                conn: &mut *conn,
                identity: item.identity,
                headers: &item.event.headers,
                attempt: item.attempt,
                progress,
            };
            self.0.handle_raw(&mut cx, item.event).await?;
        }
        Ok(())
    }
}
