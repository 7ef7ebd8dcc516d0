//! Integer products in 256-bit registers: by multiply-add of bytes, or by the VNNI instruction.

use std::arch::x86_64::*;

use super::avx2::Pair;

/// Integer sums of sixteen columns, in the form of the implementation.
type Sums = Pair<__m256i>;
/// Sixty-four weight bytes.
type Weights = Pair<__m256i>;

/// The functions of [`super::Lanes`] that bear the same names, in 256-bit registers.
///
/// # Safety
/// Every function needs AVX2 and the implementation's own features, and keeps to the ranges that `Lanes` gives.
pub(crate) trait Products {
    unsafe fn small_dot(sum: Sums, w: Weights, x: i32) -> Sums;
    unsafe fn nibble_dot(sum: Sums, w: Weights, x: i32) -> Sums;
    unsafe fn nibble_finish(sum: Sums, bias: i32) -> Sums;
    unsafe fn byte_start(total: i32) -> Sums;
    unsafe fn byte_dot(sum: Sums, w: Weights, x: i32) -> Sums;
}

/// Multiply-add of bytes, which stops at i16. Nibbles are summed there, in pairs of neighbours: a whole 32-block reaches
/// 8 * 2 * 15 * 127 = 30,480, which fits.
pub(crate) struct MultiplyAdd;

impl Products for MultiplyAdd {
    #[inline(always)]
    unsafe fn small_dot(sum: Sums, w: Weights, x: i32) -> Sums {
        // Two products of at most 63 * 127 = 8,001 fit i16, so the byte multiply-add does not saturate.
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe {
            let (x, ones) = (_mm256_set1_epi32(x), _mm256_set1_epi16(1));
            Pair(
                _mm256_add_epi32(sum.0, _mm256_madd_epi16(_mm256_maddubs_epi16(w.0, x), ones)),
                _mm256_add_epi32(sum.1, _mm256_madd_epi16(_mm256_maddubs_epi16(w.1, x), ones)),
            )
        }
    }
    #[inline(always)]
    unsafe fn nibble_dot(sum: Sums, w: Weights, x: i32) -> Sums {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe {
            let x = _mm256_set1_epi32(x);
            Pair(
                _mm256_add_epi16(sum.0, _mm256_maddubs_epi16(w.0, x)),
                _mm256_add_epi16(sum.1, _mm256_maddubs_epi16(w.1, x)),
            )
        }
    }
    #[inline(always)]
    unsafe fn nibble_finish(sum: Sums, bias: i32) -> Sums {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe {
            let (ones, bias) = (_mm256_set1_epi16(1), _mm256_set1_epi32(bias));
            Pair(
                _mm256_add_epi32(_mm256_madd_epi16(sum.0, ones), bias),
                _mm256_add_epi32(_mm256_madd_epi16(sum.1, ones), bias),
            )
        }
    }
    #[inline(always)]
    unsafe fn byte_start(_total: i32) -> Sums {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { Pair(_mm256_setzero_si256(), _mm256_setzero_si256()) }
    }
    #[inline(always)]
    unsafe fn byte_dot(sum: Sums, w: Weights, x: i32) -> Sums {
        // The byte multiply-add saturates at i16, so the weight's sign moves to the activation: |w| <= 128 and |x| <= 127 give at most
        // 2 * 128 * 127 = 32,512 a pair.
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe {
            let (x, ones) = (_mm256_set1_epi32(x), _mm256_set1_epi16(1));
            let flip = _mm256_set1_epi8(-128);
            let (a, b) = (_mm256_xor_si256(w.0, flip), _mm256_xor_si256(w.1, flip));
            let low = _mm256_maddubs_epi16(_mm256_abs_epi8(a), _mm256_sign_epi8(x, a));
            let high = _mm256_maddubs_epi16(_mm256_abs_epi8(b), _mm256_sign_epi8(x, b));
            Pair(
                _mm256_add_epi32(sum.0, _mm256_madd_epi16(low, ones)),
                _mm256_add_epi32(sum.1, _mm256_madd_epi16(high, ones)),
            )
        }
    }
}

/// One instruction for four products of unsigned by signed bytes and their sum in i32.
pub(crate) struct Vnni;

impl Products for Vnni {
    #[inline(always)]
    unsafe fn small_dot(sum: Sums, w: Weights, x: i32) -> Sums {
        // SAFETY: the features are present, by the trait's contract.
        unsafe {
            let x = _mm256_set1_epi32(x);
            Pair(_mm256_dpbusd_avx_epi32(sum.0, w.0, x), _mm256_dpbusd_avx_epi32(sum.1, w.1, x))
        }
    }
    #[inline(always)]
    unsafe fn nibble_dot(sum: Sums, w: Weights, x: i32) -> Sums {
        // SAFETY: the same contract.
        unsafe { Self::small_dot(sum, w, x) }
    }
    #[inline(always)]
    unsafe fn nibble_finish(sum: Sums, bias: i32) -> Sums {
        // SAFETY: the features are present, by the trait's contract.
        unsafe {
            let bias = _mm256_set1_epi32(bias);
            Pair(_mm256_add_epi32(sum.0, bias), _mm256_add_epi32(sum.1, bias))
        }
    }
    #[inline(always)]
    unsafe fn byte_start(total: i32) -> Sums {
        // Weights stay biased by 128, so the sum starts at minus 128 times the activations' total. Wrapping, because the total of a row
        // that is not finite is arbitrary (and its results are NaN by their scale).
        let start = total.wrapping_mul(-128);
        // SAFETY: the features are present, by the trait's contract.
        unsafe { Pair(_mm256_set1_epi32(start), _mm256_set1_epi32(start)) }
    }
    #[inline(always)]
    unsafe fn byte_dot(sum: Sums, w: Weights, x: i32) -> Sums {
        // SAFETY: the same contract; the instruction takes any unsigned byte.
        unsafe { Self::small_dot(sum, w, x) }
    }
}
