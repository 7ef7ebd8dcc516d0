//! A gateway joined to real replicas by a mailbox, on a clock of its own: machines are sound after every step, and every request ends once.
#![allow(dead_code, reason = "each test file uses its part")]

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use penstock_base::codec::{Reader, Writer};
use penstock_base::plan::{Plan, RowDone};
use penstock_base::{
    BlockKey, ClassRank, Duration, FlowId, GatewayEpoch, Generation, Instant, Manifest, Outcome, Priority,
    ReplicaEpoch, ReplicaId, RequestId, SessionId, TenantId, TenantTerms, Traits, TrustGroup,
};
use penstock_policy_api::Policies;
use penstock_policy_api::native::NativePolicies;
use penstock_sched::gateway::{Gateway, GatewayConfig, GatewayEffect, GatewayEvent, GatewayInput, ReplicaFacts};
use penstock_sched::message::Usage;
use penstock_sched::replica::{Replica, ReplicaConfig, ReplicaEffect, ReplicaEvent, ReplicaInput};

#[path = "cluster_wires.rs"]
mod wires;

pub use wires::{Links, Wires};

const GATEWAY: GatewayEpoch = GatewayEpoch(1);
const STEP: Duration = Duration::from_ms(5);

pub struct Node {
    pub machine: Replica,
    pub policies: Box<dyn Policies>,
    /// Plans in flight and when they are computed.
    pub computing: VecDeque<(Instant, Plan)>,
    pub epoch: ReplicaEpoch,
}

/// What differs between clusters.
#[derive(Clone)]
pub struct Shape {
    pub replicas: u32,
    pub gateway: GatewayConfig,
    pub replica: ReplicaConfig,
    /// By replica, the first one's first; 3 where it says nothing.
    pub roles: Vec<u8>,
    /// Where each is, the same way; 0 where it says nothing.
    pub domains: Vec<u32>,
    /// What goes wrong between replicas.
    pub links: Links,
    /// Prompts that begin alike: so many kinds, 20 at most.
    pub families: u64,
}

impl Shape {
    /// Replicas that are seldom short of anything.
    pub fn roomy(replicas: u32, inflight_max: usize) -> Self {
        let replica = ReplicaConfig {
            blocks: 120,
            slots: 6,
            step_tokens: 64,
            chunk_tokens: 32,
            context_tokens_max: 512,
            inflight_max,
            check_every_step: true,
            ..ReplicaConfig::default()
        };
        Self {
            replicas,
            gateway: GatewayConfig::default(),
            replica,
            roles: Vec::new(),
            domains: Vec::new(),
            links: Links::default(),
            families: 3,
        }
    }
}

/// Makes the policies of one machine: the gateway's for 0, else the replica's.
pub type Cast = Box<dyn FnMut(u32) -> Box<dyn Policies>>;

pub struct Cluster {
    pub gateway: Gateway,
    pub policies: Box<dyn Policies>,
    pub nodes: BTreeMap<u32, Node>,
    pub now: Instant,
    pub ended: BTreeMap<RequestId, (Outcome, Usage)>,
    pub events: Vec<GatewayEvent>,
    pub replica_events: Vec<ReplicaEvent>,
    pub mail: VecDeque<Mail>,
    /// Steps of all machines.
    pub steps: u64,
    /// What lies in blocks, who may write to them, and what is on its way between replicas.
    pub wires: Wires,
    shape: Shape,
    cast: Cast,
}

pub enum Mail {
    ToGateway(GatewayInput),
    ToReplica(u32, ReplicaEpoch, ReplicaInput),
}

impl Cluster {
    /// Native policies everywhere.
    pub fn new(replicas: u32, inflight_max: usize) -> Self {
        Self::with(
            Shape::roomy(replicas, inflight_max),
            Box::new(|_| Box::new(NativePolicies::new(Generation(1), 512))),
        )
    }

    pub fn with(shape: Shape, mut cast: Cast) -> Self {
        let mut cluster = Self {
            gateway: Gateway::new(shape.gateway.clone(), Instant::ZERO),
            policies: cast(0),
            nodes: BTreeMap::new(),
            now: Instant::ZERO,
            ended: BTreeMap::new(),
            events: Vec::new(),
            replica_events: Vec::new(),
            mail: VecDeque::new(),
            steps: 0,
            wires: Wires::new(shape.links),
            shape,
            cast,
        };
        for replica in 1..=cluster.shape.replicas {
            cluster.start(replica, ReplicaEpoch(1));
        }
        cluster
    }

