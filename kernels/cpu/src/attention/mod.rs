//! Attention of query rows over a paged KV pool.
//!
//! # The number a row gets
//! A row at position p sees the tokens 0..=p of its own sequence. They are split at fixed positions, every [`SPAN_TOKENS`] tokens. Per
//! span: scores q·k * scale (dimensions ascending), their maximum m, weights e^(score - m), the weights' sum (token t in lane t mod 16,
//! lanes in the fixed tree), and the weighted sum of values (tokens ascending). Spans are merged in order of position by the usual rule of
//! two maxima. Where the blocks lie, how a prompt was chunked, which rows share a pass, and which thread runs it never enter.
//!
//! Over a pool of int8 the products of a span are exact integers: a query and the weights of a span times their values' scales are rounded
//! to 15 bits by their own largest magnitude (`int8`), scores are the integer sum times both scales, and a span's weighted sum is one integer
//! times the weights' scale. The rest is the same.
//!
//! With a window of W tokens the row sees the last W tokens of those alone, itself included. Spans keep their borders: a span that lies
//! before the window is left out, and one that the window cuts is weighed from the cut on.
//!
//! # Work split
//! A task is one head of the pool and some query rows: consecutive rows of one prompt, or single rows of sequences whose tables begin with the
//! same blocks. What its rows see in common, in whole spans, is walked span by span for all of them, so that keys and values come once from
//! memory, and then from the nearest cache, however many rows there are. Because spans end at fixed positions, none of this changes a bit.

mod bf16;
mod int8;
mod task;

use std::cmp::Reverse;

use task::{HeadTask, Query, attend_task};

use crate::kv::KvPool;
use crate::lanes::{Lanes, kernel};
use crate::pool::{Session, SharedMut, TaskPanicked};
use crate::tier::Tier;

/// Tokens per span. Part of the numerics: keys and values of one head's span fit the first-level cache.
pub const SPAN_TOKENS: usize = 128;

/// Largest head the kernel holds on its stack.
pub const HEAD_DIM_MAX: usize = 256;

/// Most queries of a task: their running results (48 kB for the largest head) stay in the second-level cache beside a span.
const TASK_QUERIES: usize = 48;

/// Tasks a thread gets at least, where there is work for so many: enough to even out threads of unequal speed.
const TASKS_PER_THREAD: usize = 4;

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
    /// Rows in the order of the tasks.
    rows: Vec<PlanRow>,
    tables: Vec<u32>,
    /// Tier the tasks were cut for.
    tier: Option<Tier>,
    /// Rows that queries and results must have.
    rows_end: usize,
    heads: usize,
    kv_heads: usize,
    block_tokens: usize,
    blocks: usize,
}

/// The most that a plan holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanRoom {
    /// Rows.
    pub rows: usize,
    /// Blocks in the tables of all runs together.
    pub table_blocks: usize,
    /// Query heads.
    pub heads: usize,
    /// Heads of the pool.
    pub kv_heads: usize,
}

impl PlanRoom {
    /// Each row alone: more tasks there never are.
    fn tasks(&self) -> usize {
        self.rows * self.kv_heads * (self.heads / self.kv_heads.max(1)).div_ceil(TASK_QUERIES)
    }

    /// Bytes of that memory.
    pub fn bytes(&self) -> usize {
        self.tasks() * size_of::<Task>() + self.rows * size_of::<PlanRow>() + self.table_blocks * size_of::<u32>()
    }
}

#[derive(Clone, Copy, Debug)]
struct PlanRow {
    row: usize,
    /// Its position, and so the tokens before it.
    context: usize,
    /// Where the sequence's blocks begin in the flat table, and how many they are.
    table: usize,
    blocks: usize,
}

#[derive(Clone, Copy, Debug)]
struct Task {
    /// First of its rows among the plan's.
    first: usize,
    rows: usize,
    kv_head: usize,
    /// First query head on that head, and how many.
    head: usize,
    heads: usize,
    /// Tokens that all rows see in the same blocks: whole spans.
    shared: usize,
    /// Tokens all its rows see: how long it takes.
    cost: usize,
}

/// How tasks are cut.
struct Cut {
    rows_max: usize,
    heads: usize,
    kv_heads: usize,
    block_tokens: usize,
}

impl AttentionPlan {
    /// An empty plan.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty plan with the memory for what `room` says.
    pub fn with_room(room: PlanRoom) -> Self {
        Self {
            tasks: Vec::with_capacity(room.tasks()),
            rows: Vec::with_capacity(room.rows),
            tables: Vec::with_capacity(room.table_blocks),
            ..Self::default()
        }
    }

