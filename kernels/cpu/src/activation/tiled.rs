//! Activations as the tiles of AMX take them: panels of sixteen rows, as bfloat16.
//!
//! # Numbers
//! The same integers as in the other panels. A quant of one plane is a bfloat16; one of 15 bits is the sum of two, q = high + low with high
//! a multiple of 128 and low in 0..128, each of which bfloat16's eight bits hold exactly.
//!
//! # Layout
//! For each panel, for each block of 32: sixteen lines of 64 bytes with the rows' high parts, then, with two planes, sixteen lines with their low
//! parts. Of each four values of a line the middle two are exchanged, which is the order that weights unpack to ([`crate::gemm`]). Beside
//! it, for each block, the scales of sixteen rows and then their scaled sums. A last panel may be short: the rows it lacks keep what was
//! there, some finite numbers that nobody reads.

use super::{BLOCK, BlockSink, Precision};
use crate::lanes::Lanes;

/// Rows of a panel.
pub(crate) const TILED_ROWS: usize = 16;

/// One row of a tile: 32 values of bfloat16.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Line(pub(crate) [u16; BLOCK]);

/// What belongs to one block of a panel beside its quants.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BlockScales {
    /// Scale of each row.
    pub(crate) scales: [f32; TILED_ROWS],
    /// Scale * sum of quants of each row.
    pub(crate) scaled_sums: [f32; TILED_ROWS],
}

/// Rows in panels of sixteen.
#[derive(Debug, Default)]
pub(crate) struct TiledRows {
    /// Rows held; those of the last panel beyond this one are padding.
    rows: usize,
    pub(crate) quants: Vec<Line>,
    pub(crate) scales: Vec<BlockScales>,
}

impl TiledRows {
    pub(super) fn with_room(lines: usize, scales: usize) -> Self {
        Self { rows: 0, quants: Vec::with_capacity(lines), scales: Vec::with_capacity(scales) }
    }

    pub(super) fn resize(&mut self, rows: usize, k: usize, precision: Precision) {
        let blocks = rows.div_ceil(TILED_ROWS) * (k / BLOCK);
        self.rows = rows;
        self.quants.resize(blocks * precision.planes() * TILED_ROWS, Line::default());
        self.scales.resize(blocks, BlockScales::default());
    }

    /// Rows held.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }
}

/// One row of a panel.
#[derive(Clone, Copy)]
pub(super) struct TiledRow {
    /// The row's line of its panel's first block.
    pub(super) quants: *mut Line,
    /// The row's scale in its panel's first block.
    pub(super) scales: *mut f32,
}

impl BlockSink for TiledRow {
    #[inline(always)]
    unsafe fn put<L: Lanes, const PLANES: usize>(self, block: usize, quants: [L::I; 2], scale: f32) {
        let [a, b] = quants;
        // SAFETY: the caller vouches for the block and the tier; a block has `PLANES` times sixteen lines and two times sixteen scales.
        unsafe {
            let line = self.quants.add(block * PLANES * TILED_ROWS).cast::<u16>();
            if PLANES == 2 {
                let zero = L::splat_int(0);
                let (ha, hb) = (L::join_planes(L::div128(a), zero), L::join_planes(L::div128(b), zero));
                L::store_bf16_swapped(line, ha, hb);
                L::store_bf16_swapped(line.add(TILED_ROWS * BLOCK), L::sub_int(a, ha), L::sub_int(b, hb));
            } else {
                L::store_bf16_swapped(line, a, b);
            }
            let sum = L::reduce_sum_int(L::add_int(a, b));
            let scales = self.scales.add(block * 2 * TILED_ROWS);
            scales.write(scale);
            scales.add(TILED_ROWS).write(scale * sum as f32);
        }
    }

    #[inline(always)]
    unsafe fn poison(self) {
        // SAFETY: the caller vouches for the first block.
        unsafe { self.scales.write(f32::NAN) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lanes::{LANES, kernel};

    kernel!(
        /// One row of one block, from integers.
        fn put_row(quants: &[f32; BLOCK], lines: *mut Line, scales: *mut BlockScales) = put_row_body
    );

    #[inline(always)]
    unsafe fn put_row_body<L: Lanes>(quants: &[f32; BLOCK], lines: *mut Line, scales: *mut BlockScales) {
        // SAFETY: the caller vouches for the tier, two planes of lines and one block of scales.
        unsafe {
            let quants = [0, LANES].map(|at| L::round(L::load(quants.as_ptr().add(at))));
            TiledRow { quants: lines, scales: scales.cast() }.put::<L, 2>(0, quants, 0.5);
        }
    }

    /// The two parts of each value add up to it, at the place its group's order gives it.
    #[test]
    fn parts_hold_every_value_exactly() {
        for tier in crate::Tier::ALL.into_iter().filter(|tier| tier.is_supported()) {
            for first in (-16_256..=16_256).step_by(BLOCK) {
                let quants: [f32; BLOCK] = std::array::from_fn(|i| (first + i as i32).min(16_256) as f32);
                let mut lines = [Line::default(); 2 * TILED_ROWS];
                let mut scales = BlockScales::default();
                // SAFETY: the tier is supported; the arrays are one block of two planes.
                unsafe { put_row(tier, &quants, lines.as_mut_ptr(), &mut scales) };
                let value = |bits: u16| f32::from_bits(u32::from(bits) << 16);
                for group in 0..BLOCK / 4 {
                    for (at, from) in [0, 2, 1, 3].into_iter().enumerate() {
                        let (high, low) = (lines[0].0[group * 4 + at], lines[TILED_ROWS].0[group * 4 + at]);
                        assert_eq!(value(high) + value(low), quants[group * 4 + from], "{tier} {first}");
                    }
                }
                assert_eq!(
                    (scales.scales[0], scales.scaled_sums[0]),
                    (0.5, 0.5 * quants.iter().sum::<f32>()),
                    "{tier}"
                );
            }
        }
    }
}
