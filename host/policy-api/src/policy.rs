//! The five policies and the seats they sit in. One question a method, facts in, a proposal out.
//!
//! Every method is deterministic: the same state and the same arguments give the same answer and the same saved bytes. An instance
//! belongs to one machine. `describe` never changes while an instance lives.

use alloc::vec::Vec;
use core::fmt;

use penstock_base::codec::Writer;
use penstock_base::{Generation, codec::DecodeError};

use crate::call::Call;
use crate::declare::{
    AdmissionDeclaration, EvictionDeclaration, FairnessDeclaration, OverloadDeclaration, RoutingDeclaration, Terms,
};
use crate::fact::Fact;
use crate::matrix::{Context, Matrix};
use crate::proposal::{Action, Answer, FaultKind, Placement, Ranking, Stance, Verdict, Worth, Yielder};
use crate::records::{RequestRecord, RoutingPhase};

/// The life of an instance, whatever it decides.
pub trait Policy {
    /// Identity, facts wanted, limits.
    fn terms(&self) -> &Terms;

    /// Takes facts of the kinds it wants, in the order they happened.
    fn observe(&mut self, _facts: &[Fact]) -> Result<(), FaultKind> {
        Ok(())
    }

    /// Appends its state. Equal state gives equal bytes.
    fn save(&mut self, _out: &mut Writer) -> Result<(), FaultKind> {
        Ok(())
    }

    /// Takes saved state. On an error it is as new.
    fn restore(&mut self, info: &RestoreInfo, state: &[u8]) -> Result<Kept, RestoreError> {
        if info.schema != self.terms().state_schema {
            return Err(RestoreError::UnknownSchema);
        }
        if state.is_empty() { Ok(Kept::Kept) } else { Err(RestoreError::Damaged) }
    }
}

/// May this request enter the queue now, wait, be degraded, or go away?
pub trait AdmissionPolicy: Policy {
    /// The names it asked for.
    fn describe(&self) -> &AdmissionDeclaration;
    /// Asked once an arrival, and when a deferral ends.
    fn decide(&mut self, call: &Call, request: &RequestRecord, context: Context<'_>) -> Answer<Verdict>;
}

/// Which replica runs it, and is it worth a wait for one without credit?
pub trait RoutingPolicy: Policy {
    /// The names it asked for.
    fn describe(&self) -> &RoutingDeclaration;
    /// Asked at dispatch. `ranked` comes empty; an empty ranking is no opinion.
    fn decide(&mut self, call: &Call, asked: &RoutingQuestion<'_>, ranked: &mut Vec<u32>) -> Answer<Placement>;
}

/// What routing looks at.
#[derive(Clone, Copy, Debug)]
pub struct RoutingQuestion<'a> {
    /// The request to place.
    pub request: &'a RequestRecord,
    /// What the placement is for.
    pub phase: RoutingPhase,
    /// Context values.
    pub context: Context<'a>,
    /// Replicas that passed the hard filter, by id.
    pub replicas: &'a Matrix,
}

/// Whose request is placed next? Who gives KV back?
///
/// The gateway asks one instance `order`, each replica asks one of its own `victims`; state is not shared.
pub trait FairnessPolicy: Policy {
    /// The names it asked for.
    fn describe(&self) -> &FairnessDeclaration;
    /// Asked when some replica has granted credit and something waits. `ranked` comes empty.
    fn order(&mut self, call: &Call, context: Context<'_>, waiting: &Matrix, ranked: &mut Vec<u32>) -> Answer<Ranking>;
    /// Asked when eviction could not free enough. `yielders` comes empty; an empty list is no opinion.
    fn victims(
        &mut self,
        call: &Call,
        context: Context<'_>,
        running: &Matrix,
        yielders: &mut Vec<Yielder>,
    ) -> Answer<()>;
}

/// What is each cached run worth keeping, and where does it go?
pub trait EvictionPolicy: Policy {
    /// The names it asked for.
    fn describe(&self) -> &EvictionDeclaration;
    /// Asked for runs that became unreferenced or were hit, and for the cheapest ones before they leave. `worths` comes empty; one
    /// answer a row, in row order; an empty list is no opinion.
    fn decide(&mut self, call: &Call, context: Context<'_>, runs: &Matrix, worths: &mut Vec<Worth>) -> Answer<()>;
}

/// What gives way at this saturation?
pub trait OverloadPolicy: Policy {
    /// The names it asked for.
    fn describe(&self) -> &OverloadDeclaration;
    /// Asked on a tick and at edges. `actions` comes empty.
    fn decide(&mut self, call: &Call, asked: &OverloadQuestion<'_>, actions: &mut Vec<Action>) -> Answer<Stance>;
}

/// What overload looks at.
#[derive(Clone, Copy, Debug)]
pub struct OverloadQuestion<'a> {
    /// Context values.
    pub context: Context<'a>,
    /// Eight rows, rank 0 first.
    pub classes: &'a Matrix,
    /// Ready replicas, by id.
    pub replicas: &'a Matrix,
}

/// The seats as a machine's step gets them: one instance a decision, all of one generation.
///
/// A gateway asks admission, routing, fairness (`order`) and overload; a replica fairness (`victims`) and eviction.
pub trait Policies {
    /// Generation of the set, recorded with every decision.
    fn generation(&self) -> Generation;
    /// The admission policy.
    fn admission(&mut self) -> &mut dyn AdmissionPolicy;
    /// The routing policy.
    fn routing(&mut self) -> &mut dyn RoutingPolicy;
    /// The fairness policy.
    fn fairness(&mut self) -> &mut dyn FairnessPolicy;
    /// The eviction policy.
    fn eviction(&mut self) -> &mut dyn EvictionPolicy;
    /// The overload policy.
    fn overload(&mut self) -> &mut dyn OverloadPolicy;
}

/// Why and when state comes back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RestoreInfo {
    /// Schema the state was saved with.
    pub schema: u32,
    /// Why.
    pub cause: RestoreCause,
    /// The saving machine's time at the save.
    pub saved_now_us: u64,
    /// This machine's time.
    pub now_us: u64,
    /// Time that passed between the two.
    pub elapsed_us: u64,
}

impl RestoreInfo {
    /// Moves a time of the saving machine to this one's, saturating.
    pub fn moved(&self, at_us: u64) -> u64 {
        let origin = i128::from(self.now_us) - i128::from(self.elapsed_us) - i128::from(self.saved_now_us);
        u64::try_from((i128::from(at_us) + origin).max(0)).unwrap_or(u64::MAX)
    }
}

/// Why state comes back.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RestoreCause {
    /// Another generation takes over.
    Swap,
    /// The instance trapped.
    Trap,
    /// The process started anew.
    Restart,
    /// A recorded run is replayed.
    Replay,
}

/// How state was taken.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kept {
    /// As it was.
    Kept,
    /// Converted from another schema.
    Migrated,
}

/// Why state was not taken. The instance is as new, and that is shown.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RestoreError {
    /// Saved by a schema it does not know.
    UnknownSchema,
    /// The bytes make no sense.
    Damaged,
    /// The policy failed while it read them.
    Fault(FaultKind),
}

impl From<DecodeError> for RestoreError {
    fn from(_: DecodeError) -> Self {
        Self::Damaged
    }
}

impl fmt::Display for RestoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownSchema => write!(f, "saved by an unknown schema"),
            Self::Damaged => write!(f, "the saved bytes make no sense"),
            Self::Fault(kind) => write!(f, "the policy failed on them: {}", kind.name()),
        }
    }
}

impl core::error::Error for RestoreError {}
