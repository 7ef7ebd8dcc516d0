//! The demo model: against itself, computed in other ways, and against another implementation, by the top logits that transformers computed in f32 on the dequantised weights, kept in
//! `tests/oracle/logits.bin` (its layout and origin: `tests/oracle/logits.py`). The same for its twin in Q8_0, which is made on the spot and has
//! to be the file that `tests/oracle/requantise.py` makes.

mod requantise;
mod support;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use penstock_exec_cpu::{
    Bf16Unit, CpuModel, Forward, Keep, KvDtype, MemoryBudget, Numerics, Precision, SequenceRows, ThreadPool, Tier,
};
use penstock_kernels_cpu::{KvPool, logits};
use penstock_model::{DType, Model, OpenOptions};
use support::tiers;

/// How far this implementation may be from the other.
struct Bounds {
    /// Least share of positions at which both rank the same token first.
    top1_min: f64,
    /// Greatest root mean square difference of log-probabilities over the kept tokens of all positions.
    logprob_rms_max: f64,
}

/// Two texts that repeat a word or two make most of the difference; the other 5,239 positions are at 0.014 with either file.
const BOUNDS: Bounds = Bounds { top1_min: 0.97, logprob_rms_max: 0.03 };
/// The same for the twin in Q8_0.
const BOUNDS_Q8_0: Bounds = Bounds { top1_min: 0.97, logprob_rms_max: 0.045 };
/// With keys and values in int8: 98.0 % and 0.177, most of it again by the texts that repeat a word.
const BOUNDS_INT8_KV: Bounds = Bounds { top1_min: 0.975, logprob_rms_max: 0.2 };
/// With products of bfloat16, whose activations keep eight bits of fifteen: 98.7 % and 0.145 by AVX-512 BF16, 98.8 % and 0.139 by fused
/// multiply-adds. Without the two texts that repeat a word it is 99.1 % and 0.034.
const BOUNDS_BF16: Bounds = Bounds { top1_min: 0.98, logprob_rms_max: 0.17 };

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> &'a [u8] {
        let (head, tail) = self.0.split_at(n);
        self.0 = tail;
        head
    }
    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take(2).try_into().expect("two bytes"))
    }
    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take(4).try_into().expect("four bytes"))
    }
    fn f32(&mut self) -> f32 {
        f32::from_bits(self.u32())
    }
}

#[derive(Default)]
struct Tally {
    positions: usize,
    agreed: usize,
    squares: f64,
    kept: usize,
    worst: f64,
    lse_squares: f64,
}

/// Where the demo model is, or `None`, said aloud, where it was not fetched.
fn demo_path() -> Option<PathBuf> {
    let path = penstock_model::cache_dir::demo_path().unwrap_or_default();
    if !path.exists() {
        eprintln!("SKIPPED on the demo model: {} is missing (cargo xtask model fetches it)", path.display());
        return None;
    }
    Some(path)
}

fn demo_model() -> Option<Model> {
    let path = demo_path()?;
    Some(Model::open(&path, &OpenOptions::default(), &mut |_, _| {}).expect("the demo model opens"))
}

fn load(model: &Model, threads: usize, numerics: Numerics) -> Arc<CpuModel> {
    let threads = Arc::new(ThreadPool::new(threads).expect("threads start"));
    Arc::new(CpuModel::load(model, threads, &MemoryBudget::new(1 << 30), numerics).expect("loads"))
}

/// Bits of the logits at every position, computed `chunk` tokens at a time.
fn logit_bits(model: &Arc<CpuModel>, tokens: &[u32], chunk: usize) -> Vec<Vec<u32>> {
    let mut kv = KvPool::new(&MemoryBudget::new(1 << 30), Forward::kv_shape(model, 16, 16)).expect("fits");
    // Blocks from the back: placement must not show.
    let table: Vec<u32> = (0..16).rev().collect();
    let mut forward = Forward::new(Arc::clone(model));
    let mut row = vec![0f32; model.config().vocab];
    let mut out = Vec::new();
    for (number, part) in tokens.chunks(chunk).enumerate() {
        let batch = [SequenceRows { tokens: part, context: number * chunk, table: &table, keep: Keep::All }];
        forward.run(&mut kv, &batch).expect("no kernel panics");
        for kept in 0..part.len() {
            forward.logits(kept, 1, &mut row).expect("no kernel panics");
            out.push(row.iter().map(|v| v.to_bits()).collect());
        }
    }
    out
}

