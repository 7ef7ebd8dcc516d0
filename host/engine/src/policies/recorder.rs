//! Stands between a machine and its policies: takes the time of every question, notes what was asked and answered, and names the
//! generation. The machine has no clock, so that the wall clock is read here.
//!
//! A machine is lent each seat as a `dyn` of its own, so that each needs an object of its own: a [`View`]. The views of one machine
//! share the set behind them; all of it lives on that machine's thread.

use std::cell::RefCell;
use std::mem;
use std::rc::Rc;
use std::sync::Arc;

use penstock_base::codec::Writer;
use penstock_base::{Generation, Instant, RequestId};
use penstock_policy_api::validate::Malformed;
use penstock_policy_api::{
    Action, AdmissionDeclaration, AdmissionPolicy, Answer, Call, Context, Decision, EvictionDeclaration,
    EvictionPolicy, Fact, FairnessDeclaration, FairnessPolicy, FallbackReason, FaultKind, Kept, Matrix,
    OverloadDeclaration, OverloadPolicy, OverloadQuestion, Placement, Policies, Policy, Question, Ranking,
    RequestRecord, Rest, RestoreError, RestoreInfo, RoutingDeclaration, RoutingPolicy, RoutingQuestion, Stance, Terms,
    Verdict, Worth, Yielder,
};
use prometheus::Histogram;

use super::log::{DECISIONS_KEPT_MAX, DecisionRecord, DecisionRing, Proposal, first_rows};
use super::seats::{Memory, PreparedPolicies, SeatedPolicies};
use crate::clock::Clock;
use crate::metrics::Metrics;

/// See the module.
pub(crate) struct Recorder {
    shared: Rc<RefCell<Shared>>,
    generation: Generation,
    ring: DecisionRing,
    admission: View<Admission>,
    routing: View<Routing>,
    fairness: View<Fairness>,
    eviction: View<Eviction>,
    overload: View<Overload>,
}

/// What the views of one machine share.
struct Shared {
    /// None only while one set takes over from another.
    seats: Option<Box<dyn SeatedPolicies>>,
    generation: Generation,
    clock: Clock,
    metrics: Arc<Metrics>,
    /// Questions so far.
    sequence: u64,
    /// Not in the ring yet.
    noted: Vec<DecisionRecord>,
    /// How many of these are of earlier steps.
    before_step: usize,
}

impl Shared {
    fn seats(&mut self) -> &mut dyn SeatedPolicies {
        self.seats.as_deref_mut().expect("a set is missing only within `take_over`")
    }
}

impl Recorder {
    /// In front of a set that has just sat down.
    pub fn new(
        seats: Box<dyn SeatedPolicies>,
        generation: Generation,
        clock: Clock,
        metrics: Arc<Metrics>,
        ring: DecisionRing,
    ) -> Self {
        let shared = Rc::new(RefCell::new(Shared {
            seats: Some(seats),
            generation,
            clock,
            metrics,
            sequence: 0,
            noted: Vec::new(),
            before_step: 0,
        }));
        Self {
            generation,
            ring,
            admission: View::new(&shared),
            routing: View::new(&shared),
            fairness: View::new(&shared),
            eviction: View::new(&shared),
            overload: View::new(&shared),
            shared,
        }
    }

    /// Lets `set` take over; what left is to be ended elsewhere.
    pub fn take_over(
        &mut self,
        set: Box<dyn PreparedPolicies>,
        generation: Generation,
        now: Instant,
    ) -> Box<dyn std::any::Any + Send> {
        let old = self.shared.borrow_mut().seats.take().expect("the seats are taken between two steps");
        let taken = set.take_over(old, generation, now);
        self.sit(taken.seated, generation);
        taken.retired
    }

    /// Another set sits down, and takes nothing over.
    pub fn replace(
        &mut self,
        seats: Box<dyn SeatedPolicies>,
        generation: Generation,
    ) -> Option<Box<dyn SeatedPolicies>> {
        let old = self.shared.borrow_mut().seats.take();
        self.sit(seats, generation);
        old
    }

    fn sit(&mut self, seats: Box<dyn SeatedPolicies>, generation: Generation) {
        self.generation = generation;
        let mut shared = self.shared.borrow_mut();
        shared.generation = generation;
        shared.seats = Some(seats);
        self.admission.described = None;
        self.routing.described = None;
        self.fairness.described = None;
        self.eviction.described = None;
        self.overload.described = None;
    }

