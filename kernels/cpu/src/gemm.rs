//! The matrix product: integer activations by packed weights, with f32 results.
//!
//! # The number an output gets
//! For each block of 32 in ascending order: s = the exact integer sum of activation * weight quants (the weight's offset included), then
//! `acc = fma(scale_w * scale_a, s, acc)` and, for Q4_1, `acc = fma(minimum, scale_a * sum_a, acc)`. Nothing else enters: neither the row
//! count, nor the panel the row sits in, nor the thread, nor the tier. With [`Store::Add`] the finished sum is added to the value there.
//!
//! # Work split
//! Over tiles of sixteen outputs, never over K and never over rows, so weights are read once per step by one thread each.

use crate::activation::{Activations, Precision, panel, panel_count};
use crate::lanes::{LANES, Lanes, kernel};
use crate::pool::{Session, SharedMut, TaskPanicked};
use crate::tier::Tier;
use crate::weights::{BLOCK, PackedFormat, PackedMatrix};

/// What happens to the value already in the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// It is overwritten.
    Replace,
    /// The product is added to it (a residual connection).
    Add,
}

/// One matrix of a product and the column its outputs begin at.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// The weights.
    pub matrix: &'a PackedMatrix,
    /// First output column.
    pub column: usize,
}

/// Rows per pass over a tile: the activations of a pass stay in the second-level cache while the tiles stream by.
const PASS_PANELS: usize = 32;

/// Chunks of tiles a thread takes, on average: enough to even out threads of unequal speed.
const CHUNKS_PER_THREAD: usize = 8;

/// Multiplies all rows of `activations` by each part; row r's outputs go to `out[r * stride + part.column ..][.. n]`.
///
/// # Errors
/// [`TaskPanicked`] when a task panicked.
///
/// # Panics
/// When a part's K differs from the activations', parts overlap or leave the row, `out` is too short, or the tier is not supported.
pub fn multiply(
    session: &mut Session<'_>,
    tier: Tier,
    activations: &Activations,
    parts: &[Part<'_>],
    store: Store,
    out: &mut [f32],
    stride: usize,
) -> Result<(), TaskPanicked> {
    assert!(tier.is_supported(), "tier {tier} is not supported here");
    let rows = activations.rows();
    assert!(out.len() >= rows * stride, "output is too short");
    let mut column = 0;
    for part in parts {
        assert_eq!(part.matrix.k(), activations.k(), "activations and weights differ in k");
        assert!(part.column >= column, "parts must be in ascending order and disjoint");
        column = part.column + part.matrix.n();
    }
    assert!(column <= stride, "parts leave the output row");
    let tiles: usize = parts.iter().map(|part| part.matrix.tiles().len()).sum();
    let chunk = (tiles / (session.threads() * CHUNKS_PER_THREAD)).max(1);
    let panels = panel_count(rows);
    let out = SharedMut(out.as_mut_ptr());
    session.run(tiles.div_ceil(chunk), |task| {
        let range = task * chunk..tiles.min((task + 1) * chunk);
        for first_panel in (0..panels).step_by(PASS_PANELS) {
            let pass = first_panel..panels.min(first_panel + PASS_PANELS);
            for tile in range.clone() {
                let (part, tile) = locate(parts, tile);
                // SAFETY: each tile of each part is in one task alone, its columns are its own, all indices were checked against the
                // lengths of `out` and of the activations, and the tier was checked.
                unsafe {
                    let to = out.get().add(part.column + tile * LANES);
                    multiply_tile(tier, &TileTask { part, tile, activations, to, stride, store }, pass.start, pass.end);
                }
            }
        }
    })
}

/// The part and its tile behind a running number over all parts.
fn locate<'a>(parts: &'a [Part<'a>], mut tile: usize) -> (&'a Part<'a>, usize) {
    for part in parts {
        let tiles = part.matrix.tiles().len();
        if tile < tiles {
            return (part, tile);
        }
        tile -= tiles;
    }
    unreachable!("the running number is below the sum of all tiles")
}

/// One tile against a range of panels.
struct TileTask<'a> {
    part: &'a Part<'a>,
    tile: usize,
    activations: &'a Activations,
    /// Row 0 of the tile's first column.
    to: *mut f32,
    stride: usize,
    store: Store,
}

