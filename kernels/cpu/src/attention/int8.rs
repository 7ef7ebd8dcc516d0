//! Scores and sums over int8 keys and values, in integers.
//!
//! A query is rounded to 15 bits by its largest magnitude, and so are the weights of a span by their largest product with the scale of a
//! value. Both are held as two planes of int8, q = 128 * high + low, as activations are (`activation`). Products and sums are then exact, so
//! that their order does not matter; the scales meet the finished sums in f32.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::task::{Format, HeadTask, Reach, Span, Weights};
use super::{HEAD_DIM_MAX, SPAN_TOKENS, TASK_QUERIES};
use crate::activation::TINY;
use crate::kv::GROUP_TOKENS;
use crate::lanes::{LANES, Lanes};

/// Greatest quotient of a number by its scale.
const GREATEST: f32 = 127.0 * 128.0;

/// Bytes that one multiplication takes of a dimension or a token.
const QUAD: usize = 4;

/// Numbers of one byte.
pub(super) struct Int8;

/// Integers of 15 bits.
#[derive(Clone, Copy)]
pub(super) struct Planes<const N: usize> {
    high: [i8; N],
    low: [i8; N],
    /// Sums of the planes.
    high_total: i32,
    low_total: i32,
    /// What the integers count; NaN when a number was not finite.
    scale: f32,
}

impl<const N: usize> Planes<N> {
    const ZERO: Self = Self { high: [0; N], low: [0; N], high_total: 0, low_total: 0, scale: 0.0 };

    /// Rounds `len` values, a multiple of 16 up to `N`, to the places from `at` on; the others stay as they are.
    #[inline(always)]
    unsafe fn set<L: Lanes>(&mut self, values: *const f32, at: usize, len: usize) {
        // SAFETY: the caller vouches for the values and the tier; `at + len` is at most N.
        unsafe {
            let (mut largest, mut poison) = (L::splat(0.0), L::splat(0.0));
            for i in (0..len).step_by(LANES) {
                let x = L::load(values.wrapping_add(i));
                largest = L::max(L::abs(x), largest);
                // Stays zero as long as all values are finite.
                poison = L::fma(x, L::splat(0.0), poison);
            }
            let largest = L::reduce_max(largest);
            let (scale, inverse) = if largest > TINY { (largest / GREATEST, GREATEST / largest) } else { (0.0, 0.0) };
            let inverse = L::splat(inverse);
            let (mut high_total, mut low_total) = (L::splat_int(0), L::splat_int(0));
            for i in (0..len).step_by(LANES) {
                let q = L::round(L::mul(L::load(values.wrapping_add(i)), inverse));
                let high = L::div128(L::add_int(q, L::splat_int(64)));
                let low = L::sub_int(q, L::join_planes(high, L::splat_int(0)));
                high_total = L::add_int(high_total, high);
                low_total = L::add_int(low_total, low);
                L::store_i8(self.high.as_mut_ptr().wrapping_add(at + i), high);
                L::store_i8(self.low.as_mut_ptr().wrapping_add(at + i), low);
            }
            self.high_total = L::reduce_sum_int(high_total);
            self.low_total = L::reduce_sum_int(low_total);
            self.scale = if L::reduce_sum(poison) == 0.0 { scale } else { f32::NAN };
        }
    }

    /// Four neighbours of both planes.
    #[inline(always)]
    unsafe fn quads(&self, at: usize) -> (i32, i32) {
        let read = |plane: &[i8; N]| {
            // SAFETY: the caller vouches that four values begin at `at`.
            unsafe { plane.as_ptr().wrapping_add(at).cast::<i32>().read_unaligned() }
        };
        (read(&self.high), read(&self.low))
    }

    /// Empty sums of products with both planes.
    #[inline(always)]
    unsafe fn start<L: Lanes>(&self) -> (L::I, L::I) {
        // SAFETY: the caller vouches for the tier.
        unsafe { (L::byte_start(self.high_total), L::byte_start(self.low_total)) }
    }
}

/// Finished sums of both planes as one number.
#[inline(always)]
unsafe fn joined<L: Lanes>(sums: (L::I, L::I)) -> L::F {
    // SAFETY: the caller vouches for the tier. At most 256 products of 127 and 16,256, or 128 of 128 and 16,256: inside i32.
    unsafe { L::to_float(L::join_planes(sums.0, sums.1)) }
}

