//! Context of routing, and the rows of replicas that routing and overload look at.

use penstock_base::Duration;
use penstock_policy_api::{CommonSignal, ContextSource, ReplicaSignal, RoutingSignal, RowSource};

use crate::gateway::State;
use crate::gateway::directory::Overlaps;
use crate::gateway::replicas::Replica;
use crate::gateway::request::{Need, Request};

/// What routing is told about the request.
#[derive(Clone, Copy)]
pub(in crate::gateway) struct RoutingFacts<'a> {
    /// The gateway.
    pub state: &'a State,
    /// The request to place.
    pub request: &'a Request,
    /// Replicas that passed the hard filter, also those outside the window.
    pub eligible: u64,
    /// The replica that decodes, when it is asked who computes the prompt.
    pub peer: Option<penstock_base::ReplicaId>,
}

impl ContextSource<RoutingSignal> for RoutingFacts<'_> {
    fn common(&self, which: CommonSignal) -> Option<u64> {
        self.state.common_signal(which)
    }

    fn value(&self, which: RoutingSignal) -> Option<u64> {
        use RoutingSignal as Signal;
        let (state, request) = (self.state, self.request);
        let manifest = &request.manifest;
        let target = |target: Duration| (target != Duration::MAX).then(|| target.as_us());
        match which {
            Signal::EligibleReplicas => Some(self.eligible),
            Signal::NeedBlocks => Some(request.need_blocks(state.config.block_size_tokens)),
            Signal::ExpectedOutputTokens => state.expected_output(manifest, request.max_output_tokens),
            Signal::PrefixKeyHash => Some(manifest.prefix_key),
            Signal::PrefixKeyRequests => Some(state.heat.requests(manifest.prefix_key, state.now)),
            Signal::WaitedUs => Some(state.now.since(manifest.arrived).as_us()),
            Signal::HeldUs => Some(request.wait.held.as_us()),
            Signal::SloTtftUs => target(state.ttft_target(request)),
            Signal::SloTpotUs => target(manifest.slo_tpot),
            Signal::PeerReplicaId => self.peer.map(|peer| u64::from(peer.0)),
        }
    }
}

/// Replicas as rows.
#[derive(Clone, Copy)]
pub(in crate::gateway) struct ReplicaRows<'a> {
    state: &'a State,
    /// Replica slots by id.
    rows: &'a [u32],
    /// The request to place, for signals that depend on it.
    placing: Option<Placing<'a>>,
}

/// What is to be placed, for [`ReplicaRows`].
#[derive(Clone, Copy)]
struct Placing<'a> {
    request: &'a Request,
    overlaps: &'a Overlaps,
}

impl<'a> ReplicaRows<'a> {
    /// For the placement of one request.
    pub fn for_routing(state: &'a State, rows: &'a [u32], request: &'a Request, overlaps: &'a Overlaps) -> Self {
        Self { state, rows, placing: Some(Placing { request, overlaps }) }
    }

    /// For overload: nothing is to be placed.
    pub fn for_overload(state: &'a State, rows: &'a [u32]) -> Self {
        Self { state, rows, placing: None }
    }

    fn cell_of_load(&self, which: ReplicaSignal, replica: &Replica) -> Option<u64> {
        use ReplicaSignal as Signal;
        let load = replica.load()?;
        Some(match which {
            Signal::ActiveBlocks => u64::from(load.active_blocks),
            Signal::CachedBlocks => u64::from(load.cached_blocks),
            Signal::FreeBlocks => u64::from(load.free_blocks),
            Signal::ReservedBlocks => u64::from(load.reserved_blocks),
            Signal::ReadyRequests => u64::from(load.ready_requests),
            Signal::ReadyBlocks => u64::from(load.ready_blocks),
            Signal::RunningRequests => u64::from(load.running_requests),
            Signal::PrefillTokens => load.prefill_tokens,
            Signal::StepUs => return (load.step > Duration::ZERO).then(|| load.step.as_us()),
            Signal::BusyUs => load.busy.as_us(),
            Signal::HitBlocksPerSec => load.hit_blocks_per_sec,
            Signal::PreemptedRequests => u64::from(load.preempted_requests),
            _ => return None,
        })
    }

