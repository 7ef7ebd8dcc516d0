//! What goes into the gateway machine and what comes out.

use alloc::sync::Arc;
use alloc::vec::Vec;

use penstock_base::{
    CancelCause, ClassRank, Duration, GatewayEpoch, Generation, Manifest, Outcome, ReplicaEpoch, ReplicaId, RequestId,
    TransferId,
};

use penstock_policy_api::FallbackReason;

use super::migrate::{MigrationCause, MigrationRefusal};
use crate::handoff::{End, Fallback, LeaseTerms, Timing, Topology};
use crate::message::{FromReplica, ToReplica, Usage};
use crate::quota::QuotaShare;

/// One thing that happened. The set is closed: a new feature is a new variant here.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum GatewayInput {
    /// A complete, authenticated, tokenised request.
    Arrive(Arc<Manifest>),
    /// The client left, reads too slowly, or an operator ended it. Idempotent.
    Cancel {
        /// Which.
        request: RequestId,
        /// Who.
        cause: CancelCause,
    },
    /// Something happened on the delivery axis.
    Delivery {
        /// Which.
        request: RequestId,
        /// What.
        event: DeliveryEvent,
    },
    /// A message of a replica. One of an older epoch is a counted no-op.
    Replica {
        /// Who.
        replica: ReplicaId,
        /// Its incarnation.
        epoch: ReplicaEpoch,
        /// What.
        message: FromReplica,
    },
    /// A replica is ready (a new epoch of a known one takes its place; the old one is lost).
    ReplicaUp(ReplicaFacts),
    /// A replica takes no new work and finishes what it has.
    ReplicaDrain {
        /// Which.
        replica: ReplicaId,
        /// Its incarnation.
        epoch: ReplicaEpoch,
    },
    /// A replica is gone, with everything on it.
    ReplicaDown {
        /// Which.
        replica: ReplicaId,
        /// Its incarnation.
        epoch: ReplicaEpoch,
    },
    /// A prepared policy set takes over with the next decision.
    Policies(Generation),
    /// With several gateways before the same replicas: what this one may give out of the tenants' quotas from now on.
    QuotaShare(QuotaShare),
    /// Nothing new is admitted from now on. Queued and running work goes on until the driver cancels it.
    Drain,
    /// Time passed: see [`Gateway::next_wake`](super::Gateway::next_wake).
    Tick,
}

/// The delivery axis of a request, apart from its compute axis.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeliveryEvent {
    /// The first byte of the answer was written.
    Streaming,
    /// The connection is gone.
    Disconnected,
    /// The terminal event was written.
    Acknowledged,
}

/// What the gateway must know of a replica before it may choose it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReplicaFacts {
    /// Which.
    pub replica: ReplicaId,
    /// Its incarnation.
    pub epoch: ReplicaEpoch,
    /// 1 computes prompts for others, 2 decodes what others computed (and whole requests), 3 whole requests alone.
    pub role_code: u8,
    /// Pool size.
    pub total_blocks: u32,
    /// Most sequences in a step.
    pub slots: u32,
    /// Token budget of a step.
    pub round_tokens: u32,
    /// Longest sequence.
    pub context_tokens_max: u32,
    /// Declared relative speed.
    pub speed_ppm: u64,
    /// Distance: 0 process, 1 host, 2 zone, 3 region, 4 other.
    pub zone_rank: u8,
    /// Where it is, for hand-offs: a host, a rack, whatever bandwidth depends on. Equal is near.
    pub domain: u32,
}

/// What the driver must do. In order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum GatewayEffect {
    /// Hand the message to the replica.
    Send {
        /// Whom.
        replica: ReplicaId,
        /// The incarnation that is meant; another one drops it.
        epoch: ReplicaEpoch,
        /// What.
        message: ToReplica,
    },
    /// The request waits in its flow's queue.
    Queued {
        /// Which.
        request: RequestId,
        /// Output cap in force (lower than asked when degraded).
        max_output_tokens: u32,
        /// The policy lowered the cap.
        degraded: bool,
    },
    /// The request was placed.
    Dispatched {
        /// Which.
        request: RequestId,
        /// Where.
        replica: ReplicaId,
        /// Incarnation.
        epoch: ReplicaEpoch,
        /// Which attempt.
        attempt: u16,
        /// Generation of the policy set that placed it.
        generation: Generation,
    },
    /// Its end, exactly once for each request that arrived. The driver closes the client's stream.
    Ended {
        /// Which.
        request: RequestId,
        /// How.
        outcome: Outcome,
        /// What was used.
        usage: Usage,
        /// For refusals that may be retried: when. Milliseconds, 0 is none.
        retry_after_ms: u32,
    },
    /// For metrics, logs and journals.
    Event(GatewayEvent),
}

