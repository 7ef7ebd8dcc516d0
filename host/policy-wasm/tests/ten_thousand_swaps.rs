//! Ten thousand swaps leave nothing behind. In a process of its own, since it weighs the process.

mod support;

use std::sync::Arc;

use penstock_base::Generation;
use penstock_policy_api::{Decision, FallbackReason, Kept};
use penstock_policy_wasm::{Component, Machine, PolicySet, Remembered, SwapOutcome, WasmPolicies};
use support::asking::{Candidates, Seats};
use support::{Bench, Told, time_of};

const SWAPS: u64 = 10_000;
/// Memory settles within so many: every slot of the pool has been used, every buffer has its size.
const WARM: u64 = 1_000;
const FEW: Candidates = Candidates { rows: 4, noise: 0 };

/// Pages of this process in memory, in bytes.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("this is Linux");
    let pages: u64 = statm.split_whitespace().nth(1).and_then(|pages| pages.parse().ok()).expect("a number");
    pages * 4_096
}

/// Loads a version with so much state.
fn load(bench: &Bench, decision: Decision, version: &str, state_bytes: u32) -> String {
    let bytes = penstock_hostile_guests::stateful(decision.name(), version, state_bytes).expect("well-formed");
    let component = Component::load(&bench.runtime, &bytes).expect("it loads");
    let name = format!("sha256:{}", component.digest());
    bench.library.add(component).expect("there is room");
    name
}

/// Every seat of a replica in this version.
fn set(bench: &Bench, version: &str) -> Arc<PolicySet> {
    let seat = |decision: Decision| load(bench, decision, version, 512);
    let text = format!(
        r#"{{ "fairness": {{ "policy": "{}" }}, "eviction": {{ "policy": "{}" }} }}"#,
        seat(Decision::Fairness),
        seat(Decision::Eviction)
    );
    Arc::new(PolicySet::parse(&text).expect("well-formed"))
}

#[test]
fn ten_thousand_swaps_leave_no_instance_no_state_and_no_memory_behind() {
    let bench = Bench::unhurried();
    let sets = ["1", "2"].map(|version| set(&bench, version));
    // One that is refused after its trial has run: it must leave as little.
    let broken = Arc::new(
        PolicySet::parse(&format!(r#"{{ "eviction": {{ "policy": "{}" }} }}"#, {
            let bytes = penstock_hostile_guests::list("eviction").expect("well-formed");
            let traps = bytes.iter().find(|hostile| hostile.name == "traps").expect("it is among them");
            let component = Component::load(&bench.runtime, &traps.bytes).expect("it loads");
            let name = format!("sha256:{}", component.digest());
            bench.library.add(component).expect("there is room");
            name
        }))
        .expect("well-formed"),
    );
    let mut policies = WasmPolicies::new(bench.prepare(&sets[0], Machine::Replica), Generation(0));
    let mut seats = Seats::new(1);
    let (mut warm, mut heaviest) = (0, 0);
    for number in 1..=SWAPS {
        let asked = seats.ask(&mut policies, Decision::Eviction, time_of(number), FEW);
        assert_eq!(asked.fallback, Some(FallbackReason::NoOpinion));
        if number % 16 == 0 {
            let refused = bench.try_prepare(&broken, Machine::Replica, &policies.remembered());
            assert!(refused.is_err_and(|faults| faults.to_string().contains("trap in decide")));
        }
        let next = bench.try_prepare(&sets[(number % 2) as usize], Machine::Replica, &policies.remembered());
        assert_eq!(bench.runtime.instances_alive(), 4, "two seats in force, two about to be; no trial, no former one");
        let mut report = policies.swap(next.expect("it can serve"), Generation(number), time_of(number));
        let outcomes: Vec<_> = report.seats.iter().map(|seat| (seat.outcome, seat.state_bytes)).collect();
        // What was never asked has nothing to hand over, the first time; then it hands over what it got.
        assert_eq!(outcomes[1], (SwapOutcome::Carried(Kept::Kept), 512), "{number}");
        report.retired.drain(&mut Told::default());
        drop(report);
        assert_eq!(bench.runtime.instances_alive(), 2, "no old generation lives");
        if number == WARM {
            warm = resident_bytes();
        }
        if number > WARM && number % 500 == 0 {
            heaviest = heaviest.max(resident_bytes());
        }
    }
    let mut saved = penstock_base::codec::Writer::new();
    penstock_policy_api::Policies::eviction(&mut policies).save(&mut saved).expect("it saves");
    assert_eq!(saved.bytes()[..8], SWAPS.to_le_bytes(), "every decision was counted once, through all of them");
    println!("figure: resident after {WARM} swaps {warm} bytes, at most {heaviest} up to {SWAPS}");
    assert!(heaviest <= warm + warm / 20, "{warm} bytes grew to {heaviest}");
    // Every slot of the pool is there again.
    drop(policies);
    assert_eq!(bench.runtime.instances_alive(), 0);
    let mut held = Vec::new();
    while let Ok(prepared) = bench.try_prepare(&sets[0], Machine::Replica, &Remembered::default()) {
        held.push(prepared);
        assert!(held.len() <= 16, "the pool has 32 slots");
    }
    // The last one lacks the slot for a trial.
    assert!(held.len() >= 15, "{} of 16 sets fit", held.len());
}
