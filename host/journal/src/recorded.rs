//! The answers in a log, in the places of the policies that gave them. What the machine asks must be what it asked then; the policies
//! themselves, where somebody can make them, are asked once more and must answer the same.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use penstock_base::{Generation, Instant};
use penstock_policy_api::{
    Action, AdmissionDeclaration, AdmissionPolicy, Answer, Call, Context, Decision, EvictionDeclaration,
    EvictionPolicy, Fact, FairnessDeclaration, FairnessPolicy, FaultKind, Matrix, OverloadDeclaration, OverloadPolicy,
    OverloadQuestion, Placement, Policies, Policy, Question, Ranking, RequestRecord, RoutingDeclaration, RoutingPolicy,
    RoutingQuestion, Stance, Terms, Verdict, Worth, Yielder,
};

use crate::header::MachineId;
use crate::told::Told;
use crate::wire::{AnswerRecord, Declarations, Given, KeptAnswer, ObserveFault, Seated};

/// Policies that were made again from a set's words.
pub trait Remade {
    /// Them.
    fn policies(&mut self) -> &mut dyn Policies;
    /// Fuel of a seat's last call; 0 where none is metered.
    fn last_fuel(&self, decision: Decision) -> u64;
}

/// Makes policies again.
pub trait Remake {
    /// From the words of the set that sat at `machine`, as new.
    ///
    /// # Errors
    /// Why they cannot be made: a component is not at hand.
    fn remake(&mut self, machine: MachineId, context_tokens_max: u32, set: &[u8]) -> Result<Box<dyn Remade>, String>;
}

/// What came of asking policies once more.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct AskedAgain {
    /// Answers in the log.
    pub answers: u64,
    /// Answers that were given again.
    pub same: u64,
    /// Answers that came out differently.
    pub different: u64,
    /// The first of them.
    pub first: Option<AskedDifference>,
    /// Equal answers that took the same fuel; those without any are not among them.
    pub fuel_same: u64,
    /// Equal answers that took other fuel. An instance that was made anew from its state may have to make room once more.
    pub fuel_different: u64,
    /// Answers not asked for again: nobody could make the policies.
    pub not_at_hand: u64,
    /// Answers not asked for again: the policy's memory at that point is not in the log (it was being made anew), or time stopped it.
    pub not_comparable: u64,
    /// Why policies could not be made, the first time.
    pub why_not: Option<String>,
}

/// Two answers to the same question.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AskedDifference {
    /// The decision, as the decision log numbers them.
    pub sequence: u64,
    /// What was asked.
    pub question: Question,
    /// Of whom.
    pub policy: String,
    /// The answer in the log.
    pub recorded: KeptAnswer,
    /// The answer now.
    pub again: KeptAnswer,
}

/// What the log says about the step that is being replayed, and what was found so far.
pub(crate) struct Script {
    answers: VecDeque<AnswerRecord>,
    faults: Vec<ObserveFault>,
    tellings: [u32; 5],
    difference: Option<String>,
    remade: Option<Box<dyn Remade>>,
    /// Seats whose memory is as it was.
    comparable: [bool; 5],
    found: AskedAgain,
}

/// One seat.
struct Seat<D> {
    declaration: D,
    script: Rc<RefCell<Script>>,
}

/// See the module.
pub(crate) struct Recorded {
    generation: Generation,
    script: Rc<RefCell<Script>>,
    admission: Seat<AdmissionDeclaration>,
    routing: Seat<RoutingDeclaration>,
    fairness: Seat<FairnessDeclaration>,
    eviction: Seat<EvictionDeclaration>,
    overload: Seat<OverloadDeclaration>,
}

impl Recorded {
    /// With what sits in the seats when the log begins.
    pub fn new(seated: &Seated) -> Self {
        let script = Rc::new(RefCell::new(Script {
            answers: VecDeque::new(),
            faults: Vec::new(),
            tellings: [0; 5],
            difference: None,
            remade: None,
            comparable: [false; 5],
            found: AskedAgain::default(),
        }));
        let Declarations { admission, routing, fairness, eviction, overload } = seated.declared.clone();
        Self {
            generation: seated.generation,
            admission: Seat { declaration: admission, script: Rc::clone(&script) },
            routing: Seat { declaration: routing, script: Rc::clone(&script) },
            fairness: Seat { declaration: fairness, script: Rc::clone(&script) },
            eviction: Seat { declaration: eviction, script: Rc::clone(&script) },
            overload: Seat { declaration: overload, script: Rc::clone(&script) },
            script,
        }
    }

