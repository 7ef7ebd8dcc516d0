//! The GGUF reader: what it reads right, and what it refuses.
#![allow(clippy::unwrap_used)]

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use penstock_model::gguf::tiny::TinyLlama;
use penstock_model::gguf::write::{GgufWriter, MetaValue};
use penstock_model::{DType, GgufHeader, LayerPart, ModelError, RopeLayout, TensorRole};
use support::{Random, open_bytes};

/// Counts what this thread holds, so that a reader that believes a file's counts is caught allocating.
struct Counting;

thread_local! {
    static HELD: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call is passed on to the system allocator unchanged; the counters are plain thread-local cells that allocate nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.get().saturating_add(layout.size());
        HELD.set(held);
        PEAK.set(PEAK.get().max(held));
        // SAFETY: the caller's own obligations, passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.set(HELD.get().saturating_sub(layout.size()));
        // SAFETY: the caller's own obligations, passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes an index may take for each byte of the file, and for none.
const PER_FILE_BYTE: usize = 32;
const BASE: usize = 16 << 10;

fn parse_bounded(file: &[u8]) -> Result<GgufHeader, ModelError> {
    let before = HELD.get();
    PEAK.set(before);
    let result = GgufHeader::parse(file);
    let used = PEAK.get() - before;
    assert!(used <= BASE + PER_FILE_BYTE * file.len(), "{used} bytes for a file of {}", file.len());
    result
}

#[test]
fn a_written_model_is_read_back() {
    for dtype in DType::ALL.into_iter().filter(|dtype| dtype.block_len() <= 32) {
        for tied_head in [true, false] {
            let shape = TinyLlama { dtype, tied_head, ..TinyLlama::default() };
            let model = open_bytes(&shape.file()).unwrap();
            let config = model.config();
            assert_eq!((config.layers, config.hidden, config.heads, config.kv_heads), (2, 64, 4, 2));
            assert_eq!((config.head_dim, config.rope_layout), (16, RopeLayout::Interleaved));
            assert_eq!(config.tied_head, tied_head);
            let weights = model.weights();
            let k = weights.tensor(TensorRole::layer(1, LayerPart::AttnK)).unwrap();
            assert_eq!((k.dtype, k.rows, k.cols), (dtype, 32, 64));
            assert_eq!(weights.name(TensorRole::layer(1, LayerPart::AttnK)), Some("blk.1.attn_k.weight"));
            assert!(weights.get(TensorRole::layer(2, LayerPart::AttnK)).is_none());
            assert!(weights.get(TensorRole::layer(0, LayerPart::AttnQBias)).is_none());
            let norm = weights.tensor(TensorRole::OutputNorm).unwrap().to_f32();
            assert_eq!((norm[0], norm[9], norm.len()), (0.75, 0.8125, 64));
            let (embedding, output) = (TensorRole::TokenEmbedding, TensorRole::Output);
            let same =
                weights.tensor(embedding).unwrap().bytes.as_ptr() == weights.tensor(output).unwrap().bytes.as_ptr();
            assert_eq!(same, tied_head);
        }
    }
}

/// Quantised storage is close to what was written: at most half a step of the coarsest type for weights in -1..1.
#[test]
fn quantised_values_are_near_the_written_ones() {
    // Rows of 256 values, so that super-blocks fit.
    let shape = TinyLlama { head_dim: 64, feed_forward: 256, ..TinyLlama::default() };
    let exact = open_bytes(&TinyLlama { dtype: DType::F32, ..shape }.file()).unwrap();
    let truth = exact.weights().tensor(TensorRole::TokenEmbedding).unwrap().to_f32();
    let largest = truth.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    for (dtype, steps) in [
        (DType::F16, 2048.0),
        (DType::Bf16, 256.0),
        (DType::Q8_0, 127.0),
        (DType::Q4_0, 8.0),
        (DType::Q4_1, 7.5),
        (DType::Q5_0, 16.0),
        (DType::Q5_1, 15.5),
        (DType::Q4K, 7.5),
        (DType::Q5K, 15.5),
        (DType::Q6K, 32.0),
    ] {
        let model = open_bytes(&TinyLlama { dtype, ..shape }.file()).unwrap();
        let stored = model.weights().tensor(TensorRole::TokenEmbedding).unwrap().to_f32();
        let error = truth.iter().zip(&stored).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
        // Floats are off by their unit roundoff, integers by half a step; symmetric types cut the sign they do not cover by a whole one, and
        // the rounded factors of super-blocks do the same at both ends.
        let share = match dtype {
            // 127 times a scale that is off by half a unit of a half: up to 0.062 of a step more.
            DType::Q8_0 => 0.57,
            DType::Q4_1 | DType::Q5_1 => 0.52,
            DType::Q4K | DType::Q5K | DType::Q6K => 1.25,
            _ => 1.01,
        };
        let bound = largest / steps * share;
        assert!(error <= bound && error > 0.0, "{dtype}: {error} exceeds {bound}");
    }
}

fn refused(file: &[u8]) -> String {
    open_bytes(file).expect_err("the file is refused").to_string()
}

#[test]
fn kinds_that_no_kernel_reads_are_named() {
    let shape = TinyLlama::default();
    let mut writer = shape.writer();
    shape.tensors(&mut writer);
    let mut file = writer.finish();
    // The type of token_embd.weight follows its name, dimension count and two dimensions.
    let at = file.windows(17).position(|w| w == b"token_embd.weight").unwrap() + 17 + 4 + 16;
    file[at..at + 4].copy_from_slice(&10u32.to_le_bytes());
    let message = refused(&file);
    assert!(message.contains("token_embd.weight") && message.contains("Q2_K (type 10)"), "{message}");
}

#[test]
fn models_of_another_kind_are_named() {
    let with = |key: &str, value: MetaValue| {
        let shape = TinyLlama::default();
        let mut writer = shape.writer();
        writer.meta(key, value);
        shape.tensors(&mut writer);
        refused(&writer.finish())
    };
    let check = |message: String, parts: &[&str]| {
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    };
    check(with("general.alignment", 24u32.into()), &["general.alignment"]);
    check(with("llama.block_count", 3u32.into()), &["llama.block_count", "twice"]);

    let mut mamba = GgufWriter::new();
    mamba.meta("general.architecture", "mamba");
    check(refused(&mamba.finish()), &["architecture", "mamba", "llama"]);
    check(refused(&GgufWriter::new().finish()), &["general.architecture", "missing"]);
    check(refused(b"GGUF"), &["malformed gguf", "version"]);
    check(refused(b"not a model at all"), &["does not begin with GGUF"]);
    check(refused(b"GGUF\x00\x00\x00\x03"), &["big endian"]);
    check(refused(b"GGUF\x01\x00\x00\x00"), &["GGUF version", "1"]);
}

/// A header with some counts, then raw bytes.
fn raw(tensors: u64, metadata: u64, rest: &[u8]) -> Vec<u8> {
    let mut file = b"GGUF\x03\x00\x00\x00".to_vec();
    file.extend(tensors.to_le_bytes());
    file.extend(metadata.to_le_bytes());
    file.extend(rest);
    file
}

fn entry(key: &str, kind: u32, rest: &[u8]) -> Vec<u8> {
    let mut out = (key.len() as u64).to_le_bytes().to_vec();
    out.extend(key.as_bytes());
    out.extend(kind.to_le_bytes());
    out.extend(rest);
    out
}

#[test]
fn hostile_headers_are_refused() {
    let check = |file: &[u8], part: &str| {
        let message = parse_bounded(file).expect_err(part).to_string();
        assert!(message.contains(part), "{message} should say {part}");
    };
    check(&raw(u64::MAX, 0, &[]), "exceed the limit");
    check(&raw(0, u64::MAX, &[]), "exceed the limit");
    check(&raw(1000, 0, &[0; 100]), "cannot fit");
    check(&raw(0, 1000, &[0; 100]), "cannot fit");
    check(&raw(0, 1, &[0; 64]), "outside 1..=");
    check(&raw(0, 1, &[0xff; 64]), "outside 1..=");
    check(&raw(0, 1, &entry("k", 99, &[0; 8])), "unknown kind 99");
    check(&raw(0, 1, &entry("k", 7, &[2])), "boolean of value 2");
    check(&raw(0, 1, &entry("k", 8, &u64::MAX.to_le_bytes())), "are left");
    check(&raw(0, 1, &entry("k", 8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xff])), "not UTF-8");
    // An array of 2^61 u64, whose size overflows; of 2^62 strings; of arrays of arrays of arrays.
    check(&raw(0, 1, &entry("k", 9, &[&10u32.to_le_bytes()[..], &(1u64 << 61).to_le_bytes()].concat())), "overflows");
    check(&raw(0, 1, &entry("k", 9, &[&8u32.to_le_bytes()[..], &(1u64 << 62).to_le_bytes()].concat())), "cannot fit");
    let nested = [&9u32.to_le_bytes()[..], &1u64.to_le_bytes()].concat().repeat(40);
    check(&raw(0, 1, &entry("k", 9, &nested)), "nests deeper");
    let twice = [entry("k", 4, &[0; 4]), entry("k", 4, &[0; 4])].concat();
    check(&raw(0, 2, &twice), "appears twice");

    let tensor = |name: &str, dimensions: &[u64], kind: u32, offset: u64| {
        let mut out = (name.len() as u64).to_le_bytes().to_vec();
        out.extend(name.as_bytes());
        out.extend((dimensions.len() as u32).to_le_bytes());
        dimensions.iter().for_each(|d| out.extend(d.to_le_bytes()));
        out.extend(kind.to_le_bytes());
        out.extend(offset.to_le_bytes());
        out
    };
    let one = |dimensions: &[u64], kind, offset| {
        let mut file = raw(1, 0, &tensor("t", dimensions, kind, offset));
        file.resize(file.len().next_multiple_of(32) + 64, 0);
        file
    };
    check(&one(&[], 0, 0), "0 dimensions");
    check(&one(&[1; 5], 0, 0), "5 dimensions");
    check(&one(&[0], 0, 0), "empty or overflows");
    check(&one(&[1 << 32, 1 << 32], 0, 0), "empty or overflows");
    check(&one(&[2, 1 << 40, 1 << 40], 0, 0), "overflow");
    check(&one(&[1 << 62], 0, 0), "no row of F32");
    check(&one(&[1 << 60], 0, 0), "past the end");
    check(&one(&[33], 8, 0), "no row of Q8_0");
    check(&one(&[4], 0, 16), "not aligned");
    check(&one(&[4], 0, u64::MAX - 31), "past the end");
    check(&one(&[17], 0, 0), "past the end");
    check(&one(&[4], 10, 1 << 40), "past the end");
    assert!(parse_bounded(&one(&[16], 0, 0)).is_ok());
    let mut two = raw(2, 0, &[tensor("a", &[16], 0, 0), tensor("b", &[16], 0, 32)].concat());
    two.resize(two.len().next_multiple_of(32) + 128, 0);
    check(&two, "share bytes");
    let mut same = raw(2, 0, &[tensor("a", &[4], 0, 0), tensor("a", &[4], 0, 32)].concat());
    same.resize(same.len().next_multiple_of(32) + 128, 0);
    check(&same, "appears twice");
}

