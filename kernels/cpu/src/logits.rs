//! Scans over one row of logits.

use crate::lanes::{LANES, Lanes, kernel};
use crate::tier::Tier;

kernel!(
    /// Greatest of `groups * 16` values (negative infinity for none; NaN is passed over).
    fn max_of(x: *const f32, groups: usize) -> f32 = max_body
);

#[inline(always)]
unsafe fn max_body<L: Lanes>(x: *const f32, groups: usize) -> f32 {
    // SAFETY: the caller vouches for the values and the tier.
    unsafe {
        let mut max = L::splat(f32::NEG_INFINITY);
        for group in 0..groups {
            max = L::max(L::load(x.add(group * LANES)), max);
        }
        L::reduce_max(max)
    }
}

kernel!(
    /// Writes `e^((x - max) * scale)` for `groups * 16` values and returns their sum: lanes first, in f32, then the fixed tree.
    fn exp_of(x: *const f32, groups: usize, max: f32, scale: f32, out: *mut f32) -> f32 = exp_body
);

#[inline(always)]
unsafe fn exp_body<L: Lanes>(x: *const f32, groups: usize, max: f32, scale: f32, out: *mut f32) -> f32 {
    // SAFETY: the caller vouches for the values and the tier.
    unsafe {
        let (max, scale, zero) = (L::splat(max), L::splat(scale), L::splat(0.0));
        let mut sum = zero;
        for group in 0..groups {
            let e = L::exp(L::mul(L::sub(L::load(x.add(group * LANES)), max), scale));
            L::store(out.add(group * LANES), e);
            sum = L::add(sum, e);
        }
        L::reduce_sum(sum)
    }
}

kernel!(
    /// Whether `groups * 16` values are all finite.
    fn finite_of(x: *const f32, groups: usize) -> bool = finite_body
);

#[inline(always)]
unsafe fn finite_body<L: Lanes>(x: *const f32, groups: usize) -> bool {
    // SAFETY: the caller vouches for the values and the tier.
    unsafe {
        let zero = L::splat(0.0);
        let mut poison = zero;
        for group in 0..groups {
            poison = L::fma(L::load(x.add(group * LANES)), zero, poison);
        }
        L::reduce_sum(poison) == 0.0
    }
}

/// Whether no value is infinite or NaN.
///
/// # Panics
/// When the tier is not supported.
pub fn all_finite(tier: Tier, x: &[f32]) -> bool {
    assert!(tier.is_supported(), "tier {tier} is not supported here");
    let groups = x.len() / LANES;
    // SAFETY: the tier was checked; whole groups lie inside the slice.
    unsafe { finite_of(tier, x.as_ptr(), groups) && x[groups * LANES..].iter().all(|x| x.is_finite()) }
}

/// Greatest value; NaN is passed over, and an empty row gives negative infinity.
///
/// # Panics
/// When the tier is not supported.
pub fn max(tier: Tier, x: &[f32]) -> f32 {
    assert!(tier.is_supported(), "tier {tier} is not supported here");
    let groups = x.len() / LANES;
    // SAFETY: the tier was checked; whole groups lie inside the slice.
    let max = unsafe { max_of(tier, x.as_ptr(), groups) };
    x[groups * LANES..].iter().fold(max, |max, &x| if x > max { x } else { max })
}

/// Index of the greatest value, the lowest one among equals; `None` when there is no value but NaN.
///
/// # Panics
/// When the tier is not supported.
pub fn argmax(tier: Tier, x: &[f32]) -> Option<usize> {
    let max = max(tier, x);
    x.iter().position(|&x| x == max)
}

/// Writes `e^((x - max) * scale)` and returns the sum: the softmax numerators and their denominator. Exponents at or below -87 give 0.
///
/// # Panics
/// When the lengths differ or the tier is not supported.
pub fn exp_sum(tier: Tier, x: &[f32], max: f32, scale: f32, out: &mut [f32]) -> f32 {
    assert!(tier.is_supported(), "tier {tier} is not supported here");
    assert_eq!(x.len(), out.len(), "lengths must match");
    let groups = x.len() / LANES;
    // SAFETY: the tier was checked; whole groups lie inside both slices.
    let mut sum = unsafe { exp_of(tier, x.as_ptr(), groups, max, scale, out.as_mut_ptr()) };
    let tail = groups * LANES;
    if tail < x.len() {
        let (mut values, mut results) = ([f32::NEG_INFINITY; LANES], [0f32; LANES]);
        values[..x.len() - tail].copy_from_slice(&x[tail..]);
        // SAFETY: both arrays hold one group.
        unsafe { exp_of(tier, values.as_ptr(), 1, max, scale, results.as_mut_ptr()) };
        for (out, e) in out[tail..].iter_mut().zip(results) {
            *out = e;
            sum += e;
        }
    }
    sum
}

/// Natural logarithm of the sum of e^x over the row.
///
/// `scratch` must be as long as `x`; it is overwritten.
///
/// # Panics
/// When the lengths differ or the tier is not supported.
pub fn log_sum_exp(tier: Tier, x: &[f32], scratch: &mut [f32]) -> f64 {
    let max = max(tier, x);
    f64::from(max) + f64::from(exp_sum(tier, x, max, 1.0, scratch)).ln()
}
