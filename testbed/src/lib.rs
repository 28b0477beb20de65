//! What the adapters' chaos and throughput examples share: everything but the broker.

pub mod throughput;
