//! Context of admission.

use penstock_base::{ClassRank, Duration, Manifest};
use penstock_policy_api::{AdmissionSignal, CommonSignal, ContextSource};

use super::HIGH_PPM;
use crate::gateway::State;
use crate::gateway::directory::Overlaps;
use crate::gateway::request::Need;

/// The request that admission is asked about.
#[derive(Clone, Copy, Debug)]
pub(in crate::gateway) struct AskedArrival<'a> {
    /// What it is.
    pub manifest: &'a Manifest,
    /// Output cap that the stance leaves.
    pub max_output_tokens: u32,
    /// Its tenant in the ledger.
    pub tenant: u32,
    /// How often it was deferred.
    pub deferrals: u32,
    /// Where its prefix is believed to be; when the policy asks.
    pub overlaps: Option<&'a Overlaps>,
}

/// What admission is told.
#[derive(Clone, Copy)]
pub(in crate::gateway) struct AdmissionFacts<'a> {
    /// The gateway.
    pub state: &'a State,
    /// The request.
    pub asked: AskedArrival<'a>,
}

impl ContextSource<AdmissionSignal> for AdmissionFacts<'_> {
    fn common(&self, which: CommonSignal) -> Option<u64> {
        self.state.common_signal(which)
    }

    fn value(&self, which: AdmissionSignal) -> Option<u64> {
        use AdmissionSignal as Signal;
        let (state, config, pool) = (self.state, &self.state.config, &self.state.replicas.pool);
        let manifest = self.asked.manifest;
        let tenant = state.ledger.get(self.asked.tenant);
        let class = manifest.class;
        let queue = &state.queue.classes[class.index()];
        match which {
            Signal::ExpectedOutputTokens => state.expected_output(manifest, self.asked.max_output_tokens),
            Signal::ExpectedOutputHighTokens => state.output_quantile(manifest, self.asked.max_output_tokens, HIGH_PPM),
            Signal::NeedBlocks => Some(self.need_blocks(self.asked.max_output_tokens, manifest.sequences)),
            Signal::NeedStartBlocks => Some(self.need_blocks(0, 1)),
            Signal::CachedPrefixTokens => self.cached_prefix_tokens(),
            Signal::CacheAgeUs => state.cache_age_us(),
            Signal::WaitedUs => Some(state.now.since(manifest.arrived).as_us()),
            Signal::DeferCount => Some(u64::from(self.asked.deferrals)),
            Signal::RetryFlag => Some(u64::from(manifest.retry)),
            Signal::SloTtftUs => known(self.ttft_target()),
            Signal::SloTpotUs => known(manifest.slo_tpot),
            Signal::EstTtftUs => self.est_ttft_us(),
            Signal::EstServiceUs => self.est_service_us(),
            Signal::TenantRunningRequests => Some(u64::from(tenant.running_requests)),
            Signal::TenantQueuedRequests => Some(u64::from(tenant.queued_requests)),
            Signal::TenantQueuedTokens => Some(tenant.queued_tokens),
            Signal::TenantReservedBlocks => Some(tenant.reserved_blocks),
            Signal::TenantUsedTokens => Some(tenant.used_tokens()),
            Signal::TenantLimitTokens => Some(tenant.terms.window_tokens_max),
            Signal::TenantGuaranteedTokens => Some(tenant.terms.guaranteed_tokens),
            Signal::TenantBorrowedTokens => Some(tenant.borrowed_tokens()),
            Signal::TenantBorrowLimitTokens => Some(tenant.terms.borrow_tokens_max),
            Signal::TenantWindowLeftUs => Some(state.ledger.window_left(state.now).as_us()),
            Signal::TenantRateTokensPerSec => Some(tenant.terms.rate_tokens_per_sec),
            Signal::TenantBurstTokens => Some(tenant.terms.burst_tokens),
            Signal::LendableTokens => Some(state.ledger.lendable_tokens(Some(self.asked.tenant))),
            Signal::LenderWaitingFlag => Some(u64::from(state.ledger.is_lender_waiting(Some(self.asked.tenant)))),
            Signal::ClassQueuedRequests => Some(u64::from(queue.list.len)),
            Signal::ClassQueuedTokens => Some(queue.tokens),
            Signal::ClassReservedBlocks => Some(state.inflight[class.index()].blocks),
            Signal::ClassFloorBlocks => Some(config.class_floor_blocks[class.index()]),
            Signal::ClassOldestWaitUs => Some(state.oldest_wait(class).as_us()),
            Signal::UnmetFloorBlocks => Some(self.unmet_floor_blocks()),
            Signal::PoolTotalBlocks => state.pooled(pool.total_blocks),
            Signal::PoolFreeBlocks => state.pooled(pool.free_blocks),
            Signal::PoolCachedBlocks => state.pooled(pool.cached_blocks),
            Signal::PoolQueuedNeedBlocks => Some(self.queued_need_blocks()),
            Signal::PoolGrowthBlocks => state.pooled(pool.growth_blocks),
            Signal::MaxFreeBlocks => {
                let loads = state.replicas.iter_ready().filter_map(|(_, replica)| replica.load());
                loads.map(|load| u64::from(load.free_blocks) + u64::from(load.cached_blocks)).max()
            }
            Signal::PoolPrefillTokens => state.pooled(pool.prefill_tokens),
            Signal::PoolRunningRequests => state.pooled(pool.running_requests),
            Signal::PoolQueuedRequests => Some(u64::from(state.queue.requests)),
            Signal::PoolQueuedTokens => Some(state.queue.tokens),
            Signal::QueueLimitRequests => Some(u64::from(config.queue_requests_max)),
            Signal::QueueLimitTokens => Some(config.queue_tokens_max),
            Signal::PrefillTokensPerSec => state.pooled(pool.prefill_tokens_per_sec),
            Signal::DecodeTokensPerSec => state.pooled(pool.decode_tokens_per_sec),
            Signal::ReadyReplicas => Some(self.ready_replicas()),
            Signal::DrainingReplicas => Some(state.replicas.slots().len() as u64 - u64::from(state.replicas.ready())),
            Signal::FailoverReserveBlocks => Some(config.reserves.failover_blocks),
            Signal::DeployReserveBlocks => Some(config.reserves.deploy_blocks),
            Signal::BurstReserveBlocks => Some(config.reserves.burst_blocks),
            Signal::LoadAgeUs => state.load_age_us(),
        }
    }
}

