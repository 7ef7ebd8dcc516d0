//! A scanned row: softmax weights, sums of them above borders, and the tokens between two.

use super::BLOCK;
use super::scan::{first_max, greatest};
use crate::lanes::{LANES, Lanes, kernel};
use crate::tier::Tier;

/// Marks that one pass of [`Row::masses`] looks at.
pub const MARKS: usize = 7;

/// Exponents at or below this have no weight.
const WEIGHTLESS: f32 = -87.0;

/// Which weights a row's tokens have: `e^((logit - max) * scale)`, nothing at exponents at or below -87.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Softmax {
    /// The row's greatest logit.
    pub max: f32,
    /// One over the temperature.
    pub scale: f32,
}

/// The last token that is kept, in the order of likelihood: larger logits first, of equal ones the lower id. Zeros of both signs are equal.
///
/// What is minus infinite is never kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Kept {
    /// Its logit: tokens above are kept, whatever their id.
    pub logit: f32,
    /// Its id: of tokens with that logit those up to here are kept.
    pub id: u32,
}

impl Kept {
    /// Everything.
    pub const ALL: Self = Self { logit: f32::NEG_INFINITY, id: u32::MAX };
}

/// A token and its logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// Its logit.
    pub logit: f32,
}

kernel!(
    /// Sum of the weights of those of one block's values that lie above `limit`.
    fn sum_of(x: *const f32, softmax: Softmax, limit: f32) -> f32 = sum_body
);

#[inline(always)]
unsafe fn sum_body<L: Lanes>(x: *const f32, softmax: Softmax, limit: f32) -> f32 {
    // SAFETY: the caller vouches for the values and the tier.
    unsafe {
        let mut sum = L::splat(0.0);
        for group in 0..BLOCK / LANES {
            let value = L::load(x.add(group * LANES));
            sum = L::add_above(sum, value, limit, weights::<L>(value, softmax));
        }
        L::reduce_sum(sum)
    }
}

#[inline(always)]
unsafe fn weights<L: Lanes>(value: L::F, softmax: Softmax) -> L::F {
    // SAFETY: arithmetic only; the caller vouches for the tier.
    unsafe { L::exp(L::mul(L::sub(value, L::splat(softmax.max)), L::splat(softmax.scale))) }
}

kernel!(
    /// Writes the weight of each of one block's values that lies above `limit`, zero for the others.
    fn weigh_of(x: *const f32, softmax: Softmax, limit: f32, out: *mut f32) = weigh_body
);

#[inline(always)]
unsafe fn weigh_body<L: Lanes>(x: *const f32, softmax: Softmax, limit: f32, out: *mut f32) {
    // SAFETY: the caller vouches for the values and the tier.
    unsafe {
        for group in 0..BLOCK / LANES {
            let value = L::load(x.add(group * LANES));
            L::store(out.add(group * LANES), L::keep_above(value, limit, weights::<L>(value, softmax)));
        }
    }
}

kernel!(
    /// Sums of the weights of one block's values above each of the marks.
    fn weights_above(x: *const f32, softmax: Softmax, marks: &[f32; MARKS + 1], sums: &mut [f32; MARKS + 1]) = weights_above_body
);

#[inline(always)]
unsafe fn weights_above_body<L: Lanes>(
    x: *const f32,
    softmax: Softmax,
    marks: &[f32; MARKS + 1],
    sums: &mut [f32; MARKS + 1],
) {
    // SAFETY: the caller vouches for the values and the tier.
    unsafe {
        let mut above = [L::splat(0.0); MARKS + 1];
        for group in 0..BLOCK / LANES {
            let value = L::load(x.add(group * LANES));
            let weight = weights::<L>(value, softmax);
            for i in 0..=MARKS {
                above[i] = L::add_above(above[i], value, marks[i], weight);
            }
        }
        for i in 0..=MARKS {
            sums[i] = L::reduce_sum(above[i]);
        }
    }
}

kernel!(
    /// How many of one block's values lie above each of the marks.
    fn counts_above(x: *const f32, marks: &[f32; MARKS + 1], counts: &mut [f32; MARKS + 1]) = counts_above_body
);