/// Things worth counting. Nothing here carries text, and nothing is needed to serve.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GatewayEvent {
    /// An admission verdict: 0 admit, 1 defer, 2 degrade, 3 reject.
    Admission {
        /// About whom.
        request: RequestId,
        /// See above.
        verdict: u8,
        /// [`Refusal::code`](penstock_base::Refusal::code) of a reject.
        reason: u16,
    },
    /// A policy's answer was not used and the native default answered.
    Fallback {
        /// 0 admission, 1 routing, 2 fairness, 3 eviction, 4 overload.
        decision: u8,
        /// Number of the call; 0 when it failed on facts that it was told.
        call: u64,
        /// See [`fallback_code`].
        reason: u8,
    },
    /// A policy's answer stands, after a change that the contract names.
    Changed {
        /// As above.
        decision: u8,
        /// Number of the call.
        call: u64,
        /// The change, by its place in [`Change`](penstock_policy_api::validate::Change).
        change: u8,
    },
    /// What became of an answer about where a request runs. [`GatewayEffect::Dispatched`] says where it went.
    Routed {
        /// About whom.
        request: RequestId,
        /// Number of the call.
        call: u64,
        /// The first replicas of the ranking that was followed, best first; the rest is [`NO_REPLICA`].
        ranked: [ReplicaId; RANKED_TOLD],
        /// What became of it.
        made: RoutingMade,
    },
    /// The stance in force changed.
    Stance {
        /// 0..=4.
        level: u8,
    },
    /// A replica's credit was withheld for a request that keeps not fitting.
    HeldCredit {
        /// Whose credit.
        replica: ReplicaId,
    },
    /// The prompt of a request is to be computed at one replica, and decoded at another.
    HandoffBegun {
        /// Which request.
        request: RequestId,
        /// By which hand-off.
        transfer: TransferId,
        /// Who computes the prompt.
        sender: ReplicaId,
        /// Who decodes.
        receiver: ReplicaId,
    },
    /// How that ended.
    HandoffEnded {
        /// Which request.
        request: RequestId,
        /// Which hand-off.
        transfer: TransferId,
        /// How.
        end: End,
    },
    /// A request with output behind it left its replica and goes on at another one.
    Migrated {
        /// Which.
        request: RequestId,
        /// Where it was.
        from: ReplicaId,
        /// Why.
        cause: MigrationCause,
    },
    /// A request with output behind it would have had to leave its replica, and may not.
    MigrationRefused {
        /// Which.
        request: RequestId,
        /// Why it would have had to.
        cause: MigrationCause,
        /// Why not.
        why: MigrationRefusal,
    },
    /// Nothing moved for longer than the watchdog allows although work waits and a replica is ready.
    NoProgress,
    /// Something moved again after [`GatewayEvent::NoProgress`].
    ProgressResumed,
    /// An input that named an old epoch, an unknown or ended request, or an illegal move. Counted, without effect.
    Stale,
    /// The driver's clock ran backwards.
    ClockClamped,
    /// A gap in a replica's cache events: its part of the prefix index is dropped until it is complete again.
    CacheGap {
        /// Whose.
        replica: ReplicaId,
    },
    /// Another part of the tenants' quotas may be given out here from now on; the floor when a lease has ended.
    QuotaShare {
        /// How much, in parts per million.
        share_ppm: u64,
    },
    /// What is known of a replica's cache is believed again, or no longer: then its requests go by load alone.
    CacheBelief {
        /// Whose.
        replica: ReplicaId,
        /// See above.
        believed: bool,
    },
    /// An invariant does not hold: all requests end, and the driver ends this gateway. The name says which.
    Broken(&'static str),
}