    /// Replaces the plan: `heads` query heads over the heads of `pool`, to run on `tier` with `threads` threads.
    ///
    /// # Panics
    /// When the tier is not supported, `heads` is no positive multiple of the pool's heads, a head is longer than [`HEAD_DIM_MAX`], or a run's table is too short or
    /// names a block outside the pool.
    pub fn set<'a>(
        &mut self,
        pool: &KvPool,
        heads: usize,
        tier: Tier,
        threads: usize,
        runs: impl IntoIterator<Item = AttentionRun<'a>>,
    ) {
        assert!(tier.is_supported(), "tier {tier} is not supported here");
        let shape = pool.shape();
        assert!(heads > 0 && heads.is_multiple_of(shape.kv_heads), "query heads must be a multiple of kv heads");
        assert!(shape.head_dim <= HEAD_DIM_MAX, "head_dim is above {HEAD_DIM_MAX}");
        self.tasks.clear();
        self.rows.clear();
        self.tables.clear();
        self.rows_end = 0;
        self.tier = Some(tier);
        self.heads = heads;
        self.kv_heads = shape.kv_heads;
        self.block_tokens = shape.block_tokens;
        self.blocks = shape.blocks;
        let runs: Vec<AttentionRun<'a>> = runs.into_iter().filter(|run| run.rows > 0).collect();
        for run in &runs {
            let blocks = (run.context + run.rows).div_ceil(shape.block_tokens);
            assert!(run.table.len() >= blocks, "a table of {} blocks for {blocks}", run.table.len());
            let inside = run.table[..blocks].iter().all(|&b| (b as usize) < shape.blocks);
            assert!(inside, "a block is outside the pool");
            self.rows_end = self.rows_end.max(run.first_row + run.rows);
        }
        let group = heads / shape.kv_heads;
        let fit = (TASK_QUERIES / group).max(1);
        // SAFETY: the tier was checked.
        let together = (unsafe { query_rows(tier) } / group).max(1);
        let units = runs.iter().map(|run| run.rows).sum::<usize>() * shape.kv_heads;
        let even = if threads > 1 { (units / (threads * TASKS_PER_THREAD)).max(together) } else { fit };
        let cut =
            Cut { rows_max: even.min(fit), heads: group, kv_heads: shape.kv_heads, block_tokens: shape.block_tokens };
        let (long, mut short): (Vec<_>, Vec<_>) = runs.into_iter().partition(|run| run.rows > 1);
        for run in long {
            self.add_run(&cut, &run);
        }
        // Equal beginnings become neighbours.
        short.sort_by(|a, b| a.table.cmp(b.table));
        let mut left = short.as_slice();
        while !left.is_empty() {
            let (count, shared) = cluster(&cut, left);
            self.add_cluster(&cut, &left[..count], shared);
            left = &left[count..];
        }
        // Longest first: threads then finish together.
        self.tasks.sort_by_key(|task| Reverse(task.cost));
    }

    /// Rows of one prompt, some a task.
    fn add_run(&mut self, cut: &Cut, run: &AttentionRun<'_>) {
        let table = self.add_table(cut, run);
        for row in (0..run.rows).step_by(cut.rows_max) {
            let first = self.rows.len();
            let end = run.rows.min(row + cut.rows_max);
            self.rows.extend((row..end).map(|row| PlanRow {
                row: run.first_row + row,
                context: run.context + row,
                table: table.0,
                blocks: table.1,
            }));
            self.add_tasks(cut, first, whole_spans(run.context + row + 1));
        }
    }

    /// Single rows whose tables begin alike.
    fn add_cluster(&mut self, cut: &Cut, runs: &[AttentionRun<'_>], shared: usize) {
        let first = self.rows.len();
        for run in runs {
            let (table, blocks) = self.add_table(cut, run);
            self.rows.push(PlanRow { row: run.first_row, context: run.context, table, blocks });
        }
        self.add_tasks(cut, first, shared);
    }

    fn add_table(&mut self, cut: &Cut, run: &AttentionRun<'_>) -> (usize, usize) {
        let blocks = (run.context + run.rows).div_ceil(cut.block_tokens);
        let start = self.tables.len();
        self.tables.extend_from_slice(&run.table[..blocks]);
        (start, blocks)
    }

    /// One task a head for the rows from `first` on.
    fn add_tasks(&mut self, cut: &Cut, first: usize, shared: usize) {
        let rows = self.rows.len() - first;
        let cost = self.rows[first..].iter().map(|row| row.context + 1).sum();
        for kv_head in 0..cut.kv_heads {
            for head in (0..cut.heads).step_by(TASK_QUERIES) {
                let heads = (cut.heads - head).min(TASK_QUERIES);
                self.tasks.push(Task { first, rows, kv_head, head, heads, shared, cost });
            }
        }
    }
}

