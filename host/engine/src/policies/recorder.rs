//! Stands between a machine and its policies: takes the time of every question, notes what was asked and answered, and names the
//! generation. The machine has no clock, so that the wall clock is read here.
//!
//! A machine is lent each seat as a `dyn` of its own, so that each needs an object of its own: a [`View`]. The views of one machine
//! share the set behind them; all of it lives on that machine's thread.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use penstock_base::{Generation, Instant};
use penstock_journal::wire::{AnswerHead, Given, ObserveFault, Seated};
use penstock_journal::{Machine as Logged, SegmentHeader, digest_effects};
use penstock_policy_api::validate::{Change, Malformed};
use penstock_policy_api::{
    AdmissionPolicy, Decision, EvictionPolicy, FairnessPolicy, FallbackReason, FaultKind, OverloadPolicy, Policies,
    RoutingPolicy,
};

use super::inputs::{Arena, InputsKept, KeptFor, Sampling, ToldOf};
use super::log::{DECISIONS_KEPT_MAX, DecisionRecord, DecisionRings};
use super::seats::{Memory, PreparedPolicies, SeatedPolicies};
use super::views::{Admission, Eviction, Fairness, Overload, Routing, View};
use crate::clock::Clock;
use crate::journal::Tap;
use crate::metrics::Metrics;

/// See the module.
pub(crate) struct Recorder {
    shared: Rc<RefCell<Shared>>,
    generation: Generation,
    rings: DecisionRings,
    admission: View<Admission>,
    routing: View<Routing>,
    fairness: View<Fairness>,
    eviction: View<Eviction>,
    overload: View<Overload>,
}

/// What the views of one machine share.
pub(super) struct Shared {
    /// None only while one set takes over from another.
    seats: Option<Box<dyn SeatedPolicies>>,
    pub generation: Generation,
    pub clock: Clock,
    pub metrics: Arc<Metrics>,
    sampling: Sampling,
    /// Questions so far.
    sequence: u64,
    /// Not in the ring yet.
    noted: Vec<DecisionRecord>,
    /// What the questions of this step were told, until it is known which of it is kept.
    arena: Arena,
    /// Kept and not in the ring yet.
    kept: Vec<InputsKept>,
    journal: Journaling,
}

/// What the journal of this machine has to know about its policies.
struct Journaling {
    tap: Option<Tap>,
    /// The set in the seats, in the words of who made it.
    set: Arc<[u8]>,
    /// Who sits there, or what it remembers, is not as the journal says.
    is_stale: bool,
    /// How often each seat's instance was made anew when the journal last said what it remembers.
    lives: [u64; 5],
    /// Facts told in this step, by decision.
    tellings: [u32; 5],
}

/// One answered question on its way into the log and the journal.
pub(super) struct Asked<'a> {
    pub record: DecisionRecord,
    pub given: Given<'a>,
    pub told: ToldOf<'a>,
}

impl Shared {
    pub fn seats(&mut self) -> &mut dyn SeatedPolicies {
        self.seats.as_deref_mut().expect("a set is missing only within `take_over`")
    }

    /// Numbers an answered question, and notes it.
    pub fn note(&mut self, asked: Asked<'_>) {
        let Asked { mut record, given, told } = asked;
        self.sequence += 1;
        record.sequence = self.sequence;
        if let Some(tap) = &mut self.journal.tap {
            let head = AnswerHead {
                sequence: record.sequence,
                question: record.question,
                call: record.call,
                inputs: record.inputs,
                fuel: record.fuel,
                took_ns: record.took_ns,
            };
            tap.answer(head, given);
        }
        // Beyond it a reader has kept the ring for thousands of decisions; what is newest is left out until the next turn.
        if self.noted.len() < DECISIONS_KEPT_MAX {
            self.arena.take(self.noted.len(), told);
            self.noted.push(record);
        }
    }

    /// Facts were told to a seat.
    pub fn observed(&mut self, decision: Decision, told: Result<(), FaultKind>) {
        let telling = self.journal.tellings[decision as usize];
        self.journal.tellings[decision as usize] += 1;
        if let (Err(kind), Some(tap)) = (told, &mut self.journal.tap) {
            tap.observed(ObserveFault { decision, telling, kind });
        }
    }

    /// The step is over and its answers are judged: keeps the inputs that are worth it.
    fn settle(&mut self) {
        let Self { noted, arena, kept, sampling, .. } = self;
        arena.settle(noted, kept, |record| match record.fallback {
            Some(reason) if reason.is_strike() => Some(KeptFor::Fault),
            _ if record.changed.is_some() => Some(KeptFor::Override),
            _ => sampling.takes(record).then_some(KeptFor::Sample),
        });
    }

    fn record_of(&mut self, decision: Decision, call: u64) -> Option<&mut DecisionRecord> {
        // The latest ones are judged: the search is short.
        let mut latest = self.noted.iter_mut().rev();
        latest.find(|record| record.question.decision() == decision && record.call == call)
    }
}

