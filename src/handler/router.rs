use std::collections::HashMap;
use std::fmt;

use async_trait::async_trait;
use sqlx::Database;

use super::erased::Erased;
use super::{Context, Handler, HandlerError};
use crate::event::{DecodeError, Event, FromEvent, RawEvent};

/// A handler that dispatches by event type; each route decodes its own payload.
///
/// ```
/// use onlyonce::{Bytes, OnUnknown, Router, handler_fn};
///
/// let router = Router::<sqlx::Sqlite>::new()
///     .on("payment.captured", handler_fn::<_, Bytes, _>(|_cx, _event| Box::pin(async { Ok(()) })))
///     .on_unknown(OnUnknown::Discard);
/// # let _ = router;
/// ```
pub struct Router<Db: Database> {
    routes: HashMap<String, Box<dyn Erased<Db>>>,
    unknown: OnUnknown,
}

/// What becomes of an event that no route takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnUnknown {
    /// A dead letter, reason `unknown_event_type`: it can be run once a route exists.
    #[default]
    DeadLetter,
    /// It is remembered as `discarded` and acked. Events that a later version could handle are gone.
    Discard,
}

impl<Db: Database> Router<Db> {
    /// A router without routes.
    pub fn new() -> Self {
        Self {
            routes: HashMap::new(),
            unknown: OnUnknown::default(),
        }
    }

    /// Sends events of this type to this handler.
    ///
    /// # Panics
    ///
    /// If the type has a route already: one of the two would silently never run.
    pub fn on(mut self, event_type: impl Into<String>, handler: impl Handler<Db>) -> Self {
        let event_type = event_type.into();
        assert!(
            !self.routes.contains_key(&event_type),
            "event type {event_type:?} has two routes"
        );
        self.routes.insert(event_type, Box::new(handler));
        self
    }

    /// What becomes of events that no route takes. Default: a dead letter.
    pub fn on_unknown(mut self, rule: OnUnknown) -> Self {
        self.unknown = rule;
        self
    }
}

impl<Db: Database> Default for Router<Db> {
    fn default() -> Self {
        Self::new()
    }
}

impl<Db: Database> fmt::Debug for Router<Db> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Router")
            .field("routes", &self.routes.keys())
            .field("unknown", &self.unknown)
            .finish()
    }
}

/// The event as it arrived, for handlers that decode later.
impl FromEvent for RawEvent {
    fn from_event(raw: &RawEvent) -> Result<Self, DecodeError> {
        Ok(raw.clone())
    }
}

#[async_trait]
impl<Db: Database> Handler<Db> for Router<Db> {
    type Payload = RawEvent;

    async fn handle(&self, cx: &mut Context<'_, Db>, event: Event<RawEvent>) -> Result<(), HandlerError> {
        let event_type = event.event_type.as_deref();
        match event_type.and_then(|t| self.routes.get(t)) {
            Some(route) => route.handle_raw(cx, &event.payload).await,
            None => {
                let what = match event_type {
                    Some(event_type) => format!("no route takes event type {event_type:.100?}"),
                    None => "the event has no type, and routes are by type".to_owned(),
                };
                Err(match self.unknown {
                    OnUnknown::DeadLetter => HandlerError::unknown_event_type(what),
                    OnUnknown::Discard => HandlerError::discard(what),
                })
            }
        }
    }
}
