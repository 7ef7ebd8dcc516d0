//! What goes into the replica machine and what comes out.

use alloc::sync::Arc;
use alloc::vec::Vec;

use penstock_base::plan::{BatchFailure, Plan, RowDone};
use penstock_base::{
    BatchId, BlockKey, BlockRef, Duration, GatewayEpoch, Generation, Instant, Outcome, ReplicaEpoch, ReplicaId, SeqId,
    TransferId,
};

use crate::handoff::{Between, Grid, PartyConfig, Peer, Seal, ToReceiver, ToSender};
use crate::message::{FromReplica, ToReplica};

/// One thing that happened. The set is closed: a new feature is a new variant here.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ReplicaInput {
    /// A message of a gateway.
    Gateway {
        /// Who.
        gateway: GatewayEpoch,
        /// What.
        message: ToReplica,
    },
    /// A gateway may dispatch here from now on and gets its share of the credit.
    GatewayUp(GatewayEpoch),
    /// A gateway is gone: what it had dispatched ends as cancelled by the drain cause.
    GatewayDown(GatewayEpoch),
    /// A step is computed.
    BatchDone {
        /// Which; the oldest in flight.
        batch: BatchId,
        /// One a row, in row order.
        rows: Vec<RowDone>,
        /// Device time of the step.
        took: Duration,
    },
    /// A step, or some of its rows, came to nothing.
    BatchFailed {
        /// Which; the oldest in flight.
        batch: BatchId,
        /// How much is lost.
        failure: BatchFailure,
        /// For [`BatchFailure::Rows`]: the rows that failed. All rows are listed in `done`, failed ones with `accepted` 0.
        rows: Vec<u32>,
        /// Results of the rows, in row order; empty unless [`BatchFailure::Rows`].
        done: Vec<RowDone>,
    },
    /// The driver found the end of a sequence in its text (a stop string): output ends behind `tokens`; later ones are discarded and
    /// not billed.
    Finish(FinishedTokens),
    /// Keys of blocks of a sequence that its output has filled, in order behind those already known.
    BlockKeys {
        /// Whose.
        seq: SeqId,
        /// Index in the block table of the first key.
        first: u32,
        /// The keys.
        keys: Vec<BlockKey>,
    },
    /// A prepared policy set takes over at this step boundary.
    Policies(Generation),
    /// No new work; what runs goes on.
    Drain,
    /// Forget all cached blocks of nobody (secure clean-up).
    FlushCache,
    /// Time passed: see [`Replica::next_wake`](super::Replica::next_wake).
    Tick,
    /// News of a hand-off that this replica takes part in.
    Handoff(HandoffInput),
}

/// What happens to a hand-off beside its coordinator's orders: the other party's word, and what the transport has done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum HandoffInput {
    /// The word of one that computes a prompt for us, or a chunk of it.
    OfSender(Between<ToReceiver>),
    /// The word of one that we compute a prompt for.
    OfReceiver(Between<ToSender>),
    /// All of a prompt that is computed here is summed up, as asked by [`HandoffEffect::Sampled`].
    Sealed {
        /// Of which hand-off.
        transfer: TransferId,
        /// The sum.
        seal: Seal,
    },
    /// Nothing reads the blocks of this hand-off any more, as asked by [`HandoffEffect::StopWrites`].
    Quiet(TransferId),
    /// Nothing can write to the blocks of this hand-off any more, as asked by [`HandoffEffect::Fence`].
    Fenced(TransferId),
    /// The sum over what lies in the blocks, as asked by [`HandoffEffect::Digest`].
    Digested {
        /// Of which hand-off.
        transfer: TransferId,
        /// The sum.
        sum: u64,
    },
}

/// Where a sequence's output ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FinishedTokens {
    /// Whose.
    pub seq: SeqId,
    /// Output tokens that count, at most as many as were delivered.
    pub tokens: u32,
    /// How it ends.
    pub outcome: Outcome,
}

/// What the driver must do. In order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ReplicaEffect {
    /// Compute this step. Give the buffer back with [`Replica::recycle`](super::Replica::recycle).
    Submit(Plan),
    /// Hand the message to the gateway.
    Send {
        /// Whom.
        gateway: GatewayEpoch,
        /// What.
        message: FromReplica,
    },
    /// The tokens of this row of the batch that was just reported count: stream them. A row without this effect is discarded.
    Deliver {
        /// Whose.
        seq: SeqId,
        /// The batch reported by the input.
        batch: BatchId,
        /// Its row.
        row: u32,
        /// How many of the row's tokens, from the first.
        tokens: u16,
        /// Index of the first one in the sequence's output.
        first: u32,
    },
    /// The sequence has ended; nothing more will be delivered for it.
    SequenceEnded {
        /// Whose.
        seq: SeqId,
        /// How.
        outcome: Outcome,
        /// Output tokens that count.
        tokens: u32,
    },
    /// Something of a hand-off.
    Handoff(HandoffEffect),
    /// For metrics, logs and journals.
    Event(ReplicaEvent),
    /// The prefix cache changed. Gateways hear of it by messages; this is for whoever publishes it, gateways or not.
    Cached(CacheChange),
}

