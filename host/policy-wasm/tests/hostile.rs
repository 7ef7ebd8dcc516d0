//! Every hostile guest meets the fate that it states, and costs its machine nothing but an answer.

mod support;

use std::sync::Arc;

use penstock_base::Generation;
use penstock_hostile_guests::{Caught, Hostile};
use penstock_policy_api::{Decision, FallbackReason, FaultKind, Finished, Policies as _, RestoreError};
use penstock_policy_wasm::{
    Component, FreshReason, Happening, PolicySet, Remembered, SavedSeat, SeatStatus, Snapshot, SwapOutcome,
    WasmPolicies, limits,
};
use support::asking::{Asked, Candidates, Seats};
use support::{Bench, Told, drained, machine_of, time_of};

const FEW: Candidates = Candidates { rows: 3, noise: 0 };

fn decisions() -> impl Iterator<Item = (Decision, &'static str)> {
    Decision::ALL.into_iter().map(|decision| (decision, decision.name()))
}

/// A bench with one hostile guest on it.
struct Trial {
    bench: Bench,
    decision: Decision,
}

impl Trial {
    fn new(decision: Decision) -> Self {
        Self { bench: Bench::unhurried(), decision }
    }

    /// The set with this component in its seat, or why there is none.
    fn set(&self, bytes: &[u8]) -> Result<Arc<PolicySet>, String> {
        let component = Component::load(&self.bench.runtime, bytes).map_err(|error| error.to_string())?;
        let name = format!("sha256:{}", component.digest());
        self.bench.library.add(component).expect("unused ones make room");
        Ok(self.bench.set(self.decision, &name, ""))
    }

    fn prepared(&self, set: &Arc<PolicySet>, remembered: &Remembered) -> Result<WasmPolicies, String> {
        let prepared = self.bench.try_prepare(set, machine_of(self.decision), remembered);
        prepared.map(|prepared| WasmPolicies::new(prepared, Generation(1))).map_err(|faults| faults.to_string())
    }

    /// In its seat, or why not.
    fn seat(&self, bytes: &[u8], remembered: &Remembered) -> Result<WasmPolicies, String> {
        self.prepared(&self.set(bytes)?, remembered)
    }

    fn status(&self, policies: &mut WasmPolicies) -> SeatStatus {
        let mut all = policies.status().into_iter();
        let status = all.find(|status| status.decision == self.decision).expect("its machine asks it");
        assert!(status.memory_bytes <= limits::MEMORY_BYTES_DEFAULT, "{}", status.memory_bytes);
        status
    }
}

fn assert_says(decision: Decision, hostile: &Hostile, said: &str) {
    for words in hostile.says {
        assert!(said.contains(words), "{decision:?} {}: not `{words}` in: {said}", hostile.name);
    }
}

/// The words for what failed since the last time.
fn reasons(told: &Told) -> Vec<String> {
    let reason = |happening: &Happening| match happening {
        Happening::Fault { failure, .. } => Some(failure.to_string()),
        Happening::Malformed(why) => Some(why.name().to_owned()),
        _ => None,
    };
    told.happenings.iter().filter_map(reason).collect()
}

/// Saved state of the policy that every hostile guest claims to be: eight bytes, a count.
fn remembered(decision: Decision, count: u64) -> Remembered {
    let mut remembered = Remembered::default();
    let snapshot =
        Snapshot { schema: 1, saved_now_us: 0, at_us: 0, elapsed_us: 0, bytes: count.to_le_bytes().to_vec().into() };
    remembered.set(decision, SavedSeat { policy: "hostile".to_owned(), snapshot });
    remembered
}

#[test]
fn what_misbehaves_at_once_is_never_seated_and_its_reason_is_named() {
    let mut refused = 0;
    for (decision, name) in decisions() {
        let trial = Trial::new(decision);
        for hostile in penstock_hostile_guests::list(name).expect("they are well-formed") {
            let seated = trial.seat(&hostile.bytes, &Remembered::default());
            match hostile.caught {
                Caught::Load | Caught::Decide | Caught::Malformed | Caught::Save => {
                    let said = seated.err().unwrap_or_else(|| panic!("{name} {} is seated", hostile.name));
                    assert_says(decision, &hostile, &said);
                    assert!(said.len() < 2 * limits::FAULT_TEXT_BYTES_MAX, "{}", hostile.name);
                    refused += 1;
                }
                Caught::Observe | Caught::Restore | Caught::Nowhere => {
                    assert!(seated.is_ok(), "{name} {}: {seated:?}", hostile.name);
                }
            }
        }
        assert_eq!(trial.bench.runtime.instances_alive(), 0, "nothing is kept of any");
    }
    println!("figure: {refused} hostile components refused before they served");
    assert!(refused > 5 * 60, "{refused}");
}