#[test]
fn the_demo_model_has_the_same_bits_however_it_is_computed() {
    let Some(model) = demo_model() else { return };
    // Ids without meaning, all over the vocabulary; 140 of them cross the border between two attention spans.
    let tokens: Vec<u32> = (0..140u32).map(|i| i * 7919 % 49_152).collect();
    for kv_dtype in KvDtype::ALL {
        let numerics = Numerics { kv_dtype, ..Numerics::default() };
        let wanted = same_bits(&model, &tokens, numerics);
        same_bits_on_every_tier(&model, &tokens, numerics, &wanted);
    }
    for tier in Tier::ALL.into_iter().skip(1) {
        if !tier.is_supported() {
            eprintln!("SKIPPED bf16 on tier {tier}: this CPU lacks its instructions");
            continue;
        }
        same_bits(&model, &tokens, Numerics { tier, precision: Precision::Bf16, ..Numerics::default() });
    }
}

/// The bits of the logits at every position, which chunks and threads do not change.
fn same_bits(model: &Model, tokens: &[u32], numerics: Numerics) -> Vec<Vec<u32>> {
    let fast = load(model, 1, numerics);
    let wanted = logit_bits(&fast, tokens, 140);
    assert!(logit_bits(&fast, tokens, 33) == wanted, "{numerics:?}, chunks of 33");
    assert!(logit_bits(&load(model, 2, numerics), tokens, 7) == wanted, "{numerics:?}, chunks of 7 on two threads");
    wanted
}

fn same_bits_on_every_tier(model: &Model, tokens: &[u32], numerics: Numerics, wanted: &[Vec<u32>]) {
    for tier in tiers() {
        // The scalar oracle is slow: its first few positions.
        let some = if tier == Tier::Scalar { 3 } else { 40 };
        let got = logit_bits(&load(model, 2, Numerics { tier, ..numerics }), &tokens[..some], some);
        assert!(got == wanted[..some], "{tier}, {numerics:?}");
    }
}

#[test]
fn teacher_forced_logits_agree_with_transformers() {
    let Some(model) = demo_model() else { return };
    compare(&model, "logits.bin", Numerics::default(), &BOUNDS);
}

#[test]
fn int8_keys_and_values_agree_with_transformers() {
    let Some(model) = demo_model() else { return };
    compare(&model, "logits.bin", Numerics { kv_dtype: KvDtype::Int8, ..Numerics::default() }, &BOUNDS_INT8_KV);
}

/// On every unit that this CPU has: they add up differently.
#[test]
fn bfloat16_products_agree_with_transformers() {
    let Some(model) = demo_model() else { return };
    let mut units = Vec::new();
    for tier in Tier::ALL.into_iter().rev().filter(|tier| tier.is_supported() && *tier != Tier::Scalar) {
        let unit = Bf16Unit::of(tier);
        if !units.contains(&unit) {
            units.push(unit);
            compare(
                &model,
                "logits.bin",
                Numerics { tier, precision: Precision::Bf16, ..Numerics::default() },
                &BOUNDS_BF16,
            );
        }
    }
    for unit in [Bf16Unit::Fma, Bf16Unit::Avx512Bf16, Bf16Unit::Amx] {
        if !units.contains(&unit) {
            eprintln!("SKIPPED bf16 on {unit}: this CPU lacks it");
        }
    }
}

#[test]
fn the_q8_0_twin_agrees_with_transformers() {
    let Some(path) = demo_path() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let twin = folder.path().join("twin.gguf");
    std::fs::write(&twin, requantise::requantise(&path, DType::Q8_0)).expect("written");
    let model = Model::open(&twin, &OpenOptions::default(), &mut |_, _| {}).expect("the twin opens");
    assert_eq!(model.weights().dtypes(), [DType::F32, DType::Q8_0]);
    compare(&model, "logits-q8_0.bin", Numerics::default(), &BOUNDS_Q8_0);
}

