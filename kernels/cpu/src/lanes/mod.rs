//! Sixteen lanes: the one vocabulary every kernel body is written in.
//!
//! A kernel is written once, against [`Lanes`], and instantiated per tier. Equal bits on all tiers are then a property of this trait
//! alone: every operation below is either exact or correctly rounded by IEEE 754 (add, mul, div, sqrt, fused multiply-add, conversions),
//! so an instance has no freedom in its result. Reductions across lanes have one fixed tree and live here, not in the instances.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx2_products;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
pub(crate) mod scalar;

/// How many values a lane group holds, on every tier.
pub(crate) const LANES: usize = 16;

/// Exponents at or below this give zero; e^-87 is just above the smallest normal f32.
const EXP_LOWEST: f32 = -87.0;

/// Sixteen-lane arithmetic of one tier.
///
/// # Safety
/// Every function may be called only where the tier's CPU features are present, and every pointer must be valid for the sixteen values
/// (or, for weights, the 64 bytes) that its name promises. No alignment is required.
pub(crate) trait Lanes {
    /// Sixteen f32.
    type F: Copy;
    /// Sixteen i32.
    type I: Copy;
    /// Sixty-four weight bytes: four consecutive K of sixteen columns.
    type W: Copy;
    /// Running integer sums of one 32-block of nibble weights.
    type N: Copy;

    /// Rows that one pass of the matrix product keeps in registers; at most [`crate::activation::PANEL_ROWS`].
    const GEMM_ROWS: usize;
    /// Query heads that one pass of attention keeps in registers.
    const QUERY_ROWS: usize;

    unsafe fn splat(x: f32) -> Self::F;
    unsafe fn load(p: *const f32) -> Self::F;
    unsafe fn store(p: *mut f32, x: Self::F);
    /// Sixteen IEEE half floats, widened exactly.
    unsafe fn load_f16(p: *const u16) -> Self::F;
    /// Sixteen pairs of bfloat16: the first of each pair, and the second, widened exactly.
    unsafe fn load_bf16_pairs(p: *const u16) -> (Self::F, Self::F);
    /// Sixteen unsigned bytes, as floats.
    unsafe fn load_bytes(p: *const u8) -> Self::F;
    /// Sixteen signed bytes, widened.
    unsafe fn load_signed(p: *const i8) -> Self::I;
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `if a > b { a } else { b }`, lane by lane (so a NaN in `a` yields `b`).
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// `if a < b { a } else { b }`, lane by lane.
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn abs(a: Self::F) -> Self::F;
    /// Exchanges lanes 2i and 2i + 1.
    unsafe fn swap_pairs(a: Self::F) -> Self::F;
    /// Lanes below `n` from `a`, the others from `b`; `n` may be 0..=16.
    unsafe fn first(n: usize, a: Self::F, b: Self::F) -> Self::F;

    /// Lanes of `a` where `x > limit`, zero elsewhere.
    unsafe fn keep_above(x: Self::F, limit: f32, a: Self::F) -> Self::F;
    /// `sum + a` in lanes where `x > limit`, `sum` elsewhere; no lane of `sum` is -0.0.
    #[inline(always)]
    unsafe fn add_above(sum: Self::F, x: Self::F, limit: f32, a: Self::F) -> Self::F {
        // SAFETY: arithmetic only; the caller vouches for the tier. Adding zero changes no other sum.
        unsafe { Self::add(sum, Self::keep_above(x, limit, a)) }
    }
    /// Bit i: lane i of `x` is greater than `limit`. The other bits are 0.
    unsafe fn above(x: Self::F, limit: f32) -> u32;
    /// Lane i of `a` where bit i is set, of `b` elsewhere.
    unsafe fn choose(bits: u32, a: Self::F, b: Self::F) -> Self::F;