#[test]
fn what_waits_until_it_serves_costs_an_answer_a_strike_each_and_ends_in_quarantine() {
    let mut met = 0;
    for (decision, name) in decisions() {
        let trial = Trial::new(decision);
        let late = penstock_hostile_guests::late(name).expect("they are well-formed");
        for hostile in late.iter().filter(|hostile| matches!(hostile.caught, Caught::Decide | Caught::Malformed)) {
            serve_to_the_end(&trial, hostile);
            met += 1;
        }
        assert_eq!(trial.bench.runtime.instances_alive(), 0);
    }
    println!("figure: {met} hostile components served until their quarantine");
    assert!(met > 5 * 15, "{met}");
}

/// Good answers, a failure; twice more from the start; then it is not asked any more.
fn serve_to_the_end(trial: &Trial, hostile: &Hostile) {
    let (decision, name) = (trial.decision, hostile.name);
    let mut policies = trial.seat(&hostile.bytes, &Remembered::default()).unwrap_or_else(|why| panic!("{name}: {why}"));
    let mut seats = Seats::new(7);
    let mut number = 0;
    let mut ask = |policies: &mut WasmPolicies| -> Asked {
        number += 1;
        seats.ask(policies, decision, time_of(number), FEW)
    };
    let is_malformed = hostile.caught == Caught::Malformed;
    for strike in 1..=3_u64 {
        // Made anew it counts from the start; nonsense alone leaves the instance, which goes on with it.
        let good = if is_malformed && strike > 1 { 0 } else { hostile.good_calls };
        for _ in 0..good {
            assert_eq!(ask(&mut policies).fallback, Some(FallbackReason::NoOpinion), "{decision:?} {name} {strike}");
        }
        let fallback = ask(&mut policies).fallback;
        match fallback {
            Some(FallbackReason::Malformed(_)) if is_malformed => {}
            Some(FallbackReason::Fault(kind)) if !is_malformed && kind != FaultKind::Rebuilding => {}
            other => panic!("{decision:?} {name}: {other:?}"),
        }
        let status = trial.status(&mut policies);
        assert_eq!(status.strikes, strike, "{decision:?} {name}");
        let told = drained(&mut policies);
        let said = reasons(&told);
        assert_eq!(said.len(), 1, "{decision:?} {name}: {said:?}");
        assert_says(decision, hostile, &said[0]);
        let is_out = told.happenings.iter().any(|happening| matches!(happening, Happening::Quarantined { .. }));
        assert_eq!(is_out, strike == 3, "{decision:?} {name}: {:?}", told.happenings);
    }
    assert_eq!(policies.quarantined(), [decision], "{name}");
    assert_eq!(trial.bench.runtime.instances_alive(), 0, "{name}: nothing is kept for it");
    assert_eq!(ask(&mut policies).fallback, Some(FallbackReason::Fault(FaultKind::Rebuilding)), "{name}");
}

#[test]
fn what_fails_on_facts_fails_once_for_them_and_decides_on() {
    for (decision, name) in decisions() {
        let trial = Trial::new(decision);
        let all = penstock_hostile_guests::list(name).expect("they are well-formed");
        for hostile in all.iter().filter(|hostile| hostile.caught == Caught::Observe) {
            let mut policies = trial.seat(&hostile.bytes, &Remembered::default()).expect("a trial tells no facts");
            let mut seats = Seats::new(3);
            let fact = Finished { request_id: 1, ..Finished::default() }.at(1);
            for strike in 1..=3 {
                assert_eq!(
                    seats.ask(&mut policies, decision, time_of(strike), FEW).fallback,
                    Some(FallbackReason::NoOpinion),
                    "{name} {}",
                    hostile.name
                );
                let told = match decision {
                    Decision::Admission => policies.admission().observe(&[fact]),
                    Decision::Routing => policies.routing().observe(&[fact]),
                    Decision::Fairness => policies.fairness().observe(&[fact]),
                    Decision::Eviction => policies.eviction().observe(&[fact]),
                    Decision::Overload => policies.overload().observe(&[fact]),
                };
                assert!(told.is_err(), "{name} {}", hostile.name);
                assert_eq!(trial.status(&mut policies).strikes, strike);
                assert_says(decision, hostile, &reasons(&drained(&mut policies))[0]);
            }
            assert_eq!(policies.quarantined(), [decision]);
        }
    }
}

