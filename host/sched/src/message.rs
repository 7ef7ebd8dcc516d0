//! What gateway and replica tell each other. In one process these travel by value; across processes they are the wire's meaning.
//!
//! Everything here is counts, ids and keys. A message of an older replica epoch is dead on arrival and counted.

use alloc::sync::Arc;

use penstock_base::{
    BlockKey, ClassRank, DispatchNumber, Duration, Generation, Instant, Manifest, Outcome, RefuseReason, RequestId,
    TransferId,
};

use crate::handoff::{Open, Order, Peer, Reserve, Said, Side};

/// Gateway to replica.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ToReplica {
    /// Run this request. The gateway has debited its credit; the replica reserves, or refuses.
    Dispatch(Dispatch),
    /// End this request; its blocks come back once no step in flight reads them. Idempotent.
    Cancel {
        /// Which.
        request: RequestId,
        /// Which attempt of it.
        attempt: u16,
        /// What its sequences end with.
        outcome: Outcome,
    },
    /// What is asked of the replica under pressure. Only the newest number counts.
    Stance(ReplicaStance),
    /// The policy set of this generation takes over at the next step boundary.
    Policies(Generation),
    /// A hand-off's coordinator to the replica that computes the prompt.
    Prefill(Ordered<Open>),
    /// A hand-off's coordinator to the replica that decodes.
    Decode(Ordered<Reserve>),
    /// Another replica has this incarnation now: hand-offs with an earlier one come to nothing.
    PeerUp(Peer),
}

/// A coordinator's word to one party of a hand-off.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ordered<B> {
    /// The party's part in the hand-off counts as this dispatch; it comes with every word, so that a report covers it.
    pub number: DispatchNumber,
    /// About which hand-off.
    pub transfer: TransferId,
    /// For which incarnation.
    pub to: Peer,
    /// What.
    pub order: Order<B>,
}

/// One placed request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Dispatch {
    /// Counts dispatches of this gateway to this replica; a report names the last one that it covers.
    pub number: DispatchNumber,
    /// The request.
    pub manifest: Arc<Manifest>,
    /// 1 is the first placement; a placement after a lost replica counts on.
    pub attempt: u16,
    /// Class in force, never above the manifest's.
    pub class: ClassRank,
    /// Output cap in force for each sequence, never above the manifest's.
    pub max_output_tokens: u32,
    /// Output of each sequence whose blocks are reserved now; growth past it may preempt.
    pub reserve_output_tokens: u32,
    /// Median output expected of each sequence.
    pub expected_output_tokens: u32,
}

/// The part of an overload stance (and of the order policy's answer) that replicas carry out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ReplicaStance {
    /// Grows with every stance of this gateway.
    pub number: u64,
    /// 0 normal .. 4.
    pub level: u8,
    /// Free this many blocks from classes at or below the rank; 0 blocks is nothing.
    pub preempt_blocks: u64,
    /// See `preempt_blocks`.
    pub preempt_class: ClassRank,
    /// How long a step with decodes in it should take; `u32::MAX` is no opinion. Lapses with the stance.
    pub tpot_target_us: u32,
}

/// Replica to gateway.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FromReplica {
    /// Credits and load: at a step's end, on a change, and every 100 ms when idle.
    Report(Report),
    /// The request left the ready window: its first rows are planned.
    Started {
        /// Which.
        request: RequestId,
        /// Which attempt of it.
        attempt: u16,
        /// Prompt tokens found in the prefix cache.
        cached_tokens: u32,
    },
    /// What one step did for one request. Sent once a request and step, counts only.
    Progress(Progress),
    /// A sequence of the request gave its blocks back.
    Preempted {
        /// Which.
        request: RequestId,
        /// Which attempt of it.
        attempt: u16,
        /// Tokens that were computed for the sequence.
        computed_tokens: u32,
        /// Blocks that came free.
        freed_blocks: u32,
        /// 0 KV shortage, 1 overload action, 2 drain.
        cause_code: u8,
    },
    /// A preempted sequence runs again.
    Resumed {
        /// Which.
        request: RequestId,
        /// Which attempt of it.
        attempt: u16,
        /// Tokens that have to be computed again.
        recomputed_tokens: u32,
    },
    /// Not taken. The next ranked replica is tried.
    Refuse {
        /// Which.
        request: RequestId,
        /// Which attempt of it.
        attempt: u16,
        /// The dispatch's number.
        number: DispatchNumber,
        /// Why.
        reason: RefuseReason,
    },
    /// All sequences have ended. Exactly once for each dispatch that was taken.
    Ended {
        /// Which.
        request: RequestId,
        /// Which attempt of it.
        attempt: u16,
        /// The first failure among its sequences, else the outcome of the first sequence.
        outcome: Outcome,
        /// What was computed and delivered.
        usage: Usage,
    },
    /// The prefix cache changed. Sequence numbers are dense within an epoch: a gap is seen.
    Cache {
        /// 1, 2, 3 ..
        sequence: u64,
        /// What changed.
        event: CacheEvent,
    },
    /// A party of a hand-off to its coordinator.
    Party {
        /// In which part it speaks.
        side: Side,
        /// What it says.
        said: Said,
    },
}

