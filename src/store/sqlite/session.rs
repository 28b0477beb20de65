use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use sqlx::sqlite::SqliteConnection;

use crate::store::Session;

/// How many steps of SQLite's virtual machine lie between two looks at whether a statement was cut
/// off: about a millisecond.
const STEPS: i32 = 10_000;

/// What a lane's connection is fitted with while the lane has it.
///
/// A commit hook lets nothing commit but our own COMMIT: what a handler writes after it ended its
/// transaction itself fails, and does not commit alone. A progress handler ends the statement of a
/// handler that was cut off, because it would go on holding the one write lock.
pub(super) struct Sessions {
    /// Set for our own COMMIT. One for all connections, since only one can be writing.
    committing: Arc<AtomicBool>,
    last: AtomicI32,
    cut: Mutex<HashMap<i32, Weak<AtomicBool>>>,
}

impl Sessions {
    pub(super) fn new() -> Self {
        Self {
            committing: Arc::new(AtomicBool::new(false)),
            last: AtomicI32::new(0),
            cut: Mutex::new(HashMap::new()),
        }
    }

    /// Fits a connection and returns the number by which [`cut_off`](Self::cut_off) knows it.
    pub(super) async fn fit(&self, conn: &mut SqliteConnection) -> Result<Session, sqlx::Error> {
        let committing = Arc::clone(&self.committing);
        let cut = Arc::new(AtomicBool::new(false));
        let number = self.last.fetch_add(1, Ordering::Relaxed);
        {
            let mut all = self.cut.lock().unwrap_or_else(PoisonError::into_inner);
            // The connection owns the flag, so those of closed connections are gone.
            all.retain(|_, cut| cut.strong_count() > 0);
            all.insert(number, Arc::downgrade(&cut));
        }
        let mut handle = conn.lock_handle().await?;
        // Good for one commit: ours, because it holds the write lock while the permission stands.
        handle.set_commit_hook(move || committing.swap(false, Ordering::SeqCst));
        handle.set_progress_handler(STEPS, move || !cut.load(Ordering::Relaxed));
        // These numbers are never given again.
        Ok(Session { number, began: 0 })
    }

    pub(super) fn let_commit(&self, now: bool) {
        self.committing.store(now, Ordering::SeqCst);
    }

    /// Ends the statement that this connection is running, and any other from now on.
    pub(super) fn cut_off(&self, session: i32) {
        let all = self.cut.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cut) = all.get(&session).and_then(Weak::upgrade) {
            cut.store(true, Ordering::Relaxed);
        }
    }
}
