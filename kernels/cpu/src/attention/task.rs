//! The kernel of attention: the queries of one task over the spans they see.
//!
//! What it does with a span is told by [`Format`], once for each way in which the pool holds numbers: [`super::bf16`] and [`super::int8`].

use std::mem::MaybeUninit;
use std::ops::Range;

use super::bf16::Bf16;
use super::int8::Int8;
use super::{HEAD_DIM_MAX, SPAN_TOKENS, TASK_QUERIES};
use crate::kv::{GROUP_TOKENS, KvDtype};
use crate::lanes::{LANES, Lanes, kernel};

const SPAN_GROUPS: usize = SPAN_TOKENS / GROUP_TOKENS;

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
    /// The head in block 0.
    pub(super) keys_values: *const u8,
    pub(super) dtype: KvDtype,
    /// Bytes between blocks, and of a group.
    pub(super) block_stride: usize,
    pub(super) group_bytes: usize,
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

/// Weights of the tokens of a span for some queries.
pub(super) type Weights<const R: usize> = [[f32; SPAN_TOKENS]; R];

/// How numbers of one kind are scored and summed.
pub(super) trait Format<L: Lanes> {
    /// Most queries that go over a span together.
    const QUERY_ROWS: usize;
    /// The queries of a task, as the scores need them.
    type Queries;

