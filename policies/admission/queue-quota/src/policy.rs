//! May this request enter? Three bounds, in the order of how hard they are: the queue, the tenant's quota, the pool.
//!
//! A request that meets no bound enters with its 90th percentile of output reserved. One that meets the pool's bound is made smaller if it
//! may be, else waits if it may, else goes away with a reason and a time to come back. Refusing is the last resort, and silence is never an
//! answer: every refusal is typed.

use penstock_policy_sdk::admission::{Admission, Asked, reason};
use penstock_policy_sdk::{Document, ParameterError, Parameters, Policy, Sat, Traits, Verdict, declare};

declare! {
    /// What it reads of the call.
    pub Reads: Admission = [
        "known-mask",
        "block-size-tokens",
        "stale-cache-us",
        "gateway-share-ppm",
        "expected-output-tokens",
        "expected-output-high-tokens",
        "need-blocks",
        "cached-prefix-tokens",
        "cache-age-us",
        "defer-count",
        "est-ttft-us",
        "tenant-used-tokens",
        "tenant-limit-tokens",
        "tenant-guaranteed-tokens",
        "tenant-borrowed-tokens",
        "tenant-borrow-limit-tokens",
        "tenant-window-left-us",
        "lendable-tokens",
        "lender-waiting-flag",
        "unmet-floor-blocks",
        "pool-total-blocks",
        "pool-free-blocks",
        "pool-cached-blocks",
        "pool-queued-need-blocks",
        "pool-growth-blocks",
        "pool-queued-requests",
        "pool-queued-tokens",
        "queue-limit-requests",
        "queue-limit-tokens",
        "prefill-tokens-per-sec",
        "failover-reserve-blocks",
        "deploy-reserve-blocks",
        "burst-reserve-blocks",
    ];
}

const ONE_PPM: u64 = 1_000_000;
/// Classes from here on may use what is kept for bursts.
const BURST_CLASS: u8 = 5;
/// Deferrals that the host grants.
const DEFERRALS_MAX: u64 = 8;
/// The client is told to come back after a second where nothing better is known.
const RETRY_MS: u64 = 1_000;

/// What can be set without a new build.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settings {
    /// Pools of work that may be accepted, queue included: 4,000,000 lets a burst of four pools queue.
    pub depth_ppm: u64,
    /// Smallest output cap that a degrade leaves, in tokens.
    pub floor_tokens: u64,
    /// How long a deferral lasts, in microseconds.
    pub defer_us: u32,
}

impl Parameters for Settings {
    fn read(document: &mut Document) -> Result<Self, ParameterError> {
        Ok(Self {
            depth_ppm: document.u64("depth-ppm", 4_000_000, 100_000..=100_000_000)?,
            floor_tokens: document.u64("degrade-floor-tokens", 256, 16..=1_000_000)?,
            defer_us: document.u32("defer-us", 50_000, 10_000..=60_000_000)?,
        })
    }
}

/// The policy. Without state: what tenants used and what is reserved is the host's to count.
#[derive(Debug)]
pub struct QueueQuota {
    settings: Settings,
}

type Question<'a> = Asked<'a, QueueQuota>;

impl Policy for QueueQuota {
    const NAME: &'static str = "queue-quota";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    type Parameters = Settings;

    fn new(settings: &Settings) -> Self {
        Self { settings: *settings }
    }
}

impl Admission for QueueQuota {
    type Context = Reads;

    fn decide(&mut self, asked: &Question<'_>) -> Option<Verdict> {
        let verdict = match self.bound_met(asked) {
            None => Verdict::Admit {
                reserve_output_tokens: high_output(asked) as u32,
                class_rank: asked.request.class_rank.get(),
            },
            Some(Bound::Late { by_us }) => refuse(reason::DEADLINE, by_us / 1_000),
            Some(Bound::Ceiling) => refuse(reason::QUOTA, asked.context.tenant_window_left_us() / 1_000),
            Some(Bound::Lending) => self
                .defer(asked)
                .unwrap_or_else(|| refuse(reason::QUOTA, asked.context.tenant_window_left_us() / 1_000)),
            Some(Bound::Queue) => self.defer(asked).unwrap_or_else(|| refuse(reason::CAPACITY, drain_ms(asked))),
            Some(Bound::Pool) => {
                let smaller = self.degrade(asked).or_else(|| self.defer(asked));
                smaller.unwrap_or_else(|| refuse(reason::CAPACITY, drain_ms(asked)))
            }
        };
        Some(verdict)
    }
}

