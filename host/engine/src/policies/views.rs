//! The seats as a machine sees them: each takes the time of every question, and notes what was told and answered.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use penstock_base::codec::Writer;
use penstock_base::{Duration, Instant};
use penstock_journal::told::Told;
use penstock_journal::wire::Given;
use penstock_policy_api::{
    Action, AdmissionDeclaration, AdmissionPolicy, Answer, Call, Context, Decision, EvictionDeclaration,
    EvictionPolicy, Fact, FairnessDeclaration, FairnessPolicy, FallbackReason, FaultKind, Kept, Matrix,
    OverloadDeclaration, OverloadPolicy, OverloadQuestion, Placement, Policy, Question, Ranking, RequestRecord, Rest,
    RestoreError, RestoreInfo, RoutingDeclaration, RoutingPolicy, RoutingQuestion, Stance, Terms, Verdict, Worth,
    Yielder,
};
use prometheus::Histogram;

use super::inputs::{Names, ToldOf};
use super::log::{DecisionRecord, Proposal, first_rows};
use super::recorder::{Asked, Shared};
use super::seats::SeatedPolicies;

/// One of the five seats.
pub(super) trait Seat {
    const DECISION: Decision;
    type Declaration: Clone;
    fn life(seats: &mut dyn SeatedPolicies) -> &mut dyn Policy;
    fn declaration(seats: &mut dyn SeatedPolicies) -> Self::Declaration;
    fn terms(declaration: &Self::Declaration) -> &Terms;
    /// Names of what its questions are told: fairness has two.
    fn names(declaration: &Self::Declaration) -> [Arc<Names>; 2];
}

macro_rules! seat {
    ($seat:ident, $declaration:ident, $accessor:ident, $names:expr) => {
        pub(super) struct $seat;
        impl Seat for $seat {
            const DECISION: Decision = Decision::$seat;
            type Declaration = $declaration;
            fn life(seats: &mut dyn SeatedPolicies) -> &mut dyn Policy {
                seats.$accessor()
            }
            fn declaration(seats: &mut dyn SeatedPolicies) -> $declaration {
                seats.$accessor().describe().clone()
            }
            fn terms(declaration: &$declaration) -> &Terms {
                &declaration.terms
            }
            fn names(declaration: &$declaration) -> [Arc<Names>; 2] {
                let names: fn(&$declaration) -> [Names; 2] = $names;
                names(declaration).map(Arc::new)
            }
        }
    };
}

seat!(Admission, AdmissionDeclaration, admission, |d| [Names::of(&d.context), Names::default()]);
seat!(Routing, RoutingDeclaration, routing, |d| [Names::of(&d.context).and("replicas", &d.rows), Names::default()]);
seat!(Fairness, FairnessDeclaration, fairness, |d| [
    Names::of(&d.order).and("waiting", &d.waiting),
    Names::of(&d.victims).and("running", &d.running)
]);
seat!(Eviction, EvictionDeclaration, eviction, |d| [Names::of(&d.context).and("runs", &d.rows), Names::default()]);
seat!(Overload, OverloadDeclaration, overload, |d| [
    Names::of(&d.context).and("classes", &d.rows.classes).and("replicas", &d.rows.replicas),
    Names::default()
]);

/// One seat as the machine sees it.
pub(super) struct View<S: Seat> {
    shared: Rc<RefCell<Shared>>,
    /// Read when the seat is first lent: a machine never asks some of them.
    described: Option<Described<S>>,
}

/// What does not change while a set is in the seats.
struct Described<S: Seat> {
    declaration: S::Declaration,
    policy: Arc<str>,
    names: [Arc<Names>; 2],
    took: Histogram,
}

/// An answer, and what it took.
struct Timed<T> {
    answer: Answer<T>,
    from: Instant,
    took: Duration,
    fuel: u64,
}

/// About a question that was asked.
struct About<'a> {
    question: Question,
    call: &'a Call,
    /// Over everything that the policy was told.
    inputs: u64,
    request: Option<&'a RequestRecord>,
    context: &'a [u64],
    tables: [Option<&'a Matrix>; 2],
}

impl<S: Seat> View<S> {
    pub fn new(shared: &Rc<RefCell<Shared>>) -> Self {
        Self { shared: Rc::clone(shared), described: None }
    }

    /// Others sit there now.
    pub fn forget(&mut self) {
        self.described = None;
    }

    pub fn lent(&mut self) -> &mut Self {
        if self.described.is_none() {
            let mut shared = self.shared.borrow_mut();
            let declaration = S::declaration(shared.seats());
            let policy: Arc<str> = S::terms(&declaration).name.as_str().into();
            let took = shared.metrics.policy_calls(S::DECISION, &policy);
            let names = S::names(&declaration);
            self.described = Some(Described { declaration, policy, names, took });
        }
        self
    }

