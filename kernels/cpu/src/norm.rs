//! Root-mean-square normalisation.

use crate::lanes::{LANES, Lanes, kernel};
use crate::tier::Tier;

kernel!(
    /// `out[i] = x[i] * (1 / sqrt(mean(x^2) + epsilon)) * weight[i]` for `n` values.
    ///
    /// Squares are summed in sixteen lanes (value i in lane i mod 16, in ascending order) and the lanes in the fixed tree. `n` must be a
    /// multiple of 16; `out` may be `x`.
    pub(crate) fn rms_norm_row(x: *const f32, weight: *const f32, epsilon: f32, out: *mut f32, n: usize) = rms_norm_row_body
);

#[inline(always)]
unsafe fn rms_norm_row_body<L: Lanes>(x: *const f32, weight: *const f32, epsilon: f32, out: *mut f32, n: usize) {
    // SAFETY: the caller vouches for `n` values behind each pointer and for the tier.
    unsafe {
        let mut squares = L::splat(0.0);
        let mut i = 0;
        while i < n {
            let v = L::load(x.add(i));
            squares = L::fma(v, v, squares);
            i += LANES;
        }
        let scale = L::splat(1.0 / (L::reduce_sum(squares) / n as f32 + epsilon).sqrt());
        let mut i = 0;
        while i < n {
            L::store(out.add(i), L::mul(L::mul(L::load(x.add(i)), scale), L::load(weight.add(i))));
            i += LANES;
        }
    }
}

/// Normalises one row: `out = x / rms(x) * weight`.
///
/// # Panics
/// When the lengths differ or are no multiple of 16, or the tier is not supported.
pub fn rms_norm(tier: Tier, x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    assert!(tier.is_supported(), "tier {tier} is not supported here");
    assert!(x.len() == weight.len() && x.len() == out.len() && x.len().is_multiple_of(LANES), "lengths must match");
    // SAFETY: the tier and the lengths were checked.
    unsafe { rms_norm_row(tier, x.as_ptr(), weight.as_ptr(), epsilon, out.as_mut_ptr(), x.len()) }
}

/// Normalises every head in `x` (whole heads of `weight`'s length) in place, each with the same weights.
///
/// # Panics
/// When `x` is not whole heads, a head is no multiple of 16, or the tier is not supported.
pub fn rms_norm_heads(tier: Tier, x: &mut [f32], weight: &[f32], epsilon: f32) {
    assert!(tier.is_supported(), "tier {tier} is not supported here");
    let n = weight.len();
    assert!(n > 0 && n.is_multiple_of(LANES) && x.len().is_multiple_of(n), "whole heads only");
    for head in x.chunks_exact_mut(n) {
        let x = head.as_mut_ptr();
        // SAFETY: the tier and the lengths were checked; each value is read before it is written, so that both may be one head.
        unsafe { rms_norm_row(tier, x.cast_const(), weight.as_ptr(), epsilon, x, n) }
    }
}