    /// A step begins.
    pub fn begin_step(&mut self) {
        let mut shared = self.shared.borrow_mut();
        shared.before_step = shared.noted.len();
    }

    /// The host refused an answer in the step that just ended. Where several of its kind stand in that step, the first one that was not
    /// refused before is taken for it.
    pub fn refused(&mut self, decision: Decision, why: Malformed) {
        let mut shared = self.shared.borrow_mut();
        shared.seats().refused(decision, why);
        let from = shared.before_step;
        let mut of_step = shared.noted.iter_mut().skip(from);
        if let Some(record) = of_step.find(|record| record.question.decision() == decision && record.fallback.is_none())
        {
            record.fallback = Some(FallbackReason::Malformed(why));
        }
    }

    /// Called after every turn.
    pub fn between_steps(&mut self, now: Instant) {
        let mut shared = self.shared.borrow_mut();
        shared.seats().between_steps(now);
        if !shared.noted.is_empty() {
            self.ring.take(&mut shared.noted);
        }
    }

    /// What the seats remember.
    pub fn memory(&mut self) -> Memory {
        self.shared.borrow_mut().seats().memory()
    }
}

impl Policies for Recorder {
    fn generation(&self) -> Generation {
        self.generation
    }
    fn admission(&mut self) -> &mut dyn AdmissionPolicy {
        self.admission.lent()
    }
    fn routing(&mut self) -> &mut dyn RoutingPolicy {
        self.routing.lent()
    }
    fn fairness(&mut self) -> &mut dyn FairnessPolicy {
        self.fairness.lent()
    }
    fn eviction(&mut self) -> &mut dyn EvictionPolicy {
        self.eviction.lent()
    }
    fn overload(&mut self) -> &mut dyn OverloadPolicy {
        self.overload.lent()
    }
}

/// One of the five seats.
trait Seat {
    const DECISION: Decision;
    type Declaration: Clone;
    fn life(seats: &mut dyn SeatedPolicies) -> &mut dyn Policy;
    fn declaration(seats: &mut dyn SeatedPolicies) -> Self::Declaration;
    fn terms(declaration: &Self::Declaration) -> &Terms;
}

macro_rules! seat {
    ($seat:ident, $declaration:ident, $accessor:ident) => {
        struct $seat;
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
        }
    };
}

seat!(Admission, AdmissionDeclaration, admission);
seat!(Routing, RoutingDeclaration, routing);
seat!(Fairness, FairnessDeclaration, fairness);
seat!(Eviction, EvictionDeclaration, eviction);
seat!(Overload, OverloadDeclaration, overload);

/// One seat as the machine sees it.
struct View<S: Seat> {
    shared: Rc<RefCell<Shared>>,
    /// Read when the seat is first lent: a machine never asks some of them.
    described: Option<Described<S>>,
}

/// What does not change while a set is in the seats.
struct Described<S: Seat> {
    declaration: S::Declaration,
    policy: Arc<str>,
    took: Histogram,
}

/// What is noted of a question before it is asked.
struct Asked {
    question: Question,
    call: Call,
    request: Option<RequestId>,
    inputs: u64,
    rows: usize,
}

impl<S: Seat> View<S> {
    fn new(shared: &Rc<RefCell<Shared>>) -> Self {
        Self { shared: Rc::clone(shared), described: None }
    }

    fn lent(&mut self) -> &mut Self {
        if self.described.is_none() {
            let mut shared = self.shared.borrow_mut();
            let declaration = S::declaration(shared.seats());
            let policy: Arc<str> = S::terms(&declaration).name.as_str().into();
            let took = shared.metrics.policy_calls(S::DECISION, &policy);
            self.described = Some(Described { declaration, policy, took });
        }
        self
    }

    fn described(&self) -> &Described<S> {
        self.described.as_ref().expect("a seat is described before it is lent")
    }

