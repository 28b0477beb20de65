//! From the hand to the brokers, and what comes back.

use tokio::task::JoinError;
use tokio::time::Instant;

use super::decide::{Fate, Says, Standing, decide};
use super::flight::{Flight, Landed};
use super::marks::Refused;
use super::outlet::Choice;
use super::pace::{Admits, Pace};
use super::work::Work;
use crate::publisher::PublishErrorKind;
use crate::store::Relaying;

impl<S: Relaying> Work<S> {
    /// Sends what may go, as far as there is room. Nothing goes when the lanes may be another's soon, nor
    /// while the table does not learn what has been sent already.
    pub(super) fn publish(&mut self, now: Instant) {
        if self.stopping.is_some() || self.marks.is_failing() || !self.tenure.is_good(now) {
            return;
        }
        for outlet in 0..self.outlets.len() {
            while self.flights.len() + self.marks.len() < self.shared.settings.in_flight {
                let startable = self.hand.startable(outlet);
                let Some(choice) = self.outlets[outlet].choose(startable, now) else {
                    break;
                };
                self.send(outlet, choice, now);
            }
        }
    }

    fn send(&mut self, outlet: usize, choice: Choice, now: Instant) {
        let Some(started) = self.hand.start(choice.id) else {
            return;
        };
        let (row, lane) = (started.row.clone(), started.lane);
        let to = row.destination.as_str();
        let mut destination_era = 0;
        if let Some(pace) = self.destinations.get_mut(to) {
            destination_era = pace.era();
            if pace.admits(now) == Admits::One {
                pace.tries();
                self.hand.forget(|waiting| waiting.row.destination.as_str() == to);
            }
        }
        self.outlets[outlet].started(choice);
        if choice.tries {
            self.hand.forget(|waiting| waiting.publisher == outlet);
        }
        let publisher = self.outlets[outlet].publisher.clone();
        let flight = Flight {
            row,
            lane,
            outlet,
            alone: choice.alone,
            publisher_era: self.outlets[outlet].pace.era(),
            destination_era,
        };
        self.flights
            .spawn(flight.fly(self.shared.name.clone(), publisher));
    }

    pub(crate) fn land_all(&mut self, first: Result<Landed, JoinError>) {
        let mut next = Some(first);
        while let Some(landed) = next {
            // A flight that was cut off by a stop has nothing to say.
            if let Ok(landed) = landed {
                self.land(landed);
            }
            next = self.flights.try_join_next();
        }
    }

    fn land(&mut self, Landed { flight, result }: Landed) {
        let (id, now) = (flight.row.id, Instant::now());
        let outlet = &mut self.outlets[flight.outlet];
        outlet.landed();
        let standing = Standing {
            attempts: flight.row.attempts,
            alone: flight.alone,
            died_alone: outlet.died_alone(id),
        };
        let error = result.as_ref().err().map(ToString::to_string).unwrap_or_default();
        let kind = result.map_err(|error| error.kind());
        let decision = decide(kind, standing, &self.shared.settings.retries);
        match decision.row {
            Fate::Sent => {
                outlet.clear(id);
                self.hand.confirmed(id);
                self.marks.sent(id);
            }
            Fate::Refused { again } => {
                // What was interrupted stays a suspect: it goes alone the next time as well.
                outlet.clear(id);
                if kind == Err(PublishErrorKind::Interrupted) && again.is_some() {
                    outlet.suspect(id, 0);
                }
                self.marks.refused(Refused {
                    id,
                    lane: flight.lane,
                    error: error.clone(),
                    again,
                });
            }
            Fate::Suspect => {
                outlet.suspect(id, standing.died_alone + u32::from(flight.alone));
                self.hand.put_back(id);
            }
            Fate::Due => self.hand.put_back(id),
        }
        self.heard_of_publisher(&flight, decision.publisher, &error, now);
        self.heard_of_destination(&flight, decision.destination, &error, now);
        if self.tenure.lane(flight.lane.lane) != Some(flight.lane) {
            // It waits for another instance by now.
            self.hand.forget_one(id);
            self.outlets[flight.outlet].clear(id);
        } else if self.is_paused(flight.outlet, flight.row.destination.as_str(), now) {
            // It waits in the table, as those do that had not been sent.
            self.hand.forget_one(id);
        }
    }

    /// Whether nothing goes there at present.
    pub(super) fn is_paused(&self, outlet: usize, destination: &str, now: Instant) -> bool {
        let closed = |pace: &Pace| pace.admits(now) == Admits::Nothing;
        closed(&self.outlets[outlet].pace) || self.destinations.get(destination).is_some_and(closed)
    }

    fn heard_of_publisher(&mut self, flight: &Flight, says: Says, error: &str, now: Instant) {
        let (relay, outlet) = (&*self.shared.name, &mut self.outlets[flight.outlet]);
        let (name, pace, era) = (&outlet.name, &mut outlet.pace, flight.publisher_era);
        let was_open = pace.closed_because().is_none();
        match says {
            Says::Works => {
                if pace.works(era) {
                    tracing::info!(relay, publisher = name, "the publisher works again");
                    self.reading.wake();
                }
            }
            Says::Fails => {
                if pace.fails(era, now, error) {
                    if was_open {
                        tracing::warn!(
                            relay,
                            publisher = name,
                            error,
                            "the publisher is paused; its events wait and nothing is counted"
                        );
                    }
                    self.hand.forget(|row| row.publisher == flight.outlet);
                }
            }
            Says::Nothing => pace.learns_nothing(era, now),
        }
    }

    fn heard_of_destination(&mut self, flight: &Flight, says: Says, error: &str, now: Instant) {
        let (relay, to, era) = (
            &*self.shared.name,
            flight.row.destination.as_str(),
            flight.destination_era,
        );
        match (says, self.destinations.get_mut(to)) {
            (Says::Works | Says::Nothing, None) => {}
            (Says::Works, Some(pace)) => {
                if pace.works(era) {
                    tracing::info!(relay, destination = to, "the destination works again");
                    self.destinations.remove(to);
                    self.reading.wake();
                }
            }
            (Says::Nothing, Some(pace)) => pace.learns_nothing(era, now),
            (Says::Fails, known) => {
                if known.is_none() {
                    tracing::warn!(
                        relay,
                        destination = to,
                        error,
                        "the destination is paused; its events wait and nothing is counted"
                    );
                }
                let pace = self.destinations.entry(to.to_owned()).or_default();
                if pace.fails(era, now, error) {
                    self.hand.forget(|row| row.row.destination.as_str() == to);
                }
            }
        }
    }
}
