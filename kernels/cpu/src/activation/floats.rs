//! Activations as bfloat16: whole rows, rounded once.
//!
//! # Numbers
//! Each value is rounded to bfloat16, to nearest even. A magnitude from 2^128 - 2^119 on becomes infinite, and infinities and NaNs stay, so
//! that a broken row's products are broken too.
//!
//! # Layout
//! A row is an odd number of cache lines, so that neighbouring rows do not meet in the same sets of a cache: `k` values of bfloat16 where
//! the unit takes those, `k` values of f32 (rounded all the same) where it is fused multiply-adds, which then need not widen them again for
//! each tile of weights. For AMX the rows are filled up to a multiple of sixteen by rows that keep what was there and that nobody reads.

use super::tiled::Line;
use super::{BLOCK, TILED_ROWS};
use crate::bf16_unit::Bf16Unit;
use crate::half::{bf16_to_f32, f32_to_bf16};
use crate::lanes::{Lanes, kernel};
use crate::pool::{Session, SharedMut, TaskPanicked};
use crate::tier::Tier;

/// Rows that one task fills.
const ROWS_PER_TASK: usize = 4;

/// Rows of bfloat16.
#[derive(Debug, Default)]
pub(crate) struct FloatRows {
    unit: Bf16Unit,
    /// Lines from one row to the next.
    stride: usize,
    lines: Vec<Line>,
}

/// Lines from one row of `k` values to the next.
fn stride(unit: Bf16Unit, k: usize) -> usize {
    let value_bytes = if unit == Bf16Unit::Fma { 4 } else { 2 };
    (k * value_bytes / size_of::<Line>()) | 1
}

impl FloatRows {
    /// Lines that so many rows of `k` values take.
    pub(super) fn lines(unit: Bf16Unit, rows: usize, k: usize) -> usize {
        let held = if unit == Bf16Unit::Amx { rows.next_multiple_of(TILED_ROWS) } else { rows };
        held * stride(unit, k)
    }

    pub(super) fn with_room(lines: usize) -> Self {
        Self { lines: Vec::with_capacity(lines), ..Self::default() }
    }

    /// What the rows are made for.
    pub(crate) fn unit(&self) -> Bf16Unit {
        self.unit
    }

    /// Bytes from one row to the next.
    pub(crate) fn stride_bytes(&self) -> usize {
        self.stride * size_of::<Line>()
    }

    /// Start of a row: of f32 for [`Bf16Unit::Fma`], else of bfloat16.
    pub(crate) fn row(&self, row: usize) -> *const u8 {
        self.lines[row * self.stride..].as_ptr().cast()
    }

    /// Takes rows of `k` values from `row_of`, on all threads, in the form that `unit` wants.
    pub(crate) fn fill(
        &mut self,
        session: &mut Session<'_>,
        unit: Bf16Unit,
        tier: Tier,
        rows: usize,
        k: usize,
        row_of: impl Fn(usize) -> *const f32 + Sync,
    ) -> Result<(), TaskPanicked> {
        self.unit = unit;
        self.stride = stride(unit, k);
        self.lines.resize(Self::lines(unit, rows, k), Line::default());
        let (stride, is_wide) = (self.stride, unit == Bf16Unit::Fma);
        let lines = SharedMut(self.lines.as_mut_ptr());
        session.run_if_large(rows.div_ceil(ROWS_PER_TASK), rows * k, |task| {
            for row in task * ROWS_PER_TASK..rows.min((task + 1) * ROWS_PER_TASK) {
                let from = row_of(row);
                // SAFETY: `row_of` gives `k` values, each row's lines are its own and have room for them, and the tier is supported.
                unsafe {
                    let to = lines.get().add(row * stride);
                    if is_wide { round_wide(tier, from, k, to.cast()) } else { round(tier, from, k, to.cast()) }
                }
            }
        })
    }
}

kernel!(
    /// Rounds `k` values.
    fn round(from: *const f32, k: usize, to: *mut u16) = round_body
);

kernel!(
    /// Rounds `k` values to what bfloat16 holds and leaves them as f32.
    fn round_wide(from: *const f32, k: usize, to: *mut f32) = round_wide_body
);

// Both are plain loops, which the compiler makes wide by the tier's features; `L` says which.

#[inline(always)]
unsafe fn round_body<L: Lanes>(from: *const f32, k: usize, to: *mut u16) {
    // SAFETY: the caller vouches for `k` values at both places.
    let (from, to) = unsafe { (std::slice::from_raw_parts(from, k), std::slice::from_raw_parts_mut(to, k)) };
    for (from, to) in from.chunks_exact(BLOCK).zip(to.chunks_exact_mut(BLOCK)) {
        for (from, to) in from.iter().zip(to) {
            *to = f32_to_bf16(*from);
        }
    }
}

#[inline(always)]
unsafe fn round_wide_body<L: Lanes>(from: *const f32, k: usize, to: *mut f32) {
    // SAFETY: the caller vouches for `k` values at both places.
    let (from, to) = unsafe { (std::slice::from_raw_parts(from, k), std::slice::from_raw_parts_mut(to, k)) };
    for (from, to) in from.chunks_exact(BLOCK).zip(to.chunks_exact_mut(BLOCK)) {
        for (from, to) in from.iter().zip(to) {
            *to = bf16_to_f32(f32_to_bf16(*from));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Written out: the value between two neighbours goes to the nearer one, to the even one from the middle.
    #[test]
    fn rows_are_rounded_alike_on_every_tier() {
        let pool = crate::ThreadPool::new(2).expect("starts");
        let cases = [
            (1.0f32, 0x3f80u16),
            (1.0 + 1.0 / 256.0, 0x3f80),
            (1.0 + 3.0 / 256.0, 0x3f82),
            (1.0 + 1.0 / 256.0 + 1.0 / 65_536.0, 0x3f81),
            (-0.0, 0x8000),
            (f32::from_bits(0x0001_8000), 0x0002),
            (f32::MAX, 0x7f80),
            (f32::NEG_INFINITY, 0xff80),
        ];
        let k = 96;
        let x: Vec<f32> = (0..7 * k).map(|i| cases[(i * 5 + i / 11) % cases.len()].0).collect();
        for tier in Tier::ALL.into_iter().filter(|tier| tier.is_supported()) {
            let mut rows = FloatRows::default();
            let source = SharedMut(x.as_ptr().cast_mut());
            // SAFETY: the seven rows are inside `x`.
            let row_of = |row: usize| unsafe { source.get().add(row * k) }.cast_const();
            rows.fill(&mut pool.enter(), Bf16Unit::of(tier), tier, 7, k, row_of).expect("no panic");
            assert!(rows.stride % 2 == 1);
            for row in 0..7 {
                for i in 0..k {
                    // SAFETY: a row has `k` values of its unit's width.
                    let bits = unsafe {
                        match rows.unit() {
                            Bf16Unit::Fma => rows.row(row).cast::<u32>().add(i).read(),
                            _ => u32::from(rows.row(row).cast::<u16>().add(i).read()) << 16,
                        }
                    };
                    let index = row * k + i;
                    let wanted = cases[(index * 5 + index / 11) % cases.len()].1;
                    assert_eq!(bits, u32::from(wanted) << 16, "{tier} {}", x[index]);
                }
            }
        }
    }
}
