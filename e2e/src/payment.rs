use serde::{Deserialize, Serialize};

use crate::options::Options;

const ACCOUNTS: u64 = 40;

/// What comes from RabbitMQ. Its id is the event's.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Payment {
    pub(crate) id: String,
    pub(crate) account: String,
    pub(crate) cents: i64,
    /// Its first attempt fails.
    pub(crate) fails: bool,
}

/// What goes to Kafka when a payment is captured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Captured {
    pub(crate) payment: String,
    pub(crate) cents: i64,
    /// The attempt that sent this.
    pub(crate) attempt: u32,
}

/// All payments of a run.
pub(crate) fn all(options: &Options) -> Vec<Payment> {
    let mut random = fastrand::Rng::with_seed(options.seed);
    (0..options.payments)
        .map(|n| Payment {
            id: format!("payment-{n}"),
            account: format!("account-{}", random.u64(..ACCOUNTS)),
            cents: random.i64(1..1_000_000),
            fails: random.u8(..8) == 0,
        })
        .collect()
}
