//! Random inputs, valid and not: the machine stays sound after every step, ends each arrival once, and a copy goes on like the original.

#[path = "support/gateway_policies.rs"]
mod policies;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use penstock_base::codec::{Reader, Writer};
use penstock_base::{
    BlockKey, CancelCause, ClassRank, DispatchNumber, Duration, FlowId, Generation, Instant, Manifest, Outcome,
    Priority, RefuseReason, ReplicaEpoch, ReplicaId, RequestId, SessionId, TenantId, TenantTerms, Traits, TrustGroup,
};
use penstock_policy_api::{Action, ActionKind, Answer, Decision, FactSet, Rest, Stance, Verdict};
use penstock_sched::gateway::{
    DeliveryEvent, Gateway, GatewayConfig, GatewayEffect, GatewayEffects, GatewayInput, ReplicaFacts,
};
use penstock_sched::message::{CacheEvent, Credit, FromReplica, Load, Progress, Report, ToReplica, Usage};
use penstock_sched::quota::{QuotaShare, QuotaSlots, SLOTS};
use policies::{Admit, Give, Order, Route, Scripted};

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
    fn pick<T: Copy>(&mut self, of: &[T]) -> Option<T> {
        if of.is_empty() { None } else { Some(of[self.below(of.len() as u64) as usize]) }
    }
}

/// A replica as the test plays it.
#[derive(Default)]
struct Peer {
    epoch: u64,
    reports: u64,
    received: u64,
    cache_sequence: u64,
    slots: u32,
    blocks: u32,
    /// Dispatches taken: request, attempt, number, sequences, blocks reserved.
    running: Vec<Taken>,
    /// The last report that counts: number, what it covers, what it grants.
    report: Option<(u64, u64, Credit)>,
}

#[derive(Clone, Copy)]
struct Taken {
    request: RequestId,
    attempt: u16,
    number: DispatchNumber,
    sequences: u16,
    blocks: u64,
    started: bool,
}

struct Life {
    gateway: Gateway,
    policies: Scripted,
    config: GatewayConfig,
    now: Instant,
    next_id: u64,
    arrived: BTreeSet<RequestId>,
    ended: BTreeMap<RequestId, Outcome>,
    peers: BTreeMap<u32, Peer>,
    random: Random,
}

const BLOCK: u32 = 16;

