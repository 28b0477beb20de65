//! A test kit for consumers: a broker in memory, delivery that waits for settlement, crash points.
//!
//! Needs the feature `testing`; switch it on in your dev-dependencies.
//!
//! ```
//! # #[cfg(feature = "sqlite")]
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use onlyonce::store::{Operations, SqliteStore};
//! use onlyonce::testing::{deliver, event};
//! use onlyonce::{Bytes, Consumer, handler_fn};
//!
//! let dir = tempfile::tempdir()?;
//! let store = SqliteStore::connect(&dir.path().join("test.db").display().to_string()).await?;
//! store.migrate().await?;
//! sqlx::raw_sql("CREATE TABLE seen (id TEXT)").execute(store.pool()).await?;
//!
//! let consumer = Consumer::builder("seen", store.clone()).handler(handler_fn::<_, Bytes, _>(|cx, event| {
//!     Box::pin(async move {
//!         sqlx::query("INSERT INTO seen VALUES (?)").bind(event.identity.id).execute(cx.tx()).await?;
//!         Ok(())
//!     })
//! }));
//! // The same event three times, and another one.
//! let report = deliver(consumer, [event("a", "1"), event("a", "1"), event("a", "1"), event("b", "2")]).await?;
//!
//! let seen: i64 = sqlx::query_scalar("SELECT count(*) FROM seen").fetch_one(store.pool()).await?;
//! assert_eq!((seen, report.acked), (2, 4));
//! # Ok(()) }
//! # #[cfg(not(feature = "sqlite"))] fn main() {}
//! ```

mod broker;
mod deliver;
mod publisher;

use bytes::Bytes;

pub use crate::crash::CrashPoint;
pub use broker::{Broker, BrokerSource, Stats};
pub use deliver::{Report, deliver};
pub use publisher::{MemoryPublisher, Reply};

use crate::event::{Origin, RawEvent};

/// An event with this id (as the message property of a broker) and this body.
pub fn event(id: impl Into<String>, body: impl Into<Bytes>) -> RawEvent {
    RawEvent {
        origin: Origin {
            system: "memory",
            destination: "memory".into(),
            detail: "".into(),
        },
        ..RawEvent::new("test", id, body)
    }
}

/// The same event with an ordering key.
pub fn keyed(id: impl Into<String>, key: impl Into<Bytes>, body: impl Into<Bytes>) -> RawEvent {
    RawEvent {
        key: Some(key.into()),
        ..event(id, body)
    }
}

/// For worker binaries under chaos: reads `ONLYONCE_CRASH`, such as `committed:17`, and ends the
/// process without any clean-up when that crash point is reached for that time.
///
/// # Panics
///
/// If the variable is set and cannot be read: a chaos run that crashes nowhere would prove nothing.
pub fn crash_from_env() -> impl Fn(CrashPoint) -> bool + Send + Sync + 'static {
    use std::sync::atomic::{AtomicU64, Ordering};

    let plan = std::env::var("ONLYONCE_CRASH").ok().map(|plan| {
        let parsed = plan.split_once(':').and_then(|(name, nth)| {
            let point = CrashPoint::ALL.into_iter().find(|point| point.as_str() == name)?;
            Some((point, nth.parse::<u64>().ok()?))
        });
        parsed.unwrap_or_else(|| {
            panic!("ONLYONCE_CRASH is {plan:?} (expected POINT:NTH, such as committed:17)")
        })
    });
    let passed = AtomicU64::new(0);
    move |point| {
        if let Some((crash_at, nth)) = plan
            && point == crash_at
            && passed.fetch_add(1, Ordering::Relaxed) + 1 == nth
        {
            std::process::abort();
        }
        false
    }
}
