//! Time of choosing one token from a row of logits, by parameters and vocabulary.
//!
//! `cargo run --profile ci -p penstock-exec-cpu --example sampling -- [tier]`. One thread; the least processor time of several rounds over
//! 16 rows, which are copied afresh outside of what is measured.

use penstock_exec::SamplingParams;
use penstock_exec_cpu::Tier;
use penstock_exec_cpu::sampling::{Request, Sampler, SeenTokens};

const ROWS: usize = 16;
const ROUNDS: usize = 12;

/// Processor time of this process so far.
fn processor_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Sums of six uniform numbers: a bell of deviation 2.1, whose 49,152 values leave the likeliest token a few percent of the whole.
fn logits(vocabulary: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut uniform = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32) / 8_388_608.0 - 1.0
    };
    (0..vocabulary).map(|_| (0..6).map(|_| uniform()).sum::<f32>() * 1.5).collect()
}

fn main() {
    let tier = match std::env::args().nth(1).as_deref().map_or(Ok(Tier::detect()), Tier::choose) {
        Ok(tier) => tier,
        Err(fault) => {
            eprintln!("{fault}");
            return;
        }
    };
    let plain = SamplingParams { temperature: 0.8, seed: 7, ..SamplingParams::default() };
    let penalties = SamplingParams { repetition_penalty: 1.1, frequency_penalty: 0.2, ..plain.clone() };
    let kinds = [
        ("greedy", SamplingParams { temperature: 0.0, ..plain.clone() }),
        ("temperature 0.8", plain.clone()),
        ("top-k 40", SamplingParams { top_k: 40, ..plain.clone() }),
        ("top-p 0.9", SamplingParams { top_p: 0.9, ..plain.clone() }),
        ("min-p 0.05", SamplingParams { min_p: 0.05, ..plain.clone() }),
        ("top-k 40, top-p 0.9", SamplingParams { top_k: 40, top_p: 0.9, ..plain.clone() }),
        ("top-p 0.9 at temperature 3", SamplingParams { temperature: 3.0, top_p: 0.9, ..plain.clone() }),
        ("top-p 0.9, penalties", SamplingParams { top_p: 0.9, ..penalties }),
        ("greedy, 20 log-probabilities", SamplingParams { temperature: 0.0, logprobs: Some(20), ..plain }),
    ];
    for vocabulary in [49_152, 262_144] {
        let rows: Vec<Vec<f32>> = (0..ROWS as u64).map(|seed| logits(vocabulary, seed)).collect();
        let history: Vec<u32> = (0..600u32).map(|i| i * i % vocabulary as u32).collect();
        let seen = SeenTokens::from_history(&history[..500], &history[500..]);
        for (name, params) in &kinds {
            let mut sampler = Sampler::new(tier);
            let seen = SeenTokens::needed(params).then_some(&seen);
            let mut least = f64::INFINITY;
            for round in 0..ROUNDS as u64 {
                let mut used = rows.clone();
                let start = processor_seconds();
                for row in &mut used {
                    let request = Request { params, token_index: round, seen, mask: None };
                    assert!(sampler.sample(row, request).is_some());
                }
                least = least.min(processor_seconds() - start);
            }
            println!("sampling {vocabulary:6} {tier} {name:29} {:.4} ms a row", least * 1e3 / ROWS as f64);
        }
    }
}
