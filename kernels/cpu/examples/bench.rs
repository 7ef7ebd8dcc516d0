//! Figures of the kernels on this machine: each tier's rate, and its ratio to the scalar tier measured in the same run.
//!
//! `cargo run --profile ci -p penstock-kernels-cpu --example bench -- [threads] [linear,bf16,head,attention] [tier]`. Shapes are those of SmolLM2-135M. The least
//! processor time of several repetitions counts; on a busy machine only the ratios of neighbouring lines mean much.

use penstock_kernels_cpu::{
    Activations, AttentionLayer, AttentionPlan, AttentionRun, Bf16Unit, HeadRows, KvDtype, KvPool, KvShape,
    MemoryBudget, PackedMatrix, PackedShape, Part, Precision, SourceFormat, Store, ThreadPool, Tier, attend, ceiling,
    logits, multiply,
};

/// Least processor time of several calls, shared among the threads: other processes cost little of it, waiting for a thread does count.
fn best_seconds(threads: usize, repeats: usize, mut f: impl FnMut()) -> f64 {
    (0..repeats)
        .map(|_| {
            let start = processor_seconds();
            f();
            (processor_seconds() - start) / threads as f64
        })
        .fold(f64::INFINITY, f64::min)
}

/// Processor time of this process so far.
fn processor_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 40) as f32) / 8_388_608.0 - 1.0
        })
        .collect()
}

fn bytes(len: usize) -> Vec<u8> {
    // 0x2a as the high byte of every half keeps scales finite and small.
    vec![0x2a; len]
}

/// Rates that no kernel here can pass on one thread: bytes from memory, and integer operations from registers.
fn ceilings(tiers: &[Tier]) {
    let mut memory = MemoryBudget::new(1 << 30).allocate(256 << 20).expect("fits");
    memory.prefault();
    for &tier in tiers {
        let seconds = best_seconds(1, 5, || assert_eq!(ceiling::read(tier, &memory), 0));
        let gigabytes = memory.len() as f64 / seconds / 1e9;
        let mut operations = 0;
        let seconds = best_seconds(1, 5, || operations = std::hint::black_box(ceiling::multiply(tier, 1 << 20)).0);
        let rate = operations as f64 / seconds / 1e9;
        println!(
            "ceiling {:12} one thread: {gigabytes:6.1} GB/s from memory, {rate:7.1} GOP/s of int8 products",
            tier.name()
        );
    }
}

/// The rate of AMX tiles from registers, where there are any.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn tile_ceiling() {
    if !Tier::Amx.is_supported() {
        return;
    }
    let mut operations = 0;
    let seconds = best_seconds(1, 5, || operations = std::hint::black_box(ceiling::multiply_tiles(1 << 18)).0);
    println!("ceiling amx tiles    one thread: {:7.1} GOP/s of bfloat16 products", operations as f64 / seconds / 1e9);
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
fn tile_ceiling() {}

/// The rate of AVX-512 BF16 from registers, where there is any.
#[cfg(target_arch = "x86_64")]
fn bf16_ceiling() {
    if Bf16Unit::of(Tier::Avx512Vnni) != Bf16Unit::Avx512Bf16 {
        return;
    }
    let mut operations = 0;
    let seconds = best_seconds(1, 5, || operations = std::hint::black_box(ceiling::multiply_bf16(1 << 20)).0);
    println!("ceiling avx512-bf16  one thread: {:7.1} GFLOP/s of bfloat16 products", operations as f64 / seconds / 1e9);
}

#[cfg(not(target_arch = "x86_64"))]
fn bf16_ceiling() {}

/// Outputs and inputs of the linear layers of one decoder layer.
const SHAPES: [(usize, usize); 4] = [(960, 576), (576, 576), (3072, 576), (576, 1536)];

/// The linear layers of a model: enough copies of one decoder layer's that weights stream from memory as in a real pass.
struct Linear {
    precision: Precision,
    layers: Vec<Vec<PackedMatrix>>,
}

