use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use super::derived::derived_id;
use super::settings::MAX_TOGETHER;
use super::{OutboxError, OutgoingEvent, Settings};
use crate::event::{Event, Headers, Identity};
use crate::store::OutgoingRow;

/// What the handlers of one transaction send, in their order.
pub(crate) struct Collector<'a> {
    settings: &'a Settings,
    consumer: &'a str,
    collected: Mutex<Collected>,
}

#[derive(Default)]
struct Collected {
    rows: Vec<OutgoingRow>,
    size: usize,
    /// How many each event has caused so far.
    caused: HashMap<Identity, u32>,
}

impl<'a> Collector<'a> {
    pub(crate) fn new(settings: &'a Settings, consumer: &'a str) -> Self {
        Self {
            settings,
            consumer,
            collected: Mutex::default(),
        }
    }

    /// What was sent, and nothing of it is left here.
    pub(crate) fn take(&self) -> Vec<OutgoingRow> {
        let mut collected = self.collected.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *collected).rows
    }

    fn send(&self, cause: &Identity, headers: &Headers, event: OutgoingEvent) -> Result<(), OutboxError> {
        let mut collected = self.collected.lock().unwrap_or_else(PoisonError::into_inner);
        let ordinal = collected.caused.get(cause).copied().unwrap_or(0);
        let id = || derived_id(self.consumer, cause, ordinal).to_string();
        let (row, size) = self.settings.row(event, id, Some(headers))?;
        collected.size = together(collected.size, size)?;
        collected.rows.push(row);
        collected.caused.insert(cause.clone(), ordinal + 1);
        Ok(())
    }
}

/// The sum, if one statement can carry as much.
pub(super) fn together(so_far: usize, size: usize) -> Result<usize, OutboxError> {
    let size = so_far + size;
    if size > MAX_TOGETHER {
        return Err(OutboxError::TooMuch {
            size,
            limit: MAX_TOGETHER,
        });
    }
    Ok(size)
}

/// A handler's outbox, for the event that it handles; from [`Context::outbox`](crate::Context::outbox).
#[derive(Clone, Copy)]
pub struct EventOutbox<'a> {
    collector: &'a Collector<'a>,
    cause: &'a Identity,
    headers: &'a Headers,
}

impl<'a> EventOutbox<'a> {
    pub(crate) fn new(collector: &'a Collector<'a>, cause: &'a Identity, headers: &'a Headers) -> Self {
        Self {
            collector,
            cause,
            headers,
        }
    }

    /// Takes an event along: when the handler has succeeded it is written into the outbox, in the handler's
    /// transaction, and published after that has committed. Events are published per key in the order of
    /// these calls.
    ///
    /// Its id, if it is not given one, is derived from consumer, handled event and how many were sent before
    /// it: a handler that runs again sends the same ids. It goes on under the handled event's `traceparent`,
    /// if it has no header of that name itself.
    ///
    /// What was taken along stays so, also where the handler rolls back a savepoint of its own.
    ///
    /// # Errors
    ///
    /// If no broker could carry it, or it is too large for its publisher. Made a
    /// [`HandlerError`](crate::HandlerError) by `?` that is a permanent failure: from the same event the
    /// handler would make the same one again.
    pub fn send(&self, event: OutgoingEvent) -> Result<(), OutboxError> {
        self.collector.send(self.cause, self.headers, event)
    }
}

impl fmt::Debug for EventOutbox<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventOutbox")
            .field("cause", self.cause)
            .finish_non_exhaustive()
    }
}

/// A batch handler's outbox; from [`BatchContext::outbox`](crate::BatchContext::outbox).
#[derive(Clone, Copy)]
pub struct BatchOutbox<'a> {
    collector: &'a Collector<'a>,
}

impl<'a> BatchOutbox<'a> {
    pub(crate) fn new(collector: &'a Collector<'a>) -> Self {
        Self { collector }
    }

    /// The outbox for what this event causes. Ids are derived from it and from how many were sent for it
    /// before, so they are the same in whatever batch it comes again.
    pub fn for_event<'e, P>(&self, event: &'e Event<P>) -> EventOutbox<'e>
    where
        'a: 'e,
    {
        EventOutbox::new(self.collector, &event.identity, &event.headers)
    }
}

impl fmt::Debug for BatchOutbox<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BatchOutbox").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        Settings {
            source: Some("ledger".into()),
            ..Settings::default()
        }
    }

    fn event() -> OutgoingEvent {
        OutgoingEvent::new("kafka:t", "paid", "x")
    }

    fn ids(rows: &[OutgoingRow]) -> Vec<&str> {
        rows.iter().map(|row| row.message.event_id.as_str()).collect()
    }

    #[test]
    fn ordinals_count_for_each_event_on_its_own() {
        let settings = settings();
        let (a, b) = (
            Identity::strong("orders", "a").unwrap(),
            Identity::strong("orders", "b").unwrap(),
        );
        let headers = Headers::new();
        let send_all = |causes: &[&Identity]| {
            let collector = Collector::new(&settings, "ledger");
            for cause in causes {
                EventOutbox::new(&collector, cause, &headers)
                    .send(event())
                    .unwrap();
            }
            collector.take()
        };
        let mixed = send_all(&[&a, &b, &a]);
        assert_eq!(ids(&mixed)[1..2], ids(&send_all(&[&b])));
        assert_eq!([ids(&mixed)[0], ids(&mixed)[2]], *ids(&send_all(&[&a, &a])));
        assert_ne!(ids(&mixed)[0], ids(&mixed)[1]);
    }

    #[test]
    fn what_is_refused_is_not_counted() {
        let settings = settings();
        let cause = Identity::strong("orders", "a").unwrap();
        let headers = Headers::new();
        let collector = Collector::new(&settings, "ledger");
        let outbox = EventOutbox::new(&collector, &cause, &headers);
        outbox.send(event().key("")).unwrap_err();
        outbox.send(event()).unwrap();
        let rows = collector.take();
        assert_eq!(ids(&rows), [derived_id("ledger", &cause, 0).to_string()]);
        assert_eq!(collector.take().len(), 0);
    }

    #[test]
    fn together_they_fit_into_one_statement() {
        assert_eq!(together(MAX_TOGETHER - 1, 1).unwrap(), MAX_TOGETHER);
        assert!(matches!(
            together(MAX_TOGETHER, 1),
            Err(OutboxError::TooMuch {
                limit: MAX_TOGETHER,
                ..
            })
        ));
    }
}
