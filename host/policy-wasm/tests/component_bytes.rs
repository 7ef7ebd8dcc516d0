//! Thousands of mutants of components, good ones and bad ones: each is refused with a reason, or runs within its budget. Nothing panics, ends
//! the process, hangs, or makes the host hold memory. `PENSTOCK_BYTES_SEED=n` runs one case again, `PENSTOCK_BYTES_CASES=n` more of them.

#[path = "support/mutant.rs"]
mod mutant;
mod support;

use std::collections::BTreeMap;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mutant::{Random, Tree};
use penstock_base::Generation;
use penstock_policy_api::{Decision, FallbackReason, Finished, Policies as _};
use penstock_policy_wasm::{Component, LoadError, Remembered, WasmPolicies, limits};
use support::asking::{Candidates, Seats};
use support::{Bench, drained, machine_of, time_of};

const CASES: u64 = 3_000;
/// What the process may hold beyond what it held at the start: the pool's warm slots, the compiler's room, one component's code.
const HELD_BYTES_MAX: u64 = 384 << 20;
/// A case takes milliseconds; nothing that ends takes as long as this, on the slowest machine.
const HANGS_AFTER: Duration = Duration::from_secs(240);

/// What became of the cases.
#[derive(Default, Debug)]
struct Sum {
    refused: BTreeMap<&'static str, u64>,
    /// Refused by its trial, before it would have served.
    not_seated: u64,
    served: u64,
    faults: u64,
    nonsense: u64,
}

/// What mutants are made of: guests of every decision, every hostile one, and the shipped policies where they are built.
fn stock() -> Vec<Tree> {
    let mut stock = Vec::new();
    for decision in penstock_hostile_guests::DECISIONS {
        let harmless = penstock_hostile_guests::harmless(decision).expect("well-formed");
        let stateful = penstock_hostile_guests::stateful(decision, "2", 4_096).expect("well-formed");
        // As often as all the others together: from them a mutant gets furthest.
        (0..12).for_each(|_| stock.extend([&harmless, &stateful].map(|bytes| Tree::read(bytes).expect("well-formed"))));
        let hostile = penstock_hostile_guests::list(decision).expect("well-formed");
        let late = penstock_hostile_guests::late(decision).expect("well-formed");
        let read = hostile.iter().chain(&late).filter(|hostile| hostile.bytes.len() < 64 << 10);
        stock.extend(read.filter_map(|hostile| Tree::read(&hostile.bytes)));
    }
    // Beside cargo's own folders, where `cargo xtask policies` puts them.
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../policies");
    let shipped: Vec<_> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "wasm"))
        .collect();
    if shipped.is_empty() {
        println!("SKIPPED mutants of the shipped policies: none are built; `cargo xtask policies` builds them");
    }
    for path in shipped {
        stock.push(Tree::read(&fs::read(path).expect("it was listed")).expect("a component"));
    }
    stock
}

/// One mutant: to its refusal, or through its calls.
fn live(bench: &Bench, stock: &[Tree], seed: u64, sum: &mut Sum) {
    let random = &mut Random(seed.wrapping_mul(0x2545_f491_4f6c_dd1d));
    let (of, donor) = (&stock[random.below(stock.len())], &stock[random.below(stock.len())]);
    let bytes = of.mutant(donor, random);
    let component = match Component::load(&bench.runtime, &bytes) {
        Ok(component) => component,
        Err(error) => {
            let said = error.to_string();
            assert!(!said.is_empty() && said.len() < 64 << 10, "{} bytes of reason", said.len());
            *sum.refused.entry(kind_of(&error)).or_default() += 1;
            return;
        }
    };
    let decision = component.decision();
    let name = format!("sha256:{}", component.digest());
    bench.library.add(component).expect("unused ones make room");
    let set = bench.set(decision, &name, "");
    let Ok(prepared) = bench.try_prepare(&set, machine_of(decision), &Remembered::default()) else {
        sum.not_seated += 1;
        return;
    };
    let mut policies = WasmPolicies::new(prepared, Generation(1));
    serve(&mut policies, decision, random, sum);
    sum.served += 1;
}

