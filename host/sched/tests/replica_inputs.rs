//! A driver and gateways that say anything at all: the machine stays whole, and each request that it took ends exactly once.

#[path = "support/content.rs"]
mod content;

use std::collections::BTreeMap;
use std::sync::Arc;

use content::mix;
use penstock_base::plan::{BatchFailure, Plan, RowDone};
use penstock_base::{
    BatchId, BlockKey, CancelCause, ClassRank, DispatchNumber, Duration, Failure, FlowId, GatewayEpoch, Generation,
    Instant, Manifest, Outcome, Priority, RequestId, SeqId, SessionId, TenantId, TenantTerms, Traits, TrustGroup,
};
use penstock_policy_api::native::NativePolicies;
use penstock_sched::message::{Dispatch, FromReplica, ReplicaStance, ToReplica};
use penstock_sched::replica::{
    FinishedTokens, Replica, ReplicaConfig, ReplicaEffect, ReplicaEvent, ReplicaInput, Watermarks,
};

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = mix(self.0, 0xbad);
        self.0
    }
    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// What became of one dispatch that was taken.
#[derive(Default)]
struct Taken {
    sequences: u16,
    ended: Vec<u16>,
    gateway: u16,
    told: u32,
}

struct World {
    random: Random,
    replica: Replica,
    policies: NativePolicies,
    now: Instant,
    plans: Vec<Plan>,
    taken: BTreeMap<RequestId, Taken>,
    up: Vec<u16>,
    number: u64,
}

impl World {
    fn manifest(&mut self, request: RequestId) -> Manifest {
        let random = &mut self.random;
        let input_tokens = [0, 1, 5, 8, 17, 40, 1_000, u32::MAX][random.below(8) as usize];
        let keys = if random.one_in(6) { random.below(20) } else { u64::from(input_tokens / 4).min(10) };
        Manifest {
            request,
            tenant: TenantId(random.below(3)),
            flow: FlowId(random.below(3)),
            session: SessionId(0),
            trust: TrustGroup(0),
            class: ClassRank::clamped(random.below(9) as u8),
            priority: Priority(random.next() as i32),
            sequences: random.below(11) as u16,
            input_tokens,
            max_output_tokens: [0, 1, 3, 9, 30, u32::MAX][random.below(6) as usize],
            arrived: Instant(random.below(1 << 40)),
            deadline: if random.one_in(3) { self.now + Duration(random.below(1 << 28)) } else { Instant::NEVER },
            slo_ttft: Duration(random.next()),
            slo_tpot: Duration(random.next()),
            traits: Traits(random.next() as u32),
            keys: (0..keys).map(|at| BlockKey([(at as u8) ^ (random.below(2) as u8); 16])).collect(),
            prefix_key: random.next(),
            retention: random.next() as u8,
            retry: random.one_in(2),
            terms: TenantTerms { cache_blocks_max: random.below(20), ..TenantTerms::default() },
        }
    }

    fn seq(&mut self) -> SeqId {
        let known: Vec<RequestId> = self.taken.keys().copied().collect();
        let request = match known.len() as u64 {
            0 => RequestId(self.random.next()),
            n => known[self.random.below(n) as usize],
        };
        SeqId { request, index: self.random.below(9) as u16 }
    }

    fn gateway(&mut self) -> GatewayEpoch {
        GatewayEpoch(self.random.below(20) as u16)
    }

    fn dispatch(&mut self) -> ReplicaInput {
        let gateway = if self.random.one_in(4) || self.up.is_empty() {
            self.gateway()
        } else {
            GatewayEpoch(self.up[self.random.below(self.up.len() as u64) as usize])
        };
        self.number += 1;
        let fresh = RequestId::new(gateway, self.number).expect("few requests");
        let request = if self.random.one_in(8) { self.seq().request } else { fresh };
        let manifest = Arc::new(self.manifest(request));
        let message = ToReplica::Dispatch(Dispatch {
            number: DispatchNumber(self.random.below(1_000)),
            manifest,
            attempt: self.random.below(3) as u16,
            class: ClassRank::clamped(self.random.below(9) as u8),
            max_output_tokens: [0, 1, 7, 20, u32::MAX][self.random.below(5) as usize],
            reserve_output_tokens: [0, 1, 7, u32::MAX][self.random.below(4) as usize],
            expected_output_tokens: self.random.next() as u32,
        });
        ReplicaInput::Gateway { gateway, message }
    }

