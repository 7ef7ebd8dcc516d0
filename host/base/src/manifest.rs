//! The request manifest: everything the machines may know about a request, frozen before any of them sees it.

use alloc::boxed::Box;

use crate::codec::{DecodeError, Reader, Writer};
use crate::limits::SEQUENCES_MAX;
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

    /// Blocks that all sequences of a request need for `input` prompt and `output` output tokens each, nothing found in a cache.
    ///
    /// Gateway and replica both count with this, so that a credit that covers it is honoured. Full blocks before the last prompt token
    /// are shared; from the block of the last prompt token on, every sequence has its own (it computes that token itself).
    pub fn need_blocks(input: u32, output: u32, sequences: u16, block_size_tokens: u32) -> u64 {
        let total = Self::blocks_for(u64::from(input) + u64::from(output), block_size_tokens);
        let shared = u64::from(input.saturating_sub(1) / block_size_tokens.max(1));
        shared + u64::from(sequences.max(1)) * (total - shared)
    }

    /// Writes it for a snapshot or a journal.
    pub fn encode(&self, out: &mut Writer) {
        out.u64(self.request.0);
        out.u64(self.tenant.0);
        out.u64(self.flow.0);
        out.u64(self.session.0);
        out.u64(self.trust.0);
        out.u8(self.class.get());
        out.i32(self.priority.0);
        out.u16(self.sequences);
        out.u32(self.input_tokens);
        out.u32(self.max_output_tokens);
        out.u64(self.arrived.0);
        out.u64(self.deadline.0);
        out.u64(self.slo_ttft.0);
        out.u64(self.slo_tpot.0);
        out.u32(self.traits.0);
        out.list(self.keys.iter(), |w, key| w.raw(&key.0));
        out.u64(self.prefix_key);
        out.u8(self.retention);
        out.bool(self.retry);
        self.terms.encode(out);
    }

    /// Reads what [`Self::encode`] wrote. Values outside their ranges are refused.
    pub fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let manifest = Self {
            request: RequestId(from.u64()?),
            tenant: TenantId(from.u64()?),
            flow: FlowId(from.u64()?),
            session: SessionId(from.u64()?),
            trust: TrustGroup(from.u64()?),
            class: ClassRank::new(from.u8()?).ok_or(DecodeError::Invalid("class"))?,
            priority: Priority(from.i32()?),
            sequences: from.u16()?,
            input_tokens: from.u32()?,
            max_output_tokens: from.u32()?,
            arrived: Instant(from.u64()?),
            deadline: Instant(from.u64()?),
            slo_ttft: Duration(from.u64()?),
            slo_tpot: Duration(from.u64()?),
            traits: Traits(from.u32()?),
            keys: from.list(BlockKey::decode)?.into_boxed_slice(),
            prefix_key: from.u64()?,
            retention: from.u8()?,
            retry: from.bool()?,
            terms: TenantTerms::decode(from)?,
        };
        let sane = (1..=SEQUENCES_MAX).contains(&manifest.sequences)
            && manifest.input_tokens > 0
            && manifest.max_output_tokens > 0
            && manifest.retention <= 100;
        if sane { Ok(manifest) } else { Err(DecodeError::Invalid("manifest")) }
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

impl TenantTerms {
    /// Writes them for a snapshot or a journal.
    pub fn encode(&self, out: &mut Writer) {
        out.u64(self.weight_ppm);
        out.u32(self.requests_max);
        out.u64(self.window_tokens_max);
        out.u64(self.guaranteed_tokens);
        out.u64(self.borrow_tokens_max);
        out.u64(self.rate_tokens_per_sec);
        out.u64(self.burst_tokens);
        out.u64(self.cache_blocks_max);
    }

    /// Reads what [`Self::encode`] wrote.
    pub fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            weight_ppm: from.u64()?,
            requests_max: from.u32()?,
            window_tokens_max: from.u64()?,
            guaranteed_tokens: from.u64()?,
            borrow_tokens_max: from.u64()?,
            rate_tokens_per_sec: from.u64()?,
            burst_tokens: from.u64()?,
            cache_blocks_max: from.u64()?,
        })
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shared_prompt_is_counted_once() {
        // Blocks of 4. One sequence: 10 + 6 tokens are 4 blocks.
        assert_eq!(Manifest::need_blocks(10, 6, 1, 4), 4);
        // Three: tokens 0..8 lie in 2 shared blocks; each sequence has the block of token 9 and one more: 2 + 3 * 2.
        assert_eq!(Manifest::need_blocks(10, 6, 3, 4), 8);
        // The last prompt token opens a block of its own (position 8): nothing of it is shared, 2 + 2 * 1.
        assert_eq!(Manifest::need_blocks(9, 3, 2, 4), 4);
        // The last prompt token fills its block (position 7): one shared block, 1 + 2 * 2.
        assert_eq!(Manifest::need_blocks(8, 3, 2, 4), 5);
        assert_eq!(Manifest::need_blocks(u32::MAX, u32::MAX, 8, 16), 268_435_455 + 8 * (536_870_912 - 268_435_455));
    }

    #[test]
    fn reads_back_and_refuses_values_out_of_range() {
        let manifest = Manifest {
            request: RequestId(7),
            tenant: TenantId(1),
            flow: FlowId(2),
            session: SessionId(3),
            trust: TrustGroup(4),
            class: ClassRank::clamped(5),
            priority: Priority(-6),
            sequences: 8,
            input_tokens: 40,
            max_output_tokens: 9,
            arrived: Instant(10),
            deadline: Instant::NEVER,
            slo_ttft: Duration::MAX,
            slo_tpot: Duration(11),
            traits: Traits::STREAMING.with(Traits::NO_STORE),
            keys: Box::new([BlockKey([1; 16]), BlockKey([2; 16])]),
            prefix_key: 12,
            retention: 50,
            retry: true,
            terms: TenantTerms::default(),
        };
        let mut out = Writer::new();
        manifest.encode(&mut out);
        let mut from = Reader::new(out.bytes());
        assert_eq!(Manifest::decode(&mut from).as_ref(), Ok(&manifest));
        assert_eq!(from.finish(), Ok(()));
        out.clear();
        Manifest { sequences: 9, ..manifest }.encode(&mut out);
        assert_eq!(Manifest::decode(&mut Reader::new(out.bytes())), Err(DecodeError::Invalid("manifest")));
    }
}
