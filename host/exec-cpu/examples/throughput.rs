//! Tokens per second of the pass alone, without scheduler and server: decode at several widths, and prefill.
//!
//! Rates are by the processor's time shared among the threads, so that a busy machine shows as little as possible; `wall` is by the clock.
//!
//! `cargo run --profile ci -p penstock-exec-cpu --example throughput -- MODEL.gguf [threads] [all|prefill] [int15|bf16] [private|shared]`;
//! `prefill` ends after the prefill, `bf16` computes products of bfloat16, `shared` has the KV pool in a memfd.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use penstock_exec::SamplingParams;
use penstock_exec_cpu::sampling::{Request, Sampler};
use penstock_exec_cpu::{CpuModel, Forward, Keep, MemoryBudget, Numerics, Precision, SequenceRows, ThreadPool};
use penstock_kernels_cpu::KvPool;
use penstock_model::{Model, OpenOptions};

const CONTEXT: usize = 128;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let Some(path) = arguments.next() else {
        eprintln!("usage: throughput MODEL.gguf [threads] [all|prefill] [int15|bf16] [private|shared]");
        return;
    };
    let threads = arguments.next().and_then(|t| t.parse().ok()).unwrap_or(2);
    let prefill_only = arguments.next().is_some_and(|which| which == "prefill");
    let precision = match arguments.next().as_deref() {
        None | Some("int15") => Precision::Int15,
        Some("bf16") => Precision::Bf16,
        Some(other) => {
            eprintln!("{other} is no precision: int15, bf16");
            return;
        }
    };
    let is_shared = arguments.next().is_some_and(|pool| pool == "shared");
    let numerics = Numerics { precision, ..Numerics::default() };
    let model = Model::open(Path::new(&path), &OpenOptions::default(), &mut |_, _| {}).expect("opens");
    let pool = Arc::new(ThreadPool::new(threads).expect("threads start"));
    let budget = MemoryBudget::new(8 << 30);
    let start = Instant::now();
    let cpu = Arc::new(CpuModel::load(&model, pool, &budget, numerics).expect("loads"));
    println!(
        "packed {} MiB in {:.2?}, tier {}, {} products, {threads} threads",
        cpu.weight_bytes() >> 20,
        start.elapsed(),
        cpu.tier(),
        numerics.products()
    );
    let blocks = 32 * (CONTEXT + 64) / 16;
    let shape = Forward::kv_shape(&cpu, 16, blocks);
    let kv = if is_shared { KvPool::shared(&budget, shape, true) } else { KvPool::new(&budget, shape) };
    let mut kv = kv.expect("fits");
    let mut forward = Forward::new(Arc::clone(&cpu));
    let vocab = cpu.config().vocab;
    let tables: Vec<Vec<u32>> =
        (0..32).map(|s| (0..(CONTEXT as u32 + 64) / 16).map(|b| b * 32 + s).collect()).collect();
    let long: Vec<u32> = (0..512u32).map(|i| 1000 + i * 7 % 20_000).collect();
    let whole: Vec<u32> = (0..blocks as u32).collect();
    for length in [128, 512] {
        let rows = [SequenceRows { tokens: &long[..length], context: 0, table: &whole, keep: Keep::Last }];
        let best = best(threads, 3, || forward.run(&mut kv, &rows).expect("runs"));
        let (rate, wall) = (length as f64 / best.processor, length as f64 / best.wall);
        println!("prefill {length}: {rate:.0} tok/s (wall {wall:.0})");
    }
    if prefill_only {
        return;
    }
    for table in &tables {
        let rows = [SequenceRows { tokens: &long[..CONTEXT], context: 0, table, keep: Keep::None }];
        forward.run(&mut kv, &rows).expect("runs");
    }
    for width in [1, 4, 8, 16, 32] {
        let mut out = vec![0f32; width * vocab];
        let rows: Vec<SequenceRows<'_>> = tables[..width]
            .iter()
            .map(|table| SequenceRows { tokens: &long[..1], context: CONTEXT, table, keep: Keep::Last })
            .collect();
        let pass = best(threads, 8, || forward.run(&mut kv, &rows).expect("runs"));
        let head = best(threads, 8, || forward.logits(0, width, &mut out).expect("runs"));
        let mut sampler = Sampler::new(cpu.tier());
        let params = SamplingParams { temperature: 0.8, top_p: 0.95, ..SamplingParams::default() };
        let sample = best(threads, 3, || {
            let mut logits = out.clone();
            for row in logits.chunks_mut(vocab) {
                let request = Request { params: &params, token_index: 1, seen: None, mask: None };
                assert!(sampler.sample(row, request).is_some());
            }
        });
        println!(
            "decode {width:2}: {:.0} tok/s (wall {:.0}; layers {:.2} ms, head {:.2} ms); top-p sampling on one thread {:.2} ms",
            width as f64 / (pass.processor + head.processor),
            width as f64 / (pass.wall + head.wall),
            pass.processor * 1e3,
            head.processor * 1e3,
            sample.processor * threads as f64 * 1e3
        );
    }
}

/// Least seconds of several calls.
struct Best {
    /// Processor time shared among the threads: other processes cost little of it.
    processor: f64,
    /// By the clock.
    wall: f64,
}

fn best(threads: usize, repeats: usize, mut f: impl FnMut()) -> Best {
    let mut best = Best { processor: f64::INFINITY, wall: f64::INFINITY };
    for _ in 0..repeats {
        let (start, processor) = (Instant::now(), processor_seconds());
        f();
        best.wall = best.wall.min(start.elapsed().as_secs_f64());
        best.processor = best.processor.min((processor_seconds() - processor) / threads as f64);
    }
    best
}

/// Processor time of this process so far.
fn processor_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
