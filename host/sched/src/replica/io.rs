//! What goes into the replica machine and what comes out.

use alloc::vec::Vec;

use penstock_base::plan::{BatchFailure, Plan, RowDone};
use penstock_base::{BatchId, BlockKey, Duration, GatewayEpoch, Generation, Outcome, ReplicaEpoch, ReplicaId, SeqId};

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
    /// For metrics, logs and journals.
    Event(ReplicaEvent),
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
            check_every_step: cfg!(debug_assertions),
        }
    }
}
