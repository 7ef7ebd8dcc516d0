//! The whole pass on a small random model: near its f64 twin, and with bits that depend on the sequence alone.

mod support;

use std::sync::Arc;

use penstock_exec_cpu::{CpuModel, Forward, Keep, KvDtype, MemoryBudget, Numerics, Precision, SequenceRows, Tier};
use penstock_kernels_cpu::KvPool;
use penstock_model::weights::{LayerPart, TensorRole};
use penstock_model::{DType, RopeLayout};
use support::{Noise, TinyModel, fast_tier, tiers};

/// How sequences are computed.
#[derive(Clone, Copy)]
struct Setting {
    /// Tokens of each sequence per call.
    chunk: usize,
    block_tokens: usize,
    /// Seed of the blocks' placement.
    placement: u64,
}

const PLAIN: Setting = Setting { chunk: 600, block_tokens: 16, placement: 0 };

/// Logits of all positions of all sequences, computed side by side, chunk by chunk.
fn logits(model: &Arc<CpuModel>, sequences: &[Vec<u32>], setting: Setting) -> Vec<Vec<f32>> {
    let longest = sequences.iter().map(Vec::len).max().unwrap_or(0);
    let each = longest.div_ceil(setting.block_tokens);
    let blocks = each * sequences.len();
    let shape = Forward::kv_shape(model, setting.block_tokens, blocks);
    let mut kv = KvPool::new(&MemoryBudget::new(1 << 30), shape).expect("fits");
    let order = Noise(setting.placement).shuffled(blocks);
    let mut forward = Forward::new(Arc::clone(model));
    let vocab = model.config().vocab;
    let mut out: Vec<Vec<f32>> = vec![Vec::new(); sequences.len()];
    for start in (0..longest).step_by(setting.chunk) {
        let live: Vec<usize> = (0..sequences.len()).filter(|&i| sequences[i].len() > start).collect();
        let batch: Vec<SequenceRows<'_>> = live
            .iter()
            .map(|&i| SequenceRows {
                tokens: &sequences[i][start..sequences[i].len().min(start + setting.chunk)],
                context: start,
                table: &order[i * each..][..each],
                keep: Keep::All,
            })
            .collect();
        forward.run(&mut kv, &batch).expect("no kernel panics");
        let mut first = 0;
        for (&i, rows) in live.iter().zip(&batch) {
            let mut part = vec![0f32; rows.tokens.len() * vocab];
            forward.logits(first, rows.tokens.len(), &mut part).expect("no kernel panics");
            out[i].extend(part);
            first += rows.tokens.len();
        }
        assert_eq!(forward.kept_rows(), first);
    }
    out
}

fn bits(rows: &[Vec<f32>]) -> Vec<Vec<u32>> {
    rows.iter().map(|row| row.iter().map(|v| v.to_bits()).collect()).collect()
}

#[test]
fn the_pass_is_near_its_f64_twin() {
    for (layout, tied) in [(RopeLayout::Interleaved, true), (RopeLayout::Halves, false)] {
        let tiny = TinyModel::new(layout, tied);
        let tokens = Noise(1).tokens(40, tiny.config.vocab);
        let wanted: Vec<f64> = tiny.reference(&tokens).concat();
        for tier in [Tier::Scalar].into_iter().chain(fast_tier()) {
            // The f32 weights are rounded to int8, at about 5e-5 of noise power a product; int8 activations add as much again.
            // int8 keys and values add less than the weights do: their step is as long, and they are rounded once.
            for (precision, kv_dtype, bound) in [
                (Precision::Int15, KvDtype::Bf16, 5e-4),
                (Precision::Int8, KvDtype::Bf16, 1e-3),
                (Precision::Int15, KvDtype::Int8, 1e-3),
                // Weights and activations rounded to 2^-8 of themselves at most: measured at 1.3e-5, with any unit.
                (Precision::Bf16, KvDtype::Bf16, 5e-5),
            ] {
                let model = tiny.load_with(1, Numerics { tier, precision, kv_dtype });
                let got = logits(&model, std::slice::from_ref(&tokens), PLAIN).concat();
                let error: f64 = got.iter().zip(&wanted).map(|(&g, w)| (f64::from(g) - w).powi(2)).sum();
                let nmse = error / wanted.iter().map(|w| w * w).sum::<f64>();
                println!("{layout:?} {tier} {precision:?} {kv_dtype}: nmse {nmse:e}");
                assert!(nmse < bound, "{layout:?} {tier} {precision:?} {kv_dtype}: nmse {nmse:e}");
            }
        }
    }
}

/// Normalised mean square error of one sequence's logits.
fn error_of(tiny: &TinyModel, numerics: Numerics) -> f64 {
    let tokens = Noise(6).tokens(24, tiny.config.vocab);
    let wanted: Vec<f64> = tiny.reference(&tokens).concat();
    let got = logits(&tiny.load_with(1, numerics), std::slice::from_ref(&tokens), PLAIN).concat();
    let error: f64 = got.iter().zip(&wanted).map(|(&g, w)| (f64::from(g) - w).powi(2)).sum();
    error / wanted.iter().map(|w| w * w).sum::<f64>()
}

#[test]
fn every_storage_type_serves_as_embedding_matrix_and_head() {
    let numerics = Numerics { precision: Precision::Int15, ..Numerics::default() };
    for dtype in DType::ALL {
        for tied in [true, false] {
            let error = error_of(&TinyModel::stored(tied, |_| dtype), numerics);
            println!("{dtype} tied {tied}: nmse {error:e}");
            // Block types lose only what 15-bit activations and bfloat16 keys and values do; floats are rounded to int8 on top.
            let bound = if dtype.block_len() > 1 { 2e-5 } else { 5e-4 };
            assert!(error < bound, "{dtype} tied {tied}: nmse {error:e}");
        }
    }
}

