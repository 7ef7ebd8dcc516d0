//! What this machine can do at most: the two rates that figures of kernels are held against.

use crate::lanes::{Lanes, kernel};
use crate::tier::Tier;

/// Independent sums: enough to hide an integer product's latency on every tier, few enough for sixteen registers.
const CHAINS: usize = 8;

kernel!(
    /// Folds `len` bytes, a multiple of 512, into one number.
    fn fold(bytes: *const u8, len: usize) -> i32 = fold_body
);

#[inline(always)]
unsafe fn fold_body<L: Lanes>(bytes: *const u8, len: usize) -> i32 {
    // SAFETY: the caller vouches for the bytes and the tier.
    unsafe {
        let mut sums = [L::splat_int(0); CHAINS];
        for at in (0..len).step_by(CHAINS * 64) {
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = L::small_dot(*sum, L::low_nibbles(L::load_weights(bytes.add(at + i * 64))), 0x0101_0101);
            }
        }
        sums.into_iter().map(|sum| L::reduce_sum_int(sum)).fold(0, i32::wrapping_add)
    }
}

kernel!(
    /// Makes `turns * CHAINS` integer products of 64 bytes each, from registers.
    fn products(turns: usize, seed: i32) -> i32 = products_body
);

#[inline(always)]
unsafe fn products_body<L: Lanes>(turns: usize, seed: i32) -> i32 {
    // SAFETY: arithmetic only; the caller vouches for the tier.
    unsafe {
        let weights = L::load_weights([3u8; 64].as_ptr());
        let mut sums = [L::splat_int(0); CHAINS];
        for turn in 0..turns {
            let x = seed ^ (turn as i32 & 0x0707_0707);
            for sum in &mut sums {
                *sum = L::small_dot(*sum, weights, x);
            }
        }
        sums.into_iter().map(|sum| L::reduce_sum_int(sum)).fold(0, i32::wrapping_add)
    }
}

/// Reads all of `bytes` (whole groups of 512) once, doing next to nothing with them; returns a number that depends on each.
///
/// # Panics
/// When the tier is not supported.
pub fn read(tier: Tier, bytes: &[u8]) -> i32 {
    assert!(tier.is_supported(), "tier {tier} is not supported here");
    // SAFETY: the tier was checked; the length is cut to whole groups inside the slice.
    unsafe { fold(tier, bytes.as_ptr(), bytes.len() / (CHAINS * 64) * CHAINS * 64) }
}

/// Multiplies and adds without reading memory; returns the operations done (an integer product and its addition are two) and a number that
/// depends on all of them.
///
/// # Panics
/// When the tier is not supported.
pub fn multiply(tier: Tier, turns: usize) -> (u64, i32) {
    assert!(tier.is_supported(), "tier {tier} is not supported here");
    // SAFETY: the tier was checked.
    let result = unsafe { products(tier, turns, 0x0102_0304) };
    ((turns * CHAINS * 64 * 2) as u64, result)
}

/// Multiplies and adds bfloat16 with AVX-512 BF16 without reading memory; returns the operations done and the sum each lane of the first
/// chain reached: 2 a turn.
///
/// # Panics
/// When the CPU has no AVX-512 BF16.
#[cfg(target_arch = "x86_64")]
pub fn multiply_bf16(turns: usize) -> (u64, f32) {
    use std::arch::x86_64::*;
    /// Independent sums: enough for two instructions a cycle of a latency of six or so.
    const CHAINS: usize = 16;
    #[target_feature(enable = "avx512f,avx512bf16")]
    fn products(turns: usize) -> [f32; 16] {
        // 1.0 in both halves, which the compiler is not to know.
        // SAFETY: 512 bits of one kind are 512 bits of another.
        let ones =
            unsafe { std::mem::transmute::<__m512i, __m512bh>(std::hint::black_box(_mm512_set1_epi32(0x3f80_3f80))) };
        let mut sums = [_mm512_setzero_ps(); CHAINS];
        for _ in 0..turns {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, ones, ones);
            }
        }
        let mut lanes = [0f32; 16];
        let all = sums.into_iter().fold(sums[0], |a, b| _mm512_min_ps(a, b));
        // SAFETY: the array holds sixteen f32.
        unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), all) };
        lanes
    }
    assert!(crate::Bf16Unit::of(Tier::Avx512Vnni) == crate::Bf16Unit::Avx512Bf16, "this CPU has no AVX-512 BF16");
    // SAFETY: the features were checked.
    let lanes = unsafe { products(turns) };
    ((turns * CHAINS * 16 * 2 * 2) as u64, lanes[0])
}

/// Multiplies and adds in AMX tiles without reading memory, in bfloat16 as the matrix product does; returns the operations done and the sum
/// each element reached: 32 a turn.
///
/// # Panics
/// When [`Tier::Amx`] is not supported.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub fn multiply_tiles(turns: usize) -> (u64, f32) {
    use crate::amx::{SIDE, TileShapes, Tiles, dot_bf16, load, store};
    const SHAPES: TileShapes = TileShapes::new([(SIDE, 64); 8]);
    /// 1.0 as bfloat16.
    const ONE: u16 = 0x3f80;
    let ones = [ONE; SIDE * 32];
    let mut sums = [0f32; SIDE * SIDE];
    let tiles = Tiles::configure(&SHAPES);
    // SAFETY: the guard is alive, all tiles are sixteen rows of 64 bytes, and so are both arrays. The sums begin at zero.
    unsafe {
        load::<6>(ones.as_ptr().cast(), 64);
        load::<7>(ones.as_ptr().cast(), 64);
        for _ in 0..turns {
            dot_bf16::<0, 6, 7>();
            dot_bf16::<1, 6, 7>();
            dot_bf16::<2, 6, 7>();
            dot_bf16::<3, 6, 7>();
        }
        store::<3>(sums.as_mut_ptr().cast(), 64);
    }
    drop(tiles);
    ((turns * 4 * SIDE * SIDE * 32 * 2) as u64, sums[SIDE * SIDE - 1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn every_bfloat16_product_counts() {
        if crate::Bf16Unit::of(Tier::Avx512Vnni) != crate::Bf16Unit::Avx512Bf16 {
            eprintln!("SKIPPED bfloat16 products: this CPU lacks AVX-512 BF16");
            return;
        }
        // Five turns of sixteen sums of sixteen lanes of two products, two operations each.
        assert_eq!(multiply_bf16(5), (5 * 16 * 16 * 2 * 2, 10.0));
    }

    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    #[test]
    fn every_tile_product_counts() {
        if !Tier::Amx.is_supported() {
            eprintln!("SKIPPED tier {}: this CPU or system lacks it", Tier::Amx);
            return;
        }
        // Five turns of four tiles of 16 x 16 sums of 32 products, two operations each.
        assert_eq!(multiply_tiles(5), (5 * 4 * 8192 * 2, 160.0));
    }

    #[test]
    fn every_byte_and_every_product_counts() {
        for tier in Tier::ALL.into_iter().filter(|tier| tier.is_supported()) {
            let mut bytes = vec![1u8; 1024];
            assert_eq!(read(tier, &bytes), 1024, "{tier}");
            bytes[777] = 5;
            assert_eq!(read(tier, &bytes), 1028, "{tier}");
            // One turn at x = 4, 3, 2, 1 by weights of 3: 30 a column, sixteen columns, eight sums.
            assert_eq!(multiply(tier, 1), (1024, 30 * 16 * 8), "{tier}");
        }
    }
}
