//! The exact integer sums of one 32-block, for each width of weights.

use super::PLAIN;
use crate::lanes::{LANES, Lanes};

/// Sums of one block's activation quants.
#[derive(Clone, Copy)]
pub(super) struct BlockTotals {
    /// Of all 32, row by row.
    pub(super) whole: *const i32,
    /// Of the first sixteen.
    pub(super) first_half: *const i32,
}

/// The exact integer sums of one block.
#[inline(always)]
pub(super) unsafe fn block_sums<
    L: Lanes,
    const BITS: usize,
    const SCALES: u8,
    const PLANES: usize,
    const P: usize,
    const R: usize,
>(
    quants: *const u8,
    factors: *const u8,
    x: *const i8,
    totals: BlockTotals,
) -> [L::I; R] {
    let zero = if SCALES == PLAIN { 1 << (BITS - 1) } else { 0 };
    // SAFETY: the contract is passed on.
    unsafe {
        match BITS {
            8 => block_of_bytes::<L, PLANES, P, R>(quants, x, totals.whole),
            6 => block_of_sixes::<L, PLANES, P, R>(quants, factors, x, totals),
            5 => block_of_fives::<L, PLANES, P, R>(quants, x, totals.whole, zero),
            _ => block_of_nibbles::<L, PLANES, P, R>(quants, x, totals.whole, -zero),
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
unsafe fn block_of_fives<L: Lanes, const PLANES: usize, const P: usize, const R: usize>(
    quants: *const u8,
    x: *const i8,
    totals: *const i32,
    zero: i32,
) -> [L::I; R] {
    // SAFETY: the caller vouches for one block of weights and of activations.
    unsafe {
        let mut sums = [[L::splat_int(0); R]; PLANES];
        let fifths = quants.add(4 * 64);
        for group in 0..4 {
            let bytes = L::load_weights(quants.add(group * 64));
            let low = L::add_fifth_bits(L::low_nibbles(bytes), fifths.add(group * 8));
            let high = L::add_fifth_bits(L::high_nibbles(bytes), fifths.add((group + 4) * 8));
            for plane in 0..PLANES {
                let first = x.add((group * PLANES + plane) * 4 * P);
                let second = x.add(((group + 4) * PLANES + plane) * 4 * P);
                for r in 0..R {
                    let sum = L::small_dot(sums[plane][r], low, first.add(r * 4).cast::<i32>().read_unaligned());
                    sums[plane][r] = L::small_dot(sum, high, second.add(r * 4).cast::<i32>().read_unaligned());
                }
            }
        }
        let mut out = [L::splat_int(0); R];
        for r in 0..R {
            out[r] = join::<L, PLANES, R>(&sums, r);
            if zero != 0 {
                out[r] = L::sub_int(out[r], L::splat_int(totals.add(r).read().wrapping_mul(zero)));
            }
        }
        out
    }
}

/// Six-bit weights: each half of the block is summed, freed of its offset and multiplied by its factor.
#[inline(always)]
unsafe fn block_of_sixes<L: Lanes, const PLANES: usize, const P: usize, const R: usize>(
    quants: *const u8,
    factors: *const u8,
    x: *const i8,
    totals: BlockTotals,
) -> [L::I; R] {
    // SAFETY: the contract is passed on.
    unsafe {
        let first = half_of_sixes::<L, 0, PLANES, P, R>(quants, factors, x, totals);
        let mut out = half_of_sixes::<L, 1, PLANES, P, R>(quants, factors, x, totals);
        for r in 0..R {
            out[r] = L::add_int(first[r], out[r]);
        }
        out
    }
}

#[inline(always)]
unsafe fn half_of_sixes<L: Lanes, const HALF: usize, const PLANES: usize, const P: usize, const R: usize>(
    quants: *const u8,
    factors: *const u8,
    x: *const i8,
    totals: BlockTotals,
) -> [L::I; R] {
    // SAFETY: the caller vouches for one block of weights, its factors and activations.
    unsafe {
        let upper = L::load_weights(quants.add((4 + HALF) * 64));
        let mut sums = [[L::splat_int(0); R]; PLANES];
        for group in 0..4 {
            let bytes = L::load_weights(quants.add(group * 64));
            let nibbles = if HALF == 0 { L::low_nibbles(bytes) } else { L::high_nibbles(bytes) };
            let weights = L::add_upper_bits(nibbles, upper, group);
            for plane in 0..PLANES {
                let x = x.add(((group + 4 * HALF) * PLANES + plane) * 4 * P);
                for r in 0..R {
                    let x = x.add(r * 4).cast::<i32>().read_unaligned();
                    sums[plane][r] = L::small_dot(sums[plane][r], weights, x);
                }
            }
        }
        let factor = L::load_signed(factors.add(HALF * LANES).cast::<i8>());
        let mut out = [L::splat_int(0); R];
        for r in 0..R {
            let first = totals.first_half.add(r).read();
            let total = if HALF == 0 { first } else { totals.whole.add(r).read().wrapping_sub(first) };
            let sum = L::sub_int(join::<L, PLANES, R>(&sums, r), L::splat_int(total.wrapping_mul(32)));
            out[r] = L::mul_int(sum, factor);
        }
        out
    }
}

/// The sum of row `r` over its planes.
#[inline(always)]
unsafe fn join<L: Lanes, const PLANES: usize, const R: usize>(sums: &[[L::I; R]; PLANES], r: usize) -> L::I {
    // SAFETY: arithmetic only; the caller vouches for the tier.
    unsafe { if PLANES == 2 { L::join_planes(sums[0][r], sums[1][r]) } else { sums[0][r] } }
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