/// Computes every text of an oracle file and holds the logits against those kept there.
fn compare(model: &Model, oracle: &str, numerics: Numerics, bounds: &Bounds) {
    let oracle = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/oracle").join(oracle);
    let Ok(oracle) = std::fs::read(&oracle) else {
        eprintln!("SKIPPED oracle comparison: {} is missing", oracle.display());
        return;
    };
    let mut reader = Reader(&oracle);
    assert_eq!(reader.take(8), b"PSLOGIT1");
    assert_eq!(reader.take(32), &model.manifest().weights.0, "the oracle is for other weights");
    let (vocab, kept, texts) = (reader.u32() as usize, reader.u32() as usize, reader.u32() as usize);
    assert_eq!(vocab, model.config().vocab);
    let tier = numerics.tier;
    if tier == Tier::Scalar {
        eprintln!("SKIPPED oracle comparison: this CPU has the scalar tier alone, which would take too long");
        return;
    }
    let cpu = load(model, 2, numerics);
    let mut kv = KvPool::new(&MemoryBudget::new(1 << 30), Forward::kv_shape(&cpu, 16, 160)).expect("fits");
    let table: Vec<u32> = (0..160).collect();
    let mut forward = Forward::new(Arc::clone(&cpu));
    let mut all = Tally::default();
    for _ in 0..texts {
        let name_len = usize::from(reader.u16());
        let name = std::str::from_utf8(reader.take(name_len)).expect("a name").to_owned();
        let count = reader.u32() as usize;
        let tokens: Vec<u32> = (0..count).map(|_| u32::from(reader.u16())).collect();
        let batch = [SequenceRows { tokens: &tokens, context: 0, table: &table, keep: Keep::All }];
        forward.run(&mut kv, &batch).expect("no kernel panics");
        let mut tally = Tally::default();
        let mut rows = vec![0f32; 64 * vocab];
        for first in (0..count).step_by(64) {
            let some = (count - first).min(64);
            let rows = &mut rows[..some * vocab];
            forward.logits(first, some, rows).expect("no kernel panics");
            for row in rows.chunks(vocab) {
                let lse = f64::from(reader.f32());
                let values: Vec<f64> = (0..kept).map(|_| f64::from(reader.f32())).collect();
                let ids: Vec<usize> = (0..kept).map(|_| usize::from(reader.u16())).collect();
                let ours = logits::log_sum_exp(tier, row);
                tally.positions += 1;
                tally.agreed += usize::from(logits::argmax(tier, row) == Some(ids[0]));
                tally.lse_squares += (ours - lse).powi(2);
                for (&id, value) in ids.iter().zip(values) {
                    let difference = (f64::from(row[id]) - ours) - (value - lse);
                    tally.squares += difference.powi(2);
                    tally.worst = tally.worst.max(difference.abs());
                    tally.kept += 1;
                }
            }
        }
        let rms = (tally.squares / tally.kept as f64).sqrt();
        println!("{name}: {} of {} agree, log-probability rms {rms:.4}, worst {:.3}", tally.agreed, count, tally.worst);
        all.positions += tally.positions;
        all.agreed += tally.agreed;
        all.squares += tally.squares;
        all.kept += tally.kept;
        all.worst = all.worst.max(tally.worst);
        all.lse_squares += tally.lse_squares;
    }
    assert!(reader.0.is_empty(), "the whole file was read");
    let agreement = all.agreed as f64 / all.positions as f64;
    let rms = (all.squares / all.kept as f64).sqrt();
    let lse_rms = (all.lse_squares / all.positions as f64).sqrt();
    println!(
        "{} products, {} keys and values, {} positions: top-1 agreement {:.2} %, log-probability rms {rms:.4}, worst {:.3}, log-sum-exp rms {lse_rms:.4}",
        numerics.products(),
        numerics.kv_dtype,
        all.positions,
        100.0 * agreement,
        all.worst
    );
    assert!(all.positions >= 4000, "only {} positions", all.positions);
    assert!(agreement >= bounds.top1_min, "top-1 agreement {agreement}");
    assert!(rms <= bounds.logprob_rms_max, "log-probability rms {rms}");
}
