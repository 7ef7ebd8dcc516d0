//! Activations on their way into a matrix product: integers per block of 32, in panels of rows, or bfloat16.
//!
//! # Numbers
//! Per row and block: scale = largest magnitude / Q, q = the nearest integer to x * (Q / largest magnitude), ties to even, with Q = 127 for
//! [`Precision::Int8`] and 16,256 (= 127 * 128) for [`Precision::Int15`]. The latter is held as two planes of int8, q = 128 * high + low
//! with low in -64..64, and costs a product twice the integer work: a block in which one value dwarfs the others (frequent in the inputs
//! of a down projection) keeps the others. A block whose magnitudes stay below 1e-30 is all zero. Only the row's own values enter, so a row's bits do not depend on its neighbours.
//! An infinity or NaN anywhere in a row makes the row's first scale NaN, so that every product of the row is NaN: integers cannot carry
//! one, and a broken row must not turn into a plausible one.
//!
//! # Layout
//! Rows are grouped in panels of eight; what is left over at the end forms panels of four, two and one. Inside a panel of R rows, the
//! four-byte group of row r at k = 4 g is at (g R + r) * 4, so that the product reads one stream with constant offsets. With two planes,
//! each group of the panel has the rows' high bytes and then their low bytes: (2 g R + r) * 4 and (2 g R + R + r) * 4. Scales and sums of a
//! block lie at block * R + r.
//!
//! For AMX most rows lie otherwise: see [`tiled`]. They come first, and the panels above hold the rest.
//!
//! Rows of [`Precision::Bf16`] are no integers and have no panels: see [`floats`].

mod floats;
mod tiled;

use crate::bf16_unit::Bf16Unit;
use crate::lanes::{LANES, Lanes, kernel};
use crate::norm::rms_norm_row;
use crate::pointwise::{Gate, gated_row};
use crate::pool::{Session, SharedMut, TaskPanicked};
use crate::tier::Tier;
use crate::weights::BLOCK;
pub(crate) use floats::FloatRows;
use tiled::TiledRow;
pub(crate) use tiled::{BlockScales, Line, TILED_ROWS, TiledRows};

/// Rows of a full panel.
pub(crate) const PANEL_ROWS: usize = 8;

/// Fewest rows for which AMX repays the unpacking of weights; fewer are faster in panels of eight and less.
const TILED_ROWS_MIN: usize = 28;

/// Fewest rows beyond whole panels of sixteen that are faster as one more of those than in panels of eight and less.
const TILED_REST_MIN: usize = 10;

/// Rows of a panel of sixteen that one task fills.
const TILED_ROWS_PER_TASK: usize = 4;

/// Magnitudes below this count as zero: the inverse scale stays far from overflow.
pub(crate) const TINY: f32 = 1e-30;

/// How finely activations are rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Precision {
    /// One plane: -127..=127.
    #[default]
    Int8,
    /// Two planes: -16,256..=16,256.
    Int15,
    /// No integers: bfloat16, by weights of [`crate::PackedFormat::Bf16`]. Row-invariant, but not equal on all tiers.
    Bf16,
}

impl Precision {
    /// Planes of int8: bytes of one value.
    pub(crate) fn planes(self) -> usize {
        match self {
            Precision::Int8 => 1,
            Precision::Int15 => 2,
            Precision::Bf16 => 0,
        }
    }

    /// The precision's name in settings, logs and reports.
    pub fn name(self) -> &'static str {
        match self {
            Precision::Int8 => "int8",
            Precision::Int15 => "int15",
            Precision::Bf16 => "bf16",
        }
    }
}

/// Rounded rows, ready for a product. Keeps its memory between uses.
#[derive(Debug, Default)]
pub struct Activations {
    precision: Precision,
    rows: usize,
    k: usize,
    /// The first rows, where the product is AMX's; the arrays below hold the rest.
    pub(crate) tiled: TiledRows,
    /// Quants, in panels.
    pub(crate) quants: Vec<i8>,
    /// Scale of each row and block.
    pub(crate) scales: Vec<f32>,
    /// Scale * sum of quants, which meets the minima of weights.
    pub(crate) scaled_sums: Vec<f32>,
    /// Sum of quants, which meets the offset of Q4_0, Q5_0 and Q8_0 weights.
    pub(crate) sums: Vec<i32>,
    /// Sum of the first half of each block's quants, which meets the offset of Q6_K weights.
    pub(crate) half_sums: Vec<i32>,
    /// All rows, where they are bfloat16.
    pub(crate) floats: FloatRows,
}

