//! Context and rows of `order`.

use penstock_base::Instant;
use penstock_policy_api::{CommonSignal, ContextSource, OrderSignal, RowSource, WaitingSignal};

use crate::gateway::State;
use crate::gateway::dispatch::Granted;
use crate::gateway::flows::Flow;
use crate::gateway::request::Request;
use crate::gateway::seats::WindowRow;

/// What `order` is told about the queue.
#[derive(Clone, Copy)]
pub(in crate::gateway) struct OrderFacts<'a> {
    /// The gateway.
    pub state: &'a State,
    /// What replicas grant.
    pub granted: Granted,
}

impl ContextSource<OrderSignal> for OrderFacts<'_> {
    fn common(&self, which: CommonSignal) -> Option<u64> {
        self.state.common_signal(which)
    }

    fn value(&self, which: OrderSignal) -> Option<u64> {
        use OrderSignal as Signal;
        let (state, pool) = (self.state, &self.state.replicas.pool);
        match which {
            Signal::TakeRequests => Some(self.granted.take),
            Signal::CreditTokens => Some(self.granted.tokens),
            Signal::CreditBlocks => Some(self.granted.blocks),
            Signal::FreeBlocks => state.pooled(pool.free_blocks),
            Signal::CachedBlocks => state.pooled(pool.cached_blocks),
            Signal::RunningRequests => state.pooled(pool.running_requests),
            Signal::WaitingRequests => Some(u64::from(state.queue.requests)),
            Signal::WaitingFlows => Some(u64::from(state.flows.ring.len)),
            Signal::OldestWaitUs => Some(state.oldest_wait_of_all().as_us()),
            Signal::SloTpotUs => Some(state.requests.tpot.first().map_or(u64::MAX, |(target_ns, _)| target_ns / 1_000)),
            Signal::StarveUs => Some(state.config.starve.as_us()),
            Signal::LoadAgeUs => state.load_age_us(),
            Signal::CacheAgeUs => state.cache_age_us(),
            // Service over all gateways is not exchanged yet.
            Signal::FairAgeUs => None,
        }
    }
}

/// The window as rows.
#[derive(Clone, Copy)]
pub(in crate::gateway) struct WaitingRows<'a> {
    /// The gateway.
    pub state: &'a State,
    /// The window.
    pub rows: &'a [WindowRow],
    /// The overlap columns of the window were filled.
    pub has_overlaps: bool,
}

impl RowSource<WaitingSignal> for WaitingRows<'_> {
    fn rows(&self) -> usize {
        self.rows.len()
    }

    fn cell(&self, which: WaitingSignal, row: usize) -> Option<u64> {
        self.waiting(row)?.value(which)
    }

    fn visit(&self, wanted: &[Option<WaitingSignal>], mut give: impl FnMut(usize, usize, Option<u64>)) {
        for row in 0..self.rows.len() {
            let waiting = self.waiting(row);
            for (at, signal) in wanted.iter().enumerate() {
                if let Some(signal) = *signal {
                    give(at, row, waiting.and_then(|waiting| waiting.value(signal)));
                }
            }
        }
    }
}

impl<'a> WaitingRows<'a> {
    fn waiting(&self, row: usize) -> Option<Waiting<'a>> {
        let row = self.rows.get(row)?;
        let request = self.state.requests.table.get(row.slot)?;
        let flow = self.state.flows.table.get(request.flow)?;
        Some(Waiting { state: self.state, row, request, flow, has_overlaps: self.has_overlaps })
    }
}

/// One of them, with everything that its signals are read from.
#[derive(Clone, Copy)]
struct Waiting<'a> {
    state: &'a State,
    row: &'a WindowRow,
    request: &'a Request,
    flow: &'a Flow,
    has_overlaps: bool,
}

impl Waiting<'_> {
    fn value(self, which: WaitingSignal) -> Option<u64> {
        use WaitingSignal as Signal;
        let Self { state, row, request, flow, .. } = self;
        let manifest = &request.manifest;
        let left = |until: Instant| state.now.until(until).as_us();
        let block = state.config.block_size_tokens;
        match which {
            Signal::KnownMask => None,
            Signal::RequestId => Some(manifest.request.0),
            Signal::FlowId => Some(manifest.flow.0),
            Signal::TenantId => Some(manifest.tenant.0),
            Signal::SessionId => Some(manifest.session.0),
            Signal::ClassRank => Some(u64::from(request.class.get())),
            Signal::PriorityBiased => Some(manifest.priority.biased()),
            Signal::FlowCount => Some(u64::from(row.ahead)),
            Signal::WaitedUs => Some(request.waited(state.now).as_us()),
            Signal::AgeUs => Some(state.now.since(manifest.arrived).as_us()),
            Signal::DeadlineLeftUs => Some(left(manifest.deadline)),
            Signal::TtftLeftUs => {
                let target = state.ttft_target(request);
                let due = if target.0 == u64::MAX { Instant::NEVER } else { manifest.arrived + target };
                Some(left(due))
            }
            Signal::InputTokens => Some(u64::from(manifest.input_tokens)),
            Signal::CachedTokens => self.has_overlaps.then_some(u64::from(row.cached_tokens)),
            Signal::CreditedOverlapFlag => self.has_overlaps.then_some(u64::from(row.credited_overlap)),
            Signal::UncachedTokens => self.has_overlaps.then(|| u64::from(manifest.input_tokens - row.cached_tokens)),
            Signal::SharedTokens => self.has_overlaps.then_some(u64::from(row.shared_tokens)),
            Signal::ExpectedOutputTokens => state.expected_output(manifest, request.max_output_tokens),
            Signal::MaxOutputTokens => Some(u64::from(request.max_output_tokens)),
            Signal::NeedBlocks => Some(request.need_blocks(block)),
            Signal::FinishBlocks => Some(request.finish_blocks(block)),
            Signal::AttemptCount => Some(u64::from(request.attempt)),
            Signal::FlowWeightPpm => Some(flow.weight_ppm),
            Signal::FlowWaitingRequests => Some(u64::from(flow.waiting_requests)),
            Signal::FlowWaitingTokens => Some(flow.waiting_tokens),
            Signal::FlowRunningRequests => Some(u64::from(flow.running_requests)),
            Signal::FlowPrefillTokens => Some(flow.prefill_tokens),
            Signal::FlowDecodeTokens => Some(flow.decode_tokens),
            Signal::FlowIdleUs => Some(flow.idle_before.as_us()),
            // No source yet: counts by key, service over all gateways, waits in tokens.
            Signal::WaitedTokens
            | Signal::KeyRunningRequests
            | Signal::KeyWaitingRequests
            | Signal::FlowGlobalTokens => None,
        }
    }
}