    pub fn start(&mut self, replica: u32, epoch: ReplicaEpoch) {
        let config = ReplicaConfig { replica: ReplicaId(replica), epoch, ..self.shape.replica.clone() };
        let facts = ReplicaFacts {
            replica: config.replica,
            epoch,
            role_code: self.shape.roles.get(replica as usize - 1).copied().unwrap_or(3),
            total_blocks: config.blocks,
            slots: config.slots,
            round_tokens: config.step_tokens,
            context_tokens_max: config.context_tokens_max,
            speed_ppm: 1_000_000,
            zone_rank: 0,
            domain: self.shape.domains.get(replica as usize - 1).copied().unwrap_or(0),
        };
        let machine = Replica::new(config, self.now);
        let policies = (self.cast)(replica);
        self.wires.start(replica, epoch, self.shape.replica.blocks);
        self.nodes.insert(replica, Node { machine, policies, computing: VecDeque::new(), epoch });
        self.mail.push_back(Mail::ToGateway(GatewayInput::ReplicaUp(facts)));
        self.mail.push_back(Mail::ToReplica(replica, epoch, ReplicaInput::GatewayUp(GATEWAY)));
    }

    pub fn deliver(&mut self) {
        while let Some(mail) = self.mail.pop_front() {
            match mail {
                Mail::ToGateway(input) => self.step_gateway(input),
                Mail::ToReplica(replica, epoch, input) => self.step_replica(replica, epoch, input),
            }
        }
    }

    fn step_gateway(&mut self, input: GatewayInput) {
        let mut effects = Vec::new();
        self.gateway.step(self.now, input, self.policies.as_mut(), &mut effects);
        self.gateway.check().expect("sound");
        self.steps += 1;
        for effect in effects {
            match effect {
                GatewayEffect::Send { replica, epoch, message } => {
                    let input = ReplicaInput::Gateway { gateway: GATEWAY, message };
                    self.mail.push_back(Mail::ToReplica(replica.0, epoch, input));
                }
                GatewayEffect::Ended { request, outcome, usage, .. } => {
                    assert_eq!(self.ended.insert(request, (outcome, usage)), None, "{request} ends once");
                }
                GatewayEffect::Event(event) => self.events.push(event),
                GatewayEffect::Queued { .. } | GatewayEffect::Dispatched { .. } => {}
            }
        }
    }

    fn step_replica(&mut self, replica: u32, epoch: ReplicaEpoch, input: ReplicaInput) {
        let Some(node) = self.nodes.get_mut(&replica).filter(|node| node.epoch == epoch) else { return };
        let mut effects = Vec::new();
        node.machine.step(self.now, input, node.policies.as_mut(), &mut effects);
        assert_eq!(node.machine.broken(), None);
        self.steps += 1;
        for effect in effects {
            let Some(node) = self.nodes.get_mut(&replica) else { return };
            match effect {
                ReplicaEffect::Submit(plan) => node.computing.push_back((self.now + STEP, plan)),
                ReplicaEffect::Send { message, .. } => {
                    let input = GatewayInput::Replica { replica: ReplicaId(replica), epoch, message };
                    self.mail.push_back(Mail::ToGateway(input));
                }
                ReplicaEffect::Event(event) => self.replica_events.push(event),
                ReplicaEffect::Handoff(effect) => self.hand_off((replica, epoch), effect),
                ReplicaEffect::Deliver { seq, tokens, first, .. } => {
                    self.wires.emit((replica, epoch), seq, first, u32::from(tokens));
                }
                ReplicaEffect::SequenceEnded { .. } | ReplicaEffect::Cached(_) => {}
            }
        }
    }

