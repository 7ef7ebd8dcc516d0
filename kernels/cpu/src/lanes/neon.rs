//! Sixteen lanes in four 128-bit registers, with integer products by the dot-product instruction.
//!
//! NEON itself is part of the AArch64 targets; the dot products are not in every CPU.

use std::arch::aarch64::*;
use std::arch::asm;

use super::Lanes;

/// NEON with dot products.
pub(crate) struct Neon;

/// Four registers: lanes 0..4, 4..8, 8..12 and 12..16.
type Quad<T> = [T; 4];

#[inline(always)]
fn each<T>(f: impl Fn(usize) -> T) -> Quad<T> {
    [f(0), f(1), f(2), f(3)]
}

/// `if a > b { a } else { b }`. The instruction of that name gives NaN where either is one.
#[inline(always)]
fn greater(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    // SAFETY: NEON is part of the target.
    unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
}

/// Adds to each lane four products of signed bytes.
///
/// # Safety
/// The CPU has the dot-product instructions.
#[inline(always)]
unsafe fn dot(sum: int32x4_t, w: uint8x16_t, x: int32x4_t) -> int32x4_t {
    let mut sum = sum;
    // The intrinsic is not stable yet.
    // SAFETY: the instruction is there, as the caller vouches, and it touches registers alone.
    unsafe {
        asm!("sdot {sum:v}.4s, {w:v}.16b, {x:v}.16b", sum = inout(vreg) sum, w = in(vreg) w, x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags));
    }
    sum
}

impl Lanes for Neon {
    type F = Quad<float32x4_t>;
    type I = Quad<int32x4_t>;
    type W = Quad<uint8x16_t>;
    type N = Quad<int32x4_t>;

