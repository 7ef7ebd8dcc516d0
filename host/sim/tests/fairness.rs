//! The bound of the virtual token counter (Sheng et al., arXiv 2401.00588), in runs of the whole gateway and its replicas, against flows that
//! flood it, ask for the longest prompts, the longest answers, many answers, next to nothing, leave early, and come and go; with
//! sequences that are preempted. Service is what the executor computed and the clients got, not what the policy counted.
//!
//! First come first served and turns by request break it on the same workload: so the check can fail.

mod support;

use std::ops::Range;

use penstock_base::{Duration, Instant};
use penstock_sim::workload::Planned;
use penstock_sim::{Cast, Report, Scenario, run_with};
use support::compiled::Compiled;
use support::contest::{adversaries, always, arena, bound, widest};
use support::lineup::{ADMISSION, FAIRNESS, Lineup};
use support::wasm::{Components, are_there};

const SEEDS: u64 = 4;
/// Time between two switches.
const EVERY: Duration = Duration::from_ms(700);
const SWITCHES: u64 = 40;

fn scenario(seed: u64) -> Scenario {
    arena(seed, 1 + seed as usize % 2)
}

/// An order, behind an admission that lets everybody in and reserves too little.
fn lineup(order: &'static str) -> Lineup {
    Lineup::twins(128).with(ADMISSION, "stingy", "").with(FAIRNESS, order, "")
}

fn run(scenario: &Scenario, planned: &[Planned], cast: &dyn Cast) -> Report {
    run_with(scenario, planned.to_vec(), cast).unwrap_or_else(|violation| panic!("seed {}: {violation}", scenario.seed))
}

/// The widest difference under an order that stays in its seat.
fn under(order: &'static str, seed: u64) -> u64 {
    let scenario = scenario(seed);
    let planned = adversaries(&scenario);
    let report = run(&scenario, &planned, &Compiled::lasting(&[lineup(order)]));
    if order == "vtc" {
        let figures = &report.figures;
        let met = [figures.preempted, figures.cancelled, figures.completed];
        assert!(
            met.iter().all(|count| *count >= 10) && figures.refused == 0,
            "an adversary did not do what it is there for: {figures:?}"
        );
    }
    widest(&report, &planned, &always())
}

#[test]
fn backlogged_flows_stay_within_the_bound() {
    let widest: Vec<u64> = (0..SEEDS).map(|seed| under("vtc", seed)).collect();
    println!("figure: vtc: service of backlogged flows at most {widest:?} weighted tokens apart, bound {}", bound());
    assert!(widest.iter().all(|widest| *widest <= bound()), "{widest:?} where {} may be", bound());
}

#[test]
fn first_come_first_served_breaks_it() {
    let widest: Vec<u64> = (0..SEEDS).map(|seed| under("class-first", seed)).collect();
    println!("figure: first come first served: {widest:?} weighted tokens apart, bound {}", bound());
    assert!(widest.iter().all(|widest| *widest > 2 * bound()), "{widest:?} is not far beyond {}", bound());
}

#[test]
fn turns_by_request_break_it() {
    let widest: Vec<u64> = (0..SEEDS).map(|seed| under("round-robin", seed)).collect();
    println!("figure: turns by request: {widest:?} weighted tokens apart, bound {}", bound());
    assert!(widest.iter().all(|widest| *widest > 2 * bound()), "{widest:?} is not far beyond {}", bound());
}

/// The same with a switch every so often.
fn switched(seed: u64) -> Scenario {
    let switches = (1..=SWITCHES).map(|number| Instant(number * EVERY.0)).collect();
    Scenario { switches, ..scenario(seed) }
}

#[test]
fn a_new_instance_goes_on_where_the_last_one_was() {
    let lineups = [lineup("vtc"), lineup("vtc").instance(1)];
    let of_seed = |seed| {
        let scenario = switched(seed);
        let planned = adversaries(&scenario);
        let report = run(&scenario, &planned, &Compiled::renewed(&lineups));
        let lasting = run(&scenario, &planned, &Compiled::lasting(&lineups));
        assert!(report == lasting, "a switch between instances changes something");
        widest(&report, &planned, &always())
    };
    let widest: Vec<u64> = (0..SEEDS).map(of_seed).collect();
    println!("figure: vtc, {SWITCHES} changes of instance: {widest:?} weighted tokens apart, bound {}", bound());
    assert!(widest.iter().all(|widest| *widest <= bound()), "{widest:?} where {} may be", bound());
}

/// When `vtc` reigns if every `of`-th generation of `switches` is another policy's, from the first on. Generation 0 is in force from the start.
fn reigns(switches: &[Instant], of: usize) -> Vec<Range<Instant>> {
    let begins = |generation: usize| generation.checked_sub(1).map_or(Instant::ZERO, |last| switches[last]);
    let ends = |generation: usize| switches.get(generation).copied().unwrap_or(Instant::NEVER);
    let its = (0..=switches.len()).filter(|generation| generation % of != 1);
    its.map(|generation| begins(generation)..ends(generation)).collect()
}

fn another_in_between() -> [Lineup; 3] {
    [lineup("vtc"), lineup("class-first"), lineup("vtc").instance(1)]
}

/// The bound holds in each reign of `vtc`, the intervals between set aside, though it comes back knowing nothing and finds flows in the middle
/// of their backlog.
fn in_its_reigns(switches: impl Fn() -> Vec<Instant>) -> Vec<u64> {
    let of_seed = |seed| {
        let scenario = Scenario { switches: switches(), ..scenario(seed) };
        let planned = adversaries(&scenario);
        let report = run(&scenario, &planned, &Compiled::renewed(&another_in_between()));
        widest(&report, &planned, &reigns(&scenario.switches, 3))
    };
    (0..SEEDS).map(of_seed).collect()
}

#[test]
fn another_policy_in_between_does_not_spoil_what_comes_after() {
    let often = in_its_reigns(|| (1..=SWITCHES).map(|number| Instant(number * EVERY.0)).collect());
    let once = in_its_reigns(|| vec![Instant(EVERY.0), Instant(2 * EVERY.0)]);
    println!(
        "figure: vtc in its reigns, first come first served in between: {often:?} weighted tokens apart, {once:?} when it was so once, \
         bound {}",
        bound()
    );
    assert!(often.iter().chain(&once).all(|widest| *widest <= bound()), "{often:?}, {once:?} where {} may be", bound());
}

#[test]
fn components_are_as_fair_and_as_unfair() {
    if !are_there("fairness of components") {
        return;
    }
    let with = |order| Lineup::twins(128).with(FAIRNESS, order, "");
    for seed in 0..2 {
        let scenario = switched(seed);
        let planned = adversaries(&scenario);
        for lineups in [
            vec![with("vtc"), with("vtc").instance(1)],
            vec![with("vtc"), with("class-first"), with("vtc").instance(1)],
            vec![with("round-robin"), with("round-robin").instance(1)],
        ] {
            let native = run(&scenario, &planned, &Compiled::renewed(&lineups));
            let component = run(&scenario, &planned, &Components::new(&lineups));
            assert!(
                native == component,
                "components decide otherwise than the same code natively (are they of this tree? `cargo xtask policies`)"
            );
        }
    }
}