    fn described(&self) -> &Described<S> {
        self.described.as_ref().expect("a seat is described before it is lent")
    }

    /// Asks, and takes the time.
    fn timed<T>(&mut self, ask: impl FnOnce(&mut dyn SeatedPolicies) -> Answer<T>) -> Timed<T> {
        let mut shared = self.shared.borrow_mut();
        let from = shared.clock.now();
        let answer = ask(shared.seats());
        let took = shared.clock.now().since(from);
        let fuel = shared.seats().last_fuel(S::DECISION);
        self.described().took.observe(took.0 as f64 / 1e9);
        Timed { answer, from, took, fuel }
    }

    /// Notes what was asked and answered. `proposal` is none where the policy left it to the default.
    fn note<T>(&mut self, about: &About<'_>, timed: &Timed<T>, proposal: Option<Proposal>, given: Given<'_>) {
        let described = self.described();
        let fallback = match timed.answer {
            Answer::Fault(kind) => Some(FallbackReason::Fault(kind)),
            Answer::NoOpinion => Some(FallbackReason::NoOpinion),
            Answer::Proposal(_) => proposal.is_none().then_some(FallbackReason::NoOpinion),
        };
        let names = &described.names[usize::from(about.question == Question::Victims)];
        let told = ToldOf {
            names,
            seed: about.call.seed,
            request: about.request,
            context: about.context,
            tables: about.tables,
        };
        let rows = about.tables.iter().flatten().map(|table| table.rows() as u32).sum();
        let mut shared = self.shared.borrow_mut();
        let record = DecisionRecord {
            sequence: 0,
            generation: shared.generation,
            question: about.question,
            policy: Arc::clone(&described.policy),
            call: about.call.number,
            at: timed.from,
            request: about.request.map(|request| request.request_id),
            inputs: about.inputs,
            rows,
            proposal: proposal.unwrap_or(Proposal::None),
            changed: None,
            fallback,
            kept: None,
            took_ns: timed.took.0,
            fuel: timed.fuel,
        };
        shared.note(Asked { record, given, told });
    }
}

/// What a proposal comes to, where there is one.
fn proposed<T: Copy>(answer: &Answer<T>, proposal: impl FnOnce(T) -> Option<Proposal>) -> Option<Proposal> {
    match answer {
        Answer::Proposal(proposed) => proposal(*proposed),
        Answer::NoOpinion | Answer::Fault(_) => None,
    }
}

impl<S: Seat> Policy for View<S> {
    fn terms(&self) -> &Terms {
        S::terms(&self.described().declaration)
    }
    fn observe(&mut self, facts: &[Fact]) -> Result<(), FaultKind> {
        let mut shared = self.shared.borrow_mut();
        let told = S::life(shared.seats()).observe(facts);
        shared.observed(S::DECISION, told);
        told
    }
    fn save(&mut self, out: &mut Writer) -> Result<(), FaultKind> {
        S::life(self.shared.borrow_mut().seats()).save(out)
    }
    fn restore(&mut self, info: &RestoreInfo, state: &[u8]) -> Result<Kept, RestoreError> {
        S::life(self.shared.borrow_mut().seats()).restore(info, state)
    }
}

impl AdmissionPolicy for View<Admission> {
    fn describe(&self) -> &AdmissionDeclaration {
        &self.described().declaration
    }
    fn decide(&mut self, call: &Call, request: &RequestRecord, context: Context<'_>) -> Answer<Verdict> {
        let inputs = Told::admission(call, request, context);
        let timed = self.timed(|seats| seats.admission().decide(call, request, context));
        let proposal = proposed(&timed.answer, |verdict| {
            Some(match verdict {
                Verdict::Admit { reserve_output_tokens, class_rank } => {
                    Proposal::Admit { reserve_output_tokens, class_rank }
                }
                Verdict::Defer { for_us } => Proposal::Defer { for_us },
                Verdict::Degrade { max_output_tokens, reserve_output_tokens, class_rank } => {
                    Proposal::Degrade { max_output_tokens, reserve_output_tokens, class_rank }
                }
                Verdict::Reject { reason, retry_after_ms } => Proposal::Reject { reason, retry_after_ms },
            })
        });
        let (question, context) = (Question::Admission, context.values);
        let about = About { question, call, inputs, request: Some(request), context, tables: [None; 2] };
        self.note(&about, &timed, proposal, Given::of(timed.answer, Given::Verdict));
        timed.answer
    }
}

