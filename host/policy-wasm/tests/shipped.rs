//! Is the fuel of the shipped set enough where its policies need most? Needs the components: `cargo xtask policies`.

mod support;

use std::path::{Path, PathBuf};

use penstock_base::Generation;
use penstock_base::limits::FACTS_BATCH_MAX;
use penstock_policy_api::{Decision, Fact, Policies as _};
use penstock_policy_api::{FlowActive, FlowIdle, Taken};
use penstock_policy_wasm::limits::FUEL_PER_FACT;
use penstock_policy_wasm::{Component, Machine, WasmPolicies};
use support::Bench;

/// Flows that the policy keeps, by its page.
const FLOWS: u64 = 4_096;
const BATCH: u64 = FACTS_BATCH_MAX as u64;

/// The component of that name, where it was built.
fn component(name: &str) -> Option<Vec<u8>> {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    let folder = std::env::var_os("PENSTOCK_POLICIES").map_or_else(|| target.join("policies"), PathBuf::from);
    std::fs::read(folder.join(name)).ok()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// `fuel-base` of a seat in the shipped set.
fn shipped_fuel_base(seat: &str) -> u64 {
    let text = std::fs::read_to_string(root().join("policies/shipped.toml")).expect("it is in the tree");
    let (_, rest) = text.split_once(&format!("[{seat}]")).expect("every seat stands there");
    let line = rest.lines().find(|line| line.starts_with("fuel-base")).expect("with its fuel");
    line.split_once('=').and_then(|(_, number)| number.trim().parse().ok()).expect("a number")
}

fn active(flow_id: u64) -> Fact {
    FlowActive { flow_id, tenant_id: flow_id, class_rank: 3, weight_ppm: 1_000_000, idle_us: 0 }.at(flow_id)
}

fn idle(flow_id: u64) -> Fact {
    FlowIdle { flow_id, tenant_id: flow_id }.at(FLOWS + flow_id)
}

fn taken(flow_id: u64) -> Fact {
    Taken { flow_id, uncached_tokens: 100 + flow_id % 977, ..Taken::default() }.at(flow_id)
}

#[test]
fn facts_about_a_full_table_of_flows_stay_within_their_budget() {
    let Some(bytes) = component("fairness-vtc.wasm") else {
        println!("SKIPPED fairness-vtc.wasm is not built: cargo xtask policies");
        return;
    };
    let bench = Bench::unhurried();
    let loaded = Component::load(&bench.runtime, &bytes).expect("the component loads");
    let name = format!("sha256:{}", loaded.digest());
    bench.library.add(loaded).expect("there is room");
    // More than any call may need, so that the need is seen.
    let set = bench.set(Decision::Fairness, &name, r#", "fuel-base": 20000000"#);
    let mut policies = WasmPolicies::new(bench.prepare(&set, Machine::Gateway), Generation(1));
    let mut worst = 0;
    let mut tell = |what: &str, fact: &dyn Fn(u64) -> Fact, flows: std::ops::Range<u64>| {
        let mut most = 0;
        for from in flows.clone().step_by(FACTS_BATCH_MAX) {
            let facts: Vec<_> = (from..(from + BATCH).min(flows.end)).map(fact).collect();
            policies.fairness().observe(&facts).expect("the fuel is enough");
            let fuel = policies.last_fuel(Decision::Fairness);
            most = most.max(fuel.saturating_sub(FUEL_PER_FACT * facts.len() as u64));
        }
        println!("figure: vtc, {what}: {most} units of fuel beside those of its facts, at most");
        worst = worst.max(most);
    };
    tell("flows until the table is full", &active, 1..FLOWS + 1);
    tell("dispatches of all of them", &taken, 1..FLOWS + 1);
    tell("newcomers to a table of active flows", &active, FLOWS + 1..FLOWS + 1 + BATCH);
    tell("half of them go idle", &idle, 1..FLOWS / 2);
    tell("newcomers to a table of idle flows", &active, FLOWS + 1 + BATCH..FLOWS + 1 + 2 * BATCH);
    tell("the idle ones come back", &active, 1..FLOWS / 2);
    let base = shipped_fuel_base("fairness");
    assert!(worst + worst / 8 <= base, "{worst} units are needed, the shipped set gives {base}");
}
