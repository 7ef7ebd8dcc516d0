//! The paged cache and attention over it.

mod support;

use penstock_kernels_cpu::half::{bf16_to_f32, f32_to_bf16};
use penstock_kernels_cpu::{
    AttentionLayer, AttentionPlan, AttentionRun, HeadRows, KvDtype, KvError, KvPool, KvRows, KvShape, KvSlot,
    MemoryBudget, ThreadPool, Tier, attend,
};
use support::{Noise, bits, fast_tiers, nmse, tiers};

/// One sequence's queries, keys and values for every position, all heads in a row.
struct Sequence {
    queries: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    len: usize,
}

#[derive(Clone, Copy)]
struct Heads {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl Heads {
    fn sequence(self, len: usize, seed: u64) -> Sequence {
        let mut noise = Noise(seed);
        let mut loud = |n: usize| noise.values(n).iter().map(|x| x * 3.0).collect();
        Sequence {
            queries: loud(len * self.heads * self.head_dim),
            keys: loud(len * self.kv_heads * self.head_dim),
            values: loud(len * self.kv_heads * self.head_dim),
            len,
        }
    }

    fn scale(self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// Plain softmax attention in f64 over keys and values as the pool holds them; as they are for `None`.
    fn reference(self, sequence: &Sequence, window: Option<usize>, dtype: Option<KvDtype>) -> Vec<f64> {
        let held =
            |numbers: &[f32]| numbers.chunks(self.head_dim).flat_map(|head| held(head, dtype)).collect::<Vec<_>>();
        let (keys, values) = (held(&sequence.keys), held(&sequence.values));
        let width = self.kv_heads * self.head_dim;
        let mut out = Vec::new();
        for row in 0..sequence.len {
            let first = window.map_or(0, |window| (row + 1).saturating_sub(window));
            for head in 0..self.heads {
                let query = &sequence.queries[(row * self.heads + head) * self.head_dim..][..self.head_dim];
                let column = head / (self.heads / self.kv_heads) * self.head_dim;
                let scores: Vec<f64> = (first..=row)
                    .map(|t| {
                        let key = &keys[t * width + column..][..self.head_dim];
                        let dot: f64 = query.iter().zip(key).map(|(&q, k)| f64::from(q) * k).sum();
                        dot * f64::from(self.scale())
                    })
                    .collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                for d in 0..self.head_dim {
                    let weigh = |(t, s): (usize, &f64)| (s - max).exp() * values[(first + t) * width + column + d];
                    out.push(scores.iter().enumerate().map(weigh).sum::<f64>() / sum);
                }
            }
        }
        out
    }
}

/// One head's keys or values of one token, as a pool holds them.
fn held(head: &[f32], dtype: Option<KvDtype>) -> Vec<f64> {
    let largest = head.iter().fold(0f32, |a, x| a.max(x.abs()));
    let number = |&x: &f32| match dtype {
        None => f64::from(x),
        Some(KvDtype::Bf16) => f64::from(bf16_to_f32(f32_to_bf16(x))),
        Some(KvDtype::Int8) => f64::from((x * (127.0 / largest)).round_ties_even()) * f64::from(largest / 127.0),
    };
    head.iter().map(number).collect()
}

/// How far results may be from f64 on the numbers that the pool holds: rounding of f32, or that of queries and weights to 15 bits. Of the
/// latter a query's step is 2^-14 of its 3 at most, which moves scores by 2^-14 * 3 / sqrt(12) * 1.7 = 9e-5 (keys of 1.7 in the mean, and the scale
/// undoes the number of dimensions), so that weights are off by as much.
fn nmse_max(dtype: KvDtype) -> f64 {
    match dtype {
        KvDtype::Bf16 => 1e-10,
        KvDtype::Int8 => 3e-8,
    }
}

/// How a batch is computed.
struct Setting {
    tier: Tier,
    threads: usize,
    block_tokens: usize,
    /// Rows per pass of each sequence.
    chunk: usize,
    /// Seed of the blocks' placement.
    placement: u64,
    window: Option<usize>,
    dtype: KvDtype,
}

/// Results of all rows of all sequences, which advance together chunk by chunk.
fn run(heads: Heads, sequences: &[Sequence], setting: &Setting) -> Vec<Vec<f32>> {
    let longest = sequences.iter().map(|s| s.len).max().unwrap_or(0);
    let per_sequence = longest.div_ceil(setting.block_tokens);
    let blocks = per_sequence * sequences.len() + 3;
    let shape = KvShape {
        layers: 2,
        kv_heads: heads.kv_heads,
        head_dim: heads.head_dim,
        block_tokens: setting.block_tokens,
        blocks,
        dtype: setting.dtype,
    };
    let mut kv = KvPool::new(&MemoryBudget::new(256 << 20), shape).expect("fits");
    let order = Noise(setting.placement).shuffled(blocks);
    // What an earlier owner left behind must not matter: bytes of 0xff are NaNs, as bfloat16 and as scales.
    for block in 0..blocks as u32 {
        kv.block_mut(block).fill(if setting.placement.is_multiple_of(2) { 0xff } else { 0x40 });
    }
    let pool = ThreadPool::new(setting.threads).expect("starts");
    let mut session = pool.enter();
    let (wide, narrow) = (heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim);
    let mut results: Vec<Vec<f32>> = sequences.iter().map(|s| vec![0f32; s.len * wide]).collect();
    let mut plan = AttentionPlan::new();
    for start in (0..longest).step_by(setting.chunk) {
        let (mut rows, mut slots, mut runs) = (Vec::new(), Vec::new(), Vec::new());
        for (i, sequence) in sequences.iter().enumerate().filter(|(_, s)| s.len > start) {
            let count = setting.chunk.min(sequence.len - start);
            let table = &order[i * per_sequence..][..per_sequence];
            runs.push(AttentionRun { first_row: slots.len(), rows: count, context: start, table });
            for at in start..start + count {
                rows.extend(&sequence.queries[at * wide..][..wide]);
                rows.extend(&sequence.keys[at * narrow..][..narrow]);
                rows.extend(&sequence.values[at * narrow..][..narrow]);
                let block = table[at / setting.block_tokens];
                slots.push(KvSlot { block, offset: (at % setting.block_tokens) as u32 });
            }
        }
        let stride = wide + 2 * narrow;
        let from = KvRows { rows: &rows, stride, key_column: wide, value_column: wide + narrow };
        kv.store(&mut session, 1, &slots, from).expect("stores");
        plan.set(&kv, heads.heads, setting.tier, setting.threads, runs.iter().copied());
        let mut out = vec![f32::NAN; slots.len() * wide];
        let layer = AttentionLayer { index: 1, scale: heads.scale(), window: setting.window };
        let queries = HeadRows { data: rows.as_slice(), stride, column: 0 };
        let to = HeadRows { data: out.as_mut_slice(), stride: wide, column: 0 };
        attend(&mut session, &plan, &kv, layer, queries, to).expect("attends");
        let mut done = out.chunks(wide);
        for (result, sequence) in results.iter_mut().zip(sequences) {
            for at in start..(start + setting.chunk).min(sequence.len) {
                result[at * wide..][..wide].copy_from_slice(done.next().expect("a row for each query"));
            }
        }
    }
    results
}

fn plain(tier: Tier, dtype: KvDtype) -> Setting {
    Setting { tier, threads: 1, block_tokens: 16, chunk: 64, placement: 1, window: None, dtype }
}

const SHAPES: [Heads; 6] = [
    Heads { heads: 3, kv_heads: 1, head_dim: 64 },
    Heads { heads: 2, kv_heads: 2, head_dim: 16 },
    Heads { heads: 8, kv_heads: 4, head_dim: 32 },
    Heads { heads: 5, kv_heads: 1, head_dim: 80 },
    Heads { heads: 4, kv_heads: 1, head_dim: 256 },
    Heads { heads: 14, kv_heads: 2, head_dim: 64 },
];

#[test]
fn attention_matches_f64() {
    for (heads, dtype) in shapes_and_dtypes() {
        for tier in [Tier::Scalar, Tier::detect()] {
            let sequence = heads.sequence(150, 1);
            let wanted = heads.reference(&sequence, None, Some(dtype));
            let got = run(heads, std::slice::from_ref(&sequence), &plain(tier, dtype));
            let error = nmse(&got[0], &wanted);
            assert!(error < nmse_max(dtype), "{tier} {dtype} {} x {}: nmse {error:e}", heads.heads, heads.head_dim);
        }
    }
}

fn shapes_and_dtypes() -> impl Iterator<Item = (Heads, KvDtype)> {
    SHAPES.into_iter().flat_map(|heads| KvDtype::ALL.map(|dtype| (heads, dtype)))
}

/// What int8 costs against exact numbers, from its step alone. Numbers are uniform in -3..3, so that a step is 6 / 254 at most and an error has
/// a variance of step^2 / 12. A score sums one such error a dimension, times a query of mean square 3; the scale undoes the number of dimensions. The
/// weight of a token is off by that much relatively, its value by the error over a mean square of 3, and both add up over tokens like the values do.
/// Where one token has most of the weight its error counts for less, since weights sum to one: what is left at least is the values' share, a tenth.
#[test]
fn int8_is_as_far_off_as_its_step_says() {
    let step: f64 = 6.0 / 254.0;
    let wanted = step * step / 12.0 * (3.0 + 1.0 / 3.0);
    for heads in SHAPES {
        let sequence = heads.sequence(150, 9);
        let exact = heads.reference(&sequence, None, None);
        let got = run(heads, std::slice::from_ref(&sequence), &plain(Tier::detect(), KvDtype::Int8));
        let error = nmse(&got[0], &exact);
        println!("{} x {}: nmse {error:.2e}, {wanted:.2e} by the step", heads.heads, heads.head_dim);
        assert!(error < wanted, "nmse {error:e}, {wanted:e} by the step");
        assert!(error > wanted / 10.0, "nmse {error:e} is less than eight bits allow");
        // No result may leave the range that the errors of all tokens at their worst allow.
        let worst = heads.scale() as f64 * 3.0 * heads.head_dim as f64 * step / 2.0;
        let farthest = got[0].iter().zip(&exact).fold(0.0, |far: f64, (&a, b)| far.max((f64::from(a) - b).abs()));
        assert!(farthest < (f64::exp(2.0 * worst) - 1.0) * 3.0 + step, "a result is off by {farthest}");
    }
}

#[test]
fn a_token_that_is_not_finite_spoils_those_that_see_it_and_no_others() {
    let heads = Heads { heads: 3, kv_heads: 1, head_dim: 64 };
    for (bad, of_value) in [(f32::NAN, true), (f32::INFINITY, true), (f32::NAN, false), (f32::NEG_INFINITY, false)] {
        let clean = heads.sequence(150, 8);
        let mut spoilt = heads.sequence(150, 8);
        let side = if of_value { &mut spoilt.values } else { &mut spoilt.keys };
        side[140 * 64 + 5] = bad;
        let wanted = run(heads, &[clean], &plain(Tier::Scalar, KvDtype::Int8)).remove(0);
        for tier in [Tier::Scalar].into_iter().chain(fast_tiers()) {
            let got = run(heads, std::slice::from_ref(&spoilt), &plain(tier, KvDtype::Int8)).remove(0);
            assert_eq!(bits(&got[..140 * 192]), bits(&wanted[..140 * 192]), "{tier} {bad}");
            assert!(got[140 * 192..].iter().all(|x| x.is_nan()), "{tier} {bad}, of a value: {of_value}");
        }
    }
}

#[test]
fn all_tiers_give_equal_bits() {
    for (heads, dtype) in shapes_and_dtypes() {
        let sequences = [heads.sequence(140, 2), heads.sequence(3, 3)];
        let oracle = run(heads, &sequences, &plain(Tier::Scalar, dtype));
        for tier in fast_tiers() {
            for (got, wanted) in run(heads, &sequences, &plain(tier, dtype)).iter().zip(&oracle) {
                assert_eq!(bits(got), bits(wanted), "{tier} {dtype} {} x {}", heads.heads, heads.head_dim);
            }
        }
    }
}

#[test]
fn a_row_does_not_see_chunks_neighbours_placement_blocks_or_threads() {
    for dtype in KvDtype::ALL {
        row_invariant(dtype);
    }
}

fn row_invariant(dtype: KvDtype) {
    let heads = Heads { heads: 6, kv_heads: 2, head_dim: 32 };
    let sequences: Vec<Sequence> = [1, 16, 17, 127, 128, 129, 290].map(|len| heads.sequence(len, len as u64)).into();
    let tier = Tier::detect();
    let wanted: Vec<Vec<f32>> =
        sequences.iter().flat_map(|s| run(heads, std::slice::from_ref(s), &plain(tier, dtype))).collect();
    let settings = [
        Setting { chunk: 1, ..plain(tier, dtype) },
        Setting { chunk: 7, placement: 2, ..plain(tier, dtype) },
        Setting { chunk: 290, placement: 3, threads: 2, ..plain(tier, dtype) },
        Setting { chunk: 33, block_tokens: 48, threads: 3, ..plain(tier, dtype) },
        Setting { chunk: 128, block_tokens: 256, placement: 4, ..plain(tier, dtype) },
    ];
    for setting in &settings {
        for (got, wanted) in run(heads, &sequences, setting).iter().zip(&wanted) {
            assert_eq!(bits(got), bits(wanted), "{dtype} chunk {} blocks of {}", setting.chunk, setting.block_tokens);
        }
    }
}

/// Windows on both sides of group and span borders, of the length of a pass's queries, and longer than the sequence.
const WINDOWS: [usize; 9] = [1, 2, 5, 16, 17, 100, 128, 129, 400];

#[test]
fn a_window_hides_what_lies_before_it() {
    for (heads, dtype) in [SHAPES[0], SHAPES[4], SHAPES[1]].into_iter().flat_map(|h| KvDtype::ALL.map(|d| (h, d))) {
        let sequence = heads.sequence(300, 5);
        for window in WINDOWS {
            let wanted = heads.reference(&sequence, Some(window), Some(dtype));
            let setting = Setting { window: Some(window), ..plain(Tier::detect(), dtype) };
            let got = run(heads, std::slice::from_ref(&sequence), &setting);
            let error = nmse(&got[0], &wanted);
            assert!(
                error < nmse_max(dtype),
                "window {window} {dtype} {} x {}: nmse {error:e}",
                heads.heads,
                heads.head_dim
            );
        }
        let whole = run(heads, std::slice::from_ref(&sequence), &plain(Tier::detect(), dtype));
        let setting = Setting { window: Some(300), ..plain(Tier::detect(), dtype) };
        let windowed = run(heads, std::slice::from_ref(&sequence), &setting);
        assert_eq!(bits(&windowed[0]), bits(&whole[0]), "a window as long as the sequence is none");
    }
}

#[test]
fn windowed_rows_have_the_oracles_bits_however_they_are_computed() {
    let heads = Heads { heads: 6, kv_heads: 2, head_dim: 32 };
    let sequences: Vec<Sequence> = [1, 17, 129, 290].map(|len| heads.sequence(len, len as u64)).into();
    for (window, dtype) in WINDOWS.into_iter().flat_map(|w| KvDtype::ALL.map(|d| (w, d))) {
        let plain = |tier| Setting { window: Some(window), ..plain(tier, dtype) };
        let wanted: Vec<Vec<f32>> =
            sequences.iter().flat_map(|s| run(heads, std::slice::from_ref(s), &plain(Tier::Scalar))).collect();
        let tier = Tier::detect();
        let mut settings = vec![
            Setting { chunk: 1, ..plain(tier) },
            Setting { chunk: 7, placement: 2, ..plain(tier) },
            Setting { chunk: 290, placement: 3, threads: 2, block_tokens: 48, ..plain(tier) },
        ];
        settings.extend(fast_tiers().into_iter().map(plain));
        for setting in &settings {
            for (got, wanted) in run(heads, &sequences, setting).iter().zip(&wanted) {
                assert_eq!(bits(got), bits(wanted), "window {window} {dtype} {} chunk {}", setting.tier, setting.chunk);
            }
        }
    }
}

/// Blocks before the window may hold anything: they are not read.
#[test]
fn tokens_before_the_window_are_not_read() {
    for dtype in KvDtype::ALL {
        not_read_before_the_window(dtype);
    }
}

fn not_read_before_the_window(dtype: KvDtype) {
    let shape = KvShape { layers: 1, kv_heads: 1, head_dim: 16, block_tokens: 16, blocks: 24, dtype };
    let mut kv = KvPool::new(&MemoryBudget::new(4 << 20), shape).expect("fits");
    let pool = ThreadPool::new(1).expect("starts");
    let table: Vec<u32> = (0..24).collect();
    let rows = Noise(6).values(20 * 16);
    let layer = AttentionLayer { index: 0, scale: 0.25, window: Some(32) };
    let mut attended = |old: u8| {
        for block in 0..24 {
            // Bytes of 0xff are NaNs, as bfloat16 and as scales.
            kv.block_mut(block).fill(if block < 14 { old } else { 0x3e });
        }
        let mut plan = AttentionPlan::new();
        // Positions 256..276 see tokens from 225 on, in blocks from 14 on.
        plan.set(&kv, 1, Tier::detect(), 1, [AttentionRun { first_row: 0, rows: 20, context: 256, table: &table }]);
        let mut out = vec![0f32; 20 * 16];
        let queries = HeadRows { data: rows.as_slice(), stride: 16, column: 0 };
        let to = HeadRows { data: out.as_mut_slice(), stride: 16, column: 0 };
        attend(&mut pool.enter(), &plan, &kv, layer, queries, to).expect("attends");
        bits(&out)
    };
    let wanted = attended(0x3e);
    assert!(wanted.iter().all(|&bits| f32::from_bits(bits).is_finite()));
    assert_eq!(attended(0xff), wanted, "{dtype}");
}

/// Rows of several sequences that begin with the same blocks, as a prefix cache makes them, and go on in their own.
#[test]
fn a_common_beginning_does_not_show() {
    for dtype in KvDtype::ALL {
        common_beginning(dtype);
    }
}

fn common_beginning(dtype: KvDtype) {
    let heads = Heads { heads: 6, kv_heads: 2, head_dim: 64 };
    let (wide, narrow) = (heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim);
    let common = heads.sequence(288, 1);
    // Tokens in common with the first, and in all: borders of spans and blocks on both sides, one that shares nothing, one that shares all.
    let shapes = [(288, 300), (288, 289), (256, 257), (272, 400), (0, 130), (128, 520), (288, 288), (144, 300)];
    let sequences: Vec<Sequence> = shapes
        .iter()
        .enumerate()
        .map(|(i, &(equal, len))| {
            let mut own = heads.sequence(len, 10 + i as u64);
            own.keys[..equal * narrow].copy_from_slice(&common.keys[..equal * narrow]);
            own.values[..equal * narrow].copy_from_slice(&common.values[..equal * narrow]);
            own
        })
        .collect();
    let blocks_each = 520usize.div_ceil(16);
    let shape = KvShape { layers: 1, kv_heads: 2, head_dim: 64, block_tokens: 16, blocks: blocks_each * 9, dtype };
    let mut kv = KvPool::new(&MemoryBudget::new(64 << 20), shape).expect("fits");
    let order = Noise(5).shuffled(shape.blocks);
    let tables: Vec<Vec<u32>> = (0..sequences.len())
        .map(|i| {
            (0..blocks_each)
                .map(|b| order[b + if b < shapes[i].0 / 16 { 8 * blocks_each } else { i * blocks_each }])
                .collect()
        })
        .collect();
    let one = ThreadPool::new(1).expect("starts");
    for (sequence, table) in sequences.iter().zip(&tables) {
        let slots: Vec<KvSlot> =
            (0..sequence.len).map(|at| KvSlot { block: table[at / 16], offset: (at % 16) as u32 }).collect();
        let rows: Vec<f32> = (0..sequence.len)
            .flat_map(|at| {
                [&sequence.keys[at * narrow..][..narrow], &sequence.values[at * narrow..][..narrow]].concat()
            })
            .collect();
        let from = KvRows { rows: &rows, stride: 2 * narrow, key_column: 0, value_column: narrow };
        kv.store(&mut one.enter(), 0, &slots, from).expect("stores");
    }
    let queries: Vec<f32> = sequences.iter().flat_map(|s| s.queries[(s.len - 1) * wide..].to_vec()).collect();
    let attend_all = |tier: Tier, threads: usize, chosen: &[usize], window: Option<usize>| {
        let pool = ThreadPool::new(threads).expect("starts");
        let mut plan = AttentionPlan::new();
        let runs = chosen.iter().map(|&i| AttentionRun {
            first_row: i,
            rows: 1,
            context: sequences[i].len - 1,
            table: &tables[i],
        });
        plan.set(&kv, heads.heads, tier, threads, runs);
        let mut out = vec![0f32; sequences.len() * wide];
        let from = HeadRows { data: queries.as_slice(), stride: wide, column: 0 };
        let to = HeadRows { data: out.as_mut_slice(), stride: wide, column: 0 };
        let layer = AttentionLayer { index: 0, scale: heads.scale(), window };
        attend(&mut pool.enter(), &plan, &kv, layer, from, to).expect("attends");
        out
    };
    for window in [None, Some(40), Some(200)] {
        let all: Vec<usize> = (0..sequences.len()).collect();
        let together = attend_all(Tier::detect(), 1, &all, window);
        for &i in &all {
            let alone = attend_all(Tier::Scalar, 1, &[i], window);
            let (got, wanted) = (&together[i * wide..][..wide], &alone[i * wide..][..wide]);
            assert_eq!(bits(got), bits(wanted), "sequence {i}, window {window:?}");
            if window.is_none() {
                let wanted = heads.reference(&sequences[i], None, Some(dtype));
                let error = nmse(got, &wanted[wanted.len() - wide..]);
                // One row alone: its error is not averaged over many.
                assert!(error < 5.0 * nmse_max(dtype), "sequence {i}, {dtype}: nmse {error:e}");
            }
        }
        for tier in tiers() {
            for threads in [1, 2, 5] {
                let reversed: Vec<usize> = all.iter().rev().copied().collect();
                let got = attend_all(tier, threads, &reversed, window);
                assert_eq!(bits(&got), bits(&together), "{tier}, {threads} threads, window {window:?}");
            }
        }
    }
}

#[test]
fn a_copied_block_serves_like_the_original() {
    for dtype in KvDtype::ALL {
        copied_block(dtype);
    }
}

fn copied_block(dtype: KvDtype) {
    let shape = KvShape { layers: 2, kv_heads: 1, head_dim: 16, block_tokens: 16, blocks: 3, dtype };
    let mut kv = KvPool::new(&MemoryBudget::new(4 << 20), shape).expect("fits");
    let pool = ThreadPool::new(1).expect("starts");
    let rows = Noise(4).values(5 * 32);
    let slots: Vec<KvSlot> = (0..5).map(|offset| KvSlot { block: 2, offset }).collect();
    let from = KvRows { rows: &rows, stride: 32, key_column: 0, value_column: 16 };
    kv.store(&mut pool.enter(), 1, &slots, from).expect("stores");
    assert!(kv.block(0).iter().all(|&b| b == 0));
    kv.copy_block(2, 0);
    assert_eq!(kv.block(0), kv.block(2));
    assert!(kv.block(0).iter().any(|&b| b != 0));
    assert!(kv.block(1).iter().all(|&b| b == 0), "the neighbour is untouched");
    assert_eq!(kv.block(0).len(), shape.block_bytes().expect("legal"));
}

#[test]
fn illegal_shapes_are_refused() {
    let good = KvShape { layers: 1, kv_heads: 1, head_dim: 16, block_tokens: 16, blocks: 1, dtype: KvDtype::default() };
    let bad = [
        KvShape { layers: 0, ..good },
        KvShape { kv_heads: 0, ..good },
        KvShape { head_dim: 24, ..good },
        KvShape { block_tokens: 8, ..good },
        KvShape { blocks: 0, ..good },
        KvShape { blocks: usize::MAX, ..good },
        KvShape { layers: usize::MAX / 2, ..good },
    ];
    for shape in bad {
        assert_eq!(KvPool::new(&MemoryBudget::new(4 << 20), shape).err(), Some(KvError::Shape(shape)));
    }
    assert!(KvPool::new(&MemoryBudget::new(4 << 20), good).is_ok());
    let large = KvShape { blocks: 1 << 20, ..good };
    assert!(matches!(KvPool::new(&MemoryBudget::new(4 << 20), large), Err(KvError::Memory(_))));
}

#[test]
fn a_block_has_the_bytes_its_dtype_says() {
    // SmolLM2-135M: 30 layers of 3 heads of 64; 2 bytes a number, or 1 and two scales of 4 a head.
    let shape = |dtype| KvShape { layers: 30, kv_heads: 3, head_dim: 64, block_tokens: 16, blocks: 1, dtype };
    assert_eq!(shape(KvDtype::Bf16).token_bytes(), Some(30 * 3 * 2 * 64 * 2));
    assert_eq!(shape(KvDtype::Int8).token_bytes(), Some(30 * 3 * 2 * (64 + 4)));
    for dtype in KvDtype::ALL {
        let shape = shape(dtype);
        let kv = KvPool::new(&MemoryBudget::new(4 << 20), shape).expect("fits");
        assert_eq!(kv.block(0).len(), 16 * shape.token_bytes().expect("legal"));
    }
}