/// How many of `rows` rows, from the first on, go into panels of sixteen.
fn tiled_rows(tier: Tier, rows: usize) -> usize {
    let rest = rows % TILED_ROWS;
    match tier {
        Tier::Amx if rows < TILED_ROWS_MIN => 0,
        Tier::Amx if rest >= TILED_REST_MIN => rows,
        Tier::Amx => rows - rest,
        _ => 0,
    }
}

/// Lengths of the arrays for the most rows.
struct Room {
    quants: usize,
    blocks: usize,
    lines: usize,
    line_scales: usize,
    /// Of bfloat16.
    float_lines: usize,
}

impl Room {
    fn new(precision: Precision, tier: Tier, rows: usize, k: usize) -> Self {
        if precision == Precision::Bf16 {
            let float_lines = FloatRows::lines(Bf16Unit::of(tier), rows, k);
            return Self { quants: 0, blocks: 0, lines: 0, line_scales: 0, float_lines };
        }
        let planes = precision.planes();
        // What is left beside whole panels of sixteen is less than what is too little for one.
        let (plain, tiled) = if tier == Tier::Amx { (rows.min(TILED_ROWS_MIN - 1), rows) } else { (rows, 0) };
        let line_scales = tiled.div_ceil(TILED_ROWS) * (k / BLOCK);
        Self {
            quants: plain * k * planes,
            blocks: plain * (k / BLOCK),
            lines: line_scales * planes * TILED_ROWS,
            line_scales,
            float_lines: 0,
        }
    }
}

/// A group of rows that share a panel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Panel {
    /// First row.
    pub(crate) first: usize,
    /// Rows: 8, 4, 2 or 1.
    pub(crate) rows: usize,
}

/// Panels of `rows` rows.
pub(crate) fn panel_count(rows: usize) -> usize {
    rows / PANEL_ROWS + (rows % PANEL_ROWS).count_ones() as usize
}

/// Panel `index` of `rows` rows.
pub(crate) fn panel(rows: usize, index: usize) -> Panel {
    let full = rows / PANEL_ROWS;
    if index < full {
        return Panel { first: index * PANEL_ROWS, rows: PANEL_ROWS };
    }
    let mut first = full * PANEL_ROWS;
    let mut left = index - full;
    let mut size = PANEL_ROWS / 2;
    loop {
        if (rows % PANEL_ROWS) & size != 0 {
            if left == 0 {
                return Panel { first, rows: size };
            }
            left -= 1;
            first += size;
        }
        size /= 2;
    }
}

impl Activations {
    /// An empty set, to be filled with `precision`.
    pub fn new(precision: Precision) -> Self {
        Self { precision, ..Self::default() }
    }

    /// An empty set with the memory for `rows` rows of up to `k` values: filling it with no more takes none.
    pub fn with_room(precision: Precision, tier: Tier, rows: usize, k: usize) -> Self {
        let room = Room::new(precision, tier, rows, k);
        Self {
            precision,
            tiled: TiledRows::with_room(room.lines, room.line_scales),
            quants: Vec::with_capacity(room.quants),
            scales: Vec::with_capacity(room.blocks),
            scaled_sums: Vec::with_capacity(room.blocks),
            sums: Vec::with_capacity(room.blocks),
            half_sums: Vec::with_capacity(room.blocks),
            floats: FloatRows::with_room(room.float_lines),
            ..Self::default()
        }
    }

    /// Bytes of that memory.
    pub fn room_bytes(precision: Precision, tier: Tier, rows: usize, k: usize) -> usize {
        let room = Room::new(precision, tier, rows, k);
        room.quants
            + room.blocks * (2 * size_of::<f32>() + 2 * size_of::<i32>())
            + (room.lines + room.float_lines) * size_of::<Line>()
            + room.line_scales * size_of::<BlockScales>()
    }

    /// Rows held.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Values per row.
    pub fn k(&self) -> usize {
        self.k
    }

    /// How finely the rows are rounded.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Makes room for integers.
    fn resize(&mut self, tier: Tier, rows: usize, k: usize) {
        let tiled = tiled_rows(tier, rows);
        self.tiled.resize(tiled, k, self.precision);
        let rows = rows - tiled;
        let blocks = rows * (k / BLOCK);
        self.quants.resize(rows * k * self.precision.planes(), 0);
        self.scales.resize(blocks, 0.0);
        self.scaled_sums.resize(blocks, 0.0);
        self.sums.resize(blocks, 0);
        self.half_sums.resize(blocks, 0);
    }

