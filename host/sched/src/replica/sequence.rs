//! What is known of one request and of one sequence here, and in which place does it stand?
//!
//! A sequence stands in exactly one place at any moment:
//!
//! ```text
//!                       join (leader)
//!   (ready request) ───────────────────► Running ──── preempt ───► Preempted
//!          │                              ▲   ▲                     ▲   │
//!          │ join (followers)             │   └────── resume ───────┼───┘
//!          └────────────► Waiting ── fork ┘                         │
//!                            └────────────── takes the lead ────────┘
//!   any of them ──── end ───► Vacant (rows in flight are discarded when their batch is done)
//! ```

use alloc::sync::Arc;
use alloc::vec::Vec;

use penstock_base::limits::SEQUENCES_MAX;
use penstock_base::{
    BatchId, BlockKey, ClassRank, DispatchNumber, GatewayEpoch, Instant, Manifest, Outcome, RequestId, SeqId, Slot,
    TransferId,
};
use penstock_kv::BlockTable;

/// No index.
pub(super) const NONE: u32 = u32::MAX;

/// Where a sequence stands. See the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    /// Nobody's entry.
    Vacant,
    /// Waits for its leader to compute the prompt. Holds no block.
    Waiting,
    /// In the batch.
    Running,
    /// Gave its blocks back; runs again when there is room.
    Preempted,
}

/// Are a sequence's tokens kept back, since another replica is to have it?
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Held {
    /// No.
    Free,
    /// Its prompt is being computed.
    Prompt,
    /// Its prompt is computed and its first token sampled.
    Token,
    /// The same, and the first token ends it.
    Stop,
}

/// A request's part in a hand-off.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Sending {
    /// Which hand-off.
    pub transfer: TransferId,
    /// Leading blocks that do not travel.
    pub first_block: u32,
    /// Blocks behind those that the sender was told of.
    pub placed: u32,
}

/// One decode stream. Entries are reused; the index of the entry is the sequence's slot at the executor.
#[derive(Clone, Debug)]
pub(super) struct Sequence {
    /// Where it stands. Changed by joining, forking, preemption, resumption and ending only.
    pub place: Place,
    /// Tells occupants of this entry apart; grows with each. Set when the entry is taken.
    pub serial: u64,
    /// Whose it is: index of the request's entry.
    pub request: u32,
    /// 0..n inside the request.
    pub index: u16,
    /// Prompt tokens; fixed while it lives.
    pub prompt: u32,
    /// Output cap in force; fixed while it lives.
    pub max_output: u32,
    /// Physical blocks by position. Changed through the pool alone.
    pub table: BlockTable,
    /// Keys of full blocks behind the prompt, as the driver told them.
    pub keys: Vec<BlockKey>,
    /// Leading positions that are planned, in flight or done. Grows when rows are planned; 0 or the cached part after a resume.
    pub scheduled: u32,
    /// Leading positions whose batch is done. Never above `scheduled`.
    pub computed: u32,
    /// Leading positions that are computed and whose tokens count. Never above `computed`.
    pub confirmed: u32,
    /// Output tokens accepted, a final stop token included.
    pub generated: u32,
    /// Output tokens handed to the client.
    pub delivered: u32,
    /// Output tokens accepted or in flight. Never above the cap in force.
    pub sampled: u32,
    /// Rows in flight, of whatever batch. A preempted sequence with one is not resumed.
    pub inflight: u32,
    /// The row that samples the token behind `generated`, when it is in flight.
    pub source: Option<(BatchId, u32)>,
    /// Last batch with a row of it: its blocks are fenced behind that one.
    pub last_batch: Option<BatchId>,
    /// While the prompt it shares is still being computed: the batch that completes it.
    pub shares: Option<BatchId>,
    /// The executor knows the slot as this sequence's.
    pub opened: bool,
    /// Leading table entries that the executor knows as they are. Falls when an entry is replaced.
    pub told: u32,
    /// Times it was preempted.
    pub preemptions: u32,
    /// It recomputes what it had before preemption: goes ahead of other prefills.
    pub resuming: bool,
    /// Preempted: not before this batch (not in the round that preempted it).
    pub resume_batch: BatchId,
    /// Preempted by an overload action: not before this, unless nothing else runs.
    pub resume_at: Instant,
    /// Order of joining the batch; a resume counts as a new joining.
    pub joined: u64,
    /// When it joined.
    pub joined_at: Instant,
    /// Its tokens are kept back. Set when it joins, changed by its first token, and when it is this replica's own.
    pub held: Held,
}

impl Sequence {
    pub(super) fn vacant(table_capacity: u32) -> Self {
        Self {
            place: Place::Vacant,
            serial: 0,
            request: NONE,
            index: 0,
            prompt: 0,
            max_output: 0,
            table: BlockTable::with_capacity(table_capacity),
            keys: Vec::new(),
            scheduled: 0,
            computed: 0,
            confirmed: 0,
            generated: 0,
            delivered: 0,
            sampled: 0,
            inflight: 0,
            source: None,
            last_batch: None,
            shares: None,
            opened: false,
            told: 0,
            preemptions: 0,
            resuming: false,
            resume_batch: BatchId(0),
            resume_at: Instant::ZERO,
            joined: 0,
            joined_at: Instant::ZERO,
            held: Held::Free,
        }
    }

    /// Empties the entry for its next occupant. Its table is empty already; buffers stay.
    pub(super) fn reset(&mut self) {
        debug_assert!(self.table.is_empty(), "blocks are released before the entry is");
        self.keys.clear();
        *self = Self {
            serial: self.serial,
            table: core::mem::replace(&mut self.table, BlockTable::with_capacity(0)),
            keys: core::mem::take(&mut self.keys),
            ..Self::vacant(0)
        };
    }

