//! How does a component sit where a native policy could? Owned, with the fuel of its last call to read.

use std::cell::Cell;
use std::rc::Rc;

use penstock_base::codec::Writer;
use penstock_policy_api::{
    Action, AdmissionDeclaration, AdmissionPolicy, Answer, Call, Context, Decision, EvictionDeclaration,
    EvictionPolicy, Fact, FairnessDeclaration, FairnessPolicy, FaultKind, Kept, Matrix, OverloadDeclaration,
    OverloadPolicy, OverloadQuestion, Placement, Policies as _, Policy, Ranking, RequestRecord, RestoreError,
    RestoreInfo, RoutingDeclaration, RoutingPolicy, RoutingQuestion, Stance, Terms, Verdict, Worth, Yielder,
};
use penstock_policy_harness::Subject;
use penstock_policy_wasm::WasmPolicies;

/// A policy in its seat.
pub struct Seated {
    /// The policy.
    pub subject: Subject,
    fuel: Rc<Cell<u64>>,
}

impl Seated {
    /// A native policy. It burns nothing.
    pub fn native(subject: Subject) -> Self {
        Self { subject, fuel: Rc::default() }
    }

    /// The component in the seat of `decision`.
    pub(crate) fn component(mut policies: WasmPolicies, decision: Decision) -> Self {
        let fuel: Rc<Cell<u64>> = Rc::default();
        let meter = Rc::clone(&fuel);
        macro_rules! guest {
            ($seat:ident) => {{
                let declaration = policies.$seat().describe().clone();
                let terms = declaration.terms.clone();
                Box::new(Guest { policies, decision, declaration, terms, fuel: meter })
            }};
        }
        let subject = match decision {
            Decision::Admission => Subject::Admission(guest!(admission)),
            Decision::Routing => Subject::Routing(guest!(routing)),
            Decision::Fairness => Subject::Fairness(guest!(fairness)),
            Decision::Eviction => Subject::Eviction(guest!(eviction)),
            Decision::Overload => Subject::Overload(guest!(overload)),
        };
        Self { subject, fuel }
    }

    /// Fuel of the last call, whichever it was.
    pub fn last_fuel(&self) -> u64 {
        self.fuel.get()
    }

    /// Its life cycle.
    pub fn policy(&mut self) -> &mut dyn Policy {
        match &mut self.subject {
            Subject::Admission(policy) => policy.as_mut(),
            Subject::Routing(policy) => policy.as_mut(),
            Subject::Fairness(policy) => policy.as_mut(),
            Subject::Eviction(policy) => policy.as_mut(),
            Subject::Overload(policy) => policy.as_mut(),
        }
    }

    /// Its state as bytes; `Err` names the fault.
    pub fn save(&mut self) -> Result<Vec<u8>, String> {
        let mut out = Writer::new();
        let saved = self.policy().save(&mut out);
        saved.map(|()| out.into_bytes()).map_err(|kind| format!("save failed: {}", kind.name()))
    }
}

/// One component with the machine's seats around it; the others are native and never asked.
struct Guest<D> {
    policies: WasmPolicies,
    decision: Decision,
    declaration: D,
    terms: Terms,
    fuel: Rc<Cell<u64>>,
}

impl<D> Guest<D> {
    fn inner(&mut self) -> &mut dyn Policy {
        match self.decision {
            Decision::Admission => self.policies.admission(),
            Decision::Routing => self.policies.routing(),
            Decision::Fairness => self.policies.fairness(),
            Decision::Eviction => self.policies.eviction(),
            Decision::Overload => self.policies.overload(),
        }
    }

    fn metered<T>(&mut self, call: impl FnOnce(&mut Self) -> T) -> T {
        let answer = call(self);
        self.fuel.set(self.policies.last_fuel(self.decision));
        answer
    }
}

impl<D> Policy for Guest<D> {
    fn terms(&self) -> &Terms {
        &self.terms
    }
    fn observe(&mut self, facts: &[Fact]) -> Result<(), FaultKind> {
        self.metered(|guest| guest.inner().observe(facts))
    }
    fn save(&mut self, out: &mut Writer) -> Result<(), FaultKind> {
        self.metered(|guest| guest.inner().save(out))
    }
    fn restore(&mut self, info: &RestoreInfo, state: &[u8]) -> Result<Kept, RestoreError> {
        self.metered(|guest| guest.inner().restore(info, state))
    }
}

impl AdmissionPolicy for Guest<AdmissionDeclaration> {
    fn describe(&self) -> &AdmissionDeclaration {
        &self.declaration
    }
    fn decide(&mut self, call: &Call, request: &RequestRecord, context: Context<'_>) -> Answer<Verdict> {
        self.metered(|guest| guest.policies.admission().decide(call, request, context))
    }
}

impl RoutingPolicy for Guest<RoutingDeclaration> {
    fn describe(&self) -> &RoutingDeclaration {
        &self.declaration
    }
    fn decide(&mut self, call: &Call, asked: &RoutingQuestion<'_>, ranked: &mut Vec<u32>) -> Answer<Placement> {
        self.metered(|guest| guest.policies.routing().decide(call, asked, ranked))
    }
}

impl FairnessPolicy for Guest<FairnessDeclaration> {
    fn describe(&self) -> &FairnessDeclaration {
        &self.declaration
    }
    fn order(&mut self, call: &Call, context: Context<'_>, waiting: &Matrix, ranked: &mut Vec<u32>) -> Answer<Ranking> {
        self.metered(|guest| guest.policies.fairness().order(call, context, waiting, ranked))
    }
    fn victims(
        &mut self,
        call: &Call,
        context: Context<'_>,
        running: &Matrix,
        yielders: &mut Vec<Yielder>,
    ) -> Answer<()> {
        self.metered(|guest| guest.policies.fairness().victims(call, context, running, yielders))
    }
}

impl EvictionPolicy for Guest<EvictionDeclaration> {
    fn describe(&self) -> &EvictionDeclaration {
        &self.declaration
    }
    fn decide(&mut self, call: &Call, context: Context<'_>, runs: &Matrix, worths: &mut Vec<Worth>) -> Answer<()> {
        self.metered(|guest| guest.policies.eviction().decide(call, context, runs, worths))
    }
}

impl OverloadPolicy for Guest<OverloadDeclaration> {
    fn describe(&self) -> &OverloadDeclaration {
        &self.declaration
    }
    fn decide(&mut self, call: &Call, asked: &OverloadQuestion<'_>, actions: &mut Vec<Action>) -> Answer<Stance> {
        self.metered(|guest| guest.policies.overload().decide(call, asked, actions))
    }
}