/// What keeps a request out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Bound {
    /// It would be late by so much.
    Late { by_us: u64 },
    /// The queue is full.
    Queue,
    /// The tenant's hard ceiling.
    Ceiling,
    /// It would borrow more than may be lent now.
    Lending,
    /// Blocks, with the queue and every reserve counted.
    Pool,
}

impl QueueQuota {
    fn bound_met(&self, asked: &Question<'_>) -> Option<Bound> {
        let (context, request) = (asked.context, asked.request);
        let input = u64::from(request.input_tokens);
        let has_place = context.pool_queued_requests() < context.queue_limit_requests()
            && (Sat(context.pool_queued_tokens()) + input).0 <= context.queue_limit_tokens();
        if !has_place {
            return Some(Bound::Queue);
        }
        let cost = charge(asked);
        if cost + context.tenant_used_tokens() > Sat(context.tenant_limit_tokens()) {
            return Some(Bound::Ceiling);
        }
        if !may_be_lent(asked, cost) {
            return Some(Bound::Lending);
        }
        // An estimate that is not known reads 0, which is never late.
        let left_us = request.deadline_left_us(asked.call.now_us);
        if context.est_ttft_us() > left_us {
            return Some(Bound::Late { by_us: context.est_ttft_us() - left_us });
        }
        let fits = self.room_blocks(asked).is_none_or(|room| need_blocks(asked, high_output(asked)) <= room);
        if fits { None } else { Some(Bound::Pool) }
    }

    /// Blocks that this class may still ask for, waiting work counted; none while no replica has reported, when the queue's bound decides.
    fn room_blocks(&self, asked: &Question<'_>) -> Option<u64> {
        let context = asked.context;
        let total = context.pool_total_blocks();
        if total == 0 {
            return None;
        }
        let held = Sat(total) - context.pool_free_blocks() - context.pool_cached_blocks();
        let promised = Sat(context.pool_growth_blocks()) + context.pool_queued_need_blocks();
        let burst = if asked.request.class_rank.get() < BURST_CLASS { context.burst_reserve_blocks() } else { 0 };
        let kept = Sat(context.failover_reserve_blocks()) + context.deploy_reserve_blocks() + burst;
        let depth = Sat(total).times_over(self.settings.depth_ppm, ONE_PPM).map_or(Sat(u64::MAX), Sat);
        Some((depth - held - promised - kept - context.unmet_floor_blocks()).0)
    }

    /// The largest smaller cap that fits, if the request may be degraded and it is not too small to be of use.
    fn degrade(&self, asked: &Question<'_>) -> Option<Verdict> {
        let request = asked.request;
        let room = self.room_blocks(asked)?;
        if !request.traits.has(Traits::MAY_DEGRADE) {
            return None;
        }
        let tokens = Sat(room) * block_tokens(asked) - uncached_tokens(asked);
        let cap = (tokens.0 / sequences(asked)).min(u64::from(request.max_output_tokens).saturating_sub(1));
        // The rounding of each sequence's last block is not in `tokens`, so ask again with the cap itself.
        let cap = if need_blocks(asked, cap) <= room { cap } else { cap.saturating_sub(block_tokens(asked)) };
        if cap < self.settings.floor_tokens || need_blocks(asked, cap) > room {
            return None;
        }
        let cap = cap as u32;
        let class_rank = request.class_rank.get();
        Some(Verdict::Degrade { max_output_tokens: cap, reserve_output_tokens: cap, class_rank })
    }

