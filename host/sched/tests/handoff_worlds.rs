//! Hand-offs in virtual time. Every single fault at every step: each party crashes, each link is cut, once after each step of any machine.
//! Then a thousand worlds drawn from seeds: loss, repetition, overtaking, broken chunks, late writes, crashes, partitions, cancels and
//! back-pressure, all at once. One owner at every moment, exactly one end, nothing held once the leases are over, and what is decoded is
//! what was prefilled. The checks are the world's.

#![allow(clippy::disallowed_macros, reason = "figures of a run are printed")]
#![allow(clippy::disallowed_methods, reason = "one seed can be asked for by a variable")]

#[path = "support/handoff_parts.rs"]
mod handoff_parts;
#[path = "support/handoff_world.rs"]
mod handoff_world;

use handoff_parts::Party;
use handoff_world::{Job, Outcome, PARTIES, Spec, Trouble, World};
use penstock_base::{Duration, Instant};
use penstock_sched::handoff::{End, Fallback, Timing};

fn job(at_ms: u64, blocks: u32, fallback: Fallback) -> Job {
    Job { at: Instant(at_ms * 1_000_000), blocks, fallback, cancel_at: None }
}

fn two_jobs() -> Vec<Job> {
    vec![job(2, 5, Fallback::AtSender), job(4, 4, Fallback::Never)]
}

fn ends(outcome: &Outcome) -> Vec<End> {
    outcome.ends.values().copied().collect()
}

#[test]
fn without_faults_everything_is_handed_off() {
    for transport_confirms in [true, false] {
        let outcome = World::new(Spec { jobs: two_jobs(), transport_confirms, ..Spec::default() }).run();
        assert!(ends(&outcome).iter().all(|end| matches!(end, End::HandedOff(_))), "{outcome:?}");
        assert_eq!((outcome.ends.len(), outcome.started, outcome.swept, outcome.stopped), (2, 2, 0, 0));
    }
}

/// Runs every fault after every step of the undisturbed run, and a little beyond.
fn every_step(base: &Spec, faults: &[Trouble]) -> (u64, [u32; 4]) {
    let steps = World::new(base.clone()).run().steps;
    let mut kinds = [0; 4];
    for step in 1..=steps {
        for fault in faults {
            let outcome = World::new(Spec { troubles: vec![(step, *fault)], ..base.clone() }).run();
            for end in outcome.ends.values() {
                kinds[match end {
                    End::HandedOff(_) => 0,
                    End::AtSender(..) => 1,
                    End::Anew(_) => 2,
                    End::Failed(_) | End::Cancelled => 3,
                }] += 1;
            }
        }
    }
    (steps, kinds)
}

fn crashes() -> Vec<Trouble> {
    let downs = [Duration::from_ms(5), Duration::from_s(9)];
    PARTIES.iter().flat_map(|party| downs.map(|down| Trouble::Crash(*party, down))).collect()
}

fn partitions() -> Vec<Trouble> {
    let pairs =
        [(Party::Coordinator, Party::Sender), (Party::Coordinator, Party::Receiver), (Party::Sender, Party::Receiver)];
    let lasts = [Duration::from_s(1), Duration::from_s(4), Duration::from_s(30)];
    pairs.iter().flat_map(|(a, b)| lasts.map(|last| Trouble::Partition(*a, *b, last))).collect()
}

#[test]
fn a_crash_after_every_step() {
    for (transport_confirms, discovery) in [(true, true), (false, true), (true, false), (false, false)] {
        let base = Spec { jobs: two_jobs(), transport_confirms, discovery, ..Spec::default() };
        let (steps, kinds) = every_step(&base, &crashes());
        println!("figure: crash after each of {steps} steps: handed off, at sender, anew, failed = {kinds:?}");
        assert!(steps > 100 && kinds.iter().all(|kind| *kind > 0), "every end is met: {kinds:?}");
    }
}

#[test]
fn a_partition_after_every_step() {
    for transport_confirms in [true, false] {
        let base = Spec { jobs: two_jobs(), transport_confirms, ..Spec::default() };
        let (steps, kinds) = every_step(&base, &partitions());
        println!("figure: partition after each of {steps} steps: handed off, at sender, anew, failed = {kinds:?}");
        assert!(steps > 100 && kinds[0] > 0 && kinds[1] > 0 && kinds[3] > 0, "{kinds:?}");
    }
}

