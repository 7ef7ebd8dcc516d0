//! Gemma 3 270M, a real model of another family: teacher-forced logits against those that transformers computed in f32 on the dequantised
//! weights (`tests/oracle/gemma3.py`), and equal bits however they are computed, past the attention window.

use std::path::Path;
use std::sync::Arc;

use penstock_exec_cpu::{CpuModel, Forward, Keep, MemoryBudget, Numerics, SequenceRows, ThreadPool, Tier};
use penstock_kernels_cpu::{KvPool, logits};
use penstock_model::{Model, OpenOptions};

/// Least share of positions at which both rank the same token first.
const TOP1_MIN: f64 = 0.95;
/// Greatest root mean square difference of log-probabilities over the kept tokens of all positions.
const LOGPROB_RMS_MAX: f64 = 0.06;
/// Blocks of 16 tokens: the longest text has 800.
const BLOCKS: usize = 50;

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> &'a [u8] {
        let (head, tail) = self.0.split_at(n);
        self.0 = tail;
        head
    }
    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take(4).try_into().expect("four bytes"))
    }
    fn f32(&mut self) -> f32 {
        f32::from_bits(self.u32())
    }
}

/// The model, or `None`, said aloud, where it was not fetched or would take too long.
fn gemma3() -> Option<Model> {
    let path = penstock_model::cache_dir::gemma3_path().unwrap_or_default();
    if !path.exists() {
        eprintln!("SKIPPED on Gemma 3: {} is missing (cargo xtask model --which gemma3 fetches it)", path.display());
        return None;
    }
    if Tier::detect() == Tier::Scalar {
        eprintln!("SKIPPED on Gemma 3: this CPU has the scalar tier alone, which would take too long");
        return None;
    }
    Some(Model::open(&path, &OpenOptions::default(), &mut |_, _| {}).expect("Gemma 3 opens"))
}

fn load(model: &Model) -> (Forward, KvPool) {
    let threads = Arc::new(ThreadPool::new(2).expect("threads start"));
    let budget = MemoryBudget::new(2 << 30);
    let cpu = Arc::new(CpuModel::load(model, threads, &budget, Numerics::default()).expect("loads"));
    let kv = KvPool::new(&budget, Forward::kv_shape(&cpu, 16, BLOCKS)).expect("fits");
    (Forward::new(cpu), kv)
}

#[test]
fn teacher_forced_logits_agree_with_transformers() {
    let Some(model) = gemma3() else { return };
    let config = model.config();
    let windows: Vec<Option<usize>> = (0..7).map(|layer| config.window_of(layer)).collect();
    assert_eq!(windows, [Some(512), Some(512), Some(512), Some(512), Some(512), None, Some(512)]);
    let oracle = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/oracle/gemma3_logits.bin");
    let oracle = std::fs::read(oracle).expect("is part of the repository");
    let mut reader = Reader(&oracle);
    assert_eq!(reader.take(8), b"PSLOGIT2");
    assert_eq!(reader.take(32), &model.manifest().weights.0, "the oracle is for other weights");
    let (vocab, kept, texts) = (reader.u32() as usize, reader.u32() as usize, reader.u32() as usize);
    assert_eq!(vocab, config.vocab);
    let (mut forward, mut kv) = load(&model);
    let table: Vec<u32> = (0..BLOCKS as u32).rev().collect();
    let tier = Tier::detect();
    let (mut positions, mut agreed, mut squares, mut values, mut worst) = (0, 0, 0f64, 0, 0f64);
    // Positions past the window of 512 tokens, apart: there a wrong window or base would show.
    let (mut late, mut late_agreed) = (0, 0);
    let mut rows = vec![0f32; 16 * vocab];
    for _ in 0..texts {
        let name_len = usize::from(u16::from_le_bytes(reader.take(2).try_into().expect("two bytes")));
        let name = std::str::from_utf8(reader.take(name_len)).expect("a name").to_owned();
        let count = reader.u32() as usize;
        let tokens: Vec<u32> = (0..count).map(|_| reader.u32()).collect();
        forward
            .run(&mut kv, &[SequenceRows { tokens: &tokens, context: 0, table: &table, keep: Keep::All }])
            .expect("runs");
        let before = agreed;
        for first in (0..count).step_by(16) {
            let some = (count - first).min(16);
            forward.logits(first, some, &mut rows[..some * vocab]).expect("runs");
            for (number, row) in rows[..some * vocab].chunks(vocab).enumerate() {
                let lse = f64::from(reader.f32());
                let wanted: Vec<f64> = (0..kept).map(|_| f64::from(reader.f32())).collect();
                let ids: Vec<usize> = (0..kept).map(|_| reader.u32() as usize).collect();
                let ours = logits::log_sum_exp(tier, row);
                let is_equal = usize::from(logits::argmax(tier, row) == Some(ids[0]));
                (positions, agreed) = (positions + 1, agreed + is_equal);
                if first + number >= 512 {
                    (late, late_agreed) = (late + 1, late_agreed + is_equal);
                }
                for (id, value) in ids.into_iter().zip(wanted) {
                    let difference = (f64::from(row[id]) - ours) - (value - lse);
                    squares += difference.powi(2);
                    worst = worst.max(difference.abs());
                    values += 1;
                }
            }
        }
        println!("{name}: {} of {count} agree", agreed - before);
    }
    assert!(reader.0.is_empty(), "the whole file was read");
    let (share, rms) = (agreed as f64 / positions as f64, (squares / f64::from(values)).sqrt());
    println!(
        "figure: Gemma 3 270M, {positions} positions: top-1 {:.2} % ({late_agreed} of {late} past the window), log-probability rms {rms:.4}, worst {worst:.3}",
        100.0 * share
    );
    assert!(positions >= 1_000 && late >= 200, "{positions} positions, {late} past the window");
    assert!(share >= TOP1_MIN, "top-1 agreement {share}");
    assert!(late_agreed as f64 >= TOP1_MIN * late as f64, "{late_agreed} of {late} past the window");
    assert!(rms <= LOGPROB_RMS_MAX, "log-probability rms {rms}");
}

#[test]
fn bits_do_not_depend_on_chunks_past_the_window() {
    let Some(model) = gemma3() else { return };
    let (mut forward, mut kv) = load(&model);
    let vocab = model.config().vocab;
    let tokens: Vec<u32> = (0..600u32).map(|i| i * 7919 % 262_144).collect();
    let table: Vec<u32> = (0..BLOCKS as u32).collect();
    let mut last_row = |chunk: usize| -> Vec<u32> {
        let mut row = vec![0f32; vocab];
        for (number, part) in tokens.chunks(chunk).enumerate() {
            let batch = [SequenceRows { tokens: part, context: number * chunk, table: &table, keep: Keep::Last }];
            forward.run(&mut kv, &batch).expect("runs");
            forward.logits(0, 1, &mut row).expect("runs");
        }
        row.iter().map(|value| value.to_bits()).collect()
    };
    let wanted = last_row(600);
    assert!(last_row(97) == wanted, "chunks of 97");
}