    fn rows(&mut self) -> (BatchId, Vec<RowDone>, bool) {
        let Some(plan) = self.plans.first() else { return (BatchId(self.random.next()), Vec::new(), false) };
        let (id, planned) = (plan.batch, plan.rows.clone());
        if self.random.one_in(5) {
            return (BatchId(id.0 + 1 + self.random.below(3)), Vec::new(), false);
        }
        let mut rows = Vec::new();
        for row in planned {
            let seq = if self.random.one_in(30) { self.seq() } else { row.seq };
            let accepted = if self.random.one_in(20) { self.random.below(4) as u16 } else { u16::from(row.sample) };
            rows.push(RowDone { seq, accepted, stop: self.random.one_in(12) });
        }
        if self.random.one_in(20) {
            rows.truncate(self.random.below(rows.len() as u64 + 1) as usize);
        }
        (id, rows, true)
    }

    fn input(&mut self) -> ReplicaInput {
        match self.random.below(24) {
            0..=5 => self.dispatch(),
            6 => ReplicaInput::GatewayUp(self.gateway()),
            7 if self.random.one_in(3) => ReplicaInput::GatewayDown(self.gateway()),
            8..=13 => {
                let (batch, rows, _) = self.rows();
                let took = Duration(if self.random.one_in(20) { self.random.next() } else { 1_000_000 });
                ReplicaInput::BatchDone { batch, rows, took }
            }
            14 => {
                let (batch, done, _) = self.rows();
                let failure = if self.random.one_in(3) { BatchFailure::Batch } else { BatchFailure::Rows };
                let rows = (0..self.random.below(3)).map(|_| self.random.below(12) as u32).collect();
                ReplicaInput::BatchFailed { batch, failure, rows, done }
            }
            15 => {
                let (seq, tokens) = (self.seq(), self.random.below(6) as u32);
                ReplicaInput::Finish(FinishedTokens { seq, tokens, outcome: Outcome::Stop })
            }
            16 => {
                let (seq, first) = (self.seq(), self.random.below(12) as u32);
                let keys = (0..self.random.below(4)).map(|_| BlockKey([self.random.next() as u8; 16])).collect();
                ReplicaInput::BlockKeys { seq, first, keys }
            }
            17 => {
                let (request, gateway) = (self.seq().request, self.gateway());
                let outcome = Outcome::Cancelled(CancelCause::Client);
                let attempt = self.random.below(3) as u16;
                ReplicaInput::Gateway { gateway, message: ToReplica::Cancel { request, attempt, outcome } }
            }
            18 => {
                let stance = ReplicaStance {
                    number: self.random.below(50),
                    level: self.random.next() as u8,
                    preempt_blocks: self.random.next() >> self.random.below(64),
                    preempt_class: ClassRank::clamped(self.random.below(9) as u8),
                    tpot_target_us: self.random.next() as u32 >> self.random.below(32),
                };
                ReplicaInput::Gateway { gateway: self.gateway(), message: ToReplica::Stance(stance) }
            }
            19 => ReplicaInput::Policies(Generation(self.random.next())),
            20 => ReplicaInput::FlushCache,
            21 if self.random.one_in(60) => ReplicaInput::Drain,
            _ => ReplicaInput::Tick,
        }
    }

    fn step(&mut self, input: ReplicaInput) {
        let offered = match &input {
            ReplicaInput::Gateway { gateway, message: ToReplica::Dispatch(dispatch) } => {
                Some((dispatch.manifest.request, dispatch.manifest.sequences, gateway.0))
            }
            _ => None,
        };
        match input {
            ReplicaInput::GatewayUp(gateway) if !self.up.contains(&gateway.0) && self.up.len() < 16 => {
                self.up.push(gateway.0);
            }
            ReplicaInput::GatewayDown(gateway) => self.up.retain(|up| *up != gateway.0),
            _ => {}
        }
        let mut effects = Vec::new();
        let now = Instant(self.now.0.saturating_sub(self.random.below(3)));
        self.replica.step(now, input, &mut self.policies, &mut effects);
        let refused = |effect: &ReplicaEffect| {
            matches!(effect, ReplicaEffect::Send { message: FromReplica::Refuse { .. }, .. })
                || matches!(effect, ReplicaEffect::Event(ReplicaEvent::Stale))
        };
        if let Some((request, sequences, gateway)) = offered.filter(|_| !effects.iter().any(refused)) {
            let taken = Taken { sequences, gateway, ..Taken::default() };
            assert!(self.taken.insert(request, taken).is_none(), "taken twice at once");
        }
        for effect in effects {
            self.carry_out(effect);
        }
    }

