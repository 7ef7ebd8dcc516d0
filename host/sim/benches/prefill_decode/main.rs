//! Where does it pay to compute prompts apart from decoding? Four replicas that do both, with chunked prefill, beside the same four split into
//! roles, over prompt length, load and bandwidth, in virtual time.
//!
//!     cargo xtask bench prefill-decode [-- PICTURE.svg]
//!
//! A request is in time when its first token came within four times what its prompt takes alone, plus half a second, and its tokens then took
//! no more on average than two and a half steps of a half-full batch. Cells say what share of requests was in time. All is deterministic.

#![allow(clippy::disallowed_macros, reason = "a table is printed")]

mod picture;

use penstock_base::{Duration, Instant};
use penstock_sched::gateway::GatewayConfig;
use penstock_sched::replica::{ReplicaConfig, StepCost};
use penstock_sim::agenda::Latency;
use penstock_sim::cost::CostModel;
use penstock_sim::rng::Rng;
use penstock_sim::workload::{Wish, wished};
use penstock_sim::{Cluster, Faults, Natives, PolicyKind, Report, Scenario, run_with};

const REPLICAS: usize = 4;
const OUTPUT: u32 = 128;
const REQUESTS: usize = 160;
const BLOCK: u32 = 16;

/// One kind of machine and model.
pub struct Machine {
    /// For the reader.
    pub name: &'static str,
    cost: StepCost,
    kv_token_bytes: u64,
    step_tokens: u32,
    chunk_tokens: u32,
    slots: u32,
    prompts: [u32; 3],
    /// Bytes a second of each port, and how that is called.
    pub links: [(u64, &'static str); 3],
}

/// SmolLM2-135M on one core, as the cost model's defaults were fitted; and what an 8B model on a large accelerator is commonly said to take.
fn machines() -> [Machine; 2] {
    [
        Machine {
            name: "135M on a core: 1 ms a prompt token, 1 + 2 ms a decode row, 23 kB of KV a token",
            cost: ReplicaConfig::default().cost,
            kv_token_bytes: 23_040,
            step_tokens: 256,
            chunk_tokens: 128,
            slots: 16,
            prompts: [128, 512, 2_048],
            links: [(2_500_000, "20 Mb/s"), (12_500_000, "100 Mb/s"), (125_000_000, "1 Gb/s")],
        },
        Machine {
            name: "8B on an accelerator: 50 us a prompt token, 8 ms + 50 us a decode row, 131 kB of KV a token",
            cost: StepCost { base_ns: 8_000_000, prefill_token_ns: 50_000, decode_row_ns: 50_000, kv_token_ns: 2 },
            kv_token_bytes: 131_072,
            step_tokens: 2_048,
            chunk_tokens: 512,
            slots: 64,
            prompts: [512, 2_048, 8_192],
            links: [(1_250_000_000, "10 Gb/s"), (3_125_000_000, "25 Gb/s"), (25_000_000_000, "200 Gb/s")],
        },
    ]
}

impl Machine {
    fn step_ns(&self, rows: u64, context: u64) -> u64 {
        self.cost.base_ns + rows * (self.cost.decode_row_ns + self.cost.kv_token_ns * context)
    }

    /// Device time of one request, its share of half-full batches included.
    fn request_ns(&self, prompt: u32) -> u64 {
        let rows = u64::from(self.slots / 2);
        let context = u64::from(prompt + OUTPUT / 2);
        u64::from(prompt) * self.cost.prefill_token_ns + u64::from(OUTPUT) * self.step_ns(rows, context) / rows
    }

    fn is_in_time(&self, prompt: u32, ttft: Duration, tpot_ns: u64) -> bool {
        let alone = u64::from(prompt) * self.cost.prefill_token_ns + self.cost.base_ns;
        let context = u64::from(prompt + OUTPUT / 2);
        ttft.0 <= 4 * alone + 500_000_000 && 2 * tpot_ns <= 5 * self.step_ns(u64::from(self.slots / 2), context)
    }

    fn scenario(&self, roles: &[u8], link: u64, handoff_tokens_min: u32) -> Scenario {
        let mut scenario = Scenario::from_seed(1, 2);
        scenario.faults = Faults::NONE;
        scenario.policies = PolicyKind::Plain;
        (scenario.gateways, scenario.replicas) = (1, roles.len());
        let context = self.prompts[2] + OUTPUT;
        let blocks = self.slots * context.div_ceil(BLOCK);
        scenario.replica = ReplicaConfig {
            blocks,
            block_size_tokens: BLOCK,
            slots: self.slots,
            step_tokens: self.step_tokens,
            chunk_tokens: self.chunk_tokens,
            context_tokens_max: context,
            inflight_max: 2,
            cost: self.cost,
            check_every_step: false,
            ..ReplicaConfig::default()
        };
        let mut cluster = Cluster::of(roles.to_vec(), BLOCK);
        cluster.handoff.prefill_tokens_min = handoff_tokens_min;
        cluster.kv_token_bytes = self.kv_token_bytes;
        cluster.data.bytes_per_sec = link;
        cluster.party.held_blocks = blocks;
        scenario.gateway = GatewayConfig {
            block_size_tokens: BLOCK,
            handoff: Some(cluster.handoff),
            check_every_step: false,
            ..GatewayConfig::default()
        };
        scenario.cluster = Some(cluster);
        scenario.cost = CostModel { terms: self.cost, jitter_ppm: 20_000 };
        scenario.latency = Latency { base: Duration::from_us(200), jitter: Duration::from_us(100) };
        scenario.check_every = u64::MAX;
        scenario
    }
}

/// What came of one run.
#[derive(Clone, Copy, Default)]
pub struct Outcome {
    /// Percent of requests in time.
    pub in_time: f64,
    ttft_ms: f64,
    tpot_ms: f64,
    handed_off: u64,
}

fn percentile(values: &mut [u64], percent: usize) -> f64 {
    values.sort_unstable();
    values.get((values.len() * percent / 100).min(values.len().saturating_sub(1))).map_or(0.0, |ns| *ns as f64 / 1e6)
}

fn judge(machine: &Machine, report: &Report, prompts: &[u32]) -> Outcome {
    let (mut ttft, mut tpot, mut in_time) = (Vec::new(), Vec::new(), 0);
    for (request, prompt) in report.requests.iter().zip(prompts) {
        let first = request.first_token_at.since(request.arrived);
        let rest = request.ended_at.since(request.first_token_at).0 / u64::from(OUTPUT - 1);
        let ended_well = request.outcome.is_some_and(penstock_base::Outcome::is_success);
        in_time += u64::from(ended_well && machine.is_in_time(*prompt, first, rest));
        ttft.push(first.0);
        tpot.push(rest);
    }
    Outcome {
        in_time: 100.0 * in_time as f64 / prompts.len() as f64,
        ttft_ms: percentile(&mut ttft, 95),
        tpot_ms: percentile(&mut tpot, 95),
        handed_off: report.figures.handed_off,
    }
}

/// Poisson arrivals at this share of what four unified replicas could do, each of a prompt drawn from the list.
fn run(machine: &Machine, scenario: &Scenario, load_percent: u64, mix: &[u32]) -> Outcome {
    let mut rng = Rng::stream(7, load_percent);
    let mean: u64 = mix.iter().map(|prompt| machine.request_ns(*prompt)).sum::<u64>() / mix.len() as u64;
    let gap = mean * 100 / load_percent / REPLICAS as u64;
    let mut at = Instant(300_000_000);
    let mut prompts = Vec::new();
    let wishes = (0..REQUESTS as u64).map(|flow| {
        // The logarithm by halves: exponential gaps that are the same on every machine.
        let (mut left, mut halves) = (rng.word(), 0);
        while left >> 63 == 0 && halves < 20 {
            (left, halves) = (left << 1, halves + 1);
        }
        let within = (left << 1 >> 11) as f64 / (1u64 << 53) as f64;
        at = at + Duration((gap as f64 * 0.693 * (halves as f64 + 1.0 - within)) as u64);
        let prompt = rng.pick(mix);
        prompts.push(prompt);
        Wish::plain(1 + flow % 8, at, prompt, OUTPUT)
    });
    let wishes: Vec<Wish> = wishes.collect();
    match run_with(scenario, wished(scenario, wishes), &Natives) {
        Ok(report) => judge(machine, &report, &prompts),
        Err(violation) => panic!("the simulator found a fault of its own: {violation}"),
    }
}

const SPLITS: [[u8; REPLICAS]; 3] = [[1, 2, 2, 2], [1, 1, 2, 2], [1, 1, 1, 2]];

fn main() {
    let mut panels = Vec::new();
    for machine in machines() {
        panels.push((machine.name, machine.links.map(|(_, name)| name), sweep(&machine)));
        knob(&machine);
    }
    // Cargo gives benchmarks an argument of its own.
    if let Some(path) = std::env::args().skip(1).find(|argument| !argument.starts_with("--")) {
        match std::fs::write(&path, picture::draw(&panels)) {
            Ok(()) => println!("\npicture: {path}"),
            Err(fault) => eprintln!("{path} cannot be written: {fault}"),
        }
    }
}

/// One row of the sweep: prompt, load, what unified gives, and by link what the best split gives and which that is.
pub type Row = (u32, u64, Outcome, Vec<(Outcome, &'static str)>);

fn sweep(machine: &Machine) -> Vec<Row> {
    println!("\n{}\n", machine.name);
    println!(
        "| prompt | load | unified: in time, TTFT p95, TPOT p95 | {} |",
        machine.links.map(|(_, name)| name).join(" | ")
    );
    println!("|---|---|---|{}", "---|".repeat(machine.links.len()));
    let mut rows = Vec::new();
    for prompt in machine.prompts {
        for load in [40, 70, 95] {
            let unified = run(machine, &machine.scenario(&[3; REPLICAS], 1, u32::MAX), load, &[prompt]);
            let mut by_link = Vec::new();
            for (link, _) in machine.links {
                let tries = SPLITS.map(|roles| run(machine, &machine.scenario(&roles, link, 64), load, &[prompt]));
                let names = ["1+3", "2+2", "3+1"];
                let best = tries.into_iter().zip(names);
                let better = |(one, _): &(Outcome, &str), (two, _): &(Outcome, &str)| {
                    (one.in_time, two.ttft_ms)
                        .partial_cmp(&(two.in_time, one.ttft_ms))
                        .unwrap_or(std::cmp::Ordering::Equal)
                };
                by_link.extend(best.max_by(better));
            }
            let cell = |outcome: &Outcome| {
                format!("{:.0} %, {:.0} ms, {:.1} ms", outcome.in_time, outcome.ttft_ms, outcome.tpot_ms)
            };
            let cells: Vec<String> =
                by_link.iter().map(|(outcome, name)| format!("{name}: {}", cell(outcome))).collect();
            println!("| {prompt} | {load} % | {} | {} |", cell(&unified), cells.join(" | "));
            rows.push((prompt, load, unified, by_link));
        }
    }
    rows
}

/// Short and long prompts together: which of them should be handed off?
fn knob(machine: &Machine) {
    let [short, middle, long] = machine.prompts;
    // Two short ones and one middle one for each long one.
    let mix = [short, short, middle, long];
    let (link, name) = machine.links[2];
    println!("\nPrompts of {short}, {middle} and {long} tokens, 2 + 2 replicas, {name}, 70 % load\n");
    println!(
        "| `handoff_tokens_min` | handed off of {REQUESTS} | in time | TTFT p95, ms | TPOT p95, ms |\n|---|---|---|---|---|"
    );
    for least in [1, short + 1, middle + 1, u32::MAX] {
        let outcome = run(machine, &machine.scenario(&[1, 1, 2, 2], link, least), 70, &mix);
        let least = if least == u32::MAX { "never".to_owned() } else { least.to_string() };
        let Outcome { in_time, ttft_ms, tpot_ms, handed_off } = outcome;
        println!("| {least} | {handed_off} | {in_time:.0} % | {ttft_ms:.0} | {tpot_ms:.1} |");
    }
    let unified = run(machine, &machine.scenario(&[3; REPLICAS], link, u32::MAX), 70, &mix);
    println!("| all four unified | 0 | {:.0} % | {:.0} | {:.1} |", unified.in_time, unified.ttft_ms, unified.tpot_ms);
}
