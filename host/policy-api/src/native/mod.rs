//! The native defaults: they serve when no component is loaded, answer whenever a loaded one does not, and are the oracle of the
//! conformance suite. Pure integers over the same values that a guest gets.

mod best_credit;
mod bounded;
mod class_first;
mod ladder;
mod lru;
mod order;
mod overlap_load;
mod victims;

pub use best_credit::BestCredit;
pub use bounded::Bounded;
pub use class_first::ClassFirst;
pub use ladder::{FULL_PPM, Ladder, level_after, saturation_ppm};
pub use lru::Lru;
pub use overlap_load::OverlapLoad;

use penstock_base::Generation;

use crate::policy::{AdmissionPolicy, EvictionPolicy, FairnessPolicy, OverloadPolicy, Policies, RoutingPolicy};

/// Names the positions of a declaration: `positions! { at: WaitingSignal { CLASS = ClassRank, .. } }` gives `at::CLASS` and `at::ALL`.
macro_rules! positions {
    ($module:ident: $signal:ident { $($name:ident = $which:ident),* $(,)? }) => {
        mod $module {
            use crate::generated::$signal;
            #[allow(non_camel_case_types, clippy::upper_case_acronyms, reason = "turned into constants right below")]
            #[repr(usize)]
            enum Position { $($name),* }
            $(pub(super) const $name: usize = Position::$name as usize;)*
            pub(super) const ALL: &[$signal] = &[$($signal::$which),*];
        }
    };
}
use positions;

/// Is the value at `position` known, by the mask of its row or context?
fn is_known(mask: u64, position: usize) -> bool {
    mask >> position & 1 == 1
}

/// The native defaults in all seats.
#[derive(Debug)]
pub struct NativePolicies {
    generation: Generation,
    admission: Bounded,
    routing: OverlapLoad,
    fairness: ClassFirst,
    eviction: Lru,
    overload: Ladder,
}

impl NativePolicies {
    /// A fresh set. The ladder refuses inputs beyond a part of `context_window_tokens`.
    pub fn new(generation: Generation, context_window_tokens: u32) -> Self {
        Self {
            generation,
            admission: Bounded::new(),
            routing: OverlapLoad::new(),
            fairness: ClassFirst::new(),
            eviction: Lru::new(),
            overload: Ladder::new(context_window_tokens),
        }
    }
}

impl Policies for NativePolicies {
    fn generation(&self) -> Generation {
        self.generation
    }
    fn admission(&mut self) -> &mut dyn AdmissionPolicy {
        &mut self.admission
    }
    fn routing(&mut self) -> &mut dyn RoutingPolicy {
        &mut self.routing
    }
    fn fairness(&mut self) -> &mut dyn FairnessPolicy {
        &mut self.fairness
    }
    fn eviction(&mut self) -> &mut dyn EvictionPolicy {
        &mut self.eviction
    }
    fn overload(&mut self) -> &mut dyn OverloadPolicy {
        &mut self.overload
    }
}
