use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;

use async_trait::async_trait;
use sqlx::Database;

use super::{Context, Handler, HandlerError};
use crate::event::{Event, FromEvent};

/// A handler made of a closure; see [`handler_fn`].
pub struct FnHandler<F, P>(F, PhantomData<fn() -> P>);

/// Makes a handler of a closure. The annotations are needed: they let the compiler see that the
/// future borrows the context.
///
/// ```
/// use onlyonce::{Bytes, handler_fn};
///
/// let handler = handler_fn::<sqlx::Sqlite, Bytes, _>(|cx, event| {
///     Box::pin(async move {
///         sqlx::query("INSERT INTO seen (id) VALUES (?)").bind(event.identity.id).execute(cx.tx()).await?;
///         Ok(())
///     })
/// });
/// # let _ = handler;
/// ```
pub fn handler_fn<Db, P, F>(handle: F) -> FnHandler<F, P>
where
    Db: Database,
    P: FromEvent,
    F: for<'a, 'c> Fn(
            &'a mut Context<'c, Db>,
            Event<P>,
        ) -> Pin<Box<dyn Future<Output = Result<(), HandlerError>> + Send + 'a>>
        + Send
        + Sync
        + 'static,
{
    FnHandler(handle, PhantomData)
}

#[async_trait]
impl<Db, P, F> Handler<Db> for FnHandler<F, P>
where
    Db: Database,
    P: FromEvent,
    F: for<'a, 'c> Fn(
            &'a mut Context<'c, Db>,
            Event<P>,
        ) -> Pin<Box<dyn Future<Output = Result<(), HandlerError>> + Send + 'a>>
        + Send
        + Sync
        + 'static,
{
    type Payload = P;

    async fn handle(&self, cx: &mut Context<'_, Db>, event: Event<P>) -> Result<(), HandlerError> {
        (self.0)(cx, event).await
    }
}