/// A change of a replica's prefix cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CacheEvent {
    /// The block is cached or in use and can be matched.
    Stored {
        /// Its key.
        key: BlockKey,
        /// Position in the chain, 0 for the first block of a prompt.
        depth: u32,
    },
    /// It can no longer be matched.
    Removed {
        /// Its key.
        key: BlockKey,
    },
    /// Nothing is cached any more.
    Cleared,
}

/// What one step did for one request, summed over its sequences.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Progress {
    /// Which.
    pub request: RequestId,
    /// Which attempt of it.
    pub attempt: u16,
    /// Prompt tokens computed for the first time (recompute after preemption is not charged).
    pub prefill_tokens: u32,
    /// Output tokens confirmed.
    pub decode_tokens: u32,
    /// This is its first output token.
    pub first_token: bool,
    /// Share of the step's device time, by query tokens.
    pub device_us: u32,
}

/// Totals of one request at one replica.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Prompt tokens, once; 0 when the request ended before a row of it was planned.
    pub prompt_tokens: u32,
    /// Of these, found in the prefix cache.
    pub cached_tokens: u32,
    /// Output tokens delivered, over all sequences. What is billed.
    pub output_tokens: u32,
    /// Times a sequence of it was preempted.
    pub preemptions: u32,
}

/// Credits and load of one replica, for one gateway.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Report {
    /// Grows with every report of the epoch.
    pub number: u64,
    /// When the numbers were true. On a wire: receipt less the elapsed time that it carries.
    pub as_of: Instant,
    /// The last dispatch of this gateway that these numbers include; 0 is none.
    pub covers: DispatchNumber,
    /// What this gateway may dispatch, in absolute numbers, for this report.
    pub credit: Credit,
    /// Load.
    pub load: Load,
    /// Number of the last cache event sent.
    pub cache_sequence: u64,
}

/// Room that a replica grants.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Credit {
    /// Sequences' worth of slots, ready window included.
    pub requests: u32,
    /// Uncached prompt tokens that it wants to hold at once.
    pub prefill_tokens: u64,
    /// Blocks that can be reserved (free and reclaimable, less reserved).
    pub blocks: u64,
}

/// What a replica is busy with.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Load {
    /// Pool size.
    pub total_blocks: u32,
    /// Referenced. The five states of blocks add up to the pool.
    pub active_blocks: u32,
    /// Unreferenced and matched by prefix.
    pub cached_blocks: u32,
    /// Free.
    pub free_blocks: u32,
    /// Let go of, while a step in flight may still read them.
    pub reclaimable_blocks: u32,
    /// A transfer writes or reads them, or may still.
    pub transfer_blocks: u32,
    /// Reserved and not yet allocated.
    pub reserved_blocks: u32,
    /// Blocks that running work may still grow to, beyond held and reserved ones.
    pub growth_blocks: u64,
    /// In the ready window, and preempted ones to resume.
    pub ready_requests: u32,
    /// Blocks these need to start.
    pub ready_blocks: u32,
    /// In the batch.
    pub running_requests: u32,
    /// Uncached prompt tokens dispatched and unfinished.
    pub prefill_tokens: u64,
    /// Average duration of one step.
    pub step: Duration,
    /// Device time used in the last 60 s.
    pub busy: Duration,
    /// Cached blocks reused per second.
    pub hit_blocks_per_sec: u64,
    /// Preemptions in the last 10 s.
    pub preempted_requests: u32,
    /// Prompt tokens computed per second lately.
    pub prefill_tokens_per_sec: u64,
    /// Output tokens per second lately.
    pub decode_tokens_per_sec: u64,
    /// Blocks held by class.
    pub class_active_blocks: [u32; ClassRank::COUNT],
    /// Fitted device time of one uncached prompt token, in nanoseconds; 0 is unknown.
    pub prefill_token_ns: u64,
}
