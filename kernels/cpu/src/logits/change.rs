//! What changes logits before a choice, many at once: masks and penalties.

use crate::lanes::{LANES, Lanes, kernel};
use crate::tier::Tier;

kernel!(
    /// Sets to negative infinity each of `words * 64` values whose bit is not set.
    fn forbid_of(x: *mut f32, mask: *const u64, words: usize) = forbid_body
);

#[inline(always)]
unsafe fn forbid_body<L: Lanes>(x: *mut f32, mask: *const u64, words: usize) {
    // SAFETY: the caller vouches for the values, the words and the tier.
    unsafe {
        let never = L::splat(f32::NEG_INFINITY);
        for word in 0..words {
            let bits = *mask.add(word);
            for group in 0..64 / LANES {
                let at = x.add(word * 64 + group * LANES);
                let bits = (bits >> (group * LANES)) as u32 & 0xffff;
                L::store(at, L::choose(bits, L::load(at.cast_const()), never));
            }
        }
    }
}

/// Sets to negative infinity the logit of each token whose bit is not set; tokens past the end of `mask` have none.
///
/// # Panics
/// When the tier is not supported.
pub fn forbid(tier: Tier, x: &mut [f32], mask: &[u64]) {
    assert!(tier.is_supported(), "tier {tier} is not supported here");
    let words = mask.len().min(x.len() / 64);
    // SAFETY: the tier was checked; whole words of values lie inside the slice.
    unsafe { forbid_of(tier, x.as_mut_ptr(), mask.as_ptr(), words) };
    let bits = mask.get(words).copied().unwrap_or_default();
    for (i, x) in x[words * 64..].iter_mut().enumerate() {
        if i >= 64 || bits >> i & 1 == 0 {
            *x = f32::NEG_INFINITY;
        }
    }
}

/// What tokens pay for having been seen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Penalties {
    /// Divides a logit above zero and multiplies another.
    pub repetition: f32,
    /// Subtracted for each occurrence.
    pub frequency: f32,
    /// Subtracted once from what occurred at all.
    pub presence: f32,
}

kernel!(
    /// Applies the penalties to `groups * 16` logits, each with its count.
    fn penalise_of(x: *mut f32, counts: *const f32, groups: usize, penalties: Penalties) = penalise_body
);

#[inline(always)]
unsafe fn penalise_body<L: Lanes>(x: *mut f32, counts: *const f32, groups: usize, penalties: Penalties) {
    // SAFETY: the caller vouches for the values and the tier.
    unsafe {
        let (repetition, frequency) = (L::splat(penalties.repetition), L::splat(penalties.frequency));
        let presence = L::splat(penalties.presence);
        for group in 0..groups {
            let at = x.add(group * LANES);
            let (logit, count) = (L::load(at.cast_const()), L::load(counts.add(group * LANES)));
            let repeated = L::choose(L::above(logit, 0.0), L::div(logit, repetition), L::mul(logit, repetition));
            let paid = L::sub(repeated, L::mul(count, frequency));
            L::store(at, L::sub(paid, L::keep_above(count, 0.0, presence)));
        }
    }
}

/// Applies the penalties to logits that were picked out of a row; `counts` says how often each token occurred.
///
/// # Panics
/// When the lengths differ or the tier is not supported.
pub fn penalise(tier: Tier, x: &mut [f32], counts: &[f32], penalties: Penalties) {
    assert!(tier.is_supported(), "tier {tier} is not supported here");
    assert_eq!(x.len(), counts.len(), "lengths must match");
    let whole = x.len() / LANES * LANES;
    // SAFETY: the tier was checked; whole groups lie inside both slices.
    unsafe { penalise_of(tier, x.as_mut_ptr(), counts.as_ptr(), whole / LANES, penalties) };
    let rest = x.len() - whole;
    let (mut last, mut times) = ([0f32; LANES], [0f32; LANES]);
    last[..rest].copy_from_slice(&x[whole..]);
    times[..rest].copy_from_slice(&counts[whole..]);
    // SAFETY: both arrays hold one group.
    unsafe { penalise_of(tier, last.as_mut_ptr(), times.as_ptr(), 1, penalties) };
    x[whole..].copy_from_slice(&last[..rest]);
}
