//! One suite that every [`Source`](onlyonce::source::Source), every [`Publisher`](onlyonce::publisher::Publisher) and
//! every store of `onlyonce` must pass.
//!
//! Each promise is an async function in a file of its own that returns [`Broken`] when it is not
//! kept; what a source promises by its [`Capabilities`](onlyonce::source::Capabilities) decides which
//! of them apply. An adapter writes a [`SourceHarness`] (an empty queue, a way to publish) and one
//! line, which becomes one test per promise:
//!
//! ```no_run
//! # use onlyonce::event::RawEvent;
//! # use onlyonce::source::Capabilities;
//! # use onlyonce::testing::{Broker, BrokerSource};
//! # use onlyonce_conformance::{Result, SourceHarness, Sqlite};
//! struct Memory(Broker);
//!
//! #[onlyonce::async_trait]
//! impl SourceHarness for Memory {
//!     type Source = BrokerSource;
//!     type Stage = Sqlite;
//!
//!     async fn empty() -> Result<Option<Self>> {
//!         Ok(Some(Self(Broker::new())))
//!     }
//!
//!     fn expected(&self) -> Capabilities {
//!         self.0.source().capabilities()
//!     }
//! #   // (in earnest, write them down: a source that promises less than it should is not tested)
//!
//!     fn source(&self) -> BrokerSource {
//!         self.0.source()
//!     }
//!
//!     async fn publish(&self, events: Vec<RawEvent>) -> Result {
//!         events.into_iter().for_each(|event| self.0.publish(event));
//!         Ok(())
//!     }
//!
//!     async fn stage(&self) -> Result<Sqlite> {
//!         Sqlite::open()
//!     }
//! }
//! # use onlyonce::source::Source as _;
//!
//! onlyonce_conformance::source_suite!(Memory);
//! # fn main() {}
//! ```
//!
//! A store is held to the suite by a [`StoreHarness`] and [`store_suite!`]. The proof that a store
//! hands out (`Claims`) can only be made by the stores of the `onlyonce` crate itself. That
//! is intended: a store elsewhere wraps one of those, and is tested here like them.
//!
//! A publisher is held to it by a [`PublisherHarness`] and [`publisher_suite!`]: a destination, and a source that
//! reads what arrives there.
//!
//! A promise may be called directly, which is how the suite proves of itself that it rejects sources,
//! publishers and stores that are broken on purpose.

mod broken;
pub mod publisher;
pub mod source;
mod sqlite;
pub mod store;
mod suite;

pub use broken::{Broken, Result};
pub use publisher::{PublisherCapabilities, PublisherHarness};
pub use source::{Depth, HarnessCapabilities, SourceHarness};
pub use sqlite::Sqlite;
pub use store::{Conn, StoreHarness};
#[doc(hidden)]
pub use suite::{block_on, publisher_test, source_test, store_test};

/// The consumer's name in the whole suite; a harness whose queue belongs to a consumer uses it.
pub const CONSUMER: &str = "conformance";
