//! Flows that compete for two narrow replicas, and how far their service drifts apart.

use std::ops::Range;

use penstock_base::{CancelCause, Duration, Instant};
use penstock_sim::rng::Rng;
use penstock_sim::workload::{Leave, LeaveWhen, Planned, Wish, wished};
use penstock_sim::{Faults, Happened, PolicyKind, Report, Scenario};

/// What a token counts for: the defaults of `vtc`.
pub const INPUT_WEIGHT: u64 = 1;
pub const OUTPUT_WEIGHT: u64 = 2;
const ONE_PPM: u64 = 1_000_000;

const REPLICAS: usize = 2;
const SLOTS: u32 = 4;
const READY_WINDOW: usize = 1;
const STEP_TOKENS: u32 = 64;
const INPUT_MAX: u32 = 96;
/// Most tokens of one request, all answers together.
const REQUEST_TOKENS_MAX: u64 = 100;

/// The flow of weight four; all others have weight one.
pub const HEAVY: u64 = 7;
pub const FLOWS: u64 = 8;

/// Two replicas of four slots whose pools cannot hold four of the longest requests, so that answers beyond what was reserved preempt.
pub fn arena(seed: u64, inflight_max: usize) -> Scenario {
    let mut scenario = Scenario::from_seed(1, inflight_max);
    scenario.seed = seed;
    scenario.gateways = 1;
    scenario.replicas = REPLICAS;
    scenario.faults = Faults::NONE;
    scenario.policies = PolicyKind::Plain;
    scenario.trace = true;
    // The walk goes over everything that waits, which is thousands here; `seeds` walks at every step.
    scenario.check_every = 512;
    let gateway = &mut scenario.gateway;
    gateway.gateways = 1;
    gateway.block_size_tokens = 8;
    gateway.context_tokens_max = 128;
    gateway.queue_requests_max = 20_000;
    gateway.queue_tokens_max = 4 << 20;
    gateway.running_requests_max = 256;
    gateway.deferred_requests_max = 16;
    gateway.flows_max = 64;
    gateway.tenants_max = 64;
    gateway.queue_wait_max = Duration::from_s(36_000);
    // The host's own remedy against starving would overrule every policy.
    gateway.starve = Duration::from_s(36_000);
    gateway.no_progress = Duration::from_s(30);
    gateway.order_rows = 128;
    gateway.routing_rows = 64;
    gateway.directory_keys_max = 4_096;
    gateway.class_floor_blocks = [0; 8];
    gateway.class_slo_ttft = [Duration::MAX; 8];
    let replica = &mut scenario.replica;
    replica.block_size_tokens = 8;
    replica.context_tokens_max = 128;
    replica.blocks = 24;
    replica.slots = SLOTS;
    replica.step_tokens = STEP_TOKENS;
    replica.chunk_tokens = STEP_TOKENS;
    replica.ready_window = READY_WINDOW;
    replica.prefix_cache = true;
    scenario.cost.terms.base_ns = 1_000_000;
    scenario.cost.terms.prefill_token_ns = 20_000;
    scenario.cost.terms.decode_row_ns = 100_000;
    scenario.cost.terms.kv_token_ns = 100;
    scenario.cost.jitter_ppm = 100_000;
    scenario.latency.base = Duration::from_us(200);
    scenario.latency.jitter = Duration::from_us(300);
    scenario
}