    /// Positions whose KV is needed for what is known to be sampled: the last token of all needs none.
    pub(super) fn len(&self) -> u32 {
        self.prompt + self.sampled.min(self.max_output - 1)
    }

    /// Positions that wait to be planned.
    pub(super) fn pending(&self) -> u32 {
        self.len() - self.scheduled
    }

    /// Has it its newest token to compute and nothing else?
    pub(super) fn decodes(&self) -> bool {
        self.scheduled >= self.prompt && self.pending() == 1
    }

    /// Its prompt is planned, and it goes no further until somebody owns it.
    pub(super) fn waits_for_owner(&self) -> bool {
        self.held != Held::Free && self.scheduled >= self.prompt
    }
}

/// One dispatched request.
#[derive(Clone, Debug)]
pub(super) struct Request {
    /// Frozen by the edge.
    pub manifest: Arc<Manifest>,
    /// Tells occupants of this entry apart.
    pub serial: u64,
    /// Who sent it and hears of it.
    pub gateway: GatewayEpoch,
    /// Which attempt.
    pub attempt: u16,
    /// The dispatch's number.
    pub number: DispatchNumber,
    /// Class in force.
    pub class: ClassRank,
    /// Output cap in force, of each sequence.
    pub max_output: u32,
    /// Output of each sequence whose blocks are reserved.
    pub reserve_output: u32,
    /// Full blocks before the last prompt token: what its sequences share.
    pub shared_blocks: u32,
    /// Blocks of each sequence beyond those, at the output cap.
    pub own_blocks: u32,
    /// Median output expected of each sequence.
    pub expected_output: u32,
    /// In the ready window; then it has no sequences yet, and `prefix` may hold what the cache had.
    pub ready: bool,
    /// While ready: the cached prompt blocks, held so that they do not leave; the rest is reserved. None when running work took that back.
    pub prefix: Option<BlockTable>,
    /// Entries of its sequences, [`NONE`] for one that ended.
    pub sequences: [u32; SEQUENCES_MAX as usize],
    /// Sequences that have not ended.
    pub live: u16,
    /// The sequence that computes the prompt for the others.
    pub leader: u16,
    /// Some sequences still wait for the prompt.
    pub waiting: bool,
    /// The gateway knows that it started.
    pub started: bool,
    /// Prompt tokens found in the cache when it started.
    pub cached_tokens: u32,
    /// Leading prompt positions that were found or charged: recompute is not charged again.
    pub charged: u32,
    /// Output tokens that count, over all sequences.
    pub output_tokens: u32,
    /// The first output token was reported.
    pub first_token: bool,
    /// When that was.
    pub first_token_at: Instant,
    /// Times a sequence of it was preempted.
    pub preemptions: u32,
    /// The first ending that is no success.
    pub failure: Option<Outcome>,
    /// How sequence 0 ended.
    pub first: Option<Outcome>,
    /// Another replica is to have it: it is not this one's own. Nobody hears of its ends here.
    pub sending: Option<Sending>,
    /// The hand-off that brought it here.
    pub adopted: Option<TransferId>,
    /// It ended while it was not this replica's own: nobody hears of it.
    pub silent: bool,
    /// What the batch being confirmed did for it.
    pub done: Done,
}

/// Sums over the rows of one batch, for the progress message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Done {
    /// It is in the list of touched requests.
    pub touched: bool,
    /// Prompt tokens computed for the first time.
    pub prefill_tokens: u32,
    /// Output tokens accepted.
    pub decode_tokens: u32,
    /// The first output token is among them.
    pub first_token: bool,
    /// Query tokens of its rows.
    pub query_tokens: u64,
    /// Its share of the step's device time, by those.
    pub device_us: u32,
}

impl Request {
    pub(super) fn id(&self) -> RequestId {
        self.manifest.request
    }

    pub(super) fn seq_id(&self, index: u16) -> SeqId {
        SeqId { request: self.id(), index }
    }

    pub(super) fn prompt(&self) -> u32 {
        self.manifest.input_tokens
    }

    /// Entries of the sequences that live.
    pub(super) fn live_sequences(&self) -> impl Iterator<Item = u32> + use<> {
        let n = usize::from(self.manifest.sequences);
        self.sequences.into_iter().take(n).filter(|entry| *entry != NONE)
    }

    /// How the request as a whole ends.
    pub(super) fn outcome(&self) -> Outcome {
        self.failure.or(self.first).unwrap_or(Outcome::Failed(penstock_base::Failure::Internal))
    }
}

/// The entry of a sequence is its slot.
pub(super) fn slot(entry: u32) -> Slot {
    Slot(entry)
}

/// Entries that keep their index while they live; vacant ones are reused, last vacated first.
#[derive(Clone, Debug)]
pub(super) struct Vacancies {
    free: Vec<u32>,
}

impl Vacancies {
    /// All of `0..entries`; the lowest goes first.
    pub(super) fn all(entries: u32) -> Self {
        Self { free: (0..entries).rev().collect() }
    }

    pub(super) fn from_stack(free: Vec<u32>) -> Self {
        Self { free }
    }

    pub(super) fn stack(&self) -> &[u32] {
        &self.free
    }

    pub(super) fn len(&self) -> u32 {
        self.free.len() as u32
    }

    pub(super) fn take(&mut self) -> Option<u32> {
        self.free.pop()
    }

    pub(super) fn give(&mut self, entry: u32) {
        self.free.push(entry);
    }
}