    /// Others sit down, or the same ones with another memory.
    pub fn sit(&mut self, seated: &Seated) {
        let Declarations { admission, routing, fairness, eviction, overload } = seated.declared.clone();
        self.generation = seated.generation;
        self.admission.declaration = admission;
        self.routing.declaration = routing;
        self.fairness.declaration = fairness;
        self.eviction.declaration = eviction;
        self.overload.declaration = overload;
    }

    /// The policies themselves, to be asked again; or why there are none.
    pub fn compare_with(&mut self, remade: Result<Box<dyn Remade>, String>, seated: &Seated, now: Instant) {
        let script = &mut *self.script.borrow_mut();
        script.comparable = [false; 5];
        match remade {
            Ok(mut remade) => {
                for decision in Decision::ALL {
                    let restored = seated.restore(decision, now, remade.policies());
                    script.comparable[decision as usize] = restored.is_ok();
                }
                script.remade = Some(remade);
            }
            Err(why) => {
                script.remade = None;
                script.found.why_not.get_or_insert(why);
            }
        }
    }

    /// A step begins.
    pub fn begin_step(&mut self) {
        let mut script = self.script.borrow_mut();
        script.answers.clear();
        script.faults.clear();
        script.tellings = [0; 5];
    }

    /// An answer of this step.
    pub fn answer(&mut self, record: AnswerRecord) {
        self.script.borrow_mut().answers.push_back(record);
    }

    /// A fault of this step.
    pub fn observed(&mut self, fault: ObserveFault) {
        self.script.borrow_mut().faults.push(fault);
    }

    /// The first thing in the step that was not as recorded.
    pub fn difference(&mut self) -> Option<String> {
        let mut script = self.script.borrow_mut();
        if let Some(left) = script.answers.front() {
            let (sequence, name) = (left.head.sequence, left.head.question.name());
            let said = format!("decision {sequence} ({name}) is not asked for any more");
            script.difference.get_or_insert(said);
        }
        script.difference.take()
    }

    /// What came of asking again.
    pub fn found(&self) -> AskedAgain {
        self.script.borrow().found.clone()
    }
}

impl Script {
    /// The recorded answer to this question, when it is the one that was asked.
    fn next(&mut self, question: Question, call: &Call, inputs: u64) -> Option<AnswerRecord> {
        if self.difference.is_some() {
            return None;
        }
        let name = question.name();
        let Some(record) = self.answers.pop_front() else {
            self.difference = Some(format!("{name} call {} is asked for, and was not", call.number));
            return None;
        };
        let head = record.head;
        if (head.question, head.call) != (question, call.number) {
            self.difference = Some(format!(
                "decision {}: {name} call {} is asked for, and {} call {} was",
                head.sequence,
                call.number,
                head.question.name(),
                head.call
            ));
            return None;
        }
        if head.inputs != inputs {
            self.difference = Some(format!(
                "decision {} ({name} call {}): the policy is told something else (digest {inputs:016x}, was {:016x})",
                head.sequence, head.call, head.inputs
            ));
        }
        self.found.answers += 1;
        Some(record)
    }

