//! Consumers: a source, a store and a handler, checked together and run.
//!
//! Read `process.rs` first: it is what happens to a delivery. `run.rs` says how many at a time,
//! `decide.rs` what a failure means, `recover.rs` acts on that, `gate.rs` is the pause.

mod builder;
mod decide;
mod error;
mod gate;
mod health;
mod lane;
mod lifecycle;
mod policy;
mod process;
mod recover;
mod run;
mod window;

pub use builder::ConsumerBuilder;
pub(crate) use builder::{Problems, check_connections};
pub use error::{BuildError, RunError};
pub(crate) use health::Vitals;
pub use health::{Check, Health};
pub use lifecycle::Consumer;
pub(crate) use lifecycle::store_answers;
pub use policy::{OnMismatch, Ordering, RetryPolicy};
