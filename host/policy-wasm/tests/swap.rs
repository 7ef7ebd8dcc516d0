//! A set takes over between two steps: state goes on, nothing of the old one stays, and what fails on the way costs nobody a request.

mod support;

use std::sync::Arc;

use penstock_base::codec::Writer;
use penstock_base::{Generation, Instant};
use penstock_policy_api::{
    Answer, Context, Decision, FaultKind, Kept, Matrix, Policies as _, RestoreCause, RestoreError,
};
use penstock_policy_wasm::{FreshReason, Machine, PolicySet, Remembered, SwapOutcome, WasmPolicies};
use support::{Bench, Guest, call, drained, time_of};

fn evict(policies: &mut WasmPolicies, number: u64) -> Answer<()> {
    policies.eviction().decide(&call(number), Context { values: &[] }, &Matrix::new(0), &mut Vec::new())
}

fn state(policies: &mut WasmPolicies) -> u64 {
    let mut out = Writer::new();
    policies.eviction().save(&mut out).expect("it saves");
    u64::from_le_bytes(out.bytes().try_into().expect("eight bytes"))
}

fn outcome(bench: &Bench, policies: &mut WasmPolicies, set: &Arc<PolicySet>, number: u64) -> SwapOutcome {
    let prepared = bench.try_prepare(set, Machine::Replica, &policies.remembered()).expect("it can serve");
    let report = policies.swap(prepared, Generation(number), time_of(number));
    assert_eq!(report.to, policies.generation());
    report.seats.iter().find(|seat| seat.decision == Decision::Eviction).expect("a replica asks eviction").outcome
}

/// Resident memory of this process in KiB.
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("this is Linux");
    let line = status.lines().find(|line| line.starts_with("VmRSS")).expect("it is there");
    line.split_whitespace().nth(1).and_then(|number| number.parse().ok()).expect("a number")
}

#[test]
fn a_thousand_swaps_keep_the_state_and_leave_nothing_behind() {
    let bench = Bench::new();
    let one = bench.load(&Guest::new(Decision::Eviction).version("1"));
    let two = bench.load(&Guest::new(Decision::Eviction).version("2"));
    let sets = [one, two].map(|name| bench.set(Decision::Eviction, &name, ""));
    let mut policies = WasmPolicies::new(bench.prepare(&sets[0], Machine::Replica), Generation(0));
    let mut warm_kib = 0;
    for number in 1..=1_000 {
        assert_eq!(evict(&mut policies, number), Answer::NoOpinion);
        let swapped = outcome(&bench, &mut policies, &sets[(number % 2) as usize], number);
        assert_eq!(swapped, SwapOutcome::Carried(Kept::Kept));
        assert_eq!(bench.runtime.instances_alive(), 1);
        if number == 200 {
            warm_kib = resident_kib();
        }
    }
    assert_eq!(state(&mut policies), 1_000, "each decision was counted once");
    let grown_kib = resident_kib().saturating_sub(warm_kib);
    assert!(grown_kib < warm_kib / 20, "{warm_kib} KiB grew by {grown_kib}");
    assert_eq!(policies.generation(), Generation(1_000));
    drop(policies);
    assert_eq!(bench.runtime.instances_alive(), 0);
}

