//! What is done to servers, links and schedulers while the workers are killed.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use tokio::time::sleep;

use super::crew::{Crew, Place, lock};
use super::link::Link;
use super::options::Options;
use super::servers::Servers;
use crate::processes::signal;

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
/// How long a guest stays, and how long a restarted worker is left alone.
const VISIT: Duration = Duration::from_secs(2);

/// Everything that a run is to go through.
pub(super) async fn all(options: Arc<Options>, servers: Arc<Servers>, crew: Arc<Crew>) -> anyhow::Result<()> {
    let visits = visits(options.clone(), crew.clone());
    let failures = async {
        if !options.calm {
            failures(&options, &servers, &crew).await?;
        }
        while !crew.last_lives_begun() {
            sleep(KILLS_POLL).await;
        }
        rolling_restarts(&options, &crew).await?;
        if !options.calm {
            last_failures(&options, &servers, &crew).await;
        }
        Ok(())
    };
    tokio::try_join!(visits, failures)?;
    Ok(())
}

/// One guest after another, beside all else.
async fn visits(options: Arc<Options>, crew: Arc<Crew>) -> anyhow::Result<()> {
    for _ in 0..options.joins {
        crew.visit(VISIT).await?;
    }
    Ok(())
}

async fn rolling_restarts(options: &Options, crew: &Crew) -> anyhow::Result<()> {
    for _ in 0..options.rolling {
        for place in 0..options.workers {
            // Before that it does not know what to do about a signal.
            crew.workers()[place].at_work().await;
            crew.restart(place).await?;
            sleep(VISIT).await;
        }
    }
    Ok(())
}

/// All kinds in random order, spread over the kills.
async fn failures(options: &Options, servers: &Servers, crew: &Crew) -> anyhow::Result<()> {
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
        happen(*disruption, &mut random, servers, crew).await?;
    }
    Ok(())
}

/// Now that no kill will repair it: a process that never finds out would hold what it has for ever.
async fn last_failures(options: &Options, servers: &Servers, crew: &Crew) {
    let mut random = Rng::with_seed(options.seed ^ 0x1a57);
    for place in crew.workers() {
        place.at_work().await;
        place.postgres.forget();
        place.broker.forget();
        servers.note(format!("{ForgetDatabase:?}"));
        servers.note(format!("{ForgetBroker:?}"));
        sleep(Duration::from_millis(random.u64(..1000))).await;
    }
}

async fn happen(what: Disruption, random: &mut Rng, servers: &Servers, crew: &Crew) -> anyhow::Result<()> {
    let place = &crew.workers()[random.usize(..crew.workers().len())];
    let what = match (what, servers.broker) {
        (RestartBroker, None) => CutBroker,
        (KillBroker, None) => FreezeBroker,
        _ => what,
    };
    match what {
        RestartBroker => return servers.restart_broker("restart").await,
        KillBroker => return servers.restart_broker("kill").await,
        RestartDatabase => return servers.restart("restart", "postgres").await,
        KillDatabase => return servers.restart("kill", "postgres").await,
        CutBroker => disturb(random, crew, |place| &place.broker, Link::cut).await,
        CutDatabase => disturb(random, crew, |place| &place.postgres, Link::cut).await,
        FreezeBroker => disturb(random, crew, |place| &place.broker, Link::freeze).await,
        FreezeDatabase => disturb(random, crew, |place| &place.postgres, Link::freeze).await,
        ForgetBroker => {
            let _hands = place.hands_off.lock().await;
            place.broker.forget();
            sleep(Duration::from_secs(8)).await;
        }
        ForgetDatabase => {
            let _hands = place.hands_off.lock().await;
            place.postgres.forget();
            sleep(Duration::from_secs(8)).await;
        }
        CutCommits => crew
            .workers()
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
    let one = random.usize(..crew.workers().len());
    let links: Vec<_> = if random.bool() {
        crew.workers().iter().map(&link).collect()
    } else {
        vec![link(&crew.workers()[one])]
    };
    links.iter().for_each(|link| disturb(link));
    sleep(Duration::from_millis(random.u64(LINK_DOWN_MS))).await;
    links.iter().for_each(|link| link.mend());
}