/// Replicas of a ranking that [`GatewayEvent::Routed`] tells.
pub const RANKED_TOLD: usize = 4;

/// Stands where a ranking has no further replica.
pub const NO_REPLICA: ReplicaId = ReplicaId(u32::MAX);

/// What the gateway made of an answer about where a request runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RoutingMade {
    /// It was handed to a replica.
    Dispatched,
    /// It waits for the first ranked replica's next credit.
    Reserved,
    /// It is held back.
    Held,
    /// A hold was asked for and not granted; nobody took it either.
    NotHeld,
    /// Nobody takes it now: it waits in its place.
    NoCredit,
}

/// Stable number of why a native default answered: 0 no opinion, 1.. a fault (trap, fuel, epoch, memory, rebuilding), 16.. a malformed
/// proposal, in the order of [`Malformed`](penstock_policy_api::validate::Malformed).
pub fn fallback_code(reason: FallbackReason) -> u8 {
    match reason {
        FallbackReason::NoOpinion => 0,
        FallbackReason::Fault(kind) => 1 + kind as u8,
        FallbackReason::Malformed(why) => 16 + why as u8,
    }
}

/// The effects of one step, in a buffer that is reused.
pub type GatewayEffects = Vec<GatewayEffect>;

/// How a gateway is set up. Limits are at or below those of [`penstock_base::limits`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GatewayConfig {
    /// This incarnation.
    pub epoch: GatewayEpoch,
    /// Seed of everything that is random here.
    pub run_seed: u64,
    /// Tokens in a KV block.
    pub block_size_tokens: u32,
    /// KV bytes of one token.
    pub kv_token_bytes: u64,
    /// Gateways sharing the replicas. With one, quotas are its own; with more it gives out what [`GatewayInput::QuotaShare`] says.
    pub gateways: u32,
    /// With several: the part of each quota that this one gives out while it holds no lease, in parts per million. 0 refuses whoever has a
    /// quota. What all gateways have here together should be no more than a million.
    pub quota_floor_ppm: u32,
    /// Bound of the queue.
    pub queue_requests_max: u32,
    /// Bound of the queue in input tokens.
    pub queue_tokens_max: u64,
    /// Most requests dispatched and unfinished, those that were cancelled and are not yet confirmed by their replica included.
    pub running_requests_max: u32,
    /// Most deferred requests; their input tokens are bounded by `queue_tokens_max`, apart from the queue's.
    pub deferred_requests_max: u32,
    /// Most flows remembered.
    pub flows_max: usize,
    /// Most tenants in the ledger.
    pub tenants_max: usize,
    /// Most replicas known at once.
    pub replicas_max: usize,
    /// Longest sequence that the model takes: what is longer is refused even before a replica is known. [`u32::MAX`] is "ask the replicas".
    pub context_tokens_max: u32,
    /// Longest stay in the queue; then a typed timeout.
    pub queue_wait_max: Duration,
    /// Wait after which a request is served whatever the policy says.
    pub starve: Duration,
    /// Age of a load report from which it is stale.
    pub stale_load: Duration,
    /// Age of the prefix index from which it is stale.
    pub stale_cache: Duration,
    /// Time between two overload questions.
    pub overload_tick: Duration,
    /// Without any movement for this long while work waits: the watchdog speaks.
    pub no_progress: Duration,
    /// Length of a quota window.
    pub quota_window: Duration,
    /// Rows of one order call.
    pub order_rows: usize,
    /// Rows of one routing call.
    pub routing_rows: usize,
    /// Entries of the prefix index.
    pub directory_keys_max: usize,
    /// Attempts of one request over lost replicas, the first included.
    pub attempts_max: u16,
    /// How often a request with output behind it may go on at another replica, when its own is lost or drains. 0 is never.
    pub migrations_max: u16,
    /// Blocks kept for each class.
    pub class_floor_blocks: [u64; ClassRank::COUNT],
    /// First-token target of each class; [`Duration::MAX`] is none.
    pub class_slo_ttft: [Duration; ClassRank::COUNT],
    /// Classes that the product allows shedding.
    pub class_sheddable: [bool; ClassRank::COUNT],
    /// Capacity kept back.
    pub reserves: Reserves,
    /// How requests are handed off between replicas that compute prompts and replicas that decode; none is not at all.
    pub handoff: Option<HandoffConfig>,
    /// Run the full walk over the invariants at every step.
    pub check_every_step: bool,
}

