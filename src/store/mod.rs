//! placeholder
use uuid::Uuid;
/// A lease.
#[derive(Debug, Clone)]
pub struct Lease { pub(crate) id: i64, pub(crate) token: Uuid }