    /// Asks, takes the time, and notes it. `proposal` sees the answer with the list that came with it.
    fn ask<T: Copy>(
        &mut self,
        asked: Asked,
        ask: impl FnOnce(&mut dyn SeatedPolicies) -> Answer<T>,
        proposal: impl FnOnce(T) -> Option<Proposal>,
    ) -> Answer<T> {
        let mut shared = self.shared.borrow_mut();
        let shared = &mut *shared;
        let from = shared.clock.now();
        let answer = ask(shared.seats());
        let took = shared.clock.now().since(from);
        let described = self.described.as_ref().expect("a seat is described before it is lent");
        described.took.observe(took.0 as f64 / 1e9);
        shared.sequence += 1;
        let (proposal, fallback) = match answer {
            Answer::Proposal(proposed) => match proposal(proposed) {
                Some(proposal) => (proposal, None),
                None => (Proposal::None, Some(FallbackReason::NoOpinion)),
            },
            Answer::NoOpinion => (Proposal::None, Some(FallbackReason::NoOpinion)),
            Answer::Fault(kind) => (Proposal::None, Some(FallbackReason::Fault(kind))),
        };
        let fuel = shared.seats().last_fuel(S::DECISION);
        // Beyond it a reader has kept the ring for thousands of decisions; what is newest is left out until the next turn.
        if shared.noted.len() < DECISIONS_KEPT_MAX {
            shared.noted.push(DecisionRecord {
                sequence: shared.sequence,
                generation: shared.generation,
                question: asked.question,
                policy: Arc::clone(&described.policy),
                call: asked.call.number,
                at: from,
                request: asked.request,
                inputs: asked.inputs,
                rows: asked.rows as u32,
                proposal,
                fallback,
                took_ns: took.0,
                fuel,
            });
        }
        answer
    }
}

impl<S: Seat> Policy for View<S> {
    fn terms(&self) -> &Terms {
        S::terms(&self.described().declaration)
    }
    fn observe(&mut self, facts: &[Fact]) -> Result<(), FaultKind> {
        S::life(self.shared.borrow_mut().seats()).observe(facts)
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
        let inputs = Inputs::of(call).request(request).words(context.values).end();
        let asked =
            Asked { question: Question::Admission, call: *call, request: Some(request.request_id), inputs, rows: 0 };
        self.ask(
            asked,
            |seats| seats.admission().decide(call, request, context),
            |verdict| {
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
            },
        )
    }
}

impl RoutingPolicy for View<Routing> {
    fn describe(&self) -> &RoutingDeclaration {
        &self.described().declaration
    }
    fn decide(&mut self, call: &Call, asked: &RoutingQuestion<'_>, ranked: &mut Vec<u32>) -> Answer<Placement> {
        let inputs = Inputs::of(call).request(asked.request).words(&[asked.phase as u64]).words(asked.context.values);
        let noted = Asked {
            question: Question::Routing,
            call: *call,
            request: Some(asked.request.request_id),
            inputs: inputs.matrix(asked.replicas).end(),
            rows: asked.replicas.rows(),
        };
        let list = RefCell::new(ranked);
        self.ask(
            noted,
            |seats| seats.routing().decide(call, asked, &mut list.borrow_mut()),
            |placement| {
                let ranked = list.borrow();
                match placement {
                    Placement::Hold { for_us } => Some(Proposal::Hold { for_us }),
                    Placement::Place { .. } if ranked.is_empty() => None,
                    Placement::Place { wait_us, .. } => Some(Proposal::Place {
                        ranked: first_rows(ranked.iter().copied()),
                        named: ranked.len() as u32,
                        wait_us,
                    }),
                }
            },
        )
    }
}

impl FairnessPolicy for View<Fairness> {
    fn describe(&self) -> &FairnessDeclaration {
        &self.described().declaration
    }
    fn order(&mut self, call: &Call, context: Context<'_>, waiting: &Matrix, ranked: &mut Vec<u32>) -> Answer<Ranking> {
        let inputs = Inputs::of(call).words(context.values).matrix(waiting).end();
        let asked = Asked { question: Question::Order, call: *call, request: None, inputs, rows: waiting.rows() };
        let list = RefCell::new(ranked);
        self.ask(
            asked,
            |seats| seats.fairness().order(call, context, waiting, &mut list.borrow_mut()),
            |ranking| {
                let ranked = list.borrow();
                (!ranked.is_empty()).then(|| Proposal::Rank {
                    ranked: first_rows(ranked.iter().copied()),
                    named: ranked.len() as u32,
                    keep: ranking.rest == Rest::Keep,
                    tpot_target_us: ranking.tpot_target_us,
                })
            },
        )
    }
    fn victims(
        &mut self,
        call: &Call,
        context: Context<'_>,
        running: &Matrix,
        yielders: &mut Vec<Yielder>,
    ) -> Answer<()> {
        let inputs = Inputs::of(call).words(context.values).matrix(running).end();
        let asked = Asked { question: Question::Victims, call: *call, request: None, inputs, rows: running.rows() };
        let list = RefCell::new(yielders);
        self.ask(
            asked,
            |seats| seats.fairness().victims(call, context, running, &mut list.borrow_mut()),
            |()| {
                let yielders = list.borrow();
                (!yielders.is_empty()).then(|| Proposal::Yield {
                    rows: first_rows(yielders.iter().map(|yielder| yielder.row)),
                    named: yielders.len() as u32,
                })
            },
        )
    }
}

