//! Under sixteen streams every seat is swapped a hundred times, most of them for components that are broken in one way or another: no request
//! fails, no token changes, what is broken never serves for long, and whoever asks hears which policy it was and why.

#[path = "support/seated.rs"]
mod seated;
mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::time::{Duration as StdDuration, Instant as Moment};

use penstock_base::{Duration, Outcome};
use penstock_engine::{ActivationError, EngineConfig, Machine, ReplicaState};
use penstock_exec::SamplingParams;
use penstock_hostile_guests::{Caught, Hostile};
use penstock_policy_api::Decision;
use penstock_policy_wasm::Digest;
use penstock_sched::gateway::GatewayConfig;
use seated::{Said, Shop, Word};
use support::{PATIENCE, Rig, Sizes, answer, prompt, read};

const SWAPS_PER_SEAT: usize = 100;
const STREAMS: u32 = 16;
const REPLICAS: usize = 2;
/// Seats with instances: four at the gateway, two at each replica.
const SEATS: usize = 4 + 2 * REPLICAS;

/// A rig whose five seats are components, version 1 of them.
struct Stage {
    shop: Shop,
    heard: Receiver<Word>,
    rig: Arc<Rig>,
    /// Good ones of each seat, by version.
    good: [[Digest; 2]; 5],
    /// The set in force, as far as it is good.
    seats: [Digest; 5],
}

fn load_good(shop: &Shop, decision: Decision, version: &str, state_bytes: u32) -> Digest {
    let bytes = penstock_hostile_guests::stateful(decision.name(), version, state_bytes).expect("well-formed");
    shop.load_good(&bytes)
}

impl Stage {
    fn new(state_bytes: u32) -> Self {
        let (shop, heard) = Shop::open();
        let good = Decision::ALL.map(|seat| ["1", "2"].map(|version| load_good(&shop, seat, version, state_bytes)));
        let seats = good.map(|versions| versions[0]);
        // Ticks of overload as close as they may be: it is asked as often as the others.
        let gateway = GatewayConfig { overload_tick: Duration::from_ms(10), ..GatewayConfig::default() };
        let policies = shop.source(&seated_in(&seats));
        let config = EngineConfig { policies, gateway, ..EngineConfig::default() };
        // Few blocks, so that what is cached must leave.
        let sizes = Sizes { slots: 6, blocks: 64, ..Sizes::default() };
        let rig = Rig::new(REPLICAS, sizes, config);
        rig.wait_until("replicas", |status| status.replicas.iter().all(|r| r.state == ReplicaState::Ready));
        Self { shop, heard, rig: Arc::new(rig), good, seats }
    }

    /// The present set with another component in one seat.
    fn with(&self, seat: Decision, digest: Digest) -> Vec<(Decision, Digest)> {
        let mut seats = self.seats;
        seats[seat as usize] = digest;
        seated_in(&seats)
    }

    fn activate(&self, seat: Decision, digest: Digest) -> Result<(), ActivationError> {
        let before = self.rig.engine.policy_generation();
        let done = self.rig.engine.activate(&self.shop.source(&self.with(seat, digest)));
        let moved = self.rig.engine.policy_generation().0 - before.0;
        assert_eq!(moved > 0, done.is_ok(), "what is refused changes nothing");
        self.assert_bounded();
        done.map(drop)
    }

    /// Instances of at most two generations and what the reaper has not come to; of a few, not of as many as were ever made.
    fn assert_bounded(&self) {
        let leaving = self.rig.engine.policies_leaving();
        let alive = self.shop.instances_alive();
        assert!(leaving <= 2 * (1 + REPLICAS), "{leaving} sets wait for their end");
        assert!(alive <= 4 * SEATS, "{alive} instances live");
    }

    fn activate_good(&mut self, seat: Decision, version: usize) {
        let digest = self.good[seat as usize][version];
        self.activate(seat, digest).unwrap_or_else(|error| panic!("{seat:?}: {error}"));
        self.seats[seat as usize] = digest;
    }

    /// Waits until `digest` is in quarantine somewhere; everything that it failed with until then.
    fn await_quarantine(&self, hostile: &Hostile, seat: Decision, digest: Digest) -> Vec<String> {
        let mut failed = Vec::new();
        let deadline = Moment::now() + PATIENCE;
        while Moment::now() < deadline {
            let Ok(word) = self.heard.recv_timeout(StdDuration::from_millis(100)) else { continue };
            if word.digest != digest {
                panic!("{word:?} while {} is in the seat of {seat:?}", hostile.name);
            }
            assert_eq!((word.decision, &*word.policy), (seat, "hostile"));
            match word.said {
                Said::Failed(why) => failed.push(why),
                Said::Quarantined => return failed,
            }
        }
        panic!("{seat:?} {} stays in force: {failed:?}", hostile.name);
    }