impl<L: Lanes> Format<L> for Int8 {
    // Two sums each.
    const QUERY_ROWS: usize = L::QUERY_ROWS / 2;
    /// Those of the task are set, the others are not.
    type Queries = [MaybeUninit<Planes<HEAD_DIM_MAX>>; TASK_QUERIES];

    #[inline(always)]
    unsafe fn prepare(task: &HeadTask<'_>, to: &mut MaybeUninit<Self::Queries>) {
        let to = to.write([const { MaybeUninit::uninit() }; TASK_QUERIES]);
        for (to, query) in to.iter_mut().zip(task.queries) {
            let planes = to.write(Planes::ZERO);
            // SAFETY: a query has `head_dim` values, by the contract.
            unsafe { planes.set::<L>(query.values, 0, task.head_dim) };
            planes.scale *= task.scale;
        }
    }

    #[inline(always)]
    unsafe fn scores<const R: usize>(
        task: &HeadTask<'_>,
        queries: &Self::Queries,
        span: &Span,
        reach: &Reach<R>,
        to: &mut Weights<R>,
    ) {
        let queries = &queries[reach.from..][..R];
        let Range { start: mut group, end } = reach.groups;
        // SAFETY: the reach names queries of the task, which are set; the contract is passed on.
        unsafe {
            let queries = &*(std::ptr::from_ref(queries) as *const [Planes<HEAD_DIM_MAX>]);
            // As many groups at once as fill the registers with independent sums.
            while L::QUERY_ROWS >= WIDE && R <= 3 && group + 4 <= end {
                group_scores::<L, R, 4>(task, queries, span, group, to);
                group += 4;
            }
            while L::QUERY_ROWS >= WIDE && group + 2 <= end {
                group_scores::<L, R, 2>(task, queries, span, group, to);
                group += 2;
            }
            while group < end {
                group_scores::<L, R, 1>(task, queries, span, group, to);
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
        // A byte is finite whatever it is: tokens that a query does not see have zeros for weights.
        let mut planes = [Planes::<SPAN_TOKENS>::ZERO; R];
        let head_dim = task.head_dim;
        // SAFETY: the contract is passed on.
        unsafe {
            for r in 0..R {
                if reach.hidden[r] < reach.seen[r] {
                    scaled_weights::<L>(head_dim, span, &weights[r], reach.hidden[r]..reach.seen[r], &mut planes[r]);
                }
            }
            let mut column = 0;
            while column < head_dim {
                let left = (head_dim - column) / LANES;
                if L::QUERY_ROWS >= WIDE && R <= 3 && left >= 4 {
                    value_columns::<L, R, 4>(head_dim, span, reach.groups.clone(), &planes, column, sums);
                    column += 4 * LANES;
                } else if L::QUERY_ROWS >= WIDE && left >= 2 {
                    value_columns::<L, R, 2>(head_dim, span, reach.groups.clone(), &planes, column, sums);
                    column += 2 * LANES;
                } else {
                    value_columns::<L, R, 1>(head_dim, span, reach.groups.clone(), &planes, column, sums);
                    column += LANES;
                }
            }
        }
    }
}

/// [`Lanes::QUERY_ROWS`] of tiers with registers for several columns and groups.
const WIDE: usize = 12;

/// Scores of the tokens of `G` groups from `group` on.
#[inline(always)]
unsafe fn group_scores<L: Lanes, const R: usize, const G: usize>(
    task: &HeadTask<'_>,
    queries: &[Planes<HEAD_DIM_MAX>],
    span: &Span,
    group: usize,
    to: &mut Weights<R>,
) {
    // SAFETY: the caller vouches for the groups and for `R` queries; the groups lie inside the span.
    unsafe {
        let mut acc = [[queries[0].start::<L>(); G]; R];
        for r in 1..R {
            acc[r] = [queries[r].start::<L>(); G];
        }
        let mut i = 0;
        while i < task.head_dim {
            // Four dimensions of sixteen tokens are one cache line.
            let mut keys = [L::load_weights(span.at[group].wrapping_add(i * GROUP_TOKENS)); G];
            for g in 1..G {
                keys[g] = L::load_weights(span.at[group + g].wrapping_add(i * GROUP_TOKENS));
            }
            for r in 0..R {
                let (high, low) = queries[r].quads(i);
                for g in 0..G {
                    acc[r][g].0 = L::byte_dot(acc[r][g].0, keys[g], high);
                    acc[r][g].1 = L::byte_dot(acc[r][g].1, keys[g], low);
                }
            }
            i += QUAD;
        }
        for g in 0..G {
            let scales = L::load(scales_at(span, task.head_dim, group + g));
            for r in 0..R {
                let score = L::mul(L::mul(joined::<L>(acc[r][g]), L::splat(queries[r].scale)), scales);
                L::store(to[r].as_mut_ptr().wrapping_add((group + g) * GROUP_TOKENS), score);
            }
        }
    }
}

/// Scales of a group's keys; those of its values follow.
#[inline(always)]
fn scales_at(span: &Span, head_dim: usize, group: usize) -> *const f32 {
    span.at[group].wrapping_add(2 * GROUP_TOKENS * head_dim).cast()
}

/// Multiplies the weights of the tokens that a query sees by the scales of their values, and rounds them. Other tokens keep zeros.
#[inline(always)]
unsafe fn scaled_weights<L: Lanes>(
    head_dim: usize,
    span: &Span,
    weights: &[f32; SPAN_TOKENS],
    tokens: Range<usize>,
    to: &mut Planes<SPAN_TOKENS>,
) {
    let mut scaled = [0f32; SPAN_TOKENS];
    let (first, end) = (tokens.start / GROUP_TOKENS, tokens.end.div_ceil(GROUP_TOKENS));
    // SAFETY: the caller vouches for the groups of tokens below the end; places lie inside the arrays.
    unsafe {
        for group in first..end {
            let at = group * GROUP_TOKENS;
            let scales = L::load(scales_at(span, head_dim, group).wrapping_add(GROUP_TOKENS));
            let product = L::mul(L::load(weights.as_ptr().wrapping_add(at)), scales);
            // Scales of tokens that are not seen may be anything.
            let product = L::first((tokens.end - at).min(LANES), product, L::splat(0.0));
            let product = L::first(tokens.start.saturating_sub(at).min(LANES), L::splat(0.0), product);
            L::store(scaled.as_mut_ptr().wrapping_add(at), product);
        }
        let at = first * GROUP_TOKENS;
        to.set::<L>(scaled.as_ptr().wrapping_add(at), at, (end - first) * GROUP_TOKENS);
    }
}

/// `C` lane groups of weight * value over the tokens of `groups`, from `column` on.
#[inline(always)]
unsafe fn value_columns<L: Lanes, const R: usize, const C: usize>(
    head_dim: usize,
    span: &Span,
    groups: Range<usize>,
    planes: &[Planes<SPAN_TOKENS>; R],
    column: usize,
    sums: &[*mut f32; R],
) {
    // SAFETY: the caller vouches for the groups; columns lie inside the head and arrays are as long as the loops need.
    unsafe {
        let mut acc = [[planes[0].start::<L>(); C]; R];
        for r in 1..R {
            acc[r] = [planes[r].start::<L>(); C];
        }
        for group in groups {
            let mut line = span.at[group].wrapping_add(GROUP_TOKENS * head_dim + QUAD * column);
            for token in (group * GROUP_TOKENS..(group + 1) * GROUP_TOKENS).step_by(QUAD) {
                // Sixteen dimensions of four tokens are one cache line.
                let mut values = [L::load_weights(line); C];
                for c in 1..C {
                    values[c] = L::load_weights(line.wrapping_add(c * QUAD * LANES));
                }
                for r in 0..R {
                    let (high, low) = planes[r].quads(token);
                    for c in 0..C {
                        acc[r][c].0 = L::byte_dot(acc[r][c].0, values[c], high);
                        acc[r][c].1 = L::byte_dot(acc[r][c].1, values[c], low);
                    }
                }
                line = line.wrapping_add(QUAD * head_dim);
            }
        }
        for r in 0..R {
            let scale = L::splat(planes[r].scale);
            for c in 0..C {
                L::store(sums[r].wrapping_add(column + c * LANES), L::mul(joined::<L>(acc[r][c]), scale));
            }
        }
    }
}
