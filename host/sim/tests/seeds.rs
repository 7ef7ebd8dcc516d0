//! Many seeds, at both overlap depths, each run twice. A seed that fails is reduced and told with the way to run it again.
//!
//! - `PENSTOCK_SIM_SEEDS=n`: n seeds (60 unless told), from `PENSTOCK_SIM_FROM` on (0 unless told).
//! - `PENSTOCK_SIM_SEED=n`: this seed alone; with `PENSTOCK_SIM_DEPTH`, `PENSTOCK_SIM_REQUESTS` and `PENSTOCK_SIM_FAULTS` (a number, see
//!   `Faults`) reduced as a failing run has told.

mod support;

use std::time::Instant;

use penstock_base::Outcome;
use penstock_sim::{Figures, Report, Scenario};
use support::many::{THREADS, all, number, seeds as wanted};
use support::replay::{replayed, scenario, tell};

const SEEDS_DEFAULT: u64 = 60;
const DEPTHS: [usize; 2] = [1, 2];

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

/// One seed at its depths: figures, steps and compared answers.
fn check(seed: u64, depths: &[usize]) -> Result<(Figures, u64, u64), String> {
    let mut reports = Vec::new();
    for depth in depths {
        let scenario = scenario(Scenario::from_seed, seed, *depth);
        match replayed(&scenario) {
            Ok(report) => reports.push(report),
            Err(violation) => return Err(tell("seeds", scenario, violation)),
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