    /// What was said of `digest` so far, and nothing of any other.
    fn said_of(&self, digest: Digest) -> Vec<String> {
        let said = self.heard.try_iter().filter_map(|word| {
            assert_eq!(word.digest, digest, "{word:?}");
            if let Said::Failed(why) = word.said { Some(why) } else { None }
        });
        said.collect()
    }
}

fn seated_in(seats: &[Digest; 5]) -> Vec<(Decision, Digest)> {
    Decision::ALL.into_iter().map(|decision| (decision, seats[decision as usize])).collect()
}

fn says(hostile: &Hostile, said: &str) -> bool {
    hostile.says.iter().all(|words| said.contains(words))
}

/// What became of those that were tried.
#[derive(Default, Debug)]
struct Fates {
    not_loaded: usize,
    not_activated: usize,
    quarantined: usize,
    /// Served without harm: bounded ones, and those whose state was lost.
    harmless: usize,
    good: usize,
}

/// Puts one into its seat and sees it gone, or kept out, for the reason that it states.
fn meet(stage: &mut Stage, seat: Decision, hostile: &Hostile, fates: &mut Fates) {
    let name = hostile.name;
    let digest = match stage.shop.load(&hostile.bytes) {
        Ok(digest) => digest,
        Err(why) => {
            assert!(hostile.caught == Caught::Load && says(hostile, &why), "{seat:?} {name}: {why}");
            fates.not_loaded += 1;
            return;
        }
    };
    match stage.activate(seat, digest) {
        Err(ActivationError::Refused { machine, why }) => {
            assert!(why.starts_with(seat.name()) && says(hostile, &why), "{seat:?} {name}: {why}");
            let is_there =
                if seat == Decision::Eviction { machine != Machine::Gateway } else { machine == Machine::Gateway };
            assert!(is_there, "{seat:?} {name} was refused at the {machine}");
            assert!(hostile.caught != Caught::Observe && hostile.caught != Caught::Nowhere, "{seat:?} {name}");
            fates.not_activated += 1;
            return;
        }
        Err(error) => panic!("{seat:?} {name}: {error}"),
        Ok(()) => {}
    }
    match hostile.caught {
        Caught::Load => panic!("{seat:?} {name} serves"),
        Caught::Decide | Caught::Malformed | Caught::Observe | Caught::Save => {
            let failed = stage.await_quarantine(hostile, seat, digest);
            assert!(!failed.is_empty() && failed.iter().all(|why| says(hostile, why)), "{seat:?} {name}: {failed:?}");
            fates.quarantined += 1;
        }
        Caught::Restore | Caught::Nowhere => fates.harmless += 1,
    }
    // The last good one comes back.
    stage.activate_good(seat, 0);
    stage.rig.wait_until("the end of what left", |_| stage.rig.engine.policies_leaving() == 0);
    let failed = stage.said_of(digest);
    assert!(failed.iter().all(|why| says(hostile, why)), "{seat:?} {name}: {failed:?}");
}

/// A hundred for one seat: every late one, every one that its seat would have to meet, then as many of those that cannot be loaded as there is
/// room for, good ones in between.
fn hundred(seat: Decision) -> Vec<Option<Hostile>> {
    let late = penstock_hostile_guests::late(seat.name()).expect("well-formed");
    let mut at_once = penstock_hostile_guests::list(seat.name()).expect("well-formed");
    // A stable sort: imports that are not offered are among the first that remain.
    at_once.sort_by_key(|hostile| hostile.caught == Caught::Load);
    let mut swaps: Vec<_> = late.into_iter().chain(at_once).map(Some).collect();
    swaps.truncate(SWAPS_PER_SEAT - 10);
    for at in 0..10 {
        swaps.insert(at * swaps.len() / 10, None);
    }
    swaps.resize_with(SWAPS_PER_SEAT, || None);
    swaps
}

/// Sixteen clients, one request after the other each, until `done`. How many were served, every one with the tokens of an undisturbed run.
fn clients(rig: &Rig, done: &AtomicBool) -> usize {
    std::thread::scope(|scope| {
        let client = |which: u32| {
            let mut served = 0;
            while !done.load(Ordering::Relaxed) {
                let prompt = prompt(which + served % 3, 4 + which % 9);
                let got = read(&mut rig.submit(rig.submission(&prompt, 24)));
                assert_eq!(got.outcome(), Outcome::Length, "no request fails");
                assert_eq!(got.tokens, [answer(&prompt, &SamplingParams::default(), 24)]);
                served += 1;
            }
            served as usize
        };
        let threads: Vec<_> = (0..STREAMS).map(|which| scope.spawn(move || client(which))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a client that is content")).sum()
    })
}

/// Runs `body` beside sixteen streams, which end however it ends. How many requests they had served.
fn beside_streams(stage: &mut Stage, body: impl FnOnce(&mut Stage)) -> usize {
    struct End<'a>(&'a AtomicBool);
    impl Drop for End<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let done = AtomicBool::new(false);
    let rig = Arc::clone(&stage.rig);
    std::thread::scope(|scope| {
        let clients = scope.spawn(|| clients(&rig, &done));
        let end = End(&done);
        body(stage);
        drop(end);
        clients.join().expect("clients that are content")
    })
}

