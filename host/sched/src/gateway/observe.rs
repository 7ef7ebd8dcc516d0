//! What a driver may look at between steps: cheap numbers for metrics, readiness and tests.

use penstock_base::{ClassRank, Generation, Instant, ReplicaEpoch, ReplicaId, RequestId, TenantId};

use super::Gateway;
use super::request::{Compute, Delivery};
use crate::message::{Credit, Load};

/// Counts since the start of the epoch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct GatewayCounters {
    /// Arrivals that were not duplicates.
    pub arrived: u64,
    /// Ends; each arrival has exactly one.
    pub ended: u64,
    /// Dispatches, re-placements included.
    pub dispatched: u64,
    /// Dispatches that a replica refused.
    pub refused_dispatches: u64,
    /// Requests that came back into the queue, refused or with a lost replica.
    pub returned: u64,
    /// Inputs without effect.
    pub stale: u64,
    /// Policy answers that were not used.
    pub fallbacks: u64,
    /// Changes of the stance.
    pub stances: u64,
    /// Times that a replica's credit was withheld for one request.
    pub withheld: u64,
    /// Times that requests were placed although `order` kept them waiting.
    pub keeps_ended: u64,
    /// Replicas that were not taken because too many are known.
    pub replicas_beyond_limit: u64,
    /// Requests that were computed at one replica and decoded at another.
    pub handed_off: u64,
    /// Requests that were to be, and stayed where their prompt was computed.
    pub kept_at_sender: u64,
    /// Requests that were to be, and went the whole path as a new attempt.
    pub handed_back: u64,
    /// Requests with output behind them that went on at another replica.
    pub migrated: u64,
}

/// One replica, as the gateway sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReplicaView {
    /// Which.
    pub replica: ReplicaId,
    /// Its incarnation.
    pub epoch: ReplicaEpoch,
    /// It takes no new work.
    pub draining: bool,
    /// What may be dispatched to it now.
    pub credit: Credit,
    /// Its load as last reported.
    pub load: Option<Load>,
    /// When that was true.
    pub load_as_of: Option<Instant>,
    /// Requests dispatched to it and unfinished, cancelled ones that it has not confirmed included.
    pub inflight_requests: u32,
    /// Its part of the prefix index is believed: complete, and agreed lately enough.
    pub cache_known: bool,
    /// Number of the last cache event taken.
    pub cache_sequence: u64,
}

impl Gateway {
    /// Requests in the queue.
    pub fn queued_requests(&self) -> u32 {
        self.state.queue.requests
    }

    /// Their input tokens.
    pub fn queued_tokens(&self) -> u64 {
        self.state.queue.tokens
    }

    /// Requests in the queue, of one class.
    pub fn queued_of(&self, class: ClassRank) -> u32 {
        self.state.queue.classes[class.index()].list.len
    }

    /// Deferred requests.
    pub fn deferred_requests(&self) -> u32 {
        self.state.deferred.len
    }

    /// Requests dispatched and unfinished, cancelled ones that their replica has not confirmed included.
    pub fn running_requests(&self) -> u32 {
        self.state.running_requests
    }

    /// The same, of one class.
    pub fn running_of(&self, class: ClassRank) -> u32 {
        self.state.inflight[class.index()].requests
    }

    /// Flows remembered.
    pub fn flows(&self) -> usize {
        self.state.flows.table.len()
    }

    /// Keys in the prefix index.
    pub fn directory_keys(&self) -> usize {
        self.state.directory.len()
    }

    /// Replicas by id.
    pub fn replicas(&self) -> impl Iterator<Item = ReplicaView> + '_ {
        self.state.replicas.iter().map(|(_, replica)| ReplicaView {
            replica: replica.facts.replica,
            epoch: replica.facts.epoch,
            draining: replica.draining,
            credit: replica.credit(),
            load: replica.load().copied(),
            load_as_of: replica.report.as_ref().map(|report| report.as_of),
            inflight_requests: replica.requests.len,
            cache_known: replica.cache.believed,
            cache_sequence: replica.cache.sequence,
        })
    }

    /// Replicas that take work.
    pub fn ready_replicas(&self) -> u32 {
        self.state.replicas.ready()
    }

    /// Level of the stance in force, 0..=4.
    pub fn stance_level(&self) -> u8 {
        self.state.stance.level()
    }

    /// Nothing new is admitted.
    pub fn is_draining(&self) -> bool {
        self.state.draining
    }

    /// Should new traffic be sent here? Not while draining, without a ready replica, while nothing moves
    /// although work waits, or when it is broken.
    pub fn is_ready(&self) -> bool {
        !self.state.draining && self.state.replicas.ready() > 0 && self.is_progressing() && self.broken().is_none()
    }

    /// Which invariant does not hold, if one was found not to.
    pub fn broken(&self) -> Option<&'static str> {
        self.state.soundness.broken
    }

    /// Did the watchdog find that things move?
    pub fn is_progressing(&self) -> bool {
        self.state.watch.is_progressing()
    }

    /// Generation of the policy set in the seats.
    pub fn generation(&self) -> Generation {
        self.state.generation
    }

    /// Tokens that a tenant has used or reserved in this window; `None` for one that is not remembered.
    pub fn tenant_used_tokens(&self, tenant: TenantId) -> Option<u64> {
        self.state.ledger.find(tenant).map(|tenant| tenant.used_tokens())
    }

    /// Where a request is on both axes, while it is known: it stays so until its resources are settled.
    pub fn request_state(&self, request: RequestId) -> Option<(Compute, Delivery)> {
        let slot = self.state.requests.table.find(&request)?;
        let request = &self.state.requests.table[slot];
        Some((request.compute, request.delivery))
    }

    /// Live requests: deferred, waiting, dispatched, settling.
    pub fn live_requests(&self) -> usize {
        self.state.requests.table.len()
    }

    /// Counts since the start.
    pub fn counters(&self) -> GatewayCounters {
        self.state.counters
    }

    /// Digest over all decisions since the start.
    pub fn decision_digest(&self) -> u64 {
        self.state.digest.value()
    }
}
