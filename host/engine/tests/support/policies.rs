//! Policies that panic when asked for.

use penstock_base::Generation;
use penstock_policy_api::{AdmissionPolicy, EvictionPolicy, FairnessPolicy, OverloadPolicy, Policies, RoutingPolicy};

/// A set that breaks whoever asks it.
pub struct PanickingPolicies;

impl Policies for PanickingPolicies {
    fn generation(&self) -> Generation {
        panic!("the test wants a panic")
    }
    fn admission(&mut self) -> &mut dyn AdmissionPolicy {
        panic!("the test wants a panic")
    }
    fn routing(&mut self) -> &mut dyn RoutingPolicy {
        panic!("the test wants a panic")
    }
    fn fairness(&mut self) -> &mut dyn FairnessPolicy {
        panic!("the test wants a panic")
    }
    fn eviction(&mut self) -> &mut dyn EvictionPolicy {
        panic!("the test wants a panic")
    }
    fn overload(&mut self) -> &mut dyn OverloadPolicy {
        panic!("the test wants a panic")
    }
}
