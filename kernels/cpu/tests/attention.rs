//! The paged cache and attention over it.

mod support;

use penstock_kernels_cpu::half::{bf16_to_f32, f32_to_bf16};
use penstock_kernels_cpu::{
    AttentionLayer, AttentionPlan, AttentionRun, HeadRows, KvError, KvPool, KvRows, KvShape, KvSlot, MemoryBudget,
    ThreadPool, Tier, attend,
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

    /// Plain softmax attention in f64 over keys and values as bfloat16 holds them.
    fn reference(self, sequence: &Sequence, window: Option<usize>) -> Vec<f64> {
        let held = |x: f32| f64::from(bf16_to_f32(f32_to_bf16(x)));
        let width = self.kv_heads * self.head_dim;
        let mut out = Vec::new();
        for row in 0..sequence.len {
            let first = window.map_or(0, |window| (row + 1).saturating_sub(window));
            for head in 0..self.heads {
                let query = &sequence.queries[(row * self.heads + head) * self.head_dim..][..self.head_dim];
                let column = head / (self.heads / self.kv_heads) * self.head_dim;
                let scores: Vec<f64> = (first..=row)
                    .map(|t| {
                        let key = &sequence.keys[t * width + column..][..self.head_dim];
                        let dot: f64 = query.iter().zip(key).map(|(&q, &k)| f64::from(q) * held(k)).sum();
                        dot * f64::from(self.scale())
                    })
                    .collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                for d in 0..self.head_dim {
                    let weigh = |(t, s): (usize, &f64)| {
                        (s - max).exp() * held(sequence.values[(first + t) * width + column + d])
                    };
                    out.push(scores.iter().enumerate().map(weigh).sum::<f64>() / sum);
                }
            }
        }
        out
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
    };
    let mut kv = KvPool::new(&MemoryBudget::new(256 << 20), shape).expect("fits");
    let order = Noise(setting.placement).shuffled(blocks);
    // What an earlier owner left behind must not matter.
    for block in 0..blocks as u32 {
        kv.block_mut(block).fill(0x40 + setting.placement as u8 % 2);
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

fn plain(tier: Tier) -> Setting {
    Setting { tier, threads: 1, block_tokens: 16, chunk: 64, placement: 1, window: None }
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
    for heads in SHAPES {
        for tier in [Tier::Scalar, Tier::detect()] {
            let sequence = heads.sequence(150, 1);
            let wanted = heads.reference(&sequence, None);
            let got = run(heads, std::slice::from_ref(&sequence), &plain(tier));
            let error = nmse(&got[0], &wanted);
            assert!(error < 1e-10, "{tier} {} x {}: nmse {error:e}", heads.heads, heads.head_dim);
        }
    }
}

#[test]
fn all_tiers_give_equal_bits() {
    for heads in SHAPES {
        let sequences = [heads.sequence(140, 2), heads.sequence(3, 3)];
        let oracle = run(heads, &sequences, &plain(Tier::Scalar));
        for tier in fast_tiers() {
            for (got, wanted) in run(heads, &sequences, &plain(tier)).iter().zip(&oracle) {
                assert_eq!(bits(got), bits(wanted), "{tier} {} x {}", heads.heads, heads.head_dim);
            }
        }
    }
}

#[test]
fn a_row_does_not_see_chunks_neighbours_placement_blocks_or_threads() {
    let heads = Heads { heads: 6, kv_heads: 2, head_dim: 32 };
    let sequences: Vec<Sequence> = [1, 16, 17, 127, 128, 129, 290].map(|len| heads.sequence(len, len as u64)).into();
    let tier = Tier::detect();
    let wanted: Vec<Vec<f32>> =
        sequences.iter().flat_map(|s| run(heads, std::slice::from_ref(s), &plain(tier))).collect();
    let settings = [
        Setting { chunk: 1, ..plain(tier) },
        Setting { chunk: 7, placement: 2, ..plain(tier) },
        Setting { chunk: 290, placement: 3, threads: 2, ..plain(tier) },
        Setting { chunk: 33, block_tokens: 48, threads: 3, ..plain(tier) },
        Setting { chunk: 128, block_tokens: 256, placement: 4, ..plain(tier) },
    ];
    for setting in &settings {
        for (got, wanted) in run(heads, &sequences, setting).iter().zip(&wanted) {
            assert_eq!(bits(got), bits(wanted), "chunk {} blocks of {}", setting.chunk, setting.block_tokens);
        }
    }
}

/// Windows on both sides of group and span borders, of the length of a pass's queries, and longer than the sequence.
const WINDOWS: [usize; 9] = [1, 2, 5, 16, 17, 100, 128, 129, 400];

#[test]
fn a_window_hides_what_lies_before_it() {
    for heads in [SHAPES[0], SHAPES[4], SHAPES[1]] {
        let sequence = heads.sequence(300, 5);
        for window in WINDOWS {
            let wanted = heads.reference(&sequence, Some(window));
            let setting = Setting { window: Some(window), ..plain(Tier::detect()) };
            let got = run(heads, std::slice::from_ref(&sequence), &setting);
            let error = nmse(&got[0], &wanted);
            assert!(error < 1e-10, "window {window} {} x {}: nmse {error:e}", heads.heads, heads.head_dim);
        }
        let whole = run(heads, std::slice::from_ref(&sequence), &plain(Tier::detect()));
        let setting = Setting { window: Some(300), ..plain(Tier::detect()) };
        let windowed = run(heads, std::slice::from_ref(&sequence), &setting);
        assert_eq!(bits(&windowed[0]), bits(&whole[0]), "a window as long as the sequence is none");
    }
}

#[test]
fn windowed_rows_have_the_oracles_bits_however_they_are_computed() {
    let heads = Heads { heads: 6, kv_heads: 2, head_dim: 32 };
    let sequences: Vec<Sequence> = [1, 17, 129, 290].map(|len| heads.sequence(len, len as u64)).into();
    for window in WINDOWS {
        let plain = |tier| Setting { window: Some(window), ..plain(tier) };
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
                assert_eq!(bits(got), bits(wanted), "window {window} {} chunk {}", setting.tier, setting.chunk);
            }
        }
    }
}

