//! The matrix product: activations by packed weights, with f32 results.
//!
//! # The number an output gets
//! Of integer activations; [`bf16`] says it of the others. For each block of 32 in ascending order: s = the exact integer sum of activation * weight quants (the weight's offset included, and for
//! Q6_K the integer factor of each half), then `acc = fma(scale_w * scale_a, s, acc)` and, for formats with minima,
//! `acc = fma(minimum, scale_a * sum_a, acc)`. In K formats scale_w and minimum are exact products of a half and a byte. Nothing else
//! enters: neither the row count, nor the panel the row sits in, nor the thread, nor the tier. With [`Store::Add`] the finished sum is
//! added to the value there.
//!
//! No sum leaves i32: at 15 bits a block of Q6_K reaches 2 * 16 * 32 * 16,256 * 128 = 2,130,706,432, which is the most of all formats.
//!
//! # Work split
//! Over tiles of sixteen outputs, never over K and never over rows, so weights are read once per step by one thread each.

mod bf16;
mod blocks;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod tiles;

use blocks::{BlockTotals, block_sums};

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use crate::activation::TILED_ROWS;
use crate::activation::{Activations, Precision, panel, panel_count};
use crate::lanes::{LANES, Lanes, kernel};
use crate::pool::{Session, SharedMut, TaskPanicked};
use crate::tier::Tier;
use crate::weights::{BLOCK, PackedFormat, PackedMatrix, SUPER_BLOCK, Scales};

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

/// How far ahead of their use weights are asked for: about the latency of memory at the rate of one row, in bytes. The tiles of a matrix
/// follow each other, so this also reaches into the next ones.
const AHEAD_BYTES: usize = 4096;

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
/// When a part's K differs from the activations' or its format is not one for their precision, parts overlap or leave the row, `out` is too
/// short, or the tier is not supported.
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
    let is_bf16 = activations.precision() == Precision::Bf16;
    let mut column = 0;
    for part in parts {
        let format = part.matrix.format();
        assert_eq!(format == PackedFormat::Bf16, is_bf16, "{format:?} weights by {:?}", activations.precision());
        assert_eq!(part.matrix.k(), activations.k(), "activations and weights differ in k");
        assert!(part.column >= column, "parts must be in ascending order and disjoint");
        column = part.column + part.matrix.n();
    }
    assert!(column <= stride, "parts leave the output row");
    let out = SharedMut(out.as_mut_ptr());
    if is_bf16 {
        return bf16::multiply(session, tier, activations, parts, store, out, stride);
    }
    let tiles: usize = parts.iter().map(|part| part.matrix.tiles().len()).sum();
    let chunk = (tiles / (session.threads() * CHUNKS_PER_THREAD)).max(1);
    let tiled = activations.tiled.rows();
    assert!(tiled == 0 || tier == Tier::Amx, "activations were made for {}, not for {tier}", Tier::Amx);
    let panels = panel_count(rows - tiled);
    session.run(tiles.div_ceil(chunk), |task| {
        let range = task * chunk..tiles.min((task + 1) * chunk);
        // SAFETY: each tile of each part is in one task alone, its columns are its own, and `out` has room for all rows.
        let tile_task = |tile, row: usize| unsafe {
            let (part, tile) = locate(parts, tile);
            let to = out.get().add(row * stride + part.column + tile * LANES);
            TileTask { part, tile, activations, to, stride, store }
        };
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if tiled > 0 {
            let _tiles = tiles::tiles();
            let (panels, step) =
                (tiled.div_ceil(TILED_ROWS), tiles::panels_in_pass(activations.k(), activations.precision()));
            for first in (0..panels).step_by(step) {
                for tile in range.clone() {
                    // SAFETY: tiles are alive; all indices were checked against the lengths of `out` and of the activations.
                    unsafe { tiles::multiply_panels(&tile_task(tile, 0), first..panels.min(first + step)) };
                }
            }
        }
        for first_panel in (0..panels).step_by(PASS_PANELS) {
            let pass = first_panel..panels.min(first_panel + PASS_PANELS);
            for tile in range.clone() {
                // SAFETY: all indices were checked against the lengths of `out` and of the activations, and the tier was checked.
                unsafe { multiply_tile(tier, &tile_task(tile, tiled), pass.start, pass.end) };
            }
        }
    })
}

