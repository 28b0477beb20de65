//! What the adapters' chaos and throughput examples share: everything but the broker.

