//! The product of bfloat16: rounded rows by rounded weights, added up in f32.
//!
//! # The number an output gets
//! Products of two bfloat16 are exact in f32, so what rounds is their addition, which each unit does in its own way ([`Bf16Unit`]), from
//! zero, over k in ascending order:
//!
//! - fused multiply-adds: `acc = fma(w, x, acc)` for each k;
//! - `vdpbf16ps`: once for each pair of k, whose two products it adds to `acc` with at most one rounding each;
//! - AMX: for each block of 32, even and odd products in two sums, which are added to each other and then to `acc`.
//!
//! For one unit nothing else enters: neither the row count nor the row's place, the thread, or how many columns are worked on at once. AMX
//! multiplies few rows as well as many, since `vdpbf16ps` would give a row other bits.
//!
//! # How far it is from the exact sum
//! At most k roundings to nearest lie between a product and its output, each by a factor within 1 ± 2^-24. With u = 2^-24 the output differs
//! from the exact sum of the rounded factors by at most k u / (1 - k u) times the sum of the products' magnitudes. Where subnormal numbers
//! count as zero, factors, products and sums below 2^-126 are lost besides.
//!
//! # Work split
//! As for integers: over tiles of sixteen outputs, never over K, so weights are read once per step by one thread each.

#[cfg(target_arch = "x86_64")]
mod dot;
mod fma;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod tiles;
#[cfg(test)]
mod trial;

use std::ops::Range;

use super::{AHEAD_BYTES, CHUNKS_PER_THREAD, Part, Store, locate};
use crate::activation::{Activations, FloatRows, PANEL_ROWS, TILED_ROWS};
use crate::bf16_unit::Bf16Unit;
use crate::lanes::LANES;
use crate::pool::{Session, SharedMut, TaskPanicked};
use crate::tier::Tier;

/// Bytes of a tile's line: two k of sixteen columns.
const LINE_BYTES: usize = LANES * 4;

/// Bytes of activations in one pass over the tiles: they stay in the second-level cache.
const PASS_BYTES: usize = 512 << 10;

/// Tiles at once for fewer rows than a panel: enough independent sums to hide an instruction's latency.
const NARROW_TILES: usize = 4;

/// Tiles at once for more rows: each row's values then serve two tiles from a register.
const WIDE_TILES: usize = 2;

/// Some neighbouring tiles of one part against some of the rows.
struct Group<'a> {
    /// The first tile; the others follow, `tile_bytes` apart.
    weights: *const u8,
    tile_bytes: usize,
    tiles: usize,
    /// Columns of all these tiles that exist.
    columns: usize,
    rows: &'a FloatRows,
    /// Which of the rows.
    pass: Range<usize>,
    /// The first column of the first row of all.
    to: *mut f32,
    stride: usize,
    store: Store,
}

impl Group<'_> {
    fn tile(&self, tile: usize) -> *const u8 {
        self.weights.wrapping_add(tile * self.tile_bytes)
    }

    /// Columns of a tile that exist.
    fn columns_of(&self, tile: usize) -> usize {
        (self.columns - tile * LANES).min(LANES)
    }

    /// Where a tile's columns of a row go.
    fn output(&self, row: usize, tile: usize) -> *mut f32 {
        self.to.wrapping_add(row * self.stride + tile * LANES)
    }

    /// The lines of a tile in two stretches, each with the distance to what is to be asked for at a line while `at_once` tiles are read: a
    /// line of the same tile further on, then one of the tile that follows the last of these.
    fn stretches(&self, at_once: usize) -> [(Range<usize>, usize); 2] {
        let lines = self.tile_bytes / LINE_BYTES;
        let ahead = (AHEAD_BYTES / LINE_BYTES / at_once).min(lines);
        let distance = ahead * LINE_BYTES;
        [(0..lines - ahead, distance), (lines - ahead..lines, distance + (at_once - 1) * self.tile_bytes)]
    }
}

/// As [`super::multiply`], which has checked the shapes, for activations and weights in bfloat16.
///
/// # Panics
/// When the activations were made for another unit than the tier's.
pub(super) fn multiply(
    session: &mut Session<'_>,
    tier: Tier,
    activations: &Activations,
    parts: &[Part<'_>],
    store: Store,
    out: SharedMut<f32>,
    stride: usize,
) -> Result<(), TaskPanicked> {
    let (rows, k, held) = (activations.rows(), activations.k(), &activations.floats);
    let unit = Bf16Unit::of(tier);
    assert_eq!(held.unit(), unit, "activations were made for another tier than {tier}");
    let tiles: usize = parts.iter().map(|part| part.matrix.tiles().len()).sum();
    let chunk = (tiles / (session.threads() * CHUNKS_PER_THREAD)).max(1).next_multiple_of(WIDE_TILES);
    let pass_rows = (PASS_BYTES / (k * 2)).max(1).next_multiple_of(2 * TILED_ROWS);
    session.run(tiles.div_ceil(chunk), |task| {
        let range = task * chunk..tiles.min((task + 1) * chunk);
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        let mut hardware = (unit == Bf16Unit::Amx).then(tiles::Hardware::new);
        for first in (0..rows).step_by(pass_rows) {
            let pass = first..rows.min(first + pass_rows);
            let is_narrow = pass.len() < PANEL_ROWS && unit != Bf16Unit::Amx;
            let at_once = if is_narrow { NARROW_TILES } else { WIDE_TILES };
            let mut next = range.start;
            while next < range.end {
                let (part, tile) = locate(parts, next);
                let matrix = part.matrix;
                let group = Group {
                    weights: matrix.tile_ptr(tile),
                    tile_bytes: k * LANES * 2,
                    tiles: (range.end - next).min(matrix.tiles().len() - tile).min(at_once),
                    columns: matrix.n() - tile * LANES,
                    rows: held,
                    pass: pass.clone(),
                    to: out.get().wrapping_add(part.column + tile * LANES),
                    stride,
                    store,
                };
                next += group.tiles;
                // SAFETY: each tile of each part is in one task alone and its columns are its own; the caller has checked that `out` has room
                // for all rows, that the matrices have `k` inputs, and that the tier is supported, of which the unit is.
                unsafe {
                    match unit {
                        #[cfg(target_arch = "x86_64")]
                        Bf16Unit::Avx512Bf16 => dot::multiply(&group),
                        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
                        Bf16Unit::Amx => tiles::multiply(hardware.as_mut().expect("made above"), &group),
                        _ => fma::multiply(tier, &group),
                    }
                }
            }
        }
    })
}