impl EvictionPolicy for View<Eviction> {
    fn describe(&self) -> &EvictionDeclaration {
        &self.described().declaration
    }
    fn decide(&mut self, call: &Call, context: Context<'_>, runs: &Matrix, worths: &mut Vec<Worth>) -> Answer<()> {
        let inputs = Inputs::of(call).words(context.values).matrix(runs).end();
        let asked = Asked { question: Question::Eviction, call: *call, request: None, inputs, rows: runs.rows() };
        let list = RefCell::new(worths);
        self.ask(
            asked,
            |seats| seats.eviction().decide(call, context, runs, &mut list.borrow_mut()),
            |()| {
                let worths = list.borrow();
                let prices = || worths.iter().map(|worth| worth.price);
                Some(Proposal::Prices {
                    priced: worths.len() as u32,
                    lowest: prices().min()?,
                    highest: prices().max()?,
                })
            },
        )
    }
}

impl OverloadPolicy for View<Overload> {
    fn describe(&self) -> &OverloadDeclaration {
        &self.described().declaration
    }
    fn decide(&mut self, call: &Call, asked: &OverloadQuestion<'_>, actions: &mut Vec<Action>) -> Answer<Stance> {
        let inputs = Inputs::of(call).words(asked.context.values).matrix(asked.classes).matrix(asked.replicas).end();
        let rows = asked.classes.rows() + asked.replicas.rows();
        let noted = Asked { question: Question::Overload, call: *call, request: None, inputs, rows };
        let list = RefCell::new(actions);
        self.ask(
            noted,
            |seats| seats.overload().decide(call, asked, &mut list.borrow_mut()),
            |stance| {
                let actions = list.borrow().len() as u32;
                Some(Proposal::Stance { level: stance.level, hold_us: stance.hold_us, actions })
            },
        )
    }
}

/// A digest of what a policy is told: four lanes, since one would wait for its own multiplication at each of thousands of cells. Tells
/// equal from unequal; protects against nobody.
struct Inputs([u64; 4]);

impl Inputs {
    fn of(call: &Call) -> Self {
        let seeds = [0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb, 0xd6e8_feb8_6659_fd93];
        Self(seeds).words(&[call.number, call.now_us, call.seed])
    }

    fn request(self, request: &RequestRecord) -> Self {
        self.words(&[
            request.request_id.0,
            request.tenant_id,
            request.flow_id,
            request.session_id,
            u64::from(request.attempt) << 48 | u64::from(request.sequences) << 32 | u64::from(request.input_tokens),
            u64::from(request.max_output_tokens),
            request.deadline_us,
            request.class_rank.index() as u64,
        ])
    }

    fn matrix(mut self, matrix: &Matrix) -> Self {
        self = self.words(&[matrix.rows() as u64, matrix.names() as u64]);
        for name in 0..matrix.names() {
            self = self.words(matrix.column(name));
        }
        self
    }

    fn words(mut self, words: &[u64]) -> Self {
        let mut fours = words.chunks_exact(4);
        for four in &mut fours {
            for (lane, word) in self.0.iter_mut().zip(four) {
                *lane = mixed(*lane, *word);
            }
        }
        for (lane, word) in self.0.iter_mut().zip(fours.remainder()) {
            *lane = mixed(*lane, *word);
        }
        // Lists of different lengths differ.
        self.0[3] = mixed(self.0[3], words.len() as u64);
        self
    }

    fn end(self) -> u64 {
        self.0.into_iter().fold(0, mixed)
    }
}

fn mixed(lane: u64, word: u64) -> u64 {
    let product = u128::from(lane ^ word) * 0x9fb2_1c65_1e98_df25;
    (product as u64 ^ (product >> 64) as u64).wrapping_add(lane.rotate_left(23))
}

impl Drop for Recorder {
    fn drop(&mut self) {
        let mut noted = mem::take(&mut self.shared.borrow_mut().noted);
        self.ring.take(&mut noted);
    }
}
