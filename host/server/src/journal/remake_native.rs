//! A build without WebAssembly: only the native defaults can be asked again.

use std::path::PathBuf;

use penstock_base::Generation;
use penstock_engine::NATIVE_WORDS;
use penstock_journal::{MachineId, Remade, Remake};
use penstock_policy_api::native::NativePolicies;
use penstock_policy_api::{Decision, Policies};

/// Makes the native defaults.
pub struct Remaker;

struct Natives(NativePolicies);

impl Remaker {
    /// Components are of no use here.
    pub fn new(_: Vec<PathBuf>) -> Self {
        Self
    }
}

impl Remake for Remaker {
    fn remake(&mut self, _: MachineId, context_tokens_max: u32, set: &[u8]) -> Result<Box<dyn Remade>, String> {
        if set != NATIVE_WORDS {
            return Err("this build has no WebAssembly (feature `wasm`)".to_owned());
        }
        Ok(Box::new(Natives(NativePolicies::new(Generation(0), context_tokens_max))))
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