#[test]
fn types_may_be_mixed_inside_a_layer() {
    // As Q4_K_M files are: most of a layer in one type, some parts in finer ones, the embedding in another.
    let mixed = TinyModel::stored(false, |role| match role {
        TensorRole::TokenEmbedding => DType::Q8_0,
        TensorRole::Output => DType::Q6K,
        TensorRole::Layer { index: 0, part: LayerPart::AttnV | LayerPart::FfnDown } => DType::Q6K,
        TensorRole::Layer { part: LayerPart::AttnK, .. } => DType::Q5_0,
        TensorRole::Layer { part: LayerPart::FfnUp, .. } => DType::Bf16,
        _ => DType::Q4K,
    });
    for tier in [Tier::Scalar].into_iter().chain(fast_tier()) {
        let error = error_of(&mixed, Numerics { tier, precision: Precision::Int15, ..Numerics::default() });
        assert!(error < 2e-4, "{tier}: nmse {error:e}");
    }
}

#[test]
fn bits_depend_on_the_sequence_alone() {
    let tiny = TinyModel::new(RopeLayout::Interleaved, true);
    let mut noise = Noise(2);
    let sequences: Vec<Vec<u32>> = [1, 15, 33, 130, 150].map(|n| noise.tokens(n, tiny.config.vocab)).into();
    let exact = KvDtype::ALL.map(|kv_dtype| Numerics { kv_dtype, ..Numerics::default() });
    // Every unit that adds up bfloat16 keeps to it.
    let bf16 = Tier::ALL.into_iter().skip(1).filter(|tier| tier.is_supported());
    let bf16 = bf16.map(|tier| Numerics { tier, precision: Precision::Bf16, ..Numerics::default() });
    for numerics in exact.into_iter().chain(bf16) {
        let load = |threads| tiny.load_with(threads, numerics);
        let model = load(1);
        let alone: Vec<Vec<f32>> =
            sequences.iter().flat_map(|s| logits(&model, std::slice::from_ref(s), PLAIN)).collect();
        let wanted = bits(&alone);
        for setting in [
            PLAIN,
            Setting { chunk: 1, placement: 3, ..PLAIN },
            Setting { chunk: 9, placement: 4, ..PLAIN },
            Setting { chunk: 64, block_tokens: 32, ..PLAIN },
        ] {
            assert_eq!(bits(&logits(&model, &sequences, setting)), wanted, "chunk {}, {numerics:?}", setting.chunk);
        }
        for threads in [2, 3] {
            assert_eq!(bits(&logits(&load(threads), &sequences, PLAIN)), wanted, "{threads} threads, {numerics:?}");
        }
    }
}

#[test]
fn every_tier_gives_the_oracles_bits() {
    let tiny = TinyModel::new(RopeLayout::Halves, false);
    let sequences = [Noise(3).tokens(37, tiny.config.vocab), Noise(4).tokens(3, tiny.config.vocab)];
    for (tier, kv_dtype) in tiers().into_iter().skip(1).flat_map(|tier| KvDtype::ALL.map(|dtype| (tier, dtype))) {
        let load = |threads, tier| tiny.load_with(threads, Numerics { tier, kv_dtype, ..Numerics::default() });
        let wanted = bits(&logits(&load(1, Tier::Scalar), &sequences, PLAIN));
        assert_eq!(bits(&logits(&load(2, tier), &sequences, PLAIN)), wanted, "{tier} {kv_dtype}");
    }
}

/// Where nothing but fused multiply-adds adds up bfloat16, tiers are equal; and a name tells which numbers are.
#[test]
fn bfloat16_has_the_oracles_bits_where_its_name_is_the_oracles() {
    let tiny = TinyModel::new(RopeLayout::Halves, false);
    let sequences = [Noise(3).tokens(37, tiny.config.vocab), Noise(4).tokens(3, tiny.config.vocab)];
    let of = |tier| Numerics { tier, precision: Precision::Bf16, ..Numerics::default() };
    assert_eq!(of(Tier::Scalar).products(), "bf16/fma");
    assert_eq!(Numerics::default().products(), "int15");
    let wanted = bits(&logits(&tiny.load_with(1, of(Tier::Scalar)), &sequences, PLAIN));
    for tier in Tier::ALL.into_iter().skip(1).filter(|tier| tier.is_supported()) {
        let got = bits(&logits(&tiny.load_with(2, of(tier)), &sequences, PLAIN));
        assert_eq!(got == wanted, of(tier).products() == "bf16/fma", "{}", of(tier).products());
    }
}

#[test]
fn a_batch_longer_than_one_pass_is_split_without_a_trace() {
    let tiny = TinyModel::new(RopeLayout::Interleaved, true);
    let model = tiny.load(2, Tier::detect());
    let mut noise = Noise(5);
    // 1,060 rows: two borders between passes, both inside a sequence.
    let sequences: Vec<Vec<u32>> = [400, 350, 310].map(|n| noise.tokens(n, tiny.config.vocab)).into();
    let together = logits(&model, &sequences, PLAIN);
    let apart: Vec<Vec<f32>> = sequences
        .iter()
        .flat_map(|s| logits(&model, std::slice::from_ref(s), Setting { chunk: 100, ..PLAIN }))
        .collect();
    assert_eq!(bits(&together), bits(&apart));
}
