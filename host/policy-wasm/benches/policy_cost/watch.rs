//! What do a machine's policies cost it? Sits between the machine and its policies and adds up the time from the moment a seat reads what the
//! policy declared, which is when columns are filled, to the policy's answer; and what facts take to tell.

use std::cell::Cell;
use std::time::Instant as Clock;

use penstock_base::{Generation, Instant};
use penstock_policy_api::native::NativePolicies;
use penstock_policy_api::{
    Action, AdmissionDeclaration, AdmissionPolicy, Answer, Call, Context, Decision, EvictionDeclaration,
    EvictionPolicy, Fact, FairnessDeclaration, FairnessPolicy, FaultKind, Matrix, OverloadDeclaration, OverloadPolicy,
    OverloadQuestion, Placement, Policies, Policy, Question, Ranking, RequestRecord, RoutingDeclaration, RoutingPolicy,
    RoutingQuestion, Stance, Terms, Verdict, Worth, Yielder,
};
use penstock_policy_wasm::WasmPolicies;

/// Policies of a machine, with what their driver does between two steps.
pub trait Seated: Policies {
    /// Between two steps: snapshots that are due.
    fn between_steps(&mut self, _now: Instant) {}
}

impl Seated for NativePolicies {}

impl Seated for WasmPolicies {
    fn between_steps(&mut self, now: Instant) {
        WasmPolicies::between_steps(self, now);
    }
}

/// Sums since they were last taken.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spent {
    /// Filling columns, in nanoseconds.
    pub fill_ns: u64,
    /// Inside the policies' questions.
    pub answer_ns: u64,
    /// Telling facts.
    pub observe_ns: u64,
    /// Snapshots.
    pub save_ns: u64,
    /// Questions, by [`Question`].
    pub asked: [u64; Question::ALL.len()],
    /// Rows of these.
    pub rows: [u64; Question::ALL.len()],
    /// Batches of facts.
    pub told: u64,
}

impl Spent {
    pub fn total_ns(&self) -> u64 {
        self.fill_ns + self.answer_ns + self.observe_ns + self.save_ns
    }

    pub fn calls(&self) -> u64 {
        self.asked.iter().sum::<u64>() + self.told
    }

    pub fn add(&mut self, other: &Self) {
        self.fill_ns += other.fill_ns;
        self.answer_ns += other.answer_ns;
        self.observe_ns += other.observe_ns;
        self.save_ns += other.save_ns;
        self.told += other.told;
        for at in 0..self.asked.len() {
            self.asked[at] += other.asked[at];
            self.rows[at] += other.rows[at];
        }
    }
}

/// Policies under watch.
pub struct Watch<P> {
    inner: P,
    /// The seat that was reached for last: whose terms are read and who is told.
    reached: Decision,
    /// When the seat that is asking began to read the declaration.
    since: Cell<Option<Clock>>,
    spent: Spent,
    clock_ns: u64,
    admission: AdmissionDeclaration,
    routing: RoutingDeclaration,
    fairness: FairnessDeclaration,
    eviction: EvictionDeclaration,
    overload: OverloadDeclaration,
}

impl<P: Seated> Watch<P> {
    pub fn new(mut inner: P, clock_ns: u64) -> Self {
        Self {
            admission: inner.admission().describe().clone(),
            routing: inner.routing().describe().clone(),
            fairness: inner.fairness().describe().clone(),
            eviction: inner.eviction().describe().clone(),
            overload: inner.overload().describe().clone(),
            inner,
            reached: Decision::Admission,
            since: Cell::new(None),
            spent: Spent::default(),
            clock_ns,
        }
    }

    #[allow(dead_code, reason = "the tests that share this file look at the policies behind")]
    pub fn inner(&mut self) -> &mut P {
        &mut self.inner
    }

    pub fn between_steps(&mut self, now: Instant) {
        let from = Clock::now();
        self.inner.between_steps(now);
        self.spent.save_ns += self.since(from);
    }

    /// The sums, which start anew.
    pub fn take(&mut self) -> Spent {
        std::mem::take(&mut self.spent)
    }

    fn since(&self, from: Clock) -> u64 {
        (from.elapsed().as_nanos() as u64).saturating_sub(self.clock_ns)
    }

    /// A seat reads a declaration: its columns come next.
    fn declared<'a, D>(&self, declaration: &'a D) -> &'a D {
        if self.since.get().is_none() {
            self.since.set(Some(Clock::now()));
        }
        declaration
    }

    fn asked<T>(&mut self, question: Question, rows: usize, ask: impl FnOnce(&mut P) -> T) -> T {
        let from = Clock::now();
        let filled = self.since.take().map_or(0, |since| (from - since).as_nanos() as u64);
        let answer = ask(&mut self.inner);
        self.spent.answer_ns += self.since(from);
        self.spent.fill_ns += filled.saturating_sub(self.clock_ns);
        self.spent.asked[question as usize] += 1;
        self.spent.rows[question as usize] += rows as u64;
        answer
    }
}

