//! What does a request cost the gateway's machine, with more and more workers that report? Wall time of its steps alone, by kind of input.
//!
//!     cargo xtask bench gateway-cost
//!
//! Each worker takes two requests a second of 512 prompt tokens and 50 output tokens, says after each step of 20 ms how it stands and what each
//! request got, and tells which blocks it has cached. So the work a request brings is the same whatever the number of workers.

#![allow(clippy::disallowed_macros, reason = "a table is printed")]

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant as Wall;

use penstock_base::{
    BlockKey, ClassRank, DispatchNumber, Duration, FlowId, Instant, Manifest, Outcome, Priority, ReplicaEpoch,
    ReplicaId, RequestId, SessionId, TenantId, TenantTerms, Traits, TrustGroup,
};
use penstock_policy_api::Policies;
use penstock_sched::gateway::{Gateway, GatewayConfig, GatewayEffect, GatewayEffects, GatewayInput, ReplicaFacts};
use penstock_sched::message::{CacheEvent, Credit, FromReplica, Load, Progress, Report, ToReplica, Usage};
use penstock_sim::seats::NativeSeats;

const STEP: Duration = Duration::from_ms(20);
const STEPS_A_REQUEST: u32 = 50;
const REQUESTS_A_STEP_AND_1000_WORKERS: u64 = 40;
const PROMPT: u32 = 512;
const BLOCK: u32 = 16;
const FAMILIES: u64 = 64;
const SLOTS: u32 = 32;
const BLOCKS: u32 = 8_192;

/// Nanoseconds by kind of input, and how many there were.
#[derive(Clone, Copy, Default)]
struct Spent {
    ns: [u64; KINDS.len()],
    inputs: [u64; KINDS.len()],
}

const KINDS: [&str; 4] = ["arrival and placing", "reports", "progress and ends", "cache events"];

struct Running {
    request: RequestId,
    attempt: u16,
    left: u32,
    family: u64,
}

#[derive(Default)]
struct Worker {
    running: Vec<Running>,
    covers: DispatchNumber,
    reports: u64,
    cache_sequence: u64,
    cached: Vec<u64>,
}

struct House {
    gateway: Gateway,
    policies: Box<dyn Policies>,
    effects: GatewayEffects,
    workers: Vec<Worker>,
    now: Instant,
    spent: Spent,
    ended: u64,
    placed: u64,
}

fn family_of(request: RequestId) -> u64 {
    request.counter() * 7 % FAMILIES
}

fn manifest(number: u64, now: Instant) -> Arc<Manifest> {
    let request = RequestId((1 << 48) | number);
    let family = family_of(request);
    let keys: Box<[BlockKey]> = (0..PROMPT / BLOCK).map(|at| key(family, at)).collect();
    Arc::new(Manifest {
        request,
        tenant: TenantId(number % 16),
        flow: FlowId(1 + number % 64),
        session: SessionId(number % 500),
        trust: TrustGroup(0),
        class: ClassRank::default(),
        priority: Priority(0),
        sequences: 1,
        input_tokens: PROMPT,
        max_output_tokens: STEPS_A_REQUEST,
        arrived: now,
        deadline: Instant::NEVER,
        slo_ttft: Duration::MAX,
        slo_tpot: Duration::MAX,
        traits: Traits::STREAMING,
        prefix_key: keys[3].short(),
        keys,
        retention: 50,
        retry: false,
        terms: TenantTerms::default(),
    })
}

