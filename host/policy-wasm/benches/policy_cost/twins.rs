//! The shipped policies as plain Rust: the crates that the components are built from, in their seats.

use penstock_base::Generation;
use penstock_policy_api::{AdmissionPolicy, EvictionPolicy, FairnessPolicy, OverloadPolicy, Policies, RoutingPolicy};
use penstock_policy_sdk::Load;

use crate::watch::Seated;

/// All five.
#[derive(Debug)]
pub struct Twins {
    admission: penstock_admission_queue_quota::Seat,
    routing: penstock_routing_load_overlap::Seat,
    fairness: penstock_fairness_vtc::Seat,
    eviction: penstock_eviction_gdsf::Seat,
    overload: penstock_overload_degrade_ladder::Seat,
}

impl Twins {
    pub fn new() -> Self {
        fn seat<P: Load>() -> P {
            P::configure("").expect("every default is taken")
        }
        Self { admission: seat(), routing: seat(), fairness: seat(), eviction: seat(), overload: seat() }
    }
}

impl Seated for Twins {}

impl Policies for Twins {
    fn generation(&self) -> Generation {
        Generation(1)
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
