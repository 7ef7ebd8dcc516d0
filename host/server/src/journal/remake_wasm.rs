//! Policies made again from a journal's words: the set's document, and its components by their digests.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use penstock_base::Generation;
use penstock_engine::NATIVE_WORDS;
use penstock_journal::{MachineId, MachineKind, Remade, Remake};
use penstock_policy_api::native::NativePolicies;
use penstock_policy_api::{Decision, Policies};
use penstock_policy_wasm::{
    Component, Library, Machine, PolicySet, Prepared, Remembered, Runtime, RuntimeConfig, WasmPolicies, Workshop,
};

use crate::policies::document;

/// Makes sets again.
pub struct Remaker {
    /// Files that may be components.
    files: Vec<PathBuf>,
    /// Their digests, once they are looked at.
    digests: Option<HashMap<String, PathBuf>>,
    runtime: Option<Runtime>,
    library: Library,
}

struct Natives(NativePolicies);

struct Components(WasmPolicies);

impl Remaker {
    /// With these files at hand.
    pub fn new(files: Vec<PathBuf>) -> Self {
        Self { files, digests: None, runtime: None, library: Library::new() }
    }

    fn runtime(&mut self) -> Result<Runtime, String> {
        if self.runtime.is_none() {
            self.runtime = Some(Runtime::new(RuntimeConfig::default()).map_err(|fault| fault.to_string())?);
        }
        Ok(self.runtime.clone().expect("made above"))
    }

    /// Compiles what a set names and the library does not have.
    fn gather(&mut self, runtime: &Runtime, set: &PolicySet) -> Result<(), String> {
        for digest in set.components() {
            if self.library.get(digest).is_some() {
                continue;
            }
            let files = &self.files;
            let digests = self.digests.get_or_insert_with(|| {
                let bytes = |path: &PathBuf| document::bytes(path, document::COMPONENT_BYTES_MAX).ok();
                files.iter().filter_map(|path| Some((document::digest_of(&bytes(path)?), path.clone()))).collect()
            });
            let path = digests
                .get(&digest.to_string())
                .ok_or_else(|| format!("no component sha256:{digest} in the folders given with --components"))?;
            let bytes = document::bytes(path, document::COMPONENT_BYTES_MAX)?;
            let component = Component::load(runtime, &bytes).map_err(|fault| format!("{}: {fault}", path.display()))?;
            self.library.add(component).map_err(|fault| fault.to_string())?;
        }
        Ok(())
    }
}

impl Remake for Remaker {
    fn remake(&mut self, machine: MachineId, context_tokens_max: u32, set: &[u8]) -> Result<Box<dyn Remade>, String> {
        if set == NATIVE_WORDS {
            return Ok(Box::new(Natives(NativePolicies::new(Generation(0), context_tokens_max))));
        }
        let words = std::str::from_utf8(set).map_err(|_| "the set is not written in words".to_owned())?;
        if words.is_empty() {
            return Err("the journal does not say which set it was".to_owned());
        }
        let set = Arc::new(PolicySet::parse(words).map_err(|faults| faults.to_string())?);
        let runtime = self.runtime()?;
        self.gather(&runtime, &set)?;
        let workshop =
            Workshop { runtime: &runtime, library: &self.library, context_window_tokens: context_tokens_max };
        let machine = match machine.kind {
            MachineKind::Gateway => Machine::Gateway,
            MachineKind::Replica => Machine::Replica,
        };
        let prepared = Prepared::new(&workshop, &set, machine, &Remembered::default());
        let prepared = prepared.map_err(|faults| faults.to_string())?;
        Ok(Box::new(Components(WasmPolicies::new(prepared, Generation(0)))))
    }
}

impl Remade for Natives {
    fn policies(&mut self) -> &mut dyn Policies {
        &mut self.0
    }
    fn last_fuel(&self, _: Decision) -> u64 {
        0
    }
}

impl Remade for Components {
    fn policies(&mut self) -> &mut dyn Policies {
        &mut self.0
    }
    fn last_fuel(&self, decision: Decision) -> u64 {
        self.0.last_fuel(decision)
    }
}
