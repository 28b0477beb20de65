//! Source and publisher against a real RabbitMQ.
//!
//! `ONLYONCE_RABBITMQ_URL` names the broker (`eval "$(scripts/services env)"`). Without it every test
//! says `skipped`, unless `ONLYONCE_REQUIRE_SERVICES=1` makes that a failure.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod checks;
mod conformance;
mod deliveries;
mod failures;
mod harness;
mod pausing;
mod proxy;
mod publisher_conformance;
mod publishing;
mod relaying;
mod settling;
mod stopping;
#[cfg(feature = "tls")]
mod tls;
