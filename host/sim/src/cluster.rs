//! What is simulated of a cluster? Roles, the links between replicas, sessions between gateways and workers, and what goes wrong with them.

use penstock_base::{Duration, ReplicaEpoch, ReplicaId};
use penstock_sched::gateway::HandoffConfig;
use penstock_sched::handoff::{Fallback, LeaseTerms, PROTOCOL_VERSION, PartyConfig, Peer, Terms, Timing, Topology};

use crate::agenda::{Latency, Node};
use crate::network::{DataLink, Ways};
use crate::rng::{Rng, mix};
use crate::scenario::{Faults, Scenario};

/// Layers of the simulated model. They travel together: a step computes all of them before any can be read.
pub const LAYERS: u32 = 4;

/// Everything about a cluster that one replica alone has not.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cluster {
    /// By replica, the first one's first: 1 computes prompts for others, 2 decodes, 3 takes whole requests alone.
    pub roles: Vec<u8>,
    /// Where each is, the same way; 0 where it says nothing.
    pub domains: Vec<u32>,
    /// When and how requests are handed off.
    pub handoff: HandoffConfig,
    /// A replica's side of it; who it is comes from the world.
    pub party: PartyConfig,
    /// KV of one token of the model.
    pub kv_token_bytes: u64,
    /// Links between replicas.
    pub data: DataLink,
    /// A session between a gateway and a worker is over after so long without a connection, by the clock of each end.
    pub session_lease: Duration,
    /// How long it takes to connect again once a link is whole.
    pub reconnect: Duration,
    /// Once posted, a write goes on whatever the receiver's replica does: a fence stops no write, it waits for those that are under way.
    pub one_sided: bool,
}

/// One thing that goes wrong at a step of the protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mishap {
    /// A replica crashes and comes back as another epoch.
    LoseReplica {
        /// By place.
        replica: usize,
        /// How long it is away.
        down: Duration,
    },
    /// A gateway crashes and comes back as another epoch.
    LoseGateway {
        /// By place.
        gateway: usize,
        /// How long it is away.
        down: Duration,
    },
    /// Two nodes do not reach each other.
    Cut {
        /// Between whom.
        pair: (Node, Node),
        /// Which ways.
        ways: Ways,
        /// How long.
        lasts: Duration,
    },
}

/// A fault of the driver itself, for the tests of the checkers: each must be found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sabotage {
    /// A fence is confirmed at once and lets writes in for ever; each write lands a second time, later, with another content.
    SkipFence,
    /// Nobody looks at what arrived: it is said to be what was sent.
    BlindSums,
    /// A replica that computed a prompt for another one also releases its first token.
    EmitTwice,
    /// The third token of each answer is lost on its way to the client.
    LoseToken,
    /// Every end is told to the gateway's client twice.
    EndTwice,
    /// A mover that is told to stop writing goes on, and never says that it has read everything.
    KeepLeases,
    /// Chunks are read from the block behind the right one.
    WrongBlock,
    /// The first token that travels is another one than was sampled.
    SwapTail,
}

/// What all replicas of a simulated cluster state of their KV.
pub fn terms(block_size_tokens: u32, leases: LeaseTerms) -> Terms {
    Terms {
        version: PROTOCOL_VERSION,
        model: [1; 32],
        tokenizer: [2; 32],
        dtype_code: 0,
        block_size_tokens,
        layers: LAYERS,
        layout: [3; 32],
        slices: 1,
        transport_code: 0,
        leases,
    }
}

impl Cluster {
    /// A cluster with these roles, defaults of the product and fast links.
    pub fn of(roles: Vec<u8>, block_size_tokens: u32) -> Self {
        let handoff = HandoffConfig::default();
        let me = Peer { replica: ReplicaId(0), epoch: ReplicaEpoch(0) };
        let party = PartyConfig::new(me, terms(block_size_tokens, handoff.leases));
        Self {
            roles,
            domains: Vec::new(),
            handoff,
            party: PartyConfig { chunk_layers: LAYERS, ..party },
            kv_token_bytes: 23_040,
            data: DataLink {
                bytes_per_sec: 10_000_000_000,
                latency: Latency { base: Duration::from_us(20), jitter: Duration::from_us(20) },
            },
            session_lease: Duration::from_s(10),
            reconnect: Duration::from_ms(50),
            one_sided: false,
        }
    }

    /// Role of a replica.
    pub fn role(&self, replica: usize) -> u8 {
        self.roles.get(replica).copied().unwrap_or(3)
    }

    /// Where a replica is.
    pub fn domain(&self, replica: usize) -> u32 {
        self.domains.get(replica).copied().unwrap_or(0)
    }