/// Blocks before the window may hold anything: they are not read.
#[test]
fn tokens_before_the_window_are_not_read() {
    let shape = KvShape { layers: 1, kv_heads: 1, head_dim: 16, block_tokens: 16, blocks: 24 };
    let mut kv = KvPool::new(&MemoryBudget::new(4 << 20), shape).expect("fits");
    let pool = ThreadPool::new(1).expect("starts");
    let table: Vec<u32> = (0..24).collect();
    let rows = Noise(6).values(20 * 16);
    let layer = AttentionLayer { index: 0, scale: 0.25, window: Some(32) };
    let mut attended = |old: u8| {
        for block in 0..24 {
            // Bytes of 0xff are NaNs in bfloat16.
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
    assert_eq!(attended(0xff), attended(0x3e));
}

/// Rows of several sequences that begin with the same blocks, as a prefix cache makes them, and go on in their own.
#[test]
fn a_common_beginning_does_not_show() {
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
    let shape = KvShape { layers: 1, kv_heads: 2, head_dim: 64, block_tokens: 16, blocks: blocks_each * 9 };
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
                let wanted = heads.reference(&sequences[i], None);
                let error = nmse(got, &wanted[wanted.len() - wide..]);
                assert!(error < 1e-10, "sequence {i}: nmse {error:e}");
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
    let shape = KvShape { layers: 2, kv_heads: 1, head_dim: 16, block_tokens: 16, blocks: 3 };
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
    let good = KvShape { layers: 1, kv_heads: 1, head_dim: 16, block_tokens: 16, blocks: 1 };
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