    /// Prepares the task's queries.
    ///
    /// # Safety
    /// The tier must be supported, and every query have `head_dim` values, a multiple of 16 up to [`HEAD_DIM_MAX`].
    unsafe fn prepare(task: &HeadTask<'_>, to: &mut MaybeUninit<Self::Queries>);

    /// Scores of the tokens in the groups `from.first..from.end`, for the queries of the reach, to their places in each row of `to`.
    ///
    /// # Safety
    /// The tier must be supported, `queries` be prepared, and the span's groups below the end lie in the pool.
    unsafe fn scores<const R: usize>(
        task: &HeadTask<'_>,
        queries: &Self::Queries,
        span: &Span,
        reach: &Reach<R>,
        to: &mut Weights<R>,
    );

    /// Sums weight * value over the tokens that each query sees of the span, into `head_dim` values at `sums[r]`; zeros where it sees none.
    ///
    /// # Safety
    /// As for [`Format::scores`]; the weights of a query's groups must be set, zero where it sees nothing.
    unsafe fn values<const R: usize>(
        task: &HeadTask<'_>,
        span: &Span,
        reach: &Reach<R>,
        weights: &Weights<R>,
        sums: &[*mut f32; R],
    );
}

#[inline(always)]
unsafe fn attend_task_body<L: Lanes>(task: &HeadTask<'_>) {
    // SAFETY: the contract is passed on.
    unsafe {
        match task.dtype {
            KvDtype::Bf16 => attend_format::<L, Bf16>(task),
            KvDtype::Int8 => attend_format::<L, Int8>(task),
        }
    }
}

#[inline(always)]
unsafe fn attend_format<L: Lanes, F: Format<L>>(task: &HeadTask<'_>) {
    let mut queries = MaybeUninit::<F::Queries>::uninit();
    let mut values = [MaybeUninit::<f32>::uninit(); TASK_QUERIES * HEAD_DIM_MAX];
    let mut running =
        Running { max: [0.0; TASK_QUERIES], sum: [0.0; TASK_QUERIES], values: values.as_mut_ptr().cast() };
    // SAFETY: the contract is passed on; `values` has room for all queries of any legal head.
    unsafe {
        F::prepare(task, &mut queries);
        let queries = queries.assume_init_ref();
        let whole_spans = |token: usize| token / SPAN_TOKENS * SPAN_TOKENS;
        let begin = task.queries.iter().map(|query| query.begin).min().unwrap_or(0);
        // First the spans in common, for all queries: their keys and values are fetched once. Then those of one sequence after the other.
        let (mut range, mut spans) = (0..task.queries.len(), whole_spans(begin)..task.shared);
        let mut next = 0;
        loop {
            for start in spans.step_by(SPAN_TOKENS) {
                queries_over_span::<L, F>(task, queries, &mut running, range.clone(), start);
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
pub(super) struct Span {
    /// First token.
    start: usize,
    /// Where each group begins.
    pub(super) at: [*const u8; SPAN_GROUPS],
}

impl Span {
    #[inline(always)]
    fn new(task: &HeadTask<'_>, longest: &Query<'_>, start: usize) -> Self {
        let group_at = |token: usize| {
            let block = longest.table[token / task.block_tokens] as usize;
            let group = token % task.block_tokens / GROUP_TOKENS;
            task.keys_values.wrapping_add(block * task.block_stride + group * task.group_bytes)
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

/// What some queries see of a span, in tokens counted from its start.
pub(super) struct Reach<const R: usize> {
    /// First of the queries in the task.
    pub(super) from: usize,
    /// First token that each sees, and past the last one; nothing where these meet.
    pub(super) hidden: [usize; R],
    pub(super) seen: [usize; R],
    /// The same of all together, in groups: never empty.
    pub(super) groups: Range<usize>,
}

impl<const R: usize> Reach<R> {
    /// `None` when no query sees a token of the span.
    #[inline(always)]
    fn new(task: &HeadTask<'_>, from: usize, span: &Span) -> Option<Self> {
        let (mut hidden, mut seen) = ([0; R], [0; R]);
        let (mut first, mut last) = (SPAN_TOKENS, 0);
        for r in 0..R {
            let query = &task.queries[from + r];
            hidden[r] = query.begin.saturating_sub(span.start).min(SPAN_TOKENS);
            seen[r] = (query.len - span.start).min(SPAN_TOKENS);
            first = first.min(hidden[r]);
            last = last.max(seen[r]);
        }
        let groups = first / GROUP_TOKENS..last.div_ceil(GROUP_TOKENS);
        (first < last).then_some(Self { from, hidden, seen, groups })
    }
}

/// Takes the queries in `range` over the span that begins at `start`; all of them have the span's blocks in common.
#[inline(always)]
unsafe fn queries_over_span<L: Lanes, F: Format<L>>(
    task: &HeadTask<'_>,
    queries: &F::Queries,
    running: &mut Running,
    range: Range<usize>,
    start: usize,
) {
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
                12.. if F::QUERY_ROWS >= 12 => some_over_span::<L, F, 12>(task, queries, running, from, &span),
                6.. if F::QUERY_ROWS >= 6 => some_over_span::<L, F, 6>(task, queries, running, from, &span),
                4.. if F::QUERY_ROWS >= 4 => some_over_span::<L, F, 4>(task, queries, running, from, &span),
                3.. => some_over_span::<L, F, 3>(task, queries, running, from, &span),
                2 => some_over_span::<L, F, 2>(task, queries, running, from, &span),
                _ => some_over_span::<L, F, 1>(task, queries, running, from, &span),
            }
        }
    }
}

/// Takes queries `from .. from + R` over a span; returns R.
#[inline(always)]
unsafe fn some_over_span<L: Lanes, F: Format<L>, const R: usize>(
    task: &HeadTask<'_>,
    queries: &F::Queries,
    running: &mut Running,
    from: usize,
    span: &Span,
) -> usize {
    let Some(reach) = Reach::<R>::new(task, from, span) else { return R };
    let mut weights = [[0f32; SPAN_TOKENS]; R];
    let mut fresh = [MaybeUninit::<[f32; HEAD_DIM_MAX]>::uninit(); R];
    // SAFETY: the plan checked that tables name blocks of the pool for all tokens seen; arrays are as long as the loops need.
    unsafe {
        F::scores(task, queries, span, &reach, &mut weights);
        let mut maxima = [0f32; R];
        let mut totals = [0f32; R];
        let mut sums = [std::ptr::null_mut(); R];
        for r in 0..R {
            if reach.hidden[r] < reach.seen[r] {
                (maxima[r], totals[r]) = softmax::<L>(&mut weights[r], reach.hidden[r], reach.seen[r]);
            }
            // The span that holds a query's first token needs no merge: it is summed in place.
            sums[r] = if span.start <= task.queries[from + r].begin {
                running.values.add((from + r) * task.head_dim)
            } else {
                fresh[r].as_mut_ptr().cast()
            };
        }
        F::values(task, span, &reach, &weights, &sums);
        for r in 0..R {
            let i = from + r;
            if reach.hidden[r] >= reach.seen[r] {
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
