//! Attention of query rows over a paged KV pool.
//!
//! # The number a row gets
//! A row at position p sees the tokens 0..=p of its own sequence. They are split at fixed positions, every [`SPAN_TOKENS`] tokens. Per
//! span: scores q·k * scale (dimensions ascending), their maximum m, weights e^(score - m), the weights' sum (token t in lane t mod 16,
//! lanes in the fixed tree), and the weighted sum of values (tokens ascending). Spans are merged in order of position by the usual rule of
//! two maxima. Where the blocks lie, how a prompt was chunked, which rows share a pass, and which thread runs it never enter.
//!
//! With a window of W tokens the row sees the last W tokens of those alone, itself included. Spans keep their borders: a span that lies
//! before the window is left out, and one that the window cuts is weighed from the cut on.
//!
//! Because spans end at fixed positions, a span shared by many sequences can later be computed for all of them at once with equal bits.

use crate::kv::{GROUP_TOKENS, KvPool};
use crate::lanes::{LANES, Lanes, kernel};
use crate::pool::{Session, SharedMut, TaskPanicked};
use crate::tier::Tier;

/// Tokens per span. Part of the numerics: keys and values of one head's span fit the first-level cache.
pub const SPAN_TOKENS: usize = 128;

/// Largest head the kernel holds on its stack.
pub const HEAD_DIM_MAX: usize = 256;

const SPAN_GROUPS: usize = SPAN_TOKENS / GROUP_TOKENS;

/// Most queries in one pass, on any tier.
const QUERIES_MAX: usize = 6;

/// Which layer attends, and how.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionLayer {
    /// Layer of the pool.
    pub index: usize,
    /// Factor of every score.
    pub scale: f32,
    /// Most tokens that a row sees, itself included; `None` for all. Tokens before it stay in the pool and are not read.
    pub window: Option<usize>,
}

/// Consecutive rows of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct AttentionRun<'a> {
    /// First row in the batch.
    pub first_row: usize,
    /// Rows.
    pub rows: usize,
    /// Tokens before the first row: its position.
    pub context: usize,
    /// The sequence's blocks, in order of position.
    pub table: &'a [u32],
}

/// Which rows see which blocks, split into tasks. Made once per step and used by every layer; keeps its memory between steps.
#[derive(Debug, Default)]
pub struct AttentionPlan {
    tasks: Vec<Task>,
    tables: Vec<u32>,
    /// Tier the tasks were cut for.
    tier: Option<Tier>,
    rows: usize,
    heads: usize,
    kv_heads: usize,
    block_tokens: usize,
    blocks: usize,
}

#[derive(Clone, Copy, Debug)]
struct Task {
    first_row: usize,
    rows: usize,
    /// Position of the first row.
    context: usize,
    kv_head: usize,
    /// Where the sequence's blocks begin in the flat table.
    table: usize,
}

impl AttentionPlan {
    /// An empty plan.
    pub fn new() -> Self {
        Self::default()
    }

    /// Replaces the plan: `heads` query heads over the heads of `pool`, to run on `tier`.
    ///
    /// # Panics
    /// When the tier is not supported, `heads` is no positive multiple of the pool's heads, a head is longer than [`HEAD_DIM_MAX`], or a run's table is too short or
    /// names a block outside the pool.
    pub fn set<'a>(
        &mut self,
        pool: &KvPool,
        heads: usize,
        tier: Tier,
        runs: impl IntoIterator<Item = AttentionRun<'a>>,
    ) {
        assert!(tier.is_supported(), "tier {tier} is not supported here");
        let shape = pool.shape();
        assert!(heads > 0 && heads.is_multiple_of(shape.kv_heads), "query heads must be a multiple of kv heads");
        assert!(shape.head_dim <= HEAD_DIM_MAX, "head_dim is above {HEAD_DIM_MAX}");
        self.tasks.clear();
        self.tables.clear();
        self.rows = 0;
        self.tier = Some(tier);
        self.heads = heads;
        self.kv_heads = shape.kv_heads;
        self.block_tokens = shape.block_tokens;
        self.blocks = shape.blocks;
        let rows_per_task = (tier_query_rows(tier) / (heads / shape.kv_heads)).max(1);
        for run in runs {
            let blocks = (run.context + run.rows).div_ceil(shape.block_tokens);
            assert!(run.table.len() >= blocks, "a table of {} blocks for {blocks}", run.table.len());
            let used = &run.table[..blocks];
            assert!(used.iter().all(|&b| (b as usize) < shape.blocks), "a block is outside the pool");
            let table = self.tables.len();
            self.tables.extend_from_slice(used);
            self.rows = self.rows.max(run.first_row + run.rows);
            for row in (0..run.rows).step_by(rows_per_task) {
                for kv_head in 0..shape.kv_heads {
                    self.tasks.push(Task {
                        first_row: run.first_row + row,
                        rows: rows_per_task.min(run.rows - row),
                        context: run.context + row,
                        kv_head,
                        table,
                    });
                }
            }
        }
        // Longest first: threads then finish together.
        self.tasks.sort_by_key(|task| std::cmp::Reverse(task.context));
    }
}