    /// Runs until `until`: finished steps, then whatever wants to be woken, earliest first.
    pub fn run(&mut self, until: Instant) {
        loop {
            self.deliver();
            self.wires.check(&self.nodes);
            let done = self.nodes.iter().filter_map(|(id, node)| node.computing.front().map(|(at, _)| (*at, *id)));
            let wakes = self.nodes.iter().map(|(id, node)| (node.machine.next_wake(), *id));
            let (done, wake) = (done.min(), wakes.min());
            let arrives = self.wires.next();
            let next = [done.map(|(at, _)| at), wake.map(|(at, _)| at), Some(self.gateway.next_wake()), arrives];
            let next = next.into_iter().flatten().min().expect("the gateway says when");
            if next > until {
                self.now = until;
                return;
            }
            self.now = self.now.max(next);
            if arrives.is_some_and(|at| at <= next) {
                self.arrive_by_wire();
                continue;
            }
            match (done, wake) {
                (Some((at, id)), _) if at <= next => {
                    let node = self.nodes.get_mut(&id).expect("it computes");
                    let (_, plan) = node.computing.pop_front().expect("a plan");
                    self.wires.compute((id, node.epoch), &plan);
                    let done = |row: &penstock_base::plan::PlanRow| RowDone {
                        seq: row.seq,
                        accepted: u16::from(row.sample),
                        stop: false,
                    };
                    let rows = plan.rows.iter().map(done).collect();
                    let epoch = node.epoch;
                    let input = ReplicaInput::BatchDone { batch: plan.batch, rows, took: STEP };
                    node.machine.recycle(plan);
                    self.step_replica(id, epoch, input);
                }
                (_, Some((at, id))) if at <= next => {
                    let epoch = self.nodes[&id].epoch;
                    self.step_replica(id, epoch, ReplicaInput::Tick);
                }
                _ => self.step_gateway(GatewayInput::Tick),
            }
        }
    }

    pub fn arrive(&mut self, n: u64) -> Arc<Manifest> {
        // Families of prompts, so that prefixes are found again.
        let family = n % self.shape.families;
        let input_tokens = 20 + (n * 37 % 150) as u32;
        let keys = (0..input_tokens / 16).map(|at| BlockKey([family as u8 * 12 + at as u8; 16])).collect();
        let manifest = Arc::new(Manifest {
            request: RequestId(n),
            tenant: TenantId(n % 4),
            flow: FlowId(n % 7),
            session: SessionId(n % 5),
            trust: TrustGroup(0),
            class: ClassRank::clamped((n % 5 + 1) as u8),
            priority: Priority(0),
            sequences: 1 + (n % 3) as u16,
            input_tokens,
            max_output_tokens: 4 + (n % 20) as u32,
            arrived: self.now,
            deadline: Instant::NEVER,
            slo_ttft: Duration::MAX,
            slo_tpot: Duration::MAX,
            traits: Traits::default(),
            keys,
            prefix_key: family + 1,
            retention: 50,
            retry: false,
            terms: TenantTerms::default(),
        });
        self.wires.know(&manifest, family);
        self.mail.push_back(Mail::ToGateway(GatewayInput::Arrive(manifest.clone())));
        manifest
    }

    /// Every machine is written down, and the one that is read back goes on.
    pub fn read_back(&mut self) {
        let written = |encode: &dyn Fn(&mut Writer)| {
            let mut out = Writer::new();
            encode(&mut out);
            out.into_bytes()
        };
        let bytes = written(&|out| self.gateway.encode(out));
        self.gateway = Gateway::decode(self.shape.gateway.clone(), &mut Reader::new(&bytes)).expect("just written");
        assert_eq!(written(&|out| self.gateway.encode(out)), bytes, "another gateway");
        for (id, node) in &mut self.nodes {
            let config = node.machine.config().clone();
            let bytes = written(&|out| node.machine.encode(out));
            node.machine = Replica::decode(config, &mut Reader::new(&bytes)).expect("just written");
            assert_eq!(written(&|out| node.machine.encode(out)), bytes, "another replica {id}");
        }
    }

    pub fn assert_at_rest(&self) {
        assert_eq!((self.gateway.live_requests(), self.gateway.running_requests()), (0, 0));
        for node in self.nodes.values() {
            let gauges = node.machine.gauges();
            assert_eq!((gauges.running_requests, gauges.ready_requests, gauges.reserved_blocks), (0, 0, 0));
            assert_eq!(gauges.blocks.active, 0, "no block is held for anybody");
            assert_eq!((gauges.blocks.in_transfer(), node.machine.handoffs()), (0, 0), "no hand-off is left");
        }
    }
}
