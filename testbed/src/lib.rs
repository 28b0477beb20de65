//! What the adapters' tests, chaos and throughput examples share: everything but the broker.

#[cfg(feature = "chaos")]
pub mod chaos;
pub mod drive;
pub mod throughput;
