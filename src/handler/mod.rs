//! Handlers: the code that a user writes.
//!
//! Implement [`Handler`] (one event at a time) or [`BatchHandler`] (all new events of a transaction at
//! once), or wrap a closure by [`handler_fn`], or dispatch by event type with a [`Router`].

mod batch;
mod closure;
mod context;
mod erased;
mod error;
mod router;

use async_trait::async_trait;
use sqlx::Database;

use crate::event::{Event, FromEvent};

pub use batch::{BatchContext, BatchHandler};
pub use closure::{FnHandler, handler_fn};
pub use context::Context;
pub use error::HandlerError;
pub use router::{OnUnknown, Router};

pub(crate) use batch::BatchRunner;
pub(crate) use context::Progress;
pub(crate) use erased::{HandlerRunner, Item, Run};
pub(crate) use error::{FailureKind, Fault};

/// Works on one event, inside the transaction that claims it.
///
/// Called once per attempt. When it returns `Ok`, the framework commits the claim and everything the
/// handler wrote through [`Context::tx`] together, and acks after that. When it returns `Err`, panics
/// or runs out of time, all of it is rolled back, and the event is tried again by the retry policy.
/// Effects outside that transaction (an HTTP call, an e-mail) are repeated with every attempt.
///
/// ```
/// use onlyonce::{Context, Event, Handler, HandlerError, Json, async_trait};
/// # use serde::Deserialize;
/// # #[derive(Deserialize)] struct Payment { account: String, cents: i64 }
/// struct Ledger;
///
/// #[async_trait]
/// impl Handler<sqlx::Postgres> for Ledger {
///     type Payload = Json<Payment>;
///
///     async fn handle(
///         &self,
///         cx: &mut Context<'_, sqlx::Postgres>,
///         event: Event<Json<Payment>>,
///     ) -> Result<(), HandlerError> {
///         let Json(payment) = event.payload;
///         sqlx::query("INSERT INTO ledger (account, cents) VALUES ($1, $2)")
///             .bind(payment.account)
///             .bind(payment.cents)
///             .execute(cx.tx())
///             .await?;
///         Ok(())
///     }
/// }
/// ```
#[async_trait]
pub trait Handler<Db: Database>: Send + Sync + 'static {
    /// What the payload is decoded into: [`Json<T>`](crate::Json), [`Bytes`](crate::Bytes), an
    /// `Option` of these for tombstones, or a type of yours.
    type Payload: FromEvent;

    /// Works on one event.
    async fn handle(&self, cx: &mut Context<'_, Db>, event: Event<Self::Payload>)
    -> Result<(), HandlerError>;
}

#[async_trait]
impl<Db: Database, H: Handler<Db> + ?Sized> Handler<Db> for std::sync::Arc<H> {
    type Payload = H::Payload;

    async fn handle(
        &self,
        cx: &mut Context<'_, Db>,
        event: Event<Self::Payload>,
    ) -> Result<(), HandlerError> {
        (**self).handle(cx, event).await
    }
}
