//! From promises to tests, and how one of them is run.

use std::future::Future;

use crate::{PublisherHarness, Result, SourceHarness, StoreHarness};

/// Runs a future on a runtime of its own.
///
/// # Panics
///
/// If the runtime cannot be built.
#[doc(hidden)]
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap_or_else(|e| panic!("no runtime: {e}"))
        .block_on(future)
}

/// Puts one source to one promise.
///
/// # Panics
///
/// If it is broken.
#[doc(hidden)]
pub fn source_test<H: SourceHarness>(promise: impl AsyncFnOnce(&H) -> Result) {
    let result = block_on(async {
        let Some(harness) = H::empty().await? else {
            return Ok(());
        };
        let kept = promise(&harness).await;
        let ended = harness.end().await;
        kept.and(ended)
    });
    if let Err(broken) = result {
        panic!("{broken}");
    }
}

/// Puts one store to one promise.
///
/// # Panics
///
/// If it is broken.
#[doc(hidden)]
pub fn store_test<H: StoreHarness>(promise: impl AsyncFnOnce(&H) -> Result) {
    let result = block_on(async {
        let Some(harness) = H::empty().await? else {
            return Ok(());
        };
        let kept = promise(&harness).await;
        let ended = harness.end().await;
        kept.and(ended)
    });
    if let Err(broken) = result {
        panic!("{broken}");
    }
}

/// Puts one publisher to one promise.
///
/// # Panics
///
/// If it is broken.
#[doc(hidden)]
pub fn publisher_test<H: PublisherHarness>(promise: impl AsyncFnOnce(&H) -> Result) {
    let result = block_on(async {
        let Some(harness) = H::empty().await? else {
            return Ok(());
        };
        let kept = promise(&harness).await;
        let ended = harness.end().await;
        kept.and(ended)
    });
    if let Err(broken) = result {
        panic!("{broken}");
    }
}

/// One test for each promise that a source makes, with this [`SourceHarness`].
#[macro_export]
macro_rules! source_suite {
    ($harness:ty) => {
        $crate::__tests! { source source_test $harness =>
            delivers_everything
            receives_at_most_max
            waits_when_there_is_nothing
            listens_without_room
            receipts_are_unique
            receive_is_cancel_safe
            redelivers_what_was_not_acked
            release_gives_back
            release_after_waits
            order_per_key
            order_survives_release
            settles_twice_and_late
            redelivery_is_marked
            lost_receipts_are_void
            pause_gives_back
            stop_gives_back
            stop_closes_last
            bytes_survive
            says_what_it_promises
            effects_happen_once
            nothing_is_acked_before_its_commit
            survives_kills
            stops_in_the_middle
        }
    };
}

/// One test for each promise that a store makes, with this [`StoreHarness`].
#[macro_export]
macro_rules! store_suite {
    ($harness:ty) => {
        $crate::__tests! { store store_test $harness =>
            claims_tell_what_they_found
            answers_have_their_precedence
            batches_are_answered_in_order
            rollback_leaves_no_claim
            claims_ahead_are_for_their_own_event
            commit_is_durable
            guard_lets_nothing_half_done_pass
            commits_by_the_handler_are_found
            leaked_savepoints_commit_whole_or_not
            deferred_constraints_are_refused
            copies_wait_for_each_other
            busy_is_bounded
            abandoned_work_frees_its_locks
            business_claims_go_with_their_transaction
            parking_gives_the_claim_back
            held_events_stand_in_their_own_way
            attempts_add_up
            leases_are_exclusive
            tokens_fence
            success_finishes_the_held_row
            enqueues_once
            inbox_keeps_every_byte
            purge_respects_the_window
            outgoing_goes_with_its_transaction
            outgoing_keeps_order_and_bytes
            lanes_are_shared_and_fenced
            refusals_are_fenced
            due_rows_wait_for_their_key
            parked_rows_are_replayed_or_discarded
            sent_rows_are_never_due
            migrations_can_be_repeated
            check_names_what_is_missing
            probe_answers
        }
    };
}

/// One test for each promise that a publisher makes, with this [`PublisherHarness`].
#[macro_export]
macro_rules! publisher_suite {
    ($harness:ty) => {
        $crate::__tests! { publisher publisher_test $harness =>
            confirmed_is_readable
            identity_arrives
            bytes_arrive
            refusals_are_reported
            one_bad_message_costs_itself
            many_at_once
            outages_end
            silence_is_bounded
            stop_flushes
            secrets_stay_secret
            says_who_it_is
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __tests {
    ($module:ident $run:ident $harness:ty => $($promise:ident)+) => {
        $(
            #[test]
            fn $promise() {
                $crate::$run::<$harness>($crate::$module::$promise::<$harness>);
            }
        )+
    };
}
