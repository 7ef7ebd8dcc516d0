//! Can this set serve at this machine? Instances are made and tried before anything is switched, off the machine's thread.

use std::fmt;
use std::sync::Arc;

use penstock_policy_api::{Decision, FallbackReason, Policy as _, Question, RestoreError};

use crate::instance::{Setup, StartError};
use crate::library::Library;
use crate::living::{Carried, Living};
use crate::report::Happening;
use crate::runtime::Runtime;
use crate::set::{PolicyRef, PolicySet, SeatSpec, native_names};
use crate::snapshot::{KeptFacts, Snapshot};
use crate::worlds::{Admission, Eviction, Fairness, Overload, Routing, World};

/// Which machine asks. It decides which seats get an instance.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Machine {
    /// Asks admission, routing, `order` and overload.
    Gateway,
    /// Asks `victims` and eviction.
    Replica,
}

impl Machine {
    /// The questions that it asks.
    pub const fn questions(self) -> &'static [Question] {
        match self {
            Self::Gateway => &[Question::Admission, Question::Routing, Question::Order, Question::Overload],
            Self::Replica => &[Question::Victims, Question::Eviction],
        }
    }

    fn asks(self, decision: Decision) -> Option<Question> {
        self.questions().iter().copied().find(|question| question.decision() == decision)
    }
}

/// What instances are made from.
#[derive(Clone, Copy, Debug)]
pub struct Workshop<'a> {
    /// Where they run.
    pub runtime: &'a Runtime,
    /// Where the components are.
    pub library: &'a Library,
    /// The native ladder refuses inputs beyond a part of it.
    pub context_window_tokens: u32,
}

/// Saved states of one machine's seats, as of their last snapshots.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Remembered {
    /// In the order of [`Decision::ALL`].
    seats: [Option<SavedSeat>; 5],
}

/// The saved state of one seat.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SavedSeat {
    /// Name of the policy that saved it; no other gets it.
    pub policy: String,
    /// The state.
    pub snapshot: Snapshot,
}

impl Remembered {
    /// The state of one seat.
    pub fn seat(&self, decision: Decision) -> Option<&SavedSeat> {
        self.seats[decision as usize].as_ref()
    }

    /// Sets the state of one seat, e.g. as read from a file.
    pub fn set(&mut self, decision: Decision, saved: SavedSeat) {
        self.seats[decision as usize] = Some(saved);
    }
}

/// One seat with its policy.
pub(crate) enum Chair<W: World> {
    Native { spec: SeatSpec, policy: Box<W::Native> },
    Wasm { spec: SeatSpec, living: Box<Living<W>> },
}

impl<W: World> Chair<W> {
    pub fn spec(&self) -> &SeatSpec {
        match self {
            Self::Native { spec, .. } | Self::Wasm { spec, .. } => spec,
        }
    }

    pub fn living(&self) -> Option<&Living<W>> {
        match self {
            Self::Native { .. } => None,
            Self::Wasm { living, .. } => Some(living),
        }
    }

    pub fn living_mut(&mut self) -> Option<&mut Living<W>> {
        match self {
            Self::Native { .. } => None,
            Self::Wasm { living, .. } => Some(living),
        }
    }
}

/// The five chairs of one machine.
pub(crate) struct Chairs {
    pub admission: Chair<Admission>,
    pub routing: Chair<Routing>,
    pub fairness: Chair<Fairness>,
    pub eviction: Chair<Eviction>,
    pub overload: Chair<Overload>,
}

/// Instances of one set for one machine, tried and waiting to be switched to.
pub struct Prepared {
    pub(crate) machine: Machine,
    pub(crate) set: Arc<PolicySet>,
    pub(crate) chairs: Chairs,
}

/// One reason why a set cannot serve.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PrepareFault {
    /// Which seat.
    pub decision: Decision,
    /// Why.
    pub problem: PrepareProblem,
}

/// Why a seat cannot serve.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PrepareProblem {
    /// No component of that digest is loaded.
    #[error("component {0} is not loaded")]
    NotLoaded(crate::Digest),
    /// The component decides something else.
    #[error("component {component} decides {found}")]
    OtherDecision {
        /// The component.
        component: crate::Digest,
        /// What it decides.
        found: &'static str,
    },
    /// It refused its parameters.
    #[error("parameter `{field}`: {problem}")]
    Parameter {
        /// Path of the parameter; empty for the whole.
        field: String,
        /// What is wrong with it.
        problem: String,
    },
    /// It failed while it was tried.
    #[error("failed while it was tried: {0}")]
    Failed(String),
}

/// Every reason why a set cannot serve.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PrepareFaults(pub Vec<PrepareFault>);

impl fmt::Display for PrepareFaults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, fault) in self.0.iter().enumerate() {
            write!(f, "{}{}: {}", if at == 0 { "" } else { "; " }, fault.decision.name(), fault.problem)?;
        }
        Ok(())
    }
}

impl std::error::Error for PrepareFaults {}

