//! A policy that fails too often is not asked for a while, counted in calls.

mod support;

use penstock_base::Generation;
use penstock_policy_api::validate::Malformed;
use penstock_policy_api::{Answer, Context, Decision, FallbackReason, FaultKind, Matrix, Policies as _};
use penstock_policy_wasm::{Happening, Machine, WasmPolicies, limits};
use support::{ANSWER, Bench, Guest, call, drained};

fn evict(policies: &mut WasmPolicies, number: u64) -> Answer<()> {
    policies.eviction().decide(&call(number), Context { values: &[] }, &Matrix::new(0), &mut Vec::new())
}

/// Traps in every call whose number is at least this.
fn traps_from(number: u64) -> Guest {
    Guest::new(Decision::Eviction).body(
        "decide",
        &format!(
            "(call $bump (i64.const 1)) (if (i64.ge_u (local.get $number) (i64.const {number})) (then unreachable))
             (i64.store (i32.const {ANSWER}) (i64.const 0)) (i32.const {ANSWER})"
        ),
    )
}

#[test]
fn the_third_strike_stops_the_asking_and_each_time_it_takes_twice_as_long() {
    let bench = Bench::new();
    let mut policies = bench.seat(&traps_from(10));
    let mut number = 0;
    let mut answers_until = |policies: &mut WasmPolicies, kind| {
        let mut count = 0;
        loop {
            number += 1;
            match evict(policies, number) {
                Answer::Fault(found) if found == kind => return count,
                _ => count += 1,
            }
        }
    };
    assert_eq!(answers_until(&mut policies, FaultKind::Trap), 9);
    let mut expected = limits::BACK_OFF_CALLS_MIN;
    for times in 1..=5 {
        // The other two strikes.
        assert_eq!(answers_until(&mut policies, FaultKind::Rebuilding), 2);
        assert_eq!(policies.quarantined(), [Decision::Eviction]);
        assert_eq!(bench.runtime.instances_alive(), 0, "nothing is kept for a policy that is not asked");
        // One of its calls is over already.
        assert_eq!(answers_until(&mut policies, FaultKind::Trap), expected - 1);
        expected *= 2;
        let status = &policies.status()[1];
        assert_eq!(status.quarantines, times);
    }
    let happenings = drained(&mut policies).happenings;
    assert!(happenings.contains(&Happening::Quarantined { calls: 64, times: 1 }), "{happenings:?}");
}

#[test]
fn nonsense_counts_as_the_host_says() {
    let bench = Bench::new();
    let mut policies = bench.seat(&Guest::new(Decision::Eviction));
    let malformed = FallbackReason::Malformed(Malformed::WrongCount);
    for number in 1..=2 {
        evict(&mut policies, number);
        policies.strike(Decision::Eviction, malformed);
        policies.strike(Decision::Eviction, FallbackReason::NoOpinion);
        policies.strike(Decision::Eviction, FallbackReason::Fault(FaultKind::Trap));
        assert!(policies.quarantined().is_empty());
    }
    evict(&mut policies, 3);
    policies.strike(Decision::Eviction, malformed);
    assert_eq!(policies.quarantined(), [Decision::Eviction]);
    assert_eq!(policies.status()[1].strikes, 3);
    assert_eq!(evict(&mut policies, 4), Answer::Fault(FaultKind::Rebuilding));
}

#[test]
fn state_and_facts_outlive_a_quarantine() {
    let bench = Bench::new();
    let guest = Guest::new(Decision::Eviction).wants_fact("stored");
    let mut policies = bench.seat(&guest);
    let fact = |at_us| penstock_policy_api::Stored::default().at(at_us);
    for number in 1..=1_000 {
        evict(&mut policies, number);
    }
    policies.between_steps(support::time_of(1_000));
    for _ in 0..3 {
        evict(&mut policies, 1_001);
        policies.strike(Decision::Eviction, FallbackReason::Malformed(Malformed::WrongCount));
    }
    for at_us in 0..10 {
        policies.eviction().observe(&[fact(at_us)]).expect("they are kept");
    }
    for number in 0..limits::BACK_OFF_CALLS_MIN {
        assert_eq!(evict(&mut policies, number), Answer::Fault(FaultKind::Rebuilding));
    }
    assert_eq!(evict(&mut policies, 2_000), Answer::NoOpinion);
    let mut out = penstock_base::codec::Writer::new();
    policies.eviction().save(&mut out).expect("it saves");
    // A thousand decisions, ten facts, and the decision after the quarantine.
    assert_eq!(out.bytes(), (1_000 + 10 + 1_u64).to_le_bytes());
}

#[test]
fn a_swap_ends_a_quarantine() {
    let bench = Bench::new();
    let name = bench.load(&traps_from(2));
    let set = bench.set(Decision::Eviction, &name, "");
    let mut policies = WasmPolicies::new(bench.prepare(&set, Machine::Replica), Generation(1));
    for _ in 0..3 {
        assert_eq!(evict(&mut policies, 2), Answer::Fault(FaultKind::Trap));
    }
    assert_eq!(policies.quarantined(), [Decision::Eviction]);
    let good = bench.set(Decision::Eviction, &bench.load(&Guest::new(Decision::Eviction).version("2")), "");
    drop(policies.swap(bench.prepare(&good, Machine::Replica), Generation(2), support::time_of(2)));
    assert!(policies.quarantined().is_empty());
    assert_eq!(evict(&mut policies, 3), Answer::NoOpinion);
}

#[test]
fn far_apart_strikes_are_forgiven() {
    let bench = Bench::new();
    // Traps in every five-hundredth call: three never fall within a thousand.
    let body = format!(
        "(if (i64.eqz (i64.rem_u (local.get $number) (i64.const 500))) (then unreachable))
         (i64.store (i32.const {ANSWER}) (i64.const 0)) (i32.const {ANSWER})"
    );
    let mut policies = bench.seat(&Guest::new(Decision::Eviction).body("decide", &body));
    for number in 1..=5_000 {
        let expected = if number % 500 == 0 { Answer::Fault(FaultKind::Trap) } else { Answer::NoOpinion };
        assert_eq!(evict(&mut policies, number), expected);
    }
    let status = &policies.status()[1];
    assert_eq!((status.strikes, status.quarantines, status.rebuilds), (10, 0, 10));
}
