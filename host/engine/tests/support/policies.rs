//! Policies that panic when asked for, and policies that promise less than they should.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use penstock_base::Generation;
use penstock_policy_api::native::{Bounded, NativePolicies};
use penstock_policy_api::{
    AdmissionDeclaration, AdmissionPolicy, Answer, Call, Context, EvictionPolicy, FairnessPolicy, OverloadPolicy,
    Placement, Policies, Policy, RequestRecord, RoutingDeclaration, RoutingPolicy, RoutingQuestion, Terms, Verdict,
};

/// The native set, but admission reserves a quarter of the output: what runs outgrows the pool and is preempted.
pub struct OptimisticPolicies {
    native: NativePolicies,
    admission: Optimist,
}

struct Optimist(Bounded);

impl OptimisticPolicies {
    /// A fresh set.
    pub fn new() -> Self {
        Self { native: NativePolicies::new(Generation(1), 4_096), admission: Optimist(Bounded::new()) }
    }
}

impl Policies for OptimisticPolicies {
    fn generation(&self) -> Generation {
        self.native.generation()
    }
    fn admission(&mut self) -> &mut dyn AdmissionPolicy {
        &mut self.admission
    }
    fn routing(&mut self) -> &mut dyn RoutingPolicy {
        self.native.routing()
    }
    fn fairness(&mut self) -> &mut dyn FairnessPolicy {
        self.native.fairness()
    }
    fn eviction(&mut self) -> &mut dyn EvictionPolicy {
        self.native.eviction()
    }
    fn overload(&mut self) -> &mut dyn OverloadPolicy {
        self.native.overload()
    }
}

impl Policy for Optimist {
    fn terms(&self) -> &Terms {
        self.0.terms()
    }
}

impl AdmissionPolicy for Optimist {
    fn describe(&self) -> &AdmissionDeclaration {
        self.0.describe()
    }
    fn decide(&mut self, call: &Call, request: &RequestRecord, context: Context<'_>) -> Answer<Verdict> {
        match self.0.decide(call, request, context) {
            Answer::Proposal(Verdict::Admit { reserve_output_tokens, class_rank }) => {
                Answer::Proposal(Verdict::Admit {
                    reserve_output_tokens: reserve_output_tokens.div_ceil(4),
                    class_rank,
                })
            }
            other => other,
        }
    }
}

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

/// The native set, which panics in one question about fairness or eviction and never again.
pub struct FusedPolicies {
    native: NativePolicies,
    /// Questions left before the panic; shared by all sets of a machine.
    fuse: Arc<AtomicI64>,
}

impl FusedPolicies {
    /// A set on this fuse.
    pub fn new(fuse: &Arc<AtomicI64>) -> Self {
        Self { native: NativePolicies::new(Generation(1), 4_096), fuse: Arc::clone(fuse) }
    }
}

impl Policies for FusedPolicies {
    fn generation(&self) -> Generation {
        self.native.generation()
    }
    fn admission(&mut self) -> &mut dyn AdmissionPolicy {
        self.native.admission()
    }
    fn routing(&mut self) -> &mut dyn RoutingPolicy {
        self.native.routing()
    }
    fn fairness(&mut self) -> &mut dyn FairnessPolicy {
        assert!(self.fuse.fetch_sub(1, Ordering::Relaxed) != 0, "the test wants a panic");
        self.native.fairness()
    }
    fn eviction(&mut self) -> &mut dyn EvictionPolicy {
        assert!(self.fuse.fetch_sub(1, Ordering::Relaxed) != 0, "the test wants a panic");
        self.native.eviction()
    }
    fn overload(&mut self) -> &mut dyn OverloadPolicy {
        self.native.overload()
    }
}

/// The native set, but routing names a row that is not there.
pub struct Nonsense {
    native: NativePolicies,
    routing: NonsenseRouting,
}

struct NonsenseRouting(RoutingDeclaration);

impl Nonsense {
    /// A fresh set.
    pub fn new() -> Self {
        let mut native = NativePolicies::new(Generation(0), 4_096);
        let mut declaration = native.routing().describe().clone();
        declaration.terms.name = "nonsense".into();
        Self { native, routing: NonsenseRouting(declaration) }
    }
}

impl Policies for Nonsense {
    fn generation(&self) -> Generation {
        self.native.generation()
    }
    fn admission(&mut self) -> &mut dyn AdmissionPolicy {
        self.native.admission()
    }
    fn routing(&mut self) -> &mut dyn RoutingPolicy {
        &mut self.routing
    }
    fn fairness(&mut self) -> &mut dyn FairnessPolicy {
        self.native.fairness()
    }
    fn eviction(&mut self) -> &mut dyn EvictionPolicy {
        self.native.eviction()
    }
    fn overload(&mut self) -> &mut dyn OverloadPolicy {
        self.native.overload()
    }
}

impl Policy for NonsenseRouting {
    fn terms(&self) -> &Terms {
        &self.0.terms
    }
}

impl RoutingPolicy for NonsenseRouting {
    fn describe(&self) -> &RoutingDeclaration {
        &self.0
    }
    fn decide(&mut self, _: &Call, _: &RoutingQuestion<'_>, ranked: &mut Vec<u32>) -> Answer<Placement> {
        ranked.push(77);
        Answer::Proposal(Placement::Place { wait_us: 0, colocate: false })
    }
}
