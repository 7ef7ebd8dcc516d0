//! May this request enter the queue now?

use core::cell::OnceCell;

use penstock_base::codec::Writer;
use penstock_policy_api::{
    AdmissionDeclaration, AdmissionPolicy, Answer, Call, Context, Declaration, Declared, Fact, FaultKind, Kept,
    Manifest, Question, RequestRecord, RestoreError, RestoreInfo, Terms, Verdict,
};

use crate::declared::Declares;
use crate::document::ParameterError;
use crate::life::{Instance, Parameters, Policy, terms};
use crate::load::{self, Load};
use crate::tables::{Admission as Table, AdmissionContext};

/// Reasons of a refusal that the contract names; from 16 on they are the policy's own.
pub mod reason {
    /// The tenant's quota is spent.
    pub const QUOTA: u16 = 0;
    /// There is no room.
    pub const CAPACITY: u16 = 1;
    /// It could not be served before its deadline.
    pub const DEADLINE: u16 = 2;
    /// The same request comes again and again.
    pub const RETRY_STORM: u16 = 3;
    /// It is too long.
    pub const TOO_LONG: u16 = 4;
}

/// An admission policy.
pub trait Admission: Policy {
    /// What it reads of the call.
    type Context: Declares<Table>;

    /// May `asked.request` enter? None leaves it to the native default.
    fn decide(&mut self, asked: &Asked<'_, Self>) -> Option<Verdict>;
}

/// One call.
#[derive(Debug)]
pub struct Asked<'a, P: Admission> {
    /// Time, number and seed.
    pub call: &'a Call,
    /// Who wants to enter.
    pub request: &'a RequestRecord,
    /// What else was asked for.
    pub context: AdmissionContext<'a, P::Context>,
}

/// `P` in a seat: one of the host's policies, and what a component exports.
#[derive(Debug)]
pub struct Seated<P: Admission> {
    instance: Instance<P>,
    /// Made when somebody asks; a component never does.
    declaration: OnceCell<AdmissionDeclaration>,
}

impl<P: Admission> Seated<P> {
    /// A fresh instance.
    pub fn new(parameters: P::Parameters) -> Self {
        Self { instance: Instance::new(parameters), declaration: OnceCell::new() }
    }

    /// The policy itself.
    pub fn policy(&self) -> &P {
        &self.instance.policy
    }
}

impl<P: Admission> Load for Seated<P> {
    fn manifest() -> Manifest {
        load::of::<P>(vec![P::Context::wanted()])
    }

    fn configure(parameters: &str) -> Result<Self, ParameterError> {
        P::Parameters::parse(parameters).map(Self::new)
    }
}

impl<P: Admission> penstock_policy_api::Policy for Seated<P> {
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

impl<P: Admission> AdmissionPolicy for Seated<P> {
    fn describe(&self) -> &AdmissionDeclaration {
        self.declaration.get_or_init(|| {
            let context = Declared::resolve(&P::Context::wanted().names, Question::Admission);
            let context = context.expect("names are checked against the same registry while compiling");
            Declaration { terms: terms::<P>(), context, rows: () }
        })
    }

    fn decide(&mut self, call: &Call, request: &RequestRecord, context: Context<'_>) -> Answer<Verdict> {
        let asked = Asked { call, request, context: AdmissionContext::new(context.values) };
        self.instance.policy.decide(&asked).map_or(Answer::NoOpinion, Answer::Proposal)
    }
}