/// A change of the prefix cache, with what it hangs on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CacheChange {
    /// The block can be found from now on.
    Stored {
        /// Its key.
        key: BlockKey,
        /// Key of the block before it; none for the first of a prompt.
        parent: Option<BlockKey>,
        /// Blocks from the root to it, itself included.
        depth_blocks: u32,
    },
    /// It cannot be found any more.
    Removed {
        /// Its key.
        key: BlockKey,
    },
    /// Nothing can be found any more. What can is told again behind it.
    Cleared,
}

/// What the driver must do for a hand-off. The driver has what the machine does not: tokens, and the bytes in blocks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum HandoffEffect {
    /// Carry this to the replica that it names; it may be lost.
    ToReceiver(Between<ToReceiver>),
    /// Carry this to the replica that it names; it may be lost.
    ToSender(Between<ToSender>),
    /// The prompt of this sequence is computed here from now on, for another replica. Its tokens are kept back.
    Sending {
        /// By which hand-off.
        transfer: TransferId,
        /// Whose prompt.
        seq: SeqId,
        /// How it travels.
        grid: Grid,
    },
    /// These blocks hold what the grid's next blocks are, computed and kept unchanged until [`Self::StopWrites`].
    Sources {
        /// Of which hand-off.
        transfer: TransferId,
        /// Behind the ones that were told before.
        blocks: Vec<BlockRef>,
    },
    /// Write to these blocks from now on.
    Bind {
        /// For which hand-off.
        transfer: TransferId,
        /// Where.
        to: Peer,
        /// Blocks there, the first one for the grid's first block.
        blocks: Arc<[BlockRef]>,
    },
    /// Write one chunk, then tell the receiver with this stamp. Safe to do twice.
    Write {
        /// Of which hand-off.
        transfer: TransferId,
        /// Which.
        index: u32,
        /// Goes with it.
        stamp: Instant,
    },
    /// Prefill is done. Keep the tokens of this row of the batch that was just reported: they are the tail of the hand-off. Sum up all
    /// chunks and say [`HandoffInput::Sealed`].
    Sampled {
        /// By which hand-off.
        transfer: TransferId,
        /// Whose.
        seq: SeqId,
        /// The batch reported by the input.
        batch: BatchId,
        /// Its row.
        row: u32,
        /// Tokens of the row that count: none when it is the stop token.
        tokens: u32,
    },
    /// Begin no further write, and say [`HandoffInput::Quiet`] when nothing reads the blocks any more.
    StopWrites(TransferId),
    /// The sequence is this replica's own from now on.
    Continue {
        /// By which hand-off.
        transfer: TransferId,
        /// Whose.
        seq: SeqId,
    },
    /// The sequence is gone from here; it has not ended.
    Leave {
        /// Whose.
        seq: SeqId,
    },
    /// This peer, and nobody else, may write to these blocks for this hand-off from now on, and to no others.
    Grant {
        /// For which hand-off.
        transfer: TransferId,
        /// Who may.
        to: Peer,
        /// How it is cut.
        grid: Grid,
        /// Where, the first one for the grid's first block.
        blocks: Arc<[BlockRef]>,
    },
    /// Make sure that nothing can write to the blocks any more, then say [`HandoffInput::Fenced`]. Safe to do twice.
    Fence(TransferId),
    /// Nothing writes any more: sum up what lies in the blocks and in the tail, and say [`HandoffInput::Digested`].
    Digest(TransferId),
    /// The sequence is this replica's own from now on, with what the tail holds.
    Adopt {
        /// By which hand-off.
        transfer: TransferId,
        /// Whose.
        seq: SeqId,
        /// Which attempt.
        attempt: u16,
    },
    /// The tokens that were kept back count from now on: stream them.
    Release {
        /// Whose.
        seq: SeqId,
        /// How many.
        tokens: u32,
    },
    /// A hand-off was ended here because nobody kept it.
    Swept(TransferId),
    /// Explicit back-pressure: whether another prompt would be computed for somebody else.
    Accepting(bool),
}

