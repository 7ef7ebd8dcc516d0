//! What the two policies of a replica are told and asked, and that no answer of theirs can break anything.

#[path = "support/content.rs"]
mod content;
#[path = "support/replica_policies.rs"]
mod policies;
#[path = "support/replica_driver.rs"]
mod replica_driver;

use content::mix;
use penstock_base::Duration;
use penstock_policy_api::{
    CommonSignal, EvictionSignal, FactKind, Matrix, RunSignal, RunningSignal, Signal, VictimsSignal,
};
use penstock_sched::replica::{ReplicaConfig, ReplicaInput, Watermarks};
use policies::{Mood, TestPolicies};
use replica_driver::{Driver, Spec};

fn tight() -> ReplicaConfig {
    ReplicaConfig {
        blocks: 10,
        block_size_tokens: 4,
        slots: 4,
        step_tokens: 32,
        chunk_tokens: 32,
        context_tokens_max: 40,
        check_every_step: true,
        watermarks: Watermarks { low_ppm: 100_000, high_ppm: 300_000 },
        ..ReplicaConfig::default()
    }
}

fn prompt(of: u64, length: u64) -> Vec<u32> {
    (0..length).map(|at| (mix(of, at) % content::VOCABULARY) as u32).collect()
}

/// Requests that share a prefix, grow past what they reserved and push each other out.
fn crowd(driver: &mut Driver, rounds: u64) {
    for round in 0..rounds {
        driver.now = driver.now + Duration::from_ms(3);
        for of in 0..2 {
            let spec = Spec { seed: 0, reserve_output: 1, ..Spec::new(prompt((round + of) % 3, 8 + of * 3), 14) };
            driver.dispatch(spec);
        }
        for _ in 0..9 {
            if !driver.flights.is_empty() {
                driver.complete();
            }
            while driver.pay() {}
        }
    }
    driver.run_dry();
    driver.assert_outputs();
}

/// Names whose mask bit is clear in every row.
fn unknown<S: Signal>(rows: &Matrix) -> Vec<&'static str> {
    let mask = S::KNOWN_MASK.expect("it was declared").index();
    assert!(rows.rows() > 0, "the question was asked");
    let known = rows.column(mask).iter().fold(0, |all, mask| all | mask);
    S::ALL.iter().filter(|signal| known >> signal.index() & 1 == 0).map(|signal| signal.name()).collect()
}

#[test]
fn signals_without_a_source_are_these() {
    let (policies, heard) = TestPolicies::new(Mood::NoOpinion);
    let mut driver = Driver::new(tight());
    driver.policies = Box::new(policies);
    crowd(&mut driver, 12);
    assert!(heard.borrow().victims_calls > 0 && heard.borrow().eviction_calls > 0);
    // Rows. Nothing to offload to; bytes are the executor's; gateways say nothing about sessions and copies.
    assert_eq!(unknown::<RunningSignal>(driver.replica.victims_seat().rows()), ["est-offload-us"]);
    let runs = ["est-load-us", "run-bytes", "session-open-flag", "copies-replicas", "directory-age-us"];
    let mut found = unknown::<RunSignal>(driver.replica.eviction_seat().rows());
    found.sort_unstable();
    let mut runs = runs.to_vec();
    runs.sort_unstable();
    assert_eq!(found, runs);
    // Contexts: own names first, then the common ones; the common mask tells.
    let common = VictimsSignal::ALL.len() + CommonSignal::KnownMask.index();
    let mask = driver.replica.victims_seat().context()[common];
    let names = VictimsSignal::ALL.iter().map(|signal| signal.name());
    let names: Vec<_> = names.chain(CommonSignal::ALL.iter().map(|signal| signal.name())).collect();
    let without: Vec<_> = (0..names.len()).filter(|bit| mask >> bit & 1 == 0).map(|bit| names[bit]).collect();
    let not_here = ["kv-token-bytes", "gateway-share-ppm", "stale-load-us", "stale-cache-us", "quota-age-us"];
    assert_eq!(without, [&["dram-free-blocks"], &not_here[..]].concat());
    let mask = driver.replica.eviction_seat().context()[EvictionSignal::ALL.len() + CommonSignal::KnownMask.index()];
    let names = EvictionSignal::ALL.iter().map(|signal| signal.name());
    let names: Vec<_> = names.chain(CommonSignal::ALL.iter().map(|signal| signal.name())).collect();
    let without: Vec<_> = (0..names.len()).filter(|bit| mask >> bit & 1 == 0).map(|bit| names[bit]).collect();
    assert_eq!(without, [&["dram-free-blocks", "ssd-free-blocks"], &not_here[..]].concat());
}

#[test]
fn facts_come_in_order_once_and_within_their_time() {
    let (policies, heard) = TestPolicies::new(Mood::NoOpinion);
    let mut driver = Driver::new(tight());
    driver.policies = Box::new(policies);
    crowd(&mut driver, 12);
    driver.now = driver.now + Duration::from_ms(100);
    driver.step(ReplicaInput::Tick);
    let heard = heard.borrow();
    let count = |facts: &[penstock_policy_api::Fact], kind| facts.iter().filter(|fact| fact.kind == kind).count();
    let preempted = count(&heard.fairness, FactKind::Preempted);
    assert_eq!(preempted as u64, driver.replica.gauges().preemptions_total);
    assert_eq!(count(&heard.fairness, FactKind::Resumed), preempted, "all of them came back");
    assert!(heard.fairness.is_sorted_by_key(|fact| fact.at_us) && heard.eviction.is_sorted_by_key(|fact| fact.at_us));
    let totals = driver.replica.kv().totals();
    assert_eq!(count(&heard.eviction, FactKind::Stored) as u64, totals.stored_blocks);
    assert_eq!(count(&heard.eviction, FactKind::Evicted) as u64, totals.removed_blocks.iter().sum::<u64>());
    assert_eq!(count(&heard.eviction, FactKind::Regret) as u64, totals.regret_blocks);
    assert!(totals.regret_blocks > 0 && count(&heard.eviction, FactKind::Hit) > 0);
    let ended = driver.clients.values().filter(|client| client.end.is_some()).count();
    assert_eq!(count(&heard.eviction, FactKind::Finished), ended);
    assert_eq!(count(&heard.fairness, FactKind::Finished), ended);
}

#[test]
fn no_answer_of_a_policy_breaks_anything() {
    let (mut faults, mut preempted) = (0, 0);
    for seed in 0..40 {
        let (policies, heard) = TestPolicies::new(Mood::Chaos(seed));
        let mut driver = Driver::new(ReplicaConfig { inflight_max: 1 + (seed % 2) as usize, ..tight() });
        driver.policies = Box::new(policies);
        crowd(&mut driver, 12);
        assert!(heard.borrow().victims_calls > 0);
        faults += driver.fallbacks;
        preempted += driver.preemptions;
    }
    assert!(faults > 100 && preempted > 100, "{faults} {preempted}");
}