impl Linear {
    fn new(budget: &MemoryBudget, format: SourceFormat, precision: Precision) -> Self {
        let pack = |(n, k): (usize, usize)| {
            let k = k / format.block_len() * format.block_len();
            let source = bytes(n * (k / format.block_len()) * format.block_bytes());
            let shape = PackedShape::new(format.packed_for(precision), n, k).expect("legal");
            PackedMatrix::pack_as(budget, &source, format, shape).expect("packs")
        };
        Self { precision, layers: (0..30).map(|_| SHAPES.map(pack).into()).collect() }
    }

    fn bytes(&self) -> usize {
        self.layers.iter().flatten().map(PackedMatrix::bytes).sum()
    }

    /// Operations of all products of so many rows.
    fn operations(&self, rows: usize) -> f64 {
        2.0 * (rows * self.layers.iter().flatten().map(|matrix| matrix.n() * matrix.k()).sum::<usize>()) as f64
    }

    /// Least seconds of all products of so many rows.
    fn seconds(&self, pool: &ThreadPool, tier: Tier, rows: usize, repeats: usize) -> f64 {
        let mut out = vec![0f32; rows * 3072];
        let mut session = pool.enter();
        let inputs: Vec<Activations> = self.layers[0]
            .iter()
            .map(|matrix| {
                let mut a = Activations::new(self.precision);
                a.quantise(&mut session, tier, &mut noise(rows * matrix.k(), 1), matrix.k()).expect("quantises");
                a
            })
            .collect();
        best_seconds(pool.threads(), repeats, || {
            for layer in &self.layers {
                for (matrix, input) in layer.iter().zip(&inputs) {
                    let parts = [Part { matrix, column: 0 }];
                    multiply(&mut session, tier, input, &parts, Store::Replace, &mut out, matrix.n())
                        .expect("multiplies");
                }
            }
        })
    }
}

/// Products of integers, by format.
fn linear_layers(pool: &ThreadPool, tiers: &[Tier]) {
    let budget = MemoryBudget::new(2 << 30);
    let formats = [
        SourceFormat::Q4_0,
        SourceFormat::Q4_1,
        SourceFormat::Q5_0,
        SourceFormat::Q8_0,
        SourceFormat::Q4K,
        SourceFormat::Q5K,
        SourceFormat::Q6K,
    ];
    for (format, precision) in formats.into_iter().flat_map(|f| [(f, Precision::Int8), (f, Precision::Int15)]) {
        let linear = Linear::new(&budget, format, precision);
        for rows in [1, 4, 16, 128] {
            let mut scalar = None;
            for &tier in tiers {
                if tier == Tier::Scalar && rows > 1 {
                    continue;
                }
                let seconds = linear.seconds(pool, tier, rows, if tier == Tier::Scalar { 1 } else { 4 });
                let rate = linear.operations(rows) / seconds / 1e9;
                if tier == Tier::Scalar {
                    scalar = Some(rate);
                }
                let ratio = scalar.map_or(String::from("-"), |s| format!("{:.1}", rate / s));
                let gigabytes = linear.bytes() as f64 / seconds / 1e9;
                println!(
                    "linear {format:?} {precision:?} rows {rows:4} {:12} {rate:8.1} GOP/s {gigabytes:6.1} GB/s   x scalar {ratio}",
                    tier.name()
                );
            }
        }
    }
}

