//! The kernel of attention: the queries of one task over the spans they see.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::{HEAD_DIM_MAX, SPAN_TOKENS, TASK_QUERIES};
use crate::kv::GROUP_TOKENS;
use crate::lanes::{LANES, Lanes, kernel};

const SPAN_GROUPS: usize = SPAN_TOKENS / GROUP_TOKENS;

/// Most queries that go over a span together, on any tier.
const QUERIES_MAX: usize = 12;

/// One query head of one row.
#[derive(Clone, Copy)]
pub(super) struct Query<'a> {
    /// `head_dim` values.
    pub(super) values: *const f32,
    /// Where `head_dim` results go.
    pub(super) out: *mut f32,
    /// First token it sees.
    pub(super) begin: usize,
    /// Past the last token it sees.
    pub(super) len: usize,
    /// Blocks of its sequence.
    pub(super) table: &'a [u32],
}

/// One head of the pool and the queries on it.
pub(super) struct HeadTask<'a> {
    pub(super) keys_values: *const u16,
    pub(super) block_stride: usize,
    pub(super) group_len: usize,
    pub(super) block_tokens: usize,
    pub(super) head_dim: usize,
    pub(super) scale: f32,
    /// At most [`TASK_QUERIES`]. Those of one sequence stand together, by ascending position.
    pub(super) queries: &'a [Query<'a>],
    /// Tokens at the front, whole spans, that every query sees in the same blocks.
    pub(super) shared: usize,
}

