//! The steps of a product: one block of sixteen rows by sixteen columns each, panel after panel.

use std::arch::x86_64::*;

use super::unpack::BlockWeights;
use crate::activation::{BlockScales, Line, TILED_ROWS};
use crate::amx;
use crate::gemm::{Store, put};
use crate::lanes::LANES;
use crate::lanes::avx512::Avx512;

// What becomes of a step's sums: constants that the steps can be compiled for.
/// One sum is the block's.
pub(super) const SINGLE: u8 = 0;
/// One sum of the high and one of the low parts of the activations are added.
pub(super) const JOINED: u8 = 1;
/// One sum of each half of the block is multiplied by its integer factor, and both are added as integers.
pub(super) const SCALED_HALVES: u8 = 2;

/// Bytes from one row of a tile to the next.
const ROW: usize = size_of::<Line>();

/// Tiles of sums outside the unit.
#[repr(C, align(64))]
struct Sums<const TILES: usize>([[[f32; LANES]; TILED_ROWS]; TILES]);

/// A product of panels by one tile of columns.
pub(super) struct Steps<const ROWS: usize> {
    /// The first panel's quants; the others follow.
    pub(super) quants: *const Line,
    /// The first panel's scales.
    pub(super) scales: *const BlockScales,
    /// The blocks of the columns.
    pub(super) weights: *const BlockWeights<ROWS>,
    pub(super) blocks: usize,
    /// Rows that are stored; the last panel may have more.
    pub(super) rows: usize,
    /// The first row's first column.
    pub(super) to: *mut f32,
    pub(super) stride: usize,
    pub(super) columns: usize,
    pub(super) store: Store,
}

/// The operands of the step whose products are asked for next.
struct Ahead<const ROWS: usize> {
    quants: *const Line,
    weights: *const BlockWeights<ROWS>,
    block: usize,
    /// Steps after this one. The last one is asked for again and again: nobody reads it.
    left: usize,
}

impl<const ROWS: usize> Ahead<ROWS> {
    #[inline(always)]
    fn advance(&mut self, of: &Steps<ROWS>, planes: usize) {
        if self.left == 0 {
            return;
        }
        self.left -= 1;
        self.quants = self.quants.wrapping_add(planes * TILED_ROWS);
        self.block += 1;
        if self.block == of.blocks {
            self.block = 0;
        }
        self.weights = of.weights.wrapping_add(self.block);
    }
}

/// Asks for the products of a step in the tiles of sums 0 and 1, or 2 and 3.
macro_rules! ask {
    ($first:literal, $second:literal, $sums:expr, $planes:expr, $ahead:expr) => {{
        let quants = $ahead.quants.cast::<u8>();
        let weights = (&raw const (*$ahead.weights).rows).cast::<u8>();
        amx::load::<6>(weights, ROW);
        amx::load::<4>(quants, ROW);
        amx::zero::<$first>();
        amx::dot_bf16::<$first, 4, 6>();
        if $sums == SCALED_HALVES {
            amx::load::<7>(weights.wrapping_add(16 * ROW), ROW);
            amx::zero::<$second>();
            amx::dot_bf16::<$second, 4, 7>();
        }
        if $planes == 2 {
            amx::load::<5>(quants.wrapping_add(TILED_ROWS * ROW), ROW);
            if $sums == JOINED {
                amx::zero::<$second>();
                amx::dot_bf16::<$second, 5, 6>();
            } else {
                amx::dot_bf16::<$first, 5, 6>();
            }
            if $sums == SCALED_HALVES {
                amx::dot_bf16::<$second, 5, 7>();
            }
        }
    }};
}

/// Takes out the sums of a step.
macro_rules! take {
    ($first:literal, $second:literal, $sums:expr, $to:expr) => {{
        let to = $to.cast::<u8>();
        amx::store::<$first>(to, ROW);
        if $sums != SINGLE {
            amx::store::<$second>(to.wrapping_add(TILED_ROWS * ROW), ROW);
        }
    }};
}

impl<const ROWS: usize> Steps<ROWS> {
    /// Takes all steps.
    ///
    /// # Safety
    /// The CPU has the features of [`Avx512`], this thread has the tiles of [`super::tiles`], and the pointers lead to what they promise.
    #[inline(always)]
    pub(super) unsafe fn run<const SUMS: u8, const PLANES: usize>(self, minima: bool) {
        // SAFETY: the contract is passed on.
        unsafe { if minima { self.steps::<SUMS, PLANES, true>() } else { self.steps::<SUMS, PLANES, false>() } }
    }

