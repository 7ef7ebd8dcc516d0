//! A scenario that is run twice; one that fails is reduced and told with the way to run it again.

use penstock_sim::{Faults, Report, Scenario, Violation, run};

use super::many::number;

/// Makes the scenario of a seed at a depth.
pub type Make = fn(u64, usize) -> Scenario;

/// The scenario of a seed, or what a failing run has told of it.
pub fn scenario(make: Make, seed: u64, depth: usize) -> Scenario {
    let mut scenario = make(seed, depth);
    if let Some(requests) = number("PENSTOCK_SIM_REQUESTS") {
        scenario.requests = requests as u32;
    }
    if let Some(faults) = number("PENSTOCK_SIM_FAULTS") {
        scenario.faults = Faults(faults as u32);
    }
    scenario
}

/// Runs it twice.
pub fn replayed(scenario: &Scenario) -> Result<Report, Violation> {
    let report = run(scenario)?;
    let again = run(scenario)?;
    if report != again {
        let what = format!("two runs differ: digests {:x} and {:x}", report.digest, again.digest);
        return Err(Violation { at: report.ended_at, what });
    }
    Ok(report)
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

/// What went wrong, reduced, and how `test` runs it again.
pub fn tell(test: &str, scenario: Scenario, violation: Violation) -> String {
    let seed = scenario.seed;
    let depth = scenario.replica.inflight_max;
    let first = format!("seed {seed} at depth {depth}: {violation}");
    let (reduced, violation) = reduce(scenario, violation);
    let commit = std::process::Command::new("git").args(["rev-parse", "--short", "HEAD"]).output();
    let commit =
        commit.map_or_else(|_| "unknown".to_owned(), |out| String::from_utf8_lossy(&out.stdout).trim().to_owned());
    format!(
        "{first}\n  reduced to {} requests and {:?}: {violation}\n  PENSTOCK_SIM_SEED={seed} PENSTOCK_SIM_DEPTH={depth} \
         PENSTOCK_SIM_REQUESTS={} PENSTOCK_SIM_FAULTS={} cargo test --workspace --profile ci --test {test}   # at commit {commit}",
        reduced.requests, reduced.faults, reduced.requests, reduced.faults.0,
    )
}
