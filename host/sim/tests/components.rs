//! The components in the seats of whole runs: what they decide is what the same code decides natively, switches included.
//!
//! Each seed runs at one overlap depth, odd ones at two, under its faults, and every gateway switches to another policy set three times on
//! the way. Three casts, each run twice over:
//!
//! - *twins*: the host's native defaults, and components of the same code. No switch may show.
//! - *shipped*: the policies that are shipped as the default, compiled into this test and as components. The components switch to new
//!   instances, which take the state over; the compiled ones go on. No switch may show here either.
//! - *mixed*: from one policy to another and back. Every rule of the simulator holds, and fresh instances repeat the run.
//!
//! Components of another tree than this one decide otherwise: `cargo xtask policies` makes them. Variables as in `seeds.rs`.

mod support;

use std::time::Instant as Clock;

use penstock_base::Instant;
use penstock_sim::rng::Rng;
use penstock_sim::{Cast, Faults, Natives, Report, Scenario, Violation, run_with, workload};
use support::compiled::Compiled;
use support::lineup::{ADMISSION, EVICTION, FAIRNESS, Lineup, OVERLOAD, ROUTING};
use support::many::{all, number, seeds};
use support::wasm::{Components, are_there};

const SEEDS_DEFAULT: u64 = 60;
/// Switches of every gateway in a run, beside those that are among its faults.
const SWITCHES: usize = 3;
/// Steps between two walks over the invariants where the same states are walked in another run.
const SELDOM: u64 = 64;

fn scenario(seed: u64) -> Scenario {
    let depth = number("PENSTOCK_SIM_DEPTH").map_or(1 + seed as usize % 2, |depth| depth as usize);
    let mut scenario = Scenario::from_seed(seed, depth);
    if let Some(requests) = number("PENSTOCK_SIM_REQUESTS") {
        scenario.requests = requests as u32;
    }
    if let Some(faults) = number("PENSTOCK_SIM_FAULTS") {
        scenario.faults = Faults(faults as u32);
    }
    let last = workload::requests(&scenario).last().map_or(0, |planned| planned.at.0);
    let rng = &mut Rng::stream(seed, 30);
    scenario.switches = (0..SWITCHES).map(|_| Instant(rng.below(last + 1))).collect();
    scenario.switches.sort_unstable();
    scenario
}

fn run(scenario: &Scenario, cast: &dyn Cast, check_every: u64) -> Result<Report, Violation> {
    let scenario = Scenario { check_every, ..scenario.clone() };
    run_with(&scenario, workload::requests(&scenario), cast)
}

/// Both casts give the same run, to the digest of every machine.
fn same(scenario: &Scenario, one: &dyn Cast, two: &dyn Cast) -> Result<Report, String> {
    let (seed, depth) = (scenario.seed, scenario.replica.inflight_max);
    let told = |what: String| {
        format!(
            "seed {seed} at depth {depth}: {what}\n  PENSTOCK_SIM_SEED={seed} PENSTOCK_SIM_DEPTH={depth} cargo test --workspace \
             --profile ci --test components"
        )
    };
    let first = run(scenario, one, 1).map_err(|violation| told(format!("first: {violation}")))?;
    let second = run(scenario, two, SELDOM).map_err(|violation| told(format!("second: {violation}")))?;
    if first == second {
        return Ok(first);
    }
    let differs = first.requests.iter().zip(&second.requests).position(|(first, second)| first != second);
    Err(told(format!(
        "two runs differ: digests {:x} and {:x}, {} and {} steps, first request that differs {differs:?}",
        first.digest, second.digest, first.steps, second.steps
    )))
}

/// Runs it over all seeds and says how much that was.
fn over_seeds(what: &str, check: impl Fn(&Scenario) -> Result<Report, String> + Sync) {
    if !are_there(what) {
        return;
    }
    let (begun, wanted) = (Clock::now(), seeds(SEEDS_DEFAULT));
    let count = wanted.end - wanted.start;
    let reports = all(wanted, |seed| check(&scenario(seed)).map(|report| (report.steps, report.figures.dispatched)));
    let (steps, dispatched) = reports.iter().fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
    assert!(dispatched > count, "a run that places nothing proves nothing");
    println!(
        "figure: {what}: {count} seeds, {steps} steps and {dispatched} placements compared in {:.1} s",
        begun.elapsed().as_secs_f64()
    );
}

#[test]
fn twins_decide_as_the_native_defaults_do() {
    over_seeds("twins of the native defaults", |scenario| {
        let twins = Lineup::twins(scenario.gateway.context_tokens_max);
        let components = Components::new(&[twins.clone(), twins.instance(1)]);
        same(scenario, &Natives, &components)
    });
}

#[test]
fn shipped_components_decide_as_the_same_code_does_natively() {
    over_seeds("shipped policies", |scenario| {
        let lineups = [Lineup::shipped(), Lineup::shipped().instance(1)];
        same(scenario, &Compiled::lasting(&lineups), &Components::new(&lineups))
    });
}

#[test]
fn switches_between_policies_break_no_rule_and_repeat() {
    over_seeds("switches between policies", |scenario| {
        let twins = Lineup::twins(scenario.gateway.context_tokens_max);
        let lineups = [
            Lineup::shipped(),
            twins.clone().with(FAIRNESS, "round-robin", "").with(EVICTION, "gdsf", ""),
            Lineup::shipped().instance(1).with(ROUTING, "load-overlap", r#"{"wait-max-us":0}"#).with(
                FAIRNESS,
                "vtc",
                r#"{"weights":{"output":4}}"#,
            ),
            Lineup::shipped().with(ADMISSION, "bounded", "").with(EVICTION, "lru", "").with(
                OVERLOAD,
                "ladder",
                &twins.0[OVERLOAD].parameters,
            ),
        ];
        same(scenario, &Components::new(&lineups), &Components::new(&lineups))
    });
}
