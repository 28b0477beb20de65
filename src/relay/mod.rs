//! The relay: publishes the rows of the outbox, at least once each and per key in their order.
//!
//! ```no_run
//! # async fn run(publisher: impl onlyonce::publisher::Publisher) -> Result<(), Box<dyn std::error::Error>> {
//! use onlyonce::Relay;
//! use onlyonce::store::PostgresStore;
//!
//! let store = PostgresStore::connect("postgres://app@localhost/app").await?;
//! let relay = Relay::builder(store).publisher("kafka", publisher).build()?;
//! relay.run_until(async { tokio::signal::ctrl_c().await.unwrap_or_default() }).await?;
//! # Ok(()) }
//! ```
//!
//! The rows of a relay are spread over 64 lanes by their keys, and the living instances of the relay share
//! the lanes by leases: a key is published by one instance at a time. Of each key one row is on its way,
//! and the next one goes when the broker has confirmed it; keys go beside each other.
//!
//! Read `run.rs` first, which is the loop, then `decide.rs`, which says what each end of a publish means.
//! `chains.rs` is the order, `tenure.rs` the leases, `pace.rs` the pauses, `marks.rs` what the table does not know yet;
//! all of these are pure. `work.rs` with `table.rs` and `sending.rs` acts.

mod builder;
mod chains;
mod decide;
mod flight;
mod hand;
mod health;
mod lifecycle;
mod listening;
mod marks;
mod outlet;
mod pace;
mod reading;
mod retry;
mod run;
mod sending;
mod settings;
mod table;
mod tenure;
mod work;

pub use builder::RelayBuilder;
pub use lifecycle::Relay;