#[test]
fn a_seat_that_does_not_change_goes_on() {
    let bench = Bench::new();
    let name = bench.load(&Guest::new(Decision::Eviction));
    let set = bench.set(Decision::Eviction, &name, "");
    let mut policies = WasmPolicies::new(bench.prepare(&set, Machine::Replica), Generation(1));
    evict(&mut policies, 1);
    assert_eq!(outcome(&bench, &mut policies, &set, 2), SwapOutcome::Unchanged);
    let other = bench.set(Decision::Eviction, &name, r#", "fuel-base": 30000"#);
    assert_eq!(outcome(&bench, &mut policies, &other, 3), SwapOutcome::Carried(Kept::Kept));
    assert_eq!(state(&mut policies), 1);
}

#[test]
fn state_goes_to_a_successor_of_the_same_name_only() {
    let bench = Bench::new();
    let names = ["lru", "lfu"].map(|name| bench.load(&Guest::new(Decision::Eviction).name(name)));
    let [lru, lfu] = names.map(|name| bench.set(Decision::Eviction, &name, ""));
    let native = Arc::new(PolicySet::native());
    let mut policies = WasmPolicies::new(bench.prepare(&lru, Machine::Replica), Generation(1));
    evict(&mut policies, 1);
    assert_eq!(outcome(&bench, &mut policies, &lfu, 2), SwapOutcome::Fresh(FreshReason::OtherPolicy));
    assert_eq!(state(&mut policies), 0);
    assert_eq!(outcome(&bench, &mut policies, &native, 3), SwapOutcome::Fresh(FreshReason::OtherPolicy));
    assert_eq!(outcome(&bench, &mut policies, &native, 4), SwapOutcome::Unchanged);
    assert_eq!(outcome(&bench, &mut policies, &lru, 5), SwapOutcome::Fresh(FreshReason::OtherPolicy));
    assert_eq!(bench.runtime.instances_alive(), 1);
}

#[test]
fn refused_state_is_shown_and_costs_the_state_alone() {
    let bench = Bench::new();
    let plain = bench.load(&Guest::new(Decision::Eviction));
    let picky = bench.load(&Guest::new(Decision::Eviction).schema(2).body(
        "restore",
        // Knows schema 2 only.
        "(i32.store8 (i32.const 3072) (i32.const 1)) (i32.store8 (i32.const 3073) (i32.const 0)) (i32.const 3072)",
    ));
    let [plain, picky] = [plain, picky].map(|name| bench.set(Decision::Eviction, &name, ""));
    let mut policies = WasmPolicies::new(bench.prepare(&plain, Machine::Replica), Generation(1));
    evict(&mut policies, 1);
    let refused = SwapOutcome::Fresh(FreshReason::Refused(RestoreError::UnknownSchema));
    assert_eq!(outcome(&bench, &mut policies, &picky, 2), refused);
    assert_eq!((state(&mut policies), policies.status()[1].resets), (0, 1));
}

#[test]
fn a_trap_in_restore_is_found_by_the_trial_or_costs_the_state() {
    let bench = Bench::new();
    let plain = bench.load(&Guest::new(Decision::Eviction));
    let brittle = bench.load(&Guest::new(Decision::Eviction).version("2").body("restore", "unreachable"));
    let [plain, brittle] = [plain, brittle].map(|name| bench.set(Decision::Eviction, &name, ""));
    let mut policies = WasmPolicies::new(bench.prepare(&plain, Machine::Replica), Generation(1));
    evict(&mut policies, 1);

    // With a snapshot at hand the trial shows it, and the set is not switched to.
    state(&mut policies);
    let faults = bench.try_prepare(&brittle, Machine::Replica, &policies.remembered()).expect_err("refused");
    assert!(faults.to_string().contains("trap in restore"), "{faults}");

    // Without one it shows at the swap: the policy serves, fresh.
    let prepared = bench.try_prepare(&brittle, Machine::Replica, &Remembered::default()).expect("nothing to try");
    let mut report = policies.swap(prepared, Generation(2), time_of(2));
    let refused = FreshReason::Refused(RestoreError::Fault(FaultKind::Trap));
    assert_eq!(report.seats[1].outcome, SwapOutcome::Fresh(refused));
    assert_eq!(report.seats[1].state_bytes, 8);
    assert_eq!(evict(&mut policies, 2), Answer::NoOpinion);
    report.retired.drain(&mut support::Told::default());
    drop(report);
    assert_eq!(bench.runtime.instances_alive(), 1);
}

#[test]
fn a_trap_in_save_hands_the_last_snapshot_over() {
    let bench = Bench::new();
    // Traps in `save` once it has counted to three.
    let body = "(if (i64.ge_u (i64.load (i32.const 64)) (i64.const 3)) (then unreachable))
        (i32.store (i32.const 3072) (i32.const 64)) (i32.store (i32.const 3076) (i32.const 8)) (i32.const 3072)";
    let brittle = bench.load(&Guest::new(Decision::Eviction).body("save", body));
    let next = bench.load(&Guest::new(Decision::Eviction).version("2"));
    let [brittle, next] = [brittle, next].map(|name| bench.set(Decision::Eviction, &name, ""));
    let mut policies = WasmPolicies::new(bench.prepare(&brittle, Machine::Replica), Generation(1));
    evict(&mut policies, 1);
    evict(&mut policies, 2);
    assert_eq!(state(&mut policies), 2);
    evict(&mut policies, 3);
    assert_eq!(outcome(&bench, &mut policies, &next, 4), SwapOutcome::Carried(Kept::Kept));
    assert_eq!(state(&mut policies), 2);
}

#[test]
fn what_cannot_serve_is_said_at_once_and_changes_nothing() {
    let bench = Bench::new();
    let trap = bench.load(&Guest::new(Decision::Routing).body("decide", "unreachable"));
    let order = bench.load(&Guest::new(Decision::Fairness).body("order", "(loop $on (br $on)) unreachable"));
    // Refuses with field `a.b` and problem `no`.
    let refusal = "(i32.store8 (i32.const 3072) (i32.const 1)) (i64.store (i32.const 3000) (i64.const 0x6f6e622e61))
        (i32.store (i32.const 3076) (i32.const 3000)) (i32.store (i32.const 3080) (i32.const 3))
        (i32.store (i32.const 3084) (i32.const 3003)) (i32.store (i32.const 3088) (i32.const 2)) (i32.const 3072)";
    let picky = bench.load(&Guest::new(Decision::Overload).body("configure", refusal));
    let unknown = format!("sha256:{}", "0".repeat(64));
    let text = format!(
        r#"{{ "admission": {{ "policy": "{unknown}" }}, "routing": {{ "policy": "{trap}" }},
             "fairness": {{ "policy": "{order}" }}, "overload": {{ "policy": "{picky}" }} }}"#
    );
    let set = Arc::new(PolicySet::parse(&text).expect("well-formed"));
    let faults = bench.try_prepare(&set, Machine::Gateway, &Remembered::default()).expect_err("none of it");
    let said = faults.to_string();
    for words in [
        "admission: component 0000",
        "is not loaded",
        "routing: failed while it was tried: trap in decide",
        "fairness: failed while it was tried: fuel in order",
        "overload: parameter `a.b`: no",
    ] {
        assert!(said.contains(words), "{words} in {said}");
    }
    assert_eq!(bench.runtime.instances_alive(), 0);
    let swapped = bench.set(Decision::Admission, &trap, "");
    let said = bench.try_prepare(&swapped, Machine::Gateway, &Remembered::default()).expect_err("routing").to_string();
    assert!(said.contains("decides routing"), "{said}");
    // A replica asks neither.
    assert!(bench.try_prepare(&swapped, Machine::Replica, &Remembered::default()).is_ok());
}