#[test]
fn what_fails_on_state_is_refused_where_there_is_some_and_starts_fresh_where_it_came_too_late() {
    for (decision, name) in decisions() {
        let trial = Trial::new(decision);
        let now = penstock_hostile_guests::list(name).expect("they are well-formed");
        let late = penstock_hostile_guests::late(name).expect("they are well-formed");
        let plain = trial.set(&penstock_hostile_guests::harmless(name).expect("well-formed")).expect("it loads");
        for hostile in now.iter().chain(&late).filter(|hostile| hostile.caught == Caught::Restore) {
            let set = trial.set(&hostile.bytes).expect("it loads");
            let refuses = hostile.says == ["damaged"];
            // With state at hand the trial shows it.
            match trial.prepared(&set, &remembered(decision, 9)) {
                Err(said) => assert_says(decision, hostile, &said),
                Ok(_) => assert!(refuses, "{name} {}: a failing one is seated", hostile.name),
            }
            // State that nobody saw before the swap.
            let mut policies = trial.prepared(&plain, &Remembered::default()).expect("it is harmless");
            let mut seats = Seats::new(1);
            for number in 1..=9 {
                seats.ask(&mut policies, decision, time_of(number), FEW);
            }
            let prepared = trial.bench.try_prepare(&set, machine_of(decision), &Remembered::default());
            let report = policies.swap(prepared.expect("nothing to try"), Generation(2), time_of(10));
            let outcome = report.seats.iter().find(|seat| seat.decision == decision).expect("it is asked").outcome;
            match outcome {
                SwapOutcome::Fresh(FreshReason::Refused(RestoreError::Damaged)) if refuses => {}
                SwapOutcome::Fresh(FreshReason::Refused(RestoreError::Fault(_))) if !refuses => {
                    assert_says(decision, hostile, &reasons(&drained(&mut policies))[0]);
                }
                other => panic!("{name} {}: {other:?}", hostile.name),
            }
            assert_eq!(
                seats.ask(&mut policies, decision, time_of(11), FEW).fallback,
                Some(FallbackReason::NoOpinion),
                "{name} {}: it serves, fresh",
                hostile.name
            );
        }
        assert_eq!(trial.bench.runtime.instances_alive(), 0);
    }
}

#[test]
fn what_cannot_save_any_more_hands_its_last_snapshot_over() {
    for (decision, name) in decisions() {
        let trial = Trial::new(decision);
        let plain = trial.set(&penstock_hostile_guests::harmless(name).expect("well-formed")).expect("it loads");
        let late = penstock_hostile_guests::late(name).expect("they are well-formed");
        for hostile in late.iter().filter(|hostile| hostile.caught == Caught::Save) {
            let mut policies = trial.seat(&hostile.bytes, &Remembered::default()).expect("good until it has state");
            let mut seats = Seats::new(1);
            seats.ask(&mut policies, decision, time_of(1), FEW);
            policies.between_steps(time_of(2_000));
            assert_eq!(trial.status(&mut policies).snapshots, 1, "{name} {}", hostile.name);
            seats.ask(&mut policies, decision, time_of(2_001), FEW);
            policies.between_steps(time_of(4_000));
            let status = trial.status(&mut policies);
            assert_eq!((status.snapshots, status.strikes), (1, 1), "{name} {}", hostile.name);
            assert_says(decision, hostile, &reasons(&drained(&mut policies))[0]);
            let prepared = trial.bench.prepare(&plain, machine_of(decision));
            let report = policies.swap(prepared, Generation(2), time_of(4_001));
            let seat = report.seats.iter().find(|seat| seat.decision == decision).expect("it is asked");
            assert_eq!(seat.state_bytes, 8, "{name} {}", hostile.name);
            assert!(matches!(seat.outcome, SwapOutcome::Carried(_)), "{name} {}: {seat:?}", hostile.name);
        }
    }
}

#[test]
fn what_is_caught_nowhere_is_bounded() {
    for (decision, name) in decisions() {
        let trial = Trial::new(decision);
        let all = penstock_hostile_guests::list(name).expect("they are well-formed");
        for hostile in all.iter().filter(|hostile| hostile.caught == Caught::Nowhere) {
            let mut policies = trial.seat(&hostile.bytes, &Remembered::default()).expect("nothing is wrong with it");
            let mut seats = Seats::new(3);
            let (mut lines, mut names) = (0, 0);
            for number in 1..=1_000 {
                let asked = seats.ask(&mut policies, decision, time_of(number), FEW);
                assert_eq!(asked.fallback, Some(FallbackReason::NoOpinion), "{name} {}", hostile.name);
                if number % 10 == 0 {
                    let told = drained(&mut policies);
                    assert!(told.lines.iter().all(|line| line.text.len() <= limits::LOG_TEXT_BYTES_MAX));
                    lines += told.lines.len();
                    names = names.max(told.counts.len());
                    assert!(told.lines_dropped + told.counts_dropped > 0, "{}", hostile.name);
                }
            }
            let lines_max = limits::LOG_LINES_MAX + 1_000 / limits::LOG_CALLS_PER_LINE as usize + 1;
            assert!(lines <= lines_max && names <= limits::COUNTERS_MAX, "{}: {lines} {names}", hostile.name);
            assert_eq!(trial.status(&mut policies).strikes, 0);
        }
    }
}
