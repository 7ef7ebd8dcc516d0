//! Where do components come from, and how do they get into a seat?

use std::path::{Path, PathBuf};
use std::sync::Arc;

use penstock_base::Generation;
use penstock_policy_api::Decision;
use penstock_policy_wasm::{
    Component, Library, Machine, PolicySet, Prepared, Remembered, Runtime, RuntimeConfig, WasmPolicies, Workshop,
    limits,
};

use crate::guest::Seated;

/// One engine and the components loaded into it.
#[derive(Debug)]
pub struct Bench {
    runtime: Runtime,
    library: Library,
}

/// How a component sits.
#[derive(Clone, Copy, Debug)]
pub struct Seating<'a> {
    /// A JSON document; empty is every default.
    pub parameters: &'a str,
    /// Fuel of a call beside what its rows add.
    pub fuel_base: u64,
}

impl Default for Seating<'_> {
    fn default() -> Self {
        Self { parameters: "", fuel_base: limits::FUEL_BASE_DEFAULT }
    }
}

impl Bench {
    /// A fresh engine. A run holds few instances at once.
    pub fn new() -> Result<Self, String> {
        let config = RuntimeConfig { instances_max: 16, ..RuntimeConfig::default() };
        let runtime = Runtime::new(config).map_err(|error| error.to_string())?;
        Ok(Self { runtime, library: Library::new() })
    }

    /// Loads a component, as a server would.
    pub fn load(&self, bytes: &[u8]) -> Result<Arc<Component>, String> {
        let component = Component::load(&self.runtime, bytes).map_err(|error| error.to_string())?;
        self.library.add(Arc::clone(&component)).map_err(|error| error.to_string())?;
        Ok(component)
    }

    /// A fresh instance of a component that was loaded here, in its seat.
    pub fn seat(&self, component: &Component, how: Seating<'_>) -> Result<Seated, String> {
        let decision = component.decision();
        let parameters = if how.parameters.is_empty() { "{}" } else { how.parameters };
        let document = format!(
            r#"{{ "{}": {{ "policy": "sha256:{}", "parameters": {parameters}, "fuel-base": {} }} }}"#,
            decision.name(),
            component.digest(),
            how.fuel_base
        );
        let set = PolicySet::parse(&document).map(Arc::new).map_err(|faults| faults.to_string())?;
        let from = Workshop { runtime: &self.runtime, library: &self.library, context_window_tokens: 8_192 };
        // Fairness sits at both machines; a seat there answers `victims` as well as `order`.
        let machine = if decision == Decision::Eviction { Machine::Replica } else { Machine::Gateway };
        let prepared =
            Prepared::new(&from, &set, machine, &Remembered::default()).map_err(|faults| faults.to_string())?;
        Ok(Seated::component(WasmPolicies::new(prepared, Generation(1)), decision))
    }
}

/// The components that `cargo xtask policies` wrote below `target`, by name, e.g. `routing-load-overlap`. None says that there are none.
pub fn shipped(target: &Path) -> Option<Vec<(String, PathBuf)>> {
    let entries = std::fs::read_dir(target.join("policies")).ok()?;
    let mut found: Vec<_> = entries
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|ending| ending == "wasm"))
        .filter_map(|path| Some((path.file_stem()?.to_str()?.to_owned(), path)))
        .collect();
    found.sort();
    (!found.is_empty()).then_some(found)
}