/// When and how a request's prompt is computed at one replica and its answer at another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HandoffConfig {
    /// Patience.
    pub timing: Timing,
    /// As in the terms of the replicas.
    pub leases: LeaseTerms,
    /// Hand-offs at once, those that are being closed included.
    pub transfers: u32,
    /// Fewer prompt tokens to compute than this are not worth a transfer: the replica that decodes computes them too.
    pub prefill_tokens_min: u32,
    /// How much it matters that both ends are near each other.
    pub topology: Topology,
    /// What a request falls back to when its hand-off does not come about.
    pub fallback: Fallback,
}

impl GatewayConfig {
    /// The same, with every bound at or below its ceiling in [`penstock_base::limits`].
    pub fn within_limits(self) -> Self {
        use penstock_base::limits;
        let count = |value: u32, most: usize| value.min(u32::try_from(most).unwrap_or(u32::MAX));
        Self {
            block_size_tokens: self.block_size_tokens.max(1),
            quota_floor_ppm: self.quota_floor_ppm.min(1_000_000),
            queue_requests_max: count(self.queue_requests_max, limits::QUEUE_REQUESTS_MAX),
            queue_tokens_max: self.queue_tokens_max.min(limits::QUEUE_TOKENS_MAX),
            running_requests_max: count(self.running_requests_max, limits::RUNNING_REQUESTS_MAX),
            deferred_requests_max: count(self.deferred_requests_max, limits::DEFERRED_REQUESTS_MAX),
            flows_max: self.flows_max.clamp(1, limits::FLOWS_MAX),
            tenants_max: self.tenants_max.clamp(1, limits::TENANTS_MAX),
            replicas_max: self.replicas_max.clamp(1, limits::REPLICAS_MAX),
            order_rows: self.order_rows.clamp(1, limits::ORDER_ROWS_MAX),
            routing_rows: self.routing_rows.clamp(1, limits::ROUTING_ROWS_MAX),
            directory_keys_max: self.directory_keys_max.clamp(1, limits::DIRECTORY_KEYS_MAX),
            attempts_max: self.attempts_max.max(1),
            handoff: self.handoff.map(|handoff| HandoffConfig {
                transfers: handoff.transfers.clamp(1, limits::HANDOFF_COORDINATED_MAX),
                ..handoff
            }),
            ..self
        }
    }
}

/// Capacity that admission policies may keep back.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Reserves {
    /// For the loss of a replica.
    pub failover_blocks: u64,
    /// For a roll-out.
    pub deploy_blocks: u64,
    /// For bursts of class 5 and up.
    pub burst_blocks: u64,
}

impl Default for GatewayConfig {
    fn default() -> Self {
        use penstock_base::limits;
        Self {
            epoch: GatewayEpoch(1),
            run_seed: 0,
            block_size_tokens: 16,
            kv_token_bytes: 0,
            gateways: 1,
            quota_floor_ppm: 0,
            queue_requests_max: 1_024,
            queue_tokens_max: 4 << 20,
            running_requests_max: 4_096,
            deferred_requests_max: 1_024,
            flows_max: 16_384,
            tenants_max: 16_384,
            replicas_max: 256,
            context_tokens_max: u32::MAX,
            queue_wait_max: Duration::from_s(300),
            starve: Duration::from_s(30),
            stale_load: Duration::from_ms(500),
            stale_cache: Duration::from_s(2),
            overload_tick: Duration::from_ms(100),
            no_progress: Duration::from_s(30),
            quota_window: Duration::from_s(60),
            order_rows: limits::ORDER_ROWS_DEFAULT,
            routing_rows: limits::ROUTING_ROWS_DEFAULT,
            directory_keys_max: 1 << 16,
            attempts_max: 3,
            migrations_max: 0,
            class_floor_blocks: [0; ClassRank::COUNT],
            class_slo_ttft: [Duration::MAX; ClassRank::COUNT],
            class_sheddable: [true, true, true, false, false, false, false, false],
            reserves: Reserves::default(),
            handoff: None,
            check_every_step: cfg!(debug_assertions),
        }
    }
}