    /// Fills from rows of `k` values made by `produce(row, scratch_row)`; `scratch` holds one row of `k` values for each row.
    fn fill(
        &mut self,
        session: &mut Session<'_>,
        tier: Tier,
        scratch: &mut [f32],
        k: usize,
        produce: impl Fn(usize, &mut [f32]) + Sync,
    ) -> Result<(), TaskPanicked> {
        assert!(tier.is_supported(), "tier {tier} is not supported here");
        assert!(scratch.len().is_multiple_of(k), "scratch must be whole rows");
        assert!(k > 0 && k.is_multiple_of(BLOCK), "k = {k} must be a positive multiple of {BLOCK}");
        let rows = scratch.len() / k;
        let precision = self.precision;
        (self.rows, self.k) = (rows, k);
        let scratch = SharedMut(scratch.as_mut_ptr());
        let row_of = |row: usize| {
            // SAFETY: each row is in one task alone, which touches this row of the scratch only, and the scratch has `rows` rows.
            let values = unsafe { std::slice::from_raw_parts_mut(scratch.get().add(row * k), k) };
            produce(row, values);
            values.as_ptr()
        };
        if precision == Precision::Bf16 {
            return self.floats.fill(session, Bf16Unit::of(tier), tier, rows, k, row_of);
        }
        self.resize(tier, rows, k);
        let tiled = self.tiled.rows();
        let tiled_tasks = tiled.div_ceil(TILED_ROWS_PER_TASK);
        let lines = SharedMut(self.tiled.quants.as_mut_ptr());
        let line_scales = SharedMut(self.tiled.scales.as_mut_ptr());
        let quants = SharedMut(self.quants.as_mut_ptr());
        let scales = SharedMut(self.scales.as_mut_ptr());
        let scaled_sums = SharedMut(self.scaled_sums.as_mut_ptr());
        let sums = SharedMut(self.sums.as_mut_ptr());
        let half_sums = SharedMut(self.half_sums.as_mut_ptr());
        let fill_tiled = |first: usize| {
            for row in first..tiled.min(first + TILED_ROWS_PER_TASK) {
                let block = row / TILED_ROWS * (k / BLOCK);
                // SAFETY: `resize` made room for all panels, the row's lines and scales are its own, and the tier was checked above.
                unsafe {
                    let to = TiledRow {
                        quants: lines.get().add(block * precision.planes() * TILED_ROWS + row % TILED_ROWS),
                        scales: line_scales.get().add(block).cast::<f32>().add(row % TILED_ROWS),
                    };
                    quantise_tiled_row(tier, precision, row_of(row), k, to);
                }
            }
        };
        let fill_panel = |index: usize| {
            let panel = panel(rows - tiled, index);
            let (at, block_at) = (panel.first * k * precision.planes(), panel.first * (k / BLOCK));
            for r in 0..panel.rows {
                // SAFETY: panels are disjoint ranges of rows and each is one task, so this task alone touches these entries of the outputs;
                // `resize` made room for all of them. The tier was checked above.
                unsafe {
                    let to = PanelRow {
                        quants: quants.get().add(at + r * 4),
                        scales: scales.get().add(block_at + r),
                        scaled_sums: scaled_sums.get().add(block_at + r),
                        sums: sums.get().add(block_at + r),
                        half_sums: half_sums.get().add(block_at + r),
                        rows: panel.rows,
                    };
                    quantise_row(tier, precision, row_of(tiled + panel.first + r), k, to);
                }
            }
        };
        session.run_if_large(tiled_tasks + panel_count(rows - tiled), rows * k, |task| {
            if task < tiled_tasks { fill_tiled(task * TILED_ROWS_PER_TASK) } else { fill_panel(task - tiled_tasks) }
        })
    }

    /// Rounds rows of `k` values.
    ///
    /// # Errors
    /// [`TaskPanicked`] when a task panicked.
    ///
    /// # Panics
    /// When `x` is not whole rows, `k` is no positive multiple of 32, or the tier is not supported.
    pub fn quantise(
        &mut self,
        session: &mut Session<'_>,
        tier: Tier,
        x: &mut [f32],
        k: usize,
    ) -> Result<(), TaskPanicked> {
        self.fill(session, tier, x, k, |_, _| {})
    }

