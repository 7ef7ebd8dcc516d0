//! Value-by-value operations: the gated activations.

use crate::lanes::{LANES, Lanes, kernel};
use crate::tier::Tier;

/// What a gate passes through before it meets its partner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Gate {
    /// x / (1 + e^-x): Llama and Qwen.
    #[default]
    Silu,
    /// x / (1 + e^-2u) with u = sqrt(2 / pi) * (x + 0.044715 x^3): GELU in its hyperbolic tangent form, as Gemma has it.
    GeluTanh,
}

/// 2 sqrt(2 / pi).
const GELU_SLOPE: f32 = 1.595_769;
/// GELU_SLOPE * 0.044715.
const GELU_CUBE: f32 = 0.071_354_81;

kernel!(
    /// `out[i] = gate(gate[i]) * up[i]` for `n` values, a multiple of 16.
    pub(crate) fn gated_row(kind: Gate, gate: *const f32, up: *const f32, out: *mut f32, n: usize) = gated_row_body
);

#[inline(always)]
unsafe fn gated_row_body<L: Lanes>(kind: Gate, gate: *const f32, up: *const f32, out: *mut f32, n: usize) {
    // SAFETY: the caller vouches for `n` values behind each pointer and for the tier.
    unsafe {
        let mut i = 0;
        while i < n {
            let g = L::load(gate.add(i));
            let slope = match kind {
                Gate::Silu => g,
                Gate::GeluTanh => {
                    let square = L::mul(g, g);
                    L::mul(g, L::fma(square, L::splat(GELU_CUBE), L::splat(GELU_SLOPE)))
                }
            };
            let e = L::exp(L::sub(L::splat(0.0), slope));
            let passed = L::div(g, L::add(L::splat(1.0), e));
            L::store(out.add(i), L::mul(passed, L::load(up.add(i))));
            i += LANES;
        }
    }
}

/// `out = kind(gate) * up`, value by value.
///
/// # Panics
/// When the lengths differ or are no multiple of 16, or the tier is not supported.
pub fn gated(tier: Tier, kind: Gate, gate: &[f32], up: &[f32], out: &mut [f32]) {
    assert!(tier.is_supported(), "tier {tier} is not supported here");
    assert!(
        gate.len() == up.len() && gate.len() == out.len() && gate.len().is_multiple_of(LANES),
        "lengths must match"
    );
    // SAFETY: the tier and the lengths were checked.
    unsafe { gated_row(tier, kind, gate.as_ptr(), up.as_ptr(), out.as_mut_ptr(), gate.len()) }
}