fn tier_query_rows(tier: Tier) -> usize {
    match tier {
        Tier::Scalar => crate::lanes::scalar::Scalar::QUERY_ROWS,
        #[cfg(target_arch = "x86_64")]
        Tier::Avx2 => crate::lanes::avx2::Avx2::QUERY_ROWS,
        #[cfg(target_arch = "x86_64")]
        Tier::Avx512Vnni => crate::lanes::avx512::Avx512::QUERY_ROWS,
        #[cfg(not(target_arch = "x86_64"))]
        _ => crate::lanes::scalar::Scalar::QUERY_ROWS,
    }
}

/// Rows of queries or of results: row r begins at `r * stride`, its first head at `column`.
#[derive(Debug)]
pub struct HeadRows<T> {
    /// The values.
    pub data: T,
    /// Distance between two rows.
    pub stride: usize,
    /// Column of the first head.
    pub column: usize,
}

/// Attends with every row of `plan` over one layer. Heads lie one after the other, `head_dim` values each.
///
/// # Errors
/// [`TaskPanicked`] when a task panicked.
///
/// # Panics
/// When queries or results are too short, the plan was made for another pool's shape, or the window is 0.
pub fn attend(
    session: &mut Session<'_>,
    plan: &AttentionPlan,
    pool: &KvPool,
    layer: AttentionLayer,
    queries: HeadRows<&[f32]>,
    out: HeadRows<&mut [f32]>,
) -> Result<(), TaskPanicked> {
    let Some(tier) = plan.tier else { return Ok(()) };
    let window = layer.window.unwrap_or(usize::MAX);
    assert!(window > 0, "a window without a token");
    let shape = pool.shape();
    let planned = (plan.kv_heads, plan.block_tokens, plan.blocks);
    assert_eq!(planned, (shape.kv_heads, shape.block_tokens, shape.blocks), "the plan is for another pool");
    let width = plan.heads * shape.head_dim;
    assert!(queries.column + width <= queries.stride && out.column + width <= out.stride, "rows too short");
    assert!(queries.data.len() >= plan.rows * queries.stride, "too few query rows");
    assert!(out.data.len() >= plan.rows * out.stride, "too few result rows");
    let to = SharedMut(out.data.as_mut_ptr());
    let group = plan.heads / plan.kv_heads;
    session.run(plan.tasks.len(), |index| {
        let task = plan.tasks[index];
        let (keys_values, block_stride) = pool.head_ptr(layer.index, task.kv_head);
        let head_column = task.kv_head * group * shape.head_dim;
        let mut pass = Pass {
            keys_values,
            block_stride,
            group_len: shape.group_len(),
            block_tokens: shape.block_tokens,
            head_dim: shape.head_dim,
            scale: layer.scale,
            table: &plan.tables[task.table..],
            count: 0,
            lens: [0; QUERIES_MAX],
            begins: [0; QUERIES_MAX],
            queries: [std::ptr::null(); QUERIES_MAX],
            out: [std::ptr::null_mut(); QUERIES_MAX],
        };
        for row in 0..task.rows {
            for head in 0..group {
                let (at, column) = (task.first_row + row, head_column + head * shape.head_dim);
                let i = pass.count;
                pass.lens[i] = task.context + row + 1;
                pass.begins[i] = pass.lens[i].saturating_sub(window);
                // SAFETY: rows and columns were checked against both arrays; rows of a plan are distinct, and a task owns its rows' heads.
                unsafe {
                    pass.queries[i] = queries.data.as_ptr().add(at * queries.stride + queries.column + column);
                    pass.out[i] = to.get().add(at * out.stride + out.column + column);
                }
                pass.count += 1;
                if pass.count == tier_query_rows(tier) || (row + 1 == task.rows && head + 1 == group) {
                    // SAFETY: the tier was checked; the plan checked blocks and lengths; the queries were set just above.
                    unsafe { attend_pass(tier, &pass) };
                    pass.count = 0;
                }
            }
        }
    })
}

