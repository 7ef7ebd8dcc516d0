//! Scores and sums over bfloat16 keys and values, widened to f32.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::task::{Format, HeadTask, Reach, Span, Weights};
use super::{SPAN_TOKENS, TASK_QUERIES};
use crate::kv::GROUP_TOKENS;
use crate::lanes::{LANES, Lanes};

/// Queries at once on tiers with registers for several columns and groups beside them.
const WIDE: usize = 12;

/// Numbers of two bytes.
pub(super) struct Bf16;

impl<L: Lanes> Format<L> for Bf16 {
    const QUERY_ROWS: usize = L::QUERY_ROWS;
    /// Where each query's values are.
    type Queries = [*const f32; TASK_QUERIES];

    #[inline(always)]
    unsafe fn prepare(task: &HeadTask<'_>, to: &mut MaybeUninit<Self::Queries>) {
        let mut queries = [std::ptr::null(); TASK_QUERIES];
        for (to, query) in queries.iter_mut().zip(task.queries) {
            *to = query.values;
        }
        to.write(queries);
    }

    #[inline(always)]
    unsafe fn scores<const R: usize>(
        task: &HeadTask<'_>,
        queries: &Self::Queries,
        span: &Span,
        reach: &Reach<R>,
        to: &mut Weights<R>,
    ) {
        let mut some = [std::ptr::null(); R];
        some.copy_from_slice(&queries[reach.from..][..R]);
        let Range { start: mut group, end } = reach.groups;
        // SAFETY: the contract is passed on.
        unsafe {
            // As many groups at once as fill the registers with independent sums.
            while L::QUERY_ROWS >= WIDE && R <= 3 && group + 4 <= end {
                group_scores::<L, R, 4>(task, &some, span, group, to);
                group += 4;
            }
            while L::QUERY_ROWS >= WIDE && group + 2 <= end {
                group_scores::<L, R, 2>(task, &some, span, group, to);
                group += 2;
            }
            while group < end {
                group_scores::<L, R, 1>(task, &some, span, group, to);
                group += 1;
            }
        }
    }

    #[inline(always)]
    unsafe fn values<const R: usize>(
        task: &HeadTask<'_>,
        span: &Span,
        reach: &Reach<R>,
        weights: &Weights<R>,
        sums: &[*mut f32; R],
    ) {
        let Reach { hidden, seen, .. } = reach;
        let shared_begin = hidden.iter().fold(0, |a, &b| a.max(b));
        let shared_end = seen.iter().fold(SPAN_TOKENS, |a, &b| a.min(b)).max(shared_begin);
        // SAFETY: the contract is passed on.
        unsafe {
            // Each query's tokens in ascending order: its own before the shared ones, those, its own behind them. A token that a query does not see
            // may hold anything, so that a weight of zero would not do.
            for r in 0..R {
                sums[r].write_bytes(0, task.head_dim);
                let own = hidden[r]..shared_begin.min(seen[r]);
                query_values::<L>(task.head_dim, span, &weights[r], own, sums[r]);
            }
            if shared_begin < shared_end {
                weighted_values::<L, R>(task.head_dim, span, weights, shared_begin..shared_end, sums);
            }
            for r in 0..R {
                query_values::<L>(task.head_dim, span, &weights[r], shared_end..seen[r], sums[r]);
            }
        }
    }
}

/// Scores of the tokens of `G` groups from `group` on.
#[inline(always)]
unsafe fn group_scores<L: Lanes, const R: usize, const G: usize>(
    task: &HeadTask<'_>,
    queries: &[*const f32; R],
    span: &Span,
    group: usize,
    to: &mut Weights<R>,
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
                pairs[g] = L::load_bf16_pairs(span.at[group + g].cast::<u16>().wrapping_add(line));
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
    weights: &Weights<R>,
    tokens: Range<usize>,
    sums: &[*mut f32; R],
) {
    let mut column = 0;
    while column < head_dim {
        // SAFETY: the columns lie inside the head; the rest of the contract is passed on.
        unsafe {
            let left = (head_dim - column) / LANES;
            // As many columns as leave registers for the weights of all queries.
            if L::QUERY_ROWS >= WIDE && R <= 4 && left >= 4 {
                value_columns::<L, R, 4>(head_dim, span, weights, tokens.clone(), column, sums);
                column += 4 * LANES;
            } else if L::QUERY_ROWS >= WIDE && left >= 2 {
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
    weights: &Weights<R>,
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
        let pair_at = |token: usize| {
            span.at[token / GROUP_TOKENS].cast::<u16>().wrapping_add(offset + token % GROUP_TOKENS / 2 * 2 * head_dim)
        };
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