#[inline(always)]
unsafe fn counts_above_body<L: Lanes>(x: *const f32, marks: &[f32; MARKS + 1], counts: &mut [f32; MARKS + 1]) {
    // SAFETY: the caller vouches for the values and the tier.
    unsafe {
        let one = L::splat(1.0);
        let mut above = [L::splat(0.0); MARKS + 1];
        for group in 0..BLOCK / LANES {
            let value = L::load(x.add(group * LANES));
            for i in 0..=MARKS {
                above[i] = L::add_above(above[i], value, marks[i], one);
            }
        }
        for i in 0..=MARKS {
            counts[i] = L::reduce_sum(above[i]);
        }
    }
}

kernel!(
    /// For each of one block's values a bit: it lies above `low` and not above `high`.
    fn between_of(x: *const f32, low: f32, high: f32, bits: &mut [u32; BLOCK / LANES]) = between_body
);

#[inline(always)]
unsafe fn between_body<L: Lanes>(x: *const f32, low: f32, high: f32, bits: &mut [u32; BLOCK / LANES]) {
    // SAFETY: the caller vouches for the values and the tier.
    unsafe {
        for (group, bits) in bits.iter_mut().enumerate() {
            let value = L::load(x.add(group * LANES));
            *bits = L::above(value, low) & !L::above(value, high);
        }
    }
}

/// The weight of each value.
///
/// # Panics
/// When the lengths differ or the tier is not supported.
pub fn weigh(tier: Tier, x: &[f32], softmax: Softmax, out: &mut [f32]) {
    assert!(tier.is_supported(), "tier {tier} is not supported here");
    assert_eq!(x.len(), out.len(), "lengths must match");
    for (x, out) in x.chunks(BLOCK).zip(out.chunks_mut(BLOCK)) {
        if x.len() == BLOCK {
            // SAFETY: the tier was checked; both slices hold a block.
            unsafe { weigh_of(tier, x.as_ptr(), softmax, f32::NEG_INFINITY, out.as_mut_ptr()) };
            continue;
        }
        let (mut values, mut weights) = ([f32::NEG_INFINITY; BLOCK], [0f32; BLOCK]);
        values[..x.len()].copy_from_slice(x);
        // SAFETY: as above.
        unsafe { weigh_of(tier, values.as_ptr(), softmax, f32::NEG_INFINITY, weights.as_mut_ptr()) };
        out.copy_from_slice(&weights[..x.len()]);
    }
}

/// A row of logits with the greatest value of each block.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    tier: Tier,
    logits: &'a [f32],
    maxima: &'a [f32],
}

impl<'a> Row<'a> {
    /// `maxima` is what [`super::scan`] found, kept right by [`super::rescan`].
    ///
    /// # Panics
    /// When the tier is not supported or `maxima` is not one entry a block.
    pub fn new(tier: Tier, logits: &'a [f32], maxima: &'a [f32]) -> Self {
        assert!(tier.is_supported(), "tier {tier} is not supported here");
        assert_eq!(maxima.len(), logits.len().div_ceil(BLOCK), "one entry a block");
        Self { tier, logits, maxima }
    }

    /// Tokens of the row.
    pub fn len(&self) -> usize {
        self.logits.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.logits.is_empty()
    }

    /// The greatest logit; NaN is passed over, and an empty row gives negative infinity.
    pub fn max(&self) -> f32 {
        greatest(self.maxima)
    }

