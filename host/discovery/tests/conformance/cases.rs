//! What every implementation must do.

use std::time::{Duration, Instant};

use penstock_discovery::{Discovery, DiscoveryError, Event, Settings, Standing, WorkerState};
use tokio::time::timeout;

use super::{Arena, PATIENCE, ids, next, next_change, record, settings, until};

/// Makes one test of each case.
macro_rules! suite {
    ($arena:ty) => {
        crate::cases::each!($arena: joins_and_leaves, says_what_changed, lease_runs_out, later_epoch_replaces, starts_late,
            falls_behind, reads_again, survives_an_outage, starts_in_an_outage, full);
    };
}
pub(crate) use suite;

macro_rules! each {
    ($arena:ty: $($case:ident),+) => {
        $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $case() {
            crate::cases::$case::<$arena>().await;
        })+
    };
}
pub(crate) use each;

macro_rules! open {
    ($arena:ty, $settings:expr) => {
        match <$arena>::open($settings).await {
            Some(arena) => arena,
            None => return,
        }
    };
}

fn figure<A: Arena>(what: &str, since: Instant) {
    let place = std::any::type_name::<A>().rsplit("::").nth(1).unwrap_or_default();
    println!("figure: {place}: {what} {:.2?}, with a lease of {:?}", since.elapsed(), settings().lease);
}

pub async fn joins_and_leaves<A: Arena>() {
    let arena = open!(A, settings());
    arena.host("w-0").await;
    let mut watch = arena.client().watch();
    assert_eq!(next(&mut watch).await, Event::Snapshot(vec![]));
    let registration = arena.client().register(record("w-0", 7)).await.unwrap();
    assert_eq!(next_change(&mut watch).await, Event::Joined(record("w-0", 7).into()));
    assert_eq!(registration.standing(), Standing::Announced);
    registration.deregister().await.unwrap();
    assert_eq!(next_change(&mut watch).await, Event::Left { id: "w-0".parse().unwrap(), epoch: 7 });
    assert_eq!(ids(&watch), Vec::<String>::new());
}

pub async fn says_what_changed<A: Arena>() {
    let arena = open!(A, settings());
    arena.host("w-0").await;
    let registration = arena.client().register(record("w-0", 7)).await.unwrap();
    let mut watch = arena.client().watch();
    assert_eq!(next(&mut watch).await, Event::Snapshot(vec![record("w-0", 7).into()]));
    let mut draining = record("w-0", 7);
    draining.state = WorkerState::Draining;
    registration.update(draining.clone()).await.unwrap();
    assert_eq!(next_change(&mut watch).await, Event::Changed(draining.into()));
    let refused = registration.update(record("w-1", 7)).await.unwrap_err();
    assert!(refused.to_string().contains("the registration is of worker w-0 in epoch 7"), "{refused}");
    let refused = registration.update(record("w-0", 8)).await.unwrap_err();
    assert!(refused.to_string().contains("the registration is of worker w-0 in epoch 7"), "{refused}");
}

pub async fn lease_runs_out<A: Arena>() {
    let arena = open!(A, settings());
    arena.host("dies").await;
    arena.host("lives").await;
    let dies = arena.client().register(record("dies", 1)).await.unwrap();
    let _lives = arena.client().register(record("lives", 1)).await.unwrap();
    let mut watch = arena.client().watch();
    until(|| ids(&watch) == ["dies", "lives"], "both").await;
    arena.crash("dies", dies).await;
    let crashed = Instant::now();
    let mut left = Vec::new();
    let three_leases = Instant::now() + 3 * settings().lease;
    while left.is_empty() || Instant::now() < three_leases {
        match timeout(Duration::from_secs(1), watch.next()).await {
            Ok(Event::Left { id, .. }) => {
                figure::<A>("a crash is noticed after", crashed);
                left.push(id.to_string());
            }
            Ok(_) => {}
            Err(_) => assert!(Instant::now() < three_leases + PATIENCE, "never left"),
        }
    }
    assert_eq!(left, ["dies"], "whoever renews stays");
    assert_eq!(ids(&watch), ["lives"]);
}

pub async fn later_epoch_replaces<A: Arena>() {
    let arena = open!(A, settings());
    arena.host("w-0").await;
    let mut old = arena.client().register(record("w-0", 5)).await.unwrap();
    let mut watch = arena.client().watch();
    assert_eq!(next(&mut watch).await, Event::Snapshot(vec![record("w-0", 5).into()]));
    let new = arena.client().register(record("w-0", 6)).await.unwrap();
    let restarted = Event::Restarted { old_epoch: 5, record: record("w-0", 6).into() };
    assert_eq!(next_change(&mut watch).await, restarted);
    // The older life learns that it is over, and takes nothing of the later one with it.
    let over = loop {
        match timeout(PATIENCE, old.changed()).await.expect("a change").unwrap() {
            Standing::Over(why) => break why,
            _ => continue,
        }
    };
    assert_eq!(over, DiscoveryError::Superseded { id: "w-0".parse().unwrap(), epoch: 5, newer: 6 });
    assert_eq!(old.deregister().await, Err(DiscoveryError::Ended));
    // And one that is older still is not let in.
    let refused = arena.client().register(record("w-0", 4)).await.err();
    assert_eq!(refused, Some(DiscoveryError::Superseded { id: "w-0".parse().unwrap(), epoch: 4, newer: 6 }));
    assert_eq!(new.standing(), Standing::Announced);
    assert_eq!(watch.view().workers, [record("w-0", 6).into()]);
    assert_eq!(watch.try_next(), None);
}

