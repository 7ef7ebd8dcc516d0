//! Which replica runs it, and is it worth a wait?

use core::cell::OnceCell;

use penstock_base::codec::Writer;
use penstock_policy_api::{
    Answer, Call, Declaration, Declared, Fact, FaultKind, Kept, Manifest, Placement, Question, RequestRecord,
    RestoreError, RestoreInfo, RoutingDeclaration, RoutingPhase, RoutingPolicy, RoutingQuestion, Terms,
};

use crate::declared::Declares;
use crate::document::ParameterError;
use crate::life::{Instance, Parameters, Policy, terms};
use crate::load::{self, Load};
use crate::tables::{Replica, ReplicaRows, Routing as Table, RoutingContext};

/// Most rows that a placement ranks.
pub const RANKED_MAX: usize = penstock_base::limits::RANKED_MAX;

/// A routing policy.
pub trait Routing: Policy {
    /// What it reads of the call.
    type Context: Declares<Table>;
    /// What it reads of each replica.
    type Replicas: Declares<Replica>;

    /// Where does `asked.request` go? Rows are written into `ranked`, which comes empty, best first, at most [`RANKED_MAX`]. None leaves it
    /// to the native default.
    fn decide(&mut self, asked: &Asked<'_, Self>, ranked: &mut Vec<u32>) -> Option<Placement>;
}

/// One call.
#[derive(Debug)]
pub struct Asked<'a, P: Routing> {
    /// Time, number and seed.
    pub call: &'a Call,
    /// What is to be placed.
    pub request: &'a RequestRecord,
    /// What the placement is for.
    pub phase: RoutingPhase,
    /// What else was asked for.
    pub context: RoutingContext<'a, P::Context>,
    /// Replicas that passed the hard filter, by id.
    pub replicas: ReplicaRows<'a, P::Replicas>,
}

/// `P` in a seat: one of the host's policies, and what a component exports.
#[derive(Debug)]
pub struct Seated<P: Routing> {
    instance: Instance<P>,
    /// Made when somebody asks; a component never does.
    declaration: OnceCell<RoutingDeclaration>,
}

impl<P: Routing> Seated<P> {
    /// A fresh instance.
    pub fn new(parameters: P::Parameters) -> Self {
        Self { instance: Instance::new(parameters), declaration: OnceCell::new() }
    }

    /// The policy itself.
    pub fn policy(&self) -> &P {
        &self.instance.policy
    }
}

impl<P: Routing> Load for Seated<P> {
    fn manifest() -> Manifest {
        load::of::<P>(vec![P::Context::wanted(), P::Replicas::wanted()])
    }

    fn configure(parameters: &str) -> Result<Self, ParameterError> {
        P::Parameters::parse(parameters).map(Self::new)
    }
}

impl<P: Routing> penstock_policy_api::Policy for Seated<P> {
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

impl<P: Routing> RoutingPolicy for Seated<P> {
    fn describe(&self) -> &RoutingDeclaration {
        const CHECKED: &str = "names are checked against the same registry while compiling";
        self.declaration.get_or_init(|| Declaration {
            terms: terms::<P>(),
            context: Declared::resolve(&P::Context::wanted().names, Question::Routing).expect(CHECKED),
            rows: Declared::resolve(&P::Replicas::wanted().names, Question::Routing).expect(CHECKED),
        })
    }

    fn decide(&mut self, call: &Call, asked: &RoutingQuestion<'_>, ranked: &mut Vec<u32>) -> Answer<Placement> {
        let asked = Asked {
            call,
            request: asked.request,
            phase: asked.phase,
            context: RoutingContext::new(asked.context.values),
            replicas: ReplicaRows::new(asked.replicas),
        };
        self.instance.policy.decide(&asked, ranked).map_or(Answer::NoOpinion, Answer::Proposal)
    }
}