impl Life {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let config = GatewayConfig {
            run_seed: seed,
            queue_requests_max: 1 + random.below(24) as u32,
            queue_tokens_max: 200 + random.below(4_000),
            running_requests_max: 1 + random.below(24) as u32,
            deferred_requests_max: random.below(6) as u32,
            flows_max: 8 + random.below(80) as usize,
            tenants_max: 3 + random.below(6) as usize,
            replicas_max: 1 + random.below(5) as usize,
            order_rows: 1 + random.below(12) as usize,
            routing_rows: 1 + random.below(4) as usize,
            directory_keys_max: 4 + random.below(40) as usize,
            queue_wait_max: Duration::from_ms(200 + random.below(3_000)),
            starve: Duration::from_ms(50 + random.below(1_000)),
            no_progress: Duration::from_ms(500),
            quota_window: Duration::from_ms(400),
            overload_tick: Duration::from_ms(10 + random.below(100)),
            class_slo_ttft: [Duration::from_ms(100); ClassRank::COUNT],
            ..GatewayConfig::default()
        };
        let wants = random.one_in(2);
        let facts = |decision| if wants { FactSet::all_for(decision) } else { FactSet::NONE };
        Self {
            gateway: Gateway::new(config.clone(), Instant::ZERO),
            policies: Scripted::with(facts(Decision::Fairness), facts(Decision::Admission)),
            config,
            now: Instant::ZERO,
            next_id: 0,
            arrived: BTreeSet::new(),
            ended: BTreeMap::new(),
            peers: BTreeMap::new(),
            random,
        }
    }

    fn manifest(&mut self) -> Manifest {
        let r = &mut self.random;
        self.next_id += 1;
        let tenant = r.below(4);
        let class = r.below(8) as u8;
        let input_tokens = 1 + r.below(200) as u32;
        let family = r.below(3) as u8;
        let keys: Vec<BlockKey> = (0..input_tokens / BLOCK)
            .map(|at| BlockKey([family.wrapping_mul(40).wrapping_add(at as u8); 16]))
            .collect();
        let mut traits = Traits::default();
        for bit in 0..7 {
            if r.one_in(3) {
                traits = traits.with(Traits(1 << bit));
            }
        }
        Manifest {
            request: RequestId(self.next_id),
            tenant: TenantId(tenant),
            flow: FlowId(tenant * 100 + u64::from(class) * 10 + r.below(3)),
            session: SessionId(r.below(3)),
            trust: TrustGroup(tenant),
            class: ClassRank::clamped(class),
            priority: Priority(r.below(5) as i32 - 2),
            sequences: if r.one_in(40) { 9 } else { 1 + r.below(3) as u16 },
            input_tokens,
            max_output_tokens: 1 + r.below(100) as u32,
            arrived: self.now,
            deadline: if r.one_in(3) { self.now + Duration::from_ms(r.below(500)) } else { Instant::NEVER },
            slo_ttft: if r.one_in(3) { Duration::from_ms(50) } else { Duration::MAX },
            slo_tpot: if r.one_in(3) { Duration::from_ms(5) } else { Duration::MAX },
            traits,
            prefix_key: keys.get(3).map_or(0, |key| key.short()),
            keys: keys.into_boxed_slice(),
            retention: 50,
            retry: r.one_in(9),
            terms: TenantTerms {
                requests_max: 2 + r.below(30) as u32,
                window_tokens_max: if tenant == 0 { u64::MAX } else { 5_000 + 5_000 * tenant },
                guaranteed_tokens: 300 * tenant,
                borrow_tokens_max: 200,
                ..TenantTerms::default()
            },
        }
    }

    fn input(&mut self) -> GatewayInput {
        let known: Vec<RequestId> = self.arrived.iter().copied().rev().take(20).collect();
        let some_request = self.random.pick(&known).unwrap_or(RequestId(77_777));
        match self.random.below(40) {
            0..=11 => GatewayInput::Arrive(Arc::new(self.manifest())),
            12..=13 => GatewayInput::Cancel { request: some_request, cause: CancelCause::Client },
            14 => {
                let events = [DeliveryEvent::Streaming, DeliveryEvent::Disconnected, DeliveryEvent::Acknowledged];
                GatewayInput::Delivery { request: some_request, event: self.random.pick(&events).expect("one") }
            }
            15 if self.random.one_in(3) => {
                let replica = ReplicaId(1 + self.random.below(6) as u32);
                let known = self.peers.get(&replica.0).map_or(0, |peer| peer.epoch);
                let epoch = ReplicaEpoch(known + self.random.below(3));
                GatewayInput::ReplicaUp(self.facts(replica, epoch))
            }
            16 if self.random.one_in(4) => {
                let (replica, epoch) = self.some_replica();
                if self.random.one_in(2) {
                    GatewayInput::ReplicaDown { replica, epoch }
                } else {
                    GatewayInput::ReplicaDrain { replica, epoch }
                }
            }
            17 => GatewayInput::Policies(Generation(self.random.below(5))),
            18 if self.random.one_in(200) => GatewayInput::Drain,
            18 if self.random.one_in(3) => {
                let mut slots = QuotaSlots::NONE;
                (0..SLOTS).filter(|_| self.random.one_in(2)).for_each(|slot| slots.insert(slot));
                let as_of = Instant(self.now.0.saturating_sub(self.random.below(2_000_000_000)));
                let until = as_of + Duration::from_ms(self.random.below(4_000));
                GatewayInput::QuotaShare(QuotaShare { slots, members: 2, as_of, until })
            }
            19..=22 => GatewayInput::Tick,
            _ => self.message(),
        }
    }

    fn facts(&mut self, replica: ReplicaId, epoch: ReplicaEpoch) -> ReplicaFacts {
        ReplicaFacts {
            replica,
            epoch,
            role_code: if self.random.one_in(8) { 1 } else { 3 },
            total_blocks: 16 + self.random.below(120) as u32,
            slots: 2 + self.random.below(8) as u32,
            round_tokens: 64,
            context_tokens_max: 200 + self.random.below(200) as u32,
            speed_ppm: 1_000_000,
            zone_rank: 0,
            domain: 0,
        }
    }

    fn some_replica(&mut self) -> (ReplicaId, ReplicaEpoch) {
        let known: Vec<u32> = self.gateway.replicas().map(|view| view.replica.0).collect();
        let ids: Vec<u32> = if self.random.one_in(10) { self.peers.keys().copied().collect() } else { known };
        let id = self.random.pick(&ids).unwrap_or(1);
        let epoch = self.peers.get(&id).map_or(1, |peer| peer.epoch);
        let off = if self.random.one_in(12) { self.random.below(2) } else { 0 };
        (ReplicaId(id), ReplicaEpoch(epoch.saturating_sub(off)))
    }

    fn message(&mut self) -> GatewayInput {
        let (replica, epoch) = self.some_replica();
        let r = &mut self.random;
        let Some(peer) = self.peers.get_mut(&replica.0) else {
            return GatewayInput::Replica {
                replica,
                epoch,
                message: FromReplica::Cache { sequence: 1, event: CacheEvent::Cleared },
            };
        };
        let taken = r.pick(&peer.running);
        let (request, attempt) = match taken {
            Some(taken) if !r.one_in(12) => (taken.request, taken.attempt),
            _ => (RequestId(r.below(self.next_id + 2)), r.below(3) as u16),
        };
        let message = match r.below(12) {
            0..=4 => {
                peer.reports += u64::from(!r.one_in(8));
                let total = peer.blocks;
                let covered = peer.report.map_or(0, |(_, covers, _)| covers);
                let covers = if r.one_in(15) {
                    r.below(peer.received + 2)
                } else {
                    covered + r.below(peer.received - covered + 1)
                };
                let active = r.below(u64::from(total) + 1) as u32;
                FromReplica::Report(Report {
                    number: peer.reports,
                    as_of: self.now - Duration::from_ms(r.below(30)),
                    covers: DispatchNumber(covers),
                    credit: Credit {
                        requests: r.below(u64::from(peer.slots) + 2) as u32,
                        prefill_tokens: r.below(300),
                        blocks: u64::from(total - active),
                    },
                    load: Load {
                        total_blocks: total,
                        active_blocks: active,
                        free_blocks: total - active,
                        running_requests: r.below(4) as u32,
                        prefill_tokens: r.below(500),
                        prefill_tokens_per_sec: r.below(5_000),
                        step: Duration::from_ms(r.below(20)),
                        prefill_token_ns: r.below(2_000),
                        ..Load::default()
                    },
                    cache_sequence: peer.cache_sequence,
                })
            }
            5 => FromReplica::Started { request, attempt, cached_tokens: r.below(300) as u32 },
            6..=7 => FromReplica::Progress(Progress {
                request,
                attempt,
                prefill_tokens: r.below(64) as u32,
                decode_tokens: r.below(4) as u32,
                first_token: r.one_in(2),
                device_us: r.below(1_000) as u32,
            }),
            8 => {
                let number = taken.map_or(DispatchNumber(r.below(9)), |taken| taken.number);
                FromReplica::Refuse { request, attempt, number, reason: RefuseReason::NoBlocks }
            }
            9..=10 => {
                let outcomes = [Outcome::Stop, Outcome::Length, Outcome::Cancelled(CancelCause::Client)];
                let usage = Usage {
                    prompt_tokens: r.below(200) as u32,
                    output_tokens: r.below(100) as u32,
                    ..Usage::default()
                };
                FromReplica::Ended { request, attempt, outcome: r.pick(&outcomes).expect("one"), usage }
            }
            _ => {
                peer.cache_sequence += 1 + u64::from(r.one_in(10));
                let key = BlockKey([r.below(130) as u8; 16]);
                let event = match r.below(9) {
                    0 => CacheEvent::Cleared,
                    1..=2 => CacheEvent::Removed { key },
                    _ => CacheEvent::Stored { key, depth: 0 },
                };
                FromReplica::Cache { sequence: peer.cache_sequence, event }
            }
        };
        GatewayInput::Replica { replica, epoch, message }
    }

    fn rescript(&mut self) {
        let r = &mut self.random;
        let p = &mut self.policies;
        p.admission.script = match r.below(6) {
            0 => Admit::Say(Answer::Proposal(Verdict::Defer { for_us: 1 + r.below(100_000) as u32 })),
            1 => Admit::Say(Answer::Proposal(Verdict::Admit {
                reserve_output_tokens: r.below(60) as u32,
                class_rank: r.below(9) as u8,
            })),
            2 => Admit::Say(Answer::Proposal(Verdict::Degrade {
                max_output_tokens: 10 + r.below(40) as u32,
                reserve_output_tokens: r.below(40) as u32,
                class_rank: r.below(4) as u8,
            })),
            3 => Admit::Say(Answer::Proposal(Verdict::Reject { reason: r.below(20) as u16, retry_after_ms: 7 })),
            _ => Admit::Native,
        };
        p.routing.script = match r.below(6) {
            0 => Route::Hold(1_000 + r.below(300_000) as u32),
            1..=2 => Route::Place((1..=6).rev().map(ReplicaId).collect(), r.below(200_000) as u32),
            3 => Route::Rows(vec![r.below(3) as u32, r.below(3) as u32]),
            _ => Route::Native,
        };
        p.fairness.script = match r.below(5) {
            0 => Order::Rank {
                requests: (0..r.below(4)).map(|back| RequestId(self.next_id.saturating_sub(back))).collect(),
                rest: if r.one_in(2) { Rest::Keep } else { Rest::Append },
                tpot_target_us: 1_000 + r.below(9_000) as u32,
            },
            1 => Order::Rows(vec![r.below(4) as u32, r.below(4) as u32]),
            _ => Order::Native,
        };
        p.overload.script = match r.below(5) {
            0 => Give::NoOpinion,
            1 => {
                let stance = Stance { level: r.below(5) as u8, hold_us: 1 + r.below(400_000) as u32 };
                let actions = (0..r.below(4)).map(|_| Action {
                    what: ActionKind::ALL[r.below(8) as usize].code(),
                    class_rank: r.below(8) as u8,
                    amount: [0, 1, 3, 50, 400_000, 1_000_000][r.below(6) as usize],
                });
                Give::Say(stance, actions.collect())
            }
            _ => Give::Native,
        };
    }

    /// What the input means to the replicas that the test plays, before the gateway sees it.
    fn note_input(&mut self, input: &GatewayInput) {
        match input {
            GatewayInput::Arrive(manifest) => {
                self.arrived.insert(manifest.request);
            }
            GatewayInput::ReplicaUp(facts) => {
                let known = self.gateway.replicas().any(|view| view.replica == facts.replica);
                let older = known && self.peers.get(&facts.replica.0).is_some_and(|peer| facts.epoch.0 <= peer.epoch);
                let full = !known && self.gateway.replicas().count() >= self.config.replicas_max;
                if !older && !full {
                    let peer = Peer {
                        epoch: facts.epoch.0,
                        slots: facts.slots,
                        blocks: facts.total_blocks,
                        ..Peer::default()
                    };
                    self.peers.insert(facts.replica.0, peer);
                }
            }
            GatewayInput::Replica { replica, epoch, message }
                if self.gateway.replicas().any(|view| view.replica == *replica && view.epoch == *epoch) =>
            {
                self.note_message(replica.0, message);
            }
            _ => {}
        }
    }

    fn note_message(&mut self, replica: u32, message: &FromReplica) {
        let Some(peer) = self.peers.get_mut(&replica) else { return };
        let mut mark = |request: RequestId, attempt: u16| {
            let same = |taken: &&mut Taken| taken.request == request && taken.attempt == attempt;
            peer.running.iter_mut().filter(same).for_each(|taken| taken.started = true);
        };
        match message {
            FromReplica::Started { request, attempt, .. } => mark(*request, *attempt),
            FromReplica::Progress(progress) => mark(progress.request, progress.attempt),
            FromReplica::Report(report) => {
                let (number, covers, _) = peer.report.unwrap_or((0, 0, Credit::default()));
                if report.number > number && (covers..=peer.received).contains(&report.covers.0) {
                    peer.report = Some((report.number, report.covers.0, report.credit));
                }
            }
            FromReplica::Refuse { request, attempt, number, .. } => peer.running.retain(|taken| {
                let same = (taken.request, taken.attempt, taken.number) == (*request, *attempt, *number);
                !same || taken.started
            }),
            _ => {}
        }
    }

    /// What was dispatched past the last covered dispatch never exceeds what was granted, and the gateway knows exactly what is left.
    fn check_credit(&self, input: &GatewayInput, effects: &GatewayEffects) {
        for view in self.gateway.replicas() {
            let peer = &self.peers[&view.replica.0];
            let Some((_, covers, credit)) = peer.report else {
                assert_eq!(view.credit, Credit::default(), "nothing is granted before the first report");
                continue;
            };
            let uncovered = || peer.running.iter().filter(|taken| taken.number.0 > covers);
            let slots: u32 = uncovered().map(|taken| u32::from(taken.sequences)).sum();
            let blocks: u64 = uncovered().map(|taken| taken.blocks).sum();
            let is_new = |effect: &GatewayEffect| matches!(effect, GatewayEffect::Send { replica, message: ToReplica::Dispatch(_), .. } if *replica == view.replica);
            // A timer of the same step may have dispatched under the credit before.
            let reported = matches!(input, GatewayInput::Replica { replica, message: FromReplica::Report(_), .. } if *replica == view.replica);
            if effects.iter().any(is_new) && !reported {
                assert!(slots <= credit.requests && blocks <= credit.blocks, "more was dispatched than granted");
                assert!(!view.draining);
            }
            let left = (credit.requests.saturating_sub(slots), credit.blocks.saturating_sub(blocks));
            let known = (view.credit.requests, view.credit.blocks);
            assert!(known == left || known == (0, 0), "{known:?} is left, not {left:?}");
        }
    }

    fn note_effects(&mut self, effects: &GatewayEffects) {
        for effect in effects {
            match effect {
                GatewayEffect::Ended { request, outcome, .. } => {
                    assert!(self.arrived.contains(request), "an end of nothing: {request}");
                    let before = self.ended.insert(*request, *outcome);
                    assert_eq!(before, None, "request {request} ended twice");
                }
                GatewayEffect::Send { replica, epoch, message: ToReplica::Dispatch(dispatch) } => {
                    let id = dispatch.manifest.request;
                    assert!(!self.ended.contains_key(&id), "request {id} is dispatched after its end");
                    let peer = self.peers.get_mut(&replica.0).expect("a known replica");
                    assert_eq!(peer.epoch, epoch.0);
                    peer.received += 1;
                    assert_eq!(dispatch.number.0, peer.received, "numbers are dense");
                    assert!(dispatch.class <= dispatch.manifest.class, "a class only falls");
                    assert!(dispatch.max_output_tokens <= dispatch.manifest.max_output_tokens);
                    assert!(dispatch.reserve_output_tokens <= dispatch.max_output_tokens);
                    let manifest = &dispatch.manifest;
                    peer.running.push(Taken {
                        request: id,
                        attempt: dispatch.attempt,
                        number: dispatch.number,
                        sequences: manifest.sequences,
                        blocks: Manifest::need_blocks(
                            manifest.input_tokens,
                            dispatch.reserve_output_tokens,
                            manifest.sequences,
                            BLOCK,
                        ),
                        started: false,
                    });
                }
                _ => {}
            }
        }
        let live: BTreeSet<RequestId> =
            self.arrived.iter().copied().filter(|id| self.gateway.request_state(*id).is_some()).collect();
        for peer in self.peers.values_mut() {
            peer.running.retain(|taken| live.contains(&taken.request));
        }
    }

    fn step(&mut self, input: GatewayInput) {
        self.note_input(&input);
        let twin = self.random.one_in(25).then(|| self.copy());
        let mut effects = Vec::new();
        let taken = input.clone();
        self.gateway.step(self.now, input.clone(), &mut self.policies, &mut effects);
        if let Err(broken) = self.gateway.check() {
            panic!("{broken} after {input:?}");
        }
        if let Some((mut gateway, mut policies)) = twin {
            let mut same = Vec::new();
            gateway.step(self.now, input, &mut policies, &mut same);
            assert_eq!(same, effects, "a copy decides the same");
            assert_eq!(
                (gateway.decision_digest(), bytes(&gateway)),
                (self.gateway.decision_digest(), bytes(&self.gateway))
            );
            assert_eq!(gateway.next_wake(), self.gateway.next_wake());
        }
        self.note_effects(&effects);
        self.check_credit(&taken, &effects);
        self.check_bounds();
    }

    fn copy(&mut self) -> (Gateway, Scripted) {
        let gateway =
            Gateway::decode(self.config.clone(), &mut Reader::new(&bytes(&self.gateway))).expect("reads its own bytes");
        (gateway, self.policies.copy())
    }

    fn check_bounds(&self) {
        let gateway = &self.gateway;
        assert!(gateway.deferred_requests() <= self.config.deferred_requests_max);
        assert!(gateway.running_requests() <= self.config.running_requests_max);
        assert!(gateway.directory_keys() <= self.config.directory_keys_max);
        assert!(gateway.flows() <= self.config.flows_max);
        let counters = gateway.counters();
        assert_eq!(counters.arrived as usize, self.arrived.len());
        assert_eq!(counters.ended as usize, self.ended.len());
        for tenant in 1..4 {
            let limit = 5_000 + 5_000 * tenant;
            let used = gateway.tenant_used_tokens(TenantId(tenant)).unwrap_or(0);
            // Usage that replicas report may be larger than what was reserved: those here are random.
            assert!(used <= limit + 300 * 64, "tenant {tenant} uses {used}");
        }
    }

    /// Runs timers and ends everything, until nothing lives any more.
    fn wind_down(&mut self) {
        self.policies.overload.script = Give::Native;
        self.policies.admission.script = Admit::Native;
        let ids: Vec<RequestId> = self.arrived.iter().copied().collect();
        for request in ids {
            self.step(GatewayInput::Cancel { request, cause: CancelCause::Drain });
        }
        assert_eq!(self.arrived.len(), self.ended.len(), "every arrival has ended");
        let replicas: Vec<_> = self.gateway.replicas().map(|view| (view.replica, view.epoch)).collect();
        for (replica, epoch) in replicas {
            self.step(GatewayInput::ReplicaDown { replica, epoch });
        }
        assert_eq!((self.gateway.live_requests(), self.gateway.running_requests()), (0, 0));
        for tenant in 0..4 {
            // In the next window nothing is charged, and nothing is reserved any more.
            self.now = self.now + Duration::from_ms(401);
            self.step(GatewayInput::Tick);
            assert_eq!(self.gateway.tenant_used_tokens(TenantId(tenant)).unwrap_or(0), 0);
        }
        self.step(GatewayInput::Tick);
    }
}

