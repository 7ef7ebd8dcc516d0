//! Sixteen lanes in one 512-bit register, with VNNI integer products.

use std::arch::x86_64::*;

use super::Lanes;

/// AVX-512 F, BW, VL, DQ and VNNI.
pub(crate) struct Avx512;

impl Lanes for Avx512 {
    type F = __m512;
    type I = __m512i;
    type W = __m512i;
    type N = __m512i;

    const GEMM_ROWS: usize = 8;
    const QUERY_ROWS: usize = 12;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        // SAFETY: the features are present and sixteen f32 are readable, by the trait's contract.
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: Self::F) {
        // SAFETY: the features are present and sixteen f32 are writable, by the trait's contract.
        unsafe { _mm512_storeu_ps(p, x) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::F {
        // SAFETY: the features are present and sixteen halves are readable, by the trait's contract.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(p: *const u16) -> (Self::F, Self::F) {
        // SAFETY: the features are present and sixteen pairs are readable, by the trait's contract.
        unsafe {
            let pairs = _mm512_loadu_si512(p.cast());
            let first = _mm512_slli_epi32::<16>(pairs);
            let second = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            (_mm512_castsi512_ps(first), _mm512_castsi512_ps(second))
        }
    }
    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> Self::F {
        // SAFETY: the features are present and sixteen bytes are readable, by the trait's contract.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_signed(p: *const i8) -> Self::I {
        // SAFETY: the features are present and sixteen bytes are readable, by the trait's contract.
        unsafe { _mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn abs(a: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_abs_ps(a) }
    }
    #[inline(always)]
    unsafe fn swap_pairs(a: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_permute_ps::<0b10_11_00_01>(a) }
    }
    #[inline(always)]
    unsafe fn first(n: usize, a: Self::F, b: Self::F) -> Self::F {
        let mask = ((1u32 << n) - 1) as u16;
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_mask_mov_ps(b, mask, a) }
    }
    #[inline(always)]
    unsafe fn keep_above(x: Self::F, limit: f32, a: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(x, _mm512_set1_ps(limit)), a) }
    }
    #[inline(always)]
    unsafe fn add_above(sum: Self::F, x: Self::F, limit: f32, a: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_mask_add_ps(sum, _mm512_cmp_ps_mask::<_CMP_GT_OQ>(x, _mm512_set1_ps(limit)), sum, a) }
    }
    #[inline(always)]
    unsafe fn above(x: Self::F, limit: f32) -> u32 {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { u32::from(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(x, _mm512_set1_ps(limit))) }
    }
    #[inline(always)]
    unsafe fn choose(bits: u32, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_mask_mov_ps(b, bits as u16, a) }
    }
    #[inline(always)]
    unsafe fn splat_int(x: i32) -> Self::I {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_set1_epi32(x) }
    }
    #[inline(always)]
    unsafe fn round(x: Self::F) -> Self::I {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_cvt_roundps_epi32::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x) }
    }
    #[inline(always)]
    unsafe fn to_float(x: Self::I) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_cvtepi32_ps(x) }
    }
    #[inline(always)]
    unsafe fn pow2(n: Self::I) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_add_epi32(n, _mm512_set1_epi32(127)))) }
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, x: Self::I) {
        // SAFETY: the features are present and sixteen bytes are writable, by the trait's contract.
        unsafe { _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(x)) }
    }
    #[inline(always)]
    unsafe fn join_planes(high: Self::I, low: Self::I) -> Self::I {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_add_epi32(_mm512_slli_epi32::<7>(high), low) }
    }
    #[inline(always)]
    unsafe fn sub_int(a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_sub_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn mul_int(a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_mullo_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn div128(a: Self::I) -> Self::I {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_srai_epi32::<7>(a) }
    }
    #[inline(always)]
    unsafe fn add_int(a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_add_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn store_int(p: *mut i32, x: Self::I) {
        // SAFETY: the features are present and sixteen i32 are writable, by the trait's contract.
        unsafe { _mm512_storeu_si512(p.cast(), x) }
    }
    #[inline(always)]
    unsafe fn store_bf16_swapped(p: *mut u16, first: Self::I, second: Self::I) {
        /// Upper halves of sixteen words and of sixteen more, by the position they go to.
        const UPPER: [u16; 32] = {
            let mut from = [0; 32];
            let mut i = 0;
            while i < 32 {
                from[i] = (2 * (i & !3 | [0, 2, 1, 3][i & 3]) + 1) as u16;
                i += 1;
            }
            from
        };
        // SAFETY: the features are present and thirty-two values are writable, by the trait's contract.
        unsafe {
            let first = _mm512_castps_si512(_mm512_cvtepi32_ps(first));
            let second = _mm512_castps_si512(_mm512_cvtepi32_ps(second));
            let halves = _mm512_permutex2var_epi16(first, _mm512_loadu_si512(UPPER.as_ptr().cast()), second);
            _mm512_storeu_si512(p.cast(), halves);
        }
    }
    #[inline(always)]
    unsafe fn load_weights(p: *const u8) -> Self::W {
        // SAFETY: the features are present and sixty-four bytes are readable, by the trait's contract.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: the features are present; a prefetch of any address has no effect that a program could see.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn low_nibbles(w: Self::W) -> Self::W {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_and_si512(w, _mm512_set1_epi8(15)) }
    }
    #[inline(always)]
    unsafe fn high_nibbles(w: Self::W) -> Self::W {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_and_si512(_mm512_srli_epi16::<4>(w), _mm512_set1_epi8(15)) }
    }
    #[inline(always)]
    unsafe fn add_fifth_bits(w: Self::W, p: *const u8) -> Self::W {
        // SAFETY: the features are present and eight bytes are readable, by the trait's contract.
        unsafe {
            let bits = p.cast::<u64>().read_unaligned();
            _mm512_mask_add_epi8(w, bits, w, _mm512_set1_epi8(16))
        }
    }
    #[inline(always)]
    unsafe fn add_upper_bits(w: Self::W, upper: Self::W, j: usize) -> Self::W {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe {
            // Bits 2 j move to bits 4; the mask drops what crosses from a neighbour.
            let moved = match j {
                0 => _mm512_slli_epi16::<4>(upper),
                1 => _mm512_slli_epi16::<2>(upper),
                2 => upper,
                _ => _mm512_srli_epi16::<2>(upper),
            };
            _mm512_or_si512(w, _mm512_and_si512(moved, _mm512_set1_epi8(0x30)))
        }
    }
    #[inline(always)]
    unsafe fn small_dot(sum: Self::I, w: Self::W, x: i32) -> Self::I {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(x)) }
    }
    #[inline(always)]
    unsafe fn nibble_start() -> Self::N {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_setzero_si512() }
    }
    #[inline(always)]
    unsafe fn nibble_dot(sum: Self::N, w: Self::W, x: i32) -> Self::N {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(x)) }
    }
    #[inline(always)]
    unsafe fn nibble_finish(sum: Self::N, bias: i32) -> Self::I {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_add_epi32(sum, _mm512_set1_epi32(bias)) }
    }
    #[inline(always)]
    unsafe fn byte_start(total: i32) -> Self::I {
        // Weights stay biased by 128, so the sum starts at minus 128 times the activations' total. Wrapping, because the total of a row
        // that is not finite is arbitrary (and its results are NaN by their scale).
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_set1_epi32(total.wrapping_mul(-128)) }
    }
    #[inline(always)]
    unsafe fn byte_dot(sum: Self::I, w: Self::W, x: i32) -> Self::I {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(x)) }
    }
    #[inline(always)]
    unsafe fn reduce_sum(x: Self::F) -> f32 {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe {
            let x = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x));
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
        }
    }
    #[inline(always)]
    unsafe fn reduce_sum_int(x: Self::I) -> i32 {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { _mm512_reduce_add_epi32(x) }
    }
    #[inline(always)]
    unsafe fn reduce_max(x: Self::F) -> f32 {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe {
            let x = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x));
            let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps::<1>(x, x)))
        }
    }
}
