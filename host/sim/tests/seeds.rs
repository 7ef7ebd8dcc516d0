//! Many seeds, at both overlap depths, each run twice. A seed that fails is reduced and told with the way to run it again.
//!
//! - `PENSTOCK_SIM_SEEDS=n`: n seeds (60 unless told), from `PENSTOCK_SIM_FROM` on (0 unless told).
//! - `PENSTOCK_SIM_SEED=n`: this seed alone; with `PENSTOCK_SIM_DEPTH`, `PENSTOCK_SIM_REQUESTS` and `PENSTOCK_SIM_FAULTS` (a number, see
//!   `Faults`) reduced as a failing run has told.

mod support;

use std::time::Instant;

use penstock_base::Outcome;
use penstock_sim::{Faults, Figures, Report, Scenario, Violation, run};
use support::many::{THREADS, all, number, seeds as wanted};

const SEEDS_DEFAULT: u64 = 60;
const DEPTHS: [usize; 2] = [1, 2];

fn scenario(seed: u64, depth: usize) -> Scenario {
    let mut scenario = Scenario::from_seed(seed, depth);
    if let Some(requests) = number("PENSTOCK_SIM_REQUESTS") {
        scenario.requests = requests as u32;
    }
    if let Some(faults) = number("PENSTOCK_SIM_FAULTS") {
        scenario.faults = Faults(faults as u32);
    }
    scenario
}

/// Runs it twice.
fn replayed(scenario: &Scenario) -> Result<Report, Violation> {
    let report = run(scenario)?;
    let again = run(scenario)?;
    if report != again {
        let what = format!("two runs differ: digests {:x} and {:x}", report.digest, again.digest);
        return Err(Violation { at: report.ended_at, what });
    }
    Ok(report)
}

/// Answers that are complete in both runs, under the same cap, are the same.
fn same_answers(one: &Report, two: &Report) -> Result<u64, String> {
    let complete = |outcome: Option<Outcome>| outcome.is_some_and(Outcome::is_success);
    let mut compared = 0;
    for (index, (one, two)) in one.requests.iter().zip(&two.requests).enumerate() {
        // A stop string may be found a few tokens late, and then the answer is longer: those are compared with the right one only.
        let comparable = complete(one.outcome) && complete(two.outcome) && one.cap == two.cap;
        if comparable && one.usage.output_tokens == two.usage.output_tokens {
            compared += 1;
            if one.answers != two.answers {
                return Err(format!("request {index} gives {:?} and {:?}", one.answers, two.answers));
            }
        }
    }
    Ok(compared)
}

/// What is wrong, without the numbers.
fn kind(violation: &Violation) -> String {
    violation.what.chars().filter(|char| !char.is_ascii_digit()).take(60).collect()
}

/// Fewer requests, then fewer kinds of faults, as long as it fails in the same way.
fn reduce(mut scenario: Scenario, mut violation: Violation) -> (Scenario, Violation) {
    let same = kind(&violation);
    let fails = |scenario: &Scenario| replayed(scenario).err().filter(|found| kind(found) == same);
    let mut cut = scenario.requests / 2;
    while cut > 0 {
        let fewer = Scenario { requests: scenario.requests - cut, ..scenario.clone() };
        match fails(&fewer) {
            Some(found) => (scenario, violation) = (fewer, found),
            None => cut /= 2,
        }
        cut = cut.min(scenario.requests.saturating_sub(1));
    }
    for (_, kind) in Faults::KINDS {
        let without = scenario.without(*kind);
        if scenario.faults.has(*kind)
            && let Some(found) = fails(&without)
        {
            (scenario, violation) = (without, found);
        }
    }
    (scenario, violation)
}

fn tell(scenario: Scenario, violation: Violation) -> String {
    let seed = scenario.seed;
    let depth = scenario.replica.inflight_max;
    let first = format!("seed {seed} at depth {depth}: {violation}");
    let (reduced, violation) = reduce(scenario, violation);
    let commit = std::process::Command::new("git").args(["rev-parse", "--short", "HEAD"]).output();
    let commit =
        commit.map_or_else(|_| "unknown".to_owned(), |out| String::from_utf8_lossy(&out.stdout).trim().to_owned());
    format!(
        "{first}\n  reduced to {} requests and {:?}: {violation}\n  PENSTOCK_SIM_SEED={seed} PENSTOCK_SIM_DEPTH={depth} \
         PENSTOCK_SIM_REQUESTS={} PENSTOCK_SIM_FAULTS={} cargo test --workspace --profile ci --test seeds   # at commit {commit}",
        reduced.requests, reduced.faults, reduced.requests, reduced.faults.0,
    )
}

/// One seed at its depths: figures, steps and compared answers.
fn check(seed: u64, depths: &[usize]) -> Result<(Figures, u64, u64), String> {
    let mut reports = Vec::new();
    for depth in depths {
        let scenario = scenario(seed, *depth);
        match replayed(&scenario) {
            Ok(report) => reports.push(report),
            Err(violation) => return Err(tell(scenario, violation)),
        }
    }
    let (mut figures, mut steps, mut compared) = (Figures::default(), 0, 0);
    for report in &reports {
        figures.add(&report.figures);
        steps += 2 * report.steps;
    }
    if let [one, two] = &reports[..] {
        compared = same_answers(one, two).map_err(|what| format!("seed {seed}: {what} at depths 1 and 2"))?;
    }
    Ok((figures, steps, compared))
}

#[test]
fn seeds() {
    let seeds = wanted(SEEDS_DEFAULT);
    let only = number("PENSTOCK_SIM_DEPTH");
    let depths: Vec<usize> = DEPTHS.into_iter().filter(|depth| only.is_none_or(|only| only == *depth as u64)).collect();
    let begun = Instant::now();
    let (mut figures, mut steps, mut compared) = (Figures::default(), 0, 0);
    for (of_seed, steps_of_seed, compared_of_seed) in all(seeds.clone(), |seed| check(seed, &depths)) {
        figures.add(&of_seed);
        steps += steps_of_seed;
        compared += compared_of_seed;
    }
    let seconds = begun.elapsed().as_secs_f64();
    println!(
        "figure: simulator steps per second {:.0} ({steps} steps in {seconds:.1} s on {THREADS} threads)",
        steps as f64 / seconds
    );
    println!("{figures:?}, {compared} answers compared between depths");
    if seeds.end - seeds.start >= SEEDS_DEFAULT {
        saw_everything(&figures, compared);
    }
}

/// A run over seeds that never met the thing it is about proves nothing.
fn saw_everything(figures: &Figures, compared: u64) {
    let seen = [
        figures.completed,
        figures.refused,
        figures.cancelled,
        figures.timed_out,
        figures.failed,
        figures.retried,
        figures.preempted,
        figures.hit_tokens,
        figures.evicted_blocks,
        figures.copies,
        figures.chained_rows,
        figures.late_tokens,
        figures.epochs_lost,
        figures.gateways_lost,
        figures.cut_outputs,
        figures.degraded,
        figures.stale,
        compared,
    ];
    assert!(seen.iter().all(|count| *count > 0), "something never happened: {figures:?}, {compared} compared");
}