impl RoutingPolicy for View<Routing> {
    fn describe(&self) -> &RoutingDeclaration {
        &self.described().declaration
    }
    fn decide(&mut self, call: &Call, asked: &RoutingQuestion<'_>, ranked: &mut Vec<u32>) -> Answer<Placement> {
        let inputs = Told::routing(call, asked);
        let timed = self.timed(|seats| seats.routing().decide(call, asked, ranked));
        let proposal = proposed(&timed.answer, |placement| match placement {
            Placement::Hold { for_us } => Some(Proposal::Hold { for_us }),
            Placement::Place { .. } if ranked.is_empty() => None,
            Placement::Place { wait_us, .. } => Some(Proposal::Place {
                ranked: first_rows(ranked.iter().copied()),
                named: ranked.len() as u32,
                wait_us,
            }),
        });
        let (question, request, context) = (Question::Routing, Some(asked.request), asked.context.values);
        let about = About { question, call, inputs, request, context, tables: [Some(asked.replicas), None] };
        let given = Given::of(timed.answer, |placement| Given::Placement(placement, ranked));
        self.note(&about, &timed, proposal, given);
        timed.answer
    }
}

impl FairnessPolicy for View<Fairness> {
    fn describe(&self) -> &FairnessDeclaration {
        &self.described().declaration
    }
    fn order(&mut self, call: &Call, context: Context<'_>, waiting: &Matrix, ranked: &mut Vec<u32>) -> Answer<Ranking> {
        let inputs = Told::rows(call, context, waiting);
        let timed = self.timed(|seats| seats.fairness().order(call, context, waiting, ranked));
        let proposal = proposed(&timed.answer, |ranking| {
            (!ranked.is_empty()).then(|| Proposal::Rank {
                ranked: first_rows(ranked.iter().copied()),
                named: ranked.len() as u32,
                keep: ranking.rest == Rest::Keep,
                tpot_target_us: ranking.tpot_target_us,
            })
        });
        let about = of_rows(Question::Order, call, inputs, context, waiting);
        self.note(&about, &timed, proposal, Given::of(timed.answer, |ranking| Given::Ranking(ranking, ranked)));
        timed.answer
    }
    fn victims(
        &mut self,
        call: &Call,
        context: Context<'_>,
        running: &Matrix,
        yielders: &mut Vec<Yielder>,
    ) -> Answer<()> {
        let inputs = Told::rows(call, context, running);
        let timed = self.timed(|seats| seats.fairness().victims(call, context, running, yielders));
        let proposal = proposed(&timed.answer, |()| {
            (!yielders.is_empty()).then(|| Proposal::Yield {
                rows: first_rows(yielders.iter().map(|yielder| yielder.row)),
                named: yielders.len() as u32,
            })
        });
        let about = of_rows(Question::Victims, call, inputs, context, running);
        self.note(&about, &timed, proposal, Given::of(timed.answer, |()| Given::Yielders(yielders)));
        timed.answer
    }
}

impl EvictionPolicy for View<Eviction> {
    fn describe(&self) -> &EvictionDeclaration {
        &self.described().declaration
    }
    fn decide(&mut self, call: &Call, context: Context<'_>, runs: &Matrix, worths: &mut Vec<Worth>) -> Answer<()> {
        let inputs = Told::rows(call, context, runs);
        let timed = self.timed(|seats| seats.eviction().decide(call, context, runs, worths));
        let proposal = proposed(&timed.answer, |()| {
            let prices = || worths.iter().map(|worth| worth.price);
            Some(Proposal::Prices { priced: worths.len() as u32, lowest: prices().min()?, highest: prices().max()? })
        });
        let about = of_rows(Question::Eviction, call, inputs, context, runs);
        self.note(&about, &timed, proposal, Given::of(timed.answer, |()| Given::Worths(worths)));
        timed.answer
    }
}

impl OverloadPolicy for View<Overload> {
    fn describe(&self) -> &OverloadDeclaration {
        &self.described().declaration
    }
    fn decide(&mut self, call: &Call, asked: &OverloadQuestion<'_>, actions: &mut Vec<Action>) -> Answer<Stance> {
        let inputs = Told::overload(call, asked);
        let timed = self.timed(|seats| seats.overload().decide(call, asked, actions));
        let proposal = proposed(&timed.answer, |stance| {
            let actions = actions.len() as u32;
            Some(Proposal::Stance { level: stance.level, hold_us: stance.hold_us, actions })
        });
        let (question, context) = (Question::Overload, asked.context.values);
        let tables = [Some(asked.classes), Some(asked.replicas)];
        let about = About { question, call, inputs, request: None, context, tables };
        self.note(&about, &timed, proposal, Given::of(timed.answer, |stance| Given::Stance(stance, actions)));
        timed.answer
    }
}

fn of_rows<'a>(question: Question, call: &'a Call, inputs: u64, context: Context<'a>, rows: &'a Matrix) -> About<'a> {
    About { question, call, inputs, request: None, context: context.values, tables: [Some(rows), None] }
}