    /// Rounds the RMS norm of each row of `x`; the normalised rows are left in `scratch`.
    ///
    /// # Errors
    /// [`TaskPanicked`] when a task panicked.
    ///
    /// # Panics
    /// When `x` and `scratch` differ in length or are not whole rows of `weight`'s length, or the tier is not supported.
    pub fn norm_quantise(
        &mut self,
        session: &mut Session<'_>,
        tier: Tier,
        x: &[f32],
        weight: &[f32],
        epsilon: f32,
        scratch: &mut [f32],
    ) -> Result<(), TaskPanicked> {
        assert_eq!(x.len(), scratch.len(), "scratch must match x");
        let k = weight.len();
        self.fill(session, tier, scratch, k, |row, out| {
            let x = &x[row * k..][..k];
            // SAFETY: `fill` checked the tier; the three ranges are `k` long.
            unsafe { rms_norm_row(tier, x.as_ptr(), weight.as_ptr(), epsilon, out.as_mut_ptr(), k) }
        })
    }

    /// Rounds `kind(gate) * up`, where each row of `gate_up` holds `k` gates and then `k` ups; the products are left in `scratch`.
    ///
    /// # Errors
    /// [`TaskPanicked`] when a task panicked.
    ///
    /// # Panics
    /// When `gate_up` is not twice as long as `scratch`, either is not whole rows, or the tier is not supported.
    pub fn gated_quantise(
        &mut self,
        session: &mut Session<'_>,
        tier: Tier,
        kind: Gate,
        gate_up: &[f32],
        k: usize,
        scratch: &mut [f32],
    ) -> Result<(), TaskPanicked> {
        assert_eq!(gate_up.len(), 2 * scratch.len(), "gate and up must match the scratch");
        self.fill(session, tier, scratch, k, |row, out| {
            let (gate, up) = gate_up[row * 2 * k..][..2 * k].split_at(k);
            // SAFETY: `fill` checked the tier; the three ranges are `k` long, a multiple of 32.
            unsafe { gated_row(tier, kind, gate.as_ptr(), up.as_ptr(), out.as_mut_ptr(), k) }
        })
    }
}

/// Where the quants of one row go, block by block.
///
/// # Safety
/// The implementor points to room for all blocks of a row, and the tier's features are present.
trait BlockSink: Copy {
    /// Puts the quants of `block` and what belongs to them.
    unsafe fn put<L: Lanes, const PLANES: usize>(self, block: usize, quants: [L::I; 2], scale: f32);
    /// Makes every product of the row NaN.
    unsafe fn poison(self);
}

/// One row of a panel of up to eight.
#[derive(Clone, Copy)]
struct PanelRow {
    quants: *mut i8,
    scales: *mut f32,
    scaled_sums: *mut f32,
    sums: *mut i32,
    half_sums: *mut i32,
    /// Rows of the panel: the distance between two groups of this row.
    rows: usize,
}

impl BlockSink for PanelRow {
    #[inline(always)]
    unsafe fn put<L: Lanes, const PLANES: usize>(self, block: usize, quants: [L::I; 2], scale: f32) {
        let [qa, qb] = quants;
        // SAFETY: the caller vouches for the block's room and for the tier.
        unsafe {
            let half_sum = L::reduce_sum_int(qa);
            let sum = half_sum.wrapping_add(L::reduce_sum_int(qb));
            // `quants` already points at this row's place in a group.
            let out = self.quants.cast::<[u8; 4]>().add(block * (BLOCK / 4) * PLANES * self.rows);
            if PLANES == 2 {
                let half = L::splat_int(64);
                let (ha, hb) = (L::div128(L::add_int(qa, half)), L::div128(L::add_int(qb, half)));
                let shifted = (L::join_planes(ha, L::splat_int(0)), L::join_planes(hb, L::splat_int(0)));
                put_plane::<L>(ha, hb, out, PLANES * self.rows);
                let low = (L::sub_int(qa, shifted.0), L::sub_int(qb, shifted.1));
                put_plane::<L>(low.0, low.1, out.add(self.rows), PLANES * self.rows);
            } else {
                put_plane::<L>(qa, qb, out, self.rows);
            }
            self.scales.add(block * self.rows).write(scale);
            self.scaled_sums.add(block * self.rows).write(scale * sum as f32);
            self.sums.add(block * self.rows).write(sum);
            self.half_sums.add(block * self.rows).write(half_sum);
        }
    }

