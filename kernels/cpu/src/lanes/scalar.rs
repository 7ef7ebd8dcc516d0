//! The oracle: sixteen lanes as plain arrays, on any CPU.

use super::{LANES, Lanes};
use crate::half::{bf16_to_f32, f16_to_f32};

/// The tier every other tier must equal bit by bit.
pub(crate) struct Scalar;

#[inline(always)]
fn map2(a: [f32; LANES], b: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    let mut out = a;
    for (o, b) in out.iter_mut().zip(b) {
        *o = f(*o, b);
    }
    out
}

#[inline(always)]
fn dot4(sum: i32, w: [i32; 4], x: i32) -> i32 {
    x.to_le_bytes().iter().zip(w).fold(sum, |sum, (&x, w)| sum + w * i32::from(x as i8))
}

impl Lanes for Scalar {
    type F = [f32; LANES];
    type I = [i32; LANES];
    type W = [u8; 64];
    type N = [i32; LANES];

    const GEMM_ROWS: usize = 4;
    const QUERY_ROWS: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        // SAFETY: sixteen f32 are readable, by the trait's contract.
        unsafe { p.cast::<[f32; LANES]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: Self::F) {
        // SAFETY: sixteen f32 are writable, by the trait's contract.
        unsafe { p.cast::<[f32; LANES]>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::F {
        // SAFETY: sixteen halves are readable, by the trait's contract.
        let bits = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        bits.map(f16_to_f32)
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(p: *const u16) -> (Self::F, Self::F) {
        // SAFETY: sixteen pairs are readable, by the trait's contract.
        let pairs = unsafe { p.cast::<[[u16; 2]; LANES]>().read_unaligned() };
        (pairs.map(|pair| bf16_to_f32(pair[0])), pairs.map(|pair| bf16_to_f32(pair[1])))
    }
    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> Self::F {
        // SAFETY: sixteen bytes are readable, by the trait's contract.
        unsafe { p.cast::<[u8; LANES]>().read() }.map(f32::from)
    }
    #[inline(always)]
    unsafe fn load_signed(p: *const i8) -> Self::I {
        // SAFETY: sixteen bytes are readable, by the trait's contract.
        unsafe { p.cast::<[i8; LANES]>().read() }.map(i32::from)
    }
    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        let mut out = c;
        for i in 0..LANES {
            out[i] = a[i].mul_add(b[i], c[i]);
        }
        out
    }
    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    unsafe fn abs(a: Self::F) -> Self::F {
        a.map(f32::abs)
    }
    #[inline(always)]
    unsafe fn swap_pairs(a: Self::F) -> Self::F {
        let mut out = a;
        for pair in out.chunks_exact_mut(2) {
            pair.swap(0, 1);
        }
        out
    }
    #[inline(always)]
    unsafe fn first(n: usize, a: Self::F, b: Self::F) -> Self::F {
        let mut out = b;
        out[..n].copy_from_slice(&a[..n]);
        out
    }
    #[inline(always)]
    unsafe fn keep_above(x: Self::F, limit: f32, a: Self::F) -> Self::F {
        map2(x, a, |x, a| if x > limit { a } else { 0.0 })
    }
    #[inline(always)]
    unsafe fn above(x: Self::F, limit: f32) -> u32 {
        x.iter().enumerate().fold(0, |bits, (i, &x)| bits | u32::from(x > limit) << i)
    }
    #[inline(always)]
    unsafe fn choose(bits: u32, a: Self::F, b: Self::F) -> Self::F {
        let mut out = b;
        for i in 0..LANES {
            if bits >> i & 1 == 1 {
                out[i] = a[i];
            }
        }
        out
    }
    #[inline(always)]
    unsafe fn splat_int(x: i32) -> Self::I {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn round(x: Self::F) -> Self::I {
        x.map(|x| x.round_ties_even() as i32)
    }
    #[inline(always)]
    unsafe fn to_float(x: Self::I) -> Self::F {
        x.map(|x| x as f32)
    }
    #[inline(always)]
    unsafe fn pow2(n: Self::I) -> Self::F {
        n.map(|n| f32::from_bits(((n + 127) << 23) as u32))
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, x: Self::I) {
        // SAFETY: sixteen bytes are writable, by the trait's contract.
        unsafe { p.cast::<[i8; LANES]>().write_unaligned(x.map(|x| x as i8)) }
    }
    #[inline(always)]
    unsafe fn join_planes(high: Self::I, low: Self::I) -> Self::I {
        let mut out = low;
        for (o, high) in out.iter_mut().zip(high) {
            *o += high * 128;
        }
        out
    }
    #[inline(always)]
    unsafe fn sub_int(a: Self::I, b: Self::I) -> Self::I {
        let mut out = a;
        for (o, b) in out.iter_mut().zip(b) {
            *o -= b;
        }
        out
    }
    #[inline(always)]
    unsafe fn mul_int(a: Self::I, b: Self::I) -> Self::I {
        let mut out = a;
        for (o, b) in out.iter_mut().zip(b) {
            *o = o.wrapping_mul(b);
        }
        out
    }
    #[inline(always)]
    unsafe fn div128(a: Self::I) -> Self::I {
        a.map(|a| a >> 7)
    }
    #[inline(always)]
    unsafe fn add_int(a: Self::I, b: Self::I) -> Self::I {
        let mut out = a;
        for (o, b) in out.iter_mut().zip(b) {
            *o += b;
        }
        out
    }
    #[inline(always)]
    unsafe fn store_int(p: *mut i32, x: Self::I) {
        // SAFETY: sixteen i32 are writable, by the trait's contract.
        unsafe { p.cast::<[i32; LANES]>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn load_weights(p: *const u8) -> Self::W {
        // SAFETY: sixty-four bytes are readable, by the trait's contract.
        unsafe { p.cast::<[u8; 64]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn prefetch(_p: *const u8) {}
    #[inline(always)]
    unsafe fn low_nibbles(w: Self::W) -> Self::W {
        w.map(|b| b & 15)
    }
    #[inline(always)]
    unsafe fn high_nibbles(w: Self::W) -> Self::W {
        w.map(|b| b >> 4)
    }
    #[inline(always)]
    unsafe fn add_fifth_bits(w: Self::W, p: *const u8) -> Self::W {
        // SAFETY: eight bytes are readable, by the trait's contract.
        let bits = u64::from_le_bytes(unsafe { p.cast::<[u8; 8]>().read() });
        let mut out = w;
        for (i, byte) in out.iter_mut().enumerate() {
            *byte += (bits >> i & 1) as u8 * 16;
        }
        out
    }
    #[inline(always)]
    unsafe fn add_upper_bits(w: Self::W, upper: Self::W, j: usize) -> Self::W {
        let mut out = w;
        for (byte, upper) in out.iter_mut().zip(upper) {
            *byte += (upper >> (2 * j) & 3) * 16;
        }
        out
    }
    #[inline(always)]
    unsafe fn small_dot(sum: Self::I, w: Self::W, x: i32) -> Self::I {
        // SAFETY: the trait's contract is the same, but for the range of the weights, which does not matter here.
        unsafe { Self::nibble_dot(sum, w, x) }
    }
    #[inline(always)]
    unsafe fn nibble_start() -> Self::N {
        [0; LANES]
    }
    #[inline(always)]
    unsafe fn nibble_dot(sum: Self::N, w: Self::W, x: i32) -> Self::N {
        let mut out = sum;
        for (i, o) in out.iter_mut().enumerate() {
            *o = dot4(*o, [0, 1, 2, 3].map(|j| i32::from(w[i * 4 + j])), x);
        }
        out
    }
    #[inline(always)]
    unsafe fn nibble_finish(sum: Self::N, bias: i32) -> Self::I {
        sum.map(|s| s + bias)
    }
    #[inline(always)]
    unsafe fn byte_start(_total: i32) -> Self::I {
        [0; LANES]
    }
    #[inline(always)]
    unsafe fn byte_dot(sum: Self::I, w: Self::W, x: i32) -> Self::I {
        let mut out = sum;
        for (i, o) in out.iter_mut().enumerate() {
            *o = dot4(*o, [0, 1, 2, 3].map(|j| i32::from(w[i * 4 + j]) - 128), x);
        }
        out
    }
}
