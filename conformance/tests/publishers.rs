//! The suite on a publisher to the broker in memory.

#[path = "support/publisher.rs"]
#[allow(dead_code)] // its faults are another test's
mod publisher;

onlyonce_conformance::publisher_suite!(publisher::MemoryDestination);