/// Products of bfloat16 beside those of the default precision, on weights of four and of eight bits; the three take turns.
fn bf16_layers(pool: &ThreadPool, tiers: &[Tier]) {
    let budget = MemoryBudget::new(4 << 30);
    let linear = Linear::new(&budget, SourceFormat::Bf16, Precision::Bf16);
    let exact = [SourceFormat::Q4_1, SourceFormat::Q8_0].map(|f| Linear::new(&budget, f, Precision::Int15));
    for rows in [1, 16, 128, 512] {
        for &tier in tiers.iter().filter(|&&tier| tier != Tier::Scalar) {
            let mut seconds = [f64::INFINITY; 3];
            for _ in 0..3 {
                for (seconds, linear) in seconds.iter_mut().zip([&linear, &exact[0], &exact[1]]) {
                    *seconds = seconds.min(linear.seconds(pool, tier, rows, 2));
                }
            }
            let rates = seconds.map(|seconds| linear.operations(rows) / seconds / 1e9);
            println!(
                "bf16 rows {rows:4} {:12} by {:12} {:7.1} GFLOP/s {:5.1} GB/s   {:.2} of Q4_1's {:.1} and {:.2} of Q8_0's {:.1} GOP/s at 15 bits",
                tier.name(),
                Bf16Unit::of(tier).name(),
                rates[0],
                linear.bytes() as f64 / seconds[0] / 1e9,
                rates[0] / rates[1],
                rates[1],
                rates[0] / rates[2],
                rates[2],
            );
        }
    }
}

fn head(pool: &ThreadPool, tiers: &[Tier]) {
    let budget = MemoryBudget::new(1 << 30);
    let (n, k) = (49152, 576);
    let matrix = PackedMatrix::pack(&budget, &bytes(n * (k / 32) * 34), SourceFormat::Q8_0, n, k).expect("packs");
    for rows in [1, 16] {
        let mut out = vec![0f32; rows * n];
        for &tier in tiers.iter().filter(|&&tier| tier != Tier::Scalar) {
            let mut session = pool.enter();
            let mut input = Activations::new(Precision::Int8);
            input.quantise(&mut session, tier, &mut noise(rows * k, 1), k).expect("quantises");
            let parts = [Part { matrix: &matrix, column: 0 }];
            let seconds = best_seconds(pool.threads(), 5, || {
                multiply(&mut session, tier, &input, &parts, Store::Replace, &mut out, n).expect("multiplies");
            });
            let gigabytes = matrix.bytes() as f64 / seconds / 1e9;
            println!("head rows {rows:2} {:12} {:.2} ms  {gigabytes:.1} GB/s of weights", tier.name(), seconds * 1e3);
            let seconds = best_seconds(pool.threads(), 5, || {
                for row in out.chunks(n) {
                    assert!(logits::argmax(tier, row).is_some());
                }
            });
            println!("argmax rows {rows:2} {:12} {:.3} ms", tier.name(), seconds * 1e3);
        }
    }
}

/// Rows of equal length, each of a sequence of its own.
struct AttentionCase {
    name: &'static str,
    sequences: usize,
    rows: usize,
    context: usize,
    /// Blocks at the front that all sequences have in common.
    shared_blocks: usize,
}

/// Over bfloat16 and over int8, and with each row alone where rows have tokens in common. What is compared takes turns.
fn attention(pool: &ThreadPool, tiers: &[Tier]) {
    let budget = MemoryBudget::new(2 << 30);
    let pools = KvDtype::ALL.map(|dtype| {
        let shape = KvShape { layers: 4, kv_heads: 3, head_dim: 64, block_tokens: 16, blocks: 2048, dtype };
        let mut kv = KvPool::new(&budget, shape).expect("fits");
        for block in 0..2048 {
            kv.block_mut(block).fill(0x3c);
        }
        kv
    });
    for (name, sequences, rows, context, shared_blocks) in [
        ("decode", 16, 1, 127, 0),
        ("decode", 16, 1, 255, 0),
        ("decode", 16, 1, 575, 0),
        ("decode", 16, 1, 575, 32),
        ("decode", 16, 1, 1023, 0),
        ("decode", 1, 1, 255, 0),
        ("decode", 1, 1, 1023, 0),
        ("prefill", 1, 512, 0, 0),
    ] {
        let case = AttentionCase { name, sequences, rows, context, shared_blocks };
        for &tier in tiers.iter().filter(|&&tier| tier != Tier::Scalar) {
            attention_case(pool, tier, &pools, &case);
        }
    }
}

