//! The outbox: outgoing events that are published if and only if the work that causes them commits.
//!
//! A handler collects [`OutgoingEvent`]s with `cx.outbox().send(..)`; anything else with a transaction,
//! such as an HTTP endpoint, writes them with [`Outbox::send_in`]. They become rows of the table `outbox` in that
//! transaction, and a relay publishes them afterwards.

mod destination;
mod event;
mod wake;

pub use destination::{Destination, DestinationError};
pub use event::OutgoingEvent;
pub(crate) use wake::Wake;
