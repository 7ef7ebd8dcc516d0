//! What is simulated? Sizes, traffic and faults, all from one seed; each can be changed before the run.

use penstock_base::{ClassRank, Duration, Instant};
use penstock_sched::gateway::GatewayConfig;
use penstock_sched::replica::{ReplicaConfig, StepCost, Watermarks};

use crate::agenda::Latency;
use crate::cluster::{Cluster, Mishap, Sabotage};
use crate::cost::CostModel;
use crate::policies::PolicyKind;
use crate::rng::Rng;

/// Most requests of a scenario from a seed.
pub const REQUESTS_MAX: u32 = 200;

/// What goes wrong. A set of bits, so that a failing seed can be reduced one kind at a time.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Faults(pub u32);

macro_rules! faults {
    ($($(#[$doc:meta])* $name:ident = $bit:literal;)*) => {
        impl Faults {
            $($(#[$doc])* pub const $name: Self = Self(1 << $bit);)*
            /// Every kind with its name.
            pub const KINDS: &'static [(&'static str, Self)] = &[$((stringify!($name), Self::$name)),*];
        }
    };
}

faults! {
    /// Clients leave, at a moment or after some tokens.
    CANCELS = 0;
    /// Requests have deadlines, some of which cannot be met.
    DEADLINES = 1;
    /// Clients read too slowly.
    SLOW_CLIENTS = 2;
    /// Output ends at a stop string that only the text shows.
    STOP_STRINGS = 3;
    /// Keys of generated blocks, and ends found in text, come late.
    LATE_TEXT = 4;
    /// Replicas become many times slower for a while.
    SLOW_REPLICAS = 5;
    /// Replicas are lost and come back as a new epoch.
    LOST_REPLICAS = 6;
    /// The loss of a replica shows only when its new epoch reports ready.
    SILENT_LOSS = 7;
    /// A replica that is taken for lost goes on for a while.
    ZOMBIES = 8;
    /// Replicas drain and restart.
    DRAINS = 9;
    /// Rows of steps fail.
    FAILED_ROWS = 10;
    /// Whole steps fail.
    FAILED_BATCHES = 11;
    /// Executors lose their state.
    LOST_EXECUTORS = 12;
    /// Drivers' clocks run backwards now and then.
    CLOCK_STEPS = 13;
    /// Policy sets are exchanged.
    SWAPS = 14;
    /// Caches are flushed.
    FLUSHES = 15;
    /// Gateways stop admitting near the end.
    GATEWAY_DRAIN = 16;
    /// A gateway is lost with its clients, and a new epoch takes its place.
    GATEWAY_LOSS = 17;
    /// Of a cluster, as all that follow: words between replicas get lost.
    LOST_WORDS = 18;
    /// Words and chunks come twice.
    REPEATS = 19;
    /// Words and chunks overtake each other by far.
    OVERTAKING = 20;
    /// Chunks arrive broken.
    BROKEN_CHUNKS = 21;
    /// Links between replicas are slow, some become slower still.
    SLOW_LINKS = 22;
    /// Gateways and workers do not reach each other, for shorter or longer than their sessions last.
    CUT_CONTROL = 23;
    /// Replicas do not reach each other.
    CUT_DATA = 24;
    /// Gateways miss cache events, or get them late.
    LOST_EVENTS = 25;
}

/// Bits of the faults that only a cluster has.
const OF_CLUSTERS: u32 = !0 << 18;

impl Faults {
    /// Nothing goes wrong.
    pub const NONE: Self = Self(0);

    /// Is this kind among them?
    pub fn has(self, kind: Self) -> bool {
        self.0 & kind.0 == kind.0
    }

    /// Without this kind.
    pub fn without(self, kind: Self) -> Self {
        Self(self.0 & !kind.0)
    }

    /// All kinds.
    pub fn all() -> Self {
        Self(Self::KINDS.iter().fold(0, |bits, (_, kind)| bits | kind.0))
    }
}

impl std::fmt::Debug for Faults {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(Self::KINDS.iter().filter(|(_, kind)| self.has(*kind)).map(|(name, _)| name)).finish()
    }
}

/// Everything that decides a run.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Where all randomness comes from.
    pub seed: u64,
    /// Requests; fewer of them are the first ones of the same traffic.
    pub requests: u32,
    /// Gateways sharing the replicas.
    pub gateways: usize,
    /// Replicas.
    pub replicas: usize,
    /// How gateways are set up; the epoch is the world's.
    pub gateway: GatewayConfig,
    /// How replicas are set up; id and epoch are the world's.
    pub replica: ReplicaConfig,
    /// Device time of steps.
    pub cost: CostModel,
    /// How long messages travel between gateways and replicas.
    pub latency: Latency,
    /// Who asks for what.
    pub traffic: Traffic,
    /// What goes wrong.
    pub faults: Faults,
    /// Do the policies have whims?
    pub policies: PolicyKind,
    /// Further switches of every gateway to another policy set, the n-th of them to generation n. [`Faults::SWAPS`] has its own.
    pub switches: Vec<Instant>,
    /// Keep a log of every machine.
    pub journal: bool,
    /// Keep what happened to whom.
    pub trace: bool,
    /// Check all invariants after every so many steps of a machine.
    pub check_every: u64,
    /// Roles, links and sessions; none is replicas that take whole requests, over links that never fail.
    pub cluster: Option<Cluster>,
    /// What goes wrong right after the n-th step of a machine that has to do with a hand-off.
    pub mishaps: Vec<(u64, Mishap)>,
    /// What this driver does wrong.
    pub sabotage: Option<Sabotage>,
}

