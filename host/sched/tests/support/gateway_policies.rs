//! Policies that answer what a test says, native ones where it says nothing.
#![allow(dead_code, reason = "each test file uses its part")]

use penstock_base::codec::Writer;
use penstock_base::{Generation, ReplicaId, RequestId};
use penstock_policy_api::native::{BestCredit, Bounded, ClassFirst, Ladder, Lru, OverlapLoad};
use penstock_policy_api::{
    Action, ActionSet, AdmissionDeclaration, AdmissionPolicy, AdmissionSignal, Answer, Call, ClassSignal, CommonSignal,
    Context, Decision, Declaration, Declared, EvictionPolicy, Fact, FactSet, FairnessDeclaration, FairnessPolicy,
    FaultKind, InContext, Matrix, OrderSignal, OverloadDeclaration, OverloadPolicy, OverloadQuestion, OverloadRows,
    OverloadSignal, Placement, Policies, Policy, Ranking, ReplicaSignal, RequestRecord, Rest, RestoreCause,
    RestoreInfo, RoutingDeclaration, RoutingPolicy, RoutingQuestion, RoutingSignal, Signal, Stance, Terms, Verdict,
    VictimsSignal, WaitingSignal, Yielder,
};

/// What admission answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Admit {
    Native,
    Say(Answer<Verdict>),
}

/// What routing answers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Route {
    Native,
    /// These replicas first, as far as they are rows, with a wait for the first.
    Place(Vec<ReplicaId>, u32),
    Hold(u32),
    /// Rows as they are, right or wrong.
    Rows(Vec<u32>),
}

/// What `order` answers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Order {
    Native,
    Rank { requests: Vec<RequestId>, rest: Rest, tpot_target_us: u32 },
    Rows(Vec<u32>),
}

/// What overload answers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Give {
    Native,
    Say(Stance, Vec<Action>),
    NoOpinion,
}

