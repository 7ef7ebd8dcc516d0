//! Where do the signals of this machine's two questions come from? One arm a signal; `None` has no source here.

use penstock_base::{ClassRank, Instant};
use penstock_kv::{Kv, RunRow};
use penstock_policy_api::{
    CommonSignal, ContextSource, EvictionSignal, FillBasis, RowSource, RunSignal, RunningSignal, VictimsSignal,
};

use super::cost::CostFit;
use super::sequence::{Request, Sequence};
use super::{Replica, ReplicaConfig};

/// What both questions share.
#[derive(Clone, Copy, Debug)]
pub(super) struct Common {
    pub block_size_tokens: u32,
    pub gateways: usize,
    pub level: u8,
}

impl Common {
    fn value(&self, which: CommonSignal) -> Option<u64> {
        match which {
            CommonSignal::StageCode => Some(1),
            CommonSignal::BlockSizeTokens => Some(u64::from(self.block_size_tokens)),
            CommonSignal::GatewayReplicas => Some(self.gateways.max(1) as u64),
            CommonSignal::OverloadLevel => Some(u64::from(self.level)),
            // Sizes of the model and the host's limits on age are the gateway's to know; quotas live there.
            CommonSignal::KnownMask
            | CommonSignal::KvTokenBytes
            | CommonSignal::GatewaySharePpm
            | CommonSignal::StaleLoadUs
            | CommonSignal::StaleCacheUs
            | CommonSignal::QuotaAgeUs => None,
        }
    }
}

impl Replica {
    /// The stance in force here: the strictest fresh one, else the native ladder over the own blocks.
    pub(super) fn level(&self, now: Instant) -> u8 {
        self.peers.level(now).unwrap_or(self.ladder_level)
    }

    pub(super) fn common(&self, now: Instant) -> Common {
        Common {
            block_size_tokens: self.config.block_size_tokens,
            gateways: self.peers.as_slice().len(),
            level: self.level(now),
        }
    }
}

/// Context of `victims`.
#[derive(Clone, Copy, Debug)]
pub(super) struct VictimsContext {
    pub common: Common,
    pub short_blocks: u64,
    pub cause: u8,
    pub take: u64,
    pub needy_flow: u64,
    pub needy_class: ClassRank,
}

impl ContextSource<VictimsSignal> for VictimsContext {
    fn common(&self, which: CommonSignal) -> Option<u64> {
        self.common.value(which)
    }
    fn value(&self, which: VictimsSignal) -> Option<u64> {
        match which {
            VictimsSignal::ShortBlocks => Some(self.short_blocks),
            VictimsSignal::CauseCode => Some(u64::from(self.cause)),
            VictimsSignal::TakeSequences => Some(self.take),
            VictimsSignal::NeedyFlowId => Some(self.needy_flow),
            VictimsSignal::NeedyClassRank => Some(u64::from(self.needy_class.get())),
            // No tier below the device yet.
            VictimsSignal::DramFreeBlocks => None,
        }
    }
}

/// One sequence whose blocks can be freed now.
#[derive(Clone, Copy, Debug)]
pub(super) struct RunningRow {
    pub entry: u32,
    pub freed_blocks: u32,
    sequence: u64,
    request: u64,
    flow: u64,
    tenant: u64,
    class: ClassRank,
    priority: u64,
    joined: u64,
    age_us: u64,
    running_us: u64,
    deadline_left_us: u64,
    held_blocks: u32,
    computed: u32,
    recompute: u32,
    emitted: u32,
    expected_left: u32,
    max_left: u32,
    recompute_us: u64,
    preemptions: u32,
}

impl RunningRow {
    pub(super) fn of(
        seq: &Sequence,
        request: &Request,
        (entry, freed_blocks): (u32, u32),
        (config, cost): (&ReplicaConfig, &CostFit),
        now: Instant,
    ) -> Self {
        let manifest = &request.manifest;
        // Stored blocks stay findable when they are let go; the last position is computed again in any case.
        let kept = (seq.table.confirmed_blocks() * config.block_size_tokens).min(seq.len() - 1);
        let recompute = seq.len() - kept;
        Self {
            entry,
            freed_blocks,
            sequence: request.seq_id(seq.index).as_u64(),
            request: request.id().0,
            flow: manifest.flow.0,
            tenant: manifest.tenant.0,
            class: request.class,
            priority: manifest.priority.biased(),
            joined: seq.joined,
            age_us: now.since(manifest.arrived).as_us(),
            running_us: now.since(seq.joined_at).as_us(),
            deadline_left_us: now.until(manifest.deadline).as_us(),
            held_blocks: seq.table.len(),
            computed: seq.confirmed,
            recompute,
            emitted: seq.delivered,
            expected_left: request.expected_output.saturating_sub(seq.generated),
            max_left: seq.max_output - seq.generated,
            recompute_us: cost.prefill(u64::from(recompute)).as_us(),
            preemptions: seq.preemptions,
        }
    }
}

/// Rows of `victims`, in order of joining.
#[derive(Clone, Copy, Debug)]
pub(super) struct VictimsRows<'a>(pub &'a [RunningRow]);

