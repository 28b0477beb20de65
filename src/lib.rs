//! Message consumers whose effects happen once, although brokers deliver more often.
//!
//! Implement [`Handler`], plug in a [`Source`](source::Source) and a store, run a [`Consumer`]. For
//! each delivery the framework inserts the event's identity into `processed_events` with
//! `ON CONFLICT DO NOTHING`, runs the handler in the same transaction, and acks only after the commit.
//! A crash at any moment, a duplicate, two instances at once: the handler's writes are there exactly
//! once.
//!
//! ```no_run
//! use onlyonce::store::{Operations, PostgresStore};
//! use onlyonce::{Bytes, Consumer, handler_fn};
//!
//! # async fn run(source: impl onlyonce::source::Source) -> Result<(), Box<dyn std::error::Error>> {
//! let store = PostgresStore::connect("postgres://app@localhost/app").await?;
//! store.migrate().await?;
//! let consumer = Consumer::builder("ledger", store)
//!     .source(source) // onlyonce-rabbitmq, the embedded queue, ..
//!     .handler(handler_fn::<_, Bytes, _>(|cx, event| {
//!         Box::pin(async move {
//!             sqlx::query("INSERT INTO ledger (event_id) VALUES ($1)")
//!                 .bind(event.identity.id)
//!                 .execute(cx.tx())
//!                 .await?;
//!             Ok(())
//!         })
//!     }))
//!     .build()?;
//! consumer.run_until(async { tokio::signal::ctrl_c().await.unwrap_or_default() }).await?;
//! # Ok(()) }
//! ```
//!
//! Read next: [`guide::handlers`] for what a handler may do, [`guide::identity`] for how an event gets
//! its name, [`guide::failures`] for what happens when it fails, [`guide::outbox`] for events that a handler sends,
//! [`guide::relay`] for how they are published, [`guide::operations`] for running it, and the feature `testing` for
//! tests of your own.

// Without a database, what only stores use stands idle.
#![cfg_attr(not(any(feature = "postgres", feature = "sqlite")), allow(dead_code))]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod consumer;
// Public by way of `testing`; without that feature its one function is empty.
#[cfg_attr(not(feature = "testing"), allow(dead_code, unreachable_pub))]
mod crash;
mod delay;
pub mod event;
pub mod handler;
pub mod inbox;
pub mod outbox;
pub mod publisher;
mod reason;
pub mod relay;
pub mod source;
pub mod store;
pub mod supervisor;
mod telemetry;
#[cfg(feature = "testing")]
pub mod testing;

pub use async_trait::async_trait;
pub use bytes::Bytes;
pub use consumer::{Consumer, Health, OnMismatch, Ordering, RetryPolicy};
pub use event::{Event, IdentityRules, Json};
pub use handler::{
    BatchContext, BatchHandler, Context, Handler, HandlerError, OnUnknown, Router, handler_fn,
};
pub use outbox::Outbox;
pub use reason::Reason;
pub use relay::Relay;
pub use supervisor::Supervisor;

/// Guides: the pages in `docs/`, whose code is compiled with the documentation tests.
pub mod guide {
    #[doc = include_str!("../docs/identity.md")]
    pub mod identity {}

    /// What a handler may do.
    ///
    #[cfg_attr(feature = "postgres", doc = include_str!("../docs/handlers.md"))]
    pub mod handlers {}

    #[doc = include_str!("../docs/failures.md")]
    pub mod failures {}

    /// Outgoing events.
    ///
    #[cfg_attr(feature = "postgres", doc = include_str!("../docs/outbox.md"))]
    pub mod outbox {}

    /// How outgoing events are published.
    ///
    #[cfg_attr(all(feature = "postgres", feature = "sqlite"), doc = include_str!("../docs/relay.md"))]
    pub mod relay {}

    /// Running it.
    ///
    #[cfg_attr(feature = "postgres", doc = include_str!("../docs/operations.md"))]
    pub mod operations {}
}

/// The README's code is compiled and run with the documentation tests.
#[cfg(all(doctest, feature = "sqlite", feature = "testing"))]
#[doc = include_str!("../README.md")]
struct Readme;
