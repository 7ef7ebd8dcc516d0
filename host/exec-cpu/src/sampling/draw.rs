//! Drawing one token from a distribution, whole or truncated.
//!
//! Weights come from the kernels' own exponential and are added in a fixed order, so a draw has the same bits on every tier.

use std::cmp::Ordering;

use penstock_exec::SamplingParams;
use penstock_kernels_cpu::{Tier, logits};

/// Tokens summed at once; sums of such groups are added in f64.
const GROUP: usize = 1024;

/// Exponents below this have no weight at all.
const WEIGHTLESS: f32 = 87.0;

/// First guess at how far below the likeliest token the border lies, in nats.
const WINDOW: f32 = -6.0;

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

/// A token that may be drawn.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    id: u32,
    logit: f32,
    /// Relative to the likeliest token.
    weight: f32,
}

impl Candidate {
    /// Likeliest first, of equal ones the lower id first.
    fn order(&self, other: &Self) -> Ordering {
        other.logit.total_cmp(&self.logit).then(self.id.cmp(&other.id))
    }
}

/// The tokens that a truncation keeps.
#[derive(Debug, Default)]
pub(super) struct Candidates {
    /// By ascending id.
    tokens: Vec<Candidate>,
    /// The same tokens while the border is searched.
    search: Vec<Candidate>,
    logits: Vec<f32>,
    weights: Vec<f32>,
}

impl Candidates {
    pub(super) fn with_room(vocabulary: usize) -> Self {
        Self {
            tokens: Vec::with_capacity(vocabulary),
            search: Vec::with_capacity(vocabulary),
            logits: Vec::with_capacity(vocabulary),
            weights: Vec::with_capacity(vocabulary),
        }
    }

    pub(super) const fn room_bytes(vocabulary: usize) -> usize {
        vocabulary * (2 * size_of::<Candidate>() + 2 * size_of::<f32>())
    }

    /// Selects what `truncation` keeps: first `min_p`, then `top_k`, then the smallest head of the rest with at least `top_p` of its weight.
    ///
    /// Sorting a vocabulary would be the longest part of a step. So a window below the largest logit is searched, and widened until it
    /// holds the answer; inside it the border is found by halving, which sorts next to nothing.
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
        let mut window = if min_p > 0.0 { floor } else { WINDOW };
        loop {
            window = window.max(floor);
            self.collect(tier, logits, max, scale, window);
            // Everything outside the window is less likely than everything inside.
            let complete = window <= floor || self.tokens.len() >= top_k;
            if self.tokens.len() > top_k {
                self.search.clone_from(&self.tokens);
                let border = *self.search.select_nth_unstable_by(top_k - 1, Candidate::order).1;
                self.keep_to(border);
            }
            if top_p >= 1.0 && complete {
                return;
            }
            let inside: f64 = self.tokens.iter().map(|token| f64::from(token.weight)).sum();
            let total = if complete {
                inside
            } else {
                *whole.get_or_insert_with(|| {
                    let groups = logits.chunks(GROUP).zip(scratch.chunks_mut(GROUP));
                    groups.map(|(l, s)| f64::from(logits::exp_sum(tier, l, max, scale, s))).sum()
                })
            };
            if complete || (top_k == usize::MAX && inside >= top_p * total) {
                self.cut(top_p * total);
                return;
            }
            window *= 2.0;
        }
    }

    /// All tokens with `(logit - max) * scale >= window`, by ascending id.
    fn collect(&mut self, tier: Tier, logits: &[f32], max: f32, scale: f32, window: f32) {
        let lowest = max + window / scale;
        self.tokens.clear();
        self.logits.clear();
        for (group, values) in logits.chunks(64).enumerate() {
            if !values.iter().fold(false, |any, &logit| any | (logit >= lowest)) {
                continue;
            }
            for (i, &logit) in values.iter().enumerate().filter(|&(_, &logit)| logit >= lowest) {
                self.tokens.push(Candidate { id: (group * 64 + i) as u32, logit, weight: 0.0 });
                self.logits.push(logit);
            }
        }
        self.weights.resize(self.tokens.len(), 0.0);
        logits::exp_sum(tier, &self.logits, max, scale, &mut self.weights);
        for (token, &weight) in self.tokens.iter_mut().zip(&self.weights) {
            token.weight = weight;
        }
    }

    /// Drops what is less likely than `border`.
    fn keep_to(&mut self, border: Candidate) {
        self.tokens.retain(|token| token.order(&border).is_le());
    }

    /// Keeps the shortest head, in order of likelihood, that weighs at least `target`.
    fn cut(&mut self, target: f64) {
        self.search.clone_from(&self.tokens);
        let mut between = self.search.as_mut_slice();
        let mut left = target;
        // Everything more likely than `between` is kept and weighs target - left; the border lies in `between`.
        while between.len() > 32 {
            let half = between.len() / 2;
            between.select_nth_unstable_by(half, Candidate::order);
            let weight: f64 = between[..half].iter().map(|token| f64::from(token.weight)).sum();
            if weight >= left {
                between = &mut between[..half];
            } else {
                left -= weight;
                between = &mut between[half..];
            }
        }
        between.sort_unstable_by(Candidate::order);
        let border = between.iter().find(|token| {
            left -= f64::from(token.weight);
            left <= 0.0
        });
        // Rounding may leave a trace of the target: then everything is kept.
        if let Some(&border) = border {
            self.keep_to(border);
        }
    }

    /// Draws one of the kept tokens: the one at which the running sum, by ascending id, passes `u`.
    pub(super) fn draw(&mut self, u: f64) -> Option<u32> {
        self.weights.clear();
        self.weights.extend(self.tokens.iter().map(|token| token.weight));
        let total: f64 = self.weights.iter().map(|&w| f64::from(w)).sum();
        pick(&self.weights, u * total).map(|i| self.tokens[i].id)
    }
}