    /// Holds the answer of the policy itself against the recorded one.
    fn compare(&mut self, record: &AnswerRecord, policy: &str, ask: impl FnOnce(&mut dyn Policies) -> KeptAnswer) {
        let decision = record.head.question.decision();
        let recorded_fault = match record.answer {
            KeptAnswer::Fault(kind) => Some(kind),
            _ => None,
        };
        let Some(remade) = &mut self.remade else {
            self.found.not_at_hand += 1;
            return;
        };
        let by_time = matches!(recorded_fault, Some(FaultKind::Epoch | FaultKind::Rebuilding));
        if by_time {
            self.comparable[decision as usize] = false;
        }
        if !self.comparable[decision as usize] {
            self.found.not_comparable += 1;
            return;
        }
        let again = ask(remade.policies());
        let fuel = remade.last_fuel(decision);
        if recorded_fault.is_some() {
            // It is made anew from what only the recorded run knows; what it remembers then is in the log.
            self.comparable[decision as usize] = false;
        }
        if again != record.answer {
            self.found.different += 1;
            let recorded = record.answer.clone();
            let (sequence, question) = (record.head.sequence, record.head.question);
            let policy = policy.to_owned();
            self.found.first.get_or_insert(AskedDifference { sequence, question, policy, recorded, again });
            return;
        }
        self.found.same += 1;
        if fuel != record.head.fuel {
            self.found.fuel_different += 1;
        } else if fuel > 0 {
            self.found.fuel_same += 1;
        }
    }

    fn observe(&mut self, decision: Decision, facts: &[Fact]) -> Result<(), FaultKind> {
        let telling = self.tellings[decision as usize];
        self.tellings[decision as usize] += 1;
        let failed = self.faults.iter().find(|fault| fault.decision == decision && fault.telling == telling);
        let failed = failed.map(|fault| fault.kind);
        if self.comparable[decision as usize]
            && let Some(remade) = &mut self.remade
        {
            let told = crate::header::seat(remade.policies(), decision).observe(facts);
            // One that fails on other facts than it did has another memory from here on.
            self.comparable[decision as usize] = told.is_ok() && failed.is_none();
        }
        failed.map_or(Ok(()), Err)
    }
}