/// SplitMix64.
struct Draw(u64);

impl Draw {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

fn spec(seed: u64) -> Spec {
    let mut draw = Draw(seed);
    let parties = [Party::Coordinator, Party::Sender, Party::Receiver];
    let links = [(parties[0], parties[1]), (parties[0], parties[2]), (parties[1], parties[2])];
    let jobs = (0..1 + draw.below(9)).map(|_| {
        let at = Instant(1_000_000 * (1 + draw.below(400)));
        let cancelled = draw.below(5) == 0;
        Job {
            at,
            blocks: 1 + draw.below(14) as u32,
            fallback: draw.pick(&[Fallback::AtSender, Fallback::Anew, Fallback::Never]),
            cancel_at: cancelled.then(|| at + Duration::from_us(draw.below(60_000))),
        }
    });
    let jobs = jobs.collect();
    let troubles = (0..draw.below(5)).map(|_| {
        let step = 1 + draw.below(600);
        let (a, b) = draw.pick(&links);
        let trouble = match draw.below(5) {
            0 | 1 => Trouble::Crash(draw.pick(&parties), Duration::from_ms(1 + draw.below(6_000))),
            2 | 3 => Trouble::Partition(a, b, Duration::from_ms(1 + draw.below(12_000))),
            _ => Trouble::Window(draw.below(4) as u32),
        };
        (step, trouble)
    });
    let troubles = troubles.collect();
    Spec {
        seed,
        jobs,
        troubles,
        loss_ppm: draw.pick(&[0, 0, 10_000, 100_000, 300_000]),
        twice_ppm: draw.pick(&[0, 50_000, 300_000]),
        broken_ppm: draw.pick(&[0, 0, 20_000, 400_000]),
        latency_us: draw.pick(&[200, 2_000, 30_000, 300_000]),
        late_ppm: draw.pick(&[0, 50_000]),
        transport_confirms: draw.below(3) > 0,
        discovery: draw.below(3) > 0,
        copied: false,
        timing: Timing { transfer: Duration::from_s(30), ..Timing::default() },
    }
}

#[test]
fn machines_that_are_written_down_and_read_back_after_each_step_go_on_alike() {
    for seed in (0..1_000).step_by(25) {
        let copied = World::new(Spec { copied: true, ..spec(seed) }).run();
        assert_eq!(copied, World::new(spec(seed)).run(), "seed {seed}");
    }
}

#[test]
fn a_thousand_seeds() {
    let repeated = std::env::var("PENSTOCK_HANDOFF_SEED").ok().and_then(|seed| seed.parse().ok());
    let seeds = repeated.map_or(0..1_000, |seed: u64| seed..seed + 1);
    let whole = repeated.is_none();
    let (mut steps, mut kinds) = (0, [0u32; 5]);
    let (mut swept, mut late, mut stopped, mut throttled, mut lost) = (0, 0, 0, 0, 0);
    for seed in seeds {
        let outcome = World::new(spec(seed)).run();
        if seed % 50 == 0 {
            assert_eq!(World::new(spec(seed)).run(), outcome, "the same again");
        }
        steps += outcome.steps;
        for end in outcome.ends.values() {
            kinds[match end {
                End::HandedOff(_) => 0,
                End::AtSender(..) => 1,
                End::Anew(_) => 2,
                End::Failed(_) => 3,
                End::Cancelled => 4,
            }] += 1;
        }
        swept += outcome.swept;
        late += outcome.writes_into_quarantine;
        stopped += outcome.stopped;
        throttled += outcome.throttled;
        lost += outcome.lost_with_coordinator;
    }
    println!(
        "figure: {steps} steps; handed off, at sender, anew, failed, cancelled = {kinds:?}, lost with a coordinator {lost}"
    );
    println!(
        "figure: swept {swept}, writes that ended in quarantine {late}, stopped {stopped}, back-pressure {throttled}"
    );
    let met = [swept, late, stopped, throttled, lost].into_iter().chain(kinds).all(|count| count > 0);
    assert!(met || !whole, "the seeds meet every kind of end");
}
