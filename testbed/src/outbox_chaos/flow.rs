//! Whether a route that nobody disturbs keeps flowing.

use std::fmt;
use std::time::{Duration, Instant};

use super::route::Route;

/// The longest that nothing of the route may be sent while something waits: the lease of a dead relay, a third more for
/// what is handed over, the start of the next process, and twice that for a busy machine.
const BOUND: Duration = Duration::from_secs(10);
/// The longest until something is sent when the broker is there again: the longest pause of a publisher.
const RECOVERY_BOUND: Duration = Duration::from_secs(60);

/// How long nothing of a route was sent though something waited.
pub(super) struct Flow {
    route: Route,
    sent: u64,
    stands: Stands,
    longest: Duration,
    longest_recovery: Duration,
}

/// Since when it stands still, and why.
enum Stands {
    /// Nobody has looked yet, or the broker is away.
    Excused,
    Since(Instant),
    /// The broker is there again since then.
    Recovering(Instant),
}

impl Flow {
    pub(super) fn of(route: Route) -> Self {
        Self {
            route,
            sent: 0,
            stands: Stands::Excused,
            longest: Duration::ZERO,
            longest_recovery: Duration::ZERO,
        }
    }

    pub(super) fn route(&self) -> Route {
        self.route
    }

    /// So many were committed, and so many of them wait. While the broker is away it is excused.
    pub(super) fn look(&mut self, committed: u64, waiting: u64, away: bool, now: Instant) {
        let sent = committed.saturating_sub(waiting);
        let flows = sent > self.sent || waiting == 0;
        self.sent = sent.max(self.sent);
        self.stands = match self.stands {
            _ if away => Stands::Excused,
            Stands::Excused => Stands::Recovering(now),
            Stands::Since(since) => {
                self.longest = self.longest.max(now - since);
                Stands::Since(if flows { now } else { since })
            }
            Stands::Recovering(since) => {
                self.longest_recovery = self.longest_recovery.max(now - since);
                if flows {
                    Stands::Since(now)
                } else {
                    Stands::Recovering(since)
                }
            }
        };
    }

    pub(super) fn problem(&self) -> Option<String> {
        let good = self.longest <= BOUND && self.longest_recovery <= RECOVERY_BOUND;
        (!good).then(|| format!("{self} ({BOUND:?} and {RECOVERY_BOUND:?} are the most)"))
    }
}

impl fmt::Display for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (route, longest, recovery) = (self.route.as_str(), self.longest, self.longest_recovery);
        write!(
            f,
            "the route {route} stood still for {longest:.1?} at most, and for {recovery:.1?} when the broker was there again"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_stands_still_while_something_waits_and_nothing_is_sent() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut flow = Flow::of(Route::Calm);
        for (committed, waiting, away, seconds, longest, recovery) in [
            (0, 0, false, 0, 0, 0),
            (0, 0, false, 1, 0, 1),
            (5, 5, false, 2, 1, 1),
            (9, 8, false, 3, 2, 1),
            (9, 8, false, 6, 3, 1),
            (9, 8, true, 7, 3, 1),
            (9, 8, false, 50, 3, 1),
            (9, 8, false, 60, 3, 10),
            (9, 7, false, 61, 3, 11),
            (9, 7, false, 65, 4, 11),
        ] {
            flow.look(committed, waiting, away, at(seconds));
            let found = [flow.longest, flow.longest_recovery];
            assert_eq!(found, [longest, recovery].map(Duration::from_secs), "{seconds}");
        }
        assert!(flow.problem().is_none());
        flow.look(9, 7, false, at(75));
        assert!(flow.problem().is_some());
    }
}
