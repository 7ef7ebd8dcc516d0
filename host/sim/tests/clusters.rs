//! Clusters of replicas that compute prompts, decode, or do both, behind one to three gateways, over links that fail: many seeds, one
//! in four run twice. A seed that fails is reduced and told with the way to run it again; variables as in `seeds`.

mod support;

use std::time::Instant;

use penstock_sim::{Figures, Scenario, run};
use support::many::{THREADS, all, number, seeds as wanted};
use support::replay::{replayed, scenario, tell};

const SEEDS_DEFAULT: u64 = 60;

/// One seed, at one of the depths in turn.
fn check(seed: u64) -> Result<(Figures, u64), String> {
    let depth = number("PENSTOCK_SIM_DEPTH").unwrap_or(1 + seed % 2) as usize;
    let scenario = scenario(Scenario::cluster_from_seed, seed, depth);
    let twice = seed.is_multiple_of(4);
    match if twice { replayed(&scenario) } else { run(&scenario) } {
        Ok(report) => Ok((report.figures, (1 + u64::from(twice)) * report.steps)),
        Err(violation) => Err(tell("clusters", scenario, violation)),
    }
}

#[test]
fn clusters() {
    let seeds = wanted(SEEDS_DEFAULT);
    let begun = Instant::now();
    let (mut figures, mut steps) = (Figures::default(), 0);
    for (of_seed, steps_of_seed) in all(seeds.clone(), check) {
        figures.add(&of_seed);
        steps += steps_of_seed;
    }
    let seconds = begun.elapsed().as_secs_f64();
    println!(
        "figure: clusters, steps per second {:.0} ({steps} steps in {seconds:.1} s on {THREADS} threads)",
        steps as f64 / seconds
    );
    println!("{figures:?}");
    if seeds.end - seeds.start >= SEEDS_DEFAULT {
        saw_everything(&figures);
    }
}

/// A run over seeds that never met the thing it is about proves nothing.
fn saw_everything(figures: &Figures) {
    let seen = [
        figures.completed,
        figures.failed,
        figures.retried,
        figures.epochs_lost,
        figures.gateways_lost,
        figures.handed_off,
        figures.kept_at_sender,
        figures.handed_back,
        figures.handoffs_ended,
        figures.swept,
        figures.early_chunks,
        figures.writes_turned_away,
        figures.late_writes,
        figures.lost_words,
        figures.sessions_lost,
    ];
    assert!(seen.iter().all(|count| *count > 0), "something never happened: {figures:?}");
}
