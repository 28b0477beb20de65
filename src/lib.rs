//! onlyonce
#![cfg_attr(test, allow(clippy::unwrap_used))]
pub mod consumer;
mod crash;
pub mod event;
pub mod handler;
pub mod health;
pub mod inbox;
mod reason;
pub mod source;
pub mod store;
pub mod supervisor;
mod telemetry;
#[cfg(feature = "testing")]
pub mod testing;
pub use async_trait::async_trait;
pub use bytes::Bytes;
pub use consumer::{Consumer, OnMismatch, Ordering, RetryPolicy};
pub use event::{Event, IdentityRules, Json};
pub use handler::{
    BatchContext, BatchHandler, Context, Handler, HandlerError, OnUnknown, Router, handler_fn,
};
pub use health::Health;
pub use reason::Reason;
pub use supervisor::Supervisor;