fn swap_a_seat(seat: Decision) {
    let mut stage = Stage::new(64);
    let mut fates = Fates::default();
    let served = beside_streams(&mut stage, |stage| {
        let mut version = 0;
        for swap in hundred(seat) {
            match swap {
                None => {
                    version = 1 - version;
                    stage.activate_good(seat, version);
                    fates.good += 1;
                }
                Some(hostile) => meet(stage, seat, &hostile, &mut fates),
            }
        }
    });
    stage.rig.wait_until_empty();
    println!("figure: {} swapped {SWAPS_PER_SEAT} times beside {served} requests: {fates:?}", seat.name());
    assert!(served >= STREAMS as usize);
    let Fates { not_loaded, not_activated, quarantined, harmless, good } = fates;
    assert_eq!(not_loaded + not_activated + quarantined + harmless + good, SWAPS_PER_SEAT);
    let each = [not_loaded >= 5, not_activated >= 30, quarantined >= 20, harmless >= 2, good >= 10];
    assert!(each.iter().all(|met| *met), "each kind was met: {each:?}");
    assert_eq!(stage.rig.metric("penstock_replica_freezes_total"), 0.0);
    stage.rig.wait_until("the end of what left", |_| stage.rig.engine.policies_leaving() == 0);
    assert_eq!(stage.shop.instances_alive(), SEATS, "one instance a seat, nothing of any that was there before");
}

#[test]
fn admission_is_swapped_a_hundred_times() {
    swap_a_seat(Decision::Admission);
}

#[test]
fn routing_is_swapped_a_hundred_times() {
    swap_a_seat(Decision::Routing);
}

#[test]
fn fairness_is_swapped_a_hundred_times() {
    swap_a_seat(Decision::Fairness);
}

#[test]
fn eviction_is_swapped_a_hundred_times() {
    swap_a_seat(Decision::Eviction);
}

#[test]
fn overload_is_swapped_a_hundred_times() {
    swap_a_seat(Decision::Overload);
}

/// What a swap costs a machine, at its step boundary, beside sixteen streams. Every seat changes.
#[test]
fn a_swap_with_state_is_measured() {
    const SWAPS: usize = 400;
    for state_bytes in [0, 4 << 10, 64 << 10] {
        let mut stage = Stage::new(state_bytes);
        let served = beside_streams(&mut stage, |stage| {
            for swap in 0..SWAPS {
                let seats = stage.good.map(|versions| versions[(swap + 1) % 2]);
                let done = stage.rig.engine.activate(&stage.shop.source(&seated_in(&seats))).expect("nothing is wrong");
                assert_eq!((done.pauses.len(), done.late.len()), (1 + REPLICAS, 0));
            }
        });
        let pauses = stage.shop.take_pauses();
        assert_eq!(pauses.len(), SWAPS * (1 + REPLICAS));
        for (machine, is_gateway) in [("gateway, four seats", true), ("replica, two seats", false)] {
            let here = || pauses.iter().filter(|pause| (pause.machine == Machine::Gateway) == is_gateway);
            let figures = |what: &str, mut pauses: Vec<u64>| {
                pauses.sort_unstable();
                let at =
                    |percent: usize| pauses.get(pauses.len().saturating_sub(1) * percent / 100).copied().unwrap_or(0);
                println!(
                    "figure: swap pause, {state_bytes} bytes of state a seat, {machine}, {what} ({}): p50 {} ns, p99 {} ns, largest {} ns; goal 1000000 ns",
                    pauses.len(),
                    at(50),
                    at(99),
                    at(100),
                );
            };
            figures("all swaps", here().map(|pause| pause.ns).collect());
            figures(
                "those in which the thread kept its core",
                here().filter(|pause| !pause.is_disturbed).map(|pause| pause.ns).collect(),
            );
        }
        println!("figure: {served} requests were served beside {SWAPS} swaps of five seats");
        stage.rig.wait_until_empty();
        assert!(stage.heard.try_recv().is_err(), "nothing failed");
    }
}
