//! Keeps lapin's TRACE lines, which show whole frames and so the login's, out of every log, and its warnings
//! of returned messages, which show all that is in them.
//!
//! lapin writes its frames on a thread of its own. That thread gets an observer that passes on all
//! that the program's own one wants to see, except for those.

use tracing::dispatcher::{self, Dispatch};
use tracing::metadata::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber};

/// An observer that hands all the rest to the current one.
pub(crate) fn observer() -> Dispatch {
    Dispatch::new(Discreet(dispatcher::get_default(Dispatch::clone)))
}

/// Makes it the observer of this thread until the thread ends.
pub(crate) fn on_this_thread(observer: &Dispatch) {
    std::mem::forget(dispatcher::set_default(observer));
}

struct Discreet(Dispatch);

fn tells_too_much(metadata: &Metadata<'_>) -> bool {
    *metadata.level() == Level::TRACE || metadata.target() == "lapin::returned_messages"
}

impl Subscriber for Discreet {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        if tells_too_much(metadata) {
            Interest::never()
        } else {
            self.0.register_callsite(metadata)
        }
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        // The highest hint of all observers counts, and the one behind this has given its own.
        Some(LevelFilter::OFF)
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        !tells_too_much(metadata) && self.0.enabled(metadata)
    }

    fn event_enabled(&self, event: &Event<'_>) -> bool {
        !tells_too_much(event.metadata())
    }

    fn event(&self, event: &Event<'_>) {
        self.0.event(event);
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        self.0.new_span(span)
    }

    fn record(&self, span: &Id, values: &Record<'_>) {
        self.0.record(span, values);
    }

    fn record_follows_from(&self, span: &Id, follows: &Id) {
        self.0.record_follows_from(span, follows);
    }

    fn enter(&self, span: &Id) {
        self.0.enter(span);
    }

    fn exit(&self, span: &Id) {
        self.0.exit(span);
    }

    fn clone_span(&self, span: &Id) -> Id {
        self.0.clone_span(span)
    }

    fn try_close(&self, span: Id) -> bool {
        self.0.try_close(span)
    }
}
