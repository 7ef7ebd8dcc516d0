//! A gateway and a replica, joined. Time is virtual: a step takes 25 ms and its rows sample at once, so that what is measured is the machines
//! and their policies.

use std::collections::VecDeque;
use std::sync::Arc;

use penstock_base::plan::{Plan, PlanRow, RowDone};
use penstock_base::{
    BlockKey, ClassRank, Duration, FlowId, GatewayEpoch, Instant, Manifest, Priority, ReplicaEpoch, ReplicaId,
    RequestId, SessionId, TenantId, TenantTerms, Traits, TrustGroup,
};
use penstock_sched::gateway::{Gateway, GatewayConfig, GatewayEffect, GatewayInput, ReplicaFacts};
use penstock_sched::replica::{Replica, ReplicaConfig, ReplicaEffect, ReplicaInput};

use crate::facts::{FLOWS, mix};
use crate::watch::{Seated, Spent, Watch};

const GATEWAY: GatewayEpoch = GatewayEpoch(1);
const REPLICA: ReplicaId = ReplicaId(1);
const EPOCH: ReplicaEpoch = ReplicaEpoch(1);
pub const STEP: Duration = Duration::from_ms(25);

/// How much there is to do.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Sequences in a step at most.
    pub sequences: u32,
    /// Blocks of the pool.
    pub blocks: u32,
    /// Requests that wait at the least: as many arrive before each step.
    pub waiting: usize,
    /// Shortest answer.
    pub output_tokens: u32,
}

impl Load {
    /// What the budget is about: 256 sequences, 64 flows with two requests waiting, and a cache that is full.
    pub const BUSY: Self = Self { sequences: 256, blocks: 13_312, waiting: 2 * FLOWS as usize, output_tokens: 64 };
}

/// The pair.
pub struct House<P: Seated> {
    gateway: Gateway,
    replica: Replica,
    at_gateway: Watch<P>,
    at_replica: Watch<P>,
    load: Load,
    computing: VecDeque<Plan>,
    mail: VecDeque<Mail>,
    now: Instant,
    arrived: u64,
    gateway_effects: Vec<GatewayEffect>,
    replica_effects: Vec<ReplicaEffect>,
}

enum Mail {
    ToGateway(GatewayInput),
    ToReplica(ReplicaInput),
}

impl<P: Seated> House<P> {
    pub fn new(load: Load, at_gateway: P, at_replica: P, clock_ns: u64) -> Self {
        let config = ReplicaConfig {
            replica: REPLICA,
            epoch: EPOCH,
            blocks: load.blocks,
            slots: load.sequences,
            step_tokens: 4_096,
            chunk_tokens: 512,
            context_tokens_max: 8_192,
            check_every_step: false,
            ..ReplicaConfig::default()
        };
        let facts = ReplicaFacts {
            replica: REPLICA,
            epoch: EPOCH,
            role_code: 3,
            total_blocks: config.blocks,
            slots: config.slots,
            round_tokens: config.step_tokens,
            context_tokens_max: config.context_tokens_max,
            speed_ppm: 1_000_000,
            zone_rank: 0,
            domain: 0,
        };
        let gateway = GatewayConfig { check_every_step: false, ..GatewayConfig::default() };
        let mail = [Mail::ToGateway(GatewayInput::ReplicaUp(facts)), Mail::ToReplica(ReplicaInput::GatewayUp(GATEWAY))];
        Self {
            gateway: Gateway::new(gateway, Instant::ZERO),
            replica: Replica::new(config, Instant::ZERO),
            at_gateway: Watch::new(at_gateway, clock_ns),
            at_replica: Watch::new(at_replica, clock_ns),
            load,
            computing: VecDeque::new(),
            mail: mail.into(),
            now: Instant::ZERO,
            arrived: 0,
            gateway_effects: Vec::new(),
            replica_effects: Vec::new(),
        }
    }