kernel!(
    /// Attends with all queries of the task.
    pub(super) fn attend_task(task: &HeadTask<'_>) = attend_task_body
);

#[inline(always)]
unsafe fn attend_task_body<L: Lanes>(task: &HeadTask<'_>) {
    let mut values = [MaybeUninit::<f32>::uninit(); TASK_QUERIES * HEAD_DIM_MAX];
    let mut running =
        Running { max: [0.0; TASK_QUERIES], sum: [0.0; TASK_QUERIES], values: values.as_mut_ptr().cast() };
    // SAFETY: the contract is passed on; `values` has room for all queries of any legal head.
    unsafe {
        let whole_spans = |token: usize| token / SPAN_TOKENS * SPAN_TOKENS;
        let begin = task.queries.iter().map(|query| query.begin).min().unwrap_or(0);
        // First the spans in common, for all queries: their keys and values are fetched once. Then those of one sequence after the other.
        let (mut range, mut spans) = (0..task.queries.len(), whole_spans(begin)..task.shared);
        let mut next = 0;
        loop {
            for start in spans.step_by(SPAN_TOKENS) {
                queries_over_span::<L>(task, &mut running, range.clone(), start);
            }
            let Some(Query { table, begin, .. }) = task.queries.get(next) else { break };
            let same = task.queries[next..].iter().take_while(|query| std::ptr::eq(query.table, *table)).count();
            range = next..next + same;
            next += same;
            // Ascending lengths: the last query of the sequence sees most.
            spans = whole_spans(*begin).max(task.shared)..task.queries[next - 1].len;
        }
        for (i, query) in task.queries.iter().enumerate() {
            let mut d = 0;
            while d < task.head_dim {
                let value = L::load(running.values.add(i * task.head_dim + d));
                L::store(query.out.add(d), L::div(value, L::splat(running.sum[i])));
                d += LANES;
            }
        }
    }
}

/// Results of all queries over the spans so far. Values lie at `query * head_dim`.
struct Running {
    max: [f32; TASK_QUERIES],
    sum: [f32; TASK_QUERIES],
    values: *mut f32,
}

/// One span.
struct Span {
    /// First token.
    start: usize,
    /// Keys of each group; its values follow. Asking for them ahead of their use gained nothing in measurements.
    at: [*const u16; SPAN_GROUPS],
}

impl Span {
    #[inline(always)]
    fn new(task: &HeadTask<'_>, longest: &Query<'_>, start: usize) -> Self {
        let group_at = |token: usize| {
            let block = longest.table[token / task.block_tokens] as usize;
            let group = token % task.block_tokens / GROUP_TOKENS;
            task.keys_values.wrapping_add(block * task.block_stride + group * task.group_len)
        };
        let groups = (longest.len - start).div_ceil(GROUP_TOKENS).min(SPAN_GROUPS);
        let mut span = Self { start, at: [task.keys_values; SPAN_GROUPS] };
        for i in 0..groups {
            let token = start + i * GROUP_TOKENS;
            span.at[i] = group_at(token);
        }
        span
    }
}

/// Takes the queries in `range` over the span that begins at `start`; all of them have the span's blocks in common.
#[inline(always)]
unsafe fn queries_over_span<L: Lanes>(task: &HeadTask<'_>, running: &mut Running, range: Range<usize>, start: usize) {
    let span = Span::new(task, &task.queries[range.end - 1], start);
    let mut from = range.start;
    // Those that end before the span come first.
    while from < range.end && task.queries[from].len <= start {
        from += 1;
    }
    while from < range.end {
        // SAFETY: the contract is passed on; each call takes queries below the end.
        unsafe {
            from += match range.end - from {
                12.. if L::QUERY_ROWS >= 12 => some_over_span::<L, 12>(task, running, from, &span),
                6.. if L::QUERY_ROWS >= 6 => some_over_span::<L, 6>(task, running, from, &span),
                4.. if L::QUERY_ROWS >= 4 => some_over_span::<L, 4>(task, running, from, &span),
                3.. => some_over_span::<L, 3>(task, running, from, &span),
                2 => some_over_span::<L, 2>(task, running, from, &span),
                _ => some_over_span::<L, 1>(task, running, from, &span),
            }
        }
    }
}

/// Takes queries `from .. from + R` over a span; returns R.
#[inline(always)]
unsafe fn some_over_span<L: Lanes, const R: usize>(
    task: &HeadTask<'_>,
    running: &mut Running,
    from: usize,
    span: &Span,
) -> usize {
    let mut weights = [[0f32; SPAN_TOKENS]; R];
    let mut fresh = [MaybeUninit::<[f32; HEAD_DIM_MAX]>::uninit(); R];
    let mut queries = [std::ptr::null(); R];
    // Tokens of the span before the window of each query, and those up to its own.
    let mut hidden = [0; R];
    let mut seen = [0; R];
    for r in 0..R {
        let query = &task.queries[from + r];
        queries[r] = query.values;
        hidden[r] = query.begin.saturating_sub(span.start).min(SPAN_TOKENS);
        seen[r] = (query.len - span.start).min(SPAN_TOKENS);
    }
    let first = hidden.iter().fold(SPAN_TOKENS, |a, &b| a.min(b));
    let last = seen.iter().fold(0, |a, &b| a.max(b));
    if first >= last {
        return R;
    }
    let shared_begin = hidden.iter().fold(0, |a, &b| a.max(b));
    let shared_end = seen.iter().fold(SPAN_TOKENS, |a, &b| a.min(b)).max(shared_begin);
    // SAFETY: the plan checked that tables name blocks of the pool for all tokens seen; arrays are as long as the loops need.
    unsafe {
        let (mut group, end) = (first / GROUP_TOKENS, last.div_ceil(GROUP_TOKENS));
        // As many groups at once as fill the registers with independent sums.
        while L::QUERY_ROWS >= QUERIES_MAX && R <= 3 && group + 4 <= end {
            scores::<L, R, 4>(task, &queries, span, group, &mut weights);
            group += 4;
        }
        while L::QUERY_ROWS >= QUERIES_MAX && group + 2 <= end {
            scores::<L, R, 2>(task, &queries, span, group, &mut weights);
            group += 2;
        }
        while group < end {
            scores::<L, R, 1>(task, &queries, span, group, &mut weights);
            group += 1;
        }
        let mut maxima = [0f32; R];
        let mut totals = [0f32; R];
        let mut sums = [std::ptr::null_mut(); R];
        for r in 0..R {
            if hidden[r] < seen[r] {
                (maxima[r], totals[r]) = softmax::<L>(&mut weights[r], hidden[r], seen[r]);
            }
            // The span that holds a query's first token needs no merge: it is summed in place.
            sums[r] = if span.start <= task.queries[from + r].begin {
                running.values.add((from + r) * task.head_dim)
            } else {
                fresh[r].as_mut_ptr().cast()
            };
            sums[r].write_bytes(0, task.head_dim);
        }
        // Each query's tokens in ascending order: its own before the shared ones, those, its own behind them.
        for r in 0..R {
            let own = hidden[r]..shared_begin.min(seen[r]);
            query_values::<L>(task.head_dim, span, &weights[r], own, sums[r]);
        }
        if shared_begin < shared_end {
            weighted_values::<L, R>(task.head_dim, span, &weights, shared_begin..shared_end, &sums);
        }
        for r in 0..R {
            query_values::<L>(task.head_dim, span, &weights[r], shared_end..seen[r], sums[r]);
            let i = from + r;
            if hidden[r] >= seen[r] {
                continue;
            }
            if span.start <= task.queries[i].begin {
                (running.max[i], running.sum[i]) = (maxima[r], totals[r]);
            } else {
                let old = (running.max[i], running.sum[i]);
                let values = running.values.add(i * task.head_dim);
                (running.max[i], running.sum[i]) =
                    merge::<L>(old, values, (maxima[r], totals[r]), sums[r], task.head_dim);
            }
        }
    }
    R
}

/// Scores of the tokens of `G` groups from `group` on for `R` queries, to their places in `to[r]`.
#[inline(always)]
unsafe fn scores<L: Lanes, const R: usize, const G: usize>(
    task: &HeadTask<'_>,
    queries: &[*const f32; R],
    span: &Span,
    group: usize,
    to: &mut [[f32; SPAN_TOKENS]; R],
) {
    // SAFETY: the caller vouches for the groups and the queries; the groups lie inside the span.
    unsafe {
        let mut acc = [[L::splat(0.0); G]; R];
        let mut i = 0;
        while i < task.head_dim {
            // Two dimensions of sixteen tokens are one cache line.
            let line = i * GROUP_TOKENS;
            let mut pairs = [(L::splat(0.0), L::splat(0.0)); G];
            for g in 0..G {
                pairs[g] = L::load_bf16_pairs(span.at[group + g].wrapping_add(line));
            }
            for r in 0..R {
                let query = queries[r].wrapping_add(i);
                let (even, odd) = (L::splat(query.read()), L::splat(query.wrapping_add(1).read()));
                for g in 0..G {
                    acc[r][g] = L::fma(pairs[g].0, even, acc[r][g]);
                    acc[r][g] = L::fma(pairs[g].1, odd, acc[r][g]);
                }
            }
            i += 2;
        }
        for r in 0..R {
            for g in 0..G {
                let scores = to[r].as_mut_ptr().wrapping_add((group + g) * GROUP_TOKENS);
                L::store(scores, L::mul(acc[r][g], L::splat(task.scale)));
            }
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
        // Past the last whole group: the rest is masked.
        let (whole, rest) = (seen / LANES * LANES, seen % LANES);
        let mut max = lowest;
        let mut i = first;
        while i < whole {
            max = L::max(L::load(start.wrapping_add(i)), max);
            i += LANES;
        }
        if rest > 0 {
            max = L::max(L::first(rest, L::load(start.wrapping_add(whole)), lowest), max);
        }
        let max = L::reduce_max(max);
        let lanes = L::splat(max);
        let mut sum = zero;
        let mut i = first;
        while i < whole {
            let e = L::exp(L::sub(L::load(start.wrapping_add(i)), lanes));
            L::store(start.wrapping_add(i), e);
            sum = L::add(sum, e);
            i += LANES;
        }
        if rest > 0 {
            let e = L::exp(L::sub(L::load(start.wrapping_add(whole)), lanes));
            let e = L::first(rest, e, zero);
            L::store(start.wrapping_add(whole), e);
            sum = L::add(sum, e);
        }
        (max, L::reduce_sum(sum))
    }
}

/// [`weighted_values`] of one query, over `tokens`; nothing when that is empty.
#[inline(always)]
unsafe fn query_values<L: Lanes>(
    head_dim: usize,
    span: &Span,
    weights: &[f32; SPAN_TOKENS],
    tokens: Range<usize>,
    sums: *mut f32,
) {
    if !tokens.is_empty() {
        // SAFETY: the contract is passed on.
        unsafe { weighted_values::<L, 1>(head_dim, span, std::array::from_ref(weights), tokens, &[sums]) }
    }
}

/// Adds weight * value over tokens `begin..end` of the span to `sums`, tokens ascending.
#[inline(always)]
unsafe fn weighted_values<L: Lanes, const R: usize>(
    head_dim: usize,
    span: &Span,
    weights: &[[f32; SPAN_TOKENS]; R],
    tokens: Range<usize>,
    sums: &[*mut f32; R],
) {
    let mut column = 0;
    while column < head_dim {
        // SAFETY: the columns lie inside the head; the rest of the contract is passed on.
        unsafe {
            let left = (head_dim - column) / LANES;
            // As many columns as leave registers for the weights of all queries.
            if L::QUERY_ROWS >= QUERIES_MAX && R <= 4 && left >= 4 {
                value_columns::<L, R, 4>(head_dim, span, weights, tokens.clone(), column, sums);
                column += 4 * LANES;
            } else if L::QUERY_ROWS >= QUERIES_MAX && left >= 2 {
                value_columns::<L, R, 2>(head_dim, span, weights, tokens.clone(), column, sums);
                column += 2 * LANES;
            } else {
                value_columns::<L, R, 1>(head_dim, span, weights, tokens.clone(), column, sums);
                column += LANES;
            }
        }
    }
}

/// `C` lane groups of [`weighted_values`], from `column` on, in registers.
#[inline(always)]
unsafe fn value_columns<L: Lanes, const R: usize, const C: usize>(
    head_dim: usize,
    span: &Span,
    weights: &[[f32; SPAN_TOKENS]; R],
    tokens: Range<usize>,
    column: usize,
    sums: &[*mut f32; R],
) {
    let (begin, end) = (tokens.start, tokens.end);
    // SAFETY: the caller vouches for the groups of tokens below `end`; columns lie inside the head and arrays are as long as the loops need.
    unsafe {
        let mut acc = [[L::splat(0.0); C]; R];
        for r in 0..R {
            for c in 0..C {
                acc[r][c] = L::load(sums[r].wrapping_add(column + c * LANES));
            }
        }
        let offset = GROUP_TOKENS * head_dim + 2 * column;
        let pair_at =
            |token: usize| span.at[token / GROUP_TOKENS].wrapping_add(offset + token % GROUP_TOKENS / 2 * 2 * head_dim);
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
                let mut pairs = [(L::splat(0.0), L::splat(0.0)); C];
                for c in 0..C {
                    pairs[c] = L::load_bf16_pairs(pair.wrapping_add(c * 2 * LANES));
                }
                for r in 0..R {
                    let weight = weights[r].as_ptr().wrapping_add(token);
                    let (even, odd) = (L::splat(weight.read()), L::splat(weight.wrapping_add(1).read()));
                    for c in 0..C {
                        acc[r][c] = L::fma(pairs[c].0, even, acc[r][c]);
                        acc[r][c] = L::fma(pairs[c].1, odd, acc[r][c]);
                    }
                }
                pair = pair.wrapping_add(2 * head_dim);
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
                L::store(sums[r].wrapping_add(column + c * LANES), acc[r][c]);
            }
        }
    }
}

/// Merges a later span (its maximum, sum and values) into a running result; returns the latter's new maximum and sum.
#[inline(always)]
unsafe fn merge<L: Lanes>(
    old: (f32, f32),
    values: *mut f32,
    new: (f32, f32),
    fresh: *const f32,
    head_dim: usize,
) -> (f32, f32) {
    let both = if old.0 > new.0 { old.0 } else { new.0 };
    // SAFETY: both have `head_dim` values, a multiple of 16; the caller vouches for the tier.
    unsafe {
        let keep = L::exp(L::splat(old.0 - both));
        let add = L::exp(L::splat(new.0 - both));
        let sums = L::fma(L::splat(new.1), add, L::mul(L::splat(old.1), keep));
        let mut lanes = [0f32; LANES];
        L::store(lanes.as_mut_ptr(), sums);
        let mut i = 0;
        while i < head_dim {
            let kept = L::mul(L::load(values.add(i)), keep);
            L::store(values.add(i), L::fma(L::load(fresh.add(i)), add, kept));
            i += LANES;
        }
        (both, lanes[0])
    }
}