    const GEMM_ROWS: usize = 4;
    const QUERY_ROWS: usize = 3;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { [vdupq_n_f32(x); 4] }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        // SAFETY: the features are present and sixteen f32 are readable, by the trait's contract.
        unsafe { each(|i| vld1q_f32(p.add(i * 4))) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: Self::F) {
        // SAFETY: the features are present and sixteen f32 are writable, by the trait's contract.
        unsafe {
            for i in 0..4 {
                vst1q_f32(p.add(i * 4), x[i])
            }
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::F {
        // SAFETY: the features are present and sixteen halves are readable, by the trait's contract.
        unsafe { each(|i| vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p.add(i * 4))))) }
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(p: *const u16) -> (Self::F, Self::F) {
        // SAFETY: the features are present and sixteen pairs are readable, by the trait's contract.
        unsafe {
            let pairs = each(|i| vreinterpretq_u32_u16(vld1q_u16(p.add(i * 8))));
            let high = vdupq_n_u32(0xffff_0000);
            (
                each(|i| vreinterpretq_f32_u32(vshlq_n_u32::<16>(pairs[i]))),
                each(|i| vreinterpretq_f32_u32(vandq_u32(pairs[i], high))),
            )
        }
    }
    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> Self::F {
        // SAFETY: the features are present and sixteen bytes are readable, by the trait's contract.
        unsafe {
            let bytes = vld1q_u8(p);
            let (low, high) = (vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes));
            [
                vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))),
                vcvtq_f32_u32(vmovl_high_u16(low)),
                vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))),
                vcvtq_f32_u32(vmovl_high_u16(high)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_signed(p: *const i8) -> Self::I {
        // SAFETY: the features are present and sixteen bytes are readable, by the trait's contract.
        unsafe {
            let bytes = vld1q_s8(p);
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
            [vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)]
        }
    }
    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { each(|i| vaddq_f32(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { each(|i| vsubq_f32(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { each(|i| vmulq_f32(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { each(|i| vdivq_f32(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { each(|i| vfmaq_f32(c[i], a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        each(|i| greater(a[i], b[i]))
    }
    #[inline(always)]
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { each(|i| vbslq_f32(vcltq_f32(a[i], b[i]), a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn abs(a: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { each(|i| vabsq_f32(a[i])) }
    }
    #[inline(always)]
    unsafe fn swap_pairs(a: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { each(|i| vrev64q_f32(a[i])) }
    }
    #[inline(always)]
    unsafe fn first(n: usize, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the array holds four u32.
        unsafe {
            let lanes = [0u32, 1, 2, 3];
            let lane = vld1q_u32(lanes.as_ptr());
            each(|i| {
                let here = vdupq_n_u32((n as u32).saturating_sub(i as u32 * 4));
                vbslq_f32(vcltq_u32(lane, here), a[i], b[i])
            })
        }
    }
    #[inline(always)]
    unsafe fn keep_above(x: Self::F, limit: f32, a: Self::F) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe {
            let limit = vdupq_n_f32(limit);
            each(|i| vreinterpretq_f32_u32(vandq_u32(vcgtq_f32(x[i], limit), vreinterpretq_u32_f32(a[i]))))
        }
    }
    #[inline(always)]
    unsafe fn above(x: Self::F, limit: f32) -> u32 {
        let lanes = [1u32, 2, 4, 8];
        // SAFETY: the tier's features are present, by the trait's contract; the array holds four u32.
        unsafe {
            let (limit, lane) = (vdupq_n_f32(limit), vld1q_u32(lanes.as_ptr()));
            (0..4).fold(0, |bits, i| bits | vaddvq_u32(vandq_u32(vcgtq_f32(x[i], limit), lane)) << (4 * i))
        }
    }
    #[inline(always)]
    unsafe fn choose(bits: u32, a: Self::F, b: Self::F) -> Self::F {
        let lanes = [1u32, 2, 4, 8];
        // SAFETY: the tier's features are present, by the trait's contract; the array holds four u32.
        unsafe {
            let lane = vld1q_u32(lanes.as_ptr());
            each(|i| vbslq_f32(vtstq_u32(vdupq_n_u32(bits >> (4 * i)), lane), a[i], b[i]))
        }
    }
    #[inline(always)]
    unsafe fn splat_int(x: i32) -> Self::I {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { [vdupq_n_s32(x); 4] }
    }
    #[inline(always)]
    unsafe fn round(x: Self::F) -> Self::I {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { each(|i| vcvtnq_s32_f32(x[i])) }
    }
    #[inline(always)]
    unsafe fn to_float(x: Self::I) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { each(|i| vcvtq_f32_s32(x[i])) }
    }
    #[inline(always)]
    unsafe fn pow2(n: Self::I) -> Self::F {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe {
            let bias = vdupq_n_s32(127);
            each(|i| vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(n[i], bias))))
        }
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, x: Self::I) {
        // SAFETY: the features are present and sixteen bytes are writable, by the trait's contract.
        unsafe {
            let low = vcombine_s16(vmovn_s32(x[0]), vmovn_s32(x[1]));
            let high = vcombine_s16(vmovn_s32(x[2]), vmovn_s32(x[3]));
            vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)))
        }
    }
    #[inline(always)]
    unsafe fn join_planes(high: Self::I, low: Self::I) -> Self::I {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { each(|i| vaddq_s32(vshlq_n_s32::<7>(high[i]), low[i])) }
    }
    #[inline(always)]
    unsafe fn add_int(a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { each(|i| vaddq_s32(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn sub_int(a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { each(|i| vsubq_s32(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn mul_int(a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { each(|i| vmulq_s32(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn div128(a: Self::I) -> Self::I {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { each(|i| vshrq_n_s32::<7>(a[i])) }
    }
    #[inline(always)]
    unsafe fn store_int(p: *mut i32, x: Self::I) {
        // SAFETY: the features are present and sixteen i32 are writable, by the trait's contract.
        unsafe {
            for i in 0..4 {
                vst1q_s32(p.add(i * 4), x[i])
            }
        }
    }
    #[inline(always)]
    unsafe fn load_weights(p: *const u8) -> Self::W {
        // SAFETY: the features are present and sixty-four bytes are readable, by the trait's contract.
        unsafe { each(|i| vld1q_u8(p.add(i * 16))) }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a prefetch of any address has no effect that a program could see.
        unsafe { asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(nostack, preserves_flags, readonly)) }
    }
    #[inline(always)]
    unsafe fn low_nibbles(w: Self::W) -> Self::W {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { each(|i| vandq_u8(w[i], vdupq_n_u8(15))) }
    }
    #[inline(always)]
    unsafe fn high_nibbles(w: Self::W) -> Self::W {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { each(|i| vshrq_n_u8::<4>(w[i])) }
    }
    #[inline(always)]
    unsafe fn add_fifth_bits(w: Self::W, p: *const u8) -> Self::W {
        // SAFETY: the features are present and eight bytes are readable, by the trait's contract.
        unsafe {
            let bits = p.cast::<[u8; 8]>().read();
            // Byte i of a half looks at bit i of that half's byte.
            let bit = vcreate_u8(0x8040_2010_0804_0201);
            let bit = vcombine_u8(bit, bit);
            each(|i| {
                let bytes = vcombine_u8(vdup_n_u8(bits[i * 2]), vdup_n_u8(bits[i * 2 + 1]));
                vorrq_u8(w[i], vandq_u8(vtstq_u8(bytes, bit), vdupq_n_u8(16)))
            })
        }
    }
    #[inline(always)]
    unsafe fn add_upper_bits(w: Self::W, upper: Self::W, j: usize) -> Self::W {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe {
            each(|i| {
                // Bits 2 j move to bits 4.
                let moved = match j {
                    0 => vshlq_n_u8::<4>(upper[i]),
                    1 => vshlq_n_u8::<2>(upper[i]),
                    2 => upper[i],
                    _ => vshrq_n_u8::<2>(upper[i]),
                };
                vorrq_u8(w[i], vandq_u8(moved, vdupq_n_u8(0x30)))
            })
        }
    }
    #[inline(always)]
    unsafe fn small_dot(sum: Self::I, w: Self::W, x: i32) -> Self::I {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe {
            let x = vdupq_n_s32(x);
            each(|i| dot(sum[i], w[i], x))
        }
    }
    #[inline(always)]
    unsafe fn nibble_start() -> Self::N {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { [vdupq_n_s32(0); 4] }
    }
    #[inline(always)]
    unsafe fn nibble_dot(sum: Self::N, w: Self::W, x: i32) -> Self::N {
        // SAFETY: the same contract.
        unsafe { Self::small_dot(sum, w, x) }
    }
    #[inline(always)]
    unsafe fn nibble_finish(sum: Self::N, bias: i32) -> Self::I {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { each(|i| vaddq_s32(sum[i], vdupq_n_s32(bias))) }
    }
    #[inline(always)]
    unsafe fn byte_start(_total: i32) -> Self::I {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe { [vdupq_n_s32(0); 4] }
    }
    #[inline(always)]
    unsafe fn byte_dot(sum: Self::I, w: Self::W, x: i32) -> Self::I {
        // SAFETY: the same contract; any signed byte is in range.
        unsafe {
            // Less 128, a weight is a signed byte, as the instruction takes it.
            let w = each(|i| veorq_u8(w[i], vdupq_n_u8(128)));
            Self::small_dot(sum, w, x)
        }
    }
    #[inline(always)]
    unsafe fn reduce_sum(x: Self::F) -> f32 {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe {
            let x = vaddq_f32(vaddq_f32(x[0], x[2]), vaddq_f32(x[1], x[3]));
            let x = vadd_f32(vget_low_f32(x), vget_high_f32(x));
            vget_lane_f32::<0>(vpadd_f32(x, x))
        }
    }
    #[inline(always)]
    unsafe fn reduce_max(x: Self::F) -> f32 {
        // SAFETY: the tier's features are present, by the trait's contract.
        unsafe {
            let x = greater(greater(x[0], x[2]), greater(x[1], x[3]));
            let x = greater(x, vextq_f32::<2>(x, x));
            vgetq_lane_f32::<0>(greater(x, vextq_f32::<1>(x, x)))
        }
    }
}