    /// The greatest logit of each block.
    pub fn maxima(&self) -> &'a [f32] {
        self.maxima
    }

    /// The token with the greatest logit, the lowest id among equals; `None` when there is no value but NaN.
    pub fn first_max(&self) -> Option<usize> {
        first_max(self.logits, self.maxima)
    }

    /// Natural logarithm of the sum of e^x over the row.
    pub fn log_sum_exp(&self) -> f64 {
        let softmax = Softmax { max: self.max(), scale: 1.0 };
        let sum: f64 = (0..self.maxima.len()).map(|block| f64::from(self.sum(block, softmax, Kept::ALL))).sum();
        f64::from(softmax.max) + sum.ln()
    }

    /// Writes the sum of the weights of each block's kept tokens.
    pub fn sums(&self, softmax: Softmax, kept: Kept, sums: &mut Vec<f32>) {
        sums.clear();
        sums.extend((0..self.maxima.len()).map(|block| self.sum(block, softmax, kept)));
    }

    fn sum(&self, block: usize, softmax: Softmax, kept: Kept) -> f32 {
        if self.is_weightless(block, softmax, kept.logit) {
            return 0.0;
        }
        self.with_block(block, kept, |x, limit| {
            // SAFETY: the tier was checked; a block of values lies behind the pointer.
            unsafe { sum_of(self.tier, x, softmax, limit) }
        })
    }

    /// Writes the weight of each kept token of a block, zero for the others, and returns how many tokens the block has.
    ///
    /// # Panics
    /// When there is no such block.
    pub fn weights(&self, block: usize, softmax: Softmax, kept: Kept, out: &mut [f32; BLOCK]) -> usize {
        self.with_block(block, kept, |x, limit| {
            // SAFETY: the tier was checked; a block of values lies behind both pointers.
            unsafe { weigh_of(self.tier, x, softmax, limit, out.as_mut_ptr()) }
        });
        BLOCK.min(self.logits.len() - block * BLOCK)
    }

    /// How much the kept tokens weigh whose logits are above each of the marks, which are not below the border's; last, what all of them
    /// weigh. Without a softmax each weighs 1.
    pub fn masses(&self, softmax: Option<Softmax>, kept: Kept, marks: [f32; MARKS]) -> [f64; MARKS + 1] {
        let mut masses = [0f64; MARKS + 1];
        let (mut all, mut sums) = ([0f32; MARKS + 1], [0f32; MARKS + 1]);
        all[..MARKS].copy_from_slice(&marks);
        for block in 0..self.maxima.len() {
            let is_skipped = match softmax {
                Some(softmax) => self.is_weightless(block, softmax, kept.logit),
                None => self.maxima[block] < kept.logit,
            };
            if is_skipped {
                continue;
            }
            self.with_block(block, kept, |x, limit| {
                all[MARKS] = limit;
                // SAFETY: the tier was checked; a block of values lies behind the pointer.
                unsafe {
                    match softmax {
                        Some(softmax) => weights_above(self.tier, x, softmax, &all, &mut sums),
                        None => counts_above(self.tier, x, &all, &mut sums),
                    }
                }
            });
            for (mass, sum) in masses.iter_mut().zip(sums) {
                *mass += f64::from(sum);
            }
        }
        masses
    }

    /// Appends the kept tokens whose logits are above `low` and not above `high`, by ascending id. False when there are more than `most`,
    /// of which only the first are appended.
    pub fn between(&self, low: f32, high: f32, kept: Kept, most: usize, out: &mut Vec<Token>) -> bool {
        let most = out.len().saturating_add(most);
        for block in 0..self.maxima.len() {
            if self.maxima[block] <= low {
                continue;
            }
            let mut bits = [0u32; BLOCK / LANES];
            self.with_block(block, kept, |x, limit| {
                // SAFETY: the tier was checked; a block of values lies behind the pointer.
                unsafe { between_of(self.tier, x, if limit > low { limit } else { low }, high, &mut bits) }
            });
            for (group, mut bits) in bits.into_iter().enumerate() {
                let start = block * BLOCK + group * LANES;
                while bits != 0 {
                    if out.len() == most {
                        return false;
                    }
                    let id = start + bits.trailing_zeros() as usize;
                    out.push(Token { id: id as u32, logit: self.logits[id] });
                    bits &= bits - 1;
                }
            }
        }
        true
    }

    /// Whether no token of the block can be kept and have weight.
    fn is_weightless(&self, block: usize, softmax: Softmax, limit: f32) -> bool {
        let max = self.maxima[block];
        max < limit || (max - softmax.max) * softmax.scale <= WEIGHTLESS
    }

    /// Calls `f` with the block's values and a limit: those above it are kept. Where a block is not whole or the border's equals end in
    /// it, its values are copied and what is not kept is negative infinity.
    fn with_block<T>(&self, block: usize, kept: Kept, f: impl FnOnce(*const f32, f32) -> T) -> T {
        let start = block * BLOCK;
        let values = &self.logits[start..self.logits.len().min(start + BLOCK)];
        let id = kept.id as usize;
        let ends_here = (start..start + BLOCK - 1).contains(&id);
        if values.len() == BLOCK && !ends_here {
            let limit = if start <= id { kept.logit.next_down() } else { kept.logit };
            return f(values.as_ptr(), limit);
        }
        let mut copy = [f32::NEG_INFINITY; BLOCK];
        copy[..values.len()].copy_from_slice(values);
        for (i, value) in copy.iter_mut().enumerate() {
            if start + i > id && *value == kept.logit {
                *value = f32::NEG_INFINITY;
            }
        }
        f(copy.as_ptr(), kept.logit.next_down())
    }
}
