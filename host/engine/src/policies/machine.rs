//! A machine's side of a swap: what is in its seats, and what it holds ready.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use penstock_base::{Generation, Instant};
use penstock_journal::Machine as Logged;
use penstock_policy_api::validate::{Change, Malformed};
use penstock_policy_api::{Decision, Policies};

use super::log::{DecisionLog, DecisionsConfig};
use super::order::{Held, PolicyOrder, Said};
use super::reaper::Reaper;
use super::recorder::{Post, Recorder};
use super::seats::{Machine, PolicySource, PreparedPolicies, SeatedPolicies};
use crate::wiring::Wiring;

/// What the machines share about policies.
pub(crate) struct PolicyPlane {
    /// What is in force at the gateway: what a replica that starts anew must have.
    current: Mutex<(Generation, PolicySource)>,
    /// Held through an activation: one at a time. The last generation that was tried.
    pub activating: Mutex<Generation>,
    pub reaper: Reaper,
    pub log: DecisionLog,
}

/// The first set's generation.
pub(crate) const FIRST: Generation = Generation(1);

impl PolicyPlane {
    /// With the first set in force.
    pub fn new(source: PolicySource, replicas: usize, decisions: DecisionsConfig) -> std::io::Result<Self> {
        Ok(Self {
            current: Mutex::new((FIRST, source)),
            activating: Mutex::new(FIRST),
            reaper: Reaper::start()?,
            log: DecisionLog::new(replicas, decisions),
        })
    }

    /// The generation in force at the gateway, and its source.
    pub fn current(&self) -> (Generation, PolicySource) {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Another one is.
    pub fn set_current(&self, generation: Generation, source: PolicySource) {
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = (generation, source);
    }
}

/// See the module. Lives on the machine's thread.
pub(crate) struct MachineSeats {
    wiring: Arc<Wiring>,
    machine: Machine,
    recorder: Recorder,
    held: Option<Held>,
}

impl MachineSeats {
    /// With the first set in the seats.
    pub fn new(wiring: Arc<Wiring>, machine: Machine, first: Box<dyn PreparedPolicies>) -> Self {
        let log = &wiring.policies.log;
        let post = Post {
            clock: wiring.clock,
            metrics: Arc::clone(&wiring.metrics),
            rings: log.of(machine).expect("every machine has its rings").clone(),
            sampling: log.sampling,
            tap: wiring.journal.as_ref().map(|journal| journal.tap(machine)),
        };
        let words = wiring.policies.current().1.words();
        let recorder = Recorder::new(first.seat(FIRST), FIRST, words, post);
        let seats = Self { wiring, machine, recorder, held: None };
        seats.tell_generation();
        seats
    }

    /// A step begins.
    pub fn begin_step<M: Logged>(&mut self, machine: &M, config: &M::Config, now: Instant, input: &M::Input) {
        self.recorder.begin_step(machine, config, now, input);
    }

    /// For that step of the machine.
    pub fn policies(&mut self) -> &mut dyn Policies {
        &mut self.recorder
    }

    /// What came of it, before it is carried out.
    pub fn end_step<M: Logged>(&mut self, machine: &M, effects: &[M::Effect]) {
        self.recorder.end_step(machine, effects);
    }

    /// The machine is taken out of service.
    pub fn frozen(&mut self) {
        self.recorder.frozen();
    }

    /// The generation in the seats.
    pub fn generation(&self) -> Generation {
        self.recorder.generation()
    }

    /// Does as told, but for a switch, which is the caller's. `serves`: the machine runs.
    pub fn obey(&mut self, order: PolicyOrder, serves: bool) {
        match order {
            PolicyOrder::Recall(answers) => {
                let memory = serves.then(|| self.recorder.memory());
                answers.say(Said::Recalled(memory));
            }
            PolicyOrder::Prepare(held) => {
                held.answers.say(Said::Holds { serves });
                if let Some(older) = self.held.replace(held) {
                    self.wiring.policies.reaper.take(Box::new(older.set));
                }
            }
            PolicyOrder::Abort(generation) => {
                if let Some(held) = self.held.take_if(|held| held.generation == generation) {
                    self.wiring.policies.reaper.take(Box::new(held.set));
                }
            }
            PolicyOrder::Switch(_) => {}
        }
    }

    /// Answers an order to a machine that will not serve any more.
    pub fn leave(&mut self, order: PolicyOrder) {
        match order {
            PolicyOrder::Recall(answers) => answers.say(Said::Gone),
            PolicyOrder::Prepare(held) => held.answers.say(Said::Gone),
            PolicyOrder::Abort(_) | PolicyOrder::Switch(_) => {}
        }
        self.depart();
    }

