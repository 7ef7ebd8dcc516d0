//! Policies for tests of the replica: they declare every signal, keep what they were told, and answer what a test wants, sense or not.
#![allow(dead_code, reason = "each test file uses its part")]

use std::cell::RefCell;
use std::rc::Rc;

use penstock_base::Generation;
use penstock_policy_api::native::NativePolicies;
use penstock_policy_api::{
    AdmissionPolicy, Answer, Call, CommonSignal, Context, Decision, Declaration, Declared, EvictionDeclaration,
    EvictionPolicy, EvictionSignal, Fact, FactSet, FairnessDeclaration, FairnessPolicy, FaultKind, InContext, Matrix,
    OverloadPolicy, Policies, Policy, Ranking, RoutingPolicy, RunSignal, RunningSignal, Signal, Terms, VictimsSignal,
    Worth, Yielder,
};

use crate::content::mix;

/// How the two policies of a replica answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mood {
    /// The native default decides.
    NoOpinion,
    /// Random sense and nonsense from this seed, faults among it.
    Chaos(u64),
}

/// What was told and asked, shared with the test.
#[derive(Default)]
pub struct Heard {
    pub fairness: Vec<Fact>,
    pub eviction: Vec<Fact>,
    pub victims_calls: u32,
    pub eviction_calls: u32,
}

fn all<S: Signal>() -> Declared<InContext<S>> {
    let own = S::ALL.iter().map(|signal| InContext::Own(*signal));
    let common = CommonSignal::ALL.iter().map(|signal| InContext::Common(*signal));
    Declared::exactly(&own.chain(common).collect::<Vec<_>>())
}

fn terms(decision: Decision) -> Terms {
    Terms { facts: FactSet::all_for(decision), ..Terms::native("test") }
}

struct Fairness {
    declaration: FairnessDeclaration,
    mood: Mood,
    heard: Rc<RefCell<Heard>>,
}

struct Eviction {
    declaration: EvictionDeclaration,
    mood: Mood,
    heard: Rc<RefCell<Heard>>,
}

impl Policy for Fairness {
    fn terms(&self) -> &Terms {
        &self.declaration.terms
    }
    fn observe(&mut self, facts: &[Fact]) -> Result<(), FaultKind> {
        self.heard.borrow_mut().fairness.extend_from_slice(facts);
        Ok(())
    }
}

impl FairnessPolicy for Fairness {
    fn describe(&self) -> &FairnessDeclaration {
        &self.declaration
    }
    fn order(&mut self, _: &Call, _: Context<'_>, _: &Matrix, _: &mut Vec<u32>) -> Answer<Ranking> {
        unreachable!("a replica does not ask for an order")
    }
    fn victims(&mut self, call: &Call, _: Context<'_>, rows: &Matrix, out: &mut Vec<Yielder>) -> Answer<()> {
        self.heard.borrow_mut().victims_calls += 1;
        let Mood::Chaos(seed) = self.mood else { return Answer::NoOpinion };
        let draw = mix(mix(seed, call.number), call.seed);
        if draw.is_multiple_of(7) {
            return Answer::Fault(FaultKind::Trap);
        }
        // Distinct rows most of the time; sometimes one twice, one outside the window, or a way that does not exist.
        let rows = rows.rows() as u64;
        let first = draw / 7 % rows.max(1);
        let named = (0..1 + draw / 91 % 5).map(|at| Yielder { row: ((first + at) % rows.max(1)) as u32, how: 0 });
        out.extend(named.take(rows as usize));
        match draw / 1_000 % 9 {
            0 => out.push(Yielder { row: rows as u32, how: 0 }),
            1 => out.push(Yielder { row: first as u32, how: 1 }),
            2 => out.push(Yielder { row: 0, how: 9 }),
            3 => out.clear(),
            _ => {}
        }
        Answer::Proposal(())
    }
}

impl Policy for Eviction {
    fn terms(&self) -> &Terms {
        &self.declaration.terms
    }
    fn observe(&mut self, facts: &[Fact]) -> Result<(), FaultKind> {
        self.heard.borrow_mut().eviction.extend_from_slice(facts);
        Ok(())
    }
}

impl EvictionPolicy for Eviction {
    fn describe(&self) -> &EvictionDeclaration {
        &self.declaration
    }
    fn decide(&mut self, call: &Call, _: Context<'_>, runs: &Matrix, out: &mut Vec<Worth>) -> Answer<()> {
        self.heard.borrow_mut().eviction_calls += 1;
        let Mood::Chaos(seed) = self.mood else { return Answer::NoOpinion };
        let draw = mix(mix(seed, call.number), 3);
        out.extend(
            (0..runs.rows() as u64).map(|row| Worth { price: mix(draw, row) >> (draw % 64), to: (draw % 3) as u8 }),
        );
        match draw / 64 % 8 {
            0 => return Answer::Fault(FaultKind::Fuel),
            1 => out.push(Worth::default()),
            2 => out.clear(),
            3 => out.iter_mut().for_each(|worth| worth.to = 7),
            _ => {}
        }
        Answer::Proposal(())
    }
}

/// Test policies in the two seats of a replica, native ones in the others.
pub struct TestPolicies {
    native: NativePolicies,
    fairness: Fairness,
    eviction: Eviction,
}

impl TestPolicies {
    pub fn new(mood: Mood) -> (Self, Rc<RefCell<Heard>>) {
        let heard = Rc::new(RefCell::new(Heard::default()));
        let fairness = FairnessDeclaration {
            terms: terms(Decision::Fairness),
            order: Declared::default(),
            waiting: Declared::default(),
            victims: all::<VictimsSignal>(),
            running: Declared::exactly(RunningSignal::ALL),
        };
        let eviction: EvictionDeclaration = Declaration {
            terms: terms(Decision::Eviction),
            context: all::<EvictionSignal>(),
            rows: Declared::exactly(RunSignal::ALL),
        };
        let policies = Self {
            native: NativePolicies::new(Generation(1), 1_024),
            fairness: Fairness { declaration: fairness, mood, heard: heard.clone() },
            eviction: Eviction { declaration: eviction, mood, heard: heard.clone() },
        };
        (policies, heard)
    }
}

impl Policies for TestPolicies {
    fn generation(&self) -> Generation {
        self.native.generation()
    }
    fn admission(&mut self) -> &mut dyn AdmissionPolicy {
        self.native.admission()
    }
    fn routing(&mut self) -> &mut dyn RoutingPolicy {
        self.native.routing()
    }
    fn fairness(&mut self) -> &mut dyn FairnessPolicy {
        &mut self.fairness
    }
    fn eviction(&mut self) -> &mut dyn EvictionPolicy {
        &mut self.eviction
    }
    fn overload(&mut self) -> &mut dyn OverloadPolicy {
        self.native.overload()
    }
}