    /// How long anything of a hand-off may be held after the last fault (docs/handoff.md), and a session.
    pub fn bound(&self) -> Duration {
        let (timing, leases) = (self.handoff.timing, self.handoff.leases);
        let waits = timing.reserve.0 + timing.open.0 + timing.transfer.0 + 3 * timing.settle.0;
        Duration(waits + 3 * leases.hold.0 + 2 * leases.grace.0 + 2 * self.session_lease.0)
    }

    fn from_seed(seed: u64, scenario: &Scenario, faults: Faults) -> Self {
        let rng = &mut Rng::stream(mix(seed, 30), 1);
        let (prefill, decode, whole) = (rng.between(1, 3), rng.between(1, 3), rng.below(3));
        let role = |role: u8, count: u64| std::iter::repeat_n(role, count as usize);
        let mut roles: Vec<u8> = role(1, prefill).chain(role(2, decode)).chain(role(3, whole)).collect();
        // Which place has which role is no rule.
        for at in (1..roles.len()).rev() {
            roles.swap(at, rng.below(at as u64 + 1) as usize);
        }
        let leases = LeaseTerms {
            hold: Duration::from_ms(rng.pick(&[800, 3_000])),
            write: Duration::from_ms(rng.pick(&[300, 1_000])),
            grace: Duration::from_ms(rng.pick(&[300, 2_000])),
        };
        let timing = Timing {
            transfer: Duration::from_s(rng.pick(&[2, 10])),
            waiting: Duration::from_s(rng.pick(&[1, 5])),
            bootstrap: Duration::from_s(rng.pick(&[1, 5])),
            ..Timing::default()
        };
        let handoff = HandoffConfig {
            timing,
            leases,
            transfers: rng.pick(&[1, 4, 64]) as u32,
            prefill_tokens_min: rng.pick(&[1, 8, 40]) as u32,
            topology: rng.pick(&[Topology::Any, Topology::Preferred, Topology::Required]),
            fallback: rng.pick(&[Fallback::AtSender, Fallback::AtSender, Fallback::Anew, Fallback::Never]),
        };
        let size = scenario.replica.block_size_tokens;
        let plain = Self::of(roles, size);
        let party = PartyConfig {
            terms: terms(size, leases),
            timing,
            transfers: rng.pick(&[2, 8, 64]) as u32,
            window: rng.pick(&[1, 4, 16]) as u32,
            inflight_chunks: rng.pick(&[2, 64]) as u32,
            held_blocks: rng.pick(&[64, 4_096]) as u32,
            chunk_blocks: rng.pick(&[1, 2, 8]) as u32,
            ..plain.party
        };
        let slow = faults.has(Faults::SLOW_LINKS);
        let data = DataLink {
            // From a tenth of a gigabit up; slow links take a part of that again.
            bytes_per_sec: rng.pick(&[12_500_000, 125_000_000, 3_000_000_000]) / if slow { 4 } else { 1 },
            latency: Latency { base: Duration(rng.below(1_000_000)), jitter: Duration(rng.below(2_000_000)) },
        };
        let domains = plain.roles.iter().map(|_| rng.below(2) as u32).collect();
        let session_lease = Duration::from_s(rng.pick(&[2, 10]));
        let one_sided = rng.one_in(3);
        Self { domains, handoff, party, data, session_lease, one_sided, ..plain }
    }
}

impl Scenario {
    /// The cluster of a seed at an overlap depth: replicas with roles, sessions that end, links that fail.
    pub fn cluster_from_seed(seed: u64, inflight_max: usize) -> Self {
        let mut scenario = Self::from_seed(mix(seed, 31), inflight_max);
        let rng = &mut Rng::stream(mix(seed, 30), 0);
        let calm = rng.one_in(6);
        let pick =
            |rng: &mut Rng| Faults::KINDS.iter().filter(|_| rng.one_in(4)).fold(0, |bits, (_, kind)| bits | kind.0);
        scenario.seed = seed;
        scenario.faults = if calm { Faults::NONE } else { Faults(pick(rng)) };
        scenario.gateways = rng.pick(&[1, 1, 2, 3]) as usize;
        scenario.gateway.gateways = scenario.gateways as u32;
        scenario.gateway.replicas_max = 16;
        scenario.requests = scenario.requests.min(100);
        scenario.replica.slots = scenario.replica.slots.max(2);
        // A promise of the whole answer beside a prompt that lands: pools as small as one context take turns for ever.
        scenario.replica.blocks *= 2;
        let cluster = Cluster::from_seed(seed, &scenario, scenario.faults);
        scenario.replicas = cluster.roles.len();
        // Most requests have one answer: others are not handed off.
        scenario.traffic.sequences_max = rng.pick(&[1, 1, 1, 2]).min(u64::from(scenario.replica.slots));
        scenario.gateway.handoff = Some(cluster.handoff);
        scenario.cluster = Some(cluster);
        scenario
    }
}
