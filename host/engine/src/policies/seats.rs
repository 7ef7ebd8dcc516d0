//! What is a set of policies to the engine, and who builds one?

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use penstock_base::{Generation, Instant};
use penstock_policy_api::native::NativePolicies;
use penstock_policy_api::validate::Malformed;
use penstock_policy_api::{
    AdmissionPolicy, Decision, EvictionPolicy, FairnessPolicy, OverloadPolicy, Policies, RoutingPolicy,
};

/// Which machine asks for a set of policies. An instance belongs to exactly one machine.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Machine {
    /// The gateway.
    Gateway,
    /// The replica with this number.
    Replica(u32),
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gateway => f.write_str("gateway"),
            Self::Replica(replica) => write!(f, "replica {replica}"),
        }
    }
}

/// What the seats of a machine remember, for the trial of the set that may follow them. Only who made them can read it.
pub type Memory = Box<dyn Any + Send>;

/// The policies in the seats of one machine, and what the driver does to them between two steps. Owned by the machine's thread.
pub trait SeatedPolicies: Policies + Any + Send {
    /// Called between two steps, after every turn of the loop: the moment for snapshots, and to hand on what policies said. Must not
    /// block, and must cost next to nothing when nothing is due.
    fn between_steps(&mut self, _now: Instant) {}

    /// The host refused an answer of this seat as malformed. Faults inside a policy are known where they happen.
    fn refused(&mut self, _decision: Decision, _why: Malformed) {}

    /// Fuel of the last call of a seat; 0 where none is metered.
    fn last_fuel(&self, _decision: Decision) -> u64 {
        0
    }

    /// Counts how often a seat's instance was made anew: what it remembers may be another thing since.
    fn lives(&self, _decision: Decision) -> u64 {
        0
    }

    /// What the seats remember now. Asks no policy.
    fn memory(&mut self) -> Memory {
        Box::new(())
    }
}

/// A set that was made and tried for one machine, and waits to be seated.
pub trait PreparedPolicies: Send {
    /// Sits down where nothing is to be taken over: at a machine's start, and when it starts anew.
    fn seat(self: Box<Self>, generation: Generation) -> Box<dyn SeatedPolicies>;

    /// Takes over from `old` between two steps. Whatever fails on the way costs state, never the swap. Nothing that takes long to end is
    /// dropped here: it goes into [`TakenOver::retired`].
    fn take_over(self: Box<Self>, old: Box<dyn SeatedPolicies>, generation: Generation, _now: Instant) -> TakenOver {
        TakenOver { seated: self.seat(generation), retired: Box::new(old) }
    }
}

/// What a swap leaves behind.
pub struct TakenOver {
    /// In the seats from now on.
    pub seated: Box<dyn SeatedPolicies>,
    /// What left; dropped on a thread of its own.
    pub retired: Box<dyn Any + Send>,
}

/// The words of the native defaults.
pub const NATIVE_WORDS: &[u8] = b"native";

/// Builds the policy sets of the machines: the native defaults unless told otherwise.
#[derive(Clone)]
pub struct PolicySource {
    made: Arc<dyn Prepare>,
    /// In words, so that it can be made again.
    words: Arc<[u8]>,
}

/// Makes a set for one machine, off its thread, and tries it.
trait Prepare: Send + Sync {
    fn prepare(
        &self,
        machine: Machine,
        memory: Option<&Memory>,
        context_tokens_max: u32,
    ) -> Result<Box<dyn PreparedPolicies>, String>;
}

impl PolicySource {
    /// The native defaults in all seats.
    pub fn native() -> Self {
        Self::made(Native).in_words(NATIVE_WORDS)
    }

    /// Plain sets built by `build`: once a machine, and again when a replica starts anew. They take no state over.
    pub fn new(build: impl Fn(Machine) -> Box<dyn Policies + Send> + Send + Sync + 'static) -> Self {
        Self::made(Plain(build))
    }

    /// Sets made and tried by `prepare`, with what the machine's present seats remember where there are any. Called once a machine at an
    /// activation, on the thread that activates, and again when a replica starts anew; the words of a refusal reach whoever activates.
    pub fn preparing(
        prepare: impl Fn(Machine, Option<&Memory>) -> Result<Box<dyn PreparedPolicies>, String> + Send + Sync + 'static,
    ) -> Self {
        Self::made(Prepared(prepare))
    }

    /// The same, with the words from which the set can be made again: a journal holds them.
    #[must_use]
    pub fn in_words(self, words: &[u8]) -> Self {
        Self { words: words.into(), ..self }
    }

    /// See [`Self::in_words`]; empty where there are none.
    pub fn words(&self) -> Arc<[u8]> {
        Arc::clone(&self.words)
    }

    fn made(made: impl Prepare + 'static) -> Self {
        Self { made: Arc::new(made), words: Arc::default() }
    }

    /// The set for one machine of a model with this context window.
    ///
    /// # Errors
    /// It cannot serve there, in the words of whoever tried it.
    pub fn prepare(
        &self,
        machine: Machine,
        memory: Option<&Memory>,
        context_tokens_max: u32,
    ) -> Result<Box<dyn PreparedPolicies>, String> {
        self.made.prepare(machine, memory, context_tokens_max)
    }
}

impl Default for PolicySource {
    fn default() -> Self {
        Self::native()
    }
}

impl fmt::Debug for PolicySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PolicySource")
    }
}

struct Native;

impl Prepare for Native {
    fn prepare(
        &self,
        _: Machine,
        _: Option<&Memory>,
        context_tokens_max: u32,
    ) -> Result<Box<dyn PreparedPolicies>, String> {
        Ok(Box::new(PlainSet(Box::new(NativePolicies::new(Generation(0), context_tokens_max)))))
    }
}

struct Plain<F>(F);

impl<F: Fn(Machine) -> Box<dyn Policies + Send> + Send + Sync> Prepare for Plain<F> {
    fn prepare(&self, machine: Machine, _: Option<&Memory>, _: u32) -> Result<Box<dyn PreparedPolicies>, String> {
        Ok(Box::new(PlainSet((self.0)(machine))))
    }
}

struct Prepared<F>(F);

impl<F> Prepare for Prepared<F>
where
    F: Fn(Machine, Option<&Memory>) -> Result<Box<dyn PreparedPolicies>, String> + Send + Sync,
{
    fn prepare(&self, machine: Machine, memory: Option<&Memory>, _: u32) -> Result<Box<dyn PreparedPolicies>, String> {
        (self.0)(machine, memory)
    }
}

/// Policies without anything to snapshot or to hand over. Their own generation counts for nothing: the recorder knows the right one.
struct PlainSet(Box<dyn Policies + Send>);

impl PreparedPolicies for PlainSet {
    fn seat(self: Box<Self>, _: Generation) -> Box<dyn SeatedPolicies> {
        self
    }
}

impl SeatedPolicies for PlainSet {}

impl Policies for PlainSet {
    fn generation(&self) -> Generation {
        self.0.generation()
    }
    fn admission(&mut self) -> &mut dyn AdmissionPolicy {
        self.0.admission()
    }
    fn routing(&mut self) -> &mut dyn RoutingPolicy {
        self.0.routing()
    }
    fn fairness(&mut self) -> &mut dyn FairnessPolicy {
        self.0.fairness()
    }
    fn eviction(&mut self) -> &mut dyn EvictionPolicy {
        self.0.eviction()
    }
    fn overload(&mut self) -> &mut dyn OverloadPolicy {
        self.0.overload()
    }
}
