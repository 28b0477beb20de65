//! What the adapters' chaos and throughput examples share: everything but the broker.

#[cfg(feature = "chaos")]
pub mod chaos;
pub mod throughput;
