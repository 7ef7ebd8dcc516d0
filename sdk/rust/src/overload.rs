//! What gives way at this saturation?

use core::cell::OnceCell;

use penstock_base::codec::Writer;
use penstock_policy_api::{
    Action, Answer, Call, Declaration, Declared, Fact, FaultKind, Kept, Manifest, OverloadDeclaration, OverloadPolicy,
    OverloadQuestion, OverloadRows, Question, RestoreError, RestoreInfo, Stance, Terms,
};

use crate::declared::Declares;
use crate::document::ParameterError;
use crate::life::{Instance, Parameters, Policy, terms};
use crate::load::{self, Load};
use crate::tables::{Class, ClassRows, Overload as Table, OverloadContext, Replica, ReplicaRows};

/// All of them, where an action's amount is a share.
pub const ALL_PPM: u64 = 1_000_000;

/// An overload policy.
pub trait Overload: Policy {
    /// What it reads of the call.
    type Context: Declares<Table>;
    /// What it reads of each class.
    type Classes: Declares<Class>;
    /// What it reads of each replica; names that only routing is offered refuse the policy at load.
    type Replicas: Declares<Replica>;

    /// What stands from now on? Measures are written into `actions`, which comes empty. None leaves it to the native default.
    fn decide(&mut self, asked: &Asked<'_, Self>, actions: &mut Vec<Action>) -> Option<Stance>;
}

/// One call.
#[derive(Debug)]
pub struct Asked<'a, P: Overload> {
    /// Time, number and seed.
    pub call: &'a Call,
    /// What else was asked for.
    pub context: OverloadContext<'a, P::Context>,
    /// Eight rows, rank 0 first.
    pub classes: ClassRows<'a, P::Classes>,
    /// Ready replicas, by id.
    pub replicas: ReplicaRows<'a, P::Replicas>,
}

/// `P` in a seat: one of the host's policies, and what a component exports.
#[derive(Debug)]
pub struct Seated<P: Overload> {
    instance: Instance<P>,
    /// Made when somebody asks; a component never does.
    declaration: OnceCell<OverloadDeclaration>,
}

impl<P: Overload> Seated<P> {
    /// A fresh instance.
    pub fn new(parameters: P::Parameters) -> Self {
        Self { instance: Instance::new(parameters), declaration: OnceCell::new() }
    }

    /// The policy itself.
    pub fn policy(&self) -> &P {
        &self.instance.policy
    }
}

impl<P: Overload> Load for Seated<P> {
    fn manifest() -> Manifest {
        load::of::<P>(vec![P::Context::wanted(), P::Classes::wanted(), P::Replicas::wanted()])
    }

    fn configure(parameters: &str) -> Result<Self, ParameterError> {
        P::Parameters::parse(parameters).map(Self::new)
    }
}

impl<P: Overload> penstock_policy_api::Policy for Seated<P> {
    fn terms(&self) -> &Terms {
        &self.describe().terms
    }
    fn observe(&mut self, facts: &[Fact]) -> Result<(), FaultKind> {
        self.instance.observe(facts)
    }
    fn save(&mut self, out: &mut Writer) -> Result<(), FaultKind> {
        self.instance.save(out);
        Ok(())
    }
    fn restore(&mut self, info: &RestoreInfo, state: &[u8]) -> Result<Kept, RestoreError> {
        self.instance.restore(info, state)
    }
}

impl<P: Overload> OverloadPolicy for Seated<P> {
    fn describe(&self) -> &OverloadDeclaration {
        const CHECKED: &str = "names are checked against the same registry while compiling";
        self.declaration.get_or_init(|| Declaration {
            terms: terms::<P>(),
            context: Declared::resolve(&P::Context::wanted().names, Question::Overload).expect(CHECKED),
            rows: OverloadRows {
                classes: Declared::resolve(&P::Classes::wanted().names, Question::Overload).expect(CHECKED),
                replicas: Declared::resolve(&P::Replicas::wanted().names, Question::Overload)
                    .expect("replicas of overload are declared without names that only routing is offered"),
            },
        })
    }

    fn decide(&mut self, call: &Call, asked: &OverloadQuestion<'_>, actions: &mut Vec<Action>) -> Answer<Stance> {
        let asked = Asked {
            call,
            context: OverloadContext::new(asked.context.values),
            classes: ClassRows::new(asked.classes),
            replicas: ReplicaRows::new(asked.replicas),
        };
        self.instance.policy.decide(&asked, actions).map_or(Answer::NoOpinion, Answer::Proposal)
    }
}
