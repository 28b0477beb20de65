//! RabbitMQ as a source of deliveries for [`onlyonce`] consumers.
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod repeats;
mod settle;