/// A signal's value as a policy got it, with the mask bit.
pub type Seen = (&'static str, u64, bool);

/// The seats, scripted.
pub struct Scripted {
    pub generation: Generation,
    pub admission: Seat<Admit, Bounded, AdmissionDeclaration>,
    pub routing: Seat<Route, OverlapLoad, RoutingDeclaration>,
    pub fairness: Seat<Order, ClassFirst, FairnessDeclaration>,
    pub overload: Seat<Give, Ladder, OverloadDeclaration>,
    /// Sits in for routing when there is one.
    pub best_credit: Option<BestCredit>,
    eviction: Lru,
}

/// One seat: the script, the native policy behind it, what was asked and told.
pub struct Seat<S, N, D> {
    pub script: S,
    pub native: N,
    declaration: D,
    /// Calls so far.
    pub calls: usize,
    /// Facts observed so far, when facts are wanted.
    pub facts: Vec<Fact>,
    /// Context and rows of the last call.
    pub seen: Vec<Seen>,
    pub rows: Vec<Vec<Seen>>,
    /// Declare and record every signal of the tables.
    pub records: bool,
}

fn all<S: Signal>() -> Vec<S> {
    S::ALL.iter().copied().take(48).collect()
}

/// The mask, the first wave, and as many others as there is room for.
fn context_of<S: Signal>() -> Declared<InContext<S>> {
    let common = CommonSignal::ALL.iter().copied().filter(|_| S::ALL.len() + CommonSignal::ALL.len() <= 48);
    let mask = (S::ALL.len() + CommonSignal::ALL.len() > 48).then_some(CommonSignal::KnownMask);
    let by_wave = |first: bool| S::ALL.iter().copied().filter(move |signal| signal.info().first_wave == first);
    let own = by_wave(true).chain(by_wave(false)).map(InContext::Own);
    let names: Vec<_> = mask.into_iter().chain(common).map(InContext::Common).chain(own).take(48).collect();
    Declared::exactly(&names)
}

impl Scripted {
    pub fn native() -> Self {
        Self::with(FactSet::NONE, FactSet::NONE)
    }

    /// Wants these facts in fairness and admission, and all of their kinds in the other two.
    pub fn with(fairness: FactSet, admission: FactSet) -> Self {
        let terms = |name: &str, facts| Terms { facts, ..Terms::native(name) };
        let all_if = |decision| if fairness.is_empty() { FactSet::NONE } else { FactSet::all_for(decision) };
        let admission_terms = Terms { reasons: vec!["own".into()], ..terms("scripted", admission) };
        let overload_terms = Terms { actions: ActionSet::all(), ..terms("scripted", all_if(Decision::Overload)) };
        let replica: Vec<_> = all::<ReplicaSignal>();
        let for_overload: Vec<_> = replica.iter().copied().filter(|signal| !signal.info().routing_only).collect();
        Self {
            generation: Generation(1),
            admission: Seat::new(
                Admit::Native,
                Bounded::new(),
                Declaration { terms: admission_terms, context: context_of::<AdmissionSignal>(), rows: () },
            ),
            routing: Seat::new(
                Route::Native,
                OverlapLoad::new(),
                Declaration {
                    terms: terms("scripted", all_if(Decision::Routing)),
                    context: context_of::<RoutingSignal>(),
                    rows: Declared::exactly(&replica),
                },
            ),
            fairness: Seat::new(
                Order::Native,
                ClassFirst::new(),
                FairnessDeclaration {
                    terms: terms("scripted", fairness),
                    order: context_of::<OrderSignal>(),
                    waiting: Declared::exactly(&all::<WaitingSignal>()),
                    victims: Declared::<InContext<VictimsSignal>>::default(),
                    running: Declared::default(),
                },
            ),
            overload: Seat::new(
                Give::Native,
                Ladder::new(4_096),
                Declaration {
                    terms: overload_terms,
                    context: context_of::<OverloadSignal>(),
                    rows: OverloadRows {
                        classes: Declared::exactly(&all::<ClassSignal>()),
                        replicas: Declared::exactly(&for_overload),
                    },
                },
            ),
            best_credit: None,
            eviction: Lru::new(),
        }
    }

    /// Native policies and no facts, with the same ladder level: what a restored set would be.
    pub fn copy(&mut self) -> Self {
        let mut copy = Self::native();
        copy.admission.declaration.terms.facts = self.admission.declaration.terms.facts;
        copy.routing.declaration.terms.facts = self.routing.declaration.terms.facts;
        copy.fairness.declaration.terms.facts = self.fairness.declaration.terms.facts;
        copy.overload.declaration.terms.facts = self.overload.declaration.terms.facts;
        copy.generation = self.generation;
        copy.admission.script = self.admission.script;
        copy.routing.script = self.routing.script.clone();
        copy.fairness.script = self.fairness.script.clone();
        copy.overload.script = self.overload.script.clone();
        let mut saved = Writer::new();
        self.overload.native.save(&mut saved).expect("saves");
        let info = RestoreInfo { schema: 1, cause: RestoreCause::Replay, saved_now_us: 0, now_us: 0, elapsed_us: 0 };
        copy.overload.native.restore(&info, saved.bytes()).expect("restores");
        copy
    }
}

impl<S, N, D> Seat<S, N, D> {
    fn new(script: S, native: N, declaration: D) -> Self {
        Self {
            script,
            native,
            declaration,
            calls: 0,
            facts: Vec::new(),
            seen: Vec::new(),
            rows: Vec::new(),
            records: false,
        }
    }
}

/// Values by name, with what the mask (value of `known-mask` where the table has one) says; unmasked tables count as known.
fn seen<C: Copy>(names: &[Option<C>], name: impl Fn(C) -> &'static str, get: impl Fn(usize) -> u64) -> Vec<Seen> {
    let mask = names.iter().position(|entry| entry.is_some_and(|entry| name(entry) == "known-mask")).map(&get);
    let each = names.iter().enumerate().filter_map(|(at, entry)| entry.map(|entry| (at, name(entry))));
    each.map(|(at, name)| (name, get(at), mask.is_none_or(|mask| mask >> at & 1 == 1))).collect()
}

fn own<S: Signal>(entry: InContext<S>) -> &'static str {
    match entry {
        InContext::Own(signal) => signal.name(),
        InContext::Common(signal) => signal.name(),
    }
}

fn rows_of<S: Signal>(names: &Declared<S>, rows: &Matrix) -> Vec<Vec<Seen>> {
    (0..rows.rows()).map(|row| seen(names.entries(), Signal::name, |at| rows.get(row, at))).collect()
}

impl<S, N> Policy for Seat<S, N, AdmissionDeclaration> {
    fn terms(&self) -> &Terms {
        &self.declaration.terms
    }
    fn observe(&mut self, facts: &[Fact]) -> Result<(), FaultKind> {
        self.facts.extend_from_slice(facts);
        Ok(())
    }
}

impl AdmissionPolicy for Seat<Admit, Bounded, AdmissionDeclaration> {
    fn describe(&self) -> &AdmissionDeclaration {
        if self.script == Admit::Native && !self.records { self.native.describe() } else { &self.declaration }
    }
    fn decide(&mut self, call: &Call, request: &RequestRecord, context: Context<'_>) -> Answer<Verdict> {
        self.calls += 1;
        if self.records {
            self.seen = seen(self.declaration.context.entries(), own, |at| context.get(at));
            return Answer::NoOpinion;
        }
        match self.script {
            Admit::Native => self.native.decide(call, request, context),
            Admit::Say(answer) => answer,
        }
    }
}

impl<S, N> Policy for Seat<S, N, RoutingDeclaration> {
    fn terms(&self) -> &Terms {
        &self.declaration.terms
    }
    fn observe(&mut self, facts: &[Fact]) -> Result<(), FaultKind> {
        self.facts.extend_from_slice(facts);
        Ok(())
    }
}