fn bytes(gateway: &Gateway) -> Vec<u8> {
    let mut out = Writer::new();
    gateway.encode(&mut out);
    out.into_bytes()
}

fn live(seed: u64, steps: usize) -> (u64, u64) {
    let mut life = Life::new(seed);
    for replica in 1..=2 {
        let facts = life.facts(ReplicaId(replica), ReplicaEpoch(1));
        life.step(GatewayInput::ReplicaUp(facts));
    }
    let mut without_progress = 0;
    for step in 0..steps {
        if life.random.one_in(10) {
            life.rescript();
        }
        let wake = life.gateway.next_wake();
        if life.random.one_in(3) && wake < life.now + Duration::from_s(2) {
            without_progress = if wake > life.now { 0 } else { without_progress + 1 };
            assert!(without_progress < 8, "seed {seed}: woken for nothing");
            life.now = life.now.max(wake);
            life.step(GatewayInput::Tick);
        } else {
            without_progress = 0;
            let on = Duration::from_us(life.random.below(8_000));
            life.now = life.now + if life.random.one_in(500) { Duration::from_s(700) } else { on };
            let input = life.input();
            life.step(input);
        }
        if step == steps - 1 {
            life.wind_down();
        }
    }
    (life.gateway.decision_digest(), life.gateway.counters().dispatched)
}