    /// The machine stops for good, and whoever waits for it must know.
    pub fn depart(&mut self) {
        if let Some(held) = self.held.take() {
            held.answers.say(Said::Gone);
            self.wiring.policies.reaper.take(Box::new(held.set));
        }
    }

    /// At the gateway: lets what is held for `generation` take over, unless the activation was given up. True when it did.
    pub fn commit(&mut self, generation: Generation) -> bool {
        let Some(held) = self.held.take_if(|held| held.generation == generation) else { return false };
        if !held.verdict.commit() {
            self.wiring.policies.reaper.take(Box::new(held.set));
            return false;
        }
        self.wiring.policies.set_current(generation, held.source.clone());
        self.wiring.metrics.policy_generation(generation);
        self.take_over(held);
        true
    }

    /// At a replica: the gateway is at `generation`. True when the seats changed.
    pub fn follow(&mut self, generation: Generation) -> bool {
        if generation <= self.generation() {
            return false;
        }
        if let Some(held) = self.held.take_if(|held| held.generation == generation) {
            self.take_over(held);
            return true;
        }
        let (current, source) = self.wiring.policies.current();
        if current != generation {
            // Word of a later one is on its way.
            return false;
        }
        tracing::warn!(machine = %self.machine, generation = generation.0, "a policy set is built on its machine's thread");
        self.build(current, &source);
        true
    }

    fn take_over(&mut self, held: Held) {
        let from = self.wiring.clock.now();
        let retired = self.recorder.take_over(held.set, (held.generation, held.source.words()), from);
        let pause = self.wiring.clock.now().since(from);
        self.wiring.policies.reaper.take(retired);
        self.wiring.metrics.policy_swapped(self.machine, pause);
        self.tell_generation();
        held.answers.say(Said::Switched { pause });
    }

    /// A replica starts anew: what was in its seats may be what broke it, so that the set in force is seated afresh.
    pub fn restart(&mut self) {
        let (generation, source) = self.wiring.policies.current();
        let Some(held) = self.held.take_if(|held| held.generation == generation) else {
            return self.build(generation, &source);
        };
        let from = self.wiring.clock.now();
        self.sit(held.set.seat(generation), generation, held.source.words());
        held.answers.say(Said::Switched { pause: self.wiring.clock.now().since(from) });
    }

    fn build(&mut self, generation: Generation, source: &PolicySource) {
        let context_tokens_max = self.wiring.context_tokens_max;
        let built = catch_unwind(AssertUnwindSafe(|| source.prepare(self.machine, None, context_tokens_max)));
        let mut words = source.words();
        let built = built.unwrap_or_else(|_| Err("it panicked".into())).or_else(|why| {
            tracing::error!(
                machine = %self.machine, generation = generation.0, why,
                "a policy set cannot be made again: the native defaults sit in its place"
            );
            self.wiring.metrics.policy_activation("native_in_place");
            words = PolicySource::native().words();
            PolicySource::native().prepare(self.machine, None, context_tokens_max)
        });
        if let Ok(set) = built {
            self.sit(set.seat(generation), generation, words);
        }
    }

    fn sit(&mut self, seats: Box<dyn SeatedPolicies>, generation: Generation, words: Arc<[u8]>) {
        if let Some(old) = self.recorder.replace(seats, generation, words) {
            self.wiring.policies.reaper.take(Box::new(old));
        }
        self.tell_generation();
    }

    fn tell_generation(&self) {
        let generation = self.generation();
        match self.machine {
            Machine::Gateway => self.wiring.metrics.policy_generation(generation),
            Machine::Replica(index) => {
                if let Some(replica) = self.wiring.replicas.locals().get(index as usize) {
                    self.wiring.board.update_replica(*replica, |status| status.generation = generation);
                }
            }
        }
    }

    /// A question was answered by the native default: where the host refused the answer, the policy's keeper must know.
    pub fn fell_back(&mut self, decision: u8, call: u64, code: u8) {
        let decision = Decision::ALL.get(usize::from(decision)).copied();
        if let (Some(decision), Some(why)) = (decision, malformed(code)) {
            self.recorder.refused(decision, call, why);
        }
    }

    /// An answer stands after a change that the contract names.
    pub fn changed(&mut self, decision: u8, call: u64, change: u8) {
        let decision = Decision::ALL.get(usize::from(decision)).copied();
        if let (Some(decision), Some(change)) = (decision, Change::from_code(change)) {
            self.recorder.changed(decision, call, change);
        }
    }

    /// Called after every turn of the loop.
    pub fn between_steps(&mut self, now: Instant) {
        self.recorder.between_steps(now);
    }
}

/// The malformed proposal with this fallback code.
fn malformed(code: u8) -> Option<Malformed> {
    crate::metrics::MALFORMED.into_iter().find(|why| 16 + *why as u8 == code)
}