    fn cell_of_placing(&self, which: ReplicaSignal, slot: u32, replica: &Replica) -> Option<u64> {
        use ReplicaSignal as Signal;
        let Placing { request, overlaps } = self.placing?;
        let state = self.state;
        let manifest = &request.manifest;
        let overlap = if replica.cache.believed { overlaps.blocks(slot) } else { 0 };
        let uncached = u64::from(manifest.input_tokens - state.overlap_tokens(manifest, overlap));
        match which {
            Signal::SessionFlag => {
                let last = state.sessions.last(manifest.session);
                Some(u64::from(last == Some((replica.facts.replica, replica.facts.epoch))))
            }
            Signal::OverlapBlocks => replica.cache.believed.then_some(u64::from(overlap)),
            Signal::EstPrefillUs => state.est_prefill_us(replica, uncached),
            Signal::EstCreditUs => {
                let blocks = request.need_blocks(state.config.block_size_tokens);
                let slots = u32::from(manifest.sequences);
                state.est_credit_us(replica, &Need { slots, prefill_tokens: uncached, blocks })
            }
            _ => None,
        }
    }
}

impl RowSource<ReplicaSignal> for ReplicaRows<'_> {
    fn rows(&self) -> usize {
        self.rows.len()
    }

    fn cell(&self, which: ReplicaSignal, row: usize) -> Option<u64> {
        use ReplicaSignal as Signal;
        let slot = *self.rows.get(row)?;
        let state = self.state;
        let replica = state.replicas.table.get(slot)?;
        let facts = &replica.facts;
        match which {
            Signal::KnownMask => None,
            Signal::ReplicaId => Some(u64::from(facts.replica.0)),
            Signal::ReplicaEpoch => Some(facts.epoch.0),
            Signal::RoleCode => Some(u64::from(facts.role_code)),
            Signal::SpeedPpm => Some(facts.speed_ppm),
            Signal::ReadyUs => Some(state.now.since(replica.since).as_us()),
            Signal::ZoneRank => Some(u64::from(facts.zone_rank)),
            Signal::CacheAgeUs => replica.cache.complete.then(|| state.now.since(replica.cache.as_of).as_us()),
            Signal::LoadAgeUs => replica.report.as_ref().map(|report| state.now.since(report.as_of).as_us()),
            Signal::TotalBlocks => Some(u64::from(facts.total_blocks)),
            Signal::SlotsRequests => Some(u64::from(facts.slots)),
            Signal::RoundTokens => Some(u64::from(facts.round_tokens)),
            Signal::CreditRequests => Some(u64::from(replica.credit().requests)),
            Signal::CreditTokens => Some(replica.credit().prefill_tokens),
            Signal::CreditBlocks => Some(replica.credit().blocks),
            Signal::InflightRequests => Some(u64::from(replica.requests.len)),
            Signal::InflightPrefillTokens => Some(replica.inflight_prefill_tokens),
            Signal::InflightBlocks => Some(replica.inflight.blocks),
            Signal::UnreportedRequests => Some(u64::from(replica.uncovered_requests)),
            Signal::UnreportedPrefillTokens => Some(replica.uncovered.prefill_tokens),
            Signal::UnreportedBlocks => Some(replica.uncovered.blocks),
            Signal::ActiveBlocks
            | Signal::CachedBlocks
            | Signal::FreeBlocks
            | Signal::ReservedBlocks
            | Signal::ReadyRequests
            | Signal::ReadyBlocks
            | Signal::RunningRequests
            | Signal::PrefillTokens
            | Signal::StepUs
            | Signal::BusyUs
            | Signal::HitBlocksPerSec
            | Signal::PreemptedRequests => self.cell_of_load(which, replica),
            Signal::SessionFlag | Signal::OverlapBlocks | Signal::EstPrefillUs | Signal::EstCreditUs => {
                self.cell_of_placing(which, slot, replica)
            }
            // No source yet: peers and transfer, topology labels, adapters, lower tiers, counts of failures.
            Signal::PeerRank
            | Signal::PeerBytesPerSec
            | Signal::PreferredFlag
            | Signal::AdapterFlag
            | Signal::FailedRequests
            | Signal::OverlapDramBlocks
            | Signal::OverlapSsdBlocks
            | Signal::TransferQueuedBytes
            | Signal::EstLoadUs
            | Signal::EstTransferUs => None,
        }
    }
}
