//! Native eviction: what was used last stays longest.

use alloc::vec::Vec;

use crate::call::Call;
use crate::declare::{Declaration, Declared, EvictionDeclaration, InContext, Terms};
use crate::generated::EvictionSignal;
use crate::matrix::{Context, Matrix};
use crate::policy::{EvictionPolicy, Policy};
use crate::proposal::{Answer, Worth};
use crate::sat;

use super::positions;

positions! { at: RunSignal {
    IDLE = IdleUs,
    EST_RECOMPUTE = EstRecomputeUs,
    EST_LOAD = EstLoadUs,
} }

const CONTEXT: [InContext<EvictionSignal>; 1] = [InContext::Own(EvictionSignal::DramFreeBlocks)];
const DRAM_FREE: usize = 0;

const DROP: u8 = 0;
const DRAM: u8 = 1;

/// The price is the time of last use; equal prices leave deeper first, which is the host's rule. To DRAM where there is room and loading
/// is faster than computing again.
#[derive(Debug)]
pub struct Lru {
    declaration: EvictionDeclaration,
}

impl Default for Lru {
    fn default() -> Self {
        let (context, rows) = (Declared::exactly(&CONTEXT), Declared::exactly(at::ALL));
        Self { declaration: Declaration { terms: Terms::native("lru"), context, rows } }
    }
}

impl Lru {
    /// The policy; it has no parameters.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Policy for Lru {
    fn terms(&self) -> &Terms {
        &self.declaration.terms
    }
}

impl EvictionPolicy for Lru {
    fn describe(&self) -> &EvictionDeclaration {
        &self.declaration
    }

    fn decide(&mut self, call: &Call, context: Context<'_>, runs: &Matrix, worths: &mut Vec<Worth>) -> Answer<()> {
        let room = context.get(DRAM_FREE) > 0;
        worths.extend((0..runs.rows()).map(|row| {
            let to_dram = room && runs.get(row, at::EST_LOAD) < runs.get(row, at::EST_RECOMPUTE);
            Worth { price: sat::sub(call.now_us, runs.get(row, at::IDLE)), to: if to_dram { DRAM } else { DROP } }
        }));
        Answer::Proposal(())
    }
}