    /// One step of the replica with everything that belongs to it at the gateway. What the policies took.
    pub fn step(&mut self) -> Spent {
        self.now = self.now + STEP;
        while self.state().1 < self.load.waiting {
            self.arrive();
        }
        if self.gateway.next_wake() <= self.now {
            self.step_gateway(GatewayInput::Tick);
        }
        match self.computing.pop_front() {
            None => self.step_replica(ReplicaInput::Tick),
            Some(plan) => {
                let done = |row: &PlanRow| RowDone { seq: row.seq, accepted: u16::from(row.sample), stop: false };
                let rows = plan.rows.iter().map(done).collect();
                let input = ReplicaInput::BatchDone { batch: plan.batch, rows, took: STEP };
                self.replica.recycle(plan);
                self.step_replica(input);
            }
        }
        while let Some(mail) = self.mail.pop_front() {
            match mail {
                Mail::ToGateway(input) => self.step_gateway(input),
                Mail::ToReplica(input) => self.step_replica(input),
            }
        }
        self.at_gateway.between_steps(self.now);
        self.at_replica.between_steps(self.now);
        let mut spent = self.at_gateway.take();
        spent.add(&self.at_replica.take());
        spent
    }

    /// One more request.
    pub fn arrive(&mut self) {
        let manifest = self.next_arrival();
        self.step_gateway(GatewayInput::Arrive(manifest));
    }

    /// The policies of the gateway and of the replica.
    #[allow(dead_code, reason = "the tests that share this file look at the policies behind")]
    pub fn policies(&mut self) -> [&mut P; 2] {
        [self.at_gateway.inner(), self.at_replica.inner()]
    }

    /// Sequences that run and requests that wait.
    pub fn state(&self) -> (usize, usize) {
        let running = self.gateway.running_requests() as usize;
        (running, self.gateway.live_requests() - running)
    }

    /// Equal where two houses decided alike.
    pub fn digests(&self) -> (u64, u64) {
        (self.gateway.decision_digest(), self.replica.decision_digest())
    }

    fn step_gateway(&mut self, input: GatewayInput) {
        let mut effects = std::mem::take(&mut self.gateway_effects);
        self.gateway.step(self.now, input, &mut self.at_gateway, &mut effects);
        for effect in effects.drain(..) {
            if let GatewayEffect::Send { message, .. } = effect {
                self.mail.push_back(Mail::ToReplica(ReplicaInput::Gateway { gateway: GATEWAY, message }));
            }
        }
        self.gateway_effects = effects;
    }

    fn step_replica(&mut self, input: ReplicaInput) {
        let mut effects = std::mem::take(&mut self.replica_effects);
        self.replica.step(self.now, input, &mut self.at_replica, &mut effects);
        assert_eq!(self.replica.broken(), None, "the replica is sound");
        for effect in effects.drain(..) {
            match effect {
                ReplicaEffect::Submit(plan) => self.computing.push_back(plan),
                ReplicaEffect::Send { message, .. } => {
                    let input = GatewayInput::Replica { replica: REPLICA, epoch: EPOCH, message };
                    self.mail.push_back(Mail::ToGateway(input));
                }
                _ => {}
            }
        }
        self.replica_effects = effects;
    }

    /// Prompts of 256 to 767 tokens, of which the first 128 are one of sixteen; answers of up to 255 more than the shortest.
    fn next_arrival(&mut self) -> Arc<Manifest> {
        self.arrived += 1;
        let (n, draw) = (self.arrived, mix(self.arrived));
        let input_tokens = 256 + (draw % 512) as u32;
        let family = draw >> 32 & 15;
        let key = |at: u32| {
            let of = if at < 8 { mix(family << 32 | u64::from(at)) } else { mix(n << 32 | u64::from(at)) };
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&of.to_le_bytes());
            bytes[8..].copy_from_slice(&mix(of).to_le_bytes());
            BlockKey(bytes)
        };
        Arc::new(Manifest {
            request: RequestId(n),
            tenant: TenantId(n % 8),
            flow: FlowId(n % FLOWS + 1),
            session: SessionId(n % 512),
            trust: TrustGroup(0),
            class: ClassRank::clamped((draw >> 40 & 3) as u8 + 2),
            priority: Priority(0),
            sequences: 1,
            input_tokens,
            max_output_tokens: self.load.output_tokens + (draw >> 16 & 255) as u32,
            arrived: self.now,
            deadline: Instant::NEVER,
            slo_ttft: Duration::MAX,
            slo_tpot: Duration::MAX,
            traits: Traits::STREAMING,
            keys: (0..input_tokens / 16).map(key).collect(),
            prefix_key: family + 1,
            retention: 50,
            retry: false,
            terms: TenantTerms::default(),
        })
    }
}
