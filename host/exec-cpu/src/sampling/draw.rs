//! Drawing one token from a distribution, whole or truncated.
//!
//! Weights come from the kernels' own exponential and are added in a fixed order, so a draw has the same bits on every tier.

use penstock_exec::SamplingParams;
use penstock_kernels_cpu::Tier;
use penstock_kernels_cpu::logits::{BLOCK, Kept, Row, Softmax};

use super::select::{Head, Selector};

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

/// What the parameters keep: first `min_p`, then `top_k`, then the shortest head of the rest with at least `top_p` of its weight.
pub(super) fn kept(
    tier: Tier,
    row: Row<'_>,
    softmax: Softmax,
    params: &SamplingParams,
    selector: &mut Selector,
) -> Kept {
    let mut kept = Kept::ALL;
    if params.min_p > 0.0 {
        kept = Kept { logit: softmax.max + params.min_p.min(1.0).ln() / softmax.scale, id: u32::MAX };
    }
    let top_k = params.top_k as usize;
    if top_k > 0 && top_k < row.len() {
        kept = selector.end(tier, row, softmax, kept, Head::Tokens(top_k));
    }
    if params.top_p < 1.0 {
        kept = selector.end(tier, row, softmax, kept, Head::Share(f64::from(params.top_p)));
    }
    kept
}

/// Draws one of the kept tokens: the one at which the running sum of weights, by ascending id, passes `u` of all they weigh.
pub(super) fn draw(row: Row<'_>, softmax: Softmax, kept: Kept, u: f64, sums: &mut Vec<f32>) -> Option<u32> {
    row.sums(softmax, kept, sums);
    let mut left = u * sums.iter().map(|&sum| f64::from(sum)).sum::<f64>();
    // Rounding may carry the target past the last weight; the last token that has any is then the answer.
    let last = sums.iter().rposition(|&sum| sum > 0.0)?;
    let mut block = 0;
    while block < last && left >= f64::from(sums[block]) {
        left -= f64::from(sums[block]);
        block += 1;
    }
    let mut weights = [0f32; BLOCK];
    let tokens = row.weights(block, softmax, kept, &mut weights);
    pick(&weights[..tokens], left).map(|i| (block * BLOCK + i) as u32)
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
