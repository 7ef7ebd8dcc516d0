//! What is each cached run worth keeping, and where does it go?

use core::cell::OnceCell;

use penstock_base::codec::Writer;
use penstock_policy_api::{
    Answer, Call, Context, Declaration, Declared, EvictionDeclaration, EvictionPolicy, Fact, FaultKind, Kept, Manifest,
    Matrix, Question, RestoreError, RestoreInfo, Terms, Worth,
};

use crate::declared::Declares;
use crate::document::ParameterError;
use crate::life::{Instance, Parameters, Policy, terms};
use crate::load::{self, Load};
use crate::tables::{Eviction as Table, EvictionContext, Run, RunRows};

/// A run that leaves is dropped.
pub const DROP: u8 = 0;
/// A run that leaves goes to DRAM.
pub const DRAM: u8 = 1;
/// A run that leaves goes to SSD.
pub const SSD: u8 = 2;

/// An eviction policy.
pub trait Eviction: Policy {
    /// What it reads of the call.
    type Context: Declares<Table>;
    /// What it reads of each run.
    type Runs: Declares<Run>;

    /// Prices every run: one answer a row into `worths`, which comes empty, in row order; left empty it is left to the native default.
    fn decide(&mut self, asked: &Asked<'_, Self>, worths: &mut Vec<Worth>);
}

/// One call.
#[derive(Debug)]
pub struct Asked<'a, P: Eviction> {
    /// Time, number and seed.
    pub call: &'a Call,
    /// What else was asked for.
    pub context: EvictionContext<'a, P::Context>,
    /// Cached runs that nobody references.
    pub runs: RunRows<'a, P::Runs>,
}

/// `P` in a seat: one of the host's policies, and what a component exports.
#[derive(Debug)]
pub struct Seated<P: Eviction> {
    instance: Instance<P>,
    /// Made when somebody asks; a component never does.
    declaration: OnceCell<EvictionDeclaration>,
}

impl<P: Eviction> Seated<P> {
    /// A fresh instance.
    pub fn new(parameters: P::Parameters) -> Self {
        Self { instance: Instance::new(parameters), declaration: OnceCell::new() }
    }

    /// The policy itself.
    pub fn policy(&self) -> &P {
        &self.instance.policy
    }
}

impl<P: Eviction> Load for Seated<P> {
    fn manifest() -> Manifest {
        load::of::<P>(vec![P::Context::wanted(), P::Runs::wanted()])
    }

    fn configure(parameters: &str) -> Result<Self, ParameterError> {
        P::Parameters::parse(parameters).map(Self::new)
    }
}

impl<P: Eviction> penstock_policy_api::Policy for Seated<P> {
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

impl<P: Eviction> EvictionPolicy for Seated<P> {
    fn describe(&self) -> &EvictionDeclaration {
        const CHECKED: &str = "names are checked against the same registry while compiling";
        self.declaration.get_or_init(|| Declaration {
            terms: terms::<P>(),
            context: Declared::resolve(&P::Context::wanted().names, Question::Eviction).expect(CHECKED),
            rows: Declared::resolve(&P::Runs::wanted().names, Question::Eviction).expect(CHECKED),
        })
    }

    fn decide(&mut self, call: &Call, context: Context<'_>, runs: &Matrix, worths: &mut Vec<Worth>) -> Answer<()> {
        let asked = Asked { call, context: EvictionContext::new(context.values), runs: RunRows::new(runs) };
        self.instance.policy.decide(&asked, worths);
        if worths.is_empty() { Answer::NoOpinion } else { Answer::Proposal(()) }
    }
}