/// Bytes that each thread keeps for products over up to `k` inputs, once it has run one.
pub fn thread_bytes(precision: Precision, tier: Tier, k: usize) -> usize {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    if tier == Tier::Amx && precision != Precision::Bf16 {
        return tiles::unpacked_bytes(k);
    }
    let _ = (precision, tier, k);
    0
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

/// One tile against some of the rows.
struct TileTask<'a> {
    part: &'a Part<'a>,
    tile: usize,
    activations: &'a Activations,
    /// The tile's first column, in the first of the rows.
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
    use PackedFormat::{Bf16, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
    // SAFETY: the contract is passed on.
    unsafe {
        match task.part.matrix.format() {
            Q4_0 => tile_of_format::<L, 4, PLAIN>(task, first, end),
            Q4_1 => tile_of_format::<L, 4, MINIMUM>(task, first, end),
            Q5_0 => tile_of_format::<L, 5, PLAIN>(task, first, end),
            Q5_1 => tile_of_format::<L, 5, MINIMUM>(task, first, end),
            Q8_0 => tile_of_format::<L, 8, PLAIN>(task, first, end),
            Q4K => tile_of_format::<L, 4, SUPER>(task, first, end),
            Q5K => tile_of_format::<L, 5, SUPER>(task, first, end),
            Q6K => tile_of_format::<L, 6, SUPER_HALVES>(task, first, end),
            Bf16 => unreachable!("{NO_INTEGERS}"),
        }
    }
}

/// Why formats and precisions of floats do not get here.
const NO_INTEGERS: &str = "bfloat16 has a product of its own";

// `Scales` as constants that a kernel can be compiled for.
const PLAIN: u8 = Scales::Plain as u8;
const MINIMUM: u8 = Scales::Minimum as u8;
const SUPER: u8 = Scales::Super as u8;
const SUPER_HALVES: u8 = Scales::SuperHalves as u8;

#[inline(always)]
unsafe fn tile_of_format<L: Lanes, const BITS: usize, const SCALES: u8>(task: &TileTask<'_>, first: usize, end: usize) {
    // SAFETY: the contract is passed on.
    unsafe {
        match task.activations.precision() {
            Precision::Int8 => tile_of_precision::<L, BITS, SCALES, 1>(task, first, end),
            Precision::Int15 => tile_of_precision::<L, BITS, SCALES, 2>(task, first, end),
            Precision::Bf16 => unreachable!("{NO_INTEGERS}"),
        }
    }
}

#[inline(always)]
unsafe fn tile_of_precision<L: Lanes, const BITS: usize, const SCALES: u8, const PLANES: usize>(
    task: &TileTask<'_>,
    first: usize,
    end: usize,
) {
    let rows = task.activations.rows() - task.activations.tiled.rows();
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
                half_sums: task.activations.half_sums.as_ptr().add(panel.first * blocks),
            };
            match panel.rows {
                8 if L::GEMM_ROWS == 8 => pass::<L, BITS, SCALES, PLANES, 8, 8>(task, source, 0, panel.first),
                8 => {
                    pass::<L, BITS, SCALES, PLANES, 8, 4>(task, source, 0, panel.first);
                    pass::<L, BITS, SCALES, PLANES, 8, 4>(task, source, 4, panel.first);
                }
                4 => pass::<L, BITS, SCALES, PLANES, 4, 4>(task, source, 0, panel.first),
                2 => pass::<L, BITS, SCALES, PLANES, 2, 2>(task, source, 0, panel.first),
                _ => pass::<L, BITS, SCALES, PLANES, 1, 1>(task, source, 0, panel.first),
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
    half_sums: *const i32,
}

impl PanelSource {
    #[inline(always)]
    fn at(&self, block_at: usize) -> BlockTotals {
        BlockTotals { whole: self.sums.wrapping_add(block_at), first_half: self.half_sums.wrapping_add(block_at) }
    }
}

/// `R` rows of a panel of `P` rows, from `row` on, by one tile. `first` is the number of the panel's first row among all rows.
#[inline(always)]
unsafe fn pass<L: Lanes, const BITS: usize, const SCALES: u8, const PLANES: usize, const P: usize, const R: usize>(
    task: &TileTask<'_>,
    source: PanelSource,
    row: usize,
    first: usize,
) {
    let in_super_blocks = SCALES == SUPER || SCALES == SUPER_HALVES;
    let blocks_per_half = if in_super_blocks { SUPER_BLOCK / BLOCK } else { 1 };
    // SAFETY: the caller vouches for the panel, the tile and the output; offsets stay inside by the layouts in `weights` and `activation`.
    unsafe {
        let matrix = task.part.matrix;
        let layout = matrix.layout();
        let mut quants = matrix.tile_ptr(task.tile);
        let mut scales = quants.wrapping_add(layout.scales).cast::<u16>();
        let mut minima = quants.wrapping_add(layout.minima).cast::<u16>();
        let mut factors = quants.wrapping_add(layout.factors);
        let mut x = source.quants.add(row * 4);
        let mut block_at = row;
        let mut ahead = quants.wrapping_add(AHEAD_BYTES);
        let mut acc = [L::splat(0.0); R];
        for _ in 0..matrix.k() / BLOCK / blocks_per_half {
            let half = L::load_f16(scales);
            let half_minimum = if SCALES == MINIMUM || SCALES == SUPER { L::load_f16(minima) } else { half };
            for _ in 0..blocks_per_half {
                if first == 0 && row == 0 {
                    // Only the first rows meet weights that are not in a cache yet.
                    for line in 0..layout.block_lines {
                        L::prefetch(ahead.wrapping_add(line * 64));
                    }
                    ahead = ahead.wrapping_add(layout.block_lines * 64);
                }
                let sums = block_sums::<L, BITS, SCALES, PLANES, P, R>(quants, factors, x, source.at(block_at));
                let scale = if SCALES == SUPER { L::mul(half, L::load_bytes(factors)) } else { half };
                for r in 0..R {
                    let scale = L::mul(scale, L::splat(source.scales.add(block_at + r).read()));
                    acc[r] = L::fma(scale, L::to_float(sums[r]), acc[r]);
                }
                if SCALES == MINIMUM || SCALES == SUPER {
                    let minimum = if SCALES == SUPER {
                        L::mul(half_minimum, L::load_bytes(factors.wrapping_add(LANES)))
                    } else {
                        half_minimum
                    };
                    for r in 0..R {
                        acc[r] = L::fma(minimum, L::splat(source.scaled_sums.add(block_at + r).read()), acc[r]);
                    }
                }
                quants = quants.wrapping_add(BLOCK * LANES * BITS / 8);
                factors = factors.wrapping_add(2 * LANES);
                x = x.wrapping_add(BLOCK * PLANES * P);
                block_at += P;
            }
            scales = scales.wrapping_add(LANES);
            minima = minima.wrapping_add(LANES);
        }
        let columns = (matrix.n() - task.tile * LANES).min(LANES);
        for r in 0..R {
            put::<L>(task.to.add((first + row + r) * task.stride), acc[r], columns, task.store);
        }
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