impl Recorder {
    /// In front of a set that has just sat down.
    pub fn new(seats: Box<dyn SeatedPolicies>, generation: Generation, set: Arc<[u8]>, at: Post) -> Self {
        let Post { clock, metrics, rings, sampling, tap } = at;
        let journal = Journaling { tap, set, is_stale: true, lives: [0; 5], tellings: [0; 5] };
        let shared = Rc::new(RefCell::new(Shared {
            seats: Some(seats),
            generation,
            clock,
            metrics,
            sampling,
            sequence: 0,
            noted: Vec::new(),
            arena: Arena::default(),
            kept: Vec::new(),
            journal,
        }));
        Self {
            generation,
            rings,
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
        (generation, words): (Generation, Arc<[u8]>),
        now: Instant,
    ) -> Box<dyn std::any::Any + Send> {
        let old = self.shared.borrow_mut().seats.take().expect("the seats are taken between two steps");
        let taken = set.take_over(old, generation, now);
        self.sit(taken.seated, generation, words);
        taken.retired
    }

    /// Another set sits down, and takes nothing over.
    pub fn replace(
        &mut self,
        seats: Box<dyn SeatedPolicies>,
        generation: Generation,
        words: Arc<[u8]>,
    ) -> Option<Box<dyn SeatedPolicies>> {
        let old = self.shared.borrow_mut().seats.take();
        self.sit(seats, generation, words);
        old
    }

    fn sit(&mut self, seats: Box<dyn SeatedPolicies>, generation: Generation, words: Arc<[u8]>) {
        self.generation = generation;
        let mut shared = self.shared.borrow_mut();
        shared.generation = generation;
        shared.seats = Some(seats);
        shared.journal.set = words;
        shared.journal.is_stale = true;
        self.admission.forget();
        self.routing.forget();
        self.fairness.forget();
        self.eviction.forget();
        self.overload.forget();
    }

    /// A step begins: what goes in is on record before it does.
    pub fn begin_step<M: Logged>(&mut self, machine: &M, config: &M::Config, now: Instant, input: &M::Input) {
        let taken = {
            let mut shared = self.shared.borrow_mut();
            shared.settle();
            shared.journal.tellings = [0; 5];
            shared.journal.tap.take()
        };
        // Taken out meanwhile: policies that are asked to save pass through the views.
        let Some(mut tap) = taken else { return };
        if let Some(segment) = tap.due(now) {
            let header = self.header(machine, config, (segment, now));
            let done = self.shared.borrow().clock.now();
            tap.open(header, now, done);
        } else if tap.is_open() && self.is_stale() {
            tap.seated(&self.seated());
        }
        tap.input(now, input);
        self.shared.borrow_mut().journal.tap = Some(tap);
    }

    /// What came of it, before the effects are carried out.
    pub fn end_step<M: Logged>(&mut self, machine: &M, effects: &[M::Effect]) {
        let mut shared = self.shared.borrow_mut();
        if let Some(tap) = shared.journal.tap.as_mut().filter(|tap| tap.is_open()) {
            let effects = digest_effects(effects, tap.scratch());
            tap.outcome(penstock_journal::Outcome {
                generation: machine.generation(),
                effects,
                decisions: machine.decisions(),
            });
        }
    }

    /// The machine is taken out of service: its last input may have no outcome.
    pub fn frozen(&mut self) {
        // A panic may have come from anywhere, the tap's own work included.
        if let Ok(mut shared) = self.shared.try_borrow_mut()
            && let Some(tap) = &mut shared.journal.tap
        {
            tap.break_off(penstock_journal::BreakCause::Frozen);
        }
    }

    fn header<M: Logged>(&mut self, machine: &M, config: &M::Config, at: (u64, Instant)) -> SegmentHeader {
        let mut header = SegmentHeader::of(machine, config, self, at);
        header.has_answers = true;
        header.seated.set = self.shared.borrow().journal.set.to_vec();
        self.shared.borrow_mut().is_told();
        header
    }

    fn seated(&mut self) -> Seated {
        let set = Arc::clone(&self.shared.borrow().journal.set);
        let seated = Seated::of(self, &set);
        self.shared.borrow_mut().is_told();
        seated
    }

    fn is_stale(&mut self) -> bool {
        let mut shared = self.shared.borrow_mut();
        shared.journal.is_stale || Decision::ALL.into_iter().any(|of| shared.has_new_life(of))
    }

    /// The host refused an answer.
    pub fn refused(&mut self, decision: Decision, call: u64, why: Malformed) {
        let mut shared = self.shared.borrow_mut();
        shared.seats().refused(decision, why);
        if let Some(record) = shared.record_of(decision, call) {
            record.fallback = Some(FallbackReason::Malformed(why));
        }
    }

    /// The host changed something about an answer.
    pub fn changed(&mut self, decision: Decision, call: u64, change: Change) {
        if let Some(record) = self.shared.borrow_mut().record_of(decision, call) {
            record.changed = Some(change);
        }
    }

    /// Called after every turn.
    pub fn between_steps(&mut self, now: Instant) {
        let mut shared = self.shared.borrow_mut();
        shared.settle();
        shared.seats().between_steps(now);
        let Shared { noted, kept, journal, .. } = &mut *shared;
        self.rings.take(noted, kept);
        if let Some(tap) = &mut journal.tap {
            tap.between_steps(now);
        }
    }

    /// What the seats remember.
    pub fn memory(&mut self) -> Memory {
        self.shared.borrow_mut().seats().memory()
    }
}

impl Shared {
    fn has_new_life(&mut self, decision: Decision) -> bool {
        self.seats().lives(decision) != self.journal.lives[decision as usize]
    }

    fn is_told(&mut self) {
        self.journal.is_stale = false;
        self.journal.lives = Decision::ALL.map(|decision| self.seats().lives(decision));
    }
}

/// Where a recorder stands.
pub(crate) struct Post {
    pub clock: Clock,
    pub metrics: Arc<Metrics>,
    pub rings: DecisionRings,
    pub sampling: Sampling,
    /// Into the machine's journal, where there is one.
    pub tap: Option<Tap>,
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

impl Drop for Recorder {
    fn drop(&mut self) {
        let mut shared = self.shared.borrow_mut();
        let Shared { noted, kept, .. } = &mut *shared;
        self.rings.take(noted, kept);
    }
}
