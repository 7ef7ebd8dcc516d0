//! Value-by-value operations: the gated activation.

use crate::lanes::{LANES, Lanes, kernel};
use crate::tier::Tier;

kernel!(
    /// `out[i] = gate[i] / (1 + e^-gate[i]) * up[i]` for `n` values, a multiple of 16.
    pub(crate) fn swiglu_row(gate: *const f32, up: *const f32, out: *mut f32, n: usize) = swiglu_row_body
);

#[inline(always)]
unsafe fn swiglu_row_body<L: Lanes>(gate: *const f32, up: *const f32, out: *mut f32, n: usize) {
    // SAFETY: the caller vouches for `n` values behind each pointer and for the tier.
    unsafe {
        let mut i = 0;
        while i < n {
            let g = L::load(gate.add(i));
            let e = L::exp(L::sub(L::splat(0.0), g));
            let silu = L::div(g, L::add(L::splat(1.0), e));
            L::store(out.add(i), L::mul(silu, L::load(up.add(i))));
            i += LANES;
        }
    }
}

/// `out = silu(gate) * up`, value by value.
///
/// # Panics
/// When the lengths differ or are no multiple of 16, or the tier is not supported.
pub fn swiglu(tier: Tier, gate: &[f32], up: &[f32], out: &mut [f32]) {
    assert!(tier.is_supported(), "tier {tier} is not supported here");
    assert!(
        gate.len() == up.len() && gate.len() == out.len() && gate.len().is_multiple_of(LANES),
        "lengths must match"
    );
    // SAFETY: the tier and the lengths were checked.
    unsafe { swiglu_row(tier, gate.as_ptr(), up.as_ptr(), out.as_mut_ptr(), gate.len()) }
}
