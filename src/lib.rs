//! onlyonce
#![cfg_attr(test, allow(clippy::unwrap_used))]
pub mod event;
mod reason;
pub mod source;
pub mod store;
pub use bytes::Bytes;
pub use reason::Reason;