/// Things worth counting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReplicaEvent {
    /// A step was planned.
    Step {
        /// Sequences in decode.
        decodes: u32,
        /// Prefill tokens.
        prefill_tokens: u32,
    },
    /// A sequence looked for its prefix.
    PrefixLookup {
        /// Prompt tokens that could have been cached.
        queried_tokens: u32,
        /// Of these, cached.
        hit_tokens: u32,
    },
    /// Blocks left the prefix cache.
    Evicted {
        /// How many.
        blocks: u32,
    },
    /// Computed blocks could not be stored: too many tenants have content in the cache, or what precedes them is gone from it. A block that
    /// is tried again counts again.
    Unstored {
        /// How many.
        blocks: u64,
    },
    /// A sequence gave its blocks back.
    Preempted {
        /// Whose.
        seq: SeqId,
    },
    /// A policy's answer was not used and the native default answered.
    Fallback {
        /// 2 fairness, 3 eviction.
        decision: u8,
        /// Number of the call; 0 when it failed on facts that it was told.
        call: u64,
        /// Reason code of `policy-api`.
        reason: u8,
    },
    /// A policy's answer stands, after a change that the contract names.
    Changed {
        /// As above.
        decision: u8,
        /// Number of the call.
        call: u64,
        /// The change, by its place in [`Change`](penstock_policy_api::validate::Change).
        change: u8,
    },
    /// An input that named an old epoch, an unknown or ended sequence, or a batch that is not the oldest. Counted, without effect.
    Stale,
    /// The driver's clock ran backwards.
    ClockClamped,
    /// An invariant does not hold: the driver freezes this replica. The name says which.
    Broken(&'static str),
}

/// The effects of one step, in a buffer that is reused.
pub type ReplicaEffects = Vec<ReplicaEffect>;

/// How a replica is set up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReplicaConfig {
    /// Which.
    pub replica: ReplicaId,
    /// This incarnation.
    pub epoch: ReplicaEpoch,
    /// Seed of everything that is random here.
    pub run_seed: u64,
    /// Blocks in the pool.
    pub blocks: u32,
    /// Tokens in a block.
    pub block_size_tokens: u32,
    /// Most sequences in a step.
    pub slots: u32,
    /// Query tokens in a step.
    pub step_tokens: u32,
    /// Longest prefill chunk of one sequence in a step that also decodes; the step's budget when nothing decodes.
    pub chunk_tokens: u32,
    /// Longest sequence, prompt and output together.
    pub context_tokens_max: u32,
    /// Steps in flight: 1 or 2.
    pub inflight_max: usize,
    /// Requests held ready beside the batch: 0..=2.
    pub ready_window: usize,
    /// Match and keep prefixes.
    pub prefix_cache: bool,
    /// When eviction starts and where it stops.
    pub watermarks: Watermarks,
    /// Step cost until enough steps were measured.
    pub cost: StepCost,
    /// Rows of one victims call.
    pub victim_rows: usize,
    /// Rows of one eviction call.
    pub eviction_rows: usize,
    /// How this replica takes part in hand-offs; none is not at all. Its id, its epoch, its owners of promises and the size of its block
    /// tables are taken from the rest.
    pub handoff: Option<PartyConfig>,
    /// Run the full walk over the invariants at every step.
    pub check_every_step: bool,
}

/// Free blocks, in parts per million of the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Watermarks {
    /// Below this, eviction is asked.
    pub low_ppm: u64,
    /// Up to this, it frees.
    pub high_ppm: u64,
}

/// Device time of a step as a sum of terms.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StepCost {
    /// Of any step.
    pub base_ns: u64,
    /// Of each prefill token.
    pub prefill_token_ns: u64,
    /// Of each decode row.
    pub decode_row_ns: u64,
    /// Of each KV position that a decode row reads.
    pub kv_token_ns: u64,
}

impl Default for ReplicaConfig {
    fn default() -> Self {
        use penstock_base::limits;
        Self {
            replica: ReplicaId(0),
            epoch: ReplicaEpoch(1),
            run_seed: 0,
            blocks: 1_024,
            block_size_tokens: 16,
            slots: 64,
            step_tokens: 512,
            chunk_tokens: 256,
            context_tokens_max: 8_192,
            inflight_max: 1,
            ready_window: 2,
            prefix_cache: true,
            watermarks: Watermarks { low_ppm: 50_000, high_ppm: 80_000 },
            cost: StepCost {
                base_ns: 1_000_000,
                prefill_token_ns: 1_000_000,
                decode_row_ns: 2_000_000,
                kv_token_ns: 500,
            },
            victim_rows: limits::VICTIM_ROWS_DEFAULT,
            eviction_rows: limits::EVICTION_ROWS_DEFAULT,
            handoff: None,
            check_every_step: cfg!(debug_assertions),
        }
    }
}
