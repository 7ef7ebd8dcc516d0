//! Whose request is placed next? Who gives KV back?

use core::cell::OnceCell;

use penstock_base::codec::Writer;
use penstock_policy_api::{
    Answer, Call, Context, Declared, Fact, FairnessDeclaration, FairnessPolicy, FaultKind, Kept, Manifest, Matrix,
    Question, Ranking, RestoreError, RestoreInfo, Terms, Yielder,
};

use crate::declared::Declares;
use crate::document::ParameterError;
use crate::life::{Instance, Parameters, Policy, terms};
use crate::load::{self, Load};
use crate::tables::{Order, OrderContext, Running, RunningRows, Victims, VictimsContext, Waiting, WaitingRows};

/// No opinion about how long a round with decodes should take.
pub const NO_TARGET: u32 = u32::MAX;
/// A victim's tokens are computed again.
pub const RECOMPUTE: u8 = 0;
/// A victim's blocks are copied out and back.
pub const OFFLOAD: u8 = 1;

/// A fairness policy. The gateway's instance is asked `order`, each replica's own is asked `victims`.
pub trait Fairness: Policy {
    /// What `order` reads of the call.
    type Order: Declares<Order>;
    /// What `order` reads of each waiting request.
    type Waiting: Declares<Waiting>;
    /// What `victims` reads of the call.
    type Victims: Declares<Victims>;
    /// What `victims` reads of each running sequence.
    type Running: Declares<Running>;

    /// Whose turn is it? Rows are written into `ranked`, which comes empty, next first. None leaves it to the native default.
    fn order(&mut self, asked: &OrderAsked<'_, Self>, ranked: &mut Vec<u32>) -> Option<Ranking>;

    /// Who yields? Written into `yielders`, which comes empty, first victim first; left empty it is left to the native default.
    fn victims(&mut self, asked: &VictimsAsked<'_, Self>, yielders: &mut Vec<Yielder>);
}

/// One call of `order`.
#[derive(Debug)]
pub struct OrderAsked<'a, P: Fairness> {
    /// Time, number and seed.
    pub call: &'a Call,
    /// What else was asked for.
    pub context: OrderContext<'a, P::Order>,
    /// Waiting requests, in the order they were queued.
    pub waiting: WaitingRows<'a, P::Waiting>,
}

/// One call of `victims`.
#[derive(Debug)]
pub struct VictimsAsked<'a, P: Fairness> {
    /// Time, number and seed.
    pub call: &'a Call,
    /// What else was asked for.
    pub context: VictimsContext<'a, P::Victims>,
    /// Sequences whose blocks can be freed now, in the order they joined.
    pub running: RunningRows<'a, P::Running>,
}

/// `P` in a seat: one of the host's policies, and what a component exports.
#[derive(Debug)]
pub struct Seated<P: Fairness> {
    instance: Instance<P>,
    /// Made when somebody asks; a component never does.
    declaration: OnceCell<FairnessDeclaration>,
}

impl<P: Fairness> Seated<P> {
    /// A fresh instance.
    pub fn new(parameters: P::Parameters) -> Self {
        Self { instance: Instance::new(parameters), declaration: OnceCell::new() }
    }

    /// The policy itself.
    pub fn policy(&self) -> &P {
        &self.instance.policy
    }
}

impl<P: Fairness> Load for Seated<P> {
    fn manifest() -> Manifest {
        load::of::<P>(vec![P::Order::wanted(), P::Waiting::wanted(), P::Victims::wanted(), P::Running::wanted()])
    }

    fn configure(parameters: &str) -> Result<Self, ParameterError> {
        P::Parameters::parse(parameters).map(Self::new)
    }
}

impl<P: Fairness> penstock_policy_api::Policy for Seated<P> {
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

impl<P: Fairness> FairnessPolicy for Seated<P> {
    fn describe(&self) -> &FairnessDeclaration {
        const CHECKED: &str = "names are checked against the same registry while compiling";
        self.declaration.get_or_init(|| FairnessDeclaration {
            terms: terms::<P>(),
            order: Declared::resolve(&P::Order::wanted().names, Question::Order).expect(CHECKED),
            waiting: Declared::resolve(&P::Waiting::wanted().names, Question::Order).expect(CHECKED),
            victims: Declared::resolve(&P::Victims::wanted().names, Question::Victims).expect(CHECKED),
            running: Declared::resolve(&P::Running::wanted().names, Question::Victims).expect(CHECKED),
        })
    }

    fn order(&mut self, call: &Call, context: Context<'_>, waiting: &Matrix, ranked: &mut Vec<u32>) -> Answer<Ranking> {
        let asked = OrderAsked { call, context: OrderContext::new(context.values), waiting: WaitingRows::new(waiting) };
        self.instance.policy.order(&asked, ranked).map_or(Answer::NoOpinion, Answer::Proposal)
    }

    fn victims(
        &mut self,
        call: &Call,
        context: Context<'_>,
        running: &Matrix,
        yielders: &mut Vec<Yielder>,
    ) -> Answer<()> {
        let asked =
            VictimsAsked { call, context: VictimsContext::new(context.values), running: RunningRows::new(running) };
        self.instance.policy.victims(&asked, yielders);
        if yielders.is_empty() { Answer::NoOpinion } else { Answer::Proposal(()) }
    }
}