impl RowSource<RunningSignal> for VictimsRows<'_> {
    fn rows(&self) -> usize {
        self.0.len()
    }
    fn cell(&self, which: RunningSignal, row: usize) -> Option<u64> {
        let row = self.0.get(row)?;
        match which {
            RunningSignal::SequenceId => Some(row.sequence),
            RunningSignal::RequestId => Some(row.request),
            RunningSignal::FlowId => Some(row.flow),
            RunningSignal::TenantId => Some(row.tenant),
            RunningSignal::ClassRank => Some(u64::from(row.class.get())),
            RunningSignal::PriorityBiased => Some(row.priority),
            RunningSignal::AdmitCount => Some(row.joined),
            RunningSignal::AgeUs => Some(row.age_us),
            RunningSignal::RunningUs => Some(row.running_us),
            RunningSignal::DeadlineLeftUs => Some(row.deadline_left_us),
            RunningSignal::FreedBlocks => Some(u64::from(row.freed_blocks)),
            RunningSignal::HeldBlocks => Some(u64::from(row.held_blocks)),
            RunningSignal::ComputedTokens => Some(u64::from(row.computed)),
            RunningSignal::RecomputeTokens => Some(u64::from(row.recompute)),
            RunningSignal::EmittedTokens => Some(u64::from(row.emitted)),
            RunningSignal::ExpectedLeftTokens => Some(u64::from(row.expected_left)),
            RunningSignal::EstRecomputeUs => Some(row.recompute_us),
            RunningSignal::PreemptedCount => Some(u64::from(row.preemptions)),
            // Nothing to offload to yet.
            RunningSignal::KnownMask | RunningSignal::EstOffloadUs => None,
        }
    }
    fn basis(&self, basis: FillBasis, row: usize) -> Option<u64> {
        match basis {
            FillBasis::MaxLeft => self.0.get(row).map(|row| u64::from(row.max_left)),
            FillBasis::Computed => self.0.get(row).map(|row| u64::from(row.computed)),
            FillBasis::Input | FillBasis::MaxOutput | FillBasis::TotalBlocks => None,
        }
    }
}

/// Context of `eviction`.
#[derive(Clone, Copy, Debug)]
pub(super) struct EvictionContext<'a> {
    pub common: Common,
    pub kv: &'a Kv,
    /// Set when the rows are about to leave: blocks wanted, and whether an allocation waits.
    pub reprice: Option<(u32, bool)>,
    pub now: Instant,
}

impl ContextSource<EvictionSignal> for EvictionContext<'_> {
    fn common(&self, which: CommonSignal) -> Option<u64> {
        self.common.value(which)
    }
    fn value(&self, which: EvictionSignal) -> Option<u64> {
        let counts = self.kv.counts();
        match which {
            EvictionSignal::WantBlocks => Some(self.reprice.map_or(0, |(want, _)| u64::from(want))),
            EvictionSignal::RepriceFlag => Some(u64::from(self.reprice.is_some())),
            EvictionSignal::LeftPrice => Some(self.kv.left_price()),
            EvictionSignal::TierCode => Some(0),
            EvictionSignal::UrgentFlag => Some(u64::from(self.reprice.is_some_and(|(_, urgent)| urgent))),
            EvictionSignal::FreeBlocks => Some(u64::from(counts.free)),
            EvictionSignal::CachedBlocks => Some(u64::from(counts.cached)),
            EvictionSignal::TotalBlocks => Some(u64::from(self.kv.config().blocks)),
            EvictionSignal::EvictedBlocks => Some(self.kv.evicted_blocks(self.now)),
            EvictionSignal::RegretBlocks => Some(self.kv.regret_blocks(self.now)),
            EvictionSignal::HitBlocksPerSec => Some(self.kv.hit_blocks_per_sec(self.now)),
            // No tier below the device yet.
            EvictionSignal::DramFreeBlocks | EvictionSignal::SsdFreeBlocks => None,
        }
    }
}

/// Rows of `eviction`.
#[derive(Clone, Copy, Debug)]
pub(super) struct EvictionRows<'a> {
    pub rows: &'a [RunRow],
    pub cost: &'a CostFit,
}

impl RowSource<RunSignal> for EvictionRows<'_> {
    fn rows(&self) -> usize {
        self.rows.len()
    }
    fn cell(&self, which: RunSignal, row: usize) -> Option<u64> {
        let row = self.rows.get(row)?;
        match which {
            RunSignal::RunHash => Some(row.run_hash),
            RunSignal::RunBlocks => Some(u64::from(row.run_blocks)),
            RunSignal::DepthBlocks => Some(u64::from(row.depth_blocks)),
            RunSignal::TenantId => Some(row.tenant.0),
            RunSignal::TrustHash => Some(row.trust.0),
            RunSignal::ClassRank => Some(u64::from(row.class.get())),
            RunSignal::IdleUs => Some(row.idle.as_us()),
            RunSignal::CachedUs => Some(row.cached.as_us()),
            RunSignal::HitCount => Some(u64::from(row.hit_count)),
            RunSignal::RecentHitCount => Some(u64::from(row.recent_hit_count)),
            RunSignal::GhostFlag => Some(u64::from(row.ghost)),
            RunSignal::RecomputeTokens => Some(u64::from(row.recompute_tokens)),
            RunSignal::EstRecomputeUs => Some(self.cost.prefill(u64::from(row.recompute_tokens)).as_us()),
            RunSignal::RetentionRank => Some(u64::from(row.retention)),
            RunSignal::TtlLeftUs => Some(row.ttl_left.as_us()),
            RunSignal::TenantCachedBlocks => Some(u64::from(row.tenant_cached_blocks)),
            RunSignal::TenantQuotaBlocks => Some(row.tenant_quota_blocks),
            // Bytes are the executor's to know; there is no tier below; gateways tell nothing about sessions and copies yet.
            RunSignal::KnownMask
            | RunSignal::RunBytes
            | RunSignal::EstLoadUs
            | RunSignal::SessionOpenFlag
            | RunSignal::CopiesReplicas
            | RunSignal::DirectoryAgeUs => None,
        }
    }
}
