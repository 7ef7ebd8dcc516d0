//! The components of `cargo xtask policies` in the simulator's seats, through the host's own wall.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use penstock_base::{Generation, Instant};
use penstock_journal::MachineKind;
use penstock_policy_api::{
    AdmissionPolicy, Decision, EvictionPolicy, FairnessPolicy, OverloadPolicy, Policies, RoutingPolicy,
};
use penstock_policy_wasm::{
    Component, FreshReason, Happening, Library, LogLine, Machine, PolicySet, PolicySink, Prepared, Remembered, Runtime,
    RuntimeConfig, SeatSwap, Speaker, SwapOutcome, WasmPolicies, Workshop,
};
use penstock_sim::{Cast, Seats};

use super::lineup::Lineup;

/// Fuel of every seat; what `vtc` wants for a full batch of facts.
const FUEL_BASE: u64 = 200_000;

/// An engine with every component that was built.
struct Shop {
    runtime: Runtime,
    library: Library,
    /// By `DECISION-NAME`.
    components: BTreeMap<String, String>,
}

/// Where `cargo xtask policies` puts components: beside the folder of the profile that this test was built in.
fn folder() -> Option<PathBuf> {
    let test = std::env::current_exe().ok()?;
    Some(test.parent()?.parent()?.parent()?.join("policies"))
}

fn open() -> Option<Shop> {
    let runtime = Runtime::new(RuntimeConfig::default()).expect("the engine starts");
    let library = Library::new();
    let mut components = BTreeMap::new();
    for entry in fs::read_dir(folder()?).ok()?.flatten() {
        let path = entry.path();
        let (Some(name), true) = (path.file_stem(), path.extension().is_some_and(|ending| ending == "wasm")) else {
            continue;
        };
        let bytes = fs::read(&path).expect("a component can be read");
        let component = Component::load(&runtime, &bytes).unwrap_or_else(|why| panic!("{}: {why}", path.display()));
        components.insert(name.to_string_lossy().into_owned(), format!("sha256:{}", component.digest()));
        library.add(component).expect("there is room for all that are shipped");
    }
    (!components.is_empty()).then_some(Shop { runtime, library, components })
}

fn shop() -> Option<&'static Shop> {
    static SHOP: OnceLock<Option<Shop>> = OnceLock::new();
    SHOP.get_or_init(open).as_ref()
}

/// Are there components? Says so aloud when there are none.
pub fn are_there(what: &str) -> bool {
    let there = shop().is_some();
    if !there {
        println!("SKIPPED {what}: no components (run `cargo xtask policies`)");
    }
    there
}

/// Seats these line-ups, the n-th generation the n-th of them, round and round.
#[derive(Clone)]
pub struct Components {
    shop: &'static Shop,
    sets: Arc<[Arc<PolicySet>]>,
}

impl Components {
    /// All seats are components.
    pub fn new(lineups: &[Lineup]) -> Self {
        let shop = shop().expect("asked for after `are_there`");
        Self { shop, sets: lineups.iter().map(|lineup| Arc::new(set(shop, lineup))).collect() }
    }
}

fn set(shop: &Shop, lineup: &Lineup) -> PolicySet {
    let seats = Decision::ALL.into_iter().zip(&lineup.0).map(|(decision, seat)| {
        let key = format!("{}-{}", decision.name(), seat.name);
        let digest = shop.components.get(&key).unwrap_or_else(|| panic!("{key} is not among the components"));
        let parameters = if seat.parameters.is_empty() { "{}" } else { &seat.parameters };
        // Another fuel base is another seat with the same policy: a switch makes a new instance.
        let fuel = FUEL_BASE + seat.instance;
        format!(r#""{}":{{"policy":"{digest}","parameters":{parameters},"fuel-base":{fuel}}}"#, decision.name())
    });
    let text = format!("{{{}}}", seats.collect::<Vec<_>>().join(","));
    PolicySet::parse(&text).unwrap_or_else(|faults| panic!("{faults}"))
}

impl Cast for Components {
    fn seats(&self, machine: MachineKind, context_tokens_max: u32) -> Result<Box<dyn Seats>, String> {
        let machine = match machine {
            MachineKind::Gateway => Machine::Gateway,
            MachineKind::Replica => Machine::Replica,
        };
        let cast = self.clone();
        let prepared = cast.prepare(0, machine, context_tokens_max, &Remembered::default())?;
        let policies = WasmPolicies::new(prepared, Generation(0));
        Ok(Box::new(ComponentSeats { policies, cast, context_tokens_max, heard: Heard::default() }))
    }
}

impl Components {
    fn prepare(
        &self,
        generation: u64,
        machine: Machine,
        context_window_tokens: u32,
        remembered: &Remembered,
    ) -> Result<Prepared, String> {
        let from = Workshop { runtime: &self.shop.runtime, library: &self.shop.library, context_window_tokens };
        let set = &self.sets[generation as usize % self.sets.len()];
        Prepared::new(&from, set, machine, remembered).map_err(|faults| faults.to_string())
    }
}

struct ComponentSeats {
    policies: WasmPolicies,
    cast: Components,
    context_tokens_max: u32,
    heard: Heard,
}

/// The first thing that must not happen to a policy that is shipped.
#[derive(Default)]
struct Heard(Option<String>);

impl PolicySink for Heard {
    fn log(&mut self, _: Speaker<'_>, _: LogLine) {}
    fn lines_dropped(&mut self, _: Speaker<'_>, _: u64) {}
    fn count(&mut self, _: Speaker<'_>, _: &str, _: u64) {}
    fn counts_dropped(&mut self, _: Speaker<'_>, _: u64) {}
    fn happened(&mut self, from: Speaker<'_>, happening: Happening) {
        self.0.get_or_insert_with(|| format!("{}: {happening:?}", from.policy));
    }
    fn happenings_dropped(&mut self, _: Speaker<'_>, _: u64) {}
}

impl ComponentSeats {
    fn listen(&mut self) -> Result<(), String> {
        self.policies.drain(&mut self.heard);
        self.heard.0.take().map_or(Ok(()), Err)
    }
}

impl Policies for ComponentSeats {
    fn generation(&self) -> Generation {
        self.policies.generation()
    }
    fn admission(&mut self) -> &mut dyn AdmissionPolicy {
        self.policies.admission()
    }
    fn routing(&mut self) -> &mut dyn RoutingPolicy {
        self.policies.routing()
    }
    fn fairness(&mut self) -> &mut dyn FairnessPolicy {
        self.policies.fairness()
    }
    fn eviction(&mut self) -> &mut dyn EvictionPolicy {
        self.policies.eviction()
    }
    fn overload(&mut self) -> &mut dyn OverloadPolicy {
        self.policies.overload()
    }
}

impl Seats for ComponentSeats {
    fn switch(&mut self, generation: Generation, now: Instant) -> Result<(), String> {
        let remembered = self.policies.remembered();
        let machine = self.policies.machine();
        let prepared = self.cast.prepare(generation.0, machine, self.context_tokens_max, &remembered)?;
        let mut report = self.policies.swap(prepared, generation, now);
        report.retired.drain(&mut self.heard);
        let refused = |seat: &&SeatSwap| matches!(seat.outcome, SwapOutcome::Fresh(FreshReason::Refused(_)));
        let lost = report.seats.iter().find(refused);
        match lost {
            Some(seat) => Err(format!("state was lost: {seat:?}")),
            None => self.listen(),
        }
    }

    fn between_steps(&mut self, now: Instant) -> Result<(), String> {
        self.policies.between_steps(now);
        self.listen()
    }
}
