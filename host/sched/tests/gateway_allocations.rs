//! At steady state a step of the gateway allocates nothing.

#[path = "support/counting.rs"]
mod counting;

use std::collections::VecDeque;
use std::sync::Arc;

use penstock_base::{
    BlockKey, CancelCause, ClassRank, DispatchNumber, Duration, FlowId, Generation, Instant, Manifest, Outcome,
    Priority, ReplicaEpoch, ReplicaId, RequestId, SessionId, TenantId, TenantTerms, Traits, TrustGroup,
};
use penstock_policy_api::native::NativePolicies;
use penstock_sched::gateway::{
    DeliveryEvent, Gateway, GatewayConfig, GatewayEffect, GatewayEffects, GatewayInput, ReplicaFacts,
};
use penstock_sched::message::{CacheEvent, Credit, FromReplica, Load, Progress, Report, ToReplica, Usage};

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

fn manifest(n: u64, now: Instant) -> Arc<Manifest> {
    let keys: Vec<BlockKey> = (0..4).map(|at| BlockKey([(n % 50) as u8 + at; 16])).collect();
    Arc::new(Manifest {
        request: RequestId(n),
        tenant: TenantId(n % 40),
        flow: FlowId(n % 90),
        session: SessionId(n % 70),
        trust: TrustGroup(0),
        class: ClassRank::clamped((n % 8) as u8),
        priority: Priority(0),
        sequences: 1 + (n % 2) as u16,
        input_tokens: 64 + (n % 64) as u32,
        max_output_tokens: 32,
        arrived: now,
        deadline: if n.is_multiple_of(3) { now + Duration::from_s(5) } else { Instant::NEVER },
        slo_ttft: Duration::from_s(1),
        slo_tpot: Duration::from_ms(50),
        traits: Traits::STREAMING,
        prefix_key: keys[3].short(),
        keys: keys.into_boxed_slice(),
        retention: 50,
        retry: false,
        terms: TenantTerms::default(),
    })
}

struct Drive {
    gateway: Gateway,
    policies: NativePolicies,
    effects: GatewayEffects,
    now: Instant,
    /// Dispatched and not yet ended: replica, request, attempt.
    running: VecDeque<(u32, RequestId, u16)>,
    numbers: [u64; 4],
    reports: [u64; 4],
    cache: [u64; 4],
    counted: u64,
}

impl Drive {
    fn step(&mut self, input: GatewayInput) {
        self.effects.clear();
        self.now = self.now + Duration::from_us(700);
        let Self { gateway, policies, effects, now, .. } = self;
        self.counted += counting::allocations(|| gateway.step(*now, input, policies, effects));
        for effect in &self.effects {
            if let GatewayEffect::Send { replica, message: ToReplica::Dispatch(dispatch), .. } = effect {
                self.numbers[replica.0 as usize] = dispatch.number.0;
                self.running.push_back((replica.0, dispatch.manifest.request, dispatch.attempt));
            }
        }
    }

    fn hear(&mut self, replica: u32, message: FromReplica) {
        self.step(GatewayInput::Replica { replica: ReplicaId(replica), epoch: ReplicaEpoch(1), message });
    }

    fn report(&mut self, replica: u32) {
        let at = replica as usize;
        self.reports[at] += 1;
        let busy = self.running.iter().filter(|(other, ..)| *other == replica).count() as u32;
        let report = Report {
            number: self.reports[at],
            as_of: self.now,
            covers: DispatchNumber(self.numbers[at]),
            credit: Credit { requests: 12 - busy.min(12), prefill_tokens: 1_024, blocks: 500 },
            load: Load {
                total_blocks: 1_000,
                active_blocks: busy * 10,
                free_blocks: 1_000 - busy * 10,
                running_requests: busy,
                prefill_token_ns: 1_000,
                step: Duration::from_ms(10),
                ..Load::default()
            },
            cache_sequence: self.cache[at],
        };
        self.hear(replica, FromReplica::Report(report));
    }

    /// One request's worth of life: it arrives, others progress, end, are cancelled; replicas report and cache.
    fn round(&mut self, n: u64) {
        let manifest = manifest(n, self.now);
        self.step(GatewayInput::Arrive(manifest));
        if n.is_multiple_of(11) {
            self.step(GatewayInput::Cancel { request: RequestId(n), cause: CancelCause::Client });
        }
        for replica in 1..4 {
            self.report(replica);
        }
        let replica = 1 + (n % 3) as u32;
        self.cache[replica as usize] += 1;
        let sequence = self.cache[replica as usize];
        let event = CacheEvent::Stored { key: BlockKey([(n % 200) as u8; 16]), depth: 0 };
        self.hear(replica, FromReplica::Cache { sequence, event });
        while self.running.len() > 20 {
            let Some((replica, request, attempt)) = self.running.pop_front() else { break };
            self.hear(replica, FromReplica::Started { request, attempt, cached_tokens: 16 });
            let progress =
                Progress { request, attempt, prefill_tokens: 64, decode_tokens: 1, first_token: true, device_us: 9 };
            self.hear(replica, FromReplica::Progress(progress));
            self.step(GatewayInput::Delivery { request, event: DeliveryEvent::Streaming });
            let usage = Usage { prompt_tokens: 64, output_tokens: 20, ..Usage::default() };
            self.hear(replica, FromReplica::Ended { request, attempt, outcome: Outcome::Stop, usage });
            self.step(GatewayInput::Delivery { request, event: DeliveryEvent::Acknowledged });
        }
        self.step(GatewayInput::Tick);
    }
}

#[test]
fn a_step_allocates_nothing_at_steady_state() {
    let config = GatewayConfig {
        directory_keys_max: 150,
        flows_max: 120,
        tenants_max: 50,
        check_every_step: false,
        ..GatewayConfig::default()
    };
    let mut drive = Drive {
        gateway: Gateway::new(config, Instant::ZERO),
        policies: NativePolicies::new(Generation(1), 4_096),
        effects: Vec::with_capacity(4_096),
        now: Instant::ZERO,
        running: VecDeque::with_capacity(4_096),
        numbers: [0; 4],
        reports: [0; 4],
        cache: [0; 4],
        counted: 0,
    };
    for replica in 1..4 {
        drive.step(GatewayInput::ReplicaUp(ReplicaFacts {
            replica: ReplicaId(replica),
            epoch: ReplicaEpoch(1),
            role_code: 3,
            total_blocks: 1_000,
            slots: 12,
            round_tokens: 512,
            context_tokens_max: 4_096,
            speed_ppm: 1_000_000,
            zone_rank: 0,
            domain: 0,
        }));
    }
    (1..400).for_each(|n| drive.round(n));
    drive.counted = 0;
    let dispatched = drive.gateway.counters().dispatched;
    (400..3_000).for_each(|n| drive.round(n));
    assert!(drive.gateway.counters().dispatched > dispatched + 2_000);
    assert_eq!(drive.counted, 0);
    drive.gateway.check().expect("sound");
}