/// Who asks for what, and how fast.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Traffic {
    /// Mean time between two arrivals outside of bursts.
    pub gap: Duration,
    /// One in so many arrivals opens a burst; 0 is never.
    pub burst_one_in: u64,
    /// Tenants, each with its flows.
    pub tenants: u64,
    /// One in so many tenants has quotas; 0 is none.
    pub quota_one_in: u64,
    /// Prompt families: prompts of one share their first tokens.
    pub families: u64,
    /// Longest prompt.
    pub prompt_tokens_max: u64,
    /// Highest output cap.
    pub output_tokens_max: u64,
    /// Most answers to one request.
    pub sequences_max: u64,
}

impl Scenario {
    /// The scenario of a seed at an overlap depth. Both depths see the same traffic, sizes and faults.
    pub fn from_seed(seed: u64, inflight_max: usize) -> Self {
        let rng = &mut Rng::stream(seed, 1);
        let block_size_tokens = rng.pick(&[1, 2, 4, 4, 8, 16, 16]);
        let context_tokens_max = rng.between(48, 320) as u32;
        let slots = rng.between(1, 24) as u32;
        let step_tokens = rng.between(8, 256) as u32;
        let context_blocks = context_tokens_max.div_ceil(block_size_tokens);
        // Small pools, so that blocks run short.
        let blocks = context_blocks + rng.below(u64::from(context_blocks) * u64::from(slots) / 4 + 1) as u32;
        let gateways = if rng.one_in(3) { 2 } else { 1 };
        let replica = ReplicaConfig {
            run_seed: rng.word(),
            blocks,
            block_size_tokens,
            slots,
            step_tokens,
            chunk_tokens: rng.between(1, u64::from(step_tokens)) as u32,
            context_tokens_max,
            inflight_max,
            ready_window: rng.below(3) as usize,
            prefix_cache: !rng.one_in(6),
            watermarks: Watermarks { low_ppm: rng.below(100_000), high_ppm: 100_000 + rng.below(100_000) },
            victim_rows: rng.between(1, 16) as usize,
            eviction_rows: rng.between(1, 16) as usize,
            // The driver walks the invariants.
            check_every_step: false,
            ..ReplicaConfig::default()
        };
        let terms = StepCost {
            base_ns: rng.between(200_000, 4_000_000),
            prefill_token_ns: rng.between(10_000, 300_000),
            decode_row_ns: rng.between(50_000, 500_000),
            kv_token_ns: rng.below(1_000),
        };
        let gateway = gateway_config(rng, gateways, &replica);
        Self {
            seed,
            requests: rng.between(4, u64::from(REQUESTS_MAX)) as u32,
            gateways,
            replicas: rng.between(1, 4) as usize,
            gateway,
            replica,
            cost: CostModel { terms, jitter_ppm: rng.pick(&[0, 100_000, 500_000]) },
            latency: Latency { base: Duration(rng.below(2_000_000)), jitter: Duration(rng.below(3_000_000)) },
            traffic: Traffic {
                gap: Duration(rng.between(100_000, 60_000_000)),
                burst_one_in: rng.pick(&[0, 5, 20]),
                tenants: rng.pick(&[1, 3, 10, 60]),
                quota_one_in: rng.pick(&[0, 0, 3]),
                families: rng.between(1, 8),
                prompt_tokens_max: u64::from(context_tokens_max) * rng.pick(&[1, 2, 3, 4]) / 4,
                output_tokens_max: u64::from(context_tokens_max) / rng.pick(&[2, 4, 8]),
                sequences_max: rng.pick(&[1, 2, 8]).min(u64::from(slots)),
            },
            faults: some_faults(&mut Rng::stream(seed, 2)),
            policies: if rng.one_in(3) { PolicyKind::Plain } else { PolicyKind::Whims },
            switches: Vec::new(),
            journal: false,
            trace: false,
            check_every: 1,
            cluster: None,
            mishaps: Vec::new(),
            sabotage: None,
        }
    }