    #[inline(always)]
    unsafe fn steps<const SUMS: u8, const PLANES: usize, const MINIMUM: bool>(self) {
        // Where sums are taken out to: two tiles for each of two steps. And where a finished panel leaves the registers: a row is indexed by
        // a variable only there, so that the accumulators themselves stay in registers.
        let mut sums = Sums([[[0.0; LANES]; TILED_ROWS]; 4]);
        let mut done = Sums([[[0.0; LANES]; TILED_ROWS]; 1]);
        let even = sums.0.as_mut_ptr();
        let odd = even.wrapping_add(2);
        let mut left = self.rows.div_ceil(TILED_ROWS) * self.blocks;
        let mut ahead = Ahead { quants: self.quants, weights: self.weights, block: 0, left: left - 1 };
        // SAFETY: the caller vouches for the features and the tiles. `ahead` stays at operands of the panels and blocks there are, and so do
        // the scales and weights of the steps, which are counted in `left`; sums are read only after they were taken out.
        unsafe {
            ask!(0, 1, SUMS, PLANES, ahead);
            ahead.advance(&self, PLANES);
            take!(0, 1, SUMS, even);
            ask!(2, 3, SUMS, PLANES, ahead);
            ahead.advance(&self, PLANES);
            let mut acc = [_mm512_setzero_ps(); TILED_ROWS];
            let (mut block, mut row, mut scales) = (0, 0, self.scales);
            macro_rules! step {
                ($ask:tt, $take:tt, $own:expr, $next:expr) => {
                    let weights = self.weights.add(block);
                    ask! $ask;
                    ahead.advance(&self, PLANES);
                    scale::<SUMS, MINIMUM, ROWS, 0>($own, weights, scales, &mut acc);
                    take! $take;
                    scale::<SUMS, MINIMUM, ROWS, 8>($own, weights, scales, &mut acc);
                    scales = scales.add(1);
                    block += 1;
                    if block == self.blocks {
                        block = 0;
                        for r in 0..TILED_ROWS {
                            _mm512_store_ps(done.0[0][r].as_mut_ptr(), acc[r]);
                        }
                        self.finish(row, &done.0[0]);
                        acc = [_mm512_setzero_ps(); TILED_ROWS];
                        row += TILED_ROWS;
                    }
                    left -= 1;
                    if left == 0 {
                        break;
                    }
                };
            }
            loop {
                step!((0, 1, SUMS, PLANES, ahead), (2, 3, SUMS, odd), even, odd);
                step!((2, 3, SUMS, PLANES, ahead), (0, 1, SUMS, even), odd, even);
            }
        }
    }

    /// Stores the finished rows of the panel that begins at `row`.
    #[inline(always)]
    unsafe fn finish(&self, row: usize, done: &[[f32; LANES]; TILED_ROWS]) {
        for (r, done) in done.iter().enumerate().take(self.rows - row) {
            // SAFETY: the caller vouches for the features and the output's rows.
            unsafe {
                let to = self.to.add((row + r) * self.stride);
                put::<Avx512>(to, _mm512_load_ps(done.as_ptr()), self.columns, self.store);
            }
        }
    }
}

/// Adds eight rows of a step's sums, from `FIRST` on, to the accumulators.
#[inline(always)]
unsafe fn scale<const SUMS: u8, const MINIMUM: bool, const ROWS: usize, const FIRST: usize>(
    sums: *const [[f32; LANES]; TILED_ROWS],
    weights: *const BlockWeights<ROWS>,
    scales: *const BlockScales,
    acc: &mut [__m512; TILED_ROWS],
) {
    // SAFETY: the caller vouches for the features, two tiles of sums and the block's weights and scales.
    unsafe {
        let scale = _mm512_load_ps((*weights).scales.as_ptr());
        let minimum = if MINIMUM { _mm512_load_ps((*weights).minima.as_ptr()) } else { scale };
        for r in FIRST..FIRST + TILED_ROWS / 2 {
            let first = _mm512_load_ps((*sums)[r].as_ptr());
            let second = _mm512_load_ps((*sums.add(1))[r].as_ptr());
            let sum = match SUMS {
                SINGLE => first,
                JOINED => _mm512_add_ps(first, second),
                _ => {
                    let factor = |half: usize| _mm512_load_si512((*weights).factors[half].as_ptr().cast());
                    let first = _mm512_mullo_epi32(_mm512_cvtps_epi32(first), factor(0));
                    let second = _mm512_mullo_epi32(_mm512_cvtps_epi32(second), factor(1));
                    _mm512_cvtepi32_ps(_mm512_add_epi32(first, second))
                }
            };
            let both = _mm512_mul_ps(scale, _mm512_set1_ps((*scales).scales[r]));
            acc[r] = _mm512_fmadd_ps(both, sum, acc[r]);
            if MINIMUM {
                acc[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps((*scales).scaled_sums[r]), acc[r]);
            }
        }
    }
}
