//! Source and publisher against an SQS emulator.
//!
//! `ONLYONCE_SQS_URL` names its endpoint (`eval "$(scripts/services env)"`). Without it every test says
//! `skipped`, unless `ONLYONCE_REQUIRE_SERVICES=1` makes that a failure.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod checks;
mod conformance;
mod database;
mod deliveries;
mod effects;
mod failures;
mod harness;
mod pausing;
mod proxy;
mod publisher_conformance;
mod publishing;
mod relaying;
mod settling;
mod stopping;