fn whole_spans(tokens: usize) -> usize {
    tokens / SPAN_TOKENS * SPAN_TOKENS
}

/// How many of `runs` (one row each, sorted by table) share a task, and the tokens they have in common. A run joins when that leaves at least
/// a span in common, and at least half of what the others have.
fn cluster(cut: &Cut, runs: &[AttentionRun<'_>]) -> (usize, usize) {
    let first = &runs[0];
    let mut shared = whole_spans(first.context + 1);
    for (count, run) in runs.iter().enumerate().skip(1) {
        let equal = first.table.iter().zip(run.table).take_while(|(a, b)| a == b).count();
        let common = whole_spans((equal * cut.block_tokens).min(run.context + 1)).min(shared);
        let worth = common >= SPAN_TOKENS && (count == 1 || common * 2 >= shared);
        if count == cut.rows_max || !worth {
            return (count, shared);
        }
        shared = common;
    }
    (runs.len(), shared)
}

kernel!(
    /// Query heads that one pass keeps in registers.
    fn query_rows() -> usize = query_rows_body
);

#[inline(always)]
unsafe fn query_rows_body<L: Lanes>() -> usize {
    L::QUERY_ROWS
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
    assert!(queries.data.len() >= plan.rows_end * queries.stride, "too few query rows");
    assert!(out.data.len() >= plan.rows_end * out.stride, "too few result rows");
    let to = SharedMut(out.data.as_mut_ptr());
    let group = plan.heads / plan.kv_heads;
    session.run(plan.tasks.len(), |index| {
        let task = plan.tasks[index];
        let head_column = (task.kv_head * group + task.head) * shape.head_dim;
        let blank = Query { values: std::ptr::null(), out: std::ptr::null_mut(), begin: 0, len: 0, table: &[] };
        let mut filled = [blank; TASK_QUERIES];
        let mut count = 0;
        for row in &plan.rows[task.first..][..task.rows] {
            let len = row.context + 1;
            for head in 0..task.heads {
                let column = head_column + head * shape.head_dim;
                // SAFETY: rows and columns were checked against both arrays; rows of a plan are distinct, and a task owns its rows' heads.
                let (values, out) = unsafe {
                    let values = queries.data.as_ptr().add(row.row * queries.stride + queries.column + column);
                    (values, to.get().add(row.row * out.stride + out.column + column))
                };
                let table = &plan.tables[row.table..][..row.blocks];
                filled[count] = Query { values, out, begin: len.saturating_sub(window), len, table };
                count += 1;
            }
        }
        let task = HeadTask {
            keys_values: pool.head_ptr(layer.index, task.kv_head),
            dtype: shape.dtype,
            block_stride: pool.block_stride(),
            group_bytes: shape.group_bytes(),
            block_tokens: shape.block_tokens,
            head_dim: shape.head_dim,
            scale: layer.scale,
            queries: &filled[..count],
            shared: task.shared,
        };
        // SAFETY: the tier was checked; the plan checked blocks and lengths; the queries were set just above.
        unsafe { attend_task(tier, &task) };
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(table: &[u32], context: usize) -> AttentionRun<'_> {
        AttentionRun { first_row: 0, rows: 1, context, table }
    }

    #[test]
    fn rows_that_begin_alike_share_a_task() {
        let cut = Cut { rows_max: 3, heads: 3, kv_heads: 1, block_tokens: 64 };
        let (long, other, short) = ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 6], [1, 2, 8]);
        // Six blocks of 64 are three spans; four in common leave two, two leave one.
        assert_eq!(cluster(&cut, &[run(&long, 383)]), (1, 384));
        assert_eq!(cluster(&cut, &[run(&long, 382)]), (1, 256));
        assert_eq!(cluster(&cut, &[run(&long, 383), run(&long, 380), run(&other, 383)]), (3, 256));
        assert_eq!(cluster(&cut, &[run(&long, 383), run(&short, 191)]), (2, 128));
        // Most rows of a task; a span in common at least; half of what the others have.
        assert_eq!(cluster(&cut, &[run(&long, 383); 5]), (3, 384));
        assert_eq!(cluster(&cut, &[run(&long, 383), run(&[1, 3], 127)]), (1, 384));
        assert_eq!(cluster(&cut, &[run(&long, 383), run(&long, 383), run(&short, 191)]), (2, 384));
    }
}
