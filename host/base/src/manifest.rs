//! The request manifest: everything the machines may know about a request, frozen before any of them sees it.

use alloc::boxed::Box;

use crate::{BlockKey, ClassRank, Duration, FlowId, Instant, Priority, RequestId, SessionId, TenantId, TrustGroup};

/// One normalised request. Made once at the edge, shared by reference, never changed.
///
/// Tokens and text stay at the edge: the core sees counts and keys.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Manifest {
    /// Minted by the gateway's driver.
    pub request: RequestId,
    /// Who pays.
    pub tenant: TenantId,
    /// The unit of fairness.
    pub flow: FlowId,
    /// Conversation, if the client named one.
    pub session: SessionId,
    /// The cache-sharing domain; already part of every key.
    pub trust: TrustGroup,
    /// Class after clamping to the tenant's ceiling.
    pub class: ClassRank,
    /// Order inside the class.
    pub priority: Priority,
    /// Answers asked for (n): 1..=8.
    pub sequences: u16,
    /// Prompt length in tokens, at least 1.
    pub input_tokens: u32,
    /// Output cap of each sequence, at least 1.
    pub max_output_tokens: u32,
    /// When the complete request had been received.
    pub arrived: Instant,
    /// After this nothing more is computed; [`Instant::NEVER`] is none.
    pub deadline: Instant,
    /// Declared target for the first token; [`Duration::MAX`] is none.
    pub slo_ttft: Duration,
    /// Declared target per output token; [`Duration::MAX`] is none.
    pub slo_tpot: Duration,
    /// What the host may do with it.
    pub traits: Traits,
    /// Keys of the full blocks of the prompt, root first.
    pub keys: Box<[BlockKey]>,
    /// Hash of the first four full blocks, 0 when the prompt is shorter.
    pub prefix_key: u64,
    /// How long its cached blocks should stay, 0..=100, larger longer; 50 is neutral.
    pub retention: u8,
    /// The same tenant was refused this prompt or idempotency key within the last minute.
    pub retry: bool,
    /// The tenant's terms when the request came in.
    pub terms: TenantTerms,
}

impl Manifest {
    /// Blocks for `tokens` tokens of one sequence.
    pub fn blocks_for(tokens: u64, block_size_tokens: u32) -> u64 {
        tokens.div_ceil(u64::from(block_size_tokens.max(1)))
    }
}

/// What a tenant may use. Derived from the key file at the edge; the ledger enforces it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TenantTerms {
    /// Share of service relative to others: 1,000,000 is one.
    pub weight_ppm: u64,
    /// Most requests queued or running at once.
    pub requests_max: u32,
    /// Hard ceiling of input plus output tokens in one quota window; [`u64::MAX`] is none.
    pub window_tokens_max: u64,
    /// Part of the window that is the tenant's own.
    pub guaranteed_tokens: u64,
    /// Most it may borrow beyond that.
    pub borrow_tokens_max: u64,
    /// Refill rate for bucket policies; [`u64::MAX`] is none.
    pub rate_tokens_per_sec: u64,
    /// Depth of the bucket; [`u64::MAX`] is none.
    pub burst_tokens: u64,
    /// Most blocks of a replica's prefix cache it may hold; [`u64::MAX`] is none.
    pub cache_blocks_max: u64,
}

impl Default for TenantTerms {
    fn default() -> Self {
        Self {
            weight_ppm: 1_000_000,
            requests_max: u32::MAX,
            window_tokens_max: u64::MAX,
            guaranteed_tokens: 0,
            borrow_tokens_max: 0,
            rate_tokens_per_sec: u64::MAX,
            burst_tokens: u64::MAX,
            cache_blocks_max: u64::MAX,
        }
    }
}

/// Bits that say what the host may do with a request. Further bits are additive.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Traits(pub u32);

impl Traits {
    /// The answer is streamed.
    pub const STREAMING: Self = Self(1);
    /// The output cap may be lowered.
    pub const MAY_DEGRADE: Self = Self(1 << 1);
    /// It may be asked to wait before it enters the queue.
    pub const MAY_DEFER: Self = Self(1 << 2);
    /// The product allows shedding it.
    pub const SHEDDABLE: Self = Self(1 << 3);
    /// Its blocks are not kept for reuse.
    pub const NO_STORE: Self = Self(1 << 4);
    /// It may be moved while it runs.
    pub const MIGRATABLE: Self = Self(1 << 5);
    /// It belongs to a batch job.
    pub const BATCH: Self = Self(1 << 6);

    /// All bits of `other` set?
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Both sets of bits.
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}