/// Queries that go over one head's keys and values together.
struct Pass<'a> {
    keys_values: *const u16,
    block_stride: usize,
    group_len: usize,
    block_tokens: usize,
    head_dim: usize,
    scale: f32,
    table: &'a [u32],
    count: usize,
    /// Past the last token each query sees; ascending.
    lens: [usize; QUERIES_MAX],
    /// First token each query sees; ascending.
    begins: [usize; QUERIES_MAX],
    queries: [*const f32; QUERIES_MAX],
    out: [*mut f32; QUERIES_MAX],
}

kernel!(
    /// Attends with `pass.count` queries.
    fn attend_pass(pass: &Pass<'_>) = attend_pass_body
);

#[inline(always)]
unsafe fn attend_pass_body<L: Lanes>(pass: &Pass<'_>) {
    let mut from = 0;
    while from < pass.count {
        let left = pass.count - from;
        // SAFETY: the contract is passed on; each call takes queries below `count`.
        unsafe {
            from += match left {
                6.. if L::QUERY_ROWS >= 6 => attend_queries::<L, 6>(pass, from),
                4.. if L::QUERY_ROWS >= 4 => attend_queries::<L, 4>(pass, from),
                3.. => attend_queries::<L, 3>(pass, from),
                2 => attend_queries::<L, 2>(pass, from),
                _ => attend_queries::<L, 1>(pass, from),
            }
        }
    }
}

/// Running result of one query.
#[derive(Clone, Copy)]
struct Partial {
    max: f32,
    sum: f32,
    values: [f32; HEAD_DIM_MAX],
}

/// Attends with queries `from .. from + R`; returns R.
#[inline(always)]
unsafe fn attend_queries<L: Lanes, const R: usize>(pass: &Pass<'_>, from: usize) -> usize {
    let mut lens = [0; R];
    let mut begins = [0; R];
    lens.copy_from_slice(&pass.lens[from..from + R]);
    begins.copy_from_slice(&pass.begins[from..from + R]);
    let longest = lens[R - 1];
    let mut whole = [Partial { max: 0.0, sum: 0.0, values: [0.0; HEAD_DIM_MAX] }; R];
    let mut weights = [[0f32; SPAN_TOKENS]; R];
    let mut sums = [[0f32; HEAD_DIM_MAX]; R];
    let mut start = begins[0] / SPAN_TOKENS * SPAN_TOKENS;
    while start < longest {
        let groups = (longest - start).div_ceil(GROUP_TOKENS).min(SPAN_GROUPS);
        let mut at = [pass.keys_values; SPAN_GROUPS];
        for (i, at) in at.iter_mut().enumerate().take(groups) {
            let token = start + i * GROUP_TOKENS;
            let block = pass.table[token / pass.block_tokens] as usize;
            let group = token % pass.block_tokens / GROUP_TOKENS;
            *at = pass.keys_values.wrapping_add(block * pass.block_stride + group * pass.group_len);
        }
        // Tokens of this span that each query sees, and those that all of them see.
        let seen = lens.map(|len| len.saturating_sub(start).min(SPAN_TOKENS));
        let hidden = begins.map(|begin| begin.saturating_sub(start).min(SPAN_TOKENS));
        let shared_begin = hidden[R - 1];
        let shared_end = seen[0].max(shared_begin);
        // SAFETY: the plan checked that the table names blocks of the pool for all tokens seen; arrays are as long as the loops need.
        unsafe {
            for (i, &keys) in at.iter().enumerate().take(groups).skip(hidden[0] / GROUP_TOKENS) {
                scores::<L, R>(pass, from, keys, i * GROUP_TOKENS, &mut weights);
            }
            let mut maxima = [0f32; R];
            let mut totals = [0f32; R];
            for r in 0..R {
                if hidden[r] < seen[r] {
                    (maxima[r], totals[r]) = softmax::<L>(&mut weights[r], hidden[r], seen[r]);
                }
                sums[r][..pass.head_dim].fill(0.0);
            }
            // Each query's tokens in ascending order: its own before the shared ones, those, its own behind them.
            for r in 0..R {
                let own = [hidden[r], shared_begin.min(seen[r])];
                query_values::<L>(pass, &at, &weights[r], own, &mut sums[r]);
            }
            if shared_begin < shared_end {
                weighted_values::<L, R>(pass, &at, &weights, shared_begin, shared_end, &mut sums);
            }
            for r in 0..R {
                let own = [shared_end, seen[r]];
                query_values::<L>(pass, &at, &weights[r], own, &mut sums[r]);
                if hidden[r] < seen[r] {
                    // The span that holds a query's first token is the first that is merged.
                    merge::<L>(&mut whole[r], maxima[r], totals[r], &sums[r], pass.head_dim, start <= begins[r]);
                }
            }
        }
        start += SPAN_TOKENS;
    }
    for r in 0..R {
        let mut i = 0;
        while i < pass.head_dim {
            // SAFETY: the result has `head_dim` values, a multiple of 16, by the check of the caller.
            unsafe {
                let value = L::div(L::load(whole[r].values.as_ptr().add(i)), L::splat(whole[r].sum));
                L::store(pass.out[from + r].add(i), value);
            }
            i += LANES;
        }
    }
    R
}

/// Scores of sixteen tokens for `R` queries, to `to[r][token..]`.
#[inline(always)]
unsafe fn scores<L: Lanes, const R: usize>(
    pass: &Pass<'_>,
    from: usize,
    keys: *const u16,
    token: usize,
    to: &mut [[f32; SPAN_TOKENS]; R],
) {
    // SAFETY: the caller vouches for the group and the queries; `token` is a multiple of 16 below the span's length.
    unsafe {
        let mut queries = [std::ptr::null(); R];
        queries.copy_from_slice(&pass.queries[from..from + R]);
        let mut acc = [L::splat(0.0); R];
        let mut i = 0;
        while i < pass.head_dim {
            let (even, odd) = L::load_bf16_pairs(keys.wrapping_add(i * GROUP_TOKENS));
            for r in 0..R {
                let query = queries[r].wrapping_add(i);
                acc[r] = L::fma(even, L::splat(query.read()), acc[r]);
                acc[r] = L::fma(odd, L::splat(query.wrapping_add(1).read()), acc[r]);
            }
            i += 2;
        }
        for r in 0..R {
            L::store(to[r].as_mut_ptr().wrapping_add(token), L::mul(acc[r], L::splat(pass.scale)));
        }
    }
}

/// Turns scores `hidden..seen` into weights, the rest of their groups into zeros. Returns the maximum and the weights' sum.
#[inline(always)]
unsafe fn softmax<L: Lanes>(scores: &mut [f32; SPAN_TOKENS], hidden: usize, seen: usize) -> (f32, f32) {
    let first = hidden / LANES * LANES;
    // The exponential of minus infinity is exactly zero.
    scores[first..hidden].fill(f32::NEG_INFINITY);
    // SAFETY: groups below `seen` lie inside the array; the caller vouches for the tier.
    unsafe {
        let start = scores.as_mut_ptr();
        let (lowest, zero) = (L::splat(f32::NEG_INFINITY), L::splat(0.0));
        let mut max = lowest;
        let mut i = first;
        while i < seen {
            max = L::max(L::first((seen - i).min(LANES), L::load(start.wrapping_add(i)), lowest), max);
            i += LANES;
        }
        let max = L::reduce_max(max);
        let mut sum = zero;
        let mut i = first;
        while i < seen {
            let e = L::exp(L::sub(L::load(start.wrapping_add(i)), L::splat(max)));
            let e = L::first((seen - i).min(LANES), e, zero);
            L::store(start.wrapping_add(i), e);
            sum = L::add(sum, e);
            i += LANES;
        }
        (max, L::reduce_sum(sum))
    }
}

/// [`weighted_values`] of one query, over `tokens[0]..tokens[1]`; nothing when that is empty.
#[inline(always)]
unsafe fn query_values<L: Lanes>(
    pass: &Pass<'_>,
    at: &[*const u16; SPAN_GROUPS],
    weights: &[f32; SPAN_TOKENS],
    tokens: [usize; 2],
    sums: &mut [f32; HEAD_DIM_MAX],
) {
    if tokens[0] < tokens[1] {
        let (weights, sums) = (std::array::from_ref(weights), std::array::from_mut(sums));
        // SAFETY: the contract is passed on.
        unsafe { weighted_values::<L, 1>(pass, at, weights, tokens[0], tokens[1], sums) }
    }
}

/// Adds weight * value over tokens `begin..end` of the span to `sums`, tokens ascending.
#[inline(always)]
unsafe fn weighted_values<L: Lanes, const R: usize>(
    pass: &Pass<'_>,
    at: &[*const u16; SPAN_GROUPS],
    weights: &[[f32; SPAN_TOKENS]; R],
    begin: usize,
    end: usize,
    sums: &mut [[f32; HEAD_DIM_MAX]; R],
) {
    let mut column = 0;
    while column < pass.head_dim {
        // SAFETY: the columns lie inside the head; the rest of the contract is passed on.
        unsafe {
            if L::QUERY_ROWS >= QUERIES_MAX && pass.head_dim - column >= 4 * LANES {
                value_columns::<L, R, 4>(pass, at, weights, begin, end, column, sums);
                column += 4 * LANES;
            } else {
                value_columns::<L, R, 1>(pass, at, weights, begin, end, column, sums);
                column += LANES;
            }
        }
    }
}

/// `C` lane groups of [`weighted_values`], from `column` on, in registers.
#[inline(always)]
unsafe fn value_columns<L: Lanes, const R: usize, const C: usize>(
    pass: &Pass<'_>,
    at: &[*const u16; SPAN_GROUPS],
    weights: &[[f32; SPAN_TOKENS]; R],
    begin: usize,
    end: usize,
    column: usize,
    sums: &mut [[f32; HEAD_DIM_MAX]; R],
) {
    // SAFETY: the caller vouches for the groups of tokens below `end`; columns lie inside the head and arrays are as long as the loops need.
    unsafe {
        let mut acc = [[L::splat(0.0); C]; R];
        for r in 0..R {
            for c in 0..C {
                acc[r][c] = L::load(sums[r].as_ptr().wrapping_add(column + c * LANES));
            }
        }
        let offset = GROUP_TOKENS * pass.head_dim + 2 * column;
        let pair_at =
            |token: usize| at[token / GROUP_TOKENS].wrapping_add(offset + token % GROUP_TOKENS / 2 * 2 * pass.head_dim);
        let mut token = begin;
        if !token.is_multiple_of(2) && token < end {
            let pair = pair_at(token);
            for c in 0..C {
                let (_, odd) = L::load_bf16_pairs(pair.wrapping_add(c * 2 * LANES));
                for r in 0..R {
                    acc[r][c] = L::fma(odd, L::splat(weights[r].as_ptr().wrapping_add(token).read()), acc[r][c]);
                }
            }
            token += 1;
        }
        while token + 1 < end {
            let mut pair = pair_at(token);
            let group_end = (end & !1).min((token / GROUP_TOKENS + 1) * GROUP_TOKENS);
            while token < group_end {
                for c in 0..C {
                    let (even, odd) = L::load_bf16_pairs(pair.wrapping_add(c * 2 * LANES));
                    for r in 0..R {
                        let weight = weights[r].as_ptr().wrapping_add(token);
                        acc[r][c] = L::fma(even, L::splat(weight.read()), acc[r][c]);
                        acc[r][c] = L::fma(odd, L::splat(weight.wrapping_add(1).read()), acc[r][c]);
                    }
                }
                pair = pair.wrapping_add(2 * pass.head_dim);
                token += 2;
            }
        }
        if token < end {
            let pair = pair_at(token);
            for c in 0..C {
                let (even, _) = L::load_bf16_pairs(pair.wrapping_add(c * 2 * LANES));
                for r in 0..R {
                    acc[r][c] = L::fma(even, L::splat(weights[r].as_ptr().wrapping_add(token).read()), acc[r][c]);
                }
            }
        }
        for r in 0..R {
            for c in 0..C {
                L::store(sums[r].as_mut_ptr().wrapping_add(column + c * LANES), acc[r][c]);
            }
        }
    }
}

/// Merges a span into the running result.
#[inline(always)]
unsafe fn merge<L: Lanes>(
    whole: &mut Partial,
    max: f32,
    sum: f32,
    values: &[f32; HEAD_DIM_MAX],
    head_dim: usize,
    first: bool,
) {
    if first {
        (whole.max, whole.sum) = (max, sum);
        whole.values[..head_dim].copy_from_slice(&values[..head_dim]);
        return;
    }
    let both = if whole.max > max { whole.max } else { max };
    // SAFETY: `head_dim` is a multiple of 16 within the arrays; the caller vouches for the tier.
    unsafe {
        let old = L::exp(L::splat(whole.max - both));
        let new = L::exp(L::splat(max - both));
        let sums = L::fma(L::splat(sum), new, L::mul(L::splat(whole.sum), old));
        let mut lanes = [0f32; LANES];
        L::store(lanes.as_mut_ptr(), sums);
        (whole.max, whole.sum) = (both, lanes[0]);
        let mut i = 0;
        while i < head_dim {
            let kept = L::mul(L::load(whole.values.as_ptr().add(i)), old);
            L::store(whole.values.as_mut_ptr().add(i), L::fma(L::load(values.as_ptr().add(i)), new, kept));
            i += LANES;
        }
    }
}