fn attention_case(pool: &ThreadPool, tier: Tier, pools: &[KvPool; 2], case: &AttentionCase) {
    let &AttentionCase { name, sequences, rows, context, shared_blocks } = case;
    let total = sequences * rows;
    let queries = noise(total * 576, 3);
    let mut out = vec![0f32; total * 576];
    let blocks = (context + rows).div_ceil(16);
    // A fixed disorder: blocks at a constant distance would meet in the same sets of the caches.
    let place = |b: usize, s: usize| ((b * sequences + s) * 1021 % 2048) as u32;
    let table = |s| (0..blocks).map(|b| place(b, if b < shared_blocks { 0 } else { s })).collect();
    let tables: Vec<Vec<u32>> = (0..sequences).map(table).collect();
    let runs: Vec<AttentionRun<'_>> = tables
        .iter()
        .enumerate()
        .map(|(s, table)| AttentionRun { first_row: s * rows, rows, context, table })
        .collect();
    let plan = |runs: &[AttentionRun<'_>]| {
        let mut plan = AttentionPlan::new();
        plan.set(&pools[0], 9, tier, pool.threads(), runs.iter().copied());
        plan
    };
    let together = vec![plan(&runs)];
    let alone: Vec<AttentionPlan> = runs.iter().map(|run| plan(&[*run])).collect();
    let mut session = pool.enter();
    let mut attend_with = |plans: &[AttentionPlan], kv: &KvPool| {
        for index in 0..4 {
            for plan in plans {
                let layer = AttentionLayer { index, scale: 0.125, window: None };
                let from = HeadRows { data: queries.as_slice(), stride: 576, column: 0 };
                let to = HeadRows { data: out.as_mut_slice(), stride: 576, column: 0 };
                attend(&mut session, plan, kv, layer, from, to).expect("attends");
            }
        }
    };
    let mut best = [f64::INFINITY; 3];
    let ways = [(&together, &pools[0]), (&together, &pools[1]), (&alone, &pools[0])];
    let count = if shared_blocks > 0 { 3 } else { 2 };
    for _ in 0..5 {
        for (best, (plans, kv)) in best.iter_mut().zip(ways).take(count) {
            *best = best.min(best_seconds(pool.threads(), 2, || attend_with(plans, kv)) / 4.0);
        }
    }
    let seen = (sequences * (0..rows).map(|r| context + r + 1).sum::<usize>()) as f64;
    let gigabytes = (sequences * (context + rows)) as f64 * 3.0 * 64.0 * 4.0 / best[0] / 1e9;
    println!(
        "attention {name:8} {sequences:2} x {rows:3} rows after {context:4}, {:4} shared, {:12} {:8.3} ms a layer  {:6.1} GFLOP/s {gigabytes:5.1} GB/s, int8 {:.2} of the time{}",
        shared_blocks * 16,
        tier.name(),
        best[0] * 1e3,
        seen * 9.0 * 64.0 * 4.0 / best[0] / 1e9,
        best[1] / best[0],
        if count > 2 { format!(", each row alone {:.2}", best[2] / best[0]) } else { String::new() }
    );
}

fn main() {
    let threads = std::env::args().nth(1).and_then(|t| t.parse().ok()).unwrap_or(1);
    let tiers: Vec<Tier> = match std::env::args().nth(3) {
        None => Tier::ALL.into_iter().filter(|tier| tier.is_supported()).collect(),
        Some(name) => vec![Tier::choose(&name).expect("a tier of this machine")],
    };
    println!("threads {threads}, best tier {}", Tier::detect());
    let pool = ThreadPool::new(threads).expect("starts");
    ceilings(&tiers);
    tile_ceiling();
    bf16_ceiling();
    for part in std::env::args().nth(2).as_deref().unwrap_or("linear,bf16,head,attention").split(',') {
        match part {
            "linear" => linear_layers(&pool, &tiers),
            "bf16" => bf16_layers(&pool, &tiers),
            "head" => head(&pool, &tiers),
            "attention" => attention(&pool, &tiers),
            other => println!("no part {other}: linear, bf16, head, attention"),
        }
    }
}