fn key(family: u64, at: u32) -> BlockKey {
    let mut bytes = [7; 16];
    bytes[..8].copy_from_slice(&(family << 16 | u64::from(at)).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    BlockKey(bytes)
}

impl House {
    fn new(workers: usize) -> Self {
        let config = GatewayConfig { replicas_max: workers, check_every_step: false, ..GatewayConfig::default() };
        let mut house = Self {
            gateway: Gateway::new(config, Instant::ZERO),
            policies: Box::new(NativeSeats::new(8_192)),
            effects: GatewayEffects::new(),
            workers: (0..workers).map(|_| Worker::default()).collect(),
            now: Instant(1),
            spent: Spent::default(),
            ended: 0,
            placed: 0,
        };
        for replica in 0..workers as u32 {
            let facts = ReplicaFacts {
                replica: ReplicaId(replica),
                epoch: ReplicaEpoch(1),
                role_code: 3,
                total_blocks: BLOCKS,
                slots: SLOTS,
                round_tokens: 512,
                context_tokens_max: 8_192,
                speed_ppm: 1_000_000,
                zone_rank: 0,
                domain: 0,
            };
            house.step(0, GatewayInput::ReplicaUp(facts));
        }
        house
    }

    fn step(&mut self, kind: usize, input: GatewayInput) {
        self.effects.clear();
        let begun = Wall::now();
        self.gateway.step(self.now, input, self.policies.as_mut(), &mut self.effects);
        self.spent.ns[kind] += begun.elapsed().as_nanos() as u64;
        self.spent.inputs[kind] += 1;
        for effect in &self.effects {
            match effect {
                GatewayEffect::Send { replica, message: ToReplica::Dispatch(dispatch), .. } => {
                    let worker = &mut self.workers[replica.0 as usize];
                    worker.covers = dispatch.number;
                    let request = dispatch.manifest.request;
                    let family = family_of(request);
                    worker.running.push(Running { request, attempt: dispatch.attempt, left: STEPS_A_REQUEST, family });
                    self.placed += 1;
                }
                GatewayEffect::Ended { outcome, .. } => {
                    assert!(outcome.is_success(), "every request is served: {outcome:?}");
                    self.ended += 1;
                }
                _ => {}
            }
        }
    }

    fn say(&mut self, kind: usize, replica: usize, message: FromReplica) {
        let input = GatewayInput::Replica { replica: ReplicaId(replica as u32), epoch: ReplicaEpoch(1), message };
        self.step(kind, input);
    }

    /// One step of every worker.
    fn round(&mut self) {
        self.now = self.now + STEP;
        for replica in 0..self.workers.len() {
            let mut messages = VecDeque::new();
            let worker = &mut self.workers[replica];
            for running in &mut worker.running {
                let (request, attempt) = (running.request, running.attempt);
                let first = running.left == STEPS_A_REQUEST;
                if first {
                    let cached_tokens = if worker.cached.contains(&running.family) { PROMPT - BLOCK } else { 0 };
                    messages.push_back((2, FromReplica::Started { request, attempt, cached_tokens }));
                    if cached_tokens == 0 {
                        worker.cached.push(running.family);
                        for at in 0..PROMPT / BLOCK {
                            worker.cache_sequence += 1;
                            let event = CacheEvent::Stored { key: key(running.family, at), depth: at };
                            messages.push_back((3, FromReplica::Cache { sequence: worker.cache_sequence, event }));
                        }
                    }
                }
                running.left -= 1;
                let prefill_tokens = if first { PROMPT } else { 0 };
                let progress = Progress {
                    request,
                    attempt,
                    prefill_tokens,
                    decode_tokens: 1,
                    first_token: first,
                    device_us: 2_000,
                };
                messages.push_back((2, FromReplica::Progress(progress)));
                if running.left == 0 {
                    let usage = Usage { prompt_tokens: PROMPT, output_tokens: STEPS_A_REQUEST, ..Usage::default() };
                    messages.push_back((2, FromReplica::Ended { request, attempt, outcome: Outcome::Length, usage }));
                }
            }
            worker.running.retain(|running| running.left > 0);
            worker.reports += 1;
            let busy = worker.running.len() as u32;
            let active_blocks = busy * (PROMPT + STEPS_A_REQUEST).div_ceil(BLOCK);
            let load = Load {
                total_blocks: BLOCKS,
                active_blocks,
                free_blocks: BLOCKS - active_blocks,
                running_requests: busy,
                step: STEP,
                prefill_tokens_per_sec: 1_000,
                decode_tokens_per_sec: 100,
                ..Load::default()
            };
            let report = Report {
                number: worker.reports,
                as_of: self.now,
                covers: worker.covers,
                credit: Credit {
                    requests: SLOTS - busy,
                    prefill_tokens: 4_096,
                    blocks: u64::from(BLOCKS - active_blocks),
                },
                load,
                cache_sequence: worker.cache_sequence,
            };
            messages.push_back((1, FromReplica::Report(report)));
            for (kind, message) in messages {
                self.say(kind, replica, message);
            }
        }
    }
}

/// Microseconds a request, by kind, of a house with that many workers.
fn measure(workers: usize, requests: u64) -> [f64; KINDS.len()] {
    let mut house = House::new(workers);
    let (mut arrived, mut owed) = (0, 0);
    let mut rounds = |house: &mut House, until: u64| {
        while arrived < until {
            owed += REQUESTS_A_STEP_AND_1000_WORKERS * workers as u64;
            while owed >= 1_000 {
                owed -= 1_000;
                arrived += 1;
                let manifest = manifest(arrived, house.now);
                house.step(0, GatewayInput::Arrive(manifest));
            }
            house.round();
        }
    };
    rounds(&mut house, requests);
    house.spent = Spent::default();
    let before = house.placed;
    rounds(&mut house, 2 * requests);
    assert!(house.ended > requests / 2 && house.placed - before > requests / 2, "requests are served");
    house.spent.ns.map(|ns| ns as f64 / 1_000.0 / requests as f64)
}

fn main() {
    println!("| workers | {} | in all, us a request | to 10 workers |", KINDS.join(" | "));
    println!("|---|{}---|---|", "---|".repeat(KINDS.len()));
    let mut least = None;
    for (workers, requests) in [(10, 4_000), (100, 4_000), (1_000, 6_000)] {
        // The best of three: what disturbs a run only ever adds.
        let runs = [measure(workers, requests), measure(workers, requests), measure(workers, requests)];
        let best = runs
            .into_iter()
            .min_by(|one, two| one.iter().sum::<f64>().total_cmp(&two.iter().sum()))
            .unwrap_or_default();
        let all: f64 = best.iter().sum();
        let to = all / *least.get_or_insert(all);
        let kinds: Vec<String> = best.iter().map(|us| format!("{us:.1}")).collect();
        println!("| {workers} | {} | {all:.1} | {to:.2} |", kinds.join(" | "));
    }
}