    fn carry_out(&mut self, effect: ReplicaEffect) {
        match effect {
            ReplicaEffect::Submit(plan) => {
                assert!(plan.query_tokens() <= u64::from(self.replica.config().step_tokens));
                self.plans.push(plan);
            }
            ReplicaEffect::SequenceEnded { seq, .. } => {
                let taken = self.taken.get_mut(&seq.request).expect("only what was taken ends");
                assert!(seq.index < taken.sequences && !taken.ended.contains(&seq.index), "{seq} ends twice");
                taken.ended.push(seq.index);
                if taken.ended.len() == usize::from(taken.sequences) && !self.up.contains(&taken.gateway) {
                    self.taken.remove(&seq.request);
                }
            }
            ReplicaEffect::Send { gateway, message: FromReplica::Ended { request, .. } } => {
                let taken = self.taken.remove(&request).expect("each request ends once");
                assert_eq!((taken.ended.len() as u16, taken.gateway), (taken.sequences, gateway.0));
                assert_eq!(taken.told, 0);
            }
            ReplicaEffect::Event(ReplicaEvent::Broken(why)) => panic!("broken: {why}"),
            _ => {}
        }
    }
}

fn run(seed: u64) -> u64 {
    let mut random = Random(seed);
    let config = ReplicaConfig {
        blocks: 8 + random.below(24) as u32,
        block_size_tokens: 4,
        slots: 1 + random.below(10) as u32,
        step_tokens: 4 + random.below(20) as u32,
        context_tokens_max: 64,
        inflight_max: 1 + random.below(2) as usize,
        ready_window: random.below(3) as usize,
        check_every_step: true,
        watermarks: Watermarks { low_ppm: random.below(200_000), high_ppm: random.below(400_000) },
        ..ReplicaConfig::default()
    };
    let mut world = World {
        random,
        replica: Replica::new(config, Instant::ZERO),
        policies: NativePolicies::new(Generation(1), 64),
        now: Instant(1_000),
        plans: Vec::new(),
        taken: BTreeMap::new(),
        up: Vec::new(),
        number: 0,
    };
    let mut taken = 0;
    for _ in 0..300 {
        world.now = world.now + Duration(world.random.below(20_000_000));
        let input = world.input();
        let retires = match &input {
            ReplicaInput::BatchDone { batch, .. } | ReplicaInput::BatchFailed { batch, .. } => {
                world.plans.first().is_some_and(|plan| plan.batch == *batch)
            }
            _ => false,
        };
        if retires {
            let plan = world.plans.remove(0);
            world.replica.recycle(plan);
        }
        let before = world.taken.len();
        world.step(input);
        taken += world.taken.len().saturating_sub(before) as u64;
    }
    for _ in 0..10_000 {
        if world.replica.is_idle() {
            break;
        }
        if world.plans.is_empty() {
            world.now = world.now.max(world.replica.next_wake());
            world.step(ReplicaInput::Tick);
            continue;
        }
        let plan = world.plans.remove(0);
        let row =
            |row: &penstock_base::plan::PlanRow| RowDone { seq: row.seq, accepted: u16::from(row.sample), stop: false };
        let rows = plan.rows.iter().map(row).collect();
        world.step(ReplicaInput::BatchDone { batch: plan.batch, rows, took: Duration::from_ms(1) });
    }
    assert!(world.replica.is_idle() && world.taken.is_empty(), "what was taken has ended");
    taken
}

#[test]
fn anything_may_be_said_and_everything_taken_ends_once() {
    let mut taken = 0;
    for seed in 0..150 {
        taken += std::panic::catch_unwind(|| run(seed)).unwrap_or_else(|_| panic!("seed {seed}"));
    }
    assert!(taken > 1_000, "{taken}");
}

#[test]
fn a_lost_executor_ends_everything_as_retryable() {
    let mut policies = NativePolicies::new(Generation(1), 64);
    let config = ReplicaConfig { blocks: 16, context_tokens_max: 64, ..ReplicaConfig::default() };
    let mut replica = Replica::new(config, Instant::ZERO);
    let mut effects = Vec::new();
    let gateway = GatewayEpoch(1);
    replica.step(Instant::ZERO, ReplicaInput::GatewayUp(gateway), &mut policies, &mut effects);
    let (rows, done) = (Vec::new(), Vec::new());
    let lost = ReplicaInput::BatchFailed { batch: BatchId(1), failure: BatchFailure::Executor, rows, done };
    effects.clear();
    replica.step(Instant::ZERO, lost.clone(), &mut policies, &mut effects);
    assert!(replica.broken().is_none() && effects.contains(&ReplicaEffect::Event(ReplicaEvent::Stale)));
    let outcome = Outcome::Failed(Failure::ReplicaLost);
    let Outcome::Failed(failure) = outcome else { unreachable!() };
    assert!(failure.is_retryable());
}