impl Prepared {
    /// Makes and tries the instances that `machine` needs. Each component seat is tried on an instance of its own: one question with a
    /// single candidate of which nothing is known, the state in `remembered` where it is the same policy's, and a save. Says everything
    /// that is wrong at once.
    pub fn new(
        from: &Workshop<'_>,
        set: &Arc<PolicySet>,
        machine: Machine,
        remembered: &Remembered,
    ) -> Result<Self, PrepareFaults> {
        let mut making = Making { from, set, machine, remembered, faults: Vec::new() };
        let chairs = Chairs {
            admission: making.chair(),
            routing: making.chair(),
            fairness: making.chair(),
            eviction: making.chair(),
            overload: making.chair(),
        };
        let faults = making.faults;
        if faults.is_empty() { Ok(Self { machine, set: Arc::clone(set), chairs }) } else { Err(PrepareFaults(faults)) }
    }

    /// The set.
    pub fn set(&self) -> &Arc<PolicySet> {
        &self.set
    }

    /// The machine it is for.
    pub fn machine(&self) -> Machine {
        self.machine
    }
}

impl fmt::Debug for Prepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prepared")
            .field("machine", &self.machine)
            .field("set", &self.set.digest())
            .finish_non_exhaustive()
    }
}

struct Making<'a> {
    from: &'a Workshop<'a>,
    set: &'a PolicySet,
    machine: Machine,
    remembered: &'a Remembered,
    faults: Vec<PrepareFault>,
}

impl Making<'_> {
    fn chair<W: World>(&mut self) -> Chair<W> {
        let spec = self.set.seat(W::DECISION).clone();
        let asked = self.machine.asks(W::DECISION);
        if let (Some(question), PolicyRef::Component(_)) = (asked, &spec.policy) {
            match self.living(&spec, question) {
                Ok(living) => return Chair::Wasm { spec, living: Box::new(living) },
                Err(problem) => self.faults.push(PrepareFault { decision: W::DECISION, problem }),
            }
        }
        let name = match (asked, &spec.policy) {
            (Some(_), PolicyRef::Native(name)) => name,
            // Never asked at this machine, or refused above.
            _ => native_names(W::DECISION)[0],
        };
        let policy = W::native(name, self.from.context_window_tokens).expect("every listed native policy can be made");
        Chair::Native { spec, policy }
    }

    fn living<W: World>(&self, spec: &SeatSpec, question: Question) -> Result<Living<W>, PrepareProblem> {
        let PolicyRef::Component(digest) = spec.policy else { unreachable!("only asked for components") };
        let component = self.from.library.get(digest).ok_or(PrepareProblem::NotLoaded(digest))?;
        let found = component.decision().name();
        let declaration = W::declaration(&component);
        let mut declaration = declaration.ok_or(PrepareProblem::OtherDecision { component: digest, found })?.clone();
        let terms = W::terms_mut(&mut declaration);
        if spec.max_rows > 0 {
            terms.max_rows = if terms.max_rows == 0 { spec.max_rows } else { terms.max_rows.min(spec.max_rows) };
        }
        let setup = Setup {
            runtime: self.from.runtime.clone(),
            component: Arc::clone(&component),
            parameters: Arc::clone(&spec.parameters),
            fuel_base: spec.fuel_base,
        };
        self.try_out(Living::<W>::start(setup.clone(), declaration.clone()).map_err(refused)?, question)?;
        Living::start(setup, declaration).map_err(refused)
    }

    /// Leads a throw-away instance through what awaits the real one.
    fn try_out<W: World>(&self, mut trial: Living<W>, question: Question) -> Result<(), PrepareProblem> {
        if let Some(reason) = W::rehearse(&mut trial, question).filter(|reason| reason.is_strike()) {
            return Err(PrepareProblem::Failed(words(&mut trial, reason)));
        }
        let saved = self.remembered.seat(W::DECISION).filter(|saved| saved.policy == trial.terms().name);
        if let Some(SavedSeat { snapshot, .. }) = saved.cloned() {
            let now_us = snapshot.at_us;
            let carried = Carried { snapshot, kept: KeptFacts::default() };
            // A policy that does not know the state starts fresh; one that fails on it does not start.
            if let Err(RestoreError::Fault(kind)) = trial.carry_in(carried, now_us) {
                return Err(PrepareProblem::Failed(words(&mut trial, FallbackReason::Fault(kind))));
            }
        }
        let mut out = penstock_base::codec::Writer::new();
        trial.save(&mut out).map_err(|kind| PrepareProblem::Failed(words(&mut trial, FallbackReason::Fault(kind))))
    }
}

fn refused(error: StartError) -> PrepareProblem {
    match error {
        StartError::Failed(failure) => PrepareProblem::Failed(failure.to_string()),
        StartError::Parameters { field, problem } => PrepareProblem::Parameter { field, problem },
    }
}

/// The first fault's words, else the reason's name.
fn words<W: World>(trial: &mut Living<W>, reason: FallbackReason) -> String {
    let (happenings, _) = trial.take_happenings();
    let fault = happenings.into_iter().find_map(|happening| match happening {
        Happening::Fault { failure, .. } => Some(failure.to_string()),
        _ => None,
    });
    fault.unwrap_or_else(|| format!("answered nonsense: {}", reason.name()))
}
