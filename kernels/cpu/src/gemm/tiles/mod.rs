//! The matrix product on AMX: sixteen rows by sixteen columns by one block at a time.
//!
//! # Why bfloat16 gives the exact sums
//! A product of tiles in bfloat16 adds in f32. Its factors here are small integers, so every product and every partial sum, in whatever
//! order the unit adds, is an integer; below 2^24 they are all exact, and the sum of a block comes out as an f32 without a conversion.
//! The largest: 32 * 16,256 * 31 = 16,126,080 for weights of five bits, 16 * 16,256 * 32 = 8,323,072 for half a block of six. Eight bits
//! at 15 of activation are beyond that, so high and low parts have sums of their own (the high ones multiples of 128), whose addition rounds
//! the exact sum once, as the conversion of the integer does elsewhere.
//!
//! # Order of work
//! While AMX is in use the second floating-point unit of a core rests, so what stands beside the products is what a step is bound by:
//! for each row a multiplication and one or two multiply-adds. Each step asks for the products of the step after the next, works on half
//! its own rows, takes out the sums of the next step, and works on the other half. Int8 tiles, though twice as deep, need two sums in
//! place of one, a shift, an addition and a conversion for each, and measured a third slower.

mod steps;
mod unpack;

use std::cell::RefCell;
use std::ops::Range;

use super::{MINIMUM, NO_INTEGERS, PLAIN, SUPER, SUPER_HALVES, TileTask};
use crate::activation::{Line, Precision, TILED_ROWS};
use crate::amx::{TileShapes, Tiles};
use crate::lanes::LANES;
use crate::weights::{BLOCK, PackedFormat};
use steps::{JOINED, SCALED_HALVES, SINGLE, Steps};
use unpack::{BlockWeights, unpack};

/// Tiles of sums, of activations and of weights: sixteen rows of 64 bytes, all of them.
const SHAPES: TileShapes = TileShapes::new([(16, 64); 8]);

/// Bytes of activations that a pass over a tile's columns reads: they stay in the second-level cache from tile to tile, with room for a
/// neighbour on the same core.
const PASS_BYTES: usize = 512 << 10;

thread_local! {
    /// One tile of weights, unpacked. Grows to the longest K seen, 1,280 bytes a block of 32 (2,304 for Q6_K).
    static UNPACKED: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// Bytes of that for the longest K of a model.
pub(super) fn unpacked_bytes(k: usize) -> usize {
    // Q6_K takes the most.
    unpack::lines::<32>(k / BLOCK) * size_of::<Line>()
}

/// This thread's tiles, shaped for the product.
pub(super) fn tiles() -> Tiles {
    Tiles::configure(&SHAPES)
}

/// Panels of one pass.
pub(super) fn panels_in_pass(k: usize, precision: Precision) -> usize {
    let panel_bytes = TILED_ROWS * k * 2 * precision.planes();
    (PASS_BYTES / panel_bytes).max(1)
}

/// Multiplies the panels `panels` of sixteen rows by one tile of columns.
///
/// # Safety
/// [`tiles`] of this thread are alive, and the task's output is its own and has room for the activations' rows.
pub(super) unsafe fn multiply_panels(task: &TileTask<'_>, panels: Range<usize>) {
    use PackedFormat::{Bf16, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
    // SAFETY: tiles are alive, so the CPU is one that AMX's tier supports, which has the features of the AVX-512 tier.
    unsafe {
        match task.part.matrix.format() {
            Q4_0 => of_format::<4, PLAIN>(task, panels),
            Q4_1 => of_format::<4, MINIMUM>(task, panels),
            Q5_0 => of_format::<5, PLAIN>(task, panels),
            Q5_1 => of_format::<5, MINIMUM>(task, panels),
            Q8_0 => of_format::<8, PLAIN>(task, panels),
            Q4K => of_format::<4, SUPER>(task, panels),
            Q5K => of_format::<5, SUPER>(task, panels),
            Q6K => of_format::<6, SUPER_HALVES>(task, panels),
            Bf16 => unreachable!("{NO_INTEGERS}"),
        }
    }
}

unsafe fn of_format<const BITS: usize, const SCALES: u8>(task: &TileTask<'_>, panels: Range<usize>) {
    // SAFETY: the contract is passed on.
    unsafe {
        match (BITS, task.activations.precision()) {
            (_, Precision::Bf16) => unreachable!("{NO_INTEGERS}"),
            (6, Precision::Int8) => product::<BITS, SCALES, SCALED_HALVES, 1, 32>(task, panels),
            (6, Precision::Int15) => product::<BITS, SCALES, SCALED_HALVES, 2, 32>(task, panels),
            (8, Precision::Int15) => product::<BITS, SCALES, JOINED, 2, 16>(task, panels),
            (_, Precision::Int8) => product::<BITS, SCALES, SINGLE, 1, 16>(task, panels),
            (_, Precision::Int15) => product::<BITS, SCALES, SINGLE, 2, 16>(task, panels),
        }
    }
}

/// Unpacks the tile and takes its steps. `ROWS` is 32 for [`SCALED_HALVES`], otherwise 16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn product<const BITS: usize, const SCALES: u8, const SUMS: u8, const PLANES: usize, const ROWS: usize>(
    task: &TileTask<'_>,
    panels: Range<usize>,
) {
    let matrix = task.part.matrix;
    let blocks = matrix.k() / BLOCK;
    UNPACKED.with_borrow_mut(|unpacked| {
        let lines = unpack::lines::<ROWS>(blocks);
        if unpacked.len() < lines {
            unpacked.resize(lines, Line::default());
        }
        let weights = unpacked.as_mut_ptr().cast::<BlockWeights<ROWS>>();
        let first_row = panels.start * TILED_ROWS;
        let tiled = &task.activations.tiled;
        // SAFETY: the scratch has room for all blocks, the activations hold all panels, and the rest is the caller's promise.
        unsafe {
            unpack::<BITS, SCALES, ROWS>(matrix, task.tile, weights);
            Steps::<ROWS> {
                quants: tiled.quants.as_ptr().add(panels.start * blocks * PLANES * TILED_ROWS),
                scales: tiled.scales.as_ptr().add(panels.start * blocks),
                weights,
                blocks,
                rows: tiled.rows().min(panels.end * TILED_ROWS) - first_row,
                to: task.to.add(first_row * task.stride),
                stride: task.stride,
                columns: (matrix.n() - task.tile * LANES).min(LANES),
                store: task.store,
            }
            .run::<SUMS, PLANES>(SCALES == MINIMUM || SCALES == SUPER);
        }
    });
}
