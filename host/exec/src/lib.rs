//! What an executor is: the contract between the replica's driver and whatever computes (CPU, CUDA).
//!
//! A driver hands over one [`Step`] at a time, in batch order. `forward` applies the plan's operations and computes its rows, `sample`
//! picks the tokens; between the two there is room for grammar masks and for overlap.

mod geometry;
mod memory;
mod sampling;

pub use geometry::Geometry;
pub use memory::{KvBytes, KvMemory};
pub use sampling::{SampledToken, SamplingParams, TopLogprob};

use std::sync::Arc;

use penstock_base::plan::{BatchFailure, Plan};
use penstock_base::{BatchId, SeqId, Slot};

/// Computes the steps of one replica.
///
/// The bits of a row's result do not depend on batch size, neighbours, chunk borders, thread count, caching or preemption. An executor
/// that cannot promise this says so in its documentation and takes no part in equality claims.
pub trait Executor: Send {
    /// Sizes that the replica machine is configured with.
    fn geometry(&self) -> &Geometry;

    /// Where keys and values lie, for executors whose blocks can be read and written from outside between steps; none for others.
    fn kv_memory(&self) -> Option<KvMemory> {
        None
    }

    /// Applies the plan's operations in order, then computes all its rows.
    ///
    /// # Errors
    /// A plan that names an unknown slot, block or position fails as a whole and changes nothing ([`BatchFailure::Batch`]).
    fn forward(&mut self, step: &Step) -> Result<(), ExecError>;

    /// Samples for every row of the last `forward` that asks for it and appends the token to its slot's history. `out` gets one entry a
    /// row, in row order.
    ///
    /// # Errors
    /// As for [`Executor::forward`]. A row whose logits are not finite fails alone, in its result.
    fn sample(&mut self, masks: &Masks<'_>, out: &mut BatchResult) -> Result<(), ExecError>;
}

/// One plan and the sequences that its `OpenSlot` operations name.
#[derive(Clone, Debug, Default)]
pub struct Step {
    /// What to do.
    pub plan: Plan,
    /// One for each `OpenSlot` of the plan, in the same order.
    pub openings: Vec<SlotOpening>,
}

/// What a slot starts from: everything about the sequence that the core does not need.
#[derive(Clone, Debug)]
pub struct SlotOpening {
    /// Where.
    pub slot: Slot,
    /// Whose.
    pub seq: SeqId,
    /// The prompt, shared by the sequences of a request.
    pub prompt: Arc<[u32]>,
    /// Tokens already generated (a sequence that resumes).
    pub generated: Vec<u32>,
    /// How to sample.
    pub params: Arc<SamplingParams>,
}

/// Allowed-token masks by the handle that a row names. None ship yet.
#[derive(Clone, Copy, Debug, Default)]
pub struct Masks<'a> {
    /// Handle and bitmap, one bit a token id, little endian in each word.
    pub entries: &'a [(u32, &'a [u64])],
}

/// The tokens of one batch.
#[derive(Clone, Debug, Default)]
pub struct BatchResult {
    /// Which.
    pub batch: BatchId,
    /// One a row, in row order.
    pub rows: Vec<RowResult>,
}

/// The tokens of one row.
#[derive(Clone, Debug)]
pub struct RowResult {
    /// Where.
    pub slot: Slot,
    /// Whose.
    pub seq: SeqId,
    /// Accepted tokens, none for a row that did not sample.
    pub tokens: Vec<SampledToken>,
    /// The last token is one of the sequence's stop tokens.
    pub stop: bool,
    /// This row failed; its neighbours did not.
    pub failed: bool,
}

/// Why a step came to nothing.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct ExecError {
    /// How much is lost.
    pub failure: BatchFailure,
    /// What happened, with the values that matter.
    pub message: String,
}
