//! Rotary position embedding.

use crate::lanes::{LANES, Lanes, kernel};
use crate::tier::Tier;

/// Which two values of a head are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopePairs {
    /// 2i and 2i + 1, as GGUF's Llama tensors are arranged.
    Interleaved,
    /// i and i + head_dim / 2, as Hugging Face's are.
    Halves,
}

/// Cosines and sines of one position, arranged for the kernels.
///
/// Angles are formed and evaluated in f64 and rounded once, so that far positions lose nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RopeRow {
    /// Factor of a value itself, per place in the head.
    own: Vec<f32>,
    /// Factor of its partner, per place in the head (with the sign).
    partner: Vec<f32>,
}

impl RopeRow {
    /// A row with the memory for heads of `head_dim` values.
    pub fn with_room(head_dim: usize) -> Self {
        Self { own: Vec::with_capacity(head_dim), partner: Vec::with_capacity(head_dim) }
    }

    /// Bytes of such a row, itself included.
    pub const fn bytes(head_dim: usize) -> usize {
        size_of::<Self>() + 2 * head_dim * size_of::<f32>()
    }

    /// Fills the row for `position`; `frequencies` holds one angle per step for each of the head_dim / 2 pairs.
    pub fn set(&mut self, pairs: RopePairs, frequencies: &[f64], position: u64) {
        let half = frequencies.len();
        self.own.resize(2 * half, 0.0);
        self.partner.resize(2 * half, 0.0);
        for (i, frequency) in frequencies.iter().enumerate() {
            let (sin, cos) = (position as f64 * frequency).sin_cos();
            let (a, b) = match pairs {
                RopePairs::Interleaved => (2 * i, 2 * i + 1),
                RopePairs::Halves => (i, i + half),
            };
            self.own[a] = cos as f32;
            self.own[b] = cos as f32;
            self.partner[a] = -sin as f32;
            self.partner[b] = sin as f32;
        }
    }
}

kernel!(
    /// Rotates `heads` heads of `head_dim` values in place; both tables hold `head_dim` values.
    fn rotate_heads(x: *mut f32, heads: usize, head_dim: usize, own: *const f32, partner: *const f32, halves: bool) = rotate_body
);

#[inline(always)]
unsafe fn rotate_body<L: Lanes>(
    x: *mut f32,
    heads: usize,
    head_dim: usize,
    own: *const f32,
    partner: *const f32,
    halves: bool,
) {
    // Either way a value becomes own * cos + partner * (±sin), the second product rounded first: equal bits per pair in both layouts.
    // SAFETY: the caller vouches for the heads, the tables and the tier.
    unsafe {
        for head in 0..heads {
            let x = x.add(head * head_dim);
            let mut i = 0;
            if halves {
                let half = head_dim / 2;
                while i < half {
                    let (a, b) = (L::load(x.add(i)), L::load(x.add(half + i)));
                    let low = L::fma(a, L::load(own.add(i)), L::mul(b, L::load(partner.add(i))));
                    let high = L::fma(b, L::load(own.add(half + i)), L::mul(a, L::load(partner.add(half + i))));
                    L::store(x.add(i), low);
                    L::store(x.add(half + i), high);
                    i += LANES;
                }
            } else {
                while i < head_dim {
                    let a = L::load(x.add(i));
                    let b = L::mul(L::swap_pairs(a), L::load(partner.add(i)));
                    L::store(x.add(i), L::fma(a, L::load(own.add(i)), b));
                    i += LANES;
                }
            }
        }
    }
}

/// Rotates every head in `x` (whole heads of the row's length) in place.
///
/// # Panics
/// When `x` is not whole heads, the head length is no multiple of 16 (of 32 for halves), or the tier is not supported.
pub fn rope(tier: Tier, pairs: RopePairs, row: &RopeRow, x: &mut [f32]) {
    assert!(tier.is_supported(), "tier {tier} is not supported here");
    let head_dim = row.own.len();
    let step = if pairs == RopePairs::Halves { 2 * LANES } else { LANES };
    assert!(head_dim > 0 && head_dim.is_multiple_of(step) && x.len().is_multiple_of(head_dim), "whole heads only");
    let (own, partner) = (row.own.as_ptr(), row.partner.as_ptr());
    // SAFETY: the tier and the lengths were checked; both tables hold `head_dim` values.
    unsafe {
        rotate_heads(tier, x.as_mut_ptr(), x.len() / head_dim, head_dim, own, partner, pairs == RopePairs::Halves)
    }
}
