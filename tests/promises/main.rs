//! One file per row of the README's promise table, each on every store where it can differ. What
//! happened is always read over a second connection, never over the consumer's own.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

#[macro_use]
mod stage;
mod proxy;
mod running;
mod wire;

mod g12_outbox;
mod g12_relay;
mod g13_stop;
mod g14_poison;
mod g1_one_transaction;
mod g2_durable;
mod g3_duplicates;
mod g4_failures;
mod g5_unknown_commit;
mod g6_escaped;
mod g7_identity;
mod g8_attempts;
mod g9_outage;

mod ahead;
mod configuration;
mod costs;
mod limits;
mod ordering;
mod queue;
mod retention;
mod schema;
mod secrets;