    #[inline(always)]
    unsafe fn poison(self) {
        // SAFETY: the caller vouches for the first block.
        unsafe { self.scales.write(f32::NAN) };
    }
}

kernel!(
    /// Quantises one row into its panel.
    fn quantise_row(precision: Precision, x: *const f32, k: usize, to: PanelRow) = quantise_row_body
);

kernel!(
    /// Quantises one row into its panel of sixteen.
    fn quantise_tiled_row(precision: Precision, x: *const f32, k: usize, to: TiledRow) = quantise_tiled_row_body
);

#[inline(always)]
unsafe fn quantise_row_body<L: Lanes>(precision: Precision, x: *const f32, k: usize, to: PanelRow) {
    // SAFETY: the contract is passed on.
    unsafe { quantise::<L, PanelRow>(precision, x, k, to) }
}

#[inline(always)]
unsafe fn quantise_tiled_row_body<L: Lanes>(precision: Precision, x: *const f32, k: usize, to: TiledRow) {
    // SAFETY: the contract is passed on.
    unsafe { quantise::<L, TiledRow>(precision, x, k, to) }
}

#[inline(always)]
unsafe fn quantise<L: Lanes, S: BlockSink>(precision: Precision, x: *const f32, k: usize, to: S) {
    // SAFETY: the contract is passed on.
    unsafe {
        match precision {
            Precision::Int8 => quantise_planes::<L, S, 1>(x, k, to),
            Precision::Int15 => quantise_planes::<L, S, 2>(x, k, to),
            Precision::Bf16 => unreachable!("rows of bfloat16 are not quantised"),
        }
    }
}

#[inline(always)]
unsafe fn quantise_planes<L: Lanes, S: BlockSink, const PLANES: usize>(x: *const f32, k: usize, to: S) {
    let greatest = if PLANES == 2 { 127.0 * 128.0 } else { 127.0 };
    // SAFETY: the caller vouches for `k` values at `x`, for the row's room, and for the tier.
    unsafe {
        let zero = L::splat(0.0);
        // Stays zero as long as all values are finite.
        let mut poison = zero;
        for block in 0..k / BLOCK {
            let (a, b) = (L::load(x.add(block * BLOCK)), L::load(x.add(block * BLOCK + LANES)));
            poison = L::fma(b, zero, L::fma(a, zero, poison));
            let largest = L::reduce_max(L::max(L::abs(a), L::abs(b)));
            let (scale, inverse) = if largest > TINY { (largest / greatest, greatest / largest) } else { (0.0, 0.0) };
            let inverse = L::splat(inverse);
            let quants = [L::round(L::mul(a, inverse)), L::round(L::mul(b, inverse))];
            to.put::<L, PLANES>(block, quants, scale);
        }
        if L::reduce_sum(poison) != 0.0 {
            to.poison();
        }
    }
}

/// Writes 32 quants as eight groups of four bytes, `step` groups apart.
#[inline(always)]
unsafe fn put_plane<L: Lanes>(a: L::I, b: L::I, out: *mut [u8; 4], step: usize) {
    let mut quants = [0i8; BLOCK];
    // SAFETY: the array holds 32 quants; the caller vouches for the eight groups.
    unsafe {
        L::store_i8(quants.as_mut_ptr(), a);
        L::store_i8(quants.as_mut_ptr().add(LANES), b);
        let groups = quants.as_ptr().cast::<[u8; 4]>();
        for group in 0..BLOCK / 4 {
            out.add(group * step).write(groups.add(group).read());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_take_rows_that_fill_them() {
        for (rows, tiled) in [(1, 0), (16, 0), (27, 0), (28, 28), (32, 32), (41, 32), (42, 42), (512, 512), (513, 512)]
        {
            assert_eq!(tiled_rows(Tier::Amx, rows), tiled, "{rows}");
            assert_eq!(tiled_rows(Tier::Avx512Vnni, rows), 0);
        }
    }

    #[test]
    fn panels_cover_the_rows_in_order() {
        for rows in 0..70 {
            let mut next = 0;
            for index in 0..panel_count(rows) {
                let panel = panel(rows, index);
                assert_eq!(panel.first, next);
                assert!([1, 2, 4, 8].contains(&panel.rows));
                next += panel.rows;
            }
            assert_eq!(next, rows);
        }
    }
}