/// Lives of a run; `PENSTOCK_SEEDS` asks for more.
#[allow(clippy::disallowed_methods, reason = "a test may be asked for more work")]
fn seeds() -> u64 {
    std::env::var("PENSTOCK_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(30)
}

#[test]
fn random_lives_are_sound_and_repeat() {
    let mut dispatched = 0;
    for seed in 0..seeds() {
        let first = std::panic::catch_unwind(|| live(seed, 500));
        let Ok(first) = first else { panic!("seed {seed}: live({seed}, 500) repeats it") };
        dispatched += first.1;
        if seed % 10 == 0 {
            assert_eq!(live(seed, 500), first, "seed {seed} decides the same again");
        }
    }
    assert!(dispatched > 15 * seeds(), "the lives do something: {dispatched}");
}

#[test]
fn damaged_bytes_are_refused_or_sound() {
    let mut life = Life::new(5);
    for _ in 0..200 {
        life.now = life.now + Duration::from_us(500);
        let input = life.input();
        life.step(input);
    }
    let whole = bytes(&life.gateway);
    let mut random = Random(1);
    for _ in 0..400 {
        let mut damaged = whole.clone();
        match random.below(3) {
            0 => damaged.truncate(random.below(whole.len() as u64) as usize),
            _ => {
                let at = random.below(whole.len() as u64) as usize;
                damaged[at] ^= 1 << random.below(8);
            }
        }
        if let Ok(gateway) = Gateway::decode(life.config.clone(), &mut Reader::new(&damaged)) {
            gateway.check().expect("what is read is sound");
        }
    }
    assert!(Gateway::decode(life.config.clone(), &mut Reader::new(&whole)).is_ok());
}