impl RoutingPolicy for Seat<Route, OverlapLoad, RoutingDeclaration> {
    fn describe(&self) -> &RoutingDeclaration {
        if self.script == Route::Native && !self.records { self.native.describe() } else { &self.declaration }
    }
    fn decide(&mut self, call: &Call, asked: &RoutingQuestion<'_>, ranked: &mut Vec<u32>) -> Answer<Placement> {
        self.calls += 1;
        if self.records {
            self.seen = seen(self.declaration.context.entries(), own, |at| asked.context.get(at));
            self.rows = rows_of(&self.declaration.rows, asked.replicas);
            return Answer::NoOpinion;
        }
        match &self.script {
            Route::Native => self.native.decide(call, asked, ranked),
            Route::Hold(for_us) => Answer::Proposal(Placement::Hold { for_us: *for_us }),
            Route::Rows(rows) => {
                ranked.extend_from_slice(rows);
                Answer::Proposal(Placement::Place { wait_us: 0, colocate: false })
            }
            Route::Place(replicas, wait_us) => {
                let id = self.declaration.rows.position(ReplicaSignal::ReplicaId).expect("declared");
                for replica in replicas {
                    let ids = asked.replicas.column(id);
                    ranked.extend(ids.iter().position(|row| *row == u64::from(replica.0)).map(|row| row as u32));
                }
                Answer::Proposal(Placement::Place { wait_us: *wait_us, colocate: false })
            }
        }
    }
}

impl<S, N> Policy for Seat<S, N, FairnessDeclaration> {
    fn terms(&self) -> &Terms {
        &self.declaration.terms
    }
    fn observe(&mut self, facts: &[Fact]) -> Result<(), FaultKind> {
        self.facts.extend_from_slice(facts);
        Ok(())
    }
}

impl FairnessPolicy for Seat<Order, ClassFirst, FairnessDeclaration> {
    fn describe(&self) -> &FairnessDeclaration {
        if self.script == Order::Native && !self.records { self.native.describe() } else { &self.declaration }
    }
    fn order(&mut self, call: &Call, context: Context<'_>, waiting: &Matrix, ranked: &mut Vec<u32>) -> Answer<Ranking> {
        self.calls += 1;
        if self.records {
            self.seen = seen(self.declaration.order.entries(), own, |at| context.get(at));
            self.rows = rows_of(&self.declaration.waiting, waiting);
            return Answer::NoOpinion;
        }
        match &self.script {
            Order::Native => self.native.order(call, context, waiting, ranked),
            Order::Rows(rows) => {
                ranked.extend_from_slice(rows);
                Answer::Proposal(Ranking { rest: Rest::Append, tpot_target_us: u32::MAX })
            }
            Order::Rank { requests, rest, tpot_target_us } => {
                let id = self.declaration.waiting.position(WaitingSignal::RequestId).expect("declared");
                for request in requests {
                    let ids = waiting.column(id);
                    ranked.extend(ids.iter().position(|row| *row == request.0).map(|row| row as u32));
                }
                Answer::Proposal(Ranking { rest: *rest, tpot_target_us: *tpot_target_us })
            }
        }
    }
    fn victims(&mut self, _: &Call, _: Context<'_>, _: &Matrix, _: &mut Vec<Yielder>) -> Answer<()> {
        Answer::NoOpinion
    }
}

impl<S, N> Policy for Seat<S, N, OverloadDeclaration> {
    fn terms(&self) -> &Terms {
        &self.declaration.terms
    }
    fn observe(&mut self, facts: &[Fact]) -> Result<(), FaultKind> {
        self.facts.extend_from_slice(facts);
        Ok(())
    }
}

impl OverloadPolicy for Seat<Give, Ladder, OverloadDeclaration> {
    fn describe(&self) -> &OverloadDeclaration {
        if self.script == Give::Native && !self.records { self.native.describe() } else { &self.declaration }
    }
    fn decide(&mut self, call: &Call, asked: &OverloadQuestion<'_>, actions: &mut Vec<Action>) -> Answer<Stance> {
        self.calls += 1;
        if self.records {
            self.seen = seen(self.declaration.context.entries(), own, |at| asked.context.get(at));
            self.rows = rows_of(&self.declaration.rows.classes, asked.classes);
            self.rows.extend(rows_of(&self.declaration.rows.replicas, asked.replicas));
            return Answer::NoOpinion;
        }
        match &self.script {
            Give::Native => self.native.decide(call, asked, actions),
            Give::NoOpinion => Answer::NoOpinion,
            Give::Say(stance, what) => {
                actions.extend_from_slice(what);
                Answer::Proposal(*stance)
            }
        }
    }
}

impl Policies for Scripted {
    fn generation(&self) -> Generation {
        self.generation
    }
    fn admission(&mut self) -> &mut dyn AdmissionPolicy {
        &mut self.admission
    }
    fn routing(&mut self) -> &mut dyn RoutingPolicy {
        match &mut self.best_credit {
            Some(best) => best,
            None => &mut self.routing,
        }
    }
    fn fairness(&mut self) -> &mut dyn FairnessPolicy {
        &mut self.fairness
    }
    fn eviction(&mut self) -> &mut dyn EvictionPolicy {
        &mut self.eviction
    }
    fn overload(&mut self) -> &mut dyn OverloadPolicy {
        &mut self.overload
    }
}