    /// The same without a kind of fault.
    pub fn without(&self, kind: Faults) -> Self {
        Self { faults: self.faults.without(kind), ..self.clone() }
    }
}

fn gateway_config(rng: &mut Rng, gateways: usize, replica: &ReplicaConfig) -> GatewayConfig {
    let floors = rng.one_in(4);
    let mut class_floor_blocks = [0; ClassRank::COUNT];
    let mut class_slo_ttft = [Duration::MAX; ClassRank::COUNT];
    for class in 0..ClassRank::COUNT {
        if floors && class >= 5 {
            class_floor_blocks[class] = rng.below(u64::from(replica.blocks / 4) + 1);
        }
        if rng.one_in(3) {
            class_slo_ttft[class] = Duration::from_ms(rng.between(20, 2_000));
        }
    }
    GatewayConfig {
        run_seed: rng.word(),
        block_size_tokens: replica.block_size_tokens,
        kv_token_bytes: 1_024,
        gateways: gateways as u32,
        queue_requests_max: rng.pick(&[2, 16, 64, 256]),
        queue_tokens_max: rng.between(u64::from(replica.context_tokens_max), 100_000),
        running_requests_max: rng.pick(&[4, 64, 256]),
        deferred_requests_max: rng.pick(&[1, 16]),
        flows_max: rng.pick(&[2, 16, 256]),
        tenants_max: rng.pick(&[8, 256]),
        replicas_max: 8,
        context_tokens_max: replica.context_tokens_max,
        queue_wait_max: Duration::from_ms(rng.between(500, 60_000)),
        starve: Duration::from_ms(rng.between(100, 10_000)),
        overload_tick: Duration::from_ms(rng.pick(&[50, 200])),
        quota_window: Duration::from_ms(rng.between(500, 10_000)),
        order_rows: rng.pick(&[1, 4, 128]),
        routing_rows: rng.pick(&[1, 64]),
        directory_keys_max: rng.pick(&[16, 4_096]),
        attempts_max: rng.between(1, 3) as u16,
        class_floor_blocks,
        class_slo_ttft,
        // The driver walks the invariants.
        check_every_step: false,
        ..GatewayConfig::default()
    }
}

/// A calm run one time in four; else each kind with one chance in three.
fn some_faults(rng: &mut Rng) -> Faults {
    if rng.one_in(4) {
        return Faults::NONE;
    }
    let kinds = Faults::KINDS.iter().filter(|(_, kind)| kind.0 & OF_CLUSTERS == 0);
    Faults(kinds.filter(|_| rng.one_in(3)).fold(0, |bits, (_, kind)| bits | kind.0))
}
