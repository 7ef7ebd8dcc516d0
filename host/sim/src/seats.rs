//! Who sits in the seats of a run's machines? The native defaults, unless a [`Cast`] says otherwise.
//!
//! A cast is asked once for every machine that starts, so that machines share nothing but code. Policies with whims
//! ([`crate::policies`]) sit before whoever the cast names.

use penstock_base::{Generation, Instant};
use penstock_journal::MachineKind;
use penstock_policy_api::native::{Bounded, ClassFirst, Ladder, Lru, OverlapLoad};
use penstock_policy_api::{AdmissionPolicy, EvictionPolicy, FairnessPolicy, OverloadPolicy, Policies, RoutingPolicy};

/// The seats of one machine, as its driver sees them.
pub trait Seats: Policies {
    /// Another set takes over between two steps.
    ///
    /// # Errors
    /// It cannot: the run ends with the reason.
    fn switch(&mut self, generation: Generation, now: Instant) -> Result<(), String>;

    /// A step is over: what is due between steps.
    ///
    /// # Errors
    /// Something happened in the step that must not: the run ends with it.
    fn between_steps(&mut self, now: Instant) -> Result<(), String> {
        let _ = now;
        Ok(())
    }
}

/// Who sits in the seats.
pub trait Cast {
    /// Fresh seats for a machine of that kind and context window.
    ///
    /// # Errors
    /// There are none: the run ends with the reason.
    fn seats(&self, machine: MachineKind, context_tokens_max: u32) -> Result<Box<dyn Seats>, String>;
}

/// The native defaults.
#[derive(Clone, Copy, Debug)]
pub struct Natives;

impl Cast for Natives {
    fn seats(&self, _: MachineKind, context_tokens_max: u32) -> Result<Box<dyn Seats>, String> {
        Ok(Box::new(NativeSeats::new(context_tokens_max)))
    }
}

/// The native defaults in their seats. They keep nothing, so that a switch changes the generation alone.
#[derive(Debug)]
pub struct NativeSeats {
    generation: Generation,
    admission: Bounded,
    routing: OverlapLoad,
    fairness: ClassFirst,
    eviction: Lru,
    overload: Ladder,
}

impl NativeSeats {
    /// A fresh set for a machine with this context window.
    pub fn new(context_tokens_max: u32) -> Self {
        Self {
            generation: Generation(0),
            admission: Bounded::new(),
            routing: OverlapLoad::new(),
            fairness: ClassFirst::new(),
            eviction: Lru::new(),
            overload: Ladder::new(context_tokens_max),
        }
    }
}

impl Policies for NativeSeats {
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

impl Seats for NativeSeats {
    fn switch(&mut self, generation: Generation, _now: Instant) -> Result<(), String> {
        self.generation = generation;
        Ok(())
    }
}
