//! What policies are told: one arm a signal. `None` is unknown, which is neither zero nor idle.

mod admission;
mod order;
mod overload;
mod routing;

pub(super) use admission::{AdmissionFacts, AskedArrival};
pub(super) use order::{OrderFacts, WaitingRows};
pub(super) use overload::{ClassRows, OverloadFacts};
pub(super) use routing::{ReplicaRows, RoutingFacts};

use penstock_base::{Duration, Manifest};
use penstock_policy_api::CommonSignal;

use super::State;
use super::replicas::{Replica, covers};
use super::request::Need;

/// Output that half of such requests do not exceed.
const MEDIAN_PPM: u64 = 500_000;
/// Output that nine of ten do not exceed.
const HIGH_PPM: u64 = 900_000;

impl State {
    /// Context that all decisions share.
    fn common_signal(&self, which: CommonSignal) -> Option<u64> {
        let config = &self.config;
        match which {
            CommonSignal::KnownMask => None,
            CommonSignal::StageCode => Some(0),
            CommonSignal::BlockSizeTokens => Some(u64::from(config.block_size_tokens)),
            CommonSignal::KvTokenBytes => (config.kv_token_bytes > 0).then_some(config.kv_token_bytes),
            CommonSignal::GatewayReplicas => Some(u64::from(self.share.members())),
            CommonSignal::GatewaySharePpm => Some(self.share.ppm(self.now, config)),
            CommonSignal::OverloadLevel => Some(u64::from(self.stance.level())),
            CommonSignal::StaleLoadUs => Some(config.stale_load.as_us()),
            CommonSignal::StaleCacheUs => Some(config.stale_cache.as_us()),
            // What other gateways have used is not known here at any age; what this one may use is as old as its lease.
            CommonSignal::QuotaAgeUs if config.gateways <= 1 => Some(0),
            CommonSignal::QuotaAgeUs => self.share.as_of().map(|as_of| self.now.since(as_of).as_us()),
        }
    }

    /// Age of the oldest report among ready replicas.
    fn load_age_us(&self) -> Option<u64> {
        self.replicas.oldest_report(self.now).map(Duration::as_us)
    }

    /// A sum over ready replicas; unknown before the first report.
    fn pooled(&self, sum: u64) -> Option<u64> {
        (self.replicas.pool.reported > 0).then_some(sum)
    }

    /// Age of the index over the ready replicas it knows; unknown when it knows none.
    fn cache_age_us(&self) -> Option<u64> {
        let known = self.replicas.iter_ready().filter(|(_, replica)| replica.cache.complete);
        known.map(|(_, replica)| self.now.since(replica.cache.as_of).as_us()).max()
    }

    /// Median output of such requests, at most `cap`.
    pub(super) fn expected_output(&self, manifest: &Manifest, cap: u32) -> Option<u64> {
        self.output_quantile(manifest, cap, MEDIAN_PPM)
    }

    fn output_quantile(&self, manifest: &Manifest, cap: u32, ppm: u64) -> Option<u64> {
        let seen = self.outputs.quantile(manifest.tenant, manifest.class, manifest.input_tokens, ppm)?;
        Some(seen.min(u64::from(cap)))
    }

    /// Prompt tokens that an overlap of `blocks` saves: whole blocks, and never the last token.
    pub(super) fn overlap_tokens(&self, manifest: &Manifest, blocks: u32) -> u32 {
        let tokens = u64::from(blocks) * u64::from(self.config.block_size_tokens);
        let most = u64::from(manifest.input_tokens.saturating_sub(1));
        u32::try_from(tokens.min(most)).unwrap_or(u32::MAX)
    }

    /// Device time of a prompt's uncached part at a replica, alone.
    fn est_prefill_us(&self, replica: &Replica, uncached_tokens: u64) -> Option<u64> {
        let token_ns = replica.load()?.prefill_token_ns;
        (token_ns > 0).then(|| uncached_tokens.saturating_mul(token_ns) / 1_000)
    }

    /// Time until a replica's credit could cover `need`; 0 when it does.
    ///
    /// Prefill credit comes back as the prompts before it are computed. Slots and blocks come back as requests end: of `n` that have
    /// `left` tokens to go on average, spread evenly, the k-th ends after about `left * step * 2k / (n + 1)`.
    fn est_credit_us(&self, replica: &Replica, need: &Need) -> Option<u64> {
        let credit = replica.credit();
        if covers(credit, need) {
            return Some(0);
        }
        let load = replica.load()?;
        let mut wait_us = 0;
        if credit.prefill_tokens < need.prefill_tokens.min(1) {
            if load.prefill_token_ns == 0 {
                return None;
            }
            let ahead = load.prefill_tokens.saturating_add(replica.uncovered.prefill_tokens);
            wait_us = ahead.saturating_mul(load.prefill_token_ns) / 1_000;
        }
        let short_slots = u64::from(need.slots.saturating_sub(credit.requests));
        let short_blocks = need.blocks.saturating_sub(credit.blocks);
        if short_slots + short_blocks == 0 {
            return Some(wait_us);
        }
        let running = u64::from(replica.requests.len);
        if running == 0 || load.step == Duration::ZERO {
            return None;
        }
        let blocks_each = (replica.inflight.blocks / running).max(1);
        let ends = short_slots.max(short_blocks.div_ceil(blocks_each)).min(running);
        let left_us = (replica.expected_left / running).saturating_mul(load.step.as_us());
        let ends_us = left_us.saturating_mul(2 * ends) / (running + 1);
        Some(wait_us.max(ends_us))
    }
}