kernel!(
    /// Multiplies panels `first..end` by one tile.
    fn multiply_tile(task: &TileTask<'_>, first: usize, end: usize) = multiply_tile_body
);

#[inline(always)]
unsafe fn multiply_tile_body<L: Lanes>(task: &TileTask<'_>, first: usize, end: usize) {
    // SAFETY: the contract is passed on.
    unsafe {
        use Precision::{Int8, Int15};
        match (task.part.matrix.format(), task.activations.precision()) {
            (PackedFormat::Q4_0, Int8) => tile_of_format::<L, Q4_0, 1>(task, first, end),
            (PackedFormat::Q4_1, Int8) => tile_of_format::<L, Q4_1, 1>(task, first, end),
            (PackedFormat::Q8_0, Int8) => tile_of_format::<L, Q8_0, 1>(task, first, end),
            (PackedFormat::Q4_0, Int15) => tile_of_format::<L, Q4_0, 2>(task, first, end),
            (PackedFormat::Q4_1, Int15) => tile_of_format::<L, Q4_1, 2>(task, first, end),
            (PackedFormat::Q8_0, Int15) => tile_of_format::<L, Q8_0, 2>(task, first, end),
        }
    }
}

const Q4_0: u8 = 0;
const Q4_1: u8 = 1;
const Q8_0: u8 = 2;

#[inline(always)]
unsafe fn tile_of_format<L: Lanes, const FORMAT: u8, const PLANES: usize>(
    task: &TileTask<'_>,
    first: usize,
    end: usize,
) {
    let rows = task.activations.rows();
    for index in first..end {
        let panel = panel(rows, index);
        let k = task.activations.k();
        let blocks = k / BLOCK;
        // SAFETY: the panel lies inside the activations, whose arrays were sized for all rows.
        unsafe {
            let source = PanelSource {
                quants: task.activations.quants.as_ptr().add(panel.first * k * PLANES),
                scales: task.activations.scales.as_ptr().add(panel.first * blocks),
                scaled_sums: task.activations.scaled_sums.as_ptr().add(panel.first * blocks),
                sums: task.activations.sums.as_ptr().add(panel.first * blocks),
            };
            match panel.rows {
                8 if L::GEMM_ROWS == 8 => pass::<L, FORMAT, PLANES, 8, 8>(task, source, 0, panel.first),
                8 => {
                    pass::<L, FORMAT, PLANES, 8, 4>(task, source, 0, panel.first);
                    pass::<L, FORMAT, PLANES, 8, 4>(task, source, 4, panel.first);
                }
                4 => pass::<L, FORMAT, PLANES, 4, 4>(task, source, 0, panel.first),
                2 => pass::<L, FORMAT, PLANES, 2, 2>(task, source, 0, panel.first),
                _ => pass::<L, FORMAT, PLANES, 1, 1>(task, source, 0, panel.first),
            }
        }
    }
}

/// One panel of activations.
#[derive(Clone, Copy)]
struct PanelSource {
    quants: *const i8,
    scales: *const f32,
    scaled_sums: *const f32,
    sums: *const i32,
}

/// `R` rows of a panel of `P` rows, from `row` on, by one tile. `first` is the number of the panel's first row among all rows.
#[inline(always)]
unsafe fn pass<L: Lanes, const FORMAT: u8, const PLANES: usize, const P: usize, const R: usize>(
    task: &TileTask<'_>,
    source: PanelSource,
    row: usize,
    first: usize,
) {
    // SAFETY: the caller vouches for the panel, the tile and the output; offsets stay inside by the layouts in `weights` and `activation`.
    unsafe {
        let matrix = task.part.matrix;
        let blocks = matrix.k() / BLOCK;
        let quant_bytes = matrix.format().quant_bytes();
        let mut quants = matrix.tile_ptr(task.tile);
        let mut scales = quants.add(blocks * quant_bytes).cast::<u16>();
        let mut minima = scales.add(blocks * LANES);
        let mut x = source.quants.add(row * 4);
        let mut block_at = row;
        let mut acc = [L::splat(0.0); R];
        for _ in 0..blocks {
            let sums = if FORMAT == Q8_0 {
                block_of_bytes::<L, PLANES, P, R>(quants, x, source.sums.add(block_at))
            } else {
                let bias = if FORMAT == Q4_0 { -8 } else { 0 };
                block_of_nibbles::<L, PLANES, P, R>(quants, x, source.sums.add(block_at), bias)
            };
            let scale = L::load_f16(scales);
            for r in 0..R {
                let scale = L::mul(scale, L::splat(source.scales.add(block_at + r).read()));
                acc[r] = L::fma(scale, L::to_float(sums[r]), acc[r]);
            }
            if FORMAT == Q4_1 {
                let minimum = L::load_f16(minima);
                for r in 0..R {
                    acc[r] = L::fma(minimum, L::splat(source.scaled_sums.add(block_at + r).read()), acc[r]);
                }
                minima = minima.wrapping_add(LANES);
            }
            quants = quants.wrapping_add(quant_bytes);
            scales = scales.wrapping_add(LANES);
            x = x.wrapping_add(BLOCK * PLANES * P);
            block_at += P;
        }
        let columns = (matrix.n() - task.tile * LANES).min(LANES);
        for r in 0..R {
            put::<L>(task.to.add((first + row + r) * task.stride), acc[r], columns, task.store);
        }
    }
}

#[inline(always)]
unsafe fn block_of_nibbles<L: Lanes, const PLANES: usize, const P: usize, const R: usize>(
    quants: *const u8,
    x: *const i8,
    totals: *const i32,
    bias: i32,
) -> [L::I; R] {
    // SAFETY: the caller vouches for one block of weights and of activations.
    unsafe {
        let mut sums = [[L::nibble_start(); R]; PLANES];
        for group in 0..4 {
            let bytes = L::load_weights(quants.add(group * 64));
            let (low, high) = (L::low_nibbles(bytes), L::high_nibbles(bytes));
            for plane in 0..PLANES {
                let first = x.add((group * PLANES + plane) * 4 * P);
                let second = x.add(((group + 4) * PLANES + plane) * 4 * P);
                for r in 0..R {
                    let sum = L::nibble_dot(sums[plane][r], low, first.add(r * 4).cast::<i32>().read_unaligned());
                    sums[plane][r] = L::nibble_dot(sum, high, second.add(r * 4).cast::<i32>().read_unaligned());
                }
            }
        }
        let mut out = [L::splat_int(0); R];
        for r in 0..R {
            let bias = if bias == 0 { 0 } else { totals.add(r).read().wrapping_mul(bias) };
            out[r] = L::nibble_finish(sums[PLANES - 1][r], bias);
            if PLANES == 2 {
                out[r] = L::join_planes(L::nibble_finish(sums[0][r], 0), out[r]);
            }
        }
        out
    }
}

#[inline(always)]
unsafe fn block_of_bytes<L: Lanes, const PLANES: usize, const P: usize, const R: usize>(
    quants: *const u8,
    x: *const i8,
    totals: *const i32,
) -> [L::I; R] {
    // SAFETY: the caller vouches for one block of weights and of activations.
    unsafe {
        let mut sums = [[L::byte_start(0); R]; PLANES];
        for r in 0..R {
            // The offset of the weights meets the total of both planes, in the low one.
            sums[PLANES - 1][r] = L::byte_start(totals.add(r).read());
        }
        for group in 0..8 {
            let bytes = L::load_weights(quants.add(group * 64));
            for plane in 0..PLANES {
                let x = x.add((group * PLANES + plane) * 4 * P);
                for r in 0..R {
                    sums[plane][r] = L::byte_dot(sums[plane][r], bytes, x.add(r * 4).cast::<i32>().read_unaligned());
                }
            }
        }
        let mut out = sums[PLANES - 1];
        if PLANES == 2 {
            for r in 0..R {
                out[r] = L::join_planes(sums[0][r], out[r]);
            }
        }
        out
    }
}

#[inline(always)]
unsafe fn put<L: Lanes>(to: *mut f32, value: L::F, columns: usize, store: Store) {
    // SAFETY: the caller vouches for `columns` values at `to`.
    unsafe {
        if columns == LANES {
            let value = if store == Store::Add { L::add(L::load(to), value) } else { value };
            L::store(to, value);
            return;
        }
        let mut lanes = [0f32; LANES];
        L::store(lanes.as_mut_ptr(), value);
        for (i, value) in lanes.into_iter().enumerate().take(columns) {
            let to = to.add(i);
            to.write(if store == Store::Add { to.read() + value } else { value });
        }
    }
}
