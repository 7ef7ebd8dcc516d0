//! Sixteen lanes in two 256-bit registers.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::Lanes;
use super::avx2_products::{MultiplyAdd, Products, Vnni};

/// AVX2, FMA and F16C.
pub(crate) type Avx2 = Wide256<MultiplyAdd>;

/// The same with AVX-VNNI, which differs in integer products alone.
pub(crate) type AvxVnni = Wide256<Vnni>;

/// AVX2, FMA and F16C, with what `P` needs.
pub(crate) struct Wide256<P>(PhantomData<P>);

/// Two registers: lanes 0..8 and 8..16.
#[derive(Clone, Copy)]
pub(crate) struct Pair<T>(pub(super) T, pub(super) T);

impl<P: Products> Lanes for Wide256<P> {
    type F = Pair<__m256>;
    type I = Pair<__m256i>;
    type W = Pair<__m256i>;
    /// What `P` makes of it.
    type N = Pair<__m256i>;

    const GEMM_ROWS: usize = 4;
    const QUERY_ROWS: usize = 3;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { Pair(_mm256_set1_ps(x), _mm256_set1_ps(x)) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        // SAFETY: the features are present and sixteen f32 are readable, by the trait's contract.
        unsafe { Pair(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: Self::F) {
        // SAFETY: the features are present and sixteen f32 are writable, by the trait's contract.
        unsafe {
            _mm256_storeu_ps(p, x.0);
            _mm256_storeu_ps(p.add(8), x.1);
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::F {
        // SAFETY: the features are present and sixteen halves are readable, by the trait's contract.
        unsafe { Pair(_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast()))) }
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(p: *const u16) -> (Self::F, Self::F) {
        // SAFETY: the features are present and sixteen pairs are readable, by the trait's contract.
        unsafe {
            let (a, b) = (_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(16).cast()));
            let high = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            (
                Pair(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(a)), _mm256_castsi256_ps(_mm256_slli_epi32::<16>(b))),
                Pair(_mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high))),
            )
        }
    }
    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> Self::F {
        // SAFETY: the features are present and sixteen bytes are readable, by the trait's contract.
        unsafe {
            let bytes = _mm_loadu_si128(p.cast());
            let (low, high) = (_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128::<8>(bytes)));
            Pair(_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high))
        }
    }
    #[inline(always)]
    unsafe fn load_signed(p: *const i8) -> Self::I {
        // SAFETY: the features are present and sixteen bytes are readable, by the trait's contract.
        unsafe {
            let bytes = _mm_loadu_si128(p.cast());
            Pair(_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128::<8>(bytes)))
        }
    }
    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { Pair(_mm256_add_ps(a.0, b.0), _mm256_add_ps(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { Pair(_mm256_sub_ps(a.0, b.0), _mm256_sub_ps(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { Pair(_mm256_mul_ps(a.0, b.0), _mm256_mul_ps(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { Pair(_mm256_div_ps(a.0, b.0), _mm256_div_ps(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { Pair(_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1)) }
    }
    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { Pair(_mm256_max_ps(a.0, b.0), _mm256_max_ps(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { Pair(_mm256_min_ps(a.0, b.0), _mm256_min_ps(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn abs(a: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe {
            let sign = _mm256_set1_ps(-0.0);
            Pair(_mm256_andnot_ps(sign, a.0), _mm256_andnot_ps(sign, a.1))
        }
    }
    #[inline(always)]
    unsafe fn swap_pairs(a: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { Pair(_mm256_permute_ps::<0b10_11_00_01>(a.0), _mm256_permute_ps::<0b10_11_00_01>(a.1)) }
    }
    #[inline(always)]
    unsafe fn first(n: usize, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe {
            let n = _mm256_set1_epi32(n as i32);
            let low = _mm256_cmpgt_epi32(n, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
            let high = _mm256_cmpgt_epi32(n, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15));
            Pair(
                _mm256_blendv_ps(b.0, a.0, _mm256_castsi256_ps(low)),
                _mm256_blendv_ps(b.1, a.1, _mm256_castsi256_ps(high)),
            )
        }
    }
    #[inline(always)]
    unsafe fn keep_above(x: Self::F, limit: f32, a: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe {
            let limit = _mm256_set1_ps(limit);
            Pair(
                _mm256_and_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(x.0, limit), a.0),
                _mm256_and_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(x.1, limit), a.1),
            )
        }
    }
    #[inline(always)]
    unsafe fn above(x: Self::F, limit: f32) -> u32 {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe {
            let limit = _mm256_set1_ps(limit);
            let low = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(x.0, limit));
            let high = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(x.1, limit));
            (low | high << 8) as u32
        }
    }
    #[inline(always)]
    unsafe fn choose(bits: u32, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe {
            let lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let mask = |bits: u32| {
                _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits as i32), lane), lane))
            };
            Pair(_mm256_blendv_ps(b.0, a.0, mask(bits)), _mm256_blendv_ps(b.1, a.1, mask(bits >> 8)))
        }
    }
    #[inline(always)]
    unsafe fn splat_int(x: i32) -> Self::I {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { Pair(_mm256_set1_epi32(x), _mm256_set1_epi32(x)) }
    }
    #[inline(always)]
    unsafe fn round(x: Self::F) -> Self::I {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { Pair(_mm256_cvtps_epi32(x.0), _mm256_cvtps_epi32(x.1)) }
    }
    #[inline(always)]
    unsafe fn to_float(x: Self::I) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { Pair(_mm256_cvtepi32_ps(x.0), _mm256_cvtepi32_ps(x.1)) }
    }
    #[inline(always)]
    unsafe fn pow2(n: Self::I) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe {
            let bias = _mm256_set1_epi32(127);
            Pair(
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n.0, bias))),
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n.1, bias))),
            )
        }
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, x: Self::I) {
        let mut wide = [0i32; 16];
        // SAFETY: the features are present, the array holds sixteen i32, and sixteen bytes are writable, by the trait's contract.
        unsafe {
            Self::store_int(wide.as_mut_ptr(), x);
            p.cast::<[i8; 16]>().write_unaligned(wide.map(|x| x as i8));
        }
    }
    #[inline(always)]
    unsafe fn join_planes(high: Self::I, low: Self::I) -> Self::I {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe {
            Pair(
                _mm256_add_epi32(_mm256_slli_epi32::<7>(high.0), low.0),
                _mm256_add_epi32(_mm256_slli_epi32::<7>(high.1), low.1),
            )
        }
    }
    #[inline(always)]
    unsafe fn sub_int(a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { Pair(_mm256_sub_epi32(a.0, b.0), _mm256_sub_epi32(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn mul_int(a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { Pair(_mm256_mullo_epi32(a.0, b.0), _mm256_mullo_epi32(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn div128(a: Self::I) -> Self::I {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { Pair(_mm256_srai_epi32::<7>(a.0), _mm256_srai_epi32::<7>(a.1)) }
    }
    #[inline(always)]
    unsafe fn add_int(a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { Pair(_mm256_add_epi32(a.0, b.0), _mm256_add_epi32(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn store_int(p: *mut i32, x: Self::I) {
        // SAFETY: the features are present and sixteen i32 are writable, by the trait's contract.
        unsafe {
            _mm256_storeu_si256(p.cast(), x.0);
            _mm256_storeu_si256(p.add(8).cast(), x.1);
        }
    }
    #[inline(always)]
    unsafe fn load_weights(p: *const u8) -> Self::W {
        // SAFETY: the features are present and sixty-four bytes are readable, by the trait's contract.
        unsafe { Pair(_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast())) }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: the features are present; a prefetch of any address has no effect that a program could see.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn low_nibbles(w: Self::W) -> Self::W {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe {
            let mask = _mm256_set1_epi8(15);
            Pair(_mm256_and_si256(w.0, mask), _mm256_and_si256(w.1, mask))
        }
    }
    #[inline(always)]
    unsafe fn high_nibbles(w: Self::W) -> Self::W {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe {
            let mask = _mm256_set1_epi8(15);
            Pair(
                _mm256_and_si256(_mm256_srli_epi16::<4>(w.0), mask),
                _mm256_and_si256(_mm256_srli_epi16::<4>(w.1), mask),
            )
        }
    }
    #[inline(always)]
    unsafe fn add_fifth_bits(w: Self::W, p: *const u8) -> Self::W {
        // SAFETY: the features are present and eight bytes are readable, by the trait's contract.
        unsafe {
            let words = p.cast::<[i32; 2]>().read_unaligned();
            // Byte i of the result looks at bit i % 8 of byte i / 8; the shuffle stays inside each half, whose bytes 0..4 are the word's.
            let spread = _mm256_setr_epi8(
                0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3,
            );
            let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
            let sixteen = _mm256_set1_epi8(16);
            let fifth = |word: i32| {
                let bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(word), spread);
                _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit), sixteen)
            };
            Pair(_mm256_or_si256(w.0, fifth(words[0])), _mm256_or_si256(w.1, fifth(words[1])))
        }
    }
    #[inline(always)]
    unsafe fn add_upper_bits(w: Self::W, upper: Self::W, j: usize) -> Self::W {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe {
            let mask = _mm256_set1_epi8(0x30);
            // Bits 2 j move to bits 4; the mask drops what crosses from a neighbour.
            let (low, high) = match j {
                0 => (_mm256_slli_epi16::<4>(upper.0), _mm256_slli_epi16::<4>(upper.1)),
                1 => (_mm256_slli_epi16::<2>(upper.0), _mm256_slli_epi16::<2>(upper.1)),
                2 => (upper.0, upper.1),
                _ => (_mm256_srli_epi16::<2>(upper.0), _mm256_srli_epi16::<2>(upper.1)),
            };
            Pair(_mm256_or_si256(w.0, _mm256_and_si256(low, mask)), _mm256_or_si256(w.1, _mm256_and_si256(high, mask)))
        }
    }
    #[inline(always)]
    unsafe fn small_dot(sum: Self::I, w: Self::W, x: i32) -> Self::I {
        // SAFETY: the same contract.
        unsafe { P::small_dot(sum, w, x) }
    }
    #[inline(always)]
    unsafe fn nibble_start() -> Self::N {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { Pair(_mm256_setzero_si256(), _mm256_setzero_si256()) }
    }
    #[inline(always)]
    unsafe fn nibble_dot(sum: Self::N, w: Self::W, x: i32) -> Self::N {
        // SAFETY: the same contract.
        unsafe { P::nibble_dot(sum, w, x) }
    }
    #[inline(always)]
    unsafe fn nibble_finish(sum: Self::N, bias: i32) -> Self::I {
        // SAFETY: the same contract.
        unsafe { P::nibble_finish(sum, bias) }
    }
    #[inline(always)]
    unsafe fn byte_start(total: i32) -> Self::I {
        // SAFETY: the same contract.
        unsafe { P::byte_start(total) }
    }
    #[inline(always)]
    unsafe fn byte_dot(sum: Self::I, w: Self::W, x: i32) -> Self::I {
        // SAFETY: the same contract.
        unsafe { P::byte_dot(sum, w, x) }
    }
    #[inline(always)]
    unsafe fn reduce_sum(x: Self::F) -> f32 {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe {
            let x = _mm256_add_ps(x.0, x.1);
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
        }
    }
    #[inline(always)]
    unsafe fn reduce_max(x: Self::F) -> f32 {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe {
            let x = _mm256_max_ps(x.0, x.1);
            let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps::<1>(x, x)))
        }
    }
}