fn serve(policies: &mut WasmPolicies, decision: Decision, random: &mut Random, sum: &mut Sum) {
    let mut seats = Seats::new(random.next());
    for number in 1..=12 {
        let of = Candidates { rows: random.below(40), noise: if random.one_in(3) { 0 } else { random.next() } };
        match seats.ask(policies, decision, time_of(number * 300), of).fallback {
            Some(FallbackReason::Fault(_)) => sum.faults += 1,
            Some(FallbackReason::Malformed(_)) => sum.nonsense += 1,
            Some(FallbackReason::NoOpinion) | None => {}
        }
        let fact = Finished { request_id: number, ..Finished::default() }.at(number);
        let told = match decision {
            Decision::Admission => policies.admission().observe(&[fact]),
            Decision::Routing => policies.routing().observe(&[fact]),
            Decision::Fairness => policies.fairness().observe(&[fact]),
            Decision::Eviction => policies.eviction().observe(&[fact]),
            Decision::Overload => policies.overload().observe(&[fact]),
        };
        sum.faults += u64::from(told.is_err());
        policies.between_steps(time_of(number * 300));
        let status = policies.status().into_iter().find(|status| status.decision == decision).expect("it is asked");
        assert!(
            status.memory_bytes <= limits::MEMORY_BYTES_DEFAULT && status.snapshot_bytes <= limits::STATE_BYTES_MAX
        );
        let told = drained(policies);
        assert!(told.lines.len() <= limits::LOG_LINES_MAX && told.counts.len() <= limits::COUNTERS_MAX);
    }
}

fn kind_of(error: &LoadError) -> &'static str {
    match error {
        LoadError::TooLarge { .. } => "too large",
        LoadError::Invalid(_) => "invalid",
        LoadError::Instances { .. } => "instances",
        LoadError::Import { .. } => "imports",
        LoadError::Exports { .. } => "exports",
        LoadError::Version { .. } => "version",
        LoadError::Shape(_) => "shape",
        LoadError::Describe(_) => "describe",
        LoadError::Manifest(_) => "manifest",
        LoadError::Declare(_) => "declared",
    }
}

/// A number of `/proc/self/status` in bytes.
fn memory_bytes(name: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("this is Linux");
    let line = status.lines().find(|line| line.starts_with(name)).expect("it is there");
    line.split_whitespace().nth(1).and_then(|number| number.parse::<u64>().ok()).expect("a number") << 10
}

#[allow(clippy::disallowed_methods, reason = "a test may be asked for more work")]
fn asked(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|number| number.parse().ok())
}

/// Ends the process, and says with which case, when one goes on for ever.
fn watch(case: &'static AtomicU64) {
    std::thread::spawn(move || {
        let mut last = u64::MAX;
        loop {
            std::thread::sleep(HANGS_AFTER);
            let now = case.load(Ordering::Relaxed);
            if now == last {
                eprintln!("PENSTOCK_BYTES_SEED={now} does not end");
                std::process::abort();
            }
            last = now;
        }
    });
}

#[test]
fn every_mutant_is_refused_or_runs_within_its_budget() {
    static CASE: AtomicU64 = AtomicU64::new(0);
    watch(&CASE);
    let bench = Bench::unhurried();
    let stock = stock();
    let (from, to) = match asked("PENSTOCK_BYTES_SEED") {
        Some(seed) => (seed, seed + 1),
        None => (0, asked("PENSTOCK_BYTES_CASES").unwrap_or(CASES)),
    };
    // Should one end the process, its number is here.
    let marked = Path::new(env!("CARGO_TARGET_TMPDIR")).join("component_bytes.case");
    let before = memory_bytes("VmRSS");
    let mut sum = Sum::default();
    for seed in from..to {
        CASE.store(seed, Ordering::Relaxed);
        fs::write(&marked, format!("PENSTOCK_BYTES_SEED={seed}\n")).expect("cargo made the folder");
        let lived = catch_unwind(AssertUnwindSafe(|| live(&bench, &stock, seed, &mut sum)));
        assert!(lived.is_ok(), "PENSTOCK_BYTES_SEED={seed} repeats it");
        assert_eq!(bench.runtime.instances_alive(), 0, "PENSTOCK_BYTES_SEED={seed} leaves an instance");
    }
    let most = memory_bytes("VmHWM");
    println!("figure: {} mutants of components: {sum:?}; {before} bytes resident before, at most {most}", to - from);
    if to - from >= CASES {
        // It did what it is for: mutants got to every stage.
        assert!(sum.refused.len() >= 6 && sum.not_seated > 20 && sum.served > CASES / 20, "{sum:?}");
        assert!(sum.faults > 50, "{sum:?}");
    }
    assert!(most - before < HELD_BYTES_MAX, "{before} bytes grew to {most}");
}