    fn defer(&self, asked: &Question<'_>) -> Option<Verdict> {
        let may = asked.request.traits.has(Traits::MAY_DEFER) && asked.context.defer_count() < DEFERRALS_MAX;
        may.then_some(Verdict::Defer { for_us: self.settings.defer_us })
    }
}

fn sequences(asked: &Question<'_>) -> u64 {
    u64::from(asked.request.sequences.max(1))
}

fn block_tokens(asked: &Question<'_>) -> u64 {
    asked.context.block_size_tokens().max(1)
}

/// What the quota is charged: the prompt once and the expected output of every answer.
fn charge(asked: &Question<'_>) -> Sat {
    Sat(asked.context.expected_output_tokens()) * sequences(asked) + u64::from(asked.request.input_tokens)
}

/// May the part of `cost` beyond the tenant's own share be borrowed? A tenant without share and without credit has a ceiling only.
fn may_be_lent(asked: &Question<'_>, cost: Sat) -> bool {
    let context = asked.context;
    let (own, credit) = (context.tenant_guaranteed_tokens(), context.tenant_borrow_limit_tokens());
    if own == 0 && credit == 0 {
        return true;
    }
    let beyond = (cost + context.tenant_used_tokens() - own).0.min(cost.0);
    if beyond == 0 {
        return true;
    }
    // Of several gateways, each may lend its share only; the sum is what there is.
    let lendable = Sat(context.lendable_tokens()).times_over(context.gateway_share_ppm(), ONE_PPM).unwrap_or(0);
    let left = (Sat(credit) - context.tenant_borrowed_tokens()).0;
    context.lender_waiting_flag() == 0 && beyond <= lendable.min(left)
}

/// The 90th percentile of output, within the cap.
fn high_output(asked: &Question<'_>) -> u64 {
    asked.context.expected_output_high_tokens().min(u64::from(asked.request.max_output_tokens))
}

/// Prompt tokens that are not believed to be cached. A directory that is stale is not believed.
fn uncached_tokens(asked: &Question<'_>) -> u64 {
    let context = asked.context;
    let is_fresh = context.cache_age_us() < context.stale_cache_us();
    let cached = if is_fresh { context.cached_prefix_tokens() } else { 0 };
    u64::from(asked.request.input_tokens).saturating_sub(cached)
}

/// Blocks for what is not cached of the prompt, and `output` tokens of each answer; never more than the host's own sum.
fn need_blocks(asked: &Question<'_>, output: u64) -> u64 {
    let block = block_tokens(asked);
    let prompt = uncached_tokens(asked).div_ceil(block);
    let answers = Sat(output.div_ceil(block)) * sequences(asked);
    (answers + prompt).0.min(asked.context.try_need_blocks().unwrap_or(u64::MAX))
}

/// Time until what waits now is computed, in milliseconds.
fn drain_ms(asked: &Question<'_>) -> u64 {
    let rate = asked.context.prefill_tokens_per_sec();
    Sat(asked.context.pool_queued_tokens()).times_over(1_000, rate).unwrap_or(RETRY_MS)
}

fn refuse(reason: u16, retry_ms: u64) -> Verdict {
    Verdict::Reject { reason, retry_after_ms: Sat(retry_ms.max(RETRY_MS)).to_u32() }
}

#[cfg(test)]
mod tests {
    use penstock_policy_sdk::Load as _;

    use crate::Seat;

    #[test]
    fn parameters_have_ranges_and_names() {
        assert!(Seat::configure(r#"{"depth-ppm": 2000000, "degrade-floor-tokens": 16, "defer-us": 10000}"#).is_ok());
        let refused = |text: &str| Seat::configure(text).map(|_| ()).unwrap_err();
        assert_eq!(refused(r#"{"defer-us": 9}"#).field, "defer-us");
        assert_eq!(refused(r#"{"depth": 1}"#).field, "depth");
    }

    #[test]
    fn its_manifest_is_one_the_host_takes() {
        let declared = Seat::manifest().admission().unwrap();
        assert_eq!((declared.terms.name.as_str(), declared.context.len()), ("queue-quota", 33));
    }
}
