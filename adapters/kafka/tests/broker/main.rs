//! Source and publisher against a real Kafka.
//!
//! `ONLYONCE_KAFKA_BROKERS` names the brokers (`eval "$(scripts/services env)"`). Without it every test
//! says `skipped`, unless `ONLYONCE_REQUIRE_SERVICES=1` makes that a failure.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod conformance;
mod failures;
mod harness;
mod limits;
mod login;
mod positions;
mod protocol;
mod proxy;
mod publisher_conformance;
mod publishing;
mod rebalancing;
mod relaying;