impl<P: Seated> Policies for Watch<P> {
    fn generation(&self) -> Generation {
        self.inner.generation()
    }
    fn admission(&mut self) -> &mut dyn AdmissionPolicy {
        self.reached = Decision::Admission;
        self
    }
    fn routing(&mut self) -> &mut dyn RoutingPolicy {
        self.reached = Decision::Routing;
        self
    }
    fn fairness(&mut self) -> &mut dyn FairnessPolicy {
        self.reached = Decision::Fairness;
        self
    }
    fn eviction(&mut self) -> &mut dyn EvictionPolicy {
        self.reached = Decision::Eviction;
        self
    }
    fn overload(&mut self) -> &mut dyn OverloadPolicy {
        self.reached = Decision::Overload;
        self
    }
}

impl<P: Seated> Policy for Watch<P> {
    fn terms(&self) -> &Terms {
        match self.reached {
            Decision::Admission => &self.admission.terms,
            Decision::Routing => &self.routing.terms,
            Decision::Fairness => &self.fairness.terms,
            Decision::Eviction => &self.eviction.terms,
            Decision::Overload => &self.overload.terms,
        }
    }

    fn observe(&mut self, facts: &[Fact]) -> Result<(), FaultKind> {
        let from = Clock::now();
        let told = match self.reached {
            Decision::Admission => self.inner.admission().observe(facts),
            Decision::Routing => self.inner.routing().observe(facts),
            Decision::Fairness => self.inner.fairness().observe(facts),
            Decision::Eviction => self.inner.eviction().observe(facts),
            Decision::Overload => self.inner.overload().observe(facts),
        };
        self.spent.observe_ns += self.since(from);
        self.spent.told += 1;
        told
    }
}

impl<P: Seated> AdmissionPolicy for Watch<P> {
    fn describe(&self) -> &AdmissionDeclaration {
        self.declared(&self.admission)
    }
    fn decide(&mut self, call: &Call, request: &RequestRecord, context: Context<'_>) -> Answer<Verdict> {
        self.asked(Question::Admission, 0, |inner| inner.admission().decide(call, request, context))
    }
}

impl<P: Seated> RoutingPolicy for Watch<P> {
    fn describe(&self) -> &RoutingDeclaration {
        self.declared(&self.routing)
    }
    fn decide(&mut self, call: &Call, asked: &RoutingQuestion<'_>, ranked: &mut Vec<u32>) -> Answer<Placement> {
        let rows = asked.replicas.rows();
        self.asked(Question::Routing, rows, |inner| inner.routing().decide(call, asked, ranked))
    }
}

impl<P: Seated> FairnessPolicy for Watch<P> {
    fn describe(&self) -> &FairnessDeclaration {
        self.declared(&self.fairness)
    }
    fn order(&mut self, call: &Call, context: Context<'_>, waiting: &Matrix, ranked: &mut Vec<u32>) -> Answer<Ranking> {
        self.asked(Question::Order, waiting.rows(), |inner| inner.fairness().order(call, context, waiting, ranked))
    }
    fn victims(
        &mut self,
        call: &Call,
        context: Context<'_>,
        running: &Matrix,
        yielders: &mut Vec<Yielder>,
    ) -> Answer<()> {
        let rows = running.rows();
        self.asked(Question::Victims, rows, |inner| inner.fairness().victims(call, context, running, yielders))
    }
}

impl<P: Seated> EvictionPolicy for Watch<P> {
    fn describe(&self) -> &EvictionDeclaration {
        self.declared(&self.eviction)
    }
    fn decide(&mut self, call: &Call, context: Context<'_>, runs: &Matrix, worths: &mut Vec<Worth>) -> Answer<()> {
        self.asked(Question::Eviction, runs.rows(), |inner| inner.eviction().decide(call, context, runs, worths))
    }
}

impl<P: Seated> OverloadPolicy for Watch<P> {
    fn describe(&self) -> &OverloadDeclaration {
        self.declared(&self.overload)
    }
    fn decide(&mut self, call: &Call, asked: &OverloadQuestion<'_>, actions: &mut Vec<Action>) -> Answer<Stance> {
        let rows = asked.replicas.rows();
        self.asked(Question::Overload, rows, |inner| inner.overload().decide(call, asked, actions))
    }
}