    unsafe fn splat_int(x: i32) -> Self::I;
    /// Nearest integer, ties to even. The caller keeps the values inside i32.
    unsafe fn round(x: Self::F) -> Self::I;
    unsafe fn to_float(x: Self::I) -> Self::F;
    /// `2^n`; the caller keeps `n` in -126..=127.
    unsafe fn pow2(n: Self::I) -> Self::F;
    /// Stores sixteen values as i8; the caller keeps them in -127..=127.
    unsafe fn store_i8(p: *mut i8, x: Self::I);
    /// `high * 128 + low`, which the caller keeps inside i32.
    unsafe fn join_planes(high: Self::I, low: Self::I) -> Self::I;
    unsafe fn add_int(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn sub_int(a: Self::I, b: Self::I) -> Self::I;
    /// `a * b`, which the caller keeps inside i32.
    unsafe fn mul_int(a: Self::I, b: Self::I) -> Self::I;
    /// `a >> 7`, rounding down.
    unsafe fn div128(a: Self::I) -> Self::I;
    unsafe fn store_int(p: *mut i32, x: Self::I);
    /// Stores thirty-two values, each of which bfloat16 holds exactly, as bfloat16 with the middle two of each four exchanged.
    #[inline(always)]
    unsafe fn store_bf16_swapped(p: *mut u16, first: Self::I, second: Self::I) {
        let mut values = [0f32; 2 * LANES];
        // SAFETY: the array holds thirty-two values; the caller vouches for the tier and for thirty-two values at `p`.
        unsafe {
            Self::store(values.as_mut_ptr(), Self::to_float(first));
            Self::store(values.as_mut_ptr().add(LANES), Self::to_float(second));
            for (i, value) in values.into_iter().enumerate() {
                p.add(i & !3 | [0, 2, 1, 3][i & 3]).write((value.to_bits() >> 16) as u16);
            }
        }
    }

    unsafe fn load_weights(p: *const u8) -> Self::W;
    /// Asks for the cache line of `p`, which may be any address.
    unsafe fn prefetch(p: *const u8);
    /// The low nibble of each byte.
    unsafe fn low_nibbles(w: Self::W) -> Self::W;
    /// The high nibble of each byte.
    unsafe fn high_nibbles(w: Self::W) -> Self::W;
    /// Adds 16 to each byte whose bit is set in the 64 bits at `p`; the bytes are below 16.
    unsafe fn add_fifth_bits(w: Self::W, p: *const u8) -> Self::W;
    /// Adds 16 times bits `2 j` and `2 j + 1` of each byte of `upper`; the bytes of `w` are below 16 and `j` below 4.
    unsafe fn add_upper_bits(w: Self::W, upper: Self::W, j: usize) -> Self::W;
    /// Adds, per column, four products of weights 0..=63 with the four i8 in `x` (each in -127..=127).
    unsafe fn small_dot(sum: Self::I, w: Self::W, x: i32) -> Self::I;
    /// An empty sum of nibble products.
    unsafe fn nibble_start() -> Self::N;
    /// Adds, per column, four products of weights 0..=15 with the four i8 in `x` (each in -127..=127). At most eight calls per sum.
    unsafe fn nibble_dot(sum: Self::N, w: Self::W, x: i32) -> Self::N;
    /// The finished sum plus `bias`.
    unsafe fn nibble_finish(sum: Self::N, bias: i32) -> Self::I;
    /// An empty sum of byte products; `total` is the sum of the 32 activations of the block.
    unsafe fn byte_start(total: i32) -> Self::I;
    /// Adds, per column, four products of (weight - 128) with the four i8 in `x`. The sum is exact after all 32 activations of a block.
    unsafe fn byte_dot(sum: Self::I, w: Self::W, x: i32) -> Self::I;

    /// Sum over the lanes in the one fixed order: halves are added, four times. A tier that has its own keeps the order.
    #[inline(always)]
    unsafe fn reduce_sum(x: Self::F) -> f32 {
        let mut lanes = [0f32; LANES];
        // SAFETY: the array holds sixteen f32; the caller vouches for the tier.
        unsafe { Self::store(lanes.as_mut_ptr(), x) };
        let mut half = LANES / 2;
        while half > 0 {
            let mut i = 0;
            while i < half {
                lanes[i] += lanes[i + half];
                i += 1;
            }
            half /= 2;
        }
        lanes[0]
    }

    /// Greatest lane.
    #[inline(always)]
    unsafe fn reduce_max(x: Self::F) -> f32 {
        let mut lanes = [0f32; LANES];
        // SAFETY: the array holds sixteen f32; the caller vouches for the tier.
        unsafe { Self::store(lanes.as_mut_ptr(), x) };
        let mut half = LANES / 2;
        while half > 0 {
            let mut i = 0;
            while i < half {
                lanes[i] = if lanes[i] > lanes[i + half] { lanes[i] } else { lanes[i + half] };
                i += 1;
            }
            half /= 2;
        }
        lanes[0]
    }

    /// Sum over integer lanes (exact, so in any order).
    #[inline(always)]
    unsafe fn reduce_sum_int(x: Self::I) -> i32 {
        let mut lanes = [0i32; LANES];
        // SAFETY: the array holds sixteen i32; the caller vouches for the tier.
        unsafe { Self::store_int(lanes.as_mut_ptr(), x) };
        lanes.iter().fold(0i32, |a, &b| a.wrapping_add(b))
    }

    /// `e^x`: the Cephes polynomial, about one unit in the last place. Zero at and below -87 (no subnormal results, and minus infinity has
    /// no weight at all); above 88 as at 88.
    #[inline(always)]
    unsafe fn exp(input: Self::F) -> Self::F {
        // SAFETY: arithmetic only; the caller vouches for the tier.
        unsafe {
            let x = Self::min(Self::max(input, Self::splat(EXP_LOWEST)), Self::splat(88.0));
            let n = Self::round(Self::mul(x, Self::splat(std::f32::consts::LOG2_E)));
            let whole = Self::to_float(n);
            // ln 2 in two parts, the first with trailing zeros, so that the remainder keeps its low bits.
            let r = Self::fma(whole, Self::splat(-0.693_359_4), x);
            let r = Self::fma(whole, Self::splat(2.121_944_4e-4), r);
            let mut p = Self::splat(1.987_569_1e-4);
            p = Self::fma(p, r, Self::splat(1.398_199_9e-3));
            p = Self::fma(p, r, Self::splat(8.333_452e-3));
            p = Self::fma(p, r, Self::splat(4.166_579_6e-2));
            p = Self::fma(p, r, Self::splat(1.666_666_5e-1));
            p = Self::fma(p, r, Self::splat(0.5));
            let e = Self::add(Self::fma(p, Self::mul(r, r), r), Self::splat(1.0));
            Self::keep_above(input, EXP_LOWEST, Self::mul(e, Self::pow2(n)))
        }
    }
}

/// Instantiates a generic kernel body once per tier and dispatches on the tier at run time.
///
/// `kernel!(pub(crate) fn name(a: A, b: B) = body)` defines `unsafe fn name(tier: Tier, a: A, b: B)`, which calls `body::<L>(a, b)`
/// compiled with the features of `tier`. The body must be `#[inline(always)]`, so that its lane operations melt into the featured function.
macro_rules! kernel {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// `tier` must be supported by this CPU, and the arguments must satisfy the body's own contract.
        #[allow(clippy::too_many_arguments)]
        $vis unsafe fn $name(tier: $crate::Tier, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
            #[allow(clippy::too_many_arguments)]
            unsafe fn avx512($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: the features are enabled here; the contract of the body is passed on.
                unsafe { $body::<$crate::lanes::avx512::Avx512>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            #[allow(clippy::too_many_arguments)]
            unsafe fn avx2($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: the features are enabled here; the contract of the body is passed on.
                unsafe { $body::<$crate::lanes::avx2::Avx2>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
            #[allow(clippy::too_many_arguments)]
            unsafe fn avx_vnni($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: the features are enabled here; the contract of the body is passed on.
                unsafe { $body::<$crate::lanes::avx2::AvxVnni>($($arg),*) }
            }
            #[cfg(target_arch = "aarch64")]
            #[target_feature(enable = "neon,dotprod")]
            #[allow(clippy::too_many_arguments)]
            unsafe fn neon($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: the features are enabled here; the contract of the body is passed on.
                unsafe { $body::<$crate::lanes::neon::Neon>($($arg),*) }
            }
            // SAFETY: the caller vouches that the CPU has the features of `tier`, and for the arguments.
            unsafe {
                match tier {
                    #[cfg(target_arch = "x86_64")]
                    $crate::Tier::Avx512Vnni | $crate::Tier::Amx => avx512($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    $crate::Tier::AvxVnni => avx_vnni($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    $crate::Tier::Avx2 => avx2($($arg),*),
                    #[cfg(target_arch = "aarch64")]
                    $crate::Tier::Neon => neon($($arg),*),
                    _ => $body::<$crate::lanes::scalar::Scalar>($($arg),*),
                }
            }
        }
    };
}
pub(crate) use kernel;
