//! What is done to servers, links and schedulers while the workers are killed.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use tokio::time::sleep;

use crate::crew::{Crew, Place, lock, signal};
use crate::link::Link;
use crate::options::Options;
use crate::servers::Servers;

#[derive(Debug, Clone, Copy)]
enum Disruption {
    RestartBroker,
    KillBroker,
    RestartDatabase,
    KillDatabase,
    CutBroker,
    CutDatabase,
    FreezeBroker,
    FreezeDatabase,
    /// Connections die and nobody is told.
    ForgetBroker,
    ForgetDatabase,
    CutCommits,
    /// A process stands still for longer than its leases and sessions last, and then goes on.
    Stun,
}

use Disruption::*;

const SHORT: [(Disruption, usize); 9] = [
    (RestartBroker, 1),
    (RestartDatabase, 1),
    (CutBroker, 1),
    (CutDatabase, 1),
    (FreezeBroker, 1),
    (FreezeDatabase, 1),
    (ForgetDatabase, 1),
    (CutCommits, 1),
    (Stun, 1),
];
const FULL: [(Disruption, usize); 12] = [
    (RestartBroker, 2),
    (KillBroker, 1),
    (RestartDatabase, 1),
    (KillDatabase, 1),
    (CutBroker, 4),
    (CutDatabase, 4),
    (FreezeBroker, 3),
    (FreezeDatabase, 3),
    (ForgetBroker, 2),
    (ForgetDatabase, 3),
    (CutCommits, 6),
    (Stun, 3),
];

/// How long a cut or frozen link stays so: from unnoticed to longer than two heartbeats, the handler's
/// time and a lease.
const LINK_DOWN_MS: std::ops::Range<u64> = 200..6_000;
/// Longer than the database lets a transaction stand idle: the handler's time and 5 s.
const STUNNED: Duration = Duration::from_secs(9);
const KILLS_POLL: Duration = Duration::from_millis(50);

/// All of them, in random order, spread over the kills.
pub(crate) async fn all(options: Arc<Options>, servers: Arc<Servers>, crew: Arc<Crew>) -> anyhow::Result<()> {
    let mut random = Rng::with_seed(options.seed ^ 0xd15c);
    let kinds: &[_] = if options.short { &SHORT } else { &FULL };
    let mut plan: Vec<_> = kinds
        .iter()
        .flat_map(|&(kind, times)| std::iter::repeat_n(kind, times))
        .collect();
    random.shuffle(&mut plan);
    for (n, disruption) in plan.iter().enumerate() {
        let due = options.kills * n / (plan.len() + 1);
        while crew.kills() < due {
            sleep(KILLS_POLL).await;
        }
        happen(*disruption, &mut random, &servers, &crew).await?;
    }
    // Now that no kill will repair it: a process that never finds out would hold what it has for ever.
    while !crew.last_lives_begun() {
        sleep(KILLS_POLL).await;
    }
    for place in &crew.places {
        place.at_work().await;
        place.postgres.forget();
        place.rabbitmq.forget();
        servers.note(format!("{ForgetDatabase:?}"));
        servers.note(format!("{ForgetBroker:?}"));
        sleep(Duration::from_millis(random.u64(..1000))).await;
    }
    Ok(())
}

async fn happen(what: Disruption, random: &mut Rng, servers: &Servers, crew: &Crew) -> anyhow::Result<()> {
    let place = &crew.places[random.usize(..crew.places.len())];
    match what {
        RestartBroker => return servers.restart("restart", "rabbitmq").await,
        KillBroker => return servers.restart("kill", "rabbitmq").await,
        RestartDatabase => return servers.restart("restart", "postgres").await,
        KillDatabase => return servers.restart("kill", "postgres").await,
        CutBroker => disturb(random, crew, |place| &place.rabbitmq, Link::cut).await,
        CutDatabase => disturb(random, crew, |place| &place.postgres, Link::cut).await,
        FreezeBroker => disturb(random, crew, |place| &place.rabbitmq, Link::freeze).await,
        FreezeDatabase => disturb(random, crew, |place| &place.postgres, Link::freeze).await,
        ForgetBroker => {
            let _hands = place.hands_off.lock().await;
            place.rabbitmq.forget();
            sleep(Duration::from_secs(8)).await;
        }
        ForgetDatabase => {
            let _hands = place.hands_off.lock().await;
            place.postgres.forget();
            sleep(Duration::from_secs(8)).await;
        }
        CutCommits => crew
            .places
            .iter()
            .for_each(|place| place.postgres.cut_commits(3, 3)),
        Stun => {
            let _hands = place.hands_off.lock().await;
            let pid = *lock(&place.pid);
            signal("STOP", pid).await?;
            sleep(STUNNED).await;
            signal("CONT", pid).await?;
            sleep(Duration::from_secs(2)).await;
        }
    }
    servers.note(format!("{what:?}"));
    Ok(())
}

/// One worker's link, or those of all, for a while.
async fn disturb(random: &mut Rng, crew: &Crew, link: impl Fn(&Place) -> &Link, disturb: impl Fn(&Link)) {
    let one = random.usize(..crew.places.len());
    let links: Vec<_> = if random.bool() {
        crew.places.iter().map(&link).collect()
    } else {
        vec![link(&crew.places[one])]
    };
    links.iter().for_each(|link| disturb(link));
    sleep(Duration::from_millis(random.u64(LINK_DOWN_MS))).await;
    links.iter().for_each(|link| link.mend());
}
