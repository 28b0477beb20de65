//! What the adapters' tests, chaos and throughput examples share: everything but the broker.

#[cfg(feature = "chaos")]
pub mod chaos;
pub mod drive;
pub mod example;
#[cfg(feature = "chaos")]
pub mod outbox_chaos;
#[cfg(feature = "chaos")]
pub mod processes;
pub mod throughput;