/// Every truncation of the index, and thousands of seeded changes anywhere: an answer, never a panic, never memory beyond the bound.
#[test]
fn damaged_files_never_panic_and_stay_bounded() {
    let shape = TinyLlama { layers: 1, heads: 2, kv_heads: 1, ..TinyLlama::default() };
    let good = shape.file();
    let index = parse_bounded(&good).unwrap().data_offset;
    for length in (0..index).chain((index..good.len()).step_by(997)) {
        assert!(parse_bounded(&good[..length]).is_err(), "{length} bytes of {} are not a whole file", good.len());
    }
    let mut random = Random(20);
    let (mut accepted, mut rejected) = (0, 0);
    for _ in 0..6_000 {
        let mut file = good.clone();
        for _ in 0..=random.below(3) {
            let at = random.below(index);
            match random.below(4) {
                0 => file[at] ^= 1 << random.below(8),
                1 => file[at] = random.next() as u8,
                2 => {
                    let end = (at + 8).min(file.len());
                    let value = [u64::MAX, 1 << 63, (1 << 32) - 1, 1 << 31, 0, random.next()][random.below(6)];
                    file[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
                }
                _ => {
                    let (from, length) = (random.below(index), random.below(64));
                    let part = file[from..(from + length).min(file.len())].to_vec();
                    file.splice(at..at, part);
                }
            }
        }
        match parse_bounded(&file) {
            Ok(_) => accepted += 1,
            Err(_) => rejected += 1,
        }
    }
    assert!(
        accepted > 100 && rejected > 1_000,
        "{accepted} accepted, {rejected} rejected: the changes reach the checks"
    );
}

/// The same changes through everything that reads a model: tokenizer, template, configuration, weights.
#[test]
fn damaged_models_open_or_are_refused() {
    let shape = TinyLlama { layers: 1, heads: 2, kv_heads: 1, ..TinyLlama::default() };
    let good = shape.file();
    let index = GgufHeader::parse(&good).unwrap().data_offset;
    let mut random = Random(21);
    for _ in 0..400 {
        let mut file = good.clone();
        let at = random.below(index);
        file[at] = random.next() as u8;
        if let Ok(model) = open_bytes(&file) {
            let _ = model.tokenizer().encode("hello w1<|im_end|>", penstock_model::Specials::Parsed);
            model.weights().tensor(TensorRole::Output).unwrap().to_f32();
        }
    }
}

#[test]
fn the_demo_model_opens() {
    let Some(path) = support::demo_model() else { return };
    let model = penstock_model::Model::open(&path, &Default::default(), &mut |_, _| {}).unwrap();
    let config = model.config();
    assert_eq!((config.layers, config.hidden, config.feed_forward, config.vocab), (30, 576, 1536, 49_152));
    assert_eq!((config.heads, config.kv_heads, config.head_dim, config.context_length), (9, 3, 64, 8192));
    assert_eq!((config.rope_theta, config.rms_eps, config.tied_head), (100_000.0, 1e-5, true));
    assert_eq!(model.weights().dtypes(), [DType::F32, DType::Q8_0, DType::Q4_1]);
    let manifest = model.manifest();
    assert!(manifest.weights.to_string().starts_with("b179c952") && manifest.weights.to_string().ends_with("db53"));
    assert_eq!(manifest.weights_bytes, 98_362_432);
}