/// What flows do to get more than their share, or to spoil the count.
pub fn adversaries(scenario: &Scenario) -> Vec<Planned> {
    let rng = &mut Rng::stream(scenario.seed, 40);
    let mut wishes = Vec::new();
    let mut put = |count: u64, over: Duration, rng: &mut Rng, make: &dyn Fn(&mut Rng, Instant) -> Wish| {
        for _ in 0..count {
            let at = Instant(1_000_000 + rng.below(over.0));
            wishes.push(make(rng, at));
        }
    };
    let at_once = Duration::from_ms(20);
    // A flood of middling requests, most of which end early: less is reserved than the others turn out to need.
    put(500, at_once, rng, &|rng, at| Wish {
        stop_at: (!rng.one_in(4)).then_some(2),
        ..Wish::plain(1, at, rng.between(16, 48) as u32, 24)
    });
    // Prompts as long as can be for one token; answers as long as can be to next to nothing; next to nothing at all, thousands of it.
    put(320, at_once, rng, &|_, at| Wish::plain(2, at, INPUT_MAX, 1));
    put(320, at_once, rng, &|_, at| Wish::plain(3, at, 4, 40));
    put(2_500, at_once, rng, &|_, at| Wish::plain(4, at, 2, 2));
    // Four answers for the price of one request.
    put(160, at_once, rng, &|_, at| Wish { sequences: 4, ..Wish::plain(5, at, 8, 20) });
    // Clients that leave, some of them before they were served.
    put(700, at_once, rng, &|rng, at| {
        let when = if rng.one_in(3) {
            LeaveWhen::At(at + Duration::from_ms(rng.below(8_000)))
        } else {
            LeaveWhen::AfterTokens(1 + rng.below(3) as u32)
        };
        Wish { leaves: Some(Leave { cause: CancelCause::Client, when }), ..Wish::plain(6, at, 56, 32) }
    });
    put(900, at_once, rng, &|rng, at| Wish {
        weight_ppm: 4 * ONE_PPM,
        ..Wish::plain(HEAVY, at, 24, rng.between(8, 24) as u32)
    });
    // A flow that comes and goes, and wants to be paid for the time it was away.
    for wave in 0..10 {
        for _ in 0..24 {
            let at = Instant(500_000_000 + wave * 1_500_000_000 + rng.below(1_000_000));
            wishes.push(Wish::plain(FLOWS, at, rng.between(1, 64) as u32, rng.between(1, 32) as u32));
        }
    }
    let planned = wished(scenario, wishes);
    let longest = |planned: &Planned| {
        let manifest = &planned.manifest;
        u64::from(manifest.input_tokens) + u64::from(manifest.sequences) * u64::from(manifest.max_output_tokens)
    };
    assert!(planned.iter().all(|planned| longest(planned) <= REQUEST_TOKENS_MAX), "the bound is worked out with this");
    planned
}

/// Twice the larger of the longest prompt and of everything that can be out and not settled: the paper's bound, with the terms that its M
/// has here. Each replica has a request in every slot and its ready window full, and may hold back some requests for a replica they wait for;
/// and it computes two steps while a report is on its way.
pub fn bound() -> u64 {
    let replicas = REPLICAS as u64;
    let running = replicas * (u64::from(SLOTS) + READY_WINDOW as u64) * REQUEST_TOKENS_MAX;
    let late = replicas * 2 * u64::from(STEP_TOKENS);
    2 * (INPUT_WEIGHT * u64::from(INPUT_MAX)).max(OUTPUT_WEIGHT * (running + late))
}

/// The widest difference of weighted service between two flows over an interval in which both always had something waiting, within one of
/// `reigns`; in weighted tokens of a flow of weight one.
pub fn widest(report: &Report, planned: &[Planned], reigns: &[Range<Instant>]) -> u64 {
    let flow_of = |index: usize| planned[index].manifest.flow.0 as usize;
    let weight_of = |index: usize| planned[index].manifest.terms.weight_ppm;
    let flows = FLOWS as usize + 1;
    let mut waits = vec![false; planned.len()];
    let mut waiting = vec![0u64; flows];
    // In millionths of a weighted token.
    let mut service = vec![0i128; flows];
    // Least and most of the difference since both have had something waiting.
    let mut since: Vec<Option<(i128, i128)>> = vec![None; flows * flows];
    let mut widest = 0;
    let mut reign = None;
    for (at, happened) in &report.trace {
        let now = reigns.iter().position(|reign| reign.contains(at));
        if now != reign {
            reign = now;
            since.fill(None);
        }
        let (index, served) = match *happened {
            Happened::Waits(index) => {
                waiting[flow_of(index)] += u64::from(!std::mem::replace(&mut waits[index], true));
                (index, 0)
            }
            Happened::WaitsNoMore(index) => {
                waiting[flow_of(index)] -= u64::from(std::mem::replace(&mut waits[index], false));
                (index, 0)
            }
            Happened::Prefilled(index, tokens) => (index, INPUT_WEIGHT * u64::from(tokens)),
            Happened::Decoded(index) => (index, OUTPUT_WEIGHT),
            Happened::Stance(_) => continue,
        };
        let flow = flow_of(index);
        service[flow] += i128::from(served * ONE_PPM) * i128::from(ONE_PPM) / i128::from(weight_of(index));
        if reign.is_none() {
            continue;
        }
        for other in (0..flows).filter(|other| *other != flow) {
            let (low, high) = (flow.min(other), flow.max(other));
            let pair = &mut since[low * flows + high];
            if waiting[flow] == 0 || waiting[other] == 0 {
                *pair = None;
                continue;
            }
            let apart = service[low] - service[high];
            let (least, most) = pair.unwrap_or((apart, apart));
            let (least, most) = (least.min(apart), most.max(apart));
            *pair = Some((least, most));
            widest = widest.max(most - least);
        }
    }
    (widest / i128::from(ONE_PPM)) as u64
}

/// All of the run.
pub fn always() -> Vec<Range<Instant>> {
    vec![Instant::ZERO..Instant::NEVER]
}