pub async fn starts_late<A: Arena>() {
    let arena = open!(A, settings());
    let mut kept = Vec::new();
    for id in ["a", "b", "c"] {
        arena.host(id).await;
        kept.push(arena.client().register(record(id, 1)).await.unwrap());
    }
    kept.remove(1).deregister().await.unwrap();
    let mut watch = arena.client().watch();
    assert_eq!(next(&mut watch).await, Event::Snapshot(vec![record("a", 1).into(), record("c", 1).into()]));
}

pub async fn falls_behind<A: Arena>() {
    let arena = open!(A, Settings { queue_max: 3, ..settings() });
    let mut watch = arena.client().watch();
    assert_eq!(next(&mut watch).await, Event::Snapshot(vec![]));
    let mut kept = Vec::new();
    let names = ["a", "b", "c", "d", "e", "f"];
    for id in names {
        arena.host(id).await;
        kept.push(arena.client().register(record(id, 1)).await.unwrap());
    }
    until(|| ids(&watch) == names, "all six").await;
    // Six changes were due and three have room: all of them are replaced by the set.
    let all = names.map(|id| record(id, 1).into()).to_vec();
    assert_eq!(next_change(&mut watch).await, Event::Snapshot(all));
    kept.pop().unwrap().deregister().await.unwrap();
    assert_eq!(next_change(&mut watch).await, Event::Left { id: "f".parse().unwrap(), epoch: 1 });
}

pub async fn reads_again<A: Arena>() {
    let arena = open!(A, settings());
    arena.host("a").await;
    let mut watch = arena.client().watch();
    assert_eq!(next(&mut watch).await, Event::Snapshot(vec![]));
    watch.resync();
    let _a = arena.client().register(record("a", 1)).await.unwrap();
    assert_eq!(next_change(&mut watch).await, Event::Joined(record("a", 1).into()));
    watch.resync();
    arena.host("b").await;
    let _b = arena.client().register(record("b", 1)).await.unwrap();
    // What is known already is not told again.
    assert_eq!(next_change(&mut watch).await, Event::Joined(record("b", 1).into()));
}

pub async fn survives_an_outage<A: Arena>() {
    let mut arena = open!(A, settings());
    arena.host("a").await;
    arena.host("b").await;
    let registration = arena.client().register(record("a", 1)).await.unwrap();
    let mut watch = arena.client().watch();
    assert_eq!(next(&mut watch).await, Event::Snapshot(vec![record("a", 1).into()]));
    assert_eq!(watch.view().stale, None);

    arena.lose().await;
    let Event::Stale { why } = next(&mut watch).await else { panic!("the outage is not told") };
    assert!(!why.is_empty());
    let lease = settings().lease;
    until(|| watch.view().stale.is_some_and(|age| age > 2 * lease), "two leases without the service").await;
    assert_eq!(ids(&watch), ["a"], "nobody leaves because the service does not answer");
    assert_eq!(watch.try_next(), None);

    arena.restore().await;
    let restored = Instant::now();
    assert_eq!(next(&mut watch).await, Event::Fresh, "and nobody left and joined again on the way");
    figure::<A>("the service's return is noticed after", restored);
    assert_eq!(watch.view().stale, None);
    until(|| registration.standing() == Standing::Announced, "the registration stands again").await;
    figure::<A>("a registration stands again after", restored);
    let _b = arena.client().register(record("b", 1)).await.unwrap();
    assert_eq!(next_change(&mut watch).await, Event::Joined(record("b", 1).into()));
    let two_leases = Instant::now() + 2 * lease;
    until(|| Instant::now() > two_leases, "two leases").await;
    assert_eq!(ids(&watch), ["a", "b"], "both renew");
    assert_eq!(watch.try_next(), None);
}

pub async fn starts_in_an_outage<A: Arena>() {
    let mut arena = open!(A, settings());
    arena.host("a").await;
    let registration = arena.client().register(record("a", 1)).await.unwrap();
    let client = arena.client();
    arena.lose().await;
    let mut watch = client.watch();
    assert!(matches!(next(&mut watch).await, Event::Stale { .. }));
    assert!(watch.view().stale.is_some());
    let refused = client.register(record("a", 2)).await.err();
    assert!(matches!(refused, Some(DiscoveryError::Unreachable { .. })), "{refused:?}");
    arena.restore().await;
    until(|| registration.standing() == Standing::Announced, "the registration stands again").await;
    until(|| ids(&watch) == ["a"], "the worker").await;
    assert!(matches!(next(&mut watch).await, Event::Snapshot(_)));
}

pub async fn full<A: Arena>() {
    let arena = open!(A, settings());
    let mut kept = Vec::new();
    for id in ["a", "b", "c"] {
        arena.host(id).await;
        kept.push(arena.client().register(record(id, 1)).await.unwrap());
    }
    let narrow = arena.narrow(2);
    let watch = narrow.watch();
    until(|| watch.view().workers.len() == 2, "two workers").await;
    until(|| watch.view().turned_away > 0, "one turned away").await;
    let view = watch.view();
    assert_eq!(view.faults.len(), 1);
    assert!(view.faults[0].1.contains("2 workers are known, and more are not taken"), "{:?}", view.faults);
}