/// A declared target; none is unknown.
fn known(target: Duration) -> Option<u64> {
    (target != Duration::MAX).then(|| target.as_us())
}

impl AdmissionFacts<'_> {
    fn need_blocks(&self, output: u32, sequences: u16) -> u64 {
        let block = self.state.config.block_size_tokens;
        Manifest::need_blocks(self.asked.manifest.input_tokens, output, sequences, block)
    }

    fn ttft_target(&self) -> Duration {
        let manifest = self.asked.manifest;
        if manifest.slo_ttft == Duration::MAX {
            self.state.config.class_slo_ttft[manifest.class.index()]
        } else {
            manifest.slo_ttft
        }
    }

    fn cached_prefix_tokens(&self) -> Option<u64> {
        let overlaps = self.asked.overlaps?;
        let known = self.state.replicas.iter_ready().filter(|(_, replica)| replica.cache.believed);
        let blocks = known.map(|(slot, _)| overlaps.blocks(slot)).max()?;
        Some(u64::from(self.state.overlap_tokens(self.asked.manifest, blocks)))
    }

    /// Sum over more important classes of what their floor still lacks.
    fn unmet_floor_blocks(&self) -> u64 {
        let state = self.state;
        let above = ClassRank::all().filter(|class| *class > self.asked.manifest.class);
        above
            .map(|class| {
                let floor = state.config.class_floor_blocks[class.index()];
                let held = state.inflight[class.index()].blocks;
                floor.saturating_sub(held).saturating_sub(state.queue.classes[class.index()].need_blocks)
            })
            .fold(0, u64::saturating_add)
    }

    /// What everything queued will reserve, and what was dispatched that no report covers yet.
    fn queued_need_blocks(&self) -> u64 {
        let uncovered = self.state.replicas.uncovered_blocks;
        self.state.queue.need_blocks.saturating_add(uncovered)
    }

    fn ready_replicas(&self) -> u64 {
        let manifest = self.asked.manifest;
        let need = Need { slots: u32::from(manifest.sequences), prefill_tokens: 1, blocks: 0 };
        let finish = self.need_blocks(self.asked.max_output_tokens, manifest.sequences);
        let longest = u64::from(manifest.input_tokens) + u64::from(self.asked.max_output_tokens);
        let ready = self.state.replicas.iter_ready();
        ready.filter(|(_, replica)| replica.decodes() && replica.fits(&need, finish, longest)).count() as u64
    }

    /// Gateway wait at the pace of the pool, then credit and prefill at the best ready replica.
    fn est_ttft_us(&self) -> Option<u64> {
        let state = self.state;
        let rate = state.pooled(state.replicas.pool.prefill_tokens_per_sec).filter(|rate| *rate > 0)?;
        let queued_us = state.queue.tokens.saturating_mul(1_000_000) / rate;
        let manifest = self.asked.manifest;
        let blocks = self.need_blocks(self.asked.max_output_tokens, manifest.sequences);
        let best = state.replicas.iter_ready().filter_map(|(slot, replica)| {
            let overlap = self.asked.overlaps.map_or(0, |overlaps| overlaps.blocks(slot));
            let uncached = u64::from(manifest.input_tokens - state.overlap_tokens(manifest, overlap));
            let need = Need { slots: u32::from(manifest.sequences), prefill_tokens: uncached, blocks };
            Some(state.est_credit_us(replica, &need)?.saturating_add(state.est_prefill_us(replica, uncached)?))
        });
        Some(queued_us.saturating_add(best.min()?))
    }

    /// Prefill, and one step a token, at the fastest ready replica.
    fn est_service_us(&self) -> Option<u64> {
        let state = self.state;
        let manifest = self.asked.manifest;
        let output = state.expected_output(manifest, self.asked.max_output_tokens);
        let output = output.unwrap_or(u64::from(self.asked.max_output_tokens));
        let service = state.replicas.iter_ready().filter_map(|(_, replica)| {
            let prefill = state.est_prefill_us(replica, u64::from(manifest.input_tokens))?;
            let step = replica.load().map(|load| load.step).filter(|step| *step > Duration::ZERO)?;
            Some(prefill.saturating_add(output.saturating_mul(step.as_us())))
        });
        service.min()
    }
}