impl Policies for Recorded {
    fn generation(&self) -> Generation {
        self.generation
    }
    fn admission(&mut self) -> &mut dyn AdmissionPolicy {
        &mut self.admission
    }
    fn routing(&mut self) -> &mut dyn RoutingPolicy {
        &mut self.routing
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

macro_rules! lives {
    ($($declaration:ident => $decision:ident),*) => { $(
        impl Policy for Seat<$declaration> {
            fn terms(&self) -> &Terms {
                &self.declaration.terms
            }
            fn observe(&mut self, facts: &[Fact]) -> Result<(), FaultKind> {
                self.script.borrow_mut().observe(Decision::$decision, facts)
            }
        }
    )* };
}

lives! {
    AdmissionDeclaration => Admission, RoutingDeclaration => Routing, FairnessDeclaration => Fairness,
    EvictionDeclaration => Eviction, OverloadDeclaration => Overload
}

/// The recorded answer as the machine gets it; the list goes where it belongs.
fn answered<T>(record: Option<AnswerRecord>, proposed: impl FnOnce(KeptAnswer) -> Option<T>) -> Answer<T> {
    match record.map(|record| record.answer) {
        None | Some(KeptAnswer::NoOpinion) => Answer::NoOpinion,
        Some(KeptAnswer::Fault(kind)) => Answer::Fault(kind),
        // What does not fit the question was refused when it was read.
        Some(answer) => proposed(answer).map_or(Answer::NoOpinion, Answer::Proposal),
    }
}

impl AdmissionPolicy for Seat<AdmissionDeclaration> {
    fn describe(&self) -> &AdmissionDeclaration {
        &self.declaration
    }
    fn decide(&mut self, call: &Call, request: &RequestRecord, context: Context<'_>) -> Answer<Verdict> {
        let script = &mut *self.script.borrow_mut();
        let record = script.next(Question::Admission, call, Told::admission(call, request, context));
        if let Some(record) = &record {
            script.compare(record, &self.declaration.terms.name, |policies| {
                Given::of(policies.admission().decide(call, request, context), Given::Verdict).to_kept()
            });
        }
        answered(record, |answer| match answer {
            KeptAnswer::Verdict(verdict) => Some(verdict),
            _ => None,
        })
    }
}

impl RoutingPolicy for Seat<RoutingDeclaration> {
    fn describe(&self) -> &RoutingDeclaration {
        &self.declaration
    }
    fn decide(&mut self, call: &Call, asked: &RoutingQuestion<'_>, ranked: &mut Vec<u32>) -> Answer<Placement> {
        let script = &mut *self.script.borrow_mut();
        let record = script.next(Question::Routing, call, Told::routing(call, asked));
        if let Some(record) = &record {
            script.compare(record, &self.declaration.terms.name, |policies| {
                let mut ranked = Vec::new();
                let answer = policies.routing().decide(call, asked, &mut ranked);
                Given::of(answer, |placement| Given::Placement(placement, &ranked)).to_kept()
            });
        }
        answered(record, |answer| match answer {
            KeptAnswer::Placement(placement, rows) => {
                ranked.extend(rows);
                Some(placement)
            }
            _ => None,
        })
    }
}

impl FairnessPolicy for Seat<FairnessDeclaration> {
    fn describe(&self) -> &FairnessDeclaration {
        &self.declaration
    }
    fn order(&mut self, call: &Call, context: Context<'_>, waiting: &Matrix, ranked: &mut Vec<u32>) -> Answer<Ranking> {
        let script = &mut *self.script.borrow_mut();
        let record = script.next(Question::Order, call, Told::rows(call, context, waiting));
        if let Some(record) = &record {
            script.compare(record, &self.declaration.terms.name, |policies| {
                let mut ranked = Vec::new();
                let answer = policies.fairness().order(call, context, waiting, &mut ranked);
                Given::of(answer, |ranking| Given::Ranking(ranking, &ranked)).to_kept()
            });
        }
        answered(record, |answer| match answer {
            KeptAnswer::Ranking(ranking, rows) => {
                ranked.extend(rows);
                Some(ranking)
            }
            _ => None,
        })
    }
    fn victims(
        &mut self,
        call: &Call,
        context: Context<'_>,
        running: &Matrix,
        yielders: &mut Vec<Yielder>,
    ) -> Answer<()> {
        let script = &mut *self.script.borrow_mut();
        let record = script.next(Question::Victims, call, Told::rows(call, context, running));
        if let Some(record) = &record {
            script.compare(record, &self.declaration.terms.name, |policies| {
                let mut yielders = Vec::new();
                let answer = policies.fairness().victims(call, context, running, &mut yielders);
                Given::of(answer, |()| Given::Yielders(&yielders)).to_kept()
            });
        }
        answered(record, |answer| match answer {
            KeptAnswer::Yielders(rows) => {
                yielders.extend(rows);
                Some(())
            }
            _ => None,
        })
    }
}

impl EvictionPolicy for Seat<EvictionDeclaration> {
    fn describe(&self) -> &EvictionDeclaration {
        &self.declaration
    }
    fn decide(&mut self, call: &Call, context: Context<'_>, runs: &Matrix, worths: &mut Vec<Worth>) -> Answer<()> {
        let script = &mut *self.script.borrow_mut();
        let record = script.next(Question::Eviction, call, Told::rows(call, context, runs));
        if let Some(record) = &record {
            script.compare(record, &self.declaration.terms.name, |policies| {
                let mut worths = Vec::new();
                let answer = policies.eviction().decide(call, context, runs, &mut worths);
                Given::of(answer, |()| Given::Worths(&worths)).to_kept()
            });
        }
        answered(record, |answer| match answer {
            KeptAnswer::Worths(rows) => {
                worths.extend(rows);
                Some(())
            }
            _ => None,
        })
    }
}

impl OverloadPolicy for Seat<OverloadDeclaration> {
    fn describe(&self) -> &OverloadDeclaration {
        &self.declaration
    }
    fn decide(&mut self, call: &Call, asked: &OverloadQuestion<'_>, actions: &mut Vec<Action>) -> Answer<Stance> {
        let script = &mut *self.script.borrow_mut();
        let record = script.next(Question::Overload, call, Told::overload(call, asked));
        if let Some(record) = &record {
            script.compare(record, &self.declaration.terms.name, |policies| {
                let mut actions = Vec::new();
                let answer = policies.overload().decide(call, asked, &mut actions);
                Given::of(answer, |stance| Given::Stance(stance, &actions)).to_kept()
            });
        }
        answered(record, |answer| match answer {
            KeptAnswer::Stance(stance, found) => {
                actions.extend(found);
                Some(stance)
            }
            _ => None,
        })
    }
}