#[test]
fn state_survives_a_restart() {
    let bench = Bench::new();
    let guest = Guest::new(Decision::Eviction);
    let mut before = bench.seat(&guest);
    for number in 1..=7 {
        evict(&mut before, number);
    }
    before.between_steps(time_of(2_000));
    let remembered = before.remembered();
    assert_eq!(remembered.seat(Decision::Eviction).expect("a snapshot").snapshot.saved_now_us, 2_000_000);
    drop(before);
    let mut after = bench.seat(&guest);
    let seats = after.resume(&remembered, RestoreCause::Restart, Instant::ZERO);
    assert_eq!(seats[1].outcome, SwapOutcome::Carried(Kept::Kept));
    assert_eq!(state(&mut after), 7);
    assert!(drained(&mut after).happenings.is_empty());
}

#[test]
fn instances_beyond_the_pool_are_refused() {
    let bench = Bench::new();
    let name = bench.load(&Guest::new(Decision::Eviction));
    let set = bench.set(Decision::Eviction, &name, "");
    let mut held = Vec::new();
    let refused = loop {
        match bench.try_prepare(&set, Machine::Replica, &Remembered::default()) {
            Ok(prepared) => held.push(prepared),
            Err(faults) => break faults,
        }
        assert!(held.len() <= 32);
    };
    assert!(refused.to_string().contains("in start"), "{refused}");
    held.clear();
    assert!(bench.try_prepare(&set, Machine::Replica, &Remembered::default()).is_ok());
}
