//! Drawing one token from a distribution, whole or truncated.
//!
//! Weights come from the kernels' own exponential and are added in a fixed order, so a draw has the same bits on every tier.

use penstock_exec::SamplingParams;
use penstock_kernels_cpu::{Tier, logits};

/// Tokens summed at once; sums of such groups are added in f64.
const GROUP: usize = 1024;

/// Exponents below this have no weight at all.
const WEIGHTLESS: f32 = 87.0;

/// A number in 0..1 that depends on seed and token index alone: two rounds of SplitMix64's finaliser over the counter.
pub fn uniform(seed: u64, token_index: u64) -> f64 {
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |mut z: u64| {
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let stream = mix(seed.wrapping_add(GOLDEN));
    let bits = mix(stream.wrapping_add(token_index.wrapping_add(1).wrapping_mul(GOLDEN)));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// Draws from the softmax of all logits at `scale` = 1 / temperature: the token at which the running sum, by ascending id, passes `u`.
pub(super) fn from_all(tier: Tier, logits: &[f32], max: f32, scale: f32, u: f64, weights: &mut [f32]) -> Option<u32> {
    let sums: Vec<f64> = logits
        .chunks(GROUP)
        .zip(weights.chunks_mut(GROUP))
        .map(|(logits, weights)| f64::from(logits::exp_sum(tier, logits, max, scale, weights)))
        .collect();
    let mut left = u * sums.iter().sum::<f64>();
    // Rounding may carry the target past the last weight; the last token that has any is then the answer.
    let last = sums.iter().rposition(|&sum| sum > 0.0)?;
    let mut group = 0;
    while group < last && left >= sums[group] {
        left -= sums[group];
        group += 1;
    }
    let start = group * GROUP;
    let weights = &weights[start..logits.len().min(start + GROUP)];
    pick(weights, left).map(|i| (start + i) as u32)
}

/// The first index at which the running sum passes `target`, else the last one with any weight.
fn pick(weights: &[f32], target: f64) -> Option<usize> {
    let mut sum = 0.0;
    let mut last = None;
    for (i, &weight) in weights.iter().enumerate() {
        if weight > 0.0 {
            sum += f64::from(weight);
            last = Some(i);
            if sum > target {
                break;
            }
        }
    }
    last
}

/// Which part of a distribution is kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Truncation {
    /// Most tokens; `usize::MAX` is all.
    top_k: usize,
    /// Probability to keep, 1 for all.
    top_p: f64,
    /// Least weight relative to the likeliest token, 0 for all.
    min_p: f32,
}

impl Truncation {
    /// What the parameters keep; `None` for everything.
    pub(super) fn of(params: &SamplingParams, vocabulary: usize) -> Option<Self> {
        let top_k = match params.top_k as usize {
            0 => usize::MAX,
            k if k >= vocabulary => usize::MAX,
            k => k,
        };
        let this = Self { top_k, top_p: f64::from(params.top_p), min_p: params.min_p };
        let whole = top_k == usize::MAX && this.top_p >= 1.0 && this.min_p <= 0.0;
        (!whole).then_some(this)
    }
}

/// The likeliest tokens, likeliest first, of equal ones the lower id first, with weights relative to the likeliest.
#[derive(Debug, Default)]
pub(super) struct Candidates {
    tokens: Vec<(u32, f32)>,
    logits: Vec<f32>,
    weights: Vec<f32>,
}

impl Candidates {
    /// Selects what `truncation` keeps: first `min_p`, then `top_k`, then the smallest head of the rest with at least `top_p` of its weight.
    ///
    /// Sorting a whole vocabulary would be the longest part of a step, so a window below the largest logit is sorted, and widened until it
    /// holds the answer.
    pub(super) fn select(
        &mut self,
        tier: Tier,
        logits: &[f32],
        max: f32,
        scale: f32,
        truncation: Truncation,
        scratch: &mut [f32],
    ) {
        let Truncation { top_k, top_p, min_p } = truncation;
        let floor = if min_p > 0.0 { min_p.min(1.0).ln() } else { -WEIGHTLESS };
        let mut whole: Option<f64> = None;
        let mut window = if min_p > 0.0 { floor } else { -8.0 };
        loop {
            window = window.max(floor);
            self.collect(tier, logits, max, scale, window);
            let complete = window <= floor || self.tokens.len() >= top_k;
            if self.tokens.len() > top_k {
                self.tokens.truncate(top_k);
                self.weights.truncate(top_k);
            }
            if complete || top_k == usize::MAX {
                let total = if complete {
                    self.weights.iter().map(|&w| f64::from(w)).sum()
                } else {
                    *whole.get_or_insert_with(|| {
                        let groups = logits.chunks(GROUP).zip(scratch.chunks_mut(GROUP));
                        groups.map(|(l, s)| f64::from(logits::exp_sum(tier, l, max, scale, s))).sum()
                    })
                };
                if self.cut(top_p * total) || complete {
                    return;
                }
            }
            window *= 2.0;
        }
    }

    /// All tokens with `(logit - max) * scale >= window`, sorted, and their weights.
    fn collect(&mut self, tier: Tier, logits: &[f32], max: f32, scale: f32, window: f32) {
        let lowest = max + window / scale;
        self.tokens.clear();
        let found = logits.iter().enumerate().filter(|&(_, &logit)| logit >= lowest);
        self.tokens.extend(found.map(|(id, &logit)| (id as u32, logit)));
        self.tokens.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        self.logits.clear();
        self.logits.extend(self.tokens.iter().map(|&(_, logit)| logit));
        self.weights.resize(self.tokens.len(), 0.0);
        logits::exp_sum(tier, &self.logits, max, scale, &mut self.weights);
    }

    /// Cuts behind the token at which the running sum reaches `target`; false when it does not.
    fn cut(&mut self, target: f64) -> bool {
        let mut sum = 0.0;
        for (i, &weight) in self.weights.iter().enumerate() {
            sum += f64::from(weight);
            if sum >= target {
                self.weights.truncate(i + 1);
                self.tokens.truncate(i + 1);
                return true;
            }
        }
        false
    }

    /// Draws one of the candidates.
    pub(super) fn draw(&self, u: f64) -> Option<u32> {
        let total: f64 = self.weights.iter().map(|&w| f64::from(w)).sum();
        pick(&self.weights, u * total).map(|i| self.tokens[i].0)
    }
}
