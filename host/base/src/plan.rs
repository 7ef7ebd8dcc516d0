//! The contract between a replica machine and an executor: one [`Plan`] a step, patches to slot-addressed sequences and rows to compute.
//!
//! Plans carry counts, positions and block references, never tokens: an executor's slot knows its sequence's token history. Operations
//! take effect in the order they stand, before any row of the same plan; plans take effect in the order of their batch ids. So a copy
//! reads what every earlier batch wrote and nothing that a later one will.

use alloc::vec::Vec;

use crate::{BatchId, BlockRef, SeqId, Slot};

/// One step of a replica.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Plan {
    /// Grows by one with every plan of an epoch.
    pub batch: BatchId,
    /// Changes to slots and tables, in order.
    pub ops: Vec<PlanOp>,
    /// What to compute, decode rows first.
    pub rows: Vec<PlanRow>,
}

impl Plan {
    /// Empties the plan and keeps its room.
    pub fn clear(&mut self) {
        self.batch = BatchId(0);
        self.ops.clear();
        self.rows.clear();
    }

    /// Query tokens over all rows: the quantity that the step's token budget bounds.
    pub fn query_tokens(&self) -> u64 {
        self.rows.iter().map(|row| u64::from(row.tokens)).sum()
    }
}

/// A change to what an executor holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PlanOp {
    /// The slot now belongs to `seq`, with an empty block table, also when another sequence was in it. Token history comes from the driver, which knows the sequence.
    OpenSlot {
        /// Where.
        slot: Slot,
        /// Whose.
        seq: SeqId,
    },
    /// Table entry `index` of KV group `group` of the slot is `block`. Entries are set in rising order; setting one that exists replaces it.
    SetBlock {
        /// Where.
        slot: Slot,
        /// KV group; one ships (0).
        group: u8,
        /// Position in the block table: token position / block size.
        index: u32,
        /// The physical block.
        block: BlockRef,
    },
    /// Copies the first `tokens` tokens of a block, all layers: copy-on-write of a partly filled block.
    CopyBlock {
        /// Source; stays as it is.
        from: BlockRef,
        /// Destination; no row refers to it yet, though a slot may still list an older generation of it.
        to: BlockRef,
        /// Leading tokens that must be copied.
        tokens: u32,
    },
    /// The slot is free again; its table and history are forgotten. Nothing happens when it was not open: after a failed step the core
    /// cannot know.
    DropSlot {
        /// Where.
        slot: Slot,
    },
}

/// One run of query tokens of one sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PlanRow {
    /// Where its state lives.
    pub slot: Slot,
    /// Whose it is; a result for another sequence is stale and dropped.
    pub seq: SeqId,
    /// Position of the first query token.
    pub start: u32,
    /// Query tokens, at least 1. Drafts are not counted here.
    pub tokens: u32,
    /// Where the last query token comes from; the ones before it are always known.
    pub input: TokenSource,
    /// Draft tokens to verify behind the query; 0 until speculation ships.
    pub drafts: u16,
    /// Whether a token is sampled behind the last query token.
    pub sample: bool,
    /// Adapter table entry; 0 is the base model.
    pub adapter: u16,
    /// Grammar mask handle; 0 is none.
    pub mask: u32,
    /// What the row is for.
    pub task: Task,
}

/// Where a row's last input token comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TokenSource {
    /// In the slot's history already.
    Known,
    /// Sampled by an earlier batch whose result the core has not seen: with two steps in flight.
    FromBatch {
        /// Which batch.
        batch: BatchId,
        /// Which of its rows.
        row: u32,
    },
}

/// What a row is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Task {
    /// Next-token generation.
    #[default]
    Generate,
    /// Pooled embedding.
    Pool,
}

/// What the core learns of one row of a finished batch. Tokens themselves went from the driver to the client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RowDone {
    /// Whose.
    pub seq: SeqId,
    /// Tokens accepted behind the query: 0 for a row that did not sample, 1 without drafts.
    pub accepted: u16,
    /// The last accepted token ends the sequence (a stop token). It is counted in `accepted`, and not delivered.
    pub stop: bool,
}

/// Why a batch came to nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BatchFailure {
    /// These rows only; the others have results.
    Rows,
    /// The whole batch; the executor goes on.
    Batch,
    /// The executor's state is lost.
    Executor,
}
